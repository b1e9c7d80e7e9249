"""CSM: a deeper residual network on the state (after Dresdner et al. 2022)."""

from typing import Any

from torch import Tensor, nn

from attractor.ode.corrections.network import Network, check_step, with_phase


class CSM(nn.Module):
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
        self.timed = self.net.period is not None
        self.config = {"dim": dim, **self.net.config}

    def inputs(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What the network sees."""
        check_step(self.net, u, slope)
        return with_phase(u, t, self.net.period)

    def forward(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What is added to a plain step."""
        return self.net(self.inputs(u, slope, dt, t))
