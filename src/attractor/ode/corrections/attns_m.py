"""AttNS-m: the slope is multiplied (Huang et al., Eq. 6)."""

from typing import Any

from torch import Tensor, nn

from attractor.core.scheme import check_state
from attractor.ode.corrections.network import Network, check_step, with_phase


class AttNSM(nn.Module):
    """``dt S (Q(S) - 1)``: the step becomes ``u + dt S Q(S)``.

    Where a component of S crosses zero this form can correct nothing, though the error does not
    vanish there: it is here because the paper compares with it. It goes to zero with the step.

    Args:
        dim: size of a state.
        width, depth: of Q. Other options (activation, skip, body, period, device,
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
        return with_phase(slope, t, self.net.period)

    def gain(self, slope: Tensor, dt: Any) -> Tensor:
        """What multiplies ``Q - 1``."""
        check_step(self.net, slope, slope)
        check_state(slope, dt=dt)
        return dt * slope

    def forward(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What is added to a plain step."""
        return self.gain(slope, dt) * (self.net(self.inputs(u, slope, dt, t)) - 1)
