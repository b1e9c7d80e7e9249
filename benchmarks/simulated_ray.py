"""A simulated Ray, on which the engine "ray" of `attractor.jobs` runs unchanged.

Time is that of a clock of the simulation. Machines of different speeds compute shards, fail and come back,
and artifacts queue for the network link of the command. The engine decides, with its own code and its
`Ledger`, which shard begins when, and what happens to the shard of a machine that has failed.
"""

import logging
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from heapq import heappop, heappush
from itertools import count
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

from attractor import jobs
from attractor.jobs import cluster

SLOWER = 10  # times that a shard takes on a slow machine
RETRIES = 3


@dataclass(frozen=True)
class Case:
    """A job of shards that take equally long, and the machines that compute them.

    Attributes:
        workers: Number of machines, each of which computes one shard at a time.
        shards: Number of shards.
        seconds: Duration of a shard on a machine of normal speed.
        size: Bytes per artifact.
        handling: Seconds that the command needs per artifact, in which it starts no shard.
        link: Bytes per second of the command's network link, which transfers one artifact at a time.
        startup: Seconds before the first shard of a machine, also after a failure.
        spread: Standard deviation of the logarithm of the machines' speeds.
        slow: Fraction of the machines that are slower by a factor of `SLOWER`.
        mtbf: Mean time between the failures of a machine, in seconds.
        repair: Seconds from a failure until the machine is back.
        detection: Seconds from a failure until the command knows that the shard is lost.
        copies: Whether idle machines begin copies of slow shards.
    """

    workers: int
    shards: int
    seconds: float
    size: float = 0.0
    handling: float = 0.0
    link: float = math.inf
    startup: float = 0.0
    spread: float = 0.0
    slow: float = 0.0
    mtbf: float = math.inf
    repair: float = 300.0
    detection: float = 10.0
    copies: bool = False

    def slowdowns(self, chance: random.Random) -> list[float]:
        """Return the factor of each machine on the duration of a shard, in random order.

        The factors are quantiles of a log-normal distribution, and the number of slow machines is
        rounded, so that small clusters are typical ones.
        """
        quantile = NormalDist().inv_cdf
        factors = [
            math.exp(self.spread * quantile((n + 0.5) / self.workers)) for n in range(self.workers)
        ]
        chance.shuffle(factors)
        slow = round(self.slow * self.workers)
        factors[:slow] = [SLOWER * factor for factor in factors[:slow]]
        chance.shuffle(factors)
        return factors

    @property
    def job_failure_probability(self) -> float:
        """The probability that some shard loses its worker more than `RETRIES` times.

        A slow machine begins fewer shards, so that its share of the attempts is smaller than `slow`.
        """
        weights = (1 - self.slow, 1.0), (self.slow / SLOWER, float(SLOWER))
        lost = sum(w * -math.expm1(-self.seconds * slowdown / self.mtbf) for w, slowdown in weights)
        lost /= sum(w for w, _ in weights)
        return -math.expm1(self.shards * math.log1p(-(lost ** (RETRIES + 1))))


@dataclass(frozen=True)
class Outcome:
    """What a simulated job did: its duration, the shards in the order of delivery, and lost attempts."""

    wall: float
    delivered: list[Any]
    begun_again: int
    died: bool


@dataclass(eq=False)
class Task:
    """An attempt at a shard.

    Attributes:
        shard: The shard.
        arrived: Whether its artifact, or the news of its loss, has reached the command.
        lost: Whether its machine has failed.
        machine: The machine that computes it.
    """

    shard: Any
    arrived: bool = False
    lost: bool = False
    machine: "Machine | None" = None


@dataclass(eq=False)
class Machine:
    """A machine, its current task, and the number of tasks that it has not finished."""

    slowdown: float
    task: Task | None = None
    fresh: bool = True
    ended: int = 0


class LostError(Exception):
    """The simulated Ray's error for a task whose machine has failed."""


