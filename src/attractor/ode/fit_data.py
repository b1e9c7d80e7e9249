"""The trajectories of a fit: those to learn from, those that choose, and those that test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attractor.common.checks import check_whole
from attractor.core.rates import Rate
from attractor.ode.fine_data import FineData
from attractor.ode.pairs import Pairs
from attractor.ode.rate_checks import TIMES, check_rate
from attractor.ode.samples import Sampler, check_states, initial_states, sampled_parameters
from attractor.ode.substeps import enough_substeps, substeps_for, whole_steps
from attractor.ode.trajectories import LARGEST, PHASES, Plan, Run, fine_trajectories, make_runs
from attractor.storage.objects import ObjectPath


class FitData(NamedTuple):
    """Fine trajectories, no two of which share a seed.

    Attributes:
        train: Those that a correction learns from.
        held_out: Those that choose between candidates.
        test: Those that only the reported error is measured on.
        substeps: Steps of the reference per dt.
    """

    train: list[Run]
    held_out: list[Run]
    test: list[Run]
    substeps: int


@dataclass(frozen=True)
class Problem:
    """An equation, and how it is sampled and followed for a fit. Attributes as for `fit`."""

    rate: Rate
    sample: Sampler | None
    parameters: Sampler | None
    dt: float
    horizon: float
    trajectories: int
    period: float | None
    seed: int
    device: Any

    def __post_init__(self) -> None:
        check_whole("trajectories", self.trajectories, 1)
        if self.period is not None and not 0 < self.period < math.inf:
            raise ValueError(f"period = {self.period} must be a positive number")

    @property
    def plan(self) -> Plan:
        """The plan of the trajectories to learn from, without substeps."""
        shard_size = min(LARGEST, math.ceil(self.trajectories / self.phases))
        steps = whole_steps(self.dt, self.horizon)
        return Plan(self.trajectories, self.dt, steps, 1, self.seed, shard_size, self.period)

    @property
    def phases(self) -> int:
        """Number of times at which trajectories start."""
        return 1 if self.period is None else PHASES

    def few(self) -> tuple[Tensor, Tensor | None]:
        """Return 16 initial states, and their parameters if there are any, for checks."""
        states, own = (self.plan.generator(0, purpose) for purpose in ("trial", "trial parameters"))
        return (
            initial_states(self.rate, self.sample, 16, states, self.device),
            sampled_parameters(self.parameters, 16, own, self.device),
        )

    def make(self, data: Any, fine_dt: float | None, few: Tensor, few_p: Tensor | None) -> FitData:
        """Return the trajectories.

        Args:
            data: The trajectories to learn from, in any form that `fit` accepts; None: they are made.
            fine_dt: Step of the reference; None: found by refinement.
            few, few_p: Of `few`.
        """
        rate, dt, plan = self.rate, self.dt, self.plan
        if data is None:
            check_states(self.trajectories, plan.steps, few.shape[-1], 1, self.device)
        if fine_dt is not None:
            substeps = substeps_for(dt, fine_dt)
        else:
            substeps = enough_substeps(rate, few, dt, plan.steps, period=self.period, parameters=few_p)
        count = max(4, min(100, self.trajectories // 10))
        size = math.ceil(count / min(4, self.phases))
        plans = [
            replace(plan, trajectories=count, stream=stream, shard_size=size, substeps=substeps)
            for stream in ("held out", "test")
        ]
        if data is None:
            plans.append(replace(plan, substeps=substeps))
        held_out, test, *made = make_plans(rate, self.sample, self.parameters, self.device, plans)
        check_rate(rate, _along(held_out, dt), self.horizon, self.period)
        train = made[0] if made else self._runs_of(data, few, few_p, substeps)
        return FitData(train, held_out, test, substeps)

    def _runs_of(self, data: Any, few: Tensor, few_p: Tensor | None, substeps: int) -> list[Run]:
        """Return the runs of data that were made before, after checking them."""
        dim, count = few.shape[-1], None if few_p is None else few_p.shape[-1]
        if isinstance(data, str | Path | ObjectPath):
            data = FineData.open(data)
        if isinstance(data, FineData):
            if not math.isclose(data.plan.dt, self.dt):
                raise ValueError(
                    f"{data.folder} has a state every {data.plan.dt:g}, and dt is {self.dt:g}"
                )
            data.check_rate(self.rate, self.device)
            data = data.runs()
        if not isinstance(data, Sequence) or not all(isinstance(run, Run) for run in data):
            raise TypeError(
                "data= takes what make_trajectories returns, its folder, or a list of its runs()"
            )
        if not data or any(run.u.dim() != 3 or len(run.u) < 2 or run.u.shape[-1] != dim for run in data):
            raise ValueError(
                f"data= must be runs of states [steps + 1, n, {dim}]; {dim} is the size of a sampled "
                "state"
            )
        sizes = {None if run.parameters is None else run.parameters.shape[-1] for run in data}
        if sizes != {count}:
            raise ValueError(
                f"data= has {sizes} parameters per trajectory and parameters= draws {count}; they must "
                "agree"
            )
        runs = [run.to(self.device) for run in data]
        self._check_run(runs[0], substeps)
        return runs

    def _check_run(self, run: Run, substeps: int) -> None:
        """Raise if states do not follow the equation, where they move most; they may be noisy."""
        u = run.u[:, :64]
        if not bool(torch.isfinite(u).all()):
            raise ValueError("data= holds non-finite states")
        moves = u.diff(dim=0).norm(dim=-1).median(-1).values  # [steps]
        k = int(moves.argmax())
        move, size = moves[k].item(), u[k].norm(dim=-1).median().item()
        t0 = 0.0 if self.period is None else run.t0 + k * self.dt
        own = None if run.parameters is None else run.parameters[:64]
        after = fine_trajectories(self.rate, u[k], self.dt, 1, substeps, t0, parameters=own)[-1]
        off = (after - u[k + 1]).norm(dim=-1).median().item()
        if off > max(move / 2, 1e-9 * size):
            raise ValueError(
                f"data= does not follow this equation: within dt = {self.dt:g} its states move by "
                f"{move:.2g}, and they end {off:.2g} from where the rate takes them; pass the data of "
                "this rate"
            )


def make_plans(
    rate: Rate, sample: Sampler | None, parameters: Sampler | None, device: Any, plans: list[Plan]
) -> list[list[Run]]:
    """Return the runs of each plan. Small shards are followed together."""
    groups: list[list[tuple[int, int]]] = [[]]
    for shard in ((i, k) for i, plan in enumerate(plans) for k in range(plan.shards)):
        if sum(plans[i].size(k) for i, k in (*groups[-1], shard)) > LARGEST:
            groups.append([])
        groups[-1].append(shard)
    made: dict[tuple[int, int], Run] = {}
    for together in filter(None, groups):
        shards = [(plans[i], k) for i, k in together]
        made |= zip(together, make_runs(rate, sample, shards, device, parameters))
    return [[made[i, k] for k in range(plan.shards)] for i, plan in enumerate(plans)]


def region_states(pairs: Pairs) -> Tensor:
    """Return states for a trust region, at most about 100,000, followed by their parameters."""
    some = slice(None, None, max(1, len(pairs.u) // 100_000))
    if pairs.parameters is None:
        return pairs.u[some]
    return torch.cat((pairs.u[some], pairs.parameters[some]), -1)


def _along(runs: list[Run], dt: float) -> list[tuple[float, Tensor, Tensor | None]]:
    """Return times, states ``[n, d]`` and parameters along trajectories, at most `TIMES` of them."""
    points = [
        (run.t0 + k * dt, run.u[k, :16], None if run.parameters is None else run.parameters[:16])
        for run in runs
        for k in range(len(run.u))
    ]
    return points[:: math.ceil(len(points) / TIMES)]
