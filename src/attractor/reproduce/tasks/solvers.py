"""Hybrid solvers as in the AttNS paper: fit a correction, solve for test states, measure the error.

The error is the mean square over components, trajectories and all discrete states up to T, which is our
interpretation of the paper's Eq. 7 and Table 3. `mse_end`, the error at T, is the other interpretation.
Test states come from a seed that no fit uses, and are the same for all seeds.
If a trajectory or the training becomes non-finite, the error is `CEILING`. The truth has twice as many
substeps as the training data. The mean square error of the training data, a lower limit for every fit,
is 7e-18 for the elastic pendulum to T = 50 and 2e-20 for the 2-link pendulum. Spring-mass is exact.

Entries of a configuration:

    system       "spring-mass" (with n), "2-link" or "elastic"; see `PROBLEMS` of `solver_settings`
    scheme       name of a scheme; default "rk4"
    correction   name of a correction of `attractor.corrections`; its options are width, depth and
                 `options`
    identity     with options {"skip": True}: fix the linear layer around the network at the identity
    residual     add 1 to the bias of the output layer, as in Eq. 9
    recipe       "default": `attractor.fit`; "paper": one-step pairs and Adam, see `train_as_printed`;
                 "normalised": the same with standardised inputs, and errors in units of their deviation
    epochs       number of epochs of the recipes "paper" and "normalised"
    share        share of the training trajectories to use; default 1.0
    data         "exact" (default), or "scheme" for training data by the same scheme with steps of 1e-3,
                 as in the paper for spring-mass
    noise        size of the noise on training states
    kind         "normal" (independent noise on every state) or "constant" (the same number added to
                 every state at which a step starts)
    top          share of the test trajectories to use, those with the largest ``|u''|``; default all

The entries train, test, horizon, substeps and epochs are either a number or an object with a number per
system.
"""

import math
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core import Trajectory, evolve
from attractor.ode import HybridSolver, fit, fused
from attractor.ode.algorithm1 import BATCH, FullBatches, cosine, train_epochs
from attractor.ode.corrections import AttNSM, get_correction
from attractor.ode.pairs import Pairs, one_step
from attractor.ode.trajectories import Run, with_noise
from attractor.reproduce.tasks import Context, Outcome
from attractor.reproduce.tasks.solver_settings import (
    CEILING,
    Setting,
    by_scheme,
    digest,
    make_setting,
    per_system,
)
from attractor.reproduce.tasks.standardised import Normal
from attractor.train import Recipe, compiled_blocks

POINTS = 40  # maximum number of points of a curve


# Fitting


def fit_solver(config: dict[str, Any], context: Context, setting: Setting) -> tuple[Any, Outcome]:
    """Fit a hybrid solver by the recipe of a configuration.

    Returns:
        The solver, or None if the training diverged, and the outcome of the training.

    Raises:
        ValueError: The noise is constant, which the recipe "default" does not have.
    """
    if config["recipe"] in ("paper", "normalised"):
        return _by_adam(config, context, setting)
    run = _with_noise(config, context, setting.run)
    if config.get("kind") == "constant":
        raise ValueError(
            "recipe 'default' does not have noise of the kind 'constant'; use recipe 'paper' or "
            "'normalised'"
        )
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
    epochs = per_system(config, "epochs", config["system"])
    try:
        model, outcome = train_as_printed(config, pairs, context, epochs, setting.problem.loss_scale)
    except FloatingPointError:
        return None, _nan_outcome(math.nan)
    except torch._dynamo.exc.TorchDynamoException as error:  # the compiler is missing or has failed
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"compilation failed, training runs without it ({reason})", stacklevel=2)
        return _by_adam({**config, "compile": False}, context, setting)
    return HybridSolver(setting.system, setting.scheme, model, setting.dt), outcome


def train_as_printed(
    config: dict[str, Any], pairs: Pairs, context: Context, epochs: int, loss_scale: float
) -> tuple[nn.Module, Outcome]:
    """Train a correction by the paper's Algorithm 1: Adam at 1e-3, a cosine to 0, batches of 16,384.

    The recipe "paper" of `attractor.fit` does the same, except that here an incomplete last batch is
    left out and the cosine is evaluated in the middle of each update. All updates have the same shapes,
    so on a GPU each is one CUDA graph. The network runs in fused kernels where they are faster.
    Otherwise it is compiled if ``config["compile"]``.

    Returns:
        The correction, and an outcome with the loss per epoch. If ``config["watch"]``, the outcome of
        AttNS-m also has "q", "away" and "spread": the mean of Q, its mean distance from 1 and its
        standard deviation over some training states.
    """
    torch.manual_seed(context.seed)
    options = {k: config[k] for k in ("width", "depth") if config.get(k) is not None}
    options |= config.get("options") or {}
    model: Any = get_correction(config["correction"])(pairs.u.shape[-1], **options)
    if config.get("residual"):  # Eq. 9: 1 + Q in place of Q
        with torch.no_grad():
            model.net.head.bias.add_(1.0)
    if config.get("identity"):  # the layer around the network is the identity
        torch.nn.init.eye_(model.net.around.weight.requires_grad_(False))
    model.to(context.device)
    normal = Normal.of(model, pairs) if config["recipe"] == "normalised" else None
    dt, u, slope = pairs.dt, pairs.u.float(), pairs.slope.float()
    # All entries of a pair are in one row, so that an update gathers rows only once.
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
    model.eval().requires_grad_(False)  # transformers have a faster kernel in evaluation mode
    if normal is not None:
        normal.fold(model)
    curves = {"epoch": thin(list(range(1, epochs + 1))), "loss": thin(losses)}
    metrics = {**_nan_outcome(float(epochs * len(batches)))["metrics"], "loss": losses[-1]}
    if statistics:
        q, away, deviation = zip(*statistics)
        curves |= {"q": thin(q), "away": thin(away), "spread": thin(deviation)}
        metrics |= {"q": q[-1], "away": away[-1], "spread": deviation[-1]}
    return model, {"metrics": metrics, "curves": curves}


