"""Hénon-Heiles: a star in a galaxy, separable Hamiltonian, ordered and chaotic orbits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, uniform


@dataclass(frozen=True)
class HenonHeiles:
    """``H = (p_x^2 + p_y^2 + x^2 + y^2) / 2 + x^2 y - y^3 / 3``; state (x, y, p_x, p_y).

    Orbits below the escape energy 1/6 stay bounded; initial states, uniform in [-1/4, 1/4], are.
    """

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 4

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        x, y, px, py = u.unbind(-1)
        return torch.stack((px, py, -x - 2 * x * y, -y - x**2 + y**2), -1)

    def energy(self, u: Tensor) -> Tensor:
        """The Hamiltonian."""
        check_state(self, u)
        x, y, px, py = u.unbind(-1)
        return (px**2 + py**2 + x**2 + y**2) / 2 + x**2 * y - y**3 / 3

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        return uniform(n, [-0.25] * 4, [0.25] * 4, generator, dtype, device)
