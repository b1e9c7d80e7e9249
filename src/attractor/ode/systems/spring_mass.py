"""A chain of masses and springs between two walls: linear, of any dimension (AttNS, Eq. 11)."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.common.checks import check_whole
from attractor.ode.systems.system import check_state, check_times, uniform
from attractor.storage.limits import check_memory


@dataclass(frozen=True)
class SpringMass:
    """n masses in a row; state (q_1..q_n, p_1..p_n).

    ``q_i' = p_i / m_i`` and ``p_i' = k_i (q_{i-1} - q_i) + k_{i+1} (q_{i+1} - q_i)`` with
    ``q_0 = q_{n+1} = 0``. The paper does not give its constants; the code it follows draws
    ``k = 5 max(N(1, 1/4^2), 0.2)`` and ``m = max(N(1, 1/4^2), 0.2)``, and so do we, from `seed`.
    Initial positions and momenta are uniform in [-2.5, 2.5] (Table 4).
    """

    n: int = 20
    seed: int = 0
    k: Tensor = field(init=False, repr=False, compare=False)
    m: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_whole("n", self.n, 1, "a chain needs at least one mass")
        check_whole("seed", self.seed, 0)
        check_memory(f"the constants of {self.n:,} masses", 32 * self.n, "use fewer masses")
        generator = torch.Generator().manual_seed(self.seed)
        draw = lambda count: (
            1 + torch.randn(count, generator=generator, dtype=torch.float64) / 4
        ).clamp(min=0.2)
        object.__setattr__(self, "k", 5 * draw(self.n + 1))
        object.__setattr__(self, "m", draw(self.n))

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 2 * self.n

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        q, p = u.chunk(2, -1)
        tension = self.k.to(u) * pad(q, (1, 1)).diff()
        return torch.cat((p / self.m.to(u), tension.diff()), -1)

    def energy(self, u: Tensor) -> Tensor:
        """Kinetic energy and the springs'."""
        check_state(self, u)
        q, p = u.chunk(2, -1)
        return (p**2 / self.m.to(u)).sum(-1) / 2 + (self.k.to(u) * pad(q, (1, 1)).diff() ** 2).sum(
            -1
        ) / 2

    def exact(self, t: Tensor, u0: Tensor) -> Tensor:
        """States at times t ``[n]`` after u0, by the matrix exponential in float64."""
        check_state(self, u0)
        check_times(t, u0)
        columns = self(0.0, torch.eye(self.dim, dtype=torch.float64, device=u0.device))
        flow = torch.linalg.matrix_exp(t.double()[:, None, None] * columns)
        return torch.einsum("...i,tij->t...j", u0.double(), flow).to(u0.dtype)

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        return uniform(n, [-2.5] * self.dim, [2.5] * self.dim, generator, dtype, device)
