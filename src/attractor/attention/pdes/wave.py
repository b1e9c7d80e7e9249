"""The wave equation: peaks of attention split and travel."""

from dataclasses import dataclass
from typing import ClassVar

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


@dataclass(frozen=True)
class Wave:
    """``d²A/dt² = c² L A``, by symplectic Euler steps from rest.

    The steps conserve mass, but A may become negative.

    Args:
        c: Speed, a number or a tensor that broadcasts as ``[heads, 1, 1]``.
    """

    c: float | Tensor = 0.15
    linear: ClassVar[bool] = True
    reach: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_coefficient(self, "c")

    __eq__ = same

    def max_dt(self, axis: str = "key") -> float:
        """Return the largest stable step size: ``1 / c``, or ``1 / (c sqrt 2)`` on both axes."""
        return min(over(1, abs(c)) for (c,) in each_head(self.c)) / dimensions(axis) ** 0.5

    def check(self, dt: float, axis: str = "key") -> None:
        """Raise a ValueError if steps of size dt are unstable."""
        check_dt(self, dt, axis, "1 / (c sqrt 2)" if axis == "both" else "1 / c")

    def interval(self, name: str, dt: float, axis: str = "key") -> tuple[float | Tensor, float | Tensor]:
        """Return the lowest and the highest c for which steps of size dt are stable."""
        check_step_size(dt)
        return 0.0, 1 / (dt * dimensions(axis) ** 0.5)

    def to_unit(self, dt: float, axis: str = "key") -> dict[str, float | Tensor]:
        """Return the coordinate in which `LearnedPDE` learns c: c² over its largest stable value."""
        share = self.c / self.interval("c", dt, axis)[1]
        return {"c": share * share}  # a power of a float would raise an OverflowError

    @staticmethod
    def from_unit(unit: dict[str, Tensor], dt: float, axis: str = "key") -> dict[str, Tensor]:
        """Return c for a coordinate. At 0, c is 1e-6 of its limit, so that the gradient is finite."""
        most = Wave().interval("c", dt, axis)[1]
        return {"c": most * (unit["c"] + 1e-12).sqrt()}

    def step(
        self, u: Tensor, velocity: Tensor | None, line: Neighbourhood, dt: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return u and its velocity after one step."""
        speed = dt * self.c**2
        force = line.laplacian(u)
        if not torch.compiler.is_compiling():
            check_factor(u, speed, force)
        if velocity is None:
            velocity = (speed.to(u.device, u.dtype) if isinstance(speed, Tensor) else speed) * force
        else:
            velocity = plus(velocity, speed, force)
        return plus(u, dt, velocity), velocity
