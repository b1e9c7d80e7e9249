"""Logistic growth: one dimension, non-linear, exact solution known."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, check_times, uniform


@dataclass(frozen=True)
class Logistic:
    """``u' = growth * u (1 - u / capacity)``, initially between 5 % and 150 % of the capacity."""

    growth: float = 1.0
    capacity: float = 1.0

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 1

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        return self.growth * u * (1 - u / self.capacity)

    def exact(self, t: Tensor, u0: Tensor) -> Tensor:
        """States at times t ``[n]`` after u0."""
        check_state(self, u0)
        check_times(t, u0)
        decay = (-self.growth * t.to(u0)).exp().reshape(-1, *[1] * u0.dim())
        return self.capacity * u0 / (u0 + (self.capacity - u0) * decay)

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        return uniform(n, [0.05 * self.capacity], [1.5 * self.capacity], generator, dtype, device)
