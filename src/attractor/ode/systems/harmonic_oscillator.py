"""The harmonic oscillator: linear, exact solution known."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, check_times, uniform


@dataclass(frozen=True)
class HarmonicOscillator:
    """``q' = p, p' = -omega^2 q``; state (q, p), initially uniform in [-1, 1]."""

    omega: float = 1.0

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 2

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        q, p = u.unbind(-1)
        return torch.stack((p, -(self.omega**2) * q), -1)

    def energy(self, u: Tensor) -> Tensor:
        """Kinetic and potential energy."""
        check_state(self, u)
        q, p = u.unbind(-1)
        return (p**2 + (self.omega * q) ** 2) / 2

    def exact(self, t: Tensor, u0: Tensor) -> Tensor:
        """States at times t ``[n]`` after u0."""
        check_state(self, u0)
        check_times(t, u0)
        q, p = u0.unbind(-1)
        phase = self.omega * t.to(u0).reshape(-1, *[1] * q.dim())
        cos, sin = phase.cos(), phase.sin()
        return torch.stack((q * cos + p / self.omega * sin, p * cos - self.omega * q * sin), -1)

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        return uniform(n, [-1, -1], [1, 1], generator, dtype, device)
