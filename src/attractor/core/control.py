"""Error control: a step size for every trajectory of the batch.

All trajectories make an attempt in each round, each with its own time and step; those that fail
their error test try again with a smaller step in the next round (see `rounds`). States at the wanted
times are interpolated; where that would be coarser than the steps are, steps end there. With `compile`,
the rounds in which no trajectory comes to a wanted time before the last one are one compiled loop.

The rounds keep no graph. If gradients are wanted, the accepted steps are taken once more with them: no
rejected step is differentiated, step sizes are constants, and `checkpoint` works as on a grid.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute_later

from attractor.core.compiling import NotCompiledError, compiled, components_first
from attractor.core.dense import Segment, SteppedOutput
from attractor.core.events import bracketed_root, differentiated_root
from attractor.core.interpolant import coefficients, evaluate
from attractor.core.rounds import (
    Control,
    Progress,
    Rules,
    as_time,
    attempt,
    compiled_rounds,
    first_step,
    positive,
    rate_calls,
)
from attractor.core.scheme import Rate, Scheme, call_rate, check_unwritten, version
from attractor.core.step import with_parameters
from attractor.core.tableaus import ALL, AnyScheme
from attractor.core.trajectory import Events, Stats, Status, Trajectory
from attractor.core.transforms import has_tangent, is_transformed

Event: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (t [*batch], u [*batch, d]) -> [*batch]

# How torch says that a tensor of several numbers is not one.
_ONE_NUMBER = re.compile("one element tensors|converted to Scalar|more than one value is ambiguous")


SHORT = 4  # Python takes the rounds if a wanted time is no more than so many steps away.


class _Round(NamedTuple):
    """A round with at least one accepted step; a step is 0 where there was none. [*batch, 1] each."""

    t: Tensor
    h: Tensor
    moving: Tensor  # False: finished, rejected or lost in this round
    wanted: tuple[Tensor, Tensor] | None  # trajectories, counted through, and indices of times [pairs]
    event: Tensor | None  # where in the step an event ends a trajectory; NaN for the others


def controlled(
    f: Rate,
    u0: Tensor,
    t: Tensor,
    scheme: AnyScheme,
    control: Control,
    *,
    parameters: Tensor | None = None,
    compile: bool = False,
    checkpoint: int | bool | None = None,
    dense: bool = False,
    events: tuple[Event, ...] = (),
) -> Trajectory:
    """States at the times t, [n+1] or [n+1, *batch], under error control. See `evolve`.

    Args:
        parameters: Of each trajectory ``[*batch, k]``, see `check_parameters`.
    """
    if not isinstance(scheme, Scheme) or scheme.b_low is None:
        pairs = [s.name for s in ALL.values() if isinstance(s, Scheme) and s.b_low]
        raise ValueError(
            f"{scheme.name} has no embedded pair to estimate its error with; leave out rtol and "
            f"atol, or use one of {', '.join(pairs)}"
        )
    if u0.numel() == 0:
        nobody = torch.zeros(u0.shape[:-1], dtype=torch.long, device=u0.device)
        until = t[-1].detach().expand(u0.shape[:-1])
        states = u0.expand(len(t), *u0.shape)
        return Trajectory(t, states, Stats(0, 0, 0, nobody, nobody), nobody == 0, until)
    if compile and parameters is not None:
        parameters = components_first(parameters)
    has_weights, written = torch.is_grad_enabled() and _uses_gradients(f, parameters), version(u0)
    f, k, calls = fitted_to_time(f, t, u0, parameters)
    check_unwritten(u0, written)
    wants_grad = has_weights or _differentiable(u0, t, k)
    trajectory, rounds = _forward(
        f, u0.detach(), k.detach(), t.detach(), scheme, control, parameters, compile, wants_grad, dense,
        events,
    )  # fmt: skip
    stats = trajectory.stats
    if not wants_grad and not rounds:
        return replace(trajectory, stats=replace(stats, rate_calls=stats.rate_calls + calls))
    solution, again = _differentiated(
        f, u0, k, t, scheme, rounds, parameters, compile, checkpoint, dense, events, trajectory.events
    )
    calls += stats.rate_calls + again + _differentiates_start(t)
    return replace(trajectory, stats=replace(stats, rate_calls=calls), **solution)


def _forward(
    f: Rate,
    u0: Tensor,
    k0: Tensor,
    t_out: Tensor,
    scheme: Scheme,
    control: Control,
    parameters: Tensor | None,
    compile: bool,
    keep: bool,
    dense: bool = False,
    events: tuple[Event, ...] = (),
) -> tuple[Trajectory, list[_Round]]:
    """The states, without gradients, and the rounds if they are to be kept or gradients turn up."""
    rate = with_parameters(f, parameters)
    step_of = compiled(attempt, u0.device, f, scheme) if compile else attempt
    clock = t_out.to(torch.float32 if u0.device.type == "mps" else torch.float64)
    last = len(clock) - 1
    end, begin = (x if clock.dim() == 1 else x[..., None] for x in (clock[-1], clock[0]))
    sign = 1.0 if last == 0 or bool((end > begin).all()) else -1.0
    ordered = sign * clock.movedim(0, -1).contiguous()  # [n+1] or [*batch, n+1]
    shortest = torch.finfo(clock.dtype).eps ** 2 * (end - begin).abs()
    exact = not positive(control.atol)
    rules = Rules(scheme, control, control.rtol, control.atol, exact, sign, shortest)
    # The error of a cubic is in no estimate, so it must be of an order that the steps do not outdo.
    lands = not scheme.interpolates

    batch = u0.shape[:-1]
    upcoming = torch.ones(batch, dtype=torch.long, device=u0.device)  # index of the next wanted time
    out = u0.expand(last + 1, *u0.shape).clone()
    flat_out = out.view(last + 1, -1, u0.shape[-1])
    rounds: list[_Round] = []
    segments: list[Segment] = []
    extra = len(scheme.extra_stages)
    halted = torch.zeros(batch, dtype=torch.bool, device=u0.device)  # by an event
    which = torch.full_like(upcoming, -1)
    calls = steps = 0
    silent = keep  # attempts record no graph
    t = begin.expand(*batch, 1)
    values = [_event_value(event, t[..., 0], u0) for event in events]
    if control.first is None:
        h, calls = first_step(rate, begin, end, sign, u0, k0, scheme, control), calls + 1
    else:
        h = torch.full_like(t, sign * abs(control.first))
    ok = torch.isfinite(u0).all(-1) & torch.isfinite(k0).all(-1)
    now = Progress(
        t=t,
        h=h.abs().clamp(control.least, control.most) * sign,
        u=u0,
        k=k0,
        error=torch.ones_like(t),
        active=ok if last else torch.zeros_like(ok),
        status=torch.zeros_like(ok, dtype=torch.int8).masked_fill(~ok, Status.LOST),
        accepted=torch.zeros_like(upcoming),
        rejected=torch.zeros_like(upcoming),
    )
    may_loop = compile and not (keep or dense or events or u0.is_complex()) and u0.device.type == "cpu"

    while bool(now.active.any()):
        if steps >= control.max_steps:
            status = now.status.masked_fill(now.active, Status.STEP_LIMIT)
            now = now._replace(status=status, active=torch.zeros_like(now.active))
            break
        goal = _next(clock, upcoming) if lands else end
        if may_loop:
            pause = torch.where((upcoming < last)[..., None], _next(clock, upcoming), sign * torch.inf)
            if _far_from(pause, now):
                limit = control.max_steps - steps
                looped = _looped(f, rules, goal, pause, limit, now, parameters)
                if looped is None:
                    may_loop = False
                else:
                    taken, now = looped
                    steps, calls = steps + taken, calls + taken * rate_calls(scheme)
                    upcoming = upcoming.masked_fill(~now.active & (now.status == Status.OK), last + 1)
                    out[last] = now.u
                    continue
        steps += 1
        t, _, u, k, *_ = now
        step = rules.propose(now, goal)
        size, t1 = step.size, step.t1
        place = as_time(t, u), as_time(size, u), u, k, None, parameters
        # The lost and the finished stand still; what they evaluate is thrown away.
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not silent):
                u1, k1, stages = step_of(f, scheme, *place)
        except RuntimeError as failure:
            if not silent or "does not require grad" not in str(failure):
                raise
            silent = False  # the rate is a gradient itself, such as Hamilton's equations by autograd
            u1, k1, stages = step_of(f, scheme, *place)
        calls += rate_calls(scheme)
        if not keep and _differentiable(u1, k1, *stages):
            # A parameter comes into play only now. Once more from the start, keeping the rounds: to
            # keep them always, in case this happens, would take memory from all who want no gradients.
            found, rounds = _forward(
                f, u0, k0, t_out, scheme, control, parameters, compile, True, dense, events
            )
            stats = replace(found.stats, rate_calls=found.stats.rate_calls + calls)
            return replace(found, stats=stats), rounds
        if keep:
            u1, k1, stages = u1.detach(), k1.detach(), [k.detach() for k in stages]
        verdict = rules.judge(now, step, u1, k1, stages)
        passed = verdict.passed

        inner: list[Tensor] | None = None
        found_event = None
        if events:
            new_values = [_event_value(event, t1[..., 0], u1) for event in events]
            crossed = [
                passed[..., 0] & (old * new <= 0) & (old != 0) for old, new in zip(values, new_values)
            ]
            if bool(torch.stack(crossed).any()):
                inner = _constants(scheme, rate, t, size, u, u1, stages, k1)
                found_event, number = _first_event(
                    events, crossed, values, new_values, t, size, u, u1, inner
                )
                stops = ~found_event[..., 0].isnan()
                t1 = torch.where(stops[..., None], t + found_event * size, t1)
                which = torch.where(stops, number, which)
            values = [torch.where(passed[..., 0], new, old) for old, new in zip(values, new_values)]
        points = sign * t1 if ordered.dim() > 1 else sign * t1[..., 0]
        reached = torch.searchsorted(ordered, points.contiguous(), right=True)
        reached = reached[..., 0] if ordered.dim() > 1 else reached
        wanted = _pairs(upcoming, torch.where(passed[..., 0], reached, upcoming))
        if wanted is not None:
            rows, index = wanted
            theta = _theta(clock, wanted, t, size, u)
            if inner is None and _needs_interpolant(scheme, theta):
                inner = _constants(scheme, rate, t, size, u, u1, stages, k1)
            flat_out[index, rows] = _inside(scheme, u, u1, inner, rows, theta)
            upcoming = torch.where(passed[..., 0], reached, upcoming)
        any_passed = (keep or dense) and bool(passed.any())
        if dense and any_passed and not keep:
            if inner is None:
                inner = _constants(scheme, rate, t, size, u, u1, stages, k1)
            segments.append(Segment(t, torch.where(passed, size, 0.0), u, u1, inner))
        if inner is not None:
            calls += extra
        if keep and any_passed:
            rounds.append(_Round(t, torch.where(passed, size, 0.0), passed, wanted, found_event))
        if found_event is not None:
            assert inner is not None
            stops = ~found_event.isnan()
            u1 = torch.where(stops, evaluate(u, u1, inner, as_time(found_event.nan_to_num(), u)), u1)
            halted = halted | stops[..., 0]
            now = now._replace(status=now.status.masked_fill(stops[..., 0], Status.EVENT))
        now = rules.advance(now, step, verdict, u1, k1, t1, (upcoming > last) | halted)

    arrived = upcoming > last
    t, _, u, *_ = now
    if not bool(arrived.all()):  # wanted times a lost trajectory did not reach: its last state
        times = torch.arange(last + 1, device=u.device).reshape(-1, *[1] * u.dim())
        out = torch.where(times < upcoming[..., None], out, u)
    stats = Stats(calls, 0, steps, now.accepted, now.rejected)
    until = torch.where(arrived & ~halted, clock[-1], t[..., 0]).to(t_out.dtype)
    happened = None
    if events:
        time = torch.where(halted, t[..., 0], torch.nan).to(t_out.dtype)
        happened = Events(time, torch.where(halted[..., None], u, torch.nan), which)
    ok = (now.status == Status.OK) | (now.status == Status.EVENT)
    trajectory = Trajectory(
        t_out, out, stats, ok, until, now.status, happened,
        SteppedOutput(u0, segments) if dense else None,
    )  # fmt: skip
    return trajectory, rounds


def _far_from(pause: Tensor, now: Progress) -> bool:
    """Whether all active trajectories are more than a few steps away from the times `pause`."""
    far = (pause - now.t).abs() > SHORT * now.h.abs()
    return bool((far[..., 0] | ~now.active).all())


def _looped(
    f: Rate,
    rules: Rules,
    goal: Tensor,
    pause: Tensor,
    limit: int,
    now: Progress,
    parameters: Tensor | None,
) -> tuple[int, Progress] | None:
    """Call `compiled_rounds`; None where only Python can take the rounds."""
    try:
        taken, later = compiled_rounds(f, rules, goal, pause, limit, now, parameters)
    except NotCompiledError:  # nothing inside a loop can be left to Python
        return None
    # A parameter that came into play in the loop has no gradient there.
    return None if _differentiable(later.u) else (taken, later)


def _constants(
    scheme: Scheme,
    f: Rate,
    t: Tensor,
    h: Tensor,
    u: Tensor,
    u1: Tensor,
    stages: list[Tensor],
    k1: Tensor,
) -> list[Tensor]:
    """Coefficients of a step's interpolant, without gradients."""
    inner = coefficients(scheme, f, as_time(t, u), as_time(h, u), u, u1, stages, k1)
    return [x.detach() for x in inner]


