"""Error control: a step size for every trajectory of the batch.

All trajectories make an attempt in each round, each with its own time and step; those that fail
their error test try again with a smaller step in the next round. States at the wanted times are
interpolated; where that would be coarser than the steps are, steps end there. The rounds keep no
graph. If gradients are wanted, the accepted steps are taken once more with them: no rejected step is
differentiated, step sizes are constants, and `checkpoint` works as on a grid.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint as recompute_later

from attractor.core.checks import is_number
from attractor.core.compiling import compiled
from attractor.core.dense import Segment, SteppedOutput
from attractor.core.events import bracketed_root, differentiated_root
from attractor.core.interpolant import coefficients, evaluate
from attractor.core.scheme import (
    Rate,
    Scheme,
    call_rate,
    check_unwritten,
    version,
    weighted_sum,
)
from attractor.core.tableaus import ALL, AnyScheme
from attractor.core.trajectory import Events, Stats, Status, Trajectory

Event: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (t [*batch], u [*batch, d]) -> [*batch]

# How torch says that a tensor of several numbers is not one.
_ONE_NUMBER = re.compile("one element tensors|converted to Scalar|more than one value is ambiguous")


def root_mean_square(x: Tensor) -> Tensor:
    """Over the last dimension, which is kept."""
    return x.abs().square().mean(-1, keepdim=True).sqrt()


@dataclass(frozen=True)
class Control:
    """How step sizes are chosen.

    Attributes:
        rtol, atol: Error allowed in a step, ``atol + rtol * |u|`` per component: numbers, or tensors
            that broadcast to the state ``[*batch, d]``.
        safety: The next step aims at this part of the largest that would just pass.
        grow, shrink: Most a step may change by from one attempt to the next.
        beta: Exponent of the previous error in the next step size (PI control; Hairer and Wanner II,
            IV.2). 0 is the elementary controller.
        first: Size of the first step; None estimates it (Hairer, Norsett, Wanner I, II.4).
        least, most: Bounds on a step's size.
        max_steps: Attempts after which trajectories that have not arrived are given up.
        norm: Error in units of the allowed error ``[*batch, d]`` -> ``[*batch, 1]``.
    """

    rtol: float | Tensor = 1e-7
    atol: float | Tensor = 1e-9
    safety: float = 0.9
    grow: float = 10.0
    shrink: float = 0.2
    beta: float = 0.0
    first: float | None = None
    least: float = 0.0
    most: float = float("inf")
    max_steps: int = 100_000
    norm: Callable[[Tensor], Tensor] = field(default=root_mean_square)

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                if value.requires_grad:
                    raise ValueError(f"{name} requires a gradient; pass {name}.detach()")
            elif not is_number(value):
                raise TypeError(
                    f"{name} is a {type(value).__name__}; pass a number, or a tensor that broadcasts to "
                    "the state"
                )
            if not (bool((value >= 0).all()) if isinstance(value, Tensor) else value >= 0):
                raise ValueError(f"{name} = {value}; a tolerance is a number >= 0")
        for name in ("safety", "grow", "shrink", "beta", "first", "least", "most", "max_steps"):
            value = getattr(self, name)
            if not is_number(value) and not (name == "first" and value is None):
                raise TypeError(f"{name} is a {type(value).__name__}; give a number")
            if value is not None and math.isnan(value):
                raise ValueError(f"{name} is not a number")
        if not (_positive(self.rtol) or _positive(self.atol)):
            raise ValueError("rtol and atol are both 0, so no step can pass; set at least one")

    def scale(self, u: Tensor, u1: Tensor) -> Tensor:
        """The allowed error ``[*batch, d]`` of a step from u to u1, in float32 or better."""
        size = torch.maximum(u.abs(), u1.abs())
        if size.dtype.itemsize < 4:
            size = size.float()
        return size * self.rtol + self.atol

    def measure(self, x: Tensor, scale: Tensor) -> float:
        """The norm of ``x / scale`` as one number; 0 / 0 counts as 0."""
        ratio = x.abs() / scale if x.is_complex() or x.dtype.itemsize < 4 else x / scale
        if not (isinstance(self.atol, float) and self.atol > 0):
            ratio = torch.where(x == 0, 0.0, ratio)
        if self.norm is root_mean_square:
            return torch.linalg.vector_norm(ratio).item() / math.sqrt(max(ratio.numel(), 1))
        return float(self.norm(ratio))

    def factor(self, error: float, previous: float, order: int) -> float:
        """By how much the next step is longer, after an attempt with these errors."""
        if not error > 0:  # exact, or not a number
            return self.grow if error == 0 else self.shrink
        factor = self.safety * error ** -(1 / (order + 1) - 0.75 * self.beta)
        if self.beta:
            factor *= max(previous, 1e-4) ** self.beta
        return min(max(factor, self.shrink), self.grow)


def _positive(tolerance: float | Tensor) -> bool:
    return bool((tolerance > 0).all()) if isinstance(tolerance, Tensor) else tolerance > 0


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
    compile: bool = False,
    checkpoint: int | bool | None = None,
    dense: bool = False,
    events: tuple[Event, ...] = (),
) -> Trajectory:
    """States at the times t, [n+1] or [n+1, *batch], under error control. See `evolve`."""
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
    has_weights, written = torch.is_grad_enabled() and _uses_gradients(f), version(u0)
    f, k, calls = _fitted_to_time(f, t, u0)
    check_unwritten(u0, written)
    wants_grad = has_weights or _differentiable(u0, t, k)
    trajectory, rounds = _forward(
        f, u0.detach(), k.detach(), t.detach(), scheme, control, compile, wants_grad, dense, events
    )
    stats = trajectory.stats
    if not wants_grad and not rounds:
        return replace(trajectory, stats=replace(stats, rate_calls=stats.rate_calls + calls))
    solution, again = _differentiated(
        f, u0, k, t, scheme, rounds, compile, checkpoint, dense, events, trajectory.events
    )
    calls += stats.rate_calls + again + _differentiates_start(t)
    return replace(trajectory, stats=replace(stats, rate_calls=calls), **solution)


def _forward(
    f: Rate,
    u0: Tensor,
    k: Tensor,
    t_out: Tensor,
    scheme: Scheme,
    control: Control,
    compile: bool,
    keep: bool,
    dense: bool = False,
    events: tuple[Event, ...] = (),
) -> tuple[Trajectory, list[_Round]]:
    """The states, without gradients, and the rounds if they are to be kept or gradients turn up."""
    attempt = compiled(_attempt, u0.device, f, scheme) if compile else _attempt
    clock = t_out.to(torch.float32 if u0.device.type == "mps" else torch.float64)
    last = len(clock) - 1
    end, begin = (x if clock.dim() == 1 else x[..., None] for x in (clock[-1], clock[0]))
    sign = 1.0 if last == 0 or bool((end > begin).all()) else -1.0
    ordered = sign * clock.movedim(0, -1).contiguous()  # [n+1] or [*batch, n+1]
    tiny = torch.finfo(clock.dtype).eps
    # The error of a cubic is in no estimate, so it must be of an order that the steps do not outdo.
    lands = not scheme.interpolates

    batch = u0.shape[:-1]
    u, k0, t = u0, k, begin.expand(*batch, 1)
    ok = torch.isfinite(u).all(-1) & torch.isfinite(k).all(-1)
    status = torch.zeros_like(ok, dtype=torch.int8).masked_fill(~ok, Status.LOST)
    upcoming = torch.ones(batch, dtype=torch.long, device=u.device)  # index of the next wanted time
    accepted = torch.zeros_like(upcoming)
    rejected = torch.zeros_like(upcoming)
    out = u0.expand(last + 1, *u0.shape).clone()
    flat_out = out.view(last + 1, -1, u0.shape[-1])
    least_floor = tiny**2 * (end - begin).abs()
    rounds: list[_Round] = []
    segments: list[Segment] = []
    extra = len(scheme.extra_stages)
    previous = torch.ones_like(t)  # error of the last accepted step
    halted = torch.zeros_like(ok)  # by an event
    which = torch.full_like(upcoming, -1)
    values = [_event_value(event, t[..., 0], u) for event in events]
    calls = steps = 0
    silent = keep  # attempts record no graph
    if control.first is None:
        h, calls = _first_step(f, begin, end, sign, u, k, scheme, control), calls + 1
    else:
        h = torch.full_like(t, sign * abs(control.first))
    h = h.abs().clamp(control.least, control.most) * sign

    while True:
        active = ok & (upcoming <= last) & ~halted
        if not bool(active.any()):
            break
        if steps >= control.max_steps:
            ok = ok & ~active
            status = status.masked_fill(active, Status.STEP_LIMIT)
            break
        steps += 1
        goal = _at(clock, upcoming.clamp(max=last))[..., None] if lands else end
        arrives = active[..., None] & ((goal - (t + h)) * sign <= 0)
        size = torch.where(arrives, goal - t, (t + h) - t)  # what the clock can tell
        size = torch.where(active[..., None], size, 0.0)
        # The lost and the finished stand still; what they evaluate is thrown away.
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not silent):
                u1, k1, stages = attempt(f, scheme, _cast(t, u), _cast(size, u), u, k)
        except RuntimeError as failure:
            if not silent or "does not require grad" not in str(failure):
                raise
            silent = False  # the rate is a gradient itself, such as Hamilton's equations by autograd
            u1, k1, stages = attempt(f, scheme, _cast(t, u), _cast(size, u), u, k)
        calls += _calls(scheme)
        if not keep and _differentiable(u1, k1, *stages):
            # A parameter comes into play only now. Once more from the start, keeping the rounds: to
            # keep them always, in case this happens, would take memory from all who want no gradients.
            found, rounds = _forward(f, u0, k0, t_out, scheme, control, compile, True, dense, events)
            stats = replace(found.stats, rate_calls=found.stats.rate_calls + calls)
            return replace(found, stats=stats), rounds
        if keep:
            u1, k1, stages = u1.detach(), k1.detach(), [k.detach() for k in stages]
        error = _error(scheme, stages, _cast(size, u), u, u1, control, t.dtype)
        finite = (torch.isfinite(u1) & torch.isfinite(k1)).all(-1, keepdim=True)
        error = torch.where(finite, error, torch.nan).to(t.dtype)
        at_least = size.abs() <= control.least
        passed = active[..., None] & finite & ((error <= 1) | at_least)
        t1 = torch.where(arrives, goal, t + size)

        inner: list[Tensor] | None = None
        found_event = None
        if events:
            new_values = [_event_value(event, t1[..., 0], u1) for event in events]
            crossed = [
                passed[..., 0] & (old * new <= 0) & (old != 0) for old, new in zip(values, new_values)
            ]
            if bool(torch.stack(crossed).any()):
                inner = _constants(scheme, f, t, size, u, u1, stages, k1)
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
                inner = _constants(scheme, f, t, size, u, u1, stages, k1)
            flat_out[index, rows] = _inside(scheme, u, u1, inner, rows, theta)
            upcoming = torch.where(passed[..., 0], reached, upcoming)
        any_passed = (keep or dense) and bool(passed.any())
        if dense and any_passed and not keep:
            if inner is None:
                inner = _constants(scheme, f, t, size, u, u1, stages, k1)
            segments.append(Segment(t, torch.where(passed, size, 0.0), u, u1, inner))
        if inner is not None:
            calls += extra
        if keep and any_passed:
            rounds.append(_Round(t, torch.where(passed, size, 0.0), passed, wanted, found_event))
        if found_event is not None:
            assert inner is not None
            stops = ~found_event.isnan()
            u1 = torch.where(stops, evaluate(u, u1, inner, _cast(found_event.nan_to_num(), u)), u1)
            halted = halted | stops[..., 0]
            status = status.masked_fill(stops[..., 0], Status.EVENT)

        accepted += passed[..., 0]
        rejected += (active[..., None] & ~passed)[..., 0]
        u, k = torch.where(passed, u1, u), torch.where(passed, k1, k)
        t = torch.where(passed, t1, t)
        factor = control.safety * error ** -(1 / (scheme.error_order + 1) - 0.75 * control.beta)
        if control.beta:
            factor = factor * previous.clamp(min=1e-4) ** control.beta
            previous = torch.where(passed, error, previous)
        factor = factor.nan_to_num(control.shrink, posinf=control.grow)
        factor = _rounded(factor.clamp(control.shrink, control.grow))
        longer = size * factor
        if lands:  # a step cut short at a wanted time says little about the next one
            longer = torch.where(passed & arrives & (longer.abs() < h.abs()), h, longer)
        h = torch.where(active[..., None], longer, h)
        h = h.abs().clamp(control.least, control.most) * sign
        floor = t.abs() * (4 * tiny) + least_floor
        stuck = (h.abs() <= floor) | (at_least & ~passed)
        stopped = active & stuck[..., 0] & (upcoming <= last) & ~halted
        if bool(stopped.any()):
            reason = torch.where(finite[..., 0], Status.STEP_UNDERFLOW, Status.LOST).to(status)
            status = torch.where(stopped, reason, status)
            ok = ok & ~stopped

    arrived = upcoming > last
    if not bool(arrived.all()):  # wanted times a lost trajectory did not reach: its last state
        times = torch.arange(last + 1, device=u.device).reshape(-1, *[1] * u.dim())
        out = torch.where(times < upcoming[..., None], out, u)
    stats = Stats(calls, 0, steps, accepted, rejected)
    until = torch.where(arrived & ~halted, clock[-1], t[..., 0]).to(t_out.dtype)
    happened = None
    if events:
        time = torch.where(halted, t[..., 0], torch.nan).to(t_out.dtype)
        happened = Events(time, torch.where(halted[..., None], u, torch.nan), which)
    trajectory = Trajectory(
        t_out, out, stats, ok & (arrived | halted), until, status, happened,
        SteppedOutput(u0, segments) if dense else None,
    )  # fmt: skip
    return trajectory, rounds


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
    inner = coefficients(scheme, f, _cast(t, u), _cast(h, u), u, u1, stages, k1)
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
            state = evaluate(u, u1, inner, _cast(place, u))
            return _event_value(event, (t + place * h)[..., 0], state)

        zero, one = torch.zeros_like(old), torch.ones_like(old)
        ends = torch.where(cross, old, one), torch.where(cross, new, one)
        roots.append(torch.where(cross, bracketed_root(value, zero, one, *ends), torch.inf))
    first, number = torch.stack(roots).min(0)
    return torch.where(first.isinf(), torch.nan, first)[..., None], number


def _event_value(event: Event, t: Tensor, u: Tensor) -> Tensor:
    """The value of an event function [*batch], in the precision of time."""
    value = event(_cast(t, u), u)
    if not isinstance(value, Tensor) or value.shape != u.shape[:-1]:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"an event function returned {got} for states of shape {list(u.shape)}; it must return one "
            f"number per trajectory, {list(u.shape[:-1])}"
        )
    return value.detach().to(t.dtype)


def _at(clock: Tensor, index: Tensor) -> Tensor:
    """Times [*batch] at the indices of each trajectory."""
    return clock[index] if clock.dim() == 1 else clock.gather(0, index[None])[0]


def _differentiated(
    f: Rate,
    u0: Tensor,
    k: Tensor,
    t_out: Tensor,
    scheme: Scheme,
    rounds: list[_Round],
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
    attempt = compiled(_attempt, u0.device, f, scheme) if compile else _attempt

    calls, segments = len(rounds) * _calls(scheme), list[Segment]()

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
            u1, k1, stages = attempt(f, scheme, _cast(when, u), _cast(h, u), here, first, moving)
            theta = None if wanted is None else _theta(t_out, wanted, t, h, u)
            inner: list[Tensor] | None = None
            if dense or event is not None or _needs_interpolant(scheme, theta):
                place = _cast(when, u), _cast(h, u), here
                rate = lambda t, u, moving=moving: torch.where(moving, f(t, u), 0.0)
                inner = coefficients(scheme, rate, *place, u1, stages, k1)
                calls += len(scheme.extra_stages)
            if dense:
                assert inner is not None
                segments.append(Segment(t, h, here, u1, inner))
            if wanted is not None:
                assert theta is not None
                values.append(_inside(scheme, here, u1, inner, wanted[0], theta))
            if event is not None:
                assert inner is not None
                state = evaluate(here, u1, inner, _cast(event.nan_to_num(), u))
                u1 = torch.where(event.isnan(), u1, state)
            u, k = torch.where(moving, u1, u), torch.where(moving, k1, k)
        return values, u, k

    u = u0
    if _differentiates_start(t_out):
        # Starting later by s is starting from u0 - s f(t0, u0): this carries the gradient of t[0].
        start = _cast(t_out[:1] if t_out.dim() == 1 else t_out[0][..., None], u0)
        u = u0 - k.detach() * (start - start.detach())
        k = call_rate(f, start.detach().expand(*u0.shape[:-1], 1), u)
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
        rate = call_rate(f, _cast(time, u)[..., None], torch.where(halted, u, u0).detach()).detach()
        calls += 1

        def event_of_each(t: Tensor, u: Tensor) -> Tensor:
            values = torch.stack([event(t, u) for event in events])
            return values.gather(0, index.clamp(min=0)[None])[0]

        when, state = differentiated_root(_cast(time, u), u, rate, event_of_each)
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
    return _cast((at[:, None] - t.reshape(-1, 1)[rows]) / h.reshape(-1, 1)[rows], u)


def _attempt(
    f: Rate, scheme: Scheme, t: Tensor, h: Tensor, u: Tensor, first: Tensor, moving: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A step: the new state, the rate there, and the stages; rates of those not moving are 0."""
    rate = f if moving is None else lambda t, u: torch.where(moving, f(t, u), 0.0)
    stages = scheme.stages(rate, t, u, h, first=first)
    new = u + h * weighted_sum(scheme._b, stages)
    last = stages[-1] if scheme.first_same_as_last else call_rate(rate, t + h, new)
    return new, last, stages


