"""Fit a correction to the user's own equation."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core import evolve, get_scheme
from attractor.core.scheme import Rate, call_rate
from attractor.core.tableaus import AnyScheme
from attractor.ode.corrections import BY_NAME, AttNSM, get_correction
from attractor.ode.solver import HybridSolver
from attractor.ode.trajectories import enough_substeps, fine_trajectories, substeps_for
from attractor.ode.trust import TrustRegion

SCALES = (0.15, 0.25, 0.4, 0.7)  # of the random first layer, for standardised inputs
PENALTIES = (
    0.0,
    1e-15,
    1e-14,
    1e-13,
    1e-12,
    1e-11,
    1e-10,
    1e-8,
    1e-6,
)  # of the largest singular value squared
ROWS_A_FEATURE = 60


@dataclass(frozen=True)
class _Pairs:
    """States, their slopes, and the errors ``u' - u - dt S`` of plain steps from them; [n, d] each."""

    u: Tensor
    slope: Tensor
    error: Tensor

    def rows(self, index: Tensor) -> "_Pairs":
        return _Pairs(self.u[index], self.slope[index], self.error[index])


def fit(
    system_or_rate: Rate,
    *,
    dt: float,
    horizon: float,
    scheme: str | AnyScheme = "rk4",
    correction: str = "attns",
    recipe: str = "default",
    width: int | None = None,
    depth: int = 2,
    activation: str | None = None,
    trajectories: int = 1000,
    sample: Callable[..., Tensor] | None = None,
    fine_dt: float | None = None,
    period: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    budget: float | None = None,
    epochs: int = 500,
    loss_scale: float = 1.0,
    progress: Callable[[str], None] = lambda what: None,
) -> HybridSolver:
    """Learn the error of a step of `dt`, and hand back a solver that takes such steps.

    Recipe "default": errors of plain steps along fine trajectories, in float64; the network's hidden
    weights are random for standardised inputs, its last layer (with a linear way around) is the
    ridge least squares solution; scale and penalty are those with the smallest error on *rollouts*
    of held-out trajectories. Seconds, no training loop. Recipe "paper": Algorithm 1 of the AttNS
    paper as printed: teacher-forced pairs, Adam at 1e-3 with a cosine to 0, batches of 16,384, mean
    square error times `loss_scale`, float32, nothing normalised.

    Args:
        system_or_rate: one of `attractor.systems`, or any ``(t, u) -> du`` with `sample`.
        dt: the big step. horizon: how far trajectories go, a whole number of steps.
        scheme, correction, width, depth, activation: what is corrected, and by what.
        trajectories: how many to learn from; a tenth more is held out.
        sample: ``(n, generator=...) -> [n, d]`` initial states, for a rate of your own.
        fine_dt: step of the fine data; None finds one.
        seed: of initial states and weights; the same seed gives the same solver.
        budget: seconds after which no further candidate is tried.
        epochs, loss_scale: of recipe "paper".
        progress: called with a line at each stage.

    Returns:
        A `HybridSolver` in float64 with `.history` and a trust region.

    Raises:
        ValueError, TypeError: for input that cannot be fitted, before time is spent.
    """
    started = time.monotonic()
    scheme = get_scheme(scheme)
    steps = _whole_steps(dt, horizon)
    _check_choices(correction, recipe, trajectories, period)
    generator = torch.Generator().manual_seed(seed)
    held_out = max(4, min(100, trajectories // 10))
    u0 = _initial_states(system_or_rate, sample, trajectories + held_out, generator, device)
    _check_rate(system_or_rate, u0, horizon)

    progress("fine data")
    if fine_dt is None:
        substeps = enough_substeps(system_or_rate, u0, dt, steps)
    else:
        substeps = substeps_for(dt, fine_dt)
    fine = fine_trajectories(system_or_rate, u0, dt, steps, substeps)
    train, held = fine[:, held_out:], fine[:, :held_out]
    pairs = _one_step(system_or_rate, scheme, dt, train)
    trust = TrustRegion.around(pairs.u[:: max(1, len(pairs.u) // 100_000)])
    make = get_correction(correction)
    options: dict[str, Any] = {} if correction == "linear" else {"depth": depth}

    def rollout(candidate: nn.Module) -> float:
        with torch.no_grad():
            t = torch.arange(steps + 1, dtype=torch.float64, device=held.device) * dt
            own = next(candidate.parameters()).dtype
            solved = evolve(system_or_rate, held[0].to(own), t, scheme, candidate)
        good = bool(solved.ok.all())
        return (solved.u.double() - held).square().mean().item() if good else math.inf

    if recipe == "paper":
        if correction != "linear":
            options |= {"width": width or 1024, "activation": activation or "rational"}
        torch.manual_seed(seed)
        model = make(pairs.u.shape[-1], **options, device=pairs.u.device)
        history = _train_as_printed(model, pairs, dt, epochs, loss_scale, generator, rollout, progress)
        history[-1]["seconds"] = time.monotonic() - started
        return HybridSolver(system_or_rate, scheme, model, dt, trust.to(torch.float32), history)

    if correction != "linear":
        options |= {"width": width or 512, "activation": activation or "tanh", "skip": True}
    best: tuple[float, nn.Module] | None = None
    history = []
    for scale in SCALES if correction != "linear" else (1.0,):
        if best is not None and budget is not None and time.monotonic() - started > budget:
            break
        progress(f"closed-form fit, weights of scale {scale}")
        model = make(pairs.u.shape[-1], **options, dtype=torch.float64, device=pairs.u.device)
        found = _solve_last_layer(model, pairs, dt, scale, generator)
        error = rollout(model)
        seconds = time.monotonic() - started
        history.append({"scale": scale, **found, "rollout": error, "seconds": seconds})
        if best is None or error < best[0]:
            best = error, model
    assert best is not None
    history.append({"chosen": True, "rollout": best[0], "substeps": substeps,
                    "seconds": time.monotonic() - started})  # fmt: skip
    return HybridSolver(system_or_rate, scheme, best[1].requires_grad_(False), dt, trust, history)


def _solve_last_layer(
    model: nn.Module, pairs: _Pairs, dt: float, scale: float, generator: torch.Generator
) -> dict[str, float]:
    """Random hidden weights, last layer by ridge least squares; both for raw inputs afterwards."""
    net: Any = model.net
    if hasattr(net, "spread"):
        net.spread(scale, generator)
    x = model.inputs(pairs.u, pairs.slope, dt)  # type: ignore[operator]
    mean, deviation = x.mean(0), x.std(0)
    deviation = torch.where(deviation > 1e-12 * (1 + mean.abs()), deviation, 1.0)
    size = pairs.error.std(0)
    size = torch.where(size > 0, size, 1.0)

    def rows(index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        some = pairs.rows(index)
        features = net.features((x[index] - mean) / deviation)
        if isinstance(model, AttNSM):  # error = gain (Q - 1), gain depending on row and component
            gain = model.gain(some.slope, dt) / size
            return features, some.error / size + gain, gain
        return features, some.error / size, None

    with torch.no_grad():
        order = torch.randperm(len(x), generator=generator).to(x.device)
        k = net.features(x[:1]).shape[-1]
        count = min(int(0.9 * len(x)) + 1, max(20_000, ROWS_A_FEATURE * k))
        held = order[count : count + 20_000] if len(x) > count + 100 else order[-max(1, len(x) // 10) :]
        features, target, gain = rows(order[:count])
        check, check_target, check_gain = rows(held)
        if gain is None:
            weights, penalty, error = _ridge(features, target, check, check_target)
        else:
            columns, penalty, error = [], 0.0, 0.0
            for j in range(target.shape[-1]):
                assert check_gain is not None
                column, penalty, one = _ridge(
                    gain[:, j : j + 1] * features, target[:, j : j + 1],
                    check_gain[:, j : j + 1] * check, check_target[:, j : j + 1],
                )  # fmt: skip
                columns.append(column)
                error += one / target.shape[-1]
            weights = torch.cat(columns, -1)
        net.set_head(weights if gain is not None else weights * size)
        net.standardise(mean, deviation)
    return {"penalty": penalty, "one_step": error}


def _ridge(a: Tensor, y: Tensor, check: Tensor, check_y: Tensor) -> tuple[Tensor, float, float]:
    """Least squares ``a w = y`` for all penalties at once; the best on the check rows.

    By QR and then an SVD of the small triangle: normal equations would square the condition, and
    with it throw away half of the digits.
    """
    k = a.shape[-1]
    triangle = torch.linalg.qr(torch.cat((a, y), -1), mode="r")[1]
    left, values, right = torch.linalg.svd(triangle[:k, :k], full_matrices=False)
    turned = left.T @ triangle[:k, k:]
    best: tuple[Tensor, float, float] | None = None
    for penalty in PENALTIES:
        inverse = values / (values.square() + penalty * values[0].square())
        inverse = torch.where(values > 1e-15 * values[0], inverse, 0.0)
        w = right.T @ (inverse[:, None] * turned)
        error = (check @ w - check_y).square().mean().item()
        if best is None or error < best[2]:
            best = w, penalty, error
    assert best is not None
    return best


def _train_as_printed(
    model: nn.Module,
    pairs: _Pairs,
    dt: float,
    epochs: int,
    loss_scale: float,
    generator: torch.Generator,
    rollout: Callable[[nn.Module], float],
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Algorithm 1: Adam on one-step pairs, in float32."""
    u, slope, error = pairs.u.float(), pairs.slope.float(), pairs.error.float()
    batch = min(16_384, len(u))
    total = epochs * math.ceil(len(u) / batch)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, total)
    history: list[dict[str, Any]] = []
    for epoch in range(epochs):
        sum_ = 0.0
        for index in torch.randperm(len(u), generator=generator).to(u.device).split(batch):
            loss = loss_scale * (model(u[index], slope[index], dt) - error[index]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            sum_ += loss.item() * len(index)
        if not math.isfinite(sum_):
            raise FloatingPointError(f"the loss became non-finite in epoch {epoch}; lower loss_scale")
        history.append({"epoch": epoch, "loss": sum_ / len(u)})
        progress(f"epoch {epoch + 1} of {epochs}, loss {sum_ / len(u):.2e}")
    model.requires_grad_(False)
    history.append({"chosen": True, "rollout": rollout(model)})
    return history


# Input


def _one_step(rate: Rate, scheme: AnyScheme, dt: float, fine: Tensor) -> _Pairs:
    u, after = fine[:-1].flatten(0, 1), fine[1:].flatten(0, 1)
    with torch.no_grad():
        slope = scheme.slope(rate, 0.0, u, dt)
    pairs = _Pairs(u, slope, after - u - dt * slope)
    finite = torch.isfinite(slope).all(-1)
    if not bool(finite.all()):
        raise ValueError(
            f"a plain step of {scheme.name} with dt = {dt:g} is non-finite from "
            f"{int((~finite).sum())} of {len(u)} states; use a smaller dt"
        )
    return pairs


def _whole_steps(dt: float, horizon: float) -> int:
    if not (dt > 0 and math.isfinite(dt)):
        raise ValueError(f"dt = {dt} must be a positive number")
    steps = round(horizon / dt)
    if steps < 1 or abs(steps * dt - horizon) > 1e-9 * horizon:
        raise ValueError(
            f"horizon = {horizon:g} is not a whole number of steps of dt = {dt:g}; the nearest is "
            f"{max(steps, 1) * dt:g}"
        )
    return steps


def _check_choices(correction: str, recipe: str, trajectories: int, period: float | None) -> None:
    if correction not in BY_NAME:
        get_correction(correction)
    if recipe not in ("default", "paper"):
        raise ValueError(f"recipe = {recipe!r}; it is 'default' or 'paper'")
    if trajectories < 1:
        raise ValueError(f"trajectories = {trajectories}; a fit needs at least one")
    if period is not None:
        raise ValueError("period= is not supported yet; make time a component of the state")


def _initial_states(
    rate: Any,
    sample: Callable[..., Tensor] | None,
    count: int,
    generator: torch.Generator,
    device: torch.device | str | None,
) -> Tensor:
    if sample is None:
        if not hasattr(rate, "sample"):
            raise ValueError(
                "a rate of your own needs sample=, a function (n, generator=...) -> states [n, d]"
            )
        return rate.sample(count, generator, torch.float64, device)
    u0 = sample(count, generator=generator)
    if not isinstance(u0, Tensor) or u0.dim() != 2 or len(u0) != count:
        got = list(u0.shape) if isinstance(u0, Tensor) else type(u0).__name__
        raise ValueError(f"sample({count}) returned {got}; it must return a tensor [{count}, d]")
    if not bool(torch.isfinite(u0).all()):
        raise ValueError("sample returned non-finite states; a fit needs states it can start from")
    return u0.to(dtype=torch.float64, device=device)


def _check_rate(rate: Rate, u0: Tensor, horizon: float) -> None:
    few = u0[:16]
    with torch.no_grad():
        rates = [call_rate(rate, torch.tensor(t, dtype=u0.dtype, device=u0.device), few)
                 for t in (0.0, 0.37 * horizon, 0.71 * horizon)]  # fmt: skip
    if not all(bool(torch.isfinite(du).all()) for du in rates):
        raise ValueError("the rate is non-finite at sampled initial states; change sample or the rate")
    if any(not torch.equal(du, rates[0]) for du in rates[1:]):
        raise ValueError(
            "the rate depends on t, but a correction sees the state only; make the phase a component of "
            "the state (phase' = 1), or give period= once it is supported"
        )
