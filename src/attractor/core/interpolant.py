"""States inside a step: a polynomial through both ends, with the rates there and the scheme's own terms.

All interpolants have the nested form of Hairer, Norsett and Wanner (I, II.6 and II.10), theta in [0, 1]:

    u + theta (c_0 + (1 - theta) (c_1 + theta (c_2 + (1 - theta) (c_3 + ...))))

where c_0 to c_2 make the cubic Hermite polynomial and further coefficients raise its order. For a
Rosenbrock scheme with rows of its own, c_0 is the difference of both ends and the rows give the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attractor.core.rates import Rate, add_increment, call_rate, weighted_sum
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.scheme import Scheme


def hermite(u: Tensor, u1: Tensor, k0: Tensor, k1: Tensor, h: Any) -> list[Tensor]:
    """Return the coefficients c_0 to c_2 of the cubic with states u, u1 and rates k0, k1 at its ends."""
    rise = u1 - u
    return [rise, h * k0 - rise, 2 * rise - h * (k0 + k1)]


def coefficients(
    scheme: Scheme | Rosenbrock,
    f: Rate,
    t: Any,
    h: Any,
    u: Tensor,
    u1: Tensor,
    stages: Sequence[Tensor],
    k1: Tensor,
) -> list[Tensor]:
    """Return the coefficients c_i ``[*batch, d]`` of the step of size h from u at t to u1.

    Args:
        stages: Stages of the scheme.
        k1: Rate at u1.
    """
    if isinstance(scheme, Rosenbrock):  # its stages are no rates
        if scheme.dense_rows:
            return [u1 - u] + [h * weighted_sum(row, stages) for row in scheme.dense_rows]
        return hermite(u, u1, call_rate(f, t, u), k1, h)
    inner = hermite(u, u1, stages[0], k1, h)
    if not scheme.dense_weights:
        return inner
    rates = [*stages] if scheme.first_same_as_last else [*stages, k1]
    for row in scheme.extra_stages:
        rates.append(call_rate(f, t + sum(row) * h, add_increment(u, h, row, rates)))
    return inner + [h * weighted_sum(row, rates) for row in scheme.dense_weights]


def evaluate(u: Tensor, u1: Tensor, inner: Sequence[Tensor], theta: Any) -> Tensor:
    """Return the states at theta, a number or a tensor that broadcasts against u."""
    value = inner[-1]
    for i in range(len(inner) - 1, 0, -1):
        value = inner[i - 1] + (theta if i % 2 == 0 else 1 - theta) * value
    value = u + theta * value
    # Near the largest number of a type a cubic between two finite states may not be finite.
    return torch.where(torch.isfinite(value.detach()), value, (1 - theta) * u + theta * u1)