def _nan_outcome(updates: float) -> Outcome:
    """Return the outcome of a fit that reports no loss."""
    nan_metrics = dict.fromkeys(("loss", "q", "away", "spread"), math.nan)
    return {"metrics": {"updates": updates, **nan_metrics}, "curves": {}}


def _with_noise(config: dict[str, Any], context: Context, run: Run) -> Run:
    if not config.get("noise") or config.get("kind") == "constant":
        return run
    return with_noise(run, config["noise"], torch.Generator().manual_seed(context.seed))


def _shift_starts(pairs: Pairs, sigma: float, setting: Setting) -> Pairs:
    """Return steps that start at the states plus sigma, with the same targets for their ends."""
    u = pairs.u + sigma
    with torch.no_grad():
        slope = setting.scheme.slope(setting.system, pairs.t[0], u, pairs.dt)
    end = pairs.u + pairs.dt * pairs.slope + pairs.error
    return Pairs(u, slope, end - u - pairs.dt * slope, pairs.t, pairs.dt)


# Measuring


def error(trajectory: Trajectory, truth: Tensor) -> dict[str, float]:
    """Return the mean square errors over all states and at the end, and the share of lost trajectories.

    A trajectory is lost if it becomes non-finite. Both errors are then `CEILING`.
    """
    squared_errors = (trajectory.u.double() - truth).square()
    lost_share = 1 - trajectory.ok.double().mean().item()
    mean, end = squared_errors.mean().item(), squared_errors[-1].mean().item()
    capped = lambda x: CEILING if lost_share or not x < CEILING else x
    return {"mse": capped(mean), "mse_end": capped(end), "lost": lost_share}


def plain_trajectory(setting: Setting) -> Trajectory:
    """Solve for the test states by the scheme without a correction."""
    t = torch.arange(setting.steps + 1, dtype=torch.float64) * setting.dt
    with torch.no_grad():
        return evolve(setting.system, setting.truth[0], t, setting.scheme)


def solve(config: dict[str, Any], context: Context) -> Outcome:
    """Fit one correction, and measure the errors of the hybrid solver and of the scheme alone.

    Without a correction, the errors are those of the scheme.

    Metrics:
        mse, mse_end, lost: see `error`.
        log_mse: logarithm of mse to base 10.
        plain: mse of the scheme alone.
        updates, loss: number of updates and last loss of the recipes "paper" and "normalised".
        q, away, spread: see `train_as_printed`.
        step: duration of a hybrid step divided by that of a plain step; only if ``config["speed"]``.

    Curves: epoch, loss; time and error, the mean square error over time.
    """
    setting = make_setting(config, context)
    context.tell(f"{config['system']}: the data are ready")
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
        curves |= {"time": thin(times), "error": thin(squared_errors[1:].tolist())}
    metrics = {**errors, "plain": error(baseline, setting.truth)["mse"], **outcome["metrics"]}
    return {"metrics": metrics, "curves": curves, "data": _hashes(setting)}


def grid(config: dict[str, Any], context: Context) -> Outcome:
    """Fit several corrections on several shares of the training data, and measure their errors.

    Configuration, beside that of the module:
        corrections: names of corrections.
        shares: shares of the training trajectories.

    Metrics:
        attns, "attns 50 %", ...: mse by correction and share.
        plain: mse of the scheme alone.
        fine: mse of the training data if they come from the scheme, a lower limit for fits; else 0.
        updates: number of updates at a share of 1.
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
    """Return the duration of a hybrid step divided by that of a plain step, both in float32.

    Each duration is the shortest of several alternating rounds. On a GPU, `steps` steps are one CUDA
    graph, since kernel launches would dominate otherwise.
    """
    u = setting.truth[0].float()
    plain_solver = HybridSolver(setting.system, setting.scheme, _NoCorrection(), setting.dt)
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


class _NoCorrection(nn.Module):
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
    """Return hashes of the initial states, which determine the trajectories."""
    return {"train": digest(setting.run.u[0])[:16], "test": digest(setting.truth[0])[:16]}


def thin(values: Any) -> list[float]:
    """Return at most `POINTS` evenly spaced values, with the first and last, to six digits."""
    values = list(values)
    if len(values) > POINTS:
        last = len(values) - 1
        values = [values[round(i * last / (POINTS - 1))] for i in range(POINTS)]
    return [float(f"{x:.6g}") if x is not None else math.nan for x in values]
