"""Diffusion: peaks of attention spread to their neighbours."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attractor.attention.pdes.line import Neighbourhood
from attractor.attention.pdes.pde import (
    check_coefficient,
    check_dt,
    check_step_size,
    dimensions,
    each_head,
    over,
    plus,
    same,
)


@dataclass(frozen=True)
class Diffusion:
    """``dA/dt = alpha L A``, by Euler steps. Stable steps conserve mass and keep A >= 0.

    Args:
        alpha: A number, or a tensor that broadcasts as ``[heads, 1, 1]``.
    """

    alpha: float | Tensor = 0.10
    linear: ClassVar[bool] = True
    reach: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_coefficient(self, "alpha")

    __eq__ = same

    def max_dt(self, axis: str = "key") -> float:
        """Return the largest stable step size: ``1 / (2 alpha)``, or half of it on both axes."""
        return min(over(1, 2 * alpha) for (alpha,) in each_head(self.alpha)) / dimensions(axis)

    def check(self, dt: float, axis: str = "key") -> None:
        """Raise a ValueError if steps of size dt are unstable."""
        check_dt(self, dt, axis, "1 / (4 alpha)" if axis == "both" else "1 / (2 alpha)")

    def interval(self, name: str, dt: float, axis: str = "key") -> tuple[float | Tensor, float | Tensor]:
        """Return the lowest and the highest alpha for which steps of size dt are stable."""
        check_step_size(dt)
        return 0.0, 0.5 / (dt * dimensions(axis))

    def step(
        self, u: Tensor, velocity: Tensor | None, line: Neighbourhood, dt: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return u after one step, and the velocity unchanged."""
        return plus(u, dt * self.alpha, line.laplacian(u)), velocity
