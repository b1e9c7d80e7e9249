"""Error control with a step size per trajectory.

In each round every trajectory attempts a step, with its own time and step size. Where the error test
fails, the next round repeats the attempt with a smaller step (see `rounds`). States at output times are
interpolated; if the interpolant is less accurate than the steps, steps end at the output times. With
`compile`, the rounds in which no trajectory reaches an output time before the last one are one compiled
loop.

The rounds record no graph. If gradients are required, the accepted steps are repeated with a graph (see
`replay`).
"""

from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from attractor.core.clocks import fitted_to_time
from attractor.core.compiling import NotCompiledError, compiled, components_first
from attractor.core.dense import Segment, SteppedOutput
from attractor.core.events import Event, EventSearch
from attractor.core.interpolant import coefficients
from attractor.core.native import native_rounds
from attractor.core.output_times import Output, needs_interpolant, states_inside
from attractor.core.rates import Rate, check_not_modified, version
from attractor.core.replay import Round, differentiated
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.round_loop import compiled_rounds
from attractor.core.rounds import (
    Control,
    Progress,
    Rules,
    as_time,
    attempt,
    first_step,
    positive,
    rate_calls,
)
from attractor.core.scheme import Scheme
from attractor.core.step import with_parameters
from attractor.core.tableaus import ALL, AnyScheme
from attractor.core.trajectory import Events, Stats, Status, Trajectory
from attractor.core.transforms import has_tangent, is_differentiated, is_transformed

SHORT = 4  # steps to the next output time, up to which the rounds run in Python


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
    """Return states at the times t, ``[n+1]`` or ``[n+1, *batch]``, under error control. See `evolve`.

    Args:
        parameters: Parameters of each trajectory ``[*batch, k]``; see `check_parameters`.
    """
    if not isinstance(scheme, Scheme | Rosenbrock) or scheme.b_low is None:
        pairs = [s.name for s in ALL.values() if isinstance(s, Scheme | Rosenbrock) and s.b_low]
        raise ValueError(
            f"{scheme.name} has no embedded pair, which error control requires; leave out rtol and "
            f"atol, or use one of {', '.join(pairs)}"
        )
    if u0.numel() == 0:
        none = torch.zeros(u0.shape[:-1], dtype=torch.long, device=u0.device)
        until = t[-1].detach().expand(u0.shape[:-1])
        states = u0.expand(len(t), *u0.shape)
        return Trajectory(t, states, Stats(0, 0, 0, none, none), none == 0, until)
    if compile and parameters is not None:
        parameters = components_first(parameters)
    has_weights, version_before = torch.is_grad_enabled() and _uses_gradients(f, parameters), version(u0)
    f, k, calls = fitted_to_time(f, t, u0, parameters)
    check_not_modified(u0, version_before)
    wants_grad = has_weights or _differentiable(u0, t, k)
    trajectory, rounds = _forward(
        f, u0.detach(), k.detach(), t.detach(), scheme, control, parameters, compile, wants_grad, dense,
        events,
    )  # fmt: skip
    stats = trajectory.stats
    if not wants_grad and not rounds:
        return replace(trajectory, stats=replace(stats, rate_calls=stats.rate_calls + calls))
    graphs = compile and isinstance(scheme, Scheme)
    solution, again = differentiated(
        f, u0, k, t, scheme, rounds, parameters, graphs, checkpoint, dense, events, trajectory.events
    )
    calls += stats.rate_calls + again + is_differentiated(t)
    return replace(trajectory, stats=replace(stats, rate_calls=calls), **solution)


