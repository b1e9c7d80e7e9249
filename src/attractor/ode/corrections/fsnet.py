"""FSNet: the two-layer rational network on the state with scales of its own (after Xu et al. 2023)."""

from typing import Any

import torch
from torch import Tensor, nn

from attractor.ode.corrections.network import Network, check_step, with_phase


class FSNet(nn.Module):
    """``scale_out * Net(scale_in * u)``, added to ``u + dt S``. Does not vanish with the step.

    The AttNS paper credits Xu et al. for the two-layer rational architecture of its Eq. 8 and gives
    no more; taking u as the input and a learned scale a component on either side is our reading.

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
        like = self.net.head.weight
        self.scale_in = nn.Parameter(torch.ones(dim, dtype=like.dtype, device=like.device))
        self.scale_out = nn.Parameter(torch.ones(dim, dtype=like.dtype, device=like.device))

    def inputs(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What the network sees."""
        check_step(self.net, u, slope)
        return with_phase(self.scale_in * u, t, self.net.period)

    def forward(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What is added to a plain step."""
        return self.scale_out * self.net(self.inputs(u, slope, dt, t))
