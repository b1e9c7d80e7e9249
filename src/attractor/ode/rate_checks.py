"""Whether a rate depends on the time, and repeats with its period."""

import torch
from torch import Tensor

from attractor.core.rates import Rate, call_rate
from attractor.core.step import with_parameters
from attractor.ode.trajectories import GOLDEN

TIMES = 64  # at which the rate is checked for a dependence on t


def check_rate(
    rate: Rate,
    points: list[tuple[float, Tensor, Tensor | None]],
    horizon: float,
    period: float | None,
) -> None:
    """Raise if a rate depends on t without a period, or does not repeat with it.

    Args:
        points: Times, states and parameters at which it is called. Initial states alone may hide a
            dependence: at rest, friction that varies in time does not show.
    """

    def call(t: float, u: Tensor, p: Tensor | None) -> Tensor:
        with torch.no_grad():
            time = torch.tensor(t, dtype=u.dtype, device=u.device)
            return call_rate(with_parameters(rate, p), time, u)

    for i in range(TIMES):
        start, u, p = points[i % len(points)]
        # Unevenly spread, or a rate that repeats with their spacing would look constant.
        other = start + (i + i * GOLDEN % 1) / TIMES * horizon
        before, after = call(start, u, p), call(other, u, p)
        if not bool(torch.isfinite(before).all() and torch.isfinite(after).all()):
            raise ValueError("the rate is non-finite at sampled states; change sample or the rate")
        if period is None:
            if not torch.equal(before, after):
                raise ValueError(
                    f"the rate depends on t (at one state it differs between t = {start:g} and t = "
                    f"{other:g}), but a correction sees slope and state only; if the rate repeats in t, "
                    "pass its period=, otherwise make t a component of the state (with rate 1)"
                )
            continue
        later = call(other + period, u, p)
        size = torch.maximum(after.abs(), later.abs()).amax(0)  # [d]
        if not bool(((later - after).abs() <= 1e-6 * size + 1e-9 * size.max()).all()):
            raise ValueError(
                f"the rate does not repeat with period = {period:g}: at t = {other:g} and one period "
                f"later it differs by {(later - after).abs().max().item():.2g}"
            )
