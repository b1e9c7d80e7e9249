"""Linear: a matrix, exact for linear systems."""

from typing import Any, ClassVar

from torch import Tensor

from attractor.core.step import Step
from attractor.ode.corrections.correction import Correction
from attractor.ode.corrections.network import Affine


class Linear(Correction):
    """``M u + b``, added to ``u + dt S``.

    For a linear system the error of a step is linear in the state, so one trajectory fits it to
    rounding: a known answer for tests, not a showcase. Does not vanish with the step.

    Args:
        dim: size of a state.
        period: for equations that repeat in time; the phase joins u as a cosine and a sine.
        parameters: of the equation, how many of each trajectory join u.
    """

    fit_defaults: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, dim: int, period: float | None = None, parameters: int = 0, **factory: Any
    ) -> None:
        super().__init__()
        self.config = {"dim": dim, "period": period, "parameters": parameters}
        self.net = Affine(dim, dim, period, parameters, **factory)

    def _seen(self, step: Step) -> Tensor:
        """Return the state."""
        return step.u