def _first_event(
    events: tuple[Event, ...],
    crossed: list[Tensor],
    values: list[Tensor],
    new_values: list[Tensor],
    t: Tensor,
    h: Tensor,
    u: Tensor,
    u1: Tensor,
    inner: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Where in a step the first event is [*batch, 1], NaN where none is, and which one [*batch]."""
    roots = []
    for event, cross, old, new in zip(events, crossed, values, new_values):

        def value(theta: Tensor, event: Event = event) -> Tensor:
            place = theta[..., None]
            state = evaluate(u, u1, inner, as_time(place, u))
            return _event_value(event, (t + place * h)[..., 0], state)

        zero, one = torch.zeros_like(old), torch.ones_like(old)
        ends = torch.where(cross, old, one), torch.where(cross, new, one)
        roots.append(torch.where(cross, bracketed_root(value, zero, one, *ends), torch.inf))
    first, number = torch.stack(roots).min(0)
    return torch.where(first.isinf(), torch.nan, first)[..., None], number


def _event_value(event: Event, t: Tensor, u: Tensor) -> Tensor:
    """The value of an event function [*batch], in the precision of time."""
    value = event(as_time(t, u), u)
    if not isinstance(value, Tensor) or value.shape != u.shape[:-1]:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"an event function returned {got} for states of shape {list(u.shape)}; it must return one "
            f"number per trajectory, {list(u.shape[:-1])}"
        )
    return value.detach().to(t.dtype)


def _next(clock: Tensor, upcoming: Tensor) -> Tensor:
    """The next wanted time of each trajectory [*batch, 1], or the last one."""
    index = upcoming.clamp(max=len(clock) - 1)
    return (clock[index] if clock.dim() == 1 else clock.gather(0, index[None])[0])[..., None]


def _differentiated(
    f: Rate,
    u0: Tensor,
    k: Tensor,
    t_out: Tensor,
    scheme: Scheme,
    rounds: list[_Round],
    parameters: Tensor | None,
    compile: bool,
    checkpoint: int | bool | None,
    dense: bool,
    events: tuple[Event, ...],
    happened: Events | None,
) -> tuple[dict[str, Any], int]:
    """The accepted steps again, with gradients.

    Returns:
        The fields of the trajectory with gradients: states at the wanted times [n+1, *batch, d], events
        and dense output; and how often the rate was called.
    """
    rate = with_parameters(f, parameters)
    step_of = compiled(attempt, u0.device, f, scheme) if compile else attempt
    calls, segments = len(rounds) * rate_calls(scheme), list[Segment]()

    def replay(part: list[_Round], u: Tensor, k: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        nonlocal calls
        values = []
        for t, h, moving, wanted, event in part:
            # Those that do not move are given a mover's place, or a lost one's NaN would reach
            # the gradients of a parameter that all share.
            donor = tuple(moving[..., 0].nonzero()[0])
            here = torch.where(moving, u, u.detach()[donor])
            first = torch.where(moving, k, k.detach()[donor])
            when = torch.where(moving, t, t[donor])
            place = as_time(when, u), as_time(h, u), here
            u1, k1, stages = step_of(f, scheme, *place, first, moving, parameters)
            theta = None if wanted is None else _theta(t_out, wanted, t, h, u)
            inner: list[Tensor] | None = None
            if dense or event is not None or _needs_interpolant(scheme, theta):
                moved = lambda t, u, moving=moving: torch.where(moving, rate(t, u), 0.0)
                inner = coefficients(scheme, moved, *place, u1, stages, k1)
                calls += len(scheme.extra_stages)
            if dense:
                assert inner is not None
                segments.append(Segment(t, h, here, u1, inner))
            if wanted is not None:
                assert theta is not None
                values.append(_inside(scheme, here, u1, inner, wanted[0], theta))
            if event is not None:
                assert inner is not None
                state = evaluate(here, u1, inner, as_time(event.nan_to_num(), u))
                u1 = torch.where(event.isnan(), u1, state)
            u, k = torch.where(moving, u1, u), torch.where(moving, k1, k)
        return values, u, k

    u = u0
    if _differentiates_start(t_out):
        # Starting later by s is starting from u0 - s f(t0, u0): this carries the gradient of t[0].
        start = as_time(t_out[:1] if t_out.dim() == 1 else t_out[0][..., None], u0)
        u = u0 - k.detach() * (start - start.detach())
        k = call_rate(rate, start.detach().expand(*u0.shape[:-1], 1), u)
    k = torch.where(torch.isfinite(k.detach()).all(-1, keepdim=True), k, 0.0)

    if checkpoint is True:
        checkpoint = math.isqrt(len(rounds)) + 1
    spacing = checkpoint or max(len(rounds), 1)
    values = []
    for i in range(0, len(rounds), spacing):
        part = rounds[i : i + spacing]
        if checkpoint:
            new, u, k = recompute_later(replay, part, u, k, use_reentrant=False)
        else:
            new, u, k = replay(part, u, k)
        values += new
    if happened is not None:
        index = happened.index
        halted = (index >= 0)[..., None]
        time = torch.where(halted[..., 0], happened.time, t_out[0].detach().to(happened.time))
        slope = call_rate(rate, as_time(time, u)[..., None], torch.where(halted, u, u0).detach())
        calls += 1

        def event_of_each(t: Tensor, u: Tensor) -> Tensor:
            values = torch.stack([event(t, u) for event in events])
            return values.gather(0, index.clamp(min=0)[None])[0]

        when, state = differentiated_root(as_time(time, u), u, slope.detach(), event_of_each)
        u = torch.where(halted, state, u)
        happened = Events(
            torch.where(halted[..., 0], when.to(time), torch.nan),
            torch.where(halted, state, torch.nan),
            index,
        )
    # The last state where a wanted time was not reached.
    out = torch.cat((u0[None], u.expand(len(t_out) - 1, *u.shape)))
    pairs = [r.wanted for r in rounds if r.wanted is not None]
    if pairs:
        rows, index = map(torch.cat, zip(*pairs))
        out = out.flatten(1, -2) if u.dim() > 1 else out[:, None]
        out = out.index_put((index, rows), torch.cat(values)).reshape(len(t_out), *u.shape)
    output = SteppedOutput(u0, segments) if dense else None
    return {"u": out, "events": happened, "dense": output}, calls


def _pairs(first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor] | None:
    """Trajectories and times ``first[i] <= index < stop[i]``, all pairs in a row; None of none."""
    first, count = first.reshape(-1), (stop - first).reshape(-1)
    total = int(count.sum())
    if not total:
        return None
    rows = torch.arange(len(count), device=count.device).repeat_interleave(count, output_size=total)
    before = count.cumsum(0) - count
    return rows, torch.arange(total, device=count.device) - before[rows] + first[rows]


def _theta(times: Tensor, wanted: tuple[Tensor, Tensor], t: Tensor, h: Tensor, u: Tensor) -> Tensor:
    """Where in their steps, of size h from t [*batch, 1], the wanted times are [pairs, 1]."""
    rows, index = wanted
    at = times[index] if times.dim() == 1 else times.flatten(1)[index, rows]
    return as_time((at[:, None] - t.reshape(-1, 1)[rows]) / h.reshape(-1, 1)[rows], u)


def _inside(
    scheme: Scheme, u: Tensor, u1: Tensor, inner: list[Tensor] | None, rows: Tensor, theta: Tensor
) -> Tensor:
    """The states [pairs, d] of the trajectories in rows at theta [pairs, 1] of their steps."""
    flat = lambda x: x.reshape(-1, x.shape[-1])[rows]
    if inner is None:
        return flat(u1)
    value = evaluate(flat(u), flat(u1), [flat(x) for x in inner], theta)
    if not _skips_ends(scheme, theta):
        return value
    return torch.where(theta == 1, flat(u1), value)  # whether or not others are inside of their steps


def _skips_ends(scheme: Scheme, theta: Tensor) -> bool:
    """Whether ends of steps are not interpolated: it costs rate calls, and times have no gradient."""
    return bool(scheme.extra_stages) and not (theta.requires_grad or has_tangent(theta))


def _needs_interpolant(scheme: Scheme, theta: Tensor | None) -> bool:
    return theta is not None and not (_skips_ends(scheme, theta) and bool((theta == 1).all()))


class OneTimeError(ValueError):
    """A rate does not accept a time per trajectory."""


@dataclass(frozen=True)
class _OfComponents:
    """A rate that works on the components of u, and so wants times [*batch] to go with them."""

    f: Rate

    def __call__(self, t: Tensor, u: Tensor, *parameters: Tensor) -> Tensor:
        return self.f(t[..., 0], u, *parameters)


def fitted_to_time(
    f: Rate, t: Tensor, u0: Tensor, parameters: Tensor | None
) -> tuple[Rate, Tensor, int]:
    """The rate for times [*batch, 1], its value at the start, and the calls it took to find out.

    ``u * t`` needs times [*batch, 1], ``x * t`` with ``x, y = u.unbind(-1)`` needs [*batch]. The
    wrong one gives the wrong shape, so one call tells which a rate wants; another one tells whether
    a trajectory sees its neighbours' times.
    """
    start = as_time(t[:1] if t.dim() == 1 else t[0][..., None], u0).expand(*u0.shape[:-1], 1)
    try:
        k = call_rate(with_parameters(f, parameters), start, u0)
    except (RuntimeError, ValueError) as error:
        try:
            f = _OfComponents(f)
            k = call_rate(with_parameters(f, parameters), start, u0)
        except (RuntimeError, ValueError):
            if not _ONE_NUMBER.search(str(error)):
                raise error from None
            raise OneTimeError(
                f"the rate takes t for one number ({error}), but under error control every trajectory "
                f"has its own time: t is {list(start.shape)}. Use torch.cos(t), torch.where(t < 1, ...) "
                "and the like; or a grid of times, without rtol and atol, where t is one number"
            ) from None
    if start.numel() == 1 or len(t) == 1:
        return f, k, 1
    later = start.detach().clone().reshape(-1, 1)
    later[1:] += 0.4 * as_time(t[-1] - t[0], u0).detach().abs().max()
    alone = k.detach().reshape(-1, u0.shape[-1])[0]
    rate = with_parameters(f, parameters)
    beside = call_rate(rate, later.reshape(start.shape), u0).detach().reshape(-1, u0.shape[-1])[0]
    rounding = 1e3 * torch.finfo(start.dtype).eps
    if bool(((beside - alone).abs() > rounding * alone.abs().max()).any()):
        raise OneTimeError(
            "the rate mixes the times of different trajectories; under error control each has its own "
            "time, and t has shape [*batch, 1]: let t multiply states or rates, not a matrix"
        )
    return f, k, 2


def _uses_gradients(f: Rate, parameters: Tensor | None) -> bool:
    """Whether f is, takes or closes over something with gradients (it may come into play later)."""
    cells = getattr(f, "__closure__", None) or ()
    for thing in (f, parameters, *(cell.cell_contents for cell in cells)):
        if isinstance(thing, Tensor) and thing.requires_grad:
            return True
        if isinstance(thing, torch.nn.Module) and any(p.requires_grad for p in thing.parameters()):
            return True
    return False


def _differentiable(*tensors: Tensor) -> bool:
    """Whether a derivative of one of them may be asked for, in reverse or in forward mode."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    return any(is_transformed(x) or has_tangent(x) for x in tensors)


def _differentiates_start(t: Tensor) -> bool:
    return t.requires_grad or has_tangent(t)
