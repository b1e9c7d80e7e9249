"""NeurVec: a correction computed from the state (Huang et al. 2023)."""

from typing import Any

from torch import Tensor, nn

from attractor.ode.corrections.network import Network


class NeurVec(nn.Module):
    """``Net(u)``, added to ``u + dt S``. Does not vanish with the step.

    Args:
        dim: size of a state.
        width, depth, activation, skip: of the network, see `Network`.
    """

    def __init__(
        self,
        dim: int,
        width: int = 1024,
        depth: int = 2,
        activation: str = "rational",
        skip: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.config = dict(dim=dim, width=width, depth=depth, activation=activation, skip=skip)
        self.net = Network(dim, dim, width, depth, activation, skip, **factory)

    def inputs(self, u: Tensor, slope: Tensor, dt: Any) -> Tensor:
        """What the network sees."""
        return u

    def forward(self, u: Tensor, slope: Tensor, dt: Any) -> Tensor:
        """What is added to a plain step."""
        return self.net(u)
