"""Fine data: what a correction learns from, in float64.

A `Plan` says what the data are; shard k of it depends on the plan and k alone, so that shards can be
made in any order, by anyone, and come out the same. `shards.py` keeps them on disk.
"""

import hashlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.core import evolve, get_scheme
from attractor.core.checks import MOST_STEPS, check_seed, check_whole, is_number, is_whole
from attractor.core.clocks import fitted_to_time
from attractor.core.compiling import components_first
from attractor.core.limits import STEP_BYTES, check_memory
from attractor.core.scheme import Rate
from attractor.ode import fused

REFERENCE = "dop853"  # the scheme of fine data
SUBSTEPS = (1, 2, 4, 8, 16, 32, 64, 128)
SETTLED = 8  # a difference of order 8 may be so much larger for the same error as one of order 5
LARGEST = 20_000  # trajectories followed at once
PHASES = 8  # at which trajectories of an equation with a period start
GOLDEN = (math.sqrt(5) - 1) / 2
WORTH = 5  # steps for every line of a formula, from which on compiling it takes less time than they do
ROUNDING = 1e-14  # that thousands of steps may gather, relative to a state
Sampler = Callable[..., Tensor]


@dataclass(frozen=True)
class Run:
    """Trajectories that start together.

    Attributes:
        t0: The time of the first states.
        u: States ``[steps + 1, n, d]``, one dt apart.
        parameters: Parameters ``[n, k]`` of the trajectories; None for an equation without them.
    """

    t0: float
    u: Tensor
    parameters: Tensor | None = None

    def part(self, trajectories: int) -> "Run":
        """Return the first trajectories of the run."""
        own = None if self.parameters is None else self.parameters[:trajectories]
        return Run(self.t0, self.u[:, :trajectories], own)

    def to(self, device: torch.device | str | None) -> "Run":
        """Return the run in float64 on a device."""
        u, p = (
            None if x is None else x.to(device=device, dtype=torch.float64)
            for x in (self.u, self.parameters)
        )
        assert u is not None
        return Run(self.t0, u, p)


