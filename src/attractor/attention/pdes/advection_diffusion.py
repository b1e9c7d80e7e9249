"""Advection with diffusion: attention drifts along the keys while it spreads."""

from dataclasses import dataclass
from typing import Any, ClassVar

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
class AdvectionDiffusion:
    """``dA/dt = alpha L A + beta G A``, by Euler steps; beta > 0 moves mass to lower keys.

    G has the face flux ``(A_j + A_{j+1}) / 2``, zero at walls, so that mass is conserved. Stable steps
    keep A >= 0 if ``|beta| <= 2 alpha``.

    Args:
        alpha, beta: Numbers, or tensors that broadcast as ``[heads, 1, 1]``.
    """

    alpha: float | Tensor = 0.10
    beta: float | Tensor = 0.03
    linear: ClassVar[bool] = True
    reach: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_coefficient(self, "alpha")
        check_coefficient(self, "beta", signed=True)

    __eq__ = same

    def max_dt(self, axis: str = "key") -> float:
        """Return the largest stable step size: ``min(1 / (2 alpha), 2 alpha / beta²)``.

        On both axes it is half as large.
        """
        limits = [min(over(1, 2 * a), over(2 * a, b * b)) for a, b in each_head(self.alpha, self.beta)]
        return min(limits) / dimensions(axis)

    def check(self, dt: float, axis: str = "key") -> None:
        """Raise a ValueError if steps of size dt are unstable."""
        formula = "min(1 / (2 alpha), 2 alpha / beta²)"
        check_dt(self, dt, axis, f"{formula} / 2" if axis == "both" else formula)

    def interval(self, name: str, dt: float, axis: str = "key") -> tuple[float | Tensor, float | Tensor]:
        """Return the lowest and the highest value of a coefficient for steps of size dt.

        The interval of beta keeps A non-negative, which is narrower than stability without walls.
        """
        check_step_size(dt)
        if name == "alpha":
            return 0.0, 0.5 / (dt * dimensions(axis))
        return -2 * self.alpha, 2 * self.alpha

    def to_unit(self, dt: float, axis: str = "key") -> dict[str, float | Tensor]:
        """Return the coordinates that `LearnedPDE` learns: beta, and alpha between its bounds."""
        most = _most(dt, axis)
        alpha: Any = self.alpha
        beta: Any = self.beta
        least = abs(beta) / 2
        return {"alpha": (alpha - least) / (most - least), "beta": beta / (2 * most)}

    @staticmethod
    def from_unit(unit: dict[str, Tensor], dt: float, axis: str = "key") -> dict[str, Tensor]:
        """Return alpha and beta for coordinates, with ``|beta| <= 2 alpha <= 1 / dt``."""
        most = _most(dt, axis)
        beta = 2 * most * unit["beta"]
        least = beta.abs() / 2
        return {"alpha": least + (most - least) * unit["alpha"], "beta": beta}

    def step(
        self, u: Tensor, velocity: Tensor | None, line: Neighbourhood, dt: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return u after one step, and the velocity unchanged."""
        spread = plus(u, dt * self.alpha, line.laplacian(u))
        return plus(spread, dt * self.beta, line.gradient(u)), velocity


def _most(dt: float, axis: str) -> float:
    """Return the largest alpha that is learned, with a margin for float32 below the stable limit."""
    check_step_size(dt)
    return (1 - 1e-6) / (2 * dt * dimensions(axis))
