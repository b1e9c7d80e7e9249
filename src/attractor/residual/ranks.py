"""Correlations of two columns of numbers, ties allowed: Pearson's, Spearman's rho, Kendall's tau-b.

>>> import torch
>>> x, y = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 3, 2, 4])
>>> round(kendall(x, y), 4), round(spearman(x, y), 4)
(0.6667, 0.8)
"""

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from attractor.core.checks import check_tensor, check_values

EXHAUSTIVE = 7  # up to so many numbers every order is tried: 5,040
SHUFFLES = 5_000


def pearson(x: Tensor, y: Tensor) -> float:
    """The linear correlation of ``[n]`` and ``[n]``; NaN if one is constant but for rounding."""
    check_columns(x, y)
    return _pearson(x, y).item()


def spearman(x: Tensor, y: Tensor) -> float:
    """Pearson's of the ranks; tied numbers share the mean of theirs."""
    check_columns(x, y)
    return _pearson(ranked(x), ranked(y)).item()


def kendall(x: Tensor, y: Tensor) -> float:
    """tau-b: pairs in the same order less pairs in opposite order, over the pairs that are not tied."""
    check_columns(x, y)
    return _kendall(x, y).item()


def check_columns(x: Any, y: Any) -> None:
    """Raise unless x and y are tensors of as many real numbers each."""
    for name, column in (("x", x), ("y", y)):
        check_tensor(name, column, "[n]", floating=False)
        check_values(name, column)
        if column.is_complex() or column.dim() != 1:
            raise ValueError(f"{name} is {column.dtype} {list(column.shape)}; give real numbers [n]")
    if len(x) != len(y) or not len(x):
        raise ValueError(f"x has {len(x)} numbers and y {len(y)}; a correlation is of pairs")


def ranked(x: Tensor) -> Tensor:
    """Ranks from 1, tied numbers the mean of theirs."""
    below = (x[:, None] > x).sum(1)
    return below + ((x[:, None] == x).sum(1) + 1) / 2


def p_value(correlation: Callable[[Tensor, Tensor], float], x: Tensor, y: Tensor) -> float:
    """The part of all orders of y (of 5,000 random ones beyond 7 numbers) that correlate as strongly.

    The correlation is `kendall` or `spearman`.
    """
    found, n = abs(correlation(x, y)), len(y)
    if math.isnan(found):
        return math.nan
    if n <= EXHAUSTIVE:
        orders = torch.tensor(list(permutations(range(n))))
    else:
        draw = torch.Generator().manual_seed(0)
        orders = torch.stack(
            [torch.arange(n), *(torch.randperm(n, generator=draw) for _ in range(SHUFFLES))]
        )
    along = _kendall if correlation is kendall else _pearson
    x, y = ranked(x), ranked(y)
    parts = orders.split(max(1, 2**22 // n**2))  # n x n numbers for each order
    strong = sum(int((along(x, y[part]).abs() >= found - 1e-12).sum()) for part in parts)
    return strong / len(orders)


def _pearson(x: Tensor, y: Tensor) -> Tensor:
    """Of ``[n]`` with each row of ``[..., n]``."""
    scaled = (z.double() / z.double().abs().amax(-1, keepdim=True) for z in (x, y))  # zeros become NaN
    x, y = (z - z.mean(-1, keepdim=True) for z in scaled)
    found = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    varies = (x.abs().amax(-1) > 1e-14) & (y.abs().amax(-1) > 1e-14)
    return torch.where(varies, found.clamp(-1, 1), math.nan)


def _kendall(x: Tensor, y: Tensor) -> Tensor:
    """Of ``[n]`` with each row of ``[..., n]``."""
    above = lambda z: (
        z[..., :, None] > z[..., None, :]
    ).double()  # of any type: bytes cannot be negative
    a, b = (above(z) - above(z).mT for z in (x, y))
    total = lambda z: z.sum((-2, -1))
    return total(a * b) / (total(a.square()) * total(b.square())).sqrt()  # 0 / 0 is NaN
