"""Steps on a grid of times, without error control.

Steps are taken in *chunks* of about ten. A non-finite state stays non-finite under ``u + dt * S``, so
that one check at the end of a chunk is enough. If a trajectory was lost, the chunk is repeated step by
step to find its last finite state; the rows of lost trajectories are then replaced by the state of a
finite one, so that they do not affect shared gradients. `compile=True` compiles a chunk, and
`checkpoint=` recomputes chunks. Without gradients on the CPU, a compiled chunk is one loop of machine
code from one saved state to the next.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute_later

from attractor.common.checks import all_finite
from attractor.core.chunks import Guard, corrected_step, step_loop, take_steps
from attractor.core.compiling import NotCompiledError, compiled, operations
from attractor.core.identity import Identity
from attractor.core.march import LOOP, Loop, March, Survivors, everybody
from attractor.core.native import native_loop
from attractor.core.rates import Rate, check_not_modified, version
from attractor.core.splitting import Splitting
from attractor.core.step import Correction, correction_of_step, with_parameters
from attractor.core.tableaus import AnyScheme
from attractor.core.trajectory import Record, Stats, Status, Trajectory
from attractor.core.transforms import (
    has_tangent,
    is_differentiated,
    is_transformed,
    is_vmapped,
    under_vmap,
)

COMPILED_OPERATIONS = 1_000  # in an unrolled compiled chunk: ten steps of a small system
SHORT = 4  # up to so many steps between saved states are unrolled
CHUNK = 10  # steps: enough to hide the cost of a start, few enough to compile in seconds


def on_grid(
    f: Rate,
    u0: Tensor,
    t: Tensor,
    scheme: AnyScheme,
    correction: Correction | None = None,
    *,
    parameters: Tensor | None = None,
    every: int = 1,
    compile: bool = False,
    checkpoint: int | bool | None = None,
    watch: bool = True,
    guard: Guard | None = None,
    may_loop: bool = True,
) -> Trajectory:
    """Solve as `evolve`, without error control.

    Args:
        parameters: Of each trajectory ``[*batch, k]``, see `check_parameters`.
        watch: Check for non-finite states after each chunk.
        guard: Where the correction may be applied.
        may_loop: Whether compiled chunks may be loops.
    """
    if watch and guard is None and under_vmap():
        return _under_vmap(f, u0, t, scheme, correction, parameters, every)
    n, saved, version_before = len(t) - 1, output_indices(len(t) - 1, every), version(u0)
    real = u0.real.dtype if u0.is_complex() else u0.dtype
    times, dt = t.to(real), t.diff().to(real)
    correction = correction_of_step(correction)
    for when in (times[0], times[-1]):
        scheme.check_rate(with_parameters(f, parameters), when, u0)

    spacing = n if not checkpoint else math.isqrt(n) + 1 if checkpoint is True else int(checkpoint)
    longest = max(1, min(CHUNK, spacing))
    recompute = bool(checkpoint) and torch.is_grad_enabled()
    loop: Loop | None = None
    if may_loop and compile and n and not recompute:
        problem = times, dt, u0, parameters
        loop = _loop(f, scheme, correction, guard, min(n, every), *problem)
    if loop is not None:
        longest = min(LOOP, every)  # a loop returns its last state only
        if isinstance(loop, partial):  # a compiled loop has inputs of one shape
            times, dt = (torch.cat((x, x.new_zeros(LOOP))) for x in (times, dt))
    elif compile and n:
        # Compilers slow down on very long functions, and gcc 12 breaks down.
        inside = None if guard is None else guard.inside
        fixed = (f, scheme, correction, inside, (1,))
        size = operations(take_steps, fixed, times, dt, u0, None, parameters)
        check_not_modified(u0, version_before)
        longest = min(longest, COMPILED_OPERATIONS // size + 1)
    length = _chunk_length(n, every, longest)
    march = March(
        f=f, scheme=scheme, correction=correction, parameters=parameters, t=t, times=times,
        dt=dt if compile else _as_numbers(dt, t), saved=frozenset(saved), loop=loop,
        compiled_length=length if compile and loop is None else 0, watch=watch, guard=guard,
        outside={},
    )  # fmt: skip

    u, lengths = u0, list[int]()
    is_finite = watch and all_finite(u0)
    survivors = None if not watch or is_finite else everybody(u0, t)
    record = Record(u0, len(saved))
    record.put(u0)
    chunks = _chunks(n, every, length)
    for group in _groups(chunks, spacing) if recompute else ([one] for one in chunks):
        if survivors is not None and not bool(survivors.alive.any()):
            break
        if recompute:
            result = recompute_later(march.segment, group, u, survivors, use_reentrant=False)
        else:
            try:
                result = march.segment(group, u, survivors)
            except NotCompiledError:  # Python cannot run a part of a loop
                return on_grid(
                    f, u0, t, scheme, correction, parameters=parameters, every=every, compile=True,
                    checkpoint=checkpoint, watch=watch, guard=guard, may_loop=False,
                )  # fmt: skip
        if not lengths:
            check_not_modified(u0, version_before)
        states, u, survivors, took = result
        lengths += took
        for state in states:
            record.put(state)
    while len(record) < len(saved):  # all are lost: the last finite states remain
        record.put(u)

    if survivors is None:
        survivors = _all_of(u0, t) if is_finite else everybody(u0, t)
    steps = sum(lengths)
    calls = steps * scheme.rate_calls
    if isinstance(scheme, Splitting) and correction is None:
        calls -= scheme.saved_calls * (steps - len(lengths))
    if guard is not None:
        calls += guard.rate_calls
    status, guarded = march.outcome(survivors)
    stats = Stats(calls, steps * (correction is not None), steps, guarded=guarded)
    return Trajectory(t[saved], record.finish(), stats, *survivors, status)


def _under_vmap(
    f: Rate,
    u0: Tensor,
    t: Tensor,
    scheme: AnyScheme,
    correction: Correction | None,
    parameters: Tensor | None,
    every: int,
) -> Trajectory:
    """Solve as `on_grid` under torch.func.vmap, which hides the values on which decisions depend.

    All trajectories take all steps, one by one and not compiled. A lost trajectory keeps its last finite
    state, but its gradient is non-finite.
    """
    n, saved = len(t) - 1, frozenset(output_indices(len(t) - 1, every))
    real = u0.real.dtype if u0.is_complex() else u0.dtype
    times, dt = t.to(real), _as_numbers(t.diff().to(real), t)
    correction = correction_of_step(correction)
    u, (alive, until) = u0, everybody(u0, t)
    states = [u0]
    for i in range(n):
        (new,), _ = take_steps(
            f, scheme, correction, None, (1,), times[i : i + 1], dt[i : i + 1], u, None, parameters
        )
        lost = alive & ~torch.isfinite(new.detach()).all(-1)
        alive, until = alive & ~lost, torch.where(lost, t[i].detach(), until)
        u = torch.where(alive[..., None], new, u)
        if i + 1 in saved:
            states.append(u)
    stats = Stats(n * scheme.rate_calls, n * (correction is not None), n)
    status = torch.zeros_like(alive, dtype=torch.int8).masked_fill(~alive, Status.LOST)
    return Trajectory(t[sorted(saved)], torch.stack(states), stats, alive, until, status)


def _all_of(u: Tensor, t: Tensor) -> Survivors:
    """Return all trajectories as survivors up to the last time. Requires: all of them are finite."""
    alive = torch.ones(u.shape[:-1], dtype=torch.bool, device=u.device)
    return Survivors(alive, t[-1].detach().expand(u.shape[:-1]).clone())


def _loop(
    f: Rate,
    scheme: AnyScheme,
    correction: Correction | None,
    guard: Guard | None,
    steps: int,
    t: Tensor,
    dt: Tensor,
    u: Tensor,
    parameters: Tensor | None,
) -> Loop | None:
    """Return a loop of steps, that of the correction or a compiled one; None if there can be no loop.

    Loops run on the CPU, for real states and without gradients.

    Args:
        steps: Number of steps between saved states.
    """
    if u.device.type != "cpu" or u.is_complex() or not u.numel() or is_transformed(u):
        return None
    p = u if parameters is None else parameters
    records = torch.is_grad_enabled() and p.requires_grad
    if u.requires_grad or t.requires_grad or records or any(map(has_tangent, (u, t, p))):
        return None
    own = getattr(correction, "_identity_loop", None) if isinstance(scheme, Identity) else None
    loop: Loop | None = None if own is None else own(u, guard)
    if loop is not None:
        return loop
    step = lambda: corrected_step(f, scheme, correction, t[0], dt[0], u, parameters)
    if torch.is_grad_enabled() and step().requires_grad:
        return None
    loop = native_loop(f, scheme, correction, guard, t, dt, u, parameters)
    if loop is not None or steps <= SHORT:
        return loop
    if isinstance(scheme, Splitting) and correction is None:  # a step reuses the rate of the last one
        return None
    fixed = (f, scheme, correction, None if guard is None else guard.inside)
    return partial(compiled(step_loop, u.device, *fixed, or_plain=False), *fixed)


def _as_numbers(dt: Tensor, t: Tensor) -> Any:
    """Return step sizes as numbers, which need no work on the device, unless times are transformed."""
    return dt if is_differentiated(t) or is_vmapped(t) else dt.tolist()


def output_indices(n: int, every: int) -> list[int]:
    """Return the indices of the states 0..n that are saved."""
    return [*range(0, n, every), n] if n else [0]


def _chunk_length(n: int, every: int, most: int) -> int:
    """Return the number of steps per chunk, such that chunks end at saved states and few are shorter."""
    if every <= most:
        return min(most // every * every, n)
    return min(range(most, max(most // 2, 1) - 1, -1), key=lambda length: every % length)


def _chunks(n: int, every: int, length: int) -> list[tuple[int, int]]:
    """Return the chunks (first, stop) that cover steps 0..n."""
    block = max(every, length)
    return [
        (first, min(first + length, start + block, n))
        for start in range(0, n, block)
        for first in range(start, min(start + block, n), length)
    ]


def _groups(chunks: list[tuple[int, int]], steps: int) -> list[list[tuple[int, int]]]:
    """Return consecutive chunks, grouped to about a number of steps."""
    groups: list[list[tuple[int, int]]] = []
    for first, stop in chunks:
        if groups and stop - groups[-1][0][0] <= steps:
            groups[-1].append((first, stop))
        else:
            groups.append([(first, stop)])
    return groups
