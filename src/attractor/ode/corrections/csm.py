"""CSM: a deeper residual network on the state (after Dresdner et al. 2022)."""

from typing import Any

from torch import Tensor

from attractor.core.step import Step
from attractor.ode.corrections.correction import Correction
from attractor.ode.corrections.network import Network


class CSM(Correction):
    """A residual network of u, added to ``u + dt S``. Does not vanish with the step.

    The original is an encode-process-decode convolutional network on grids, trained unrolled. For
    ODE states without a grid our reading keeps the depth and the residual blocks.

    Args:
        dim: size of a state.
        width, depth: of the network. residual: False leaves out the residual connections. Other
            options (activation, skip, body, period, device, dtype): see `Network`.
    """

    def __init__(
        self,
        dim: int,
        width: int = 256,
        depth: int = 4,
        activation: str = "gelu",
        residual: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.net = Network(dim, dim, width, depth, activation, residual=residual, **options)
        self.config = {"dim": dim, **self.net.config}

    def _seen(self, step: Step) -> Tensor:
        """Return the state."""
        return step.u
