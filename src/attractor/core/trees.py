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


def stage_weights(
    tree: Tree, a: Sequence[Sequence[Number]], other: Sequence[Sequence[Number]]
) -> list[Number]:
    """w_i(tree) at each stage i. For partitioned methods `a` and `other` alternate with depth."""
    children = [stage_weights(child, other, a) for child in tree]
    return [
        prod((sum(a_ij * w for a_ij, w in zip(row, child)) for child in children), start=Fraction(1))
        for row in a
    ]


def defect(
    nodes: int,
    b: Sequence[Number],
    a: Sequence[Sequence[Number]],
    other: Sequence[Sequence[Number]] | None = None,
) -> Number:
    """By how much the conditions with that many nodes are missed, at most. 0: all hold."""
    other = a if other is None else other
    misses: list[Any] = [
        abs(
            sum(b_i * w for b_i, w in zip(b, stage_weights(tree, a, other))) - Fraction(1, density(tree))
        )
        for tree in trees(nodes)
    ]
    return max(misses)
