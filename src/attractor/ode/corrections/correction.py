"""What all corrections have in common: the call, and what joins the inputs of their networks."""

from typing import Any, ClassVar

from torch import Tensor, nn

from attractor.core.step import Step
from attractor.ode.corrections.network import check_step, joined, with_phase


class Correction(nn.Module):
    """A network `net`, computed from a step and added to it.

    A subclass defines `_seen`, what the network sees of a step. The parameters of the trajectory and the
    phase of the time join it where the network has inputs for them. One that does not add the result of
    its network as it is also defines `_added`.

    Calls are ``correction(step)``, with a `Step`, or ``correction(u, slope, dt)`` and
    ``correction(u, slope, dt, t)``, for corrections that need nothing else.
    """

    takes_step = True
    needs_stages = False  # a call with (u, slope, dt) does not do
    # Options with which `fit` makes it, unless it is told others; empty if there is no network.
    fit_defaults: ClassVar[dict[str, Any]] = {"width": 512, "activation": "sine", "skip": True}
    net: Any
    config: dict[str, Any]

    @property
    def timed(self) -> bool:
        """Whether the correction depends on the time."""
        return self.net.period is not None

    def _seen(self, step: Step) -> Tensor:
        """Return what the network sees of a step ``[*batch, n]``, without parameters and phase."""
        raise NotImplementedError

    def _added(self, step: Step, q: Tensor) -> Tensor:
        """Return what is added to a step for which the network returned q."""
        return q

    def inputs(
        self, u: Tensor | Step, slope: Tensor | None = None, dt: Any = None, t: Any = None
    ) -> Tensor:
        """Return everything that the network sees of a step."""
        step = as_step(u, slope, dt, t)
        check_step(self.net, step.u, step.slope)
        x = self._seen(step)
        count = getattr(self.net, "parameter_count", 0)
        if count:
            x = joined(x, _parameters(step, count))
        return with_phase(x, step.t, self.net.period)

    def forward(
        self, u: Tensor | Step, slope: Tensor | None = None, dt: Any = None, t: Any = None
    ) -> Tensor:
        """Return what is added to a plain step."""
        step = as_step(u, slope, dt, t)
        return self._added(step, self.net(self.inputs(step)))


def as_step(u: Tensor | Step, slope: Tensor | None, dt: Any, t: Any) -> Step:
    """The step itself, or one of these parts."""
    if isinstance(u, Step):
        return u
    if slope is None:
        raise TypeError("a correction is called with a step, or with (u, slope, dt)")
    return Step(u, slope, dt, t)


def _parameters(step: Step, count: int) -> Tensor:
    given = step.parameters
    if given is None or given.shape[-1] != count:
        shape = "none" if given is None else str(list(given.shape))
        raise ValueError(
            f"this correction sees {count} parameters a trajectory, and there are {shape}; pass "
            f"parameters= [*batch, {count}]"
        )
    return given.expand(*step.u.shape[:-1], count)
