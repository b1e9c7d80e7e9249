"""NeurVec: a correction computed from the state (Huang et al. 2023)."""

from typing import Any

from torch import Tensor

from attractor.core.step import Step
from attractor.ode.corrections.correction import Correction
from attractor.ode.corrections.network import Network


class NeurVec(Correction):
    """``Net(u)``, added to ``u + dt S``. Does not vanish with the step.

    Args:
        dim: size of a state.
        width, depth: of the network. Other options (activation, skip, body, period, device,
            dtype): see `Network`.
    """

    def __init__(self, dim: int, width: int = 1024, depth: int = 2, **options: Any) -> None:
        super().__init__()
        self.net = Network(dim, dim, width, depth, **options)
        self.config = {"dim": dim, **self.net.config}

    def _seen(self, step: Step) -> Tensor:
        """Return the state."""
        return step.u
