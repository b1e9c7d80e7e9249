"""Hybrid solvers as in the AttNS paper: fit a correction, follow test states, measure the error.

The error is the mean square over components, trajectories and all discrete states up to T, as we read
the paper's Eq. 7 and Table 3; `mse_end`, that at T, is the other reading. Test states come from a seed
that no fit uses, and are the same for every seed.
A trajectory that becomes non-finite, or a training that does, counts as `CEILING`. The truth has twice
as many substeps as the training data, whose own mean square error is 7e-18 for the elastic pendulum to
T = 50 and 2e-20 for the 2-link one: no fit can be better. Spring-mass is exact.

What a configuration may say, and what is taken otherwise:

    system       "spring-mass" (with n), "2-link" or "elastic"; see `PROBLEMS`
    scheme       "rk4"
    correction   of `attractor.corrections`; with its options: width, depth, and `options`
    identity     with options {"skip": True}: what goes around the network is not learnt
    recipe       "default": `attractor.fit`; "paper": one-step pairs, Adam, see `train_as_printed`;
                 "normalised": the same, for standardised inputs and errors in units of their spread
    epochs       of the paper's recipe, of 500
    share        of the training trajectories, 1.0
    data         "exact", or "scheme": the same scheme with steps of 1e-3, as the paper has it for
                 spring-mass
    noise        size of what is added to states in training; kind "normal" (independent, on every
                 state) or "constant" (the same number on every state that a step starts from)
    top          only this share of the test trajectories, those with the largest ``|u''|``
    train, test, horizon, epochs: a number, or one for each system
"""

import functools
import hashlib
import math
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core import Trajectory, evolve, get_scheme
from attractor.ode import HybridSolver, fit, fused, systems
from attractor.ode.algorithm1 import BATCH, FullBatches, cosine, train_epochs
from attractor.ode.corrections import AttNSM, get_correction
from attractor.ode.pairs import Pairs, one_step
from attractor.ode.substeps import whole_steps
from attractor.ode.theory import second_derivative
from attractor.ode.trajectories import Plan, Run, fine_trajectories, make_run, with_noise
from attractor.reproduce.tasks import Context, Outcome
from attractor.train import Recipe, compiled_blocks

CEILING = 1e40  # the error of what is lost
TEST_SEED = 20_261_115
FINE = 1e-3  # step of the paper's training data
POINTS = 40  # of a curve
FINER = 2  # substeps of the truth for each of the training data
MEMORY_SIZE = 8  # sets of fine trajectories kept of a system