def _calls(scheme: Scheme) -> int:
    """Rate calls of an attempt, its first stage being known."""
    return len(scheme.b) - scheme.first_same_as_last


def _error(
    scheme: Scheme,
    stages: list[Tensor],
    h: Tensor,
    u: Tensor,
    u1: Tensor,
    control: Control,
    wide: torch.dtype,
) -> Tensor:
    """Norm of the error over the allowed error, in a precision in which tolerances are not 0."""
    scale = control.atol + control.rtol * torch.maximum(u.abs(), u1.abs()).to(wide)
    divided = torch.div if _positive(control.atol) else _over  # 0 / 0 counts as 0

    def estimate(weights: tuple[float, ...]) -> Tensor:
        return control.norm(divided((h * weighted_sum(weights, stages)).abs().to(wide), scale))

    error = estimate(scheme.error_weights)
    if not scheme.lower_error_weights:
        return error
    lower = estimate(scheme.lower_error_weights)
    return error * _over(error, torch.hypot(error, 0.1 * lower))


def _over(x: Tensor, scale: Tensor) -> Tensor:
    return torch.where(x == 0, 0.0, x / scale)


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


def _first_step(
    f: Rate,
    begin: Tensor,
    end: Tensor,
    sign: float,
    u: Tensor,
    k: Tensor,
    scheme: Scheme,
    control: Control,
) -> Tensor:
    """Estimate the size of the first step [*batch, 1] (Hairer, Norsett, Wanner I, II.4)."""
    wide = lambda x: x.abs().to(begin.dtype)
    scale = control.atol + control.rtol * wide(u)
    d0, d1 = control.norm(_over(wide(u), scale)), control.norm(_over(wide(k), scale))
    small = (d0 < 1e-5) | (d1 < 1e-5)
    h0 = torch.where(small, 1e-6, 0.01 * d0 / d1).nan_to_num(1e-6).clamp(min=1e-200)
    bend = call_rate(f, _cast(begin + sign * h0, u), u + sign * _cast(h0, u) * k).detach() - k
    d2 = control.norm(_over(wide(bend), scale)) / h0
    order = scheme.error_order + 1
    steepest = torch.maximum(d1, d2).nan_to_num(1e15)
    h1 = torch.where(steepest <= 1e-15, (h0 * 1e-3).clamp(min=1e-6), (0.01 / steepest) ** (1 / order))
    h = torch.minimum(100 * h0, h1).to(begin.dtype)
    return _rounded(torch.minimum(h, (end - begin).abs()))


