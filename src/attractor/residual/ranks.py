"""Correlation coefficients with ties: Pearson, Spearman's rho and Kendall's tau-b.

They equal those of `scipy.stats`, which is not required.

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

from attractor.common.checks import check_tensor, check_values

EXHAUSTIVE = 7  # largest n for which all permutations are tried: 5,040
SHUFFLES = 5_000


def pearson(x: Tensor, y: Tensor) -> float:
    """Return the linear correlation of ``[n]`` and ``[n]``; NaN if one is constant up to rounding."""
    check_columns(x, y)
    return _pearson(x, y).item()


def spearman(x: Tensor, y: Tensor) -> float:
    """Return the linear correlation of the ranks; ties have their mean rank."""
    check_columns(x, y)
    return _pearson(ranks(x), ranks(y)).item()


def kendall(x: Tensor, y: Tensor) -> float:
    """Return tau-b: concordant minus discordant pairs, relative to the pairs that are not tied."""
    check_columns(x, y)
    return _kendall(x, y).item()


def p_value(correlation: Callable[[Tensor, Tensor], float], x: Tensor, y: Tensor) -> float:
    """Return the fraction of the permutations of y whose correlation is as strong.

    For more than 7 values it is that of 5,000 random permutations.

    Args:
        correlation: `kendall` or `spearman`.
        x, y: Values ``[n]``.
    """
    strength, n = abs(correlation(x, y)), len(y)
    if math.isnan(strength):
        return math.nan
    if n <= EXHAUSTIVE:
        orders = torch.tensor(list(permutations(range(n))))
    else:
        generator = torch.Generator().manual_seed(0)
        shuffles = [torch.randperm(n, generator=generator) for _ in range(SHUFFLES)]
        orders = torch.stack([torch.arange(n), *shuffles])
    rows = _kendall if correlation is kendall else _pearson
    x, y = ranks(x), ranks(y)
    chunks = orders.split(max(1, 2**22 // n**2))  # n² values per permutation
    count = sum(int((rows(x, y[chunk]).abs() >= strength - 1e-12).sum()) for chunk in chunks)
    return count / len(orders)


def ranks(x: Tensor) -> Tensor:
    """Return ranks from 1; ties have their mean rank."""
    below = (x[:, None] > x).sum(1)
    return below + ((x[:, None] == x).sum(1) + 1) / 2


def check_columns(x: Any, y: Any) -> None:
    """Raise an error unless x and y are tensors of the same number of real values."""
    for name, column in (("x", x), ("y", y)):
        check_tensor(name, column, "[n]", floating=False)
        check_values(name, column)
        if column.is_complex() or column.dim() != 1:
            raise ValueError(f"{name} is {column.dtype} {list(column.shape)}; pass real values [n]")
    if len(x) != len(y) or not len(x):
        raise ValueError(f"x has {len(x)} values and y {len(y)}; a correlation needs pairs")


def _pearson(x: Tensor, y: Tensor) -> Tensor:
    """Correlate ``[n]`` with each row of ``[..., n]``."""
    scaled = (z.double() / z.double().abs().amax(-1, keepdim=True) for z in (x, y))  # zeros become NaN
    x, y = (z - z.mean(-1, keepdim=True) for z in scaled)
    result = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    varies = (x.abs().amax(-1) > 1e-14) & (y.abs().amax(-1) > 1e-14)
    return torch.where(varies, result.clamp(-1, 1), math.nan)


def _kendall(x: Tensor, y: Tensor) -> Tensor:
    """Correlate ``[n]`` with each row of ``[..., n]``."""
    greater = lambda z: (z[..., :, None] > z[..., None, :]).double()  # unsigned types have no negatives
    a, b = (greater(z) - greater(z).mT for z in (x, y))
    total = lambda z: z.sum((-2, -1))
    return total(a * b) / (total(a.square()) * total(b.square())).sqrt()  # 0 / 0 is NaN
