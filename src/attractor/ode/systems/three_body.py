"""Three bodies in a plane under their own gravity."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, uniform


@dataclass(frozen=True)
class ThreeBody:
    """Unit masses, G = 1; state (x_1, y_1, x_2, y_2, x_3, y_3, then the velocities likewise).

    Initial states lie within `spread` of the figure-eight orbit of Chenciner and Montgomery (2000),
    which returns to `FIGURE_EIGHT` after `PERIOD`. `softening` is added in squares to distances,
    for studies with close encounters.
    """

    softening: float = 0.0
    spread: float = 0.01

    PERIOD: ClassVar[float] = 6.32591398
    FIGURE_EIGHT: ClassVar[tuple[float, ...]] = (
        *(0.97000436, -0.24308753, -0.97000436, 0.24308753, 0.0, 0.0),
        *(0.466203685, 0.43236573, 0.466203685, 0.43236573, -0.93240737, -0.86473146),
    )

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 12

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        q, v = u.chunk(2, -1)
        a, b, c = q.split(2, -1)
        ab, bc, ca = self._pull(b - a), self._pull(c - b), self._pull(a - c)
        return torch.cat((v, ab - ca, bc - ab, ca - bc), -1)

    def energy(self, u: Tensor) -> Tensor:
        """Kinetic and gravitational energy."""
        check_state(self, u)
        q, v = u.chunk(2, -1)
        a, b, c = q.split(2, -1)
        distances = [((x**2).sum(-1) + self.softening**2).sqrt() for x in (b - a, c - b, a - c)]
        return (v**2).sum(-1) / 2 - sum(1 / d for d in distances)

    def _pull(self, apart: Tensor) -> Tensor:
        return apart * ((apart**2).sum(-1, keepdim=True) + self.softening**2) ** -1.5

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        low = [x - self.spread for x in self.FIGURE_EIGHT]
        high = [x + self.spread for x in self.FIGURE_EIGHT]
        return uniform(n, low, high, generator, dtype, device)
