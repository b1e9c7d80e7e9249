"""Linear: a matrix, exact for linear systems."""

from typing import Any

from torch import Tensor, nn

from attractor.ode.corrections.network import Affine, check_step, with_phase


class Linear(nn.Module):
    """``M u + b``, added to ``u + dt S``.

    For a linear system the error of a step is linear in the state, so one trajectory fits it to
    rounding: a known answer for tests, not a showcase. Does not vanish with the step.

    Args:
        dim: size of a state.
        period: for equations that repeat in time; the phase joins u as a cosine and a sine.
    """

    def __init__(self, dim: int, period: float | None = None, **factory: Any) -> None:
        super().__init__()
        self.config = {"dim": dim, "period": period}
        self.net = Affine(dim, dim, period, **factory)
        self.timed = period is not None

    def inputs(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What the map sees."""
        check_step(self.net, u, slope)
        return with_phase(u, t, self.net.period)

    def forward(self, u: Tensor, slope: Tensor, dt: Any, t: Any = None) -> Tensor:
        """What is added to a plain step."""
        return self.net(self.inputs(u, slope, dt, t))
