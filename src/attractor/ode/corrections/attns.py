"""AttNS: a correction computed from the slope (Huang et al., Eq. 10)."""

from typing import Any

import torch
from torch import Tensor, nn

from attractor.core.scheme import check_state
from attractor.ode.corrections.network import Network, check_sizes, check_step, with_phase


class AttNS(nn.Module):
    """``Q(S)``, added to ``u + dt S``.

    S is the slope without dt, as in the paper's Eq. 3, 6 and 10; `times_dt=True` takes dt S instead
    (Table 2). Fitted for one step size; it does not vanish with the step. The slope alone must tell
    the error: where several states share a slope (the wells and the hill of a double well), AttNS
    gives them one correction; `state=True` lets Q see ``(S, u)``, `NeurVec` sees u alone.

    Args:
        dim: size of a state.
        width, depth: of Q. Other options (activation, skip, body, period, device, dtype): see
            `Network`.
    """

    def __init__(
        self,
        dim: int,
        width: int = 1024,
        depth: int = 2,
        times_dt: bool = False,
        state: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.times_dt, self.state = times_dt, state
        check_sizes(dim=dim)
        self.net = Network(dim * (1 + state), dim, width, depth, **options)
        self.timed = self.net.period is not None
        self.config = {"dim": dim, "times_dt": times_dt, "state": state, **self.net.config}

    def inputs(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What the network sees."""
        check_step(self.net, u, slope)
        if self.times_dt:
            check_state(slope, dt=dt)
        x = dt * slope if self.times_dt else slope
        return with_phase(torch.cat((x, u), -1) if self.state else x, t, self.net.period)

    def forward(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What is added to a plain step."""
        return self.net(self.inputs(u, slope, dt, t))