@dataclass(frozen=True)
class Problem:
    """A row of the paper's Tables 3 and 4, and the factor of its loss (Eq. 7).

    The paper prints no lambda for them; Adam hardly notices a factor of the loss.
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
    """A system that remembers its fine trajectories, so that fits which share states share them too.

    Args:
        system: the equation.
        substeps: of dopri5 between two states that are kept.
    """

    def __init__(self, system: Any, substeps: int) -> None:
        self.system, self.substeps, self.dim = system, substeps, system.dim
        self.sample = system.sample
        self.memory: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        return self.system(t, u)

    def exact(self, t: Tensor, u0: Tensor) -> Tensor:
        """States ``[len(t), n, d]`` at evenly spaced times after u0 ``[n, d]``; `fit` asks for them."""
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
    """The system of that name, with what it remembers."""
    system_type = PROBLEMS[name].system
    return CachedSystem(system_type(n) if n is not None else system_type(), substeps)


def digest(x: Tensor) -> str:
    """A hash of its numbers."""
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Setting:
    """What an arm is about: the equation, the step, the training data and the truth of the test."""

    problem: Problem
    system: CachedSystem
    scheme: Any
    steps: int
    run: Run
    truth: Tensor  # [steps + 1, n, d]

    @property
    def dt(self) -> float:
        """The big step."""
        return self.problem.dt

    @property
    def horizon(self) -> float:
        """T."""
        return self.steps * self.dt


def make_setting(config: dict[str, Any], context: Context) -> Setting:
    """The equation and the data of a configuration and a seed."""
    name = config["system"]
    overrides = {k: _of(config, k, name) for k in ("train", "test", "horizon", "substeps")}
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
    """States of a *linear* system every dt, by steps of the scheme of `FINE`: the paper's training data.

    A step is a matrix, and so are many: those of the unit vectors, one after the other.
    """
    unit = torch.eye(u0.shape[-1], dtype=torch.float64, device=u0.device)
    t = torch.arange(round(dt / FINE) + 1, dtype=torch.float64) * FINE
    flow = evolve(system, unit, t, scheme, every=len(t) - 1).final
    states = [u0]
    for _ in range(steps):
        states.append(states[-1] @ flow)
    return torch.stack(states)


def largest(system: Any, truth: Tensor, share: float) -> Tensor:
    """The trajectories whose largest ``|u''|`` over components and times is among the largest."""
    size = second_derivative(system, truth).abs().amax((0, -1))
    return truth[:, size.argsort(descending=True)[: max(1, round(share * truth.shape[1]))]]


# Fitting


def fit_solver(config: dict[str, Any], context: Context, setting: Setting) -> tuple[Any, Outcome]:
    """A hybrid solver and what is known about its fit; None in its place if training diverged."""
    if config["recipe"] in ("paper", "normalised"):
        return _by_adam(config, context, setting)
    run = _with_noise(config, context, setting.run)
    if config.get("kind") == "constant":
        raise ValueError("constant noise is between a step's start and its end; recipe 'paper' has it")
    options = {k: config[k] for k in ("width", "depth") if config.get(k) is not None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the correction makes held-out")
        solver = fit(
            setting.system, dt=setting.dt, horizon=setting.horizon, scheme=setting.scheme,
            correction=config["correction"], options=config.get("options"), data=[run],
            fine_dt=setting.dt, trajectories=run.u.shape[1], seed=context.seed, device=context.device,
            **options,
        )  # fmt: skip
    return solver, _nan_outcome(0.0)


def _by_adam(config: dict[str, Any], context: Context, setting: Setting) -> tuple[Any, Outcome]:
    pairs = one_step(
        setting.system, setting.scheme, setting.dt, [_with_noise(config, context, setting.run)], False
    )
    if config.get("kind") == "constant":
        pairs = _shift_starts(pairs, config["noise"], setting)
    epochs = _of(config, "epochs", config["system"])
    try:
        model, outcome = train_as_printed(config, pairs, context, epochs, setting.problem.loss_scale)
    except FloatingPointError:
        return None, _nan_outcome(math.nan)
    except torch._dynamo.exc.TorchDynamoException as error:  # no compiler, or one that fails
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"not compiled, training goes on without ({reason})", stacklevel=2)
        return _by_adam({**config, "compile": False}, context, setting)
    return HybridSolver(setting.system, setting.scheme, model, setting.dt), outcome


def train_as_printed(
    config: dict[str, Any], pairs: Pairs, context: Context, epochs: int, loss_scale: float
) -> tuple[nn.Module, Outcome]:
    """Train a correction by the paper's Algorithm 1: Adam at 1e-3, a cosine to 0, batches of 16,384.

    This is what `attractor.fit` does with recipe "paper", except that an incomplete last batch is left
    out and the learning rate of an update is that in its middle. All updates have the same shapes, so on
    a GPU each is one CUDA graph. The network runs in kernels where they are faster, and is compiled
    otherwise if ``config["compile"]``.

    Returns:
        The correction, and its losses, epoch by epoch; if ``config["watch"]``, with "q", "away" and
        "spread" of AttNS-m: mean of Q, its mean distance from 1 and its standard deviation, over some
        training states.
    """
    torch.manual_seed(context.seed)
    options = {k: config[k] for k in ("width", "depth") if config.get(k) is not None}
    options |= config.get("options") or {}
    model: Any = get_correction(config["correction"])(pairs.u.shape[-1], **options)
    if config.get("residual"):  # Eq. 9: 1 + Q in place of Q
        with torch.no_grad():
            model.net.head.bias.add_(1.0)
    if config.get("identity"):  # the way around the network hands its input on as it is
        torch.nn.init.eye_(model.net.around.weight.requires_grad_(False))
    model.to(context.device)
    normal = Normal.of(model, pairs) if config["recipe"] == "normalised" else None
    dt, u, slope = pairs.dt, pairs.u.float(), pairs.slope.float()
    # What belongs to a pair lies together: rows are gathered once an update.
    tensors = (u, slope, pairs.error.float()) if normal is None else (normal.x, normal.error)
    rows, sizes = torch.cat(tensors, -1), [x.shape[-1] for x in tensors]
    stream = Recipe(seed=context.seed).stream
    batches = FullBatches(
        len(u), config.get("batch", BATCH), u.device, lambda epoch: stream("batches", epoch)
    )
    watch = config.get("watch") and isinstance(model, AttNSM)
    sample_slopes = slope[:: max(1, len(u) // 4096)]
    statistics: list[tuple[float, ...]] = []

    def loss(model: Any, index: Tensor) -> tuple[Tensor, Tensor]:
        *inputs, error = rows[index].split(sizes, -1)
        if normal is not None:
            pair_losses = (model.net(*inputs) - error).square().mean(-1)
        else:
            pair_losses = loss_scale * (model(*inputs, dt) - error).square().mean(-1)
        return pair_losses.mean(), pair_losses.detach().double().sum()

    def look() -> None:
        if watch:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                q = model.net.in_torch(sample_slopes).double()
            statistics.append(tuple(x.item() for x in (q.mean(), (q - 1).abs().mean(), q.std())))

    is_plain = hasattr(model.net, "body") and hasattr(model.net.body, "activations")
    is_plain = is_plain and not fused.pays(model.net, model.inputs(u[:1], slope[:1], dt))
    compiled = is_plain and config.get("compile")
    look()
    with compiled_blocks(model, lambda correction: [model.net.body]) if compiled else nullcontext():
        losses = train_epochs(
            model, loss, batches, epochs, cosine(epochs, len(batches), middle=True), graph=u.is_cuda,
            after_epoch=lambda epoch_count, mean: look(),
        )  # fmt: skip
    model.eval().requires_grad_(False)  # evaluation mode: transformers have a faster kernel for it
    if normal is not None:
        normal.fold(model)
    curves = {"epoch": thinned(list(range(1, epochs + 1))), "loss": thinned(losses)}
    metrics = {**_nan_outcome(float(epochs * len(batches)))["metrics"], "loss": losses[-1]}
    if statistics:
        q, away, deviation = zip(*statistics)
        curves |= {"q": thinned(q), "away": thinned(away), "spread": thinned(deviation)}
        metrics |= {"q": q[-1], "away": away[-1], "spread": deviation[-1]}
    return model, {"metrics": metrics, "curves": curves}


def _nan_outcome(updates: float) -> Outcome:
    """What a fit without a loss has to say."""
    nan_metrics = dict.fromkeys(("loss", "q", "away", "spread"), math.nan)
    return {"metrics": {"updates": updates, **nan_metrics}, "curves": {}}


@dataclass(frozen=True)
class Normal:
    """What a correction sees and has to give, both with components of size 1."""

    x: Tensor
    error: Tensor
    mean: Tensor
    deviation: Tensor
    size: Tensor

    @classmethod
    def of(cls, model: Any, pairs: Pairs) -> "Normal":
        """For a correction that adds what its network gives."""
        if isinstance(model, AttNSM):
            raise ValueError("AttNS-m multiplies by the slope; recipe 'normalised' is for the others")
        with torch.no_grad():
            x = model.inputs(pairs.step()).double()
        mean, deviation, size = x.mean(0), x.std(0), pairs.error.std(0)
        deviation = torch.where(deviation > 1e-12 * (1 + mean.abs()), deviation, 1.0)
        size = torch.where(size > 0, size, 1.0)
        return cls(((x - mean) / deviation).float(), (pairs.error / size).float(), mean, deviation, size)

    def fold(self, model: Any) -> None:
        """Let the correction take and give things as they are; in float64, where that loses nothing."""
        net = model.double().net
        with torch.no_grad():
            for layer in (net.head, net.around):
                if layer is not None:
                    layer.weight.mul_(self.size[:, None])
            net.head.bias.mul_(self.size)
        net.standardise(self.mean, self.deviation)


def _with_noise(config: dict[str, Any], context: Context, run: Run) -> Run:
    if not config.get("noise") or config.get("kind") == "constant":
        return run
    return with_noise(run, config["noise"], torch.Generator().manual_seed(context.seed))


def _shift_starts(pairs: Pairs, sigma: float, setting: Setting) -> Pairs:
    """Steps that start sigma beside the state, and should end where the state's own does."""
    u = pairs.u + sigma
    with torch.no_grad():
        slope = setting.scheme.slope(setting.system, pairs.t[0], u, pairs.dt)
    end = pairs.u + pairs.dt * pairs.slope + pairs.error
    return Pairs(u, slope, end - u - pairs.dt * slope, pairs.t, pairs.dt)


