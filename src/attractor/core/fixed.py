"""Fixed steps for the options of `odeint` that `grid.on_grid` does not have.

These are events, callbacks, interpolation at output times, rates that are not called at discontinuities,
Adams methods and implicit Runge-Kutta methods.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute_later
from torch.utils.checkpoint import set_checkpoint_early_stop

from attractor.core.callbacks import NO_CALLBACKS, Callbacks, Event, Solution
from attractor.core.events import bracketed_root, differentiated_root
from attractor.core.interpolant import evaluate, hermite
from attractor.core.rates import Rate, add_increment, call_rate, check_distinct
from attractor.core.scheme import Scheme
from attractor.core.transforms import is_differentiated

MOST_EVENT_STEPS = 20_000  # torchdiffeq's

# Past rates at equal distances, newest first, and their distance.
History: TypeAlias = tuple[tuple[Tensor, ...], float]
NO_HISTORY: History = ((), 0.0)


class Moment(NamedTuple):
    """A step from t to t1 ``[]``; dt is a number, or a tensor where times are differentiated."""

    t: Tensor
    t1: Tensor
    dt: Any


# (rate, step, u, history) -> new state, rate at the start, history
StepRule: TypeAlias = Callable[[Rate, Moment, Tensor, History], tuple[Tensor, Tensor, History]]


def explicit_rule(scheme: Scheme, perturb: bool = False) -> StepRule:
    """Return the steps of an explicit scheme.

    Args:
        scheme: The scheme.
        perturb: Whether the rate is not called exactly at the ends of a step.
    """

    def step(f: Rate, moment: Moment, u: Tensor, history: History) -> tuple[Tensor, Tensor, History]:
        t, t1, dt = moment
        stages: list[Tensor] = []
        for row, c in zip(scheme._a, scheme._c):
            time = t if c == 0 else t1 if c == 1 else t + c * dt
            if perturb and c in (0, 1):
                time = beside(time, t1 if c == 0 else t)
            stages.append(call_rate(f, time, add_increment(u, dt, row, stages) if stages else u))
            if len(stages) > 1:
                check_distinct(f, time, u, stages)
        return add_increment(u, dt, scheme._b, stages), stages[0], history

    return step


def beside(t: Tensor, other: Tensor) -> Tensor:
    """Return the next floating-point number from t towards another one, with the gradient of t."""
    now = t.detach()
    return t + (torch.nextafter(now, other.detach()) - now)


class _Part(NamedTuple):
    """The states at the output times in a part of the grid, and the start of the next part."""

    values: list[Tensor]
    u: Tensor
    history: History


def solve_fixed(
    f: Rate,
    u0: Tensor,
    t: Tensor,
    grid: Tensor,
    rule: StepRule,
    *,
    interp: str | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
    adjoint: Callbacks = NO_CALLBACKS,
    checkpoint: bool = False,
) -> Solution:
    """Step u0 ``[d]`` along a grid, and interpolate the states at the times t between its points.

    Args:
        f: The rate, called with t ``[]`` and u ``[d]``.
        t: Output times ``[n+1]``, from ``grid[0]`` to ``grid[-1]``.
        interp: "linear" or "cubic"; None if all output times are points of the grid.
        checkpoint: Keep the square root of the number of steps in the graph; see `solve_adaptive`.
    """
    n, sign = len(grid) - 1, -1.0 if bool(grid[-1] < grid[0]) else 1.0
    real = u0.real.dtype
    times, sizes = grid.to(real), grid.diff().to(real)
    as_tensor = is_differentiated(t) or is_differentiated(grid)
    dts: Any = sizes if as_tensor else sizes.tolist()
    clock, outputs = (sign * grid.detach()).tolist(), (sign * t.detach()).tolist()
    before = _counts(outputs, clock)

    def run(first: int, stop: int, calls: list[None], u: Tensor, history: History) -> _Part:
        own, values = adjoint if calls else callbacks, list[Tensor]()
        calls.append(None)
        for i in range(first, stop):
            if own.step is not None:
                own.step(times[i], u.detach(), sizes[i])
            u1, k0, history = rule(f, Moment(times[i], times[i + 1], dts[i]), u, history)
            inside = range(before[i], before[i + 1])
            if inside:
                exact = outputs[inside[-1]] == clock[i + 1] and not (interp and as_tensor)
                within = inside[:-1] if exact else inside
                if within:
                    theta = ((t[within[0] : within[-1] + 1] - grid[i]) / (grid[i + 1] - grid[i])).to(
                        real
                    )
                    if not as_tensor:
                        theta = theta.detach()
                    curve = _curve(interp or "cubic", f, times[i + 1], sizes[i], u, u1, k0)
                    values.append(curve(theta[:, None]))
                if exact:
                    values.append(u1[None])
            u = u1
        return _Part(values, u, history)

    spacing = math.isqrt(n) + 1 if checkpoint and torch.is_grad_enabled() else max(n, 1)
    u, history, values = u0, NO_HISTORY, [u0[None]]
    for first in range(0, n, spacing):
        work = first, min(first + spacing, n), list[None](), u, history
        if spacing < n or (checkpoint and torch.is_grad_enabled()):
            with set_checkpoint_early_stop(adjoint == NO_CALLBACKS):
                new, u, history = recompute_later(run, *work, use_reentrant=False)
        else:
            new, u, history = run(*work)
        values += new
    return Solution(torch.cat(values), None, n)


def solve_fixed_until(
    f: Rate,
    u0: Tensor,
    t: Tensor,
    step: float,
    rule: StepRule,
    event: Event,
    *,
    interp: str = "cubic",
    callbacks: Callbacks = NO_CALLBACKS,
) -> Solution:
    """Take steps of one size from u0 at ``t[0]``, in the direction of ``t[1]``, until an event.

    Raises:
        FloatingPointError: There was no event in `MOST_EVENT_STEPS` steps, or the state was lost.
    """
    real, sign = u0.real.dtype, -1.0 if bool(t[-1] < t[0]) else 1.0
    start, dt, u, history = t.detach()[0].double().item(), sign * step, u0, NO_HISTORY
    at = lambda x: u0.real.new_full((), x)
    if is_differentiated(t):
        # A start that is later by s is a start from u0 - s f(t0, u0), which has the gradient of t[0].
        late = t[0].to(real)
        u = u0 - call_rate(f, at(start), u0).detach() * (late - late.detach())
    value = event(at(start), u0.detach()).item()
    if value == 0:
        return Solution(torch.stack((u0, u0)), at(start), 0)
    for i in range(MOST_EVENT_STEPS):
        now, later = start + i * dt, start + (i + 1) * dt
        if callbacks.step is not None:
            callbacks.step(at(now), u.detach(), at(dt))
        u1, k0, history = rule(f, Moment(at(now), at(later), dt), u, history)
        new = event(at(later), u1.detach()).item()
        if math.isnan(new):
            raise FloatingPointError(f"the event function is not a number at t = {later:.6g}")
        if (new > 0) != (value > 0) or new == 0:
            break
        u, value = u1, new
    else:
        raise FloatingPointError(
            f"no event in {MOST_EVENT_STEPS} steps, up to t = {later:.6g}; use a larger step_size, or "
            "check the sign of the event function"
        )
    curve = _curve(interp, f, at(later), at(dt), u, u1, k0)
    inside = lambda theta: event(at(now + dt * theta.item()), curve(theta.to(real))).to(theta)
    ends = [torch.tensor(x, dtype=torch.float64) for x in (0.0, 1.0, value, new)]
    theta = bracketed_root(inside, *ends).item()
    when, state = at(now + dt * theta), curve(at(theta))
    rate = call_rate(f, when, state.detach()).detach()
    when, state = differentiated_root(when, state, rate, event)
    return Solution(torch.stack((u0, state)), when, i + 1)


def _curve(
    interp: str, f: Rate, t1: Tensor, dt: Tensor, u: Tensor, u1: Tensor, k0: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return the function from fractions theta of a step to states between u and u1."""
    if interp == "linear":
        return lambda theta: u + theta * (u1 - u)
    inner = hermite(u, u1, k0, call_rate(f, t1, u1), dt)
    return lambda theta: evaluate(u, u1, inner, theta)


def _counts(outputs: list[float], clock: list[float]) -> list[int]:
    """Return the number of output times up to each point of the grid."""
    times = torch.tensor(outputs, dtype=torch.float64)
    return torch.searchsorted(times, torch.tensor(clock, dtype=torch.float64), right=True).tolist()
