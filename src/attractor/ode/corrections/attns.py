"""AttNS: a correction computed from the slope (Huang et al., Eq. 10)."""

from typing import Any

from torch import Tensor, nn

from attractor.ode.corrections.network import Network


class AttNS(nn.Module):
    """``Q(S)``, added to ``u + dt S``.

    S is the slope without dt, as in the paper's Eq. 3, 6 and 10; `times_dt=True` takes dt S instead
    (Table 2). Fitted for one step size; it does not vanish with the step. The slope alone must tell
    the error: where several states share a slope (the wells and the hill of a double well), AttNS
    gives them one correction, and a correction of the state, such as `NeurVec`, is the better choice.

    Args:
        dim: size of a state.
        width, depth: of Q. Other options (activation, skip, device, dtype): see `Network`.
    """

    def __init__(
        self, dim: int, width: int = 1024, depth: int = 2, times_dt: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.times_dt = times_dt
        self.net = Network(dim, dim, width, depth, **options)
        self.config = {"dim": dim, "times_dt": times_dt, **self.net.config}

    def inputs(self, u: Tensor, slope: Tensor, dt: Any) -> Tensor:
        """What the network sees."""
        return dt * slope if self.times_dt else slope

    def forward(self, u: Tensor, slope: Tensor, dt: Any) -> Tensor:
        """What is added to a plain step."""
        return self.net(self.inputs(u, slope, dt))
