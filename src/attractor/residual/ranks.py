"""Correlations of two columns of numbers, ties allowed: Pearson's, Spearman's rho, Kendall's tau-b.

>>> import torch
>>> x, y = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 3, 2, 4])
>>> round(kendall(x, y), 4), round(spearman(x, y), 4)
(0.6667, 0.8)
"""

import math
from collections.abc import Callable
from itertools import permutations

import torch
from torch import Tensor

EXHAUSTIVE = 7  # up to so many numbers every order is tried: 5,040
SHUFFLES = 5_000


def pearson(x: Tensor, y: Tensor) -> float:
    """The linear correlation of ``[n]`` and ``[n]``; NaN if one is constant."""
    x, y = (z.double() - z.double().mean() for z in (x, y))
    size = (x.norm() * y.norm()).item()
    if x.abs().max() <= 1e-300 or y.abs().max() <= 1e-300:
        return math.nan
    return min(1.0, max(-1.0, torch.dot(x, y).item() / size))


def spearman(x: Tensor, y: Tensor) -> float:
    """Pearson's of the ranks; tied numbers share the mean of theirs."""
    return pearson(ranked(x), ranked(y))


def kendall(x: Tensor, y: Tensor) -> float:
    """tau-b: pairs in the same order less pairs in opposite order, over the pairs that are not tied."""
    a, b = ((z[:, None] - z).sign().double() for z in (x, y))
    untied = (a.square().sum() * b.square().sum()).sqrt().item()
    return (a * b).sum().item() / untied if untied else math.nan


def ranked(x: Tensor) -> Tensor:
    """Ranks from 1, tied numbers the mean of theirs."""
    below = (x[:, None] > x).sum(1)
    return below + ((x[:, None] == x).sum(1) + 1) / 2


def p_value(correlation: Callable[[Tensor, Tensor], float], x: Tensor, y: Tensor) -> float:
    """The part of all orders of y (of 5,000 random ones beyond 7 numbers) that correlate as strongly."""
    found = abs(correlation(x, y))
    if math.isnan(found):
        return math.nan
    n = len(y)
    if n <= EXHAUSTIVE:
        orders = [torch.tensor(order) for order in permutations(range(n))]
    else:
        generator = torch.Generator().manual_seed(0)
        orders = [torch.arange(n), *(torch.randperm(n, generator=generator) for _ in range(SHUFFLES))]
    return sum(abs(correlation(x, y[order])) >= found - 1e-12 for order in orders) / len(orders)