def _forward(
    f: Rate,
    u0: Tensor,
    k0: Tensor,
    t_out: Tensor,
    scheme: Scheme | Rosenbrock,
    control: Control,
    parameters: Tensor | None,
    compile: bool,
    keep: bool,
    dense: bool = False,
    events: tuple[Event, ...] = (),
) -> tuple[Trajectory, list[Round]]:
    """Return the states without gradients, and the rounds if `keep`, or if gradients are required."""
    rate = with_parameters(f, parameters)
    graphs = compile and isinstance(scheme, Scheme)  # by torch; others are compiled in C or not at all
    step_of = compiled(attempt, u0.device, f, scheme) if graphs else attempt
    clock = t_out.to(torch.float32 if u0.device.type == "mps" else torch.float64)
    last, batch = len(clock) - 1, u0.shape[:-1]
    end, begin = (x if clock.dim() == 1 else x[..., None] for x in (clock[-1], clock[0]))
    sign = 1.0 if last == 0 or bool((end > begin).all()) else -1.0
    shortest = torch.finfo(clock.dtype).eps ** 2 * (end - begin).abs()
    exact = not positive(control.atol)
    rules = Rules(scheme, control, control.rtol, control.atol, exact, sign, shortest)
    # No estimate contains the error of a cubic, so steps end at the output times where the scheme
    # is more accurate than a cubic.
    lands = not scheme.interpolates

    output = Output(clock, sign, u0)
    rounds, segments = list[Round](), list[Segment]()
    which = torch.full(
        batch, -1, dtype=torch.long, device=u0.device
    )  # index of the event that ended a trajectory
    calls = steps = 0
    silent = keep  # attempts record no graph
    t = begin.expand(*batch, 1)
    search = EventSearch(events, t, u0) if events else None
    if control.first is None:
        h, calls = first_step(rate, begin, end, sign, u0, k0, scheme, control), calls + 1
    else:
        h = torch.full_like(t, sign * abs(control.first))
    ok = torch.isfinite(u0).all(-1) & torch.isfinite(k0).all(-1)
    now = Progress(
        t=t, h=h.abs().clamp(control.least, control.most) * sign, u=u0, k=k0,
        error=torch.ones_like(t), active=ok if last else torch.zeros_like(ok),
        status=torch.zeros_like(ok, dtype=torch.int8).masked_fill(~ok, Status.LOST),
        accepted=torch.zeros_like(which), rejected=torch.zeros_like(which),
    )  # fmt: skip
    may_loop = compile and not (keep or dense or events or u0.is_complex()) and u0.device.type == "cpu"

    native = native_rounds(f, rules, output, control.max_steps, now, parameters) if may_loop else None
    if native is not None:
        steps, now = native.taken, native.now
        calls += steps * rate_calls(scheme) + native.with_interpolant * len(scheme.extra_stages)
    may_loop &= graphs

    while bool(now.active.any()):
        if steps >= control.max_steps:
            status = now.status.masked_fill(now.active, Status.STEP_LIMIT)
            now = now._replace(status=status, active=torch.zeros_like(now.active))
            break
        goal = output.next() if lands else end
        if may_loop:
            pause = torch.where((output.upcoming < last)[..., None], output.next(), sign * torch.inf)
            if _far_from(pause, now):
                limit = control.max_steps - steps
                result = _run_loop(f, rules, goal, pause, limit, now, parameters)
                if result is None:
                    may_loop = False
                else:
                    count, now = result
                    steps, calls = steps + count, calls + count * rate_calls(scheme)
                    done = ~now.active & (now.status == Status.OK)
                    output.upcoming = output.upcoming.masked_fill(done, last + 1)
                    output.states[last] = now.u
                    continue
        steps += 1
        t, _, u, k, *_ = now
        step = rules.propose(now, goal)
        size, t1 = step.size, step.t1
        place = as_time(t, u), as_time(size, u), u, k, None, parameters
        # Lost and finished trajectories have steps of size 0, whose results are not used.
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not silent):
                u1, k1, stages = step_of(f, scheme, *place)
        except RuntimeError as failure:
            if not silent or "does not require grad" not in str(failure):
                raise
            silent = False  # the rate is a gradient itself, as for Hamilton's equations by autograd
            u1, k1, stages = step_of(f, scheme, *place)
        calls += rate_calls(scheme)
        if not keep and _differentiable(u1, k1, *stages):
            # A parameter that requires a gradient is used here for the first time. The solve starts
            # again and keeps the rounds; to keep them in all solves would take memory without need.
            again, rounds = _forward(
                f, u0, k0, t_out, scheme, control, parameters, compile, True, dense, events
            )
            stats = replace(again.stats, rate_calls=again.stats.rate_calls + calls)
            return replace(again, stats=stats), rounds
        if keep:
            u1, k1, stages = u1.detach(), k1.detach(), [k.detach() for k in stages]
        verdict = rules.judge(now, step, u1, k1, stages)
        passed = verdict.passed
        segment = cache(partial(_segment, scheme, rate, t, size, u, u1, stages, k1))
        event = None if search is None else search.first(passed, t1, u1, segment)
        stops = torch.zeros_like(passed) if event is None else ~event[0].isnan()
        if event is not None:
            t1 = torch.where(stops, t + event[0] * size, t1)
            which = torch.where(stops[..., 0], event[1], which)
        pairs = output.passed(passed, t1)
        if pairs is not None:
            theta = pairs.theta(clock, t, size, u)
            inside = event is not None or needs_interpolant(scheme, theta)
            own = segment() if inside else None
            output.flat[pairs.times, pairs.rows] = states_inside(scheme, u1, own, pairs, theta)
        if (keep or dense) and bool(passed.any()):
            moves = torch.where(passed, size, 0.0)
            if keep:
                rounds.append(Round(t, moves, passed, pairs, None if event is None else event[0]))
            else:
                segments.append(segment()._replace(h=moves))
        calls += segment.cache_info().currsize * len(scheme.extra_stages)
        if event is not None:
            u1 = torch.where(stops, segment().at(event[0].nan_to_num()), u1)
            now = now._replace(status=now.status.masked_fill(stops[..., 0], Status.EVENT))
        now = rules.advance(now, step, verdict, u1, k1, t1, output.arrived | (which >= 0))

    t, _, u, *_ = now
    stats, halted = Stats(calls, 0, steps, now.accepted, now.rejected), which >= 0
    until = torch.where(output.arrived & ~halted, clock[-1], t[..., 0]).to(t_out.dtype)
    happened = None
    if events:
        time = torch.where(halted, t[..., 0], torch.nan).to(t_out.dtype)
        happened = Events(time, torch.where(halted[..., None], u, torch.nan), which)
    ok = (now.status == Status.OK) | (now.status == Status.EVENT)
    trajectory = Trajectory(
        t_out, output.finish(u), stats, ok, until, now.status, happened,
        SteppedOutput(u0, segments) if dense else None,
    )  # fmt: skip
    return trajectory, rounds


