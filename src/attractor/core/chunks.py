"""Chunks of steps: in Python, unrolled for a compiler, and as one loop of compiled code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from attractor.core.compiling import components_first, vectorised
from attractor.core.rates import Rate, add_increment, masked
from attractor.core.splitting import Halves, Splitting
from attractor.core.step import Correction, Step, with_parameters
from attractor.core.tableaus import AnyScheme


@dataclass
class Guard:
    """The region in which a correction may be applied, and the step outside of it.

    Attributes:
        inside: Maps states ``[*batch, d]`` to ``[*batch]``, True where the correction may be applied. It
            is called without gradients. Parameters follow the states, ``[*batch, d + k]``.
        replace: ``(rate, t, dt, u, parameters) -> (state one step later, calls of the rate)``. None: the
            correction is applied everywhere, and trajectories that leave are only marked.
        region: The object whose method is `inside`, for loops of machine code that test states.
        rate_calls: Calls of the rate that `replace` has made.
    """

    inside: Callable[[Tensor], Tensor]
    replace: Callable[[Rate, Tensor, Any, Tensor, Tensor | None], tuple[Tensor, int]] | None
    region: Any = None
    rate_calls: int = 0

    def step(
        self, rate: Rate, t: Tensor, dt: Any, u: Tensor, parameters: Tensor | None = None
    ) -> Tensor:
        """Call `replace`, and count its calls of the rate."""
        assert self.replace is not None
        state, calls = self.replace(rate, t, dt, u, parameters)
        self.rate_calls += calls
        return state


def take_steps(
    f: Rate,
    scheme: AnyScheme,
    correction: Correction | None,
    inside: Callable[[Tensor], Tensor] | None,
    keep: tuple[int, ...],
    t: Tensor,
    dt: Any,
    u: Tensor,
    alive: Tensor | None = None,
    parameters: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """Take steps from u at times t [k] with sizes dt [k].

    `alive` masks the rates of lost trajectories, which may be NaN, so that they do not enter the
    gradients of shared parameters.

    Returns:
        The states after the steps in `keep`, and whether each trajectory started all steps inside.
    """
    rate = f if alive is None else only_alive(alive, f)
    states: list[Tensor] = []
    starts: list[Tensor] = []
    halves: Halves = (None, None)
    for i in range(keep[-1]):
        if inside is not None:
            starts.append(u.detach())
        if isinstance(scheme, Splitting) and correction is None:
            bound = with_parameters(rate, parameters)
            slope, halves = scheme._slope_after(bound, t[i], u, dt[i], halves)
            u = add_increment(u, dt[i], (1.0,), (slope,))
        else:
            u = corrected_step(rate, scheme, correction, t[i], dt[i], u, parameters)
        if i + 1 in keep:
            states.append(u)
    stayed = None if inside is None else inside(beside(_stacked(starts), parameters)).all(0)
    return states, stayed


class LoopResult(NamedTuple):
    """The result of a loop of steps.

    Attributes:
        taken: Number of steps taken, a number or a tensor of no dimension.
        u: The state ``[*batch, d]`` after them.
        inside: Whether each trajectory ``[*batch]`` is inside after them.
        stayed: Whether each trajectory ``[*batch]`` started all steps inside.
    """

    taken: Tensor | int
    u: Tensor
    inside: Tensor
    stayed: Tensor


def step_loop(
    f: Rate,
    scheme: AnyScheme,
    correction: Correction | None,
    inside: Callable[[Tensor], Tensor] | None,
    t: Tensor,
    dt: Tensor,
    count: Tensor,
    u: Tensor,
    anywhere: Tensor,
    parameters: Tensor | None = None,
) -> LoopResult:
    """Take `count` steps from u, or fewer if a trajectory leaves the region.

    Only the last state is returned. Compiled, this is one loop around one step, which takes the time of
    one step to compile and serves any number of steps. It has no gradients.

    Args:
        t, dt: Times and step sizes ``[n]``, of which the first `count` are used.
        count: Number of steps, a tensor of no dimension.
        anywhere: Trajectories ``[*batch]`` that do not stop the loop outside.
    """

    def is_inside(u: Tensor) -> Tensor:
        if inside is None:
            return torch.ones(u.shape[:-1], dtype=torch.bool, device=u.device)
        return inside(beside(u, parameters))

    def more(i: Tensor, u: Tensor, now_inside: Tensor, stayed: Tensor) -> Tensor:
        return (i < count) & (now_inside | anywhere).all()

    def step(i: Tensor, u: Tensor, now_inside: Tensor, stayed: Tensor) -> tuple[Tensor, ...]:
        with vectorised(u.dtype):
            now, size = (x.index_select(0, i.view(1)).view(()) for x in (t, dt))
            u = components_first(corrected_step(f, scheme, correction, now, size, u, parameters))
            return i + 1, u, is_inside(u), stayed & now_inside

    first = is_inside(u)
    start = (torch.zeros((), dtype=torch.long), u, first, torch.ones_like(first))
    return LoopResult(*while_loop(more, step, start))


def only_alive(alive: Tensor, f: Rate) -> Rate:
    """Return the rate where a trajectory is alive, and 0 elsewhere."""
    return masked(f, alive[..., None])


def corrected_step(
    f: Rate,
    scheme: AnyScheme,
    correction: Correction | None,
    t: Any,
    dt: Any,
    u: Tensor,
    parameters: Tensor | None = None,
) -> Tensor:
    """Return the state one step after u; `correction` has the call ``correction(step)``."""
    if correction is None:
        return add_increment(u, dt, (1.0,), (scheme.slope(with_parameters(f, parameters), t, u, dt),))
    step = scheme.step(f, t, u, dt, parameters)
    return add_increment(u, dt, (1.0,), (step.slope,)) + correction_term(correction, step)


def correction_term(correction: Correction, step: Step) -> Tensor:
    """Return the term that a correction adds to a plain step.

    Raises:
        TypeError: The correction did not return a tensor.
        ValueError: The term differs from the state in shape or dtype.
    """
    u, added = step.u, correction(step)
    if not isinstance(added, Tensor):
        raise TypeError(
            f"the correction returned a {type(added).__name__}; it must return a tensor like u"
        )
    if added.shape != u.shape or added.dtype != u.dtype:
        raise ValueError(
            f"the correction returned {list(added.shape)} in {added.dtype} for a state of shape "
            f"{list(u.shape)} in {u.dtype}; shapes and dtypes must be equal"
        )
    return added


def guarded_step(
    f: Rate,
    scheme: AnyScheme,
    correction: Correction | None,
    guard: Guard,
    t: Tensor,
    dt: Any,
    u: Tensor,
    parameters: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the state after a step, and whether the guard replaced it, per trajectory ``[*batch]``."""
    outside = ~guard.inside(beside(u, parameters).detach())
    if not bool(outside.any()):
        return corrected_step(f, scheme, correction, t, dt, u, parameters), outside
    if bool(outside.all()):
        return guard.step(f, t, dt, u, parameters), outside

    # Each kind of step is computed for its own trajectories, and for one of them in place of the others,
    # so that it is not computed or differentiated where it does not apply.
    def only(mine: Tensor, x: Any) -> Any:
        return None if x is None else torch.where(mine[..., None], x, x.detach()[mine][0])

    inside = ~outside
    corrected = corrected_step(f, scheme, correction, t, dt, only(inside, u), only(inside, parameters))
    plain = guard.step(f, t, dt, only(outside, u), only(outside, parameters))
    return torch.where(outside[..., None], plain, corrected), outside


def beside(u: Tensor, parameters: Tensor | None) -> Tensor:
    """Return states ``[*batch, d]``, followed by their parameters if there are any."""
    if parameters is None:
        return u
    return torch.cat((u, parameters.expand(*u.shape[:-1], parameters.shape[-1])), -1)


def _stacked(states: list[Tensor]) -> Tensor:
    """Return the states ``[n, *batch, d]``, in compiled code component by component."""
    if not torch.compiler.is_compiling():
        return torch.stack(states)
    return torch.stack([u.movedim(-1, 0) for u in states], 1).movedim(0, -1)