class SimulatedRay:
    """The part of Ray's interface that `attractor.jobs.cluster` uses, with a simulated clock `now`."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.random = case, random.Random(seed)
        self.exceptions = SimpleNamespace(
            RayError=LostError, RayTaskError=MemoryError, RuntimeEnvSetupError=MemoryError
        )
        self.now, self.link_free, self.lost = 0.0, 0.0, 0
        self.events, self.numbers = (
            list[tuple[float, int, Callable[..., None], tuple[Any, ...]]](),
            count(),
        )
        self.queue, self.idle = deque[Task](), deque[Machine]()
        for slowdown in case.slowdowns(self.random):
            self.idle.append(Machine(slowdown))
            self._schedule_failure(0.0, self.idle[-1])

    def is_initialized(self) -> bool:
        """Return True, so that the engine starts no cluster."""
        return True

    def put(self, value: Any) -> Any:
        """Return the value as its own reference."""
        return value

    def remote(self, function: Any) -> Any:
        """Return an object whose ``options().remote`` starts a task."""
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._submit))

    def nodes(self) -> list[dict[str, Any]]:
        """Return one machine with one CPU per worker; the engine counts them."""
        return [{"Alive": True, "Resources": {"CPU": 1.0}}] * self.case.workers

    def get_runtime_context(self) -> Any:
        """Return an object with a node, which the simulation does not tell apart."""
        return SimpleNamespace(get_node_id=lambda: "")

    def wait(self, tasks: list[Task], num_returns: int, timeout: float) -> tuple[list[Task], None]:
        """Return tasks whose artifact has arrived or whose loss is known; wait for one until timeout."""
        self._advance(self.now)
        end = self.now + timeout
        while not any(task.arrived for task in tasks) and self.now < end:
            self.now = min(end, max(self.now, self.events[0][0] if self.events else end))
            self._advance(self.now)
        return [task for task in tasks if task.arrived][:num_returns], None

    def get(self, task: Task) -> tuple[str, jobs.Artifact]:
        """Return the node and the artifact, which is empty."""
        if task.lost:
            raise LostError("the machine has failed")
        return "", jobs.Artifact(task.shard, b"", sha256(b"").hexdigest(), False)

    def cancel(self, task: Task, force: bool) -> None:
        """End a task; its worker starts anew."""
        machine = task.machine
        if task in self.queue:
            self.queue.remove(task)
        elif machine is not None and machine.task is task:
            machine.task, machine.fresh, machine.ended = None, True, machine.ended + 1
            self.idle.append(machine)
            self._start_tasks(self.now)

    def _at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        heappush(self.events, (when, next(self.numbers), action, args))

    def _advance(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            when, _, action, args = heappop(self.events)
            action(when, *args)

    def _submit(self, job: jobs.Job, shard: Any) -> Task:
        self._advance(self.now)
        self.queue.append(Task(shard))
        task = self.queue[-1]
        self._start_tasks(self.now)
        return task

    def _start_tasks(self, when: float) -> None:
        while self.queue and self.idle:
            machine, task = self.idle.popleft(), self.queue.popleft()
            seconds = self.case.seconds * machine.slowdown + self.case.startup * machine.fresh
            machine.task, machine.fresh, task.machine = task, False, machine
            self._at(when + seconds, self._finish, machine, task, machine.ended)

    def _finish(self, when: float, machine: Machine, task: Task, ended: int) -> None:
        if machine.ended != ended:
            return
        machine.task = None
        self.idle.append(machine)
        self.link_free = max(self.link_free, when) + self.case.size / self.case.link
        self._at(self.link_free, self._arrive, task)
        self._start_tasks(when)

    def _arrive(self, when: float, task: Task) -> None:
        task.arrived = True

    def _schedule_failure(self, when: float, machine: Machine) -> None:
        if self.case.mtbf < math.inf:
            self._at(when + self.random.expovariate(1 / self.case.mtbf), self._fail, machine)

    def _fail(self, when: float, machine: Machine) -> None:
        machine.ended += 1
        if machine.task is None:
            self.idle.remove(machine)
        else:
            machine.task.lost, self.lost = True, self.lost + 1
            self._at(when + self.case.detection, self._arrive, machine.task)
        machine.task, machine.fresh = None, True
        self._at(when + self.case.repair, self._recover, machine)

    def _recover(self, when: float, machine: Machine) -> None:
        self.idle.append(machine)
        self._schedule_failure(when, machine)
        self._start_tasks(when)


@contextmanager
def replaced_ray(simulated: SimulatedRay) -> Iterator[None]:
    """Let the engine use the simulated Ray and its clock, and silence warnings about lost workers."""
    log, installed = logging.getLogger("attractor.jobs.ledger"), sys.modules.get("ray")
    level, clock = log.level, cluster.time
    log.setLevel(logging.ERROR)
    sys.modules["ray"] = simulated  # type: ignore[assignment]
    cluster.time = SimpleNamespace(monotonic=lambda: simulated.now)
    try:
        yield
    finally:
        log.setLevel(level)
        cluster.time = clock
        del sys.modules["ray"]
        if installed is not None:
            sys.modules["ray"] = installed


def simulate(case: Case, seed: int = 0) -> Outcome:
    """Return the outcome of a job that the engine "ray" runs on simulated machines."""
    ray, delivered, died = SimulatedRay(case, seed), list[Any](), False
    job = jobs.Job("attractor.jobs.job:power", {}, copies=case.copies)
    options = {"engine": "ray", "workers": case.workers}
    with replaced_ray(ray):
        try:
            for artifact in jobs.each(job, range(case.shards), retries=RETRIES, **options):
                delivered.append(artifact.shard)
                ray.now += case.handling
        except jobs.WorkerDiedError:
            died = True
    return Outcome(ray.now, delivered, ray.lost, died)
