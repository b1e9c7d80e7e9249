"""CSM: a deeper residual network on the state (after Dresdner et al. 2022)."""

from typing import Any

from torch import Tensor, nn

from attractor.ode.corrections.network import Network


class CSM(nn.Module):
    """A residual network of u, added to ``u + dt S``. Does not vanish with the step.

    The original is an encode-process-decode convolutional network on grids, trained unrolled. For
    ODE states without a grid our reading keeps the depth and the residual blocks.

    Args:
        dim: size of a state.
        width, depth, activation, skip: of the network, see `Network`.
    """

    def __init__(
        self,
        dim: int,
        width: int = 256,
        depth: int = 4,
        activation: str = "gelu",
        skip: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.config = dict(dim=dim, width=width, depth=depth, activation=activation, skip=skip)
        self.net = Network(dim, dim, width, depth, activation, skip, residual=True, **factory)

    def inputs(self, u: Tensor, slope: Tensor, dt: Any) -> Tensor:
        """What the network sees."""
        return u

    def forward(self, u: Tensor, slope: Tensor, dt: Any) -> Tensor:
        """What is added to a plain step."""
        return self.net(u)