@dataclass(frozen=True)
class Plan:
    """Everything the numbers of fine data depend on, beside the equation.

    Attributes:
        trajectories: Number of trajectories in all shards.
        dt, steps: the big step, and how many of them.
        substeps: steps of the reference between two states that are kept.
        seed: of the initial states.
        shard_size: trajectories in a shard; the last one may hold fewer.
        period: of an equation that depends on t. Shards then start at different phases of it.
        stream: tells sets of one seed apart that must not overlap.
    """

    trajectories: int
    dt: float
    steps: int
    substeps: int
    seed: int = 0
    shard_size: int = 1000
    period: float | None = None
    stream: str = "train"

    def __post_init__(self) -> None:
        for name in ("trajectories", "shard_size"):
            check_whole(name, getattr(self, name), 1)
        check_seed(self.seed)
        for name in ("trajectories", "shard_size", "seed"):  # numpy's go into no file
            object.__setattr__(self, name, int(getattr(self, name)))

    @property
    def shards(self) -> int:
        """How many there are."""
        return -(-self.trajectories // self.shard_size)

    def size(self, shard: int) -> int:
        """Trajectories in a shard."""
        return min(self.shard_size, self.trajectories - shard * self.shard_size)

    def start(self, shard: int) -> float:
        """When the trajectories of a shard begin: 0, or spread evenly over the period."""
        if self.period is None:
            return 0.0
        offset = _seed(self.seed, self.stream, "phase") / 2**56
        return (offset + shard * GOLDEN) % 1 * self.period

    def generator(self, shard: int, purpose: str) -> torch.Generator:
        """Random numbers that belong to a shard, whoever makes it and when."""
        return torch.Generator().manual_seed(_seed(self.seed, self.stream, shard, purpose))


def make_run(
    rate: Rate,
    sample: Sampler | None,
    plan: Plan,
    shard: int,
    device: torch.device | str | None = None,
    parameters: Sampler | None = None,
) -> Run:
    """The trajectories of one shard; `parameters` samples those of the equation."""
    (run,) = make_runs(rate, sample, [(plan, shard)], device, parameters)
    return run


def make_runs(
    rate: Rate,
    sample: Sampler | None,
    shards: list[tuple[Plan, int]],
    device: torch.device | str | None = None,
    parameters: Sampler | None = None,
) -> list[Run]:
    """Return the trajectories of several shards with equal steps, followed in one batch.

    Shards that start at different times need a rate that accepts a time per trajectory. For other rates
    there is one batch per time.
    """
    states, own = list[Tensor](), list[Tensor | None]()
    for plan, shard in shards:
        size = plan.size(shard)
        states.append(initial_states(rate, sample, size, plan.generator(shard, "states"), device))
        generator = plan.generator(shard, "parameters")
        own.append(sampled_parameters(parameters, size, generator, device))
    starts = [plan.start(shard) for plan, shard in shards]
    follow, t0, u0 = rate, starts[0], torch.cat(states)
    known = [p for p in own if p is not None]
    p = torch.cat(known) if known else None
    if len(set(starts)) > 1:
        each = torch.cat([torch.full((len(x),), t, dtype=torch.float64) for x, t in zip(states, starts)])
        timed = shifted(rate, each.to(u0.device), u0, p)
        if timed is None:
            made: dict[int, Run] = {}
            for start in dict.fromkeys(starts):
                same = [i for i, t in enumerate(starts) if t == start]
                made |= zip(same, make_runs(rate, sample, [shards[i] for i in same], device, parameters))
            return [made[i] for i in range(len(shards))]
        follow, t0 = timed, 0.0
    plan, _ = shards[0]
    u = fine_trajectories(follow, u0, plan.dt, plan.steps, plan.substeps, t0, parameters=p)
    parts = u.split([len(x) for x in states], 1)
    return [Run(start, part, q) for start, part, q in zip(starts, parts, own)]


def shifted(rate: Rate, t0: Tensor, u0: Tensor, parameters: Tensor | None) -> Rate | None:
    """Return the rate with time counted from t0 ``[n]``, or None if it accepts one time only.

    Exact solutions and kernels of whole steps start at one time, so they have no such rate either.
    """
    if exact_solution(rate) is not None or u0.is_cuda or fused.EVERYWHERE:
        return None
    column = t0[:, None]
    try:
        timed, _, _ = fitted_to_time(rate, torch.stack((t0, t0 + 1.0)), u0, parameters)
    except (RuntimeError, ValueError, TypeError):
        return None
    return lambda t, u, *p: timed(column + t, u, *p)


def with_noise(run: Run, sigma: float, generator: torch.Generator) -> Run:
    """The run with independent normal noise of that size on every state: for robustness studies."""
    noise = torch.randn(run.u.shape, generator=generator, dtype=torch.float64)
    return Run(run.t0, run.u + sigma * noise.to(run.u.device), run.parameters)


def initial_states(
    rate: Any,
    sample: Sampler | None,
    trajectories: int,
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Tensor:
    """States ``[trajectories, d]`` from the sampler, or from the system's own, checked."""
    check_states(trajectories, 0, getattr(rate, "dim", 1), 1, device)
    if sample is None:
        if not hasattr(rate, "sample"):
            raise ValueError(
                "a rate of your own needs sample=, a function (n, generator=...) -> states [n, d]"
            )
        return rate.sample(trajectories, generator, torch.float64, device)
    if not callable(sample):
        raise TypeError(
            f"sample is a {type(sample).__name__}; give a function (n, generator=...) -> [n, d]"
        )
    return _sampled("sample", sample, trajectories, generator, device)


def check_states(
    trajectories: Any, steps: int, dim: Any, substeps: int, device: torch.device | str | None
) -> None:
    """Raise if states ``[steps + 1, trajectories, dim]`` in float64 do not fit into memory."""
    if is_whole(trajectories) and is_whole(dim):
        check_memory(
            f"states [{steps + 1:,}, {trajectories:,}, {dim}] in float64",
            8 * (steps + 1) * trajectories * dim + STEP_BYTES * steps * substeps,
            "use fewer trajectories or steps at a time",
            device,
        )


def sampled_parameters(
    parameters: Sampler | None,
    trajectories: int,
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """Parameters ``[trajectories, k]`` from the sampler, checked; None without one."""
    if parameters is None:
        return None
    if not callable(parameters):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}; give a function (n, generator=...) -> [n, k] "
            "that draws the parameters of n trajectories"
        )
    return _sampled("parameters", parameters, trajectories, generator, device)


def _sampled(
    name: str,
    sample: Sampler,
    trajectories: int,
    generator: torch.Generator,
    device: torch.device | str | None,
) -> Tensor:
    rows = sample(trajectories, generator=generator)
    if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != trajectories:
        got = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(
            f"{name}({trajectories}) returned {got}; it must return a tensor [{trajectories}, d]"
        )
    if not bool(torch.isfinite(rows).all()):
        what = "states" if name == "sample" else "parameters"
        raise ValueError(f"{name} returned non-finite {what}; a fit needs finite ones")
    return rows.to(dtype=torch.float64, device=device)


class LostTrajectoriesError(ValueError):
    """Trajectories that become non-finite however small the steps are."""


def fine_trajectories(
    rate: Rate,
    u0: Tensor,
    dt: float,
    steps: int,
    substeps: int,
    t0: float = 0.0,
    *,
    parameters: Tensor | None = None,
    scheme: str = REFERENCE,
) -> Tensor:
    """Return states ``[steps + 1, trajectories, d]`` every dt, with `substeps` steps of a scheme per dt.

    A system with an exact solution provides them instead (see `exact_solution`). On a GPU, where a rate
    is a formula per number, one kernel takes all substeps of a step, if they are many.

    Args:
        parameters: Of each trajectory ``[trajectories, k]``, for a rate that takes them.
    """
    check_states(len(u0), steps, u0.shape[-1], substeps, u0.device)
    u0 = u0.double()
    exact = None if parameters is not None else exact_solution(rate, t0)
    if exact is not None:
        return exact(torch.arange(steps + 1, dtype=torch.float64, device=u0.device) * dt, u0)
    u = None
    if parameters is None:
        u = _in_a_kernel(rate, u0, dt, steps, substeps, t0, scheme)
    if u is not None:
        ok = torch.isfinite(u[-1]).all(-1)
    else:
        grid = torch.arange(steps * substeps + 1, dtype=torch.float64, device=u0.device)
        with torch.no_grad():
            times = t0 + grid * (dt / substeps)
            solved = evolve(rate, u0, times, scheme, parameters=parameters, every=substeps)
        u, ok = solved.u, solved.ok
    if not bool(ok.all()):
        lost = int((~ok).sum())
        raise LostTrajectoriesError(
            f"{lost} of {len(u0)} trajectories become non-finite even with steps of {dt / substeps:g}; "
            "sample initial states that can be followed to the horizon, or shorten it"
        )
    return u


def exact_solution(rate: Any, t0: float = 0.0) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the exact solution ``(time since t0 [n], u0) -> states [n, *batch, d]``, if it is known.

    A rate may have a method ``exact(t, u0)``, the states at times t ``[n]`` that start from u0 at time
    0, or ``exact(t, u0, t0)``, which start from u0 at t0. The first kind says nothing about other
    starting times of a rate that depends on t, so it is used for ``t0 = 0`` only.
    """
    exact = getattr(rate, "exact", None)
    if exact is None:
        return None
    if "t0" in inspect.signature(exact).parameters:
        return lambda t, u0: exact(t0 + t, u0, t0=t0)
    return exact if t0 == 0 else None


def _in_a_kernel(
    rate: Rate, u0: Tensor, dt: float, steps: int, substeps: int, t0: float, scheme: str
) -> Tensor | None:
    """The states by a kernel that goes all substeps; None where there is none, or it does not pay."""
    if not (u0.is_cuda or fused.EVERYWHERE) or not fused.at_hand(u0) or not steps or not u0.numel():
        return None
    from attractor.ode.captured import kernel_of_steps

    t = torch.tensor(t0, dtype=torch.float64, device=u0.device)
    whole = kernel_of_steps(
        rate, get_scheme(scheme), None, dt / substeps, u0, t, (1e-8, 1e-13), steps * substeps / WORTH
    )
    if whole is None:
        return None
    u, kept = components_first(u0).clone(), [u0]
    for i in range(steps):
        whole(u, t.fill_(t0 + i * dt), substeps)
        kept.append(u.clone())
    return torch.stack(kept)


def enough_substeps(
    rate: Rate,
    u0: Tensor,
    dt: float,
    steps: int,
    tolerance: float = 1e-9,
    period: float | None = None,
    parameters: Tensor | None = None,
) -> int:
    """Return the fewest substeps after which twice as many change a state by less than the tolerance.

    Measured on a few trajectories over at most fifty steps, relative to the size of each component, so
    that a large one does not hide what the others do.

    Args:
        period: Of a rate that depends on t, whose trajectories start at several times.
        parameters: Of each trajectory ``[n, k]``, for a rate that takes them.

    Raises:
        LostTrajectoriesError: Trajectories become non-finite with any number of substeps.
        ValueError: No number of substeps suffices, or the rate's exact solution does not solve it.
    """
    few, steps = u0[:8], min(steps, 50)
    p = None if parameters is None else parameters[:8]
    t0 = 0.0 if period is None else GOLDEN * period
    if p is None and exact_solution(rate, t0) is not None:
        _check_exact(rate, few, dt, steps, t0)
        return 1
    before = _or_none(rate, few, dt, steps, SUBSTEPS[0], t0, p)
    for substeps in SUBSTEPS[1:]:
        after = _or_none(rate, few, dt, steps, substeps, t0, p)
        if before is not None and after is not None:
            size = after.abs().amax((0, 1))  # [d]
            # The error after twice as many substeps is a small part of the difference. Below the
            # rounding of the largest component a small one need not settle.
            allowed = torch.maximum(SETTLED * tolerance * size, ROUNDING * size.max())
            if bool(((after - before).abs().amax((0, 1)) <= allowed).all()):
                return substeps
        before = after
    if before is None:
        raise LostTrajectoriesError(
            f"trajectories become non-finite even with {SUBSTEPS[-1]} substeps of dt = {dt:g}, within "
            f"{steps * dt:g}: if the solution itself does, shorten the horizon or change sample; if the "
            "problem is stiff, use a smaller dt, or set the step of the fine data with fine_dt="
        )
    raise ValueError(
        f"even {SUBSTEPS[-1]} substeps of dt = {dt:g} do not settle the fine solution: the problem is "
        "too stiff or too chaotic for this dt; use a smaller one, or set the step of the fine data with "
        "fine_dt= (on the command line --fine-dt)"
    )


def _check_exact(rate: Any, u0: Tensor, dt: float, steps: int, t0: float) -> None:
    """Raise if the exact solution of a rate is not a solution, as far as dopri5 can tell."""
    steps = min(steps, 8)
    exact = fine_trajectories(rate, u0, dt, steps, 1, t0)
    times = t0 + torch.arange(steps + 1, dtype=torch.float64, device=u0.device) * dt
    with torch.no_grad():
        solved = evolve(rate, u0.double(), times, "dopri5", rtol=1e-9, atol=1e-12)
    size = exact.abs().amax((0, 1)) + solved.u.abs().amax((0, 1))
    difference = (exact - solved.u).abs().amax((0, 1))
    # Where error control gave up, nothing can be said.
    if bool(solved.ok.all()) and bool((difference > 1e-5 * size + 1e-9 * size.max()).any()):
        raise ValueError(
            f"the method exact of {type(rate).__name__} does not solve its rate: within {steps} steps "
            f"of dt = {dt:g} from t = {t0:g} it differs from dopri5 by {difference.max().item():.2g}; "
            "correct it, or remove it"
        )


def substeps_for(dt: float, fine_dt: float) -> int:
    """How many steps of about fine_dt make one of dt."""
    if not (is_number(fine_dt) and 0 < fine_dt <= dt):
        raise ValueError(f"fine_dt = {fine_dt!r} must be positive and at most dt = {dt:g}")
    if dt / fine_dt > MOST_STEPS:
        raise ValueError(f"fine_dt = {fine_dt:g} makes more than {MOST_STEPS:g} steps of dt = {dt:g}")
    return math.ceil(dt / fine_dt - 1e-9)


def whole_steps(dt: float, horizon: float) -> int:
    """How many steps of dt make up the horizon."""
    if not (is_number(dt) and dt > 0 and math.isfinite(dt)):
        raise ValueError(f"dt = {dt!r} must be a positive number")
    if not (is_number(horizon) and math.isfinite(horizon / dt)):
        raise ValueError(
            f"horizon = {horizon!r} must be a finite number, a whole number of steps of dt = {dt:g}"
        )
    if horizon / dt > MOST_STEPS:
        raise ValueError(
            f"horizon = {horizon:g} is more than {MOST_STEPS:g} steps of dt = {dt:g}; shorten it"
        )
    steps = round(horizon / dt)
    if steps < 1 or abs(steps * dt - horizon) > 1e-9 * horizon:
        raise ValueError(
            f"horizon = {horizon:g} is not a whole number of steps of dt = {dt:g}; the nearest is "
            f"{max(steps, 1) * dt!r}, {max(steps, 1):,} of them"
        )
    return steps


def _or_none(
    rate: Rate,
    u0: Tensor,
    dt: float,
    steps: int,
    substeps: int,
    t0: float,
    parameters: Tensor | None = None,
) -> Any:
    try:
        return fine_trajectories(rate, u0, dt, steps, substeps, t0, parameters=parameters)
    except LostTrajectoriesError:  # perhaps because the steps are too large; other errors are the rate's
        return None


def _seed(*parts: Any) -> int:
    """56 bits that are the same for the same parts on every machine."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
