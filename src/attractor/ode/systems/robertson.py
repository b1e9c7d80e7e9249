"""Robertson's chemical kinetics: the classical stiff problem."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, checked_dtype, uniform


@dataclass(frozen=True)
class Robertson:
    """Three concentrations with rates 0.04, 1e4 and 3e7; their sum is conserved (`energy`).

    Explicit schemes need steps of about 1e-3 to 1e-4 however smooth the solution: a stress problem.
    Initial states have the first substance between 1/2 and 1 and the rest in the third. `REFERENCE` is
    the published state at the time `END`, from `START` at time 0 (Test Set for IVP Solvers).
    """

    START: ClassVar[tuple[float, ...]] = (1.0, 0.0, 0.0)
    END: ClassVar[float] = 1e11
    REFERENCE: ClassVar[tuple[float, ...]] = (
        0.2083340149701255e-7, 0.8333360770334713e-13, 0.9999999791665050,
    )  # fmt: skip

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 3

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        a, b, c = u.unbind(-1)
        slow, back, fast = 0.04 * a, 1e4 * b * c, 3e7 * b**2
        return torch.stack((back - slow, slow - back - fast, fast), -1)

    def energy(self, u: Tensor) -> Tensor:
        """The amount of substance."""
        check_state(self, u)
        return u.sum(-1)

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        first = uniform(n, [0.5], [1.0], generator, torch.float64, device)
        state = torch.cat((first, torch.zeros_like(first), 1 - first), -1)
        return state.to(checked_dtype(dtype))