def _rounded(x: Tensor) -> Tensor:
    """x to twelve bits.

    The last bit of a power depends on where in the batch it is computed (vector units and the rest
    of a loop differ); rounded, a trajectory takes the same steps in any company, almost surely.
    """
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 4096).round() / 4096, exponent)


@dataclass(frozen=True)
class _OfComponents:
    """A rate that works on the components of u, and so wants times [*batch] to go with them."""

    f: Rate

    def __call__(self, t: Tensor, u: Tensor) -> Tensor:
        return self.f(t[..., 0], u)


def _fitted_to_time(f: Rate, t: Tensor, u0: Tensor) -> tuple[Rate, Tensor, int]:
    """The rate for times [*batch, 1], its value at the start, and the calls it took to find out.

    ``u * t`` needs times [*batch, 1], ``x * t`` with ``x, y = u.unbind(-1)`` needs [*batch]. The
    wrong one gives the wrong shape, so one call tells which a rate wants; another one tells whether
    a trajectory sees its neighbours' times.
    """
    start = _cast(t[:1] if t.dim() == 1 else t[0][..., None], u0).expand(*u0.shape[:-1], 1)
    try:
        k = call_rate(f, start, u0)
    except (RuntimeError, ValueError) as error:
        try:
            f = _OfComponents(f)
            k = call_rate(f, start, u0)
        except (RuntimeError, ValueError):
            if not _ONE_NUMBER.search(str(error)):
                raise error from None
            raise ValueError(
                f"the rate takes t for one number ({error}), but under error control every trajectory "
                f"has its own time: t is {list(start.shape)}. Use torch.cos(t), torch.where(t < 1, ...) "
                "and the like; or a grid of times, without rtol and atol, where t is one number"
            ) from None
    if start.numel() == 1 or len(t) == 1:
        return f, k, 1
    later = start.detach().clone().reshape(-1, 1)
    later[1:] += 0.4 * _cast(t[-1] - t[0], u0).detach().abs().max()
    alone = k.detach().reshape(-1, u0.shape[-1])[0]
    beside = call_rate(f, later.reshape(start.shape), u0).detach().reshape(-1, u0.shape[-1])[0]
    rounding = 1e3 * torch.finfo(start.dtype).eps
    if bool(((beside - alone).abs() > rounding * alone.abs().max()).any()):
        raise ValueError(
            "the rate mixes the times of different trajectories; under error control each has its own "
            "time, and t has shape [*batch, 1]: let t multiply states or rates, not a matrix"
        )
    return f, k, 2


def _uses_gradients(f: Rate) -> bool:
    """Whether f is, or closes over, something with gradients (it may come into play later)."""
    cells = getattr(f, "__closure__", None) or ()
    for thing in (f, *(cell.cell_contents for cell in cells)):
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


def is_transformed(x: Tensor) -> bool:
    """Whether a transform of torch.func, such as jvp, is looking on."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def has_tangent(x: Tensor) -> bool:
    """Whether x carries a derivative in forward mode."""
    # Outside of all dual levels, which is the rule, the lookup would cost as much as an operation.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _cast(time: Tensor, u: Tensor) -> Tensor:
    return time.to(u.real.dtype if u.is_complex() else u.dtype)
