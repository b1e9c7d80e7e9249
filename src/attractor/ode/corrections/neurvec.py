"""NeurVec: a correction computed from the state (Huang et al. 2023)."""

from typing import Any

from torch import Tensor, nn

from attractor.ode.corrections.network import Network, check_step, with_phase


class NeurVec(nn.Module):
    """``Net(u)``, added to ``u + dt S``. Does not vanish with the step.

    Args:
        dim: size of a state.
        width, depth: of the network. Other options (activation, skip, body, period, device,
            dtype): see `Network`.
    """

    def __init__(self, dim: int, width: int = 1024, depth: int = 2, **options: Any) -> None:
        super().__init__()
        self.net = Network(dim, dim, width, depth, **options)
        self.timed = self.net.period is not None
        self.config = {"dim": dim, **self.net.config}

    def inputs(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What the network sees."""
        check_step(self.net, u, slope)
        return with_phase(u, t, self.net.period)

    def forward(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What is added to a plain step."""
        return self.net(self.inputs(u, slope, dt, t))
