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

from attractor.common.checks import check_seed, check_whole
from attractor.core import evolve, get_scheme
from attractor.core.clocks import fitted_to_time
from attractor.core.compiling import components_first
from attractor.core.rates import Rate
from attractor.ode import fused
from attractor.ode.samples import Sampler, check_states, initial_states, sampled_parameters

REFERENCE = "dop853"  # the scheme of fine data
LARGEST = 20_000  # trajectories followed at once
PHASES = 8  # at which trajectories of an equation with a period start
GOLDEN = (math.sqrt(5) - 1) / 2
WORTH = 5  # steps for every line of a formula, from which on compiling it takes less time than they do


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
        dt, steps: The large step, and the number of them.
        substeps: Number of steps of the reference between two states that are kept.
        seed: Seed of the initial states and parameters.
        shard_size: Number of trajectories per shard; the last one may hold fewer.
        period: Period of an equation that depends on t. Shards then start at different phases of it.
        stream: A name that separates data of one seed that must not overlap.
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
        """The number of shards."""
        return -(-self.trajectories // self.shard_size)

    def size(self, shard: int) -> int:
        """Return the number of trajectories of a shard."""
        return min(self.shard_size, self.trajectories - shard * self.shard_size)

    def start(self, shard: int) -> float:
        """Return the time at which a shard starts: 0, or spread evenly over the period."""
        if self.period is None:
            return 0.0
        offset = _seed(self.seed, self.stream, "phase") / 2**56
        return (offset + shard * GOLDEN) % 1 * self.period

    def generator(self, shard: int, purpose: str) -> torch.Generator:
        """Return the random numbers of a shard, which do not depend on where it is made."""
        return torch.Generator().manual_seed(_seed(self.seed, self.stream, shard, purpose))


def make_run(
    rate: Rate,
    sample: Sampler | None,
    plan: Plan,
    shard: int,
    device: torch.device | str | None = None,
    parameters: Sampler | None = None,
) -> Run:
    """Return the trajectories of one shard; `parameters` samples those of the equation."""
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
    """Return the run with independent normal noise of standard deviation `sigma` on every state."""
    noise = torch.randn(run.u.shape, generator=generator, dtype=torch.float64)
    return Run(run.t0, run.u + sigma * noise.to(run.u.device), run.parameters)


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
    """Return the states by a kernel that takes all substeps; None without one, or if it is slower."""
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


def _seed(*parts: Any) -> int:
    """Return 56 bits that are the same for the same parts on every machine."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
