"""HIRES: how light steers the shape of plants, eight substances."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, uniform


@dataclass(frozen=True)
class HIRES:
    """The high irradiance response of photomorphogenesis (Schäfer 1975; Hairer and Wanner II, IV.10).

    Concentrations of eight substances; the sum of the last two is conserved (`energy`). `REFERENCE` is
    the published state at the time `END`, from `START` at time 0 (Test Set for IVP Solvers). Initial
    states are drawn around `START`.
    """

    START: ClassVar[tuple[float, ...]] = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0057)
    END: ClassVar[float] = 321.8122
    REFERENCE: ClassVar[tuple[float, ...]] = (
        0.7371312573325668e-3, 0.1442485726316185e-3, 0.5888729740967575e-4, 0.1175651343283149e-2,
        0.2386356198831331e-2, 0.6238968252742796e-2, 0.2849998395185769e-2, 0.2850001604814231e-2,
    )  # fmt: skip

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 8

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        a, b, c, d, e, f, g, h = u.unbind(-1)
        bound = 280 * f * h - 1.81 * g
        rates = (
            -1.71 * a + 0.43 * b + 8.32 * c + 0.0007,
            1.71 * a - 8.75 * b,
            -10.03 * c + 0.43 * d + 0.035 * e,
            8.32 * b + 1.71 * c - 1.12 * d,
            -1.745 * e + 0.43 * f + 0.43 * g,
            -280 * f * h + 0.69 * d + 1.71 * e - 0.43 * f + 0.69 * g,
            bound,
            -bound,
        )
        return torch.stack(rates, -1)

    def energy(self, u: Tensor) -> Tensor:
        """The amount of the last substance, free and bound."""
        check_state(self, u)
        return u[..., 6] + u[..., 7]

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states: each concentration of `START` times a number from 0.8 to 1.2."""
        low, high = ([x * factor for x in self.START] for factor in (0.8, 1.2))
        return uniform(n, low, high, generator, dtype, device)