# Measuring


def error(trajectory: Trajectory, truth: Tensor) -> dict[str, float]:
    """Mean square error over all states and at the end, and the share of trajectories that are lost."""
    squared_errors = (trajectory.u.double() - truth).square()
    lost_share = 1 - trajectory.ok.double().mean().item()
    mean, end = squared_errors.mean().item(), squared_errors[-1].mean().item()
    capped = lambda x: CEILING if lost_share or not x < CEILING else x
    return {"mse": capped(mean), "mse_end": capped(end), "lost": lost_share}


def plain_trajectory(setting: Setting) -> Trajectory:
    """The scheme alone."""
    t = torch.arange(setting.steps + 1, dtype=torch.float64) * setting.dt
    with torch.no_grad():
        return evolve(setting.system, setting.truth[0], t, setting.scheme)


def solve(config: dict[str, Any], context: Context) -> Outcome:
    """One correction by one recipe: the error of the hybrid solver on test states, and the scheme's own.

    Metrics: "mse", "log_mse" (base 10), "mse_end", "lost", "plain", "updates" and "loss" of the paper's
    recipe; with ``speed`` also "step", a hybrid step's time over a plain one's. Curves: "loss", and
    "time" and "error", the mean square error over time.
    """
    setting = make_setting(config, context)
    context.tell(f"{config['system']}: data are there")
    baseline = plain_trajectory(setting)
    if config.get("correction") is None:
        outcome = _nan_outcome(0.0)
        trajectory: Any = baseline
    else:
        solver, outcome = fit_solver(config, context, setting)
        trajectory = None if solver is None else _solve_test_states(solver, setting)
        if config.get("speed"):
            outcome["metrics"]["step"] = math.nan if solver is None else step_ratio(solver, setting)
    lost_errors = {"mse": CEILING, "mse_end": CEILING, "lost": 1.0}
    errors = lost_errors if trajectory is None else error(trajectory, setting.truth)
    errors |= {"log_mse": math.log10(max(errors["mse"], 1e-300))}
    curves = dict(outcome["curves"])
    if trajectory is not None:
        squared_errors = (trajectory.u.double() - setting.truth).square().mean((1, 2))
        times = [i * setting.dt for i in range(1, setting.steps + 1)]
        curves |= {"time": thinned(times), "error": thinned(squared_errors[1:].tolist())}
    metrics = {**errors, "plain": error(baseline, setting.truth)["mse"], **outcome["metrics"]}
    return {"metrics": metrics, "curves": curves, "data": _hashes(setting)}


