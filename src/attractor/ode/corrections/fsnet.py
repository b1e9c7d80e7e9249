"""FSNet: the two-layer rational network on the state with scales of its own (after Xu et al. 2023)."""

from typing import Any

import torch
from torch import Tensor, nn

from attractor.core.step import Step
from attractor.ode.corrections.correction import Correction
from attractor.ode.corrections.network import Network


class FSNet(Correction):
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
        self.config = {"dim": dim, **self.net.config}
        like = self.net.head.weight
        self.scale_in = nn.Parameter(torch.ones(dim, dtype=like.dtype, device=like.device))
        self.scale_out = nn.Parameter(torch.ones(dim, dtype=like.dtype, device=like.device))

    def _seen(self, step: Step) -> Tensor:
        """Return the scaled state."""
        return self.scale_in * step.u

    def _added(self, step: Step, q: Tensor) -> Tensor:
        """Return the scaled result of the network."""
        return self.scale_out * q
