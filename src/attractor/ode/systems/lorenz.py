"""The Lorenz attractor: three dimensions, chaotic, dissipative."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, uniform


@dataclass(frozen=True)
class Lorenz:
    """Lorenz 1963; state (x, y, z), initially in a box around the attractor."""

    sigma: float = 10.0
    rho: float = 28.0
    beta: float = 8 / 3

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 3

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        x, y, z = u.unbind(-1)
        return torch.stack((self.sigma * (y - x), x * (self.rho - z) - y, x * y - self.beta * z), -1)

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        return uniform(n, [-15, -20, 5], [15, 20, 45], generator, dtype, device)
