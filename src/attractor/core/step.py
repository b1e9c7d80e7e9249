"""A plain step, the argument of a correction."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from attractor.core.rates import Linearised

Correction: TypeAlias = Callable[..., Tensor]


class Step(NamedTuple):
    """A plain step ``u + dt * slope``, before it is corrected.

    Attributes:
        u: The state ``[*batch, d]`` from which the step starts.
        slope: The slope ``[*batch, d]`` of the scheme.
        dt: The step size.
        t: The time of u, or None.
        stages: The rates ``[*batch, d]`` at the stages of a Runge-Kutta scheme, whose weighted sum is
            the slope. Empty for a splitting.
        parameters: The parameters ``[*batch, k]`` of each trajectory; None for a rate without them.
    """

    u: Tensor
    slope: Tensor
    dt: Any
    t: Any = None
    stages: tuple[Tensor, ...] = ()
    parameters: Tensor | None = None


def with_parameters(f: Callable[..., Tensor], parameters: Tensor | None) -> Callable[..., Tensor]:
    """Return the rate ``(t, u) -> du/dt`` of ``f(t, u, p)`` for the parameters p; f if p is None."""
    if parameters is None:
        return f
    if isinstance(f, Linearised):
        return Linearised(with_parameters(f.f, parameters), with_parameters(f.jacobian, parameters))
    return lambda t, u: f(t, u, parameters)


@dataclass(frozen=True)
class _OfSlope:
    """A correction with the call ``(u, slope, dt)``, or ``(u, slope, dt, t)``, as one of a step."""

    correction: Correction
    timed: bool
    takes_step = True

    def __call__(self, step: Step) -> Tensor:
        time = (step.t,) if self.timed else ()
        return self.correction(step.u, step.slope, step.dt, *time)


def correction_of_step(correction: Correction | None) -> Correction | None:
    """Return the correction with the call ``correction(step)``.

    A function with a true attribute `takes_step`, or with one argument, is returned unchanged.
    Others are called with ``(u, slope, dt)``, and with t as a fourth argument if they have a true
    attribute `timed`.
    """
    if correction is None or getattr(correction, "takes_step", False):
        return correction
    if not callable(correction):
        raise TypeError(
            f"correction is a {type(correction).__name__}; pass a function (step) or (u, slope, dt)"
        )
    if _takes_one_argument(correction):
        return correction
    return _OfSlope(correction, bool(getattr(correction, "timed", False)))


def _takes_one_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 1
