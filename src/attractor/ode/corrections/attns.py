"""AttNS: a correction computed from the slope (Huang et al., Eq. 10)."""

from typing import Any

from torch import Tensor

from attractor.core.rates import check_state
from attractor.core.step import Step
from attractor.ode.corrections.correction import Correction
from attractor.ode.corrections.network import Network, check_sizes, joined


class AttNS(Correction):
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
        self.config = {"dim": dim, "times_dt": times_dt, "state": state, **self.net.config}

    def _seen(self, step: Step) -> Tensor:
        """Return the slope, and with `state` the state."""
        if self.times_dt:
            check_state(step.slope, dt=step.dt)
        x = step.dt * step.slope if self.times_dt else step.slope
        return joined(x, step.u) if self.state else x
