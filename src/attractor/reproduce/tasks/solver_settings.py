"""Settings of the tasks on hybrid solvers: equations, training data and true test trajectories."""

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attractor.core import evolve, get_scheme
from attractor.ode import systems
from attractor.ode.substeps import whole_steps
from attractor.ode.theory import second_derivative
from attractor.ode.trajectories import Plan, Run, fine_trajectories, make_run
from attractor.reproduce.tasks import Context

CEILING = 1e40  # error of a non-finite trajectory or training
TEST_SEED = 20_261_115
FINE = 1e-3  # step of the paper's training data
FINER = 2  # substeps of the truth per substep of the training data
MEMORY_SIZE = 8  # number of cached sets of fine trajectories per system


@dataclass(frozen=True)
class Problem:
    """A row of the paper's Tables 3 and 4, with the factor lambda of the loss in Eq. 7.

    The paper does not print lambda for these rows. Adam is nearly invariant to a factor of the loss.

    Attributes:
        system: Class of the equation.
        dt: The large step.
        horizon: T.
        train: Number of training trajectories.
        test: Number of test trajectories.
        loss_scale: lambda.
        substeps: Number of dopri5 steps per large step of the training data.
    """

    system: Any
    dt: float
    horizon: float
    train: int
    test: int
    loss_scale: float
    substeps: int = 1


PROBLEMS = {
    "spring-mass": Problem(systems.SpringMass, 0.2, 20.0, 5_000, 5_000, 1.0),
    "2-link": Problem(systems.PendulumChain, 0.1, 10.0, 20_000, 10_000, 1e6, 16),
    "elastic": Problem(systems.ElasticPendulum, 0.1, 50.0, 20_000, 10_000, 1e6, 16),
}


class CachedSystem:
    """A system with a cache of its fine trajectories, which fits with the same initial states share.

    Args:
        system: The equation.
        substeps: Number of dopri5 steps between two returned states.
    """

    def __init__(self, system: Any, substeps: int) -> None:
        self.system, self.substeps, self.dim = system, substeps, system.dim
        self.sample = system.sample
        self.memory: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """Return du/dt."""
        return self.system(t, u)

    def exact(self, t: Tensor, u0: Tensor) -> Tensor:
        """Return states ``[len(t), n, d]`` from u0 ``[n, d]`` at evenly spaced times, for `fit`."""
        key = (len(t), round(t[1].item(), 12), u0.device, digest(u0))
        if key not in self.memory:
            while len(self.memory) >= MEMORY_SIZE:
                self.memory.pop(next(iter(self.memory)))
            self.memory[key] = fine_trajectories(
                self.system, u0, t[1].item(), len(t) - 1, self.substeps, scheme="dopri5"
            )
        return self.memory[key]


@functools.cache
def cached_system(name: str, n: int | None, substeps: int) -> CachedSystem:
    """Return the system of a name, always the same object with its cache."""
    system_type = PROBLEMS[name].system
    return CachedSystem(system_type(n) if n is not None else system_type(), substeps)


def digest(x: Tensor) -> str:
    """Return the SHA-256 digest of the numbers of a tensor."""
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Setting:
    """The equation, the scheme, the training data and the true test trajectories of an arm."""

    problem: Problem
    system: CachedSystem
    scheme: Any
    steps: int
    run: Run
    truth: Tensor  # [steps + 1, n, d]

    @property
    def dt(self) -> float:
        """The large step."""
        return self.problem.dt

    @property
    def horizon(self) -> float:
        """T, the duration of the test trajectories."""
        return self.steps * self.dt


def make_setting(config: dict[str, Any], context: Context) -> Setting:
    """Return the equation and the data of a configuration and a seed."""
    name = config["system"]
    overrides = {k: per_system(config, k, name) for k in ("train", "test", "horizon", "substeps")}
    problem = replace(PROBLEMS[name], **{k: v for k, v in overrides.items() if v is not None})
    system = cached_system(name, config.get("n"), problem.substeps)
    scheme, steps = get_scheme(config.get("scheme", "rk4")), whole_steps(problem.dt, problem.horizon)
    plan = Plan(problem.train, problem.dt, steps, 1, context.seed, problem.train)
    if config.get("data", "exact") == "exact":
        run = make_run(system, None, plan, 0, context.device)
    else:
        u0 = system.sample(problem.train, plan.generator(0, "states"), torch.float64, context.device)
        run = Run(0.0, by_scheme(system.system, u0, scheme, problem.dt, steps))
    generator = torch.Generator().manual_seed(TEST_SEED)
    u0 = system.sample(problem.test, generator, torch.float64, context.device)
    finer = cached_system(name, config.get("n"), FINER * problem.substeps)
    truth = finer.exact(torch.arange(steps + 1, dtype=torch.float64) * problem.dt, u0)
    if "top" in config:
        truth = largest(system, truth, config["top"])
    run = Run(run.t0, run.u[:, : max(1, round(config.get("share", 1.0) * problem.train))])
    return Setting(problem, system, scheme, steps, run, truth)


def by_scheme(system: Any, u0: Tensor, scheme: Any, dt: float, steps: int) -> Tensor:
    """Return states of a linear system every dt, computed by the scheme with steps of `FINE`.

    These are the paper's training data for spring-mass. Requires a linear system: the steps over dt are
    one matrix, which is found from the unit vectors.
    """
    unit = torch.eye(u0.shape[-1], dtype=torch.float64, device=u0.device)
    t = torch.arange(round(dt / FINE) + 1, dtype=torch.float64) * FINE
    flow = evolve(system, unit, t, scheme, every=len(t) - 1).final
    states = [u0]
    for _ in range(steps):
        states.append(states[-1] @ flow)
    return torch.stack(states)


def largest(system: Any, truth: Tensor, share: float) -> Tensor:
    """Return the share of the trajectories with the largest ``|u''|`` over components and times."""
    size = second_derivative(system, truth).abs().amax((0, -1))
    return truth[:, size.argsort(descending=True)[: max(1, round(share * truth.shape[1]))]]


def per_system(config: dict[str, Any], key: str, system: str) -> Any:
    """Return a number of the configuration, which may be an object with a number per system."""
    value = config.get(key)
    return value.get(system) if isinstance(value, dict) else value
