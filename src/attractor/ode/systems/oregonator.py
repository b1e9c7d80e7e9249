"""OREGO: the Oregonator, an oscillating chemical reaction."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, uniform


@dataclass(frozen=True)
class Oregonator:
    """The reaction of Belousov and Zhabotinsky (Field and Noyes 1974; Hairer and Wanner II, IV.10).

    Three concentrations that jump by up to five powers of ten, over and over. `REFERENCE` is the
    published state at the time `END`, from `START` at time 0. Initial states are drawn around `START`.
    """

    START: ClassVar[tuple[float, ...]] = (1.0, 2.0, 3.0)
    END: ClassVar[float] = 360.0
    REFERENCE: ClassVar[tuple[float, ...]] = (
        0.1000814870318523e1, 0.1228178521549917e4, 0.1320554942846706e3,
    )  # fmt: skip

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 3

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        a, b, c = u.unbind(-1)
        first = 77.27 * (b + a * (1 - 8.375e-6 * a - b))
        return torch.stack((first, (c - (1 + a) * b) / 77.27, 0.161 * (a - c)), -1)

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states: each concentration of `START` times a number from 0.5 to 1.5."""
        low, high = ([x * factor for x in self.START] for factor in (0.5, 1.5))
        return uniform(n, low, high, generator, dtype, device)
