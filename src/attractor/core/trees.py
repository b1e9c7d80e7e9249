"""Rooted trees, and the order conditions of Runge-Kutta methods that they index.

Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I", II.2: a method has order p
if and only if ``sum_i b_i w_i(tree) = 1 / density(tree)`` for every rooted tree of at most p nodes.
A tree is written as the tuple of the trees that hang from its root: ``()`` is a single node.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any, TypeAlias

import numpy as np

Tree: TypeAlias = tuple[Any, ...]
Number: TypeAlias = Fraction | float


@cache
def trees(nodes: int) -> tuple[Tree, ...]:
    """Return all rooted trees with a number of nodes; there are 1, 1, 2, 4, 9, 20, 48, ..."""
    smaller = [tree for n in range(1, nodes) for tree in trees(n)]

    def forests(left: int, first: int) -> Iterator[Tree]:
        if left == 0:
            yield ()
        for i, tree in enumerate(smaller[first:], first):
            if size(tree) <= left:
                for rest in forests(left - size(tree), i):
                    yield (tree, *rest)

    return tuple(forests(nodes - 1, 0))


@cache
def size(tree: Tree) -> int:
    """Return the number of nodes."""
    return 1 + sum(map(size, tree))


@cache
def density(tree: Tree) -> int:
    """Return the product of the sizes of all subtrees (gamma in the literature)."""
    return size(tree) * prod(map(density, tree))


def defect(
    nodes: int,
    b: Sequence[Number],
    a: Sequence[Sequence[Number]],
    other: Sequence[Sequence[Number]] | None = None,
) -> Number:
    """Return the largest residual of the order conditions with a number of nodes; 0 if all hold.

    Args:
        nodes: Number of nodes of the trees.
        b, a: The tableau, in fractions for an exact result, or in floats.
        other: Second tableau of a partitioned method, which alternates between `a` and `other` with the
            depth of a node.
    """
    exact = isinstance(b[0], Fraction)
    depths, other = (1, a) if other is None else (2, other)
    matrices = [_matrix(a, len(other), exact), _matrix(other, len(a), exact)]

    @cache
    def weights(tree: Tree, depth: int) -> Any:
        """Return w_i(tree) for each stage i."""
        product = np.ones(len(matrices[depth]), dtype=object if exact else float)
        for child in tree:
            product = product * (matrices[depth] @ weights(child, (depth + 1) % depths))
        return product

    row = np.array(b, dtype=object if exact else float)
    one = Fraction(1) if exact else 1.0
    return max(abs(row @ weights(tree, 0) - one / density(tree)) for tree in trees(nodes))


def rosenbrock_defect(nodes: int, b: Any, alpha: Any, beta: Any) -> float:
    """Return the largest residual of the order conditions of a Rosenbrock method.

    Hairer and Wanner II, IV.7: the conditions of Runge-Kutta methods, where a node with one child takes
    ``beta = alpha + Gamma`` in place of alpha.

    Args:
        b, alpha, beta: Arrays ``[s]`` and ``[s, s]`` of the standard form.
    """

    @cache
    def weights(tree: Tree) -> Any:
        product = np.ones(len(b))
        for child in tree:
            product = product * ((beta if len(tree) == 1 else alpha) @ weights(child))
        return product

    return max(abs(float(b @ weights(tree)) - 1 / density(tree)) for tree in trees(nodes))


def _matrix(rows: Sequence[Sequence[Number]], columns: int, exact: bool) -> Any:
    """Return rows of different lengths as a matrix, padded with zeros."""
    matrix = np.zeros((len(rows), columns), dtype=object if exact else float)
    for i, row in enumerate(rows):
        matrix[i, : len(row)] = row
    return matrix
