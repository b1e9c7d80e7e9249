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
    """All rooted trees with that many nodes: 1, 1, 2, 4, 9, 20, 48, ... of them."""
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
    """Number of nodes."""
    return 1 + sum(map(size, tree))


@cache
def density(tree: Tree) -> int:
    """The product of the sizes of all subtrees (gamma in the literature)."""
    return size(tree) * prod(map(density, tree))


def defect(
    nodes: int,
    b: Sequence[Number],
    a: Sequence[Sequence[Number]],
    other: Sequence[Sequence[Number]] | None = None,
) -> Number:
    """By how much the conditions with that many nodes are missed, at most. 0: all hold.

    Args:
        nodes: of the trees.
        b, a: the tableau: fractions, for an exact answer, or floats.
        other: for partitioned methods, which alternate between `a` and `other` with the depth of a node.
    """
    exact = isinstance(b[0], Fraction)
    depths, other = (1, a) if other is None else (2, other)
    matrices = [_matrix(a, len(other), exact), _matrix(other, len(a), exact)]

    @cache
    def weights(tree: Tree, depth: int) -> Any:
        """w_i(tree) at each stage i."""
        found = np.ones(len(matrices[depth]), dtype=object if exact else float)
        for child in tree:
            found = found * (matrices[depth] @ weights(child, (depth + 1) % depths))
        return found

    row = np.array(b, dtype=object if exact else float)
    one = Fraction(1) if exact else 1.0
    return max(abs(row @ weights(tree, 0) - one / density(tree)) for tree in trees(nodes))


def rosenbrock_defect(nodes: int, b: Any, alpha: Any, beta: Any) -> float:
    """Return by how much the order conditions of a Rosenbrock method with that many nodes are missed.

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
    """The rows, which may end early, as a matrix with that many columns."""
    made = np.zeros((len(rows), columns), dtype=object if exact else float)
    for i, row in enumerate(rows):
        made[i, : len(row)] = row
    return made
