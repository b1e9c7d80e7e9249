"""AttNS-m: the slope is multiplied (Huang et al., Eq. 6)."""

from typing import Any

from torch import Tensor

from attractor.core.rates import check_state
from attractor.core.step import Step
from attractor.ode.corrections.correction import Correction
from attractor.ode.corrections.network import Network, check_step


class AttNSM(Correction):
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
        self.config = {"dim": dim, **self.net.config}

    def _seen(self, step: Step) -> Tensor:
        """Return the slope."""
        return step.slope

    def gain(self, slope: Tensor, dt: Any) -> Tensor:
        """Return what multiplies ``Q - 1``."""
        check_step(self.net, slope, slope)
        check_state(slope, dt=dt)
        return dt * slope

    def _added(self, step: Step, q: Tensor) -> Tensor:
        """Return ``dt S (Q - 1)``."""
        return self.gain(step.slope, step.dt) * (q - 1)
