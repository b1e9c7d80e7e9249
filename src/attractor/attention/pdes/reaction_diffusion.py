"""Reaction with diffusion: strong attention grows while it spreads."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attractor.attention.pdes.line import Neighbourhood
from attractor.attention.pdes.pde import (
    check_coefficient,
    check_dt,
    check_factor,
    check_step_size,
    dimensions,
    each_head,
    over,
    plus,
    same,
)
from attractor.common.checks import check_number, check_tensor


@dataclass(frozen=True)
class ReactionDiffusion:
    """``dA/dt = alpha L A + beta A (1 - A)``, by Euler steps. It does not conserve mass.

    Args:
        alpha, beta: Numbers, or tensors that broadcast as ``[heads, 1, 1]``.
        split: Whether to apply the exact logistic reaction over the whole pseudo-time first, and then
            take the steps of diffusion alone. This is another discretisation, with other results.
    """

    alpha: float | Tensor = 0.10
    beta: float | Tensor = 0.02
    split: bool = False
    linear: ClassVar[bool] = False
    reach: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_coefficient(self, "alpha")
        check_coefficient(self, "beta", signed=True)

    __eq__ = same

    def max_dt(self, axis: str = "key") -> float:
        """Return the largest stable step size: ``1 / (2 alpha + |beta|)``, without beta if split.

        On both axes, 4 alpha replaces 2 alpha.
        """
        d, reacts = dimensions(axis), not self.split
        return min(over(1, 2 * d * a + reacts * abs(b)) for a, b in each_head(self.alpha, self.beta))

    def check(self, dt: float, axis: str = "key") -> None:
        """Raise a ValueError if steps of size dt are unstable."""
        spread = "4 alpha" if axis == "both" else "2 alpha"
        check_dt(self, dt, axis, f"1 / ({spread})" if self.split else f"1 / ({spread} + |beta|)")

    def interval(self, name: str, dt: float, axis: str = "key") -> tuple[float | Tensor, float | Tensor]:
        """Return the lowest and the highest value of a coefficient for steps of size dt.

        If split, every beta is stable, and weights may grow by a factor of e per step.
        """
        check_step_size(dt)
        if name == "alpha":
            return 0.0, 0.5 / (dt * dimensions(axis))
        if self.split:
            return -1 / dt, 1 / dt
        # The margin covers what float32 loses where the two terms cancel.
        most = (1 - 1e-6) / dt - 2 * dimensions(axis) * self.alpha
        return -most, most

    def start(self, u: Tensor, time: float) -> Tensor:
        """Return u before the first step: if split, after the reaction over all of the pseudo-time."""
        if not self.split:
            return u
        check_tensor("u", u, "[..., positions]")
        growth = self.beta * time
        if not torch.compiler.is_compiling():
            check_number("time", time)
            check_factor(u, growth, u)
            limit = int(math.log(torch.finfo(u.dtype).max)) - 1
            if not isinstance(growth, Tensor) and not abs(growth) <= limit:
                raise ValueError(
                    f"beta times the pseudo-time is {growth:g}; more than {limit} overflows {u.dtype}, "
                    "so use a smaller beta or less pseudo-time"
                )
        return logistic(u, growth.to(u.device, u.dtype) if isinstance(growth, Tensor) else growth)

    def step(
        self, u: Tensor, velocity: Tensor | None, line: Neighbourhood, dt: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return u after one step, and the velocity unchanged."""
        spread = plus(u, dt * self.alpha, line.laplacian(u))
        return spread if self.split else plus(spread, dt * self.beta, u * (1 - u)), velocity


def logistic(u: Tensor, time: float | Tensor) -> Tensor:
    """Return the solution of ``du/dt = u (1 - u)`` after a time, for u in [0, 1]."""
    functions: Any = torch if isinstance(time, Tensor) else math
    return u * functions.exp(time) / (1 + u * functions.expm1(time))
