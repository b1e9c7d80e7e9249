"""Gradients under error control: the accepted steps are repeated with a graph.

Rejected steps are not differentiated, step sizes are constants, and `checkpoint` works as on a grid.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute_later

from attractor.core.compiling import compiled
from attractor.core.dense import Segment, SteppedOutput
from attractor.core.events import Event, differentiated_root
from attractor.core.interpolant import coefficients
from attractor.core.output_times import Pairs, needs_interpolant, states_inside
from attractor.core.rates import Rate, call_rate
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.rounds import as_time, attempt, rate_calls
from attractor.core.scheme import Scheme
from attractor.core.step import with_parameters
from attractor.core.trajectory import Events
from attractor.core.transforms import is_differentiated


class Round(NamedTuple):
    """A round with an accepted step, ``[*batch, 1]`` each; h is 0 where no step was accepted."""

    t: Tensor
    h: Tensor
    moving: Tensor  # False where a trajectory is finished or lost, or its attempt was rejected
    pairs: Pairs | None  # output times inside of the steps
    event: Tensor | None  # fraction of the step at which an event ends a trajectory, else NaN


def differentiated(
    f: Rate,
    u0: Tensor,
    k: Tensor,
    t_out: Tensor,
    scheme: Scheme | Rosenbrock,
    rounds: list[Round],
    parameters: Tensor | None,
    compile: bool,
    checkpoint: int | bool | None,
    dense: bool,
    events: tuple[Event, ...],
    happened: Events | None,
) -> tuple[dict[str, Any], int]:
    """Repeat the accepted steps with gradients.

    Returns:
        The fields of the trajectory that have gradients (states ``[n+1, *batch, d]``, events and dense
        output), and the number of calls of the rate.
    """
    rate = with_parameters(f, parameters)
    step_of = compiled(attempt, u0.device, f, scheme) if compile else attempt
    calls, segments = len(rounds) * rate_calls(scheme), list[Segment]()

    def replay(part: list[Round], u: Tensor, k: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        nonlocal calls
        values = []
        for t, h, moving, pairs, event in part:
            # Trajectories that do not move get the state of one that does, because the NaN of a lost one
            # would enter the gradients of shared parameters.
            donor = tuple(moving[..., 0].nonzero()[0])
            here = torch.where(moving, u, u.detach()[donor])
            first = torch.where(moving, k, k.detach()[donor])
            when = torch.where(moving, t, t[donor])
            place = as_time(when, u), as_time(h, u), here
            u1, k1, stages = step_of(f, scheme, *place, first, moving, parameters)
            theta = None if pairs is None else pairs.theta(t_out, t, h, u)
            segment: Segment | None = None
            if dense or event is not None or (theta is not None and needs_interpolant(scheme, theta)):
                own = lambda t, u, moving=moving: torch.where(moving, rate(t, u), 0.0)
                inner = coefficients(scheme, own, *place, u1, stages, k1)
                segment = Segment(t, h, here, u1, inner)
                calls += len(scheme.extra_stages)
                if dense:
                    segments.append(segment)
            if pairs is not None and theta is not None:
                values.append(states_inside(scheme, u1, segment, pairs, theta))
            if event is not None and segment is not None:
                u1 = torch.where(event.isnan(), u1, segment.at(event.nan_to_num()))
            u, k = torch.where(moving, u1, u), torch.where(moving, k1, k)
        return values, u, k

    u = u0
    if is_differentiated(t_out):
        # A start that is later by s is a start from u0 - s f(t0, u0), which has the gradient of t[0].
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
    # The state at output times that were not reached is the last one.
    out = torch.cat((u0[None], u.expand(len(t_out) - 1, *u.shape)))
    all_pairs = [r.pairs for r in rounds if r.pairs is not None]
    if all_pairs:
        rows, index = map(torch.cat, zip(*all_pairs))
        out = out.flatten(1, -2) if u.dim() > 1 else out[:, None]
        out = out.index_put((index, rows), torch.cat(values)).reshape(len(t_out), *u.shape)
    output = SteppedOutput(u0, segments) if dense else None
    return {"u": out, "events": happened, "dense": output}, calls
