"""POLLU: the chemistry of air pollution, 20 substances and 25 reactions."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attractor.ode.systems.system import check_state, uniform

# One reaction per line: its coefficient, what reacts, and what is made (Verwer 1994, numbered from 1).
REACTIONS: tuple[tuple[float, tuple[int, ...], tuple[int, ...]], ...] = (
    (0.35, (1,), (2, 3)),
    (26.6, (2, 4), (1,)),
    (12_300.0, (5, 2), (6, 1)),
    (0.00086, (7,), (5, 5, 8)),
    (0.00082, (7,), (8,)),
    (15_000.0, (7, 6), (5, 8)),
    (0.00013, (9,), (5, 8, 10)),
    (24_000.0, (9, 6), (11,)),
    (16_500.0, (11, 2), (1, 10, 12)),
    (9_000.0, (11, 1), (13,)),
    (0.022, (13,), (11, 1)),
    (12_000.0, (10, 2), (14, 1)),
    (1.88, (14,), (5, 7)),
    (16_300.0, (1, 6), (15,)),
    (4_800_000.0, (3,), (4,)),
    (0.00035, (4,), (16,)),
    (0.0175, (4,), (3,)),
    (1e8, (16,), (6, 6)),
    (4.44e11, (16,), (3,)),
    (1_240.0, (17, 6), (5, 18)),
    (2.1, (19,), (2,)),
    (5.78, (19,), (1, 3)),
    (0.0474, (1, 4), (19,)),
    (1_780.0, (19, 1), (20,)),
    (3.12, (20,), (19, 1)),
)
SUBSTANCES = 20


def _tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return matrices that select what reacts, and the changes of all substances [25, 20].

    The first two [20, 25] select the substances of a reaction, the first one with its coefficient. A
    reaction of one substance has no second one; the third table [25] is 1 there.
    """
    change = torch.zeros(len(REACTIONS), SUBSTANCES, dtype=torch.float64)
    first, second = torch.zeros(2, SUBSTANCES, len(REACTIONS), dtype=torch.float64)
    for i, (coefficient, consumed, made) in enumerate(REACTIONS):
        first[consumed[0] - 1, i] = coefficient
        if len(consumed) == 2:
            second[consumed[1] - 1, i] = 1
        for substance in consumed:
            change[i, substance - 1] -= 1
        for substance in made:
            change[i, substance - 1] += 1
    return first, second, 1 - second.sum(0), change


_FIRST, _SECOND, _ALONE, _CHANGE = _tables()


@dataclass(frozen=True)
class Pollution:
    """The chemical part of an air pollution model (Verwer 1994; Test Set for IVP Solvers).

    The coefficients of the reactions go from 1e-4 to 4e11. `REFERENCE` is the published state at the
    time `END`, from `START` at time 0. Initial states are drawn around `START`.
    """

    START: ClassVar[tuple[float, ...]] = (
        *(0.0, 0.2, 0.0, 0.04, 0.0, 0.0, 0.1, 0.3, 0.01, 0.0),
        *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.007, 0.0, 0.0, 0.0),
    )
    END: ClassVar[float] = 60.0
    REFERENCE: ClassVar[tuple[float, ...]] = (
        0.5646255480022769e-1, 0.1342484130422339, 0.4139734331099427e-8, 0.5523140207484359e-2,
        0.2018977262302196e-6, 0.1464541863493966e-6, 0.7784249118997964e-1, 0.3245075353396018,
        0.7494013383880406e-2, 0.1622293157301561e-7, 0.1135863833257075e-7, 0.2230505975721359e-2,
        0.2087162882798630e-3, 0.1396921016840158e-4, 0.8964884856898295e-2, 0.4352846369330103e-17,
        0.6899219696263405e-2, 0.1007803037365946e-3, 0.1772146513969984e-5, 0.5682943292316392e-4,
    )  # fmt: skip

    @property
    def dim(self) -> int:
        """Size of a state."""
        return SUBSTANCES

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        # Products with sparse matrices: selection by an index has a slow derivative.
        speeds = (u @ _FIRST.to(u)) * (u @ _SECOND.to(u) + _ALONE.to(u))
        return speeds @ _CHANGE.to(u)

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states: each concentration of `START` times a number from 0.8 to 1.2."""
        low, high = ([x * factor for x in self.START] for factor in (0.8, 1.2))
        return uniform(n, low, high, generator, dtype, device)