def _segment(
    scheme: Scheme | Rosenbrock,
    f: Rate,
    t: Tensor,
    h: Tensor,
    u: Tensor,
    u1: Tensor,
    stages: list[Tensor],
    k1: Tensor,
) -> Segment:
    """Return steps with their interpolants, without gradients."""
    inner = coefficients(scheme, f, as_time(t, u), as_time(h, u), u, u1, stages, k1)
    return Segment(t, h, u, u1, [x.detach() for x in inner])


def _far_from(pause: Tensor, now: Progress) -> bool:
    """Return whether all active trajectories are more than a few steps away from the times `pause`."""
    far = (pause - now.t).abs() > SHORT * now.h.abs()
    return bool((far[..., 0] | ~now.active).all())


def _run_loop(
    f: Rate,
    rules: Rules,
    goal: Tensor,
    pause: Tensor,
    limit: int,
    now: Progress,
    parameters: Tensor | None,
) -> tuple[int, Progress] | None:
    """Call `compiled_rounds`; return None if only Python can run the rounds."""
    try:
        count, later = compiled_rounds(f, rules, goal, pause, limit, now, parameters)
    except NotCompiledError:  # Python cannot run a part of a loop
        return None
    # The loop computes no gradients of parameters that it uses for the first time.
    return None if _differentiable(later.u) else (count, later)


def _uses_gradients(f: Rate, parameters: Tensor | None) -> bool:
    """Return whether f, its closure or the parameters contain tensors that require gradients."""
    cells = getattr(f, "__closure__", None) or ()
    for thing in (f, parameters, *(cell.cell_contents for cell in cells)):
        if isinstance(thing, Tensor) and thing.requires_grad:
            return True
        if isinstance(thing, torch.nn.Module) and any(p.requires_grad for p in thing.parameters()):
            return True
    return False


def _differentiable(*tensors: Tensor) -> bool:
    """Return whether one of the tensors may be differentiated, in reverse or forward mode."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    return any(is_transformed(x) or has_tangent(x) for x in tensors)
