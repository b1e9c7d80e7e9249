"""Runs of steps: in Python, unrolled for a compiler, and as one loop of compiled code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from attractor.core.compiling import components_first, vectorised
from attractor.core.rates import Rate, masked, moved
from attractor.core.splitting import Halves, Splitting
from attractor.core.step import Correction, Step, with_parameters
from attractor.core.tableaus import AnyScheme


@dataclass
class Guard:
    """Where a correction may be applied, and what a step is elsewhere.

    Attributes:
        inside: Maps states ``[*batch, d]`` to ``[*batch]``, True where the correction may be applied. It
            is called without gradients. Parameters follow the states, ``[*batch, d + k]``.
        replace: ``(rate, t, dt, u, parameters) -> (state one step later, calls of the rate)``. None: the
            correction is applied everywhere, and trajectories that leave are only marked.
        region: What `inside` is a method of, for loops of machine code that test states themselves.
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


def run(
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

    Where a trajectory was lost, `alive` keeps what the rate still returns there (NaN again, perhaps)
    out of later stages, and so out of the gradients of shared parameters.

    Returns:
        The states after the steps in `keep`, and whether each trajectory started all steps inside.
    """
    rate = f if alive is None else only_alive(alive, f)
    states: list[Tensor] = []
    starts: list[Tensor] = []
    known: Halves = (None, None)
    for i in range(keep[-1]):
        if inside is not None:
            starts.append(u.detach())
        if isinstance(scheme, Splitting) and correction is None:
            bound = with_parameters(rate, parameters)
            slope, known = scheme._slope_after(bound, t[i], u, dt[i], known)
            u = moved(u, dt[i], (1.0,), (slope,))
        else:
            u = corrected_step(rate, scheme, correction, t[i], dt[i], u, parameters)
        if i + 1 in keep:
            states.append(u)
    stayed = None if inside is None else inside(beside(_stacked(starts), parameters)).all(0)
    return states, stayed


class Looped(NamedTuple):
    """What a loop of steps returns.

    Attributes:
        taken: Number of steps taken, a number or a tensor of no dimension.
        u: The state ``[*batch, d]`` after them.
        inside: Which trajectories ``[*batch]`` are inside now.
        stayed: Which trajectories ``[*batch]`` started all steps inside.
    """

    taken: Tensor | int
    u: Tensor
    inside: Tensor
    stayed: Tensor


def looped(
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
) -> Looped:
    """Take steps from u until there are `count`, or a trajectory is outside.

    Only the last state is kept. Compiled, this is one loop around one step: it is compiled in the time
    of one step, serves any number of steps, and stays in machine code between them. It has no gradients.

    Args:
        t, dt: Times and step sizes ``[n]``, of which the first `count` are used.
        count: Number of steps, a tensor of no dimension.
        anywhere: Trajectories ``[*batch]`` that do not stop the loop outside.
    """

    def is_inside(u: Tensor) -> Tensor:
        if inside is None:
            return torch.ones(u.shape[:-1], dtype=torch.bool, device=u.device)
        return inside(beside(u, parameters))

    def more(i: Tensor, u: Tensor, known: Tensor, stayed: Tensor) -> Tensor:
        return (i < count) & (known | anywhere).all()

    def step(i: Tensor, u: Tensor, known: Tensor, stayed: Tensor) -> tuple[Tensor, ...]:
        with vectorised(u.dtype):
            now, size = (x.index_select(0, i.view(1)).view(()) for x in (t, dt))
            u = components_first(corrected_step(f, scheme, correction, now, size, u, parameters))
            return i + 1, u, is_inside(u), stayed & known

    first = is_inside(u)
    start = (torch.zeros((), dtype=torch.long), u, first, torch.ones_like(first))
    return Looped(*while_loop(more, step, start))


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
        return moved(u, dt, (1.0,), (scheme.slope(with_parameters(f, parameters), t, u, dt),))
    step = scheme.step(f, t, u, dt, parameters)
    return moved(u, dt, (1.0,), (step.slope,)) + correction_term(correction, step)


def correction_term(correction: Correction, step: Step) -> Tensor:
    """Return what a correction adds to a plain step, after checking it."""
    u, added = step.u, correction(step)
    if not isinstance(added, Tensor):
        raise TypeError(
            f"the correction returned a {type(added).__name__}; it must return a tensor like u"
        )
    if added.shape != u.shape or added.dtype != u.dtype:
        raise ValueError(
            f"the correction returned {list(added.shape)} in {added.dtype} for a state of shape "
            f"{list(u.shape)} in {u.dtype}; they must be alike"
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
    """Return the state one step after u, and which trajectories ``[*batch]`` the guard stepped."""
    outside = ~guard.inside(beside(u, parameters).detach())
    if not bool(outside.any()):
        return corrected_step(f, scheme, correction, t, dt, u, parameters), outside
    if bool(outside.all()):
        return guard.step(f, t, dt, u, parameters), outside

    # Each kind of step gets its own trajectories, and one of them in place of the others, so that no
    # step is computed, or differentiated, where it does not apply.
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
