"""A ball on a spring that swings: two degrees of freedom, chaotic (AttNS, Eq. 12)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, uniform


@dataclass(frozen=True)
class ElasticPendulum:
    """State (theta, r, theta', r'): the angle from the vertical, the spring's length, their rates.

    The paper's Eq. 12 prints ``theta'' = (-g sin theta - theta' r') / r``; the Coriolis term needs
    a 2. As printed the energy drifts, with the 2 it is conserved. Initial angles are uniform in
    [0, pi/8], the spring has its rest length and nothing moves (Table 4).
    """

    k: float = 40.0
    m: float = 1.0
    length: float = 10.0
    g: float = 9.8

    def __post_init__(self) -> None:
        if self.m == 0:
            raise ValueError("m = 0: the mass divides the force of the spring; pass a mass above 0")

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 4

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        theta, r, omega, v = u.unbind(-1)
        turn = (-self.g * theta.sin() - 2 * omega * v) / r
        stretch = r * omega**2 - self.k / self.m * (r - self.length) + self.g * theta.cos()
        return torch.stack((omega, v, turn, stretch), -1)

    def energy(self, u: Tensor) -> Tensor:
        """Kinetic energy, the spring's, and gravity's."""
        check_state(self, u)
        theta, r, omega, v = u.unbind(-1)
        kinetic = self.m * (v**2 + (r * omega) ** 2) / 2
        return kinetic + self.k * (r - self.length) ** 2 / 2 - self.m * self.g * r * theta.cos()

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        low, high = [0.0, self.length, 0, 0], [math.pi / 8, self.length, 0, 0]
        return uniform(n, low, high, generator, dtype, device)
