"""The step loop. With `control`, its adaptive sister, it is the only place where time is stepped.

On a grid of times, steps are taken in short *runs* (ten or so) without looking, because a
non-finite state stays non-finite under ``u + dt * S``; one look at the end of a run is enough. Only
when a trajectory was lost is the run repeated step by step to find its last finite state, with the
lost rows replaced by a healthy neighbour's state so that they disturb nobody's gradients. A run is
also what `compile=True` compiles and what `checkpoint=` recomputes. Compiled runs without gradients
on the CPU are longer: one loop of machine code from one kept state to the next.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute_later

from attractor.core.checks import check_values, is_whole
from attractor.core.compiling import NotCompiledError, compiled, components_first, operations
from attractor.core.control import Event, controlled
from attractor.core.dense import GridOutput
from attractor.core.identity import Identity
from attractor.core.rounds import Control
from attractor.core.runs import Guard, Looped, corrected_step, guarded_step, looped, only_alive, run
from attractor.core.scheme import Rate, Scheme, broadcasts, check_unwritten, version
from attractor.core.splitting import Splitting
from attractor.core.step import Correction, correction_of_step, with_parameters
from attractor.core.tableaus import AnyScheme, get_scheme
from attractor.core.trajectory import Record, Stats, Status, Trajectory
from attractor.core.transforms import (
    check_checkpoint,
    has_tangent,
    is_transformed,
    is_vmapped,
    under_vmap,
    without_vmap,
)


def evolve(
    f: Rate,
    u0: Tensor,
    t: Tensor | Sequence[float],
    scheme: str | AnyScheme | None = None,
    correction: Correction | None = None,
    *,
    parameters: Tensor | None = None,
    every: int = 1,
    compile: bool = False,
    checkpoint: int | bool | None = None,
    rtol: float | Tensor | None = None,
    atol: float | Tensor | None = None,
    max_steps: int = 100_000,
    dense: bool = False,
    events: Event | Sequence[Event] | None = None,
) -> Trajectory:
    """Follow ``du/dt = f(t, u)`` from u0 at ``t[0]`` through the times t.

    Without rtol and atol there is one step from each time to the next. With either of them every
    trajectory of the batch chooses its own steps, and t says only where states are wanted.

    Args:
        f: the rate. On a grid t is a tensor of no dimension. Under error control trajectories have
            their own times: ``[*batch, 1]``, or ``[*batch]`` for a rate that works on the
            components of u; which of them fits is found by a call. Trajectories must not depend on
            each other.
        u0: initial states ``[*batch, d]``, floating or complex.
        t: times, 1-D, strictly increasing or decreasing, spacing free. Under error control also
            ``[n+1, *batch]``, one column of times per trajectory, all in one direction.
        scheme: a name (see `get_scheme`), a Scheme or a Splitting. None: "dopri5" if a tolerance is
            passed, "rk4" otherwise.
        correction: What is added to a plain step: ``correction(step)`` of a `Step`, or
            ``correction(u, slope, dt)``; one with a true attribute `timed` is called with t as a fourth
            argument.
        parameters: Parameters ``[*batch, k]`` of the trajectories, or ``[k]`` for all of them. The rate
            is then called with them as a third argument, ``f(t, u, p)``.
        every: keep every n-th state and the last one; the others take no memory.
        compile: compile steps with `torch.compile`. On the CPU and without gradients they become one
            loop from one kept state to the next, elsewhere several steps at a time. Under error control
            this needs a call without events and dense output. Compiling a rate takes about ten seconds
            (see docs/foundation.md).
        checkpoint: gradients in bounded memory: keep only every n-th state of the graph (True:
            about the square root of the number of steps) and recompute between them in the
            backward pass.
        rtol, atol: local error per step allowed, relative and absolute (root mean square over d):
            numbers, or tensors that broadcast to u0. Given one, the other is 1e-7 or 1e-9. Requires a
            scheme with an embedded pair: "bosh3", "dopri5", ... Gradients treat the step sizes as
            constants.
        max_steps: under error control, trajectories that have not arrived after so many attempts
            are given up (not ok).
        dense: keep the interpolants of all steps, so that ``trajectory(t)`` returns states at any time.
        events: under error control, a function ``(t, u) -> values`` or several, t ``[*batch]``, u
            ``[*batch, d]`` and the values ``[*batch]``. A trajectory ends where one of its values
            crosses zero, and keeps that state at later times; see `Trajectory.events`.

    Returns:
        A `Trajectory`. Where a state becomes non-finite, the trajectory keeps its last finite
        state and `ok` is False; its neighbours' values and gradients are untouched. `status` has the
        reason per trajectory.

    Raises:
        ValueError, TypeError: for input that cannot be evolved, saying what to change.

    >>> from attractor.core import evolve
    >>> u0 = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    >>> spring = lambda t, u: torch.stack((u[..., 1], -u[..., 0]), -1)
    >>> end = evolve(spring, u0, torch.linspace(0, 2 * math.pi, 101), "rk4").final
    >>> bool(torch.allclose(end, u0, atol=1e-4))
    True
    """
    if not callable(f):
        raise TypeError(f"f is a {type(f).__name__}; pass a function (t, u) -> du/dt")
    controls_error = rtol is not None or atol is not None
    scheme = get_scheme(scheme if scheme is not None else "dopri5" if controls_error else "rk4")
    with without_vmap("error control"):
        t = check_problem(u0, t, per_trajectory=controls_error)
    parameters = check_parameters(u0, parameters)
    if not is_whole(every) or every < 1:
        raise ValueError(f"every = {every!r} keeps nothing; use 1 for all states, 10 for each tenth")
    if checkpoint is not None and not (
        checkpoint in (True, False) or (is_whole(checkpoint) and checkpoint > 0)
    ):
        raise ValueError(f"checkpoint = {checkpoint!r}; use True, or the number of steps between states")
    check_checkpoint(checkpoint)
    if dense and every != 1:
        raise ValueError(f"dense=True needs all states, but every = {every}; use every=1")
    if dense and checkpoint:
        raise ValueError(
            "dense=True keeps all steps, which checkpoint is meant to avoid; use one of them"
        )
    if not controls_error:
        if events is not None:
            raise ValueError(
                "events need error control; pass rtol or atol, or use odeint with step_size"
            )
        solved = on_grid(
            f, u0, t, scheme, correction, parameters=parameters, every=every, compile=compile,
            checkpoint=checkpoint,
        )  # fmt: skip
        if not dense:
            return solved
        own = isinstance(scheme, Scheme) and scheme.dense_weights and correction is None
        rate = with_parameters(f, parameters)
        output = GridOutput(rate, t, solved.u, solved.until, scheme if own else None)  # type: ignore[arg-type]
        return replace(solved, dense=output)

    if correction is not None:
        raise ValueError(
            "a correction is fitted to one step size, so it cannot be combined with rtol/atol; "
            "leave out one of them"
        )
    control = Control(
        rtol=1e-7 if rtol is None else rtol,
        atol=1e-9 if atol is None else atol,
        max_steps=max_steps,
    )
    with without_vmap("error control"):
        return controlled(
            f, u0, t[_saved(len(t) - 1, every)], scheme, control, parameters=parameters,
            compile=compile, checkpoint=checkpoint, dense=dense, events=_as_events(events),
        )  # fmt: skip


def _as_events(events: Event | Sequence[Event] | None) -> tuple[Event, ...]:
    found = () if events is None else (events,) if callable(events) else tuple(events)
    if not all(callable(event) for event in found):
        raise TypeError("events must be a function (t, u) -> [*batch], or a list of such functions")
    return found


def check_problem(u0: Tensor, t: Tensor | Sequence[float], per_trajectory: bool = False) -> Tensor:
    """The times as a tensor beside u0, after checking both; [n+1, *batch] only if per_trajectory."""
    if not isinstance(u0, Tensor):
        raise TypeError(
            f"u0 is a {type(u0).__name__}; give a tensor [*batch, d], for example torch.as_tensor(u0)"
        )
    if not (u0.is_floating_point() or u0.is_complex()):
        raise TypeError(
            f"u0 has dtype {u0.dtype}; states move continuously: use u0.float() or .double()"
        )
    if u0.dim() == 0:
        raise ValueError("u0 has no dimension; a state needs one, even of size 1: use u0[None]")
    check_values("u0", u0)
    if not isinstance(t, Tensor):
        try:
            t = torch.as_tensor(t, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"t is {t!r}; give a 1-D tensor of times, or a list of numbers") from None
    check_values("t", t)
    t = t.to(u0.device)
    if t.is_complex():
        raise TypeError(f"t is of {t.dtype}; times are real")
    if not t.is_floating_point():
        t = t.to(torch.float64)
    own_times = per_trajectory and t.dim() > 1 and t.shape[1:] == u0.shape[:-1]
    if (t.dim() != 1 and not own_times) or len(t) == 0:
        also = f", or [n+1, *{list(u0.shape[:-1])}]" if per_trajectory else ""
        raise ValueError(f"t has shape {list(t.shape)}; give a 1-D tensor of times{also}")
    if is_vmapped(t) and not per_trajectory:
        return t  # nobody can look at its values
    steps = t.detach().diff(dim=0)
    if not (bool((steps > 0).all()) or bool((steps < 0).all())):
        raise ValueError("t must be finite and strictly increasing or strictly decreasing")
    if not bool(torch.isfinite(t.detach()).all()):
        raise ValueError("t holds non-finite times")
    return t


def check_parameters(u0: Tensor, parameters: Tensor | None) -> Tensor | None:
    """The parameters of each trajectory ``[*batch, k]``, of the type of u0 and on its device."""
    if parameters is None:
        return None
    if not isinstance(parameters, Tensor):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}; give a tensor [*batch, k], or [k] for all"
        )
    if not parameters.is_floating_point() and not parameters.is_complex():
        raise TypeError(f"parameters are of {parameters.dtype}; give floating numbers: use .to(u0)")
    check_values("parameters", parameters)
    batch = u0.shape[:-1]
    if parameters.dim() == 0 or not broadcasts(parameters[..., 0], batch):
        raise ValueError(
            f"parameters {list(parameters.shape)} do not fit u0 {list(u0.shape)}; give one row per "
            f"trajectory, {[*batch, 'k']}, or one for all, ['k']"
        )
    return parameters.to(u0).expand(*batch, parameters.shape[-1])


# On a grid


Loop: TypeAlias = Callable[..., Looped]  # (t, dt, count, u, anywhere, parameters), as for `looped`


class _Survivors(NamedTuple):
    """Trajectories that are still followed, and the time up to which each one was; ``[*batch]`` each."""

    alive: Tensor
    until: Tensor


@dataclass(frozen=True)
class _March:
    """Steps along a grid of times, in runs. Survivors are None as long as no trajectory was lost."""

    f: Rate
    scheme: AnyScheme
    correction: Correction | None
    parameters: Tensor | None  # [*batch, k]
    t: Tensor  # as the caller passed it
    times: Tensor  # in the state's precision, for the rate
    dt: Any  # numbers, or a tensor where steps are compiled or differentiated
    saved: frozenset[int]
    compiled_length: int  # runs of this many steps are compiled; 0: none
    loop: Loop | None  # of steps, in machine code
    watch: bool
    guard: Guard | None
    outside: dict[int, Tensor]  # trajectories [*batch] outside of the guarded region, per step

    def run(
        self, first: int, keep: tuple[int, ...], u: Tensor, survivors: _Survivors | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Take keep[-1] steps from u. Lost trajectories stand still.

        Returns:
            The states after the steps in `keep`, and with a guard the trajectories ``[*batch]`` that
            started every one of these steps inside.
        """
        stop = first + keep[-1]
        inside = None if self.guard is None else self.guard.inside
        fixed = (self.f, self.scheme, self.correction, inside)
        u, p = _stand_in(u, survivors), _stand_in(self.parameters, survivors)
        if self.loop is not None:
            return self.looped_run(first, keep[-1], u, survivors, p)
        steps = run
        if keep[-1] == self.compiled_length:
            u, p = components_first(u), None if p is None else components_first(p)
            steps = compiled(run, u.device, *fixed, keep)
        alive = survivors.alive if survivors is not None and torch.is_grad_enabled() else None
        return steps(*fixed, keep, self.times[first:stop], self.dt[first:stop], u, alive, p)

    def looped_run(
        self, first: int, count: int, u: Tensor, survivors: _Survivors | None, p: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """The same by a compiled loop, which stops where the guard has to step."""
        guard, loop = self.guard, self.loop
        assert loop is not None
        u, p = components_first(u), None if p is None else components_first(p)
        everybody = torch.ones(u.shape[:-1], dtype=torch.bool, device=u.device)
        anywhere, stayed = everybody, everybody
        if guard is not None and guard.replace is not None:
            anywhere = ~everybody if survivors is None else ~survivors.alive

        def steps(done: int, most: int, u: Tensor, anywhere: Tensor) -> Looped:
            t, dt = (x[first + done : first + done + LOOP] for x in (self.times, self.dt))
            return loop(t, dt, torch.tensor(most), u, anywhere, p)

        done = 0
        while done < count:
            taken, u, inside, still = steps(done, count - done, u, anywhere)
            done, stayed = done + int(taken), stayed & still
            if done == count:
                break
            assert guard is not None
            left, i = ~(inside | anywhere), first + done
            self.outside.setdefault(i, left)  # runs are repeated where a trajectory is lost
            rate = with_parameters(self.f, None if p is None else p[left])
            guarded = guard.step(rate, self.times[i], self.dt[i], u[left])
            others = steps(done, 1, u, everybody).u
            u, done = components_first(others.masked_scatter(left[..., None], guarded)), done + 1
        return [u], None if guard is None or guard.replace is not None else stayed

    def guarded_run(
        self, first: int, keep: tuple[int, ...], u: Tensor, survivors: _Survivors | None
    ) -> list[Tensor]:
        """The same run, in which the guard replaces every step that starts outside."""
        assert self.guard is not None
        u, p = _stand_in(u, survivors), _stand_in(self.parameters, survivors)
        states, f = list[Tensor](), self.f
        if survivors is not None:
            f = only_alive(survivors.alive, f)
        for i in range(first, first + keep[-1]):
            u, outside = guarded_step(
                f, self.scheme, self.correction, self.guard, self.times[i], self.dt[i], u, p
            )
            if bool(outside.any()):
                known = outside if survivors is None else outside & survivors.alive
                self.outside.setdefault(i, known)  # runs are repeated where a trajectory is lost
            if i + 1 - first in keep:
                states.append(u)
        return states

    def with_guarded(
        self, left: Tensor, first: int, keep: tuple[int, ...], u: Tensor, states: list[Tensor]
    ) -> list[Tensor]:
        """The states of a run, in which the trajectories that left are repeated with the guard."""
        own = None if self.parameters is None else self.parameters[left]
        few = replace(self, parameters=own, outside={})
        guarded = few.guarded_run(first, keep, u[left], None)
        for step, outside in few.outside.items():
            everybody = torch.zeros_like(left)
            everybody[left] = outside
            self.outside.setdefault(step, everybody)
        return [state.masked_scatter(left[..., None], part) for state, part in zip(states, guarded)]

    def attempt(
        self, first: int, keep: tuple[int, ...], u: Tensor, survivors: _Survivors | None
    ) -> tuple[list[Tensor], list[int]]:
        """A run, by guarded steps where they are needed; its states and the lengths of runs it took."""
        states, inside = self.run(first, keep, u, survivors)
        took = [keep[-1]]
        if self.guard is None or inside is None:
            return states, took
        left = ~inside if survivors is None else ~inside & survivors.alive
        if not bool(left.any()):
            return states, took
        if self.guard.replace is None:
            self.outside.setdefault(first, left)
            return states, took
        if not (states[-1].requires_grad or has_tangent(states[-1])):
            return self.with_guarded(left, first, keep, u, states), took
        guarded = self.guarded_run(first, keep, u, survivors)
        took.append(keep[-1])
        stayed = ~left if survivors is None else ~left & survivors.alive
        if keep[-1] == self.compiled_length and bool(stayed.any()):
            # Compiled steps round differently, and those who stayed inside keep their bits.
            until = _everybody(u, self.t).until if survivors is None else survivors.until
            states, _ = self.run(first, keep, u, _Survivors(stayed, until))
            took.append(keep[-1])
            guarded = [torch.where(stayed[..., None], a, b) for a, b in zip(states, guarded)]
        return guarded, took

    def advance(
        self, first: int, stop: int, u: Tensor, survivors: _Survivors | None
    ) -> tuple[list[Tensor], _Survivors | None, list[int]]:
        """A run; its states to keep and the last, who survived it, and the lengths of runs it took."""
        keep = tuple(i - first for i in range(first + 1, stop + 1) if i in self.saved or i == stop)
        states, took = self.attempt(first, keep, u, survivors)
        states = _of_living(survivors, states, [u] * len(keep))
        if not self.watch or _all_finite(states[-1]):
            return states, survivors, took

        # A trajectory was lost. Step by step: which one, when, and where was it last?
        before, survivors, single = self.step_by_step(first, keep, u, survivors)
        if not bool(survivors.alive.any()):
            return before, survivors, [*took, *single]
        # The survivors again by the same run as ever, so that they get the same bits.
        states, again = self.attempt(first, keep, u, survivors)
        return _of_living(survivors, states, before), survivors, [*took, *single, *again]

    def step_by_step(
        self, first: int, keep: tuple[int, ...], u: Tensor, survivors: _Survivors | None
    ) -> tuple[list[Tensor], _Survivors, list[int]]:
        """The same run one step at a time: a trajectory that is lost stays where it was before."""
        states, took = list[Tensor](), list[int]()
        alive, until = survivors or _everybody(u, self.t)
        for i in range(first, first + keep[-1]):
            while bool(alive.any()):
                (new,), lengths = self.attempt(i, (1,), u, _Survivors(alive, until))
                took += lengths
                lost = alive & ~torch.isfinite(new).all(-1)
                if not bool(lost.any()):
                    u = torch.where(alive[..., None], new, u)
                    break
                alive, until = alive & ~lost, torch.where(lost, self.t[i].detach(), until)
            if i + 1 - first in keep:
                states.append(u)
        return states, _Survivors(alive, until), took

    def segment(
        self, runs: list[tuple[int, int]], u: Tensor, survivors: _Survivors | None
    ) -> tuple[list[Tensor], Tensor, _Survivors | None, list[int]]:
        """Several runs: the states to keep, the last one, who survived, and the lengths of all runs."""
        states, took = list[Tensor](), list[int]()
        for first, stop in runs:
            new, survivors, lengths = self.advance(first, stop, u, survivors)
            u, took = new[-1], took + lengths
            states += new if stop in self.saved else new[:-1]
        return states, u, survivors, took

    def outcome(self, alive: Tensor, until: Tensor) -> tuple[Tensor, Tensor | None]:
        """Status of each trajectory, and how many of its steps were guarded; ``[*batch]`` each."""
        status = torch.zeros_like(alive, dtype=torch.int8).masked_fill(~alive, Status.LOST)
        if self.guard is None:
            return status, None
        count = torch.zeros_like(alive, dtype=torch.long)
        # Steps after a trajectory was lost do not count.
        sign = -1.0 if len(self.t) > 1 and bool(self.t[-1] < self.t[0]) else 1.0
        taken = torch.searchsorted(sign * self.t.detach(), sign * until.contiguous())
        for step, outside in self.outside.items():
            count += outside & (step < taken)
        left = Status.EXTRAPOLATED if self.guard.replace is None else Status.GUARDED
        status = torch.where(alive & (count > 0), torch.full_like(status, left), status)
        return status, None if self.guard.replace is None else count


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
    loop: bool = True,
) -> Trajectory:
    """`evolve` without error control.

    Args:
        parameters: Of each trajectory ``[*batch, k]``, see `check_parameters`.
        watch: Look for non-finite states after each run. False lets them stay and spread.
        guard: Where the correction may be applied.
        loop: Whether compiled runs may be loops.
    """
    if watch and guard is None and under_vmap():
        return _under_vmap(f, u0, t, scheme, correction, parameters, every)
    n, saved, written = len(t) - 1, _saved(len(t) - 1, every), version(u0)
    real = u0.real.dtype if u0.is_complex() else u0.dtype
    times, dt = t.to(real), t.diff().to(real)
    correction = correction_of_step(correction)
    for when in (times[0], times[-1]):
        scheme.check_rate(with_parameters(f, parameters), when, u0)

    spacing = n if not checkpoint else math.isqrt(n) + 1 if checkpoint is True else int(checkpoint)
    longest = max(1, min(RUN, spacing))
    recompute = bool(checkpoint) and torch.is_grad_enabled()
    compiled_loop: Loop | None = None
    if loop and compile and n and not recompute:
        problem = times, dt, u0, parameters
        compiled_loop = _loop(f, scheme, correction, guard, min(n, every), *problem)
    if compiled_loop is not None:
        longest = min(LOOP, every)  # a loop keeps its last state only
        # Every run is given as many times, of which the last one does not use all.
        times, dt = (torch.cat((x, x.new_zeros(LOOP))) for x in (times, dt))
    elif compile and n:
        # Compilers slow down on very long functions, and gcc 12 breaks down.
        inside = None if guard is None else guard.inside
        fixed = (f, scheme, correction, inside, (1,))
        size = operations(run, fixed, times, dt, u0, None, parameters)
        check_unwritten(u0, written)
        longest = min(longest, COMPILED_OPERATIONS // size + 1)
    length = _run_length(n, every, longest)
    runs = _runs(n, every, length)
    march = _March(
        f=f,
        scheme=scheme,
        correction=correction,
        parameters=parameters,
        t=t,
        times=times,
        dt=dt if compile else _as_numbers(dt, t),
        saved=frozenset(saved),
        compiled_length=length if compile and compiled_loop is None else 0,
        loop=compiled_loop,
        watch=watch,
        guard=guard,
        outside={},
    )

    u, lengths = u0, list[int]()
    survivors = None if not watch or _all_finite(u0) else _everybody(u0, t)
    record = Record(u0, len(saved))
    record.put(u0)
    for group in _groups(runs, spacing) if recompute else ([one] for one in runs):
        if survivors is not None and not bool(survivors.alive.any()):
            break
        if recompute:
            result = recompute_later(march.segment, group, u, survivors, use_reentrant=False)
        else:
            try:
                result = march.segment(group, u, survivors)
            except NotCompiledError:  # nothing inside a loop can be left to Python
                return on_grid(
                    f, u0, t, scheme, correction, parameters=parameters, every=every, compile=True,
                    checkpoint=checkpoint, watch=watch, guard=guard, loop=False,
                )  # fmt: skip
        if not lengths:
            check_unwritten(u0, written)
        states, u, survivors, took = result
        lengths += took
        for state in states:
            record.put(state)
    while len(record) < len(saved):  # nobody left: the last finite states stay
        record.put(u)

    alive, until = survivors or _everybody(u0, t)
    steps = sum(lengths)
    calls = steps * scheme.rate_calls
    if isinstance(scheme, Splitting) and correction is None:
        calls -= scheme.saved_calls * (steps - len(lengths))
    if guard is not None:
        calls += guard.rate_calls
    status, guarded = march.outcome(alive, until)
    stats = Stats(calls, steps * (correction is not None), steps, guarded=guarded)
    return Trajectory(t[saved], record.finish(), stats, alive, until, status)


def _under_vmap(
    f: Rate,
    u0: Tensor,
    t: Tensor,
    scheme: AnyScheme,
    correction: Correction | None,
    parameters: Tensor | None,
    every: int,
) -> Trajectory:
    """`on_grid` where torch.func.vmap hides all values, so that no decision may depend on them.

    All trajectories take all steps, one after the other and not compiled. A lost trajectory keeps its
    last finite state, as elsewhere, but its own gradient is non-finite.
    """
    n, saved = len(t) - 1, frozenset(_saved(len(t) - 1, every))
    real = u0.real.dtype if u0.is_complex() else u0.dtype
    times, dt = t.to(real), _as_numbers(t.diff().to(real), t)
    correction = correction_of_step(correction)
    u, (alive, until) = u0, _everybody(u0, t)
    states = [u0]
    for i in range(n):
        (new,), _ = run(
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


def _may_loop(
    f: Rate,
    scheme: AnyScheme,
    correction: Correction | None,
    t: Tensor,
    dt: Tensor,
    u: Tensor,
    parameters: Tensor | None,
) -> bool:
    """Whether runs can be loops: on the CPU, for real states, and where nobody wants gradients."""
    if u.device.type != "cpu" or u.is_complex() or not u.numel() or is_transformed(u):
        return False
    if any(x.requires_grad or has_tangent(x) for x in (u, t)):
        return False
    if isinstance(scheme, Splitting) and correction is None:  # a step reuses the rate of the last one
        return False
    if not torch.is_grad_enabled():
        return True
    return not corrected_step(f, scheme, correction, t[0], dt[0], u, parameters).requires_grad


def _loop(
    f: Rate,
    scheme: AnyScheme,
    correction: Correction | None,
    guard: Guard | None,
    steps: int,
    *problem: Any,
) -> Loop | None:
    """Return a loop of steps, the correction's own or a compiled one; None if runs cannot be loops.

    Args:
        steps: Number of steps between kept states.
        problem: Times, step sizes, states and parameters, as for `_may_loop`.
    """
    own = getattr(correction, "_identity_loop", None) if isinstance(scheme, Identity) else None
    if (own is None and steps <= SHORT) or not _may_loop(f, scheme, correction, *problem):
        return None
    u = problem[2]
    loop: Loop | None = None if own is None else own(u, guard)
    if loop is not None or steps <= SHORT:
        return loop
    fixed = (f, scheme, correction, None if guard is None else guard.inside)
    return partial(compiled(looped, u.device, *fixed, or_plain=False), *fixed)


def _as_numbers(dt: Tensor, t: Tensor) -> Any:
    """Return step sizes as numbers, which need no work on the device, unless times are transformed."""
    return dt if t.requires_grad or has_tangent(t) or is_vmapped(t) else dt.tolist()


def _everybody(u: Tensor, t: Tensor) -> _Survivors:
    """All whose state is finite, followed to the end."""
    finite = torch.isfinite(u.detach()).all(-1)
    return _Survivors(finite, torch.where(finite, t[-1].detach(), t[0].detach()))


def _all_finite(u: Tensor) -> bool:
    """One number tells, unless it overflows."""
    u = torch.view_as_real(u.detach().resolve_conj()) if u.is_complex() else u.detach()
    wide = torch.float32 if u.dtype.itemsize < 4 else u.dtype
    return math.isfinite(u.sum(dtype=wide).item()) or bool(torch.isfinite(u).all())


def _stand_in(u: Any, survivors: _Survivors | None) -> Any:
    """u with the state of a living trajectory in place of every lost one; None stays None.

    Always a node of its own in the graph: gradients of a run add up there before they meet those of
    a kept state, so that the order of additions, and with it every bit, is the same with and
    without a loss.
    """
    if u is None:
        return None
    if survivors is None or not bool(survivors.alive.any()):
        return u.view_as(u)
    donor = u.detach()[survivors.alive][0]
    return torch.where(survivors.alive[..., None], u, donor)


def _of_living(survivors: _Survivors | None, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """The new states of the living, the old ones of the lost."""
    if survivors is None:
        return new
    return [torch.where(survivors.alive[..., None], a, b) for a, b in zip(new, old)]


# How a grid is cut into runs

COMPILED_OPERATIONS = 1_000  # in an unrolled compiled run: ten steps of a small system

LOOP = 256  # steps of a compiled loop at most
SHORT = 4  # so few steps between kept states are unrolled

RUN = 10  # steps a run: enough to hide the cost of starting one, few enough to compile in seconds


def _saved(n: int, every: int) -> list[int]:
    """Which of the states 0..n are kept."""
    return [*range(0, n, every), n] if n else [0]


def _run_length(n: int, every: int, most: int) -> int:
    """Steps a run, so that runs end where states are kept and few shorter runs are left over."""
    if every <= most:
        return min(most // every * every, n)
    return min(range(most, max(most // 2, 1) - 1, -1), key=lambda length: every % length)


def _runs(n: int, every: int, length: int) -> list[tuple[int, int]]:
    """The runs (first, stop) that cover steps 0..n."""
    block = max(every, length)
    return [
        (first, min(first + length, start + block, n))
        for start in range(0, n, block)
        for first in range(start, min(start + block, n), length)
    ]


def _groups(runs: list[tuple[int, int]], steps: int) -> list[list[tuple[int, int]]]:
    """Consecutive runs gathered to about that many steps."""
    groups: list[list[tuple[int, int]]] = []
    for first, stop in runs:
        if groups and stop - groups[-1][0][0] <= steps:
            groups[-1].append((first, stop))
        else:
            groups.append([(first, stop)])
    return groups