def grid(config: dict[str, Any], context: Context) -> Outcome:
    """Several corrections and shares of the data: their errors by name, as "attns" and "attns 50 %".

    Metrics also "plain", the scheme's own error; "fine", that of the training data where they come from
    the scheme itself, below which no fit can get but by luck; "updates" at a share of 1.
    """
    setting = make_setting({**config, "share": 1.0}, context)
    metrics = {"plain": error(plain_trajectory(setting), setting.truth)["mse"], "fine": 0.0}
    if config.get("data") == "scheme":
        fine = by_scheme(
            setting.system.system, setting.truth[0], setting.scheme, setting.dt, setting.steps
        )
        metrics["fine"] = (fine - setting.truth).square().mean().item()
    for correction in config["corrections"]:
        for share in config["shares"]:
            arm_config = {**config, "correction": correction}
            part = Run(0.0, setting.run.u[:, : max(1, round(share * setting.run.u.shape[1]))])
            solver, outcome = fit_solver(arm_config, context, replace(setting, run=part))
            name = correction if share == 1 else f"{correction} {share:.0%}".replace("%", " %")
            trajectory = None if solver is None else _solve_test_states(solver, setting)
            metrics[name] = CEILING if trajectory is None else error(trajectory, setting.truth)["mse"]
            if share == 1:
                metrics["updates"] = outcome["metrics"]["updates"]
    return {"metrics": metrics, "data": _hashes(setting)}


def step_ratio(solver: HybridSolver, setting: Setting, steps: int = 5, rounds: int = 5) -> float:
    """Time of a hybrid step over that of a plain one, both in float32, in turn, the shortest of rounds.

    On a GPU several steps are one graph; without it, launches would be all that is measured.
    """
    u = setting.truth[0].float()
    plain_solver = HybridSolver(setting.system, setting.scheme, _Nothing(), setting.dt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [
            s.capture(u, steps=steps, compile=False) for s in (solver.to(torch.float32), plain_solver)
        ]
    shortest = [math.inf, math.inf]
    for _ in range(rounds):
        for i, run in enumerate(runs):
            run.reset(u)
            shortest[i] = min(shortest[i], _seconds(run, 10 if u.is_cuda else 1))
    return shortest[0] / shortest[1]


class _Nothing(nn.Module):
    """A correction that adds nothing."""

    def forward(self, u: Tensor, slope: Tensor, dt: Any) -> float:
        return 0.0


def _seconds(run: Any, times: int) -> float:
    run.advance()
    if run.u.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run.advance(times)
    if run.u.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def _solve_test_states(solver: HybridSolver, setting: Setting) -> Trajectory:
    dtype = next(solver.correction.parameters()).dtype
    with torch.no_grad():
        return solver.solve(setting.truth[0].to(dtype), setting.horizon, guard=False)


def _hashes(setting: Setting) -> dict[str, str]:
    """Of the states that trajectories start from; the rest follows from them."""
    return {"train": digest(setting.run.u[0])[:16], "test": digest(setting.truth[0])[:16]}


def thinned(values: Any) -> list[float]:
    """At most `POINTS` of them, the first and the last among them, with six digits."""
    values = list(values)
    if len(values) > POINTS:
        last = len(values) - 1
        values = [values[round(i * last / (POINTS - 1))] for i in range(POINTS)]
    return [float(f"{x:.6g}") if x is not None else math.nan for x in values]


def _of(config: dict[str, Any], key: str, system: str) -> Any:
    """A number of the configuration, or the one for this system."""
    value = config.get(key)
    return value.get(system) if isinstance(value, dict) else value
