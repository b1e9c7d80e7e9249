"""The van der Pol oscillator: from gentle (mu about 1) to stiff (mu of hundreds)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, uniform


@dataclass(frozen=True)
class VanDerPol:
    """``x'' = mu (1 - x^2) x' - x``; state (x, x'), initially uniform in [-2, 2]."""

    mu: float = 1.0

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 2

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        x, v = u.unbind(-1)
        return torch.stack((v, self.mu * (1 - x**2) * v - x), -1)

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        return uniform(n, [-2, -2], [2, 2], generator, dtype, device)
