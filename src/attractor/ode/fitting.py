"""Fit a correction to the user's own equation."""

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core import evolve, get_scheme
from attractor.core.checks import check_whole
from attractor.core.scheme import Rate, call_rate
from attractor.core.tableaus import AnyScheme
from attractor.ode.corrections import BY_NAME, get_correction
from attractor.ode.processes import Crew
from attractor.ode.regression import ClosedForm, Pairs, Unfinished, one_step, train_as_printed
from attractor.ode.shards import FineData
from attractor.ode.solver import HybridSolver
from attractor.ode.trajectories import (
    GOLDEN,
    Plan,
    Run,
    Sampler,
    enough_substeps,
    fine_trajectories,
    initial_states,
    make_run,
    substeps_for,
    whole_steps,
)
from attractor.ode.trust import TrustRegion
from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError
from attractor.train.generators import forked

SCALES = (0.25, 0.15, 0.4, 0.08, 0.7)  # of the random first layer, for standardised inputs
ADAM_ROUNDS = 5  # the last layer is solved, and rollouts are judged, after each
LARGEST = 20_000  # trajectories followed at once
TIMES = 64  # at which a rate is asked whether it depends on t
PHASES = 8  # at which trajectories of an equation with a period start
# Which of slope and state tells the error is the equation's business, so correction="auto" asks it.
AUTO: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attns", {}),
    ("neurvec", {}),
    ("attns", {"state": True}),
)


def fit(
    system_or_rate: Rate,
    *,
    dt: float,
    horizon: float,
    scheme: str | AnyScheme = "rk4",
    correction: str = "auto",
    recipe: str = "default",
    width: int | None = None,
    depth: int | None = None,
    activation: str | None = None,
    precision: str | None = None,
    trajectories: int = 1000,
    sample: Sampler | None = None,
    fine_dt: float | None = None,
    period: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    budget: float | None = None,
    data: FineData | list[Run] | Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    adam_steps: int = 0,
    epochs: int = 500,
    loss_scale: float = 1.0,
    out: Path | str | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> HybridSolver:
    """Learn the error of a step of `dt`, and hand back a solver that takes such steps.

    Recipe "default": errors of plain steps along fine trajectories, in float64; the network's hidden
    weights are random for standardised inputs, its last layer (with a linear way around) is the
    ridge least squares solution; scale and penalty are those with the smallest error on *rollouts*
    of held-out trajectories. Seconds, no training loop. Recipe "paper": Algorithm 1 of the AttNS
    paper, teacher-forced pairs, mean square error times `loss_scale`, float32, nothing normalised; it
    prints no optimiser, so Adam at 1e-3 with a cosine to 0, batches of 16,384 and 500 epochs.

    Under ``torchrun`` or ``accelerate launch`` all processes call it and get one solver, that of a
    single process up to rounding: they share the rows of least squares and of batches. Fine data are
    made by each; for many, make them before (`make_trajectories`).

    Args:
        system_or_rate: one of `attractor.systems`, or any ``(t, u) -> du`` with `sample`.
        dt: the big step. horizon: how far trajectories go, a whole number of steps.
        scheme: what is corrected.
        correction: by what: a name of `attractor.corrections`, or "auto": the slope (AttNS), the
            state (NeurVec) or both, whichever has the smallest error on held-out rollouts; with the
            paper's recipe AttNS.
        width, depth, activation: of the network; None for 512 and sines with the default recipe, for
            the correction's own (the paper's) with the paper's. precision: "float32" computes it in
            float32, which is quicker, and fits it as such. options: further ones of the
            correction, such as ``{"body": "lstm"}``.
        trajectories: how many to learn from; some more are held out.
        sample: ``(n, generator=...) -> [n, d]`` initial states, for a rate of your own.
        fine_dt: step of the fine data; None finds one.
        period: of a rate that depends on t: its phase becomes a feature. Without a period such a
            rate raises.
        seed: of initial states and weights; the same seed gives the same solver.
        budget: seconds after which no further candidate is tried.
        data: fine data made before, by `make_trajectories`: the object, its folder, or runs of it.
            Held-out trajectories are still made, from `sample`.
        adam_steps: train the hidden weights as well, for so many steps, before the last layer is
            solved; held-out rollouts decide when to stop.
        epochs, loss_scale: of recipe "paper".
        out: a folder in which a long fit is kept, twice a minute at most and at its end: after each
            candidate, or epoch of recipe "paper". Interrupted anywhere, the same call goes on from there
            and finds the same weights; fine data are made again, or given as `data`.
        progress: called with a line at each stage.

    Returns:
        A `HybridSolver` in float64 with `.history` and a trust region.

    Raises:
        ValueError, TypeError: for input that cannot be fitted, before time is spent.
        CheckpointError: `out` holds another fit.
    """
    started, crew = time.monotonic(), Crew.find()
    scheme = get_scheme(scheme)
    steps = whole_steps(dt, horizon)
    _check_choices(correction, recipe, trajectories, adam_steps, period)
    held_out = max(4, min(100, trajectories // 10))
    spread = 1 if period is None else PHASES
    plan = Plan(trajectories, dt, steps, 1, seed, min(LARGEST, math.ceil(trajectories / spread)), period)
    seed = plan.seed
    held_plan = replace(plan, count=held_out, stream="held out",
                        shard_size=math.ceil(held_out / min(4, spread)))  # fmt: skip
    if data is not None and sample is None and not hasattr(system_or_rate, "sample"):
        raise ValueError(
            "data= is what is learnt from; the trajectories that are held out start where sample= says: "
            "give it as well, a function (n, generator=...) -> states [n, d]"
        )
    few = initial_states(system_or_rate, sample, 16, plan.generator(0, "trial"), device)
    _check_rate(system_or_rate, few, horizon, period)

    progress("fine data")
    if fine_dt is None:
        substeps = enough_substeps(system_or_rate, few, dt, steps)
    else:
        substeps = substeps_for(dt, fine_dt)
    held = _runs(system_or_rate, sample, replace(held_plan, substeps=substeps), device)
    if data is None:
        runs = _runs(system_or_rate, sample, replace(plan, substeps=substeps), device)
    else:
        runs = _given(data, system_or_rate, dt, few.shape[-1], substeps, device)
    progress("errors of plain steps")
    pairs = one_step(system_or_rate, scheme, dt, runs, timed=period is not None)
    trust = TrustRegion.around(pairs.u[:: max(1, len(pairs.u) // 100_000)])
    judge = _Judge(system_or_rate, scheme, dt, held, crew)
    plain = judge(None)
    if correction == "auto" and recipe == "paper":
        correction = "attns"
    candidates = AUTO if correction == "auto" else ((correction, {}),)
    shared = {"period": period, "precision": precision, **(options or {})}
    if depth is not None:
        shared["depth"] = depth
    if correction == "linear":
        shared = {"period": period}

    what = {
        "recipe": recipe, "correction": correction, "seed": seed,
        "options": repr([*shared.items(), width, activation]),
        "adam_steps": adam_steps, "epochs": epochs, "loss_scale": loss_scale,
        "data": pairs.hash if out is not None else "",
    }  # fmt: skip
    unfinished = Unfinished(out, what, "epoch" if recipe == "paper" else "candidate", crew.rank == 0)
    unfinished.began = started
    if recipe == "paper":
        given = {"width": width, "activation": activation}
        if correction != "linear":
            shared |= {k: v for k, v in given.items() if v is not None}
        with forked(pairs.u.device):
            torch.manual_seed(seed)
            model = get_correction(correction)(pairs.u.shape[-1], **shared, device=pairs.u.device)
        generator = torch.Generator().manual_seed(seed)
        history = train_as_printed(
            model, pairs, epochs, loss_scale, generator, progress, unfinished, crew
        )
        model.requires_grad_(False)
        rollout = judge(model)
        history.append({"chosen": True, "correction": correction, "rollout": rollout, "plain": plain,
                        "substeps": substeps, "seconds": unfinished.seconds})  # fmt: skip
        _warn_if_useless(rollout, plain)
        return HybridSolver(system_or_rate, scheme, model, dt, trust.to(torch.float32), history)

    if correction != "linear":
        shared = {
            "width": 512 if width is None else width,
            "activation": activation or "sine",
            "skip": True,
            **shared,
        }
    search = _Search(pairs, judge, seed, shared, adam_steps, unfinished, budget, progress, crew)
    search.take_up()
    crew.wait()  # until all have read what is there
    first = SCALES[0] if correction != "linear" else 1.0
    for name, own in candidates:
        search.attempt(name, own, first)
    name, own = search.best_kind
    if name != "linear":
        for scale in SCALES[1:]:
            search.attempt(name, own, scale)
    search.put_down(last=True)
    best = search.best
    history = [
        *search.history,
        {"chosen": True, "correction": name, **own, "scale": best["scale"], "rollout": best["rollout"],
         "plain": plain, "substeps": substeps, "seconds": unfinished.seconds},
    ]  # fmt: skip
    _warn_if_useless(best["rollout"], plain)
    model = best["model"].requires_grad_(False)
    return HybridSolver(system_or_rate, scheme, model, dt, trust, history)


@dataclass(frozen=True)
class _Judge:
    """Mean square error on rollouts of held-out trajectories; infinite if one is lost."""

    rate: Rate
    scheme: AnyScheme
    dt: float
    held: list[Run]
    crew: Crew

    def __call__(self, candidate: nn.Module | None) -> float:
        return self.crew.agreed_number(self.error(candidate), self.held[0].u)

    def error(self, candidate: nn.Module | None) -> float:
        """As this process finds it."""
        own = torch.float64 if candidate is None else next(candidate.parameters()).dtype
        summed, count = 0.0, 0
        for run in self.held:
            steps = torch.arange(len(run.u), dtype=torch.float64, device=run.u.device)
            with torch.no_grad():
                t = run.t0 + steps * self.dt
                solved = evolve(self.rate, run.u[0].to(own), t, self.scheme, candidate)
            if not bool(solved.ok.all()):
                return math.inf
            summed += (solved.u.double() - run.u).square().sum().item()
            count += run.u.numel()
        return summed / count


class _Search:
    """Candidates of the default recipe, and the best so far."""

    def __init__(
        self,
        pairs: Pairs,
        judge: _Judge,
        seed: int,
        shared: dict[str, Any],
        adam_steps: int,
        unfinished: Unfinished,
        budget: float | None,
        progress: Callable[[str], None],
        crew: Crew,
    ) -> None:
        self.crew = crew
        self.pairs, self.judge, self.shared, self.adam_steps = pairs, judge, shared, adam_steps
        self.unfinished, self.budget, self.progress = unfinished, budget, progress
        self.asked = self.done = 0  # candidates
        self.generator = torch.Generator().manual_seed(seed)
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {"rollout": math.nan}

    @property
    def best_kind(self) -> tuple[str, dict[str, Any]]:
        return self.best["kind"]

    def attempt(self, name: str, own: dict[str, Any], scale: float) -> None:
        """One candidate, unless it is done, or time is up and there is one already."""
        self.asked += 1
        if self.asked <= self.done:
            return
        spent = self.crew.agreed_number(self.unfinished.seconds, self.pairs.u)
        if self.history and self.budget is not None and spent > self.budget:
            return
        sees = (
            "slope and state" if own.get("state") else {"attns": "slope", "neurvec": "state"}.get(name)
        )
        what = f"{name} of {sees}" if sees else name
        self.progress(f"{what}, weights of scale {scale:g}")
        model = self.make(name, own)
        closed = ClosedForm(model, self.pairs, scale, self.generator, self.crew)
        rounds = ADAM_ROUNDS if self.adam_steps else 0
        part, least = math.ceil(self.adam_steps / ADAM_ROUNDS), math.inf
        for i in range(rounds + 1):
            if i:
                closed.train_hidden(part, (i - 1) * part, rounds * part, self.generator)
            found = closed.solve()
            folded = closed.fold()
            error = self.judge(folded)
            self.history.append(
                {"correction": name, **own, "scale": scale, **found, "adam_steps": i * part,
                 "rollout": error, "seconds": self.unfinished.seconds}
            )  # fmt: skip
            if not self.best["rollout"] <= error:
                self.best = {"rollout": error, "model": folded, "scale": scale, "kind": (name, own)}
            if i > 1 and error > least:  # training makes rollouts worse: stop
                break
            least = min(least, error)
        self.done = self.asked
        self.put_down()

    def make(self, name: str, own: dict[str, Any]) -> nn.Module:
        """The correction of a candidate."""
        like = self.pairs.u
        options = {**self.shared, **own, "dtype": torch.float64, "device": like.device}
        with forked(like.device):  # the weights that are drawn here are not kept
            return get_correction(name)(like.shape[-1], **options)

    def put_down(self, last: bool = False) -> None:
        """Keep the best so far, and where random numbers are."""
        if not self.best.get("model"):
            return
        tensors = {f"best.{k}": v for k, v in self.best["model"].state_dict().items()}
        tensors["generator"] = self.generator.get_state()
        best = {"rollout": self.best["rollout"].hex(), "scale": self.best["scale"],
                "kind": self.best["kind"]}  # fmt: skip
        # As text, for a rollout may be infinite.
        numbers = {"done": self.done, "best": best, "history": json.dumps(self.history)}
        self.unfinished.save(self.done, tensors, numbers, last)

    def take_up(self) -> None:
        """Go on where it was interrupted."""
        found = self.unfinished.load()
        if found is None:
            return
        tensors, config = found
        try:
            best, (name, own) = config["best"], config["best"]["kind"]
            self.generator.set_state(tensors.pop("generator"))
            self.history, self.done = json.loads(config["history"]), config["done"]
            model = self.make(name, own)
            weights = {k.removeprefix("best."): v for k, v in tensors.items()}
            checkpoint.fill(model, weights, "the unfinished fit")
            self.best = {"rollout": float.fromhex(best["rollout"]), "model": model,
                         "scale": best["scale"], "kind": (name, own)}  # fmt: skip
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"the unfinished fit cannot be taken up: {error}") from None


def _warn_if_useless(rollout: float, plain: float) -> None:
    if not rollout < plain and plain > 0:
        warnings.warn(
            f"the correction makes held-out trajectories worse: mean square error {rollout:.1e}, plain "
            f"{plain:.1e}; give it more trajectories or width, or a smaller dt",
            stacklevel=3,
        )


# Input


def _runs(rate: Rate, sample: Sampler | None, plan: Plan, device: Any) -> list[Run]:
    return [make_run(rate, sample, plan, k, device) for k in range(plan.shards)]


def _given(data: Any, rate: Rate, dt: float, dim: int, substeps: int, device: Any) -> list[Run]:
    if isinstance(data, str | Path):
        data = FineData.open(data)
    if isinstance(data, FineData):
        if not math.isclose(data.plan.dt, dt):
            raise ValueError(f"{data.folder} has a state every {data.plan.dt:g}, and dt is {dt:g}")
        data.check_rate(rate, device)
        data = data.runs()
    if not isinstance(data, Sequence) or not all(isinstance(run, Run) for run in data):
        raise TypeError(
            "data= takes what make_trajectories returns, its folder, or a list of its runs()"
        )
    if not data or any(run.u.dim() != 3 or len(run.u) < 2 or run.u.shape[-1] != dim for run in data):
        raise ValueError(
            f"data= must be runs of states [steps + 1, n, {dim}]; {dim} is the size of a sampled state"
        )
    runs = [Run(run.t0, run.u.to(device=device, dtype=torch.float64)) for run in data]
    _check_data(rate, runs[0], dt, substeps)
    return runs


def _check_data(rate: Rate, run: Run, dt: float, substeps: int) -> None:
    """Raise if states do not follow the equation, where they move most; they may be noisy."""
    u = run.u[:, :64]
    if not bool(torch.isfinite(u).all()):
        raise ValueError("data= holds non-finite states")
    ways = u.diff(dim=0).norm(dim=-1).median(-1).values  # [steps]
    k = int(ways.argmax())
    way, size = ways[k].item(), u[k].norm(dim=-1).median().item()
    found = fine_trajectories(rate, u[k], dt, 1, substeps, run.t0 + k * dt)[-1]
    off = (found - u[k + 1]).norm(dim=-1).median().item()
    if off > max(way / 2, 1e-9 * size):
        raise ValueError(
            f"data= does not follow this equation: within dt = {dt:g} its states move by {way:.2g}, and "
            f"they end {off:.2g} from where the rate takes them; give the data of this rate"
        )


def _check_choices(
    correction: str, recipe: str, trajectories: int, adam_steps: int, period: float | None
) -> None:
    if correction != "auto" and correction not in BY_NAME:
        get_correction(correction)
    if recipe not in ("default", "paper"):
        raise ValueError(f"recipe = {recipe!r}; it is 'default' or 'paper'")
    check_whole("trajectories", trajectories, 1)
    check_whole("adam_steps", adam_steps, 0)
    if adam_steps and recipe == "paper":
        raise ValueError(
            f"adam_steps = {adam_steps} with recipe {recipe!r}; it counts steps of the default recipe, "
            "epochs those of the paper's"
        )
    if period is not None and not 0 < period < math.inf:
        raise ValueError(f"period = {period} must be a positive number")


def _check_rate(rate: Rate, u: Tensor, horizon: float, period: float | None) -> None:
    def at(t: float) -> Tensor:
        return call_rate(rate, torch.tensor(t, dtype=u.dtype, device=u.device), u)

    # Unevenly spread, or a rate that repeats with their spacing would look constant.
    times = [(i + i * GOLDEN % 1) / TIMES * horizon for i in range(TIMES)]
    with torch.no_grad():
        rates = [at(t) for t in times]
    if not all(bool(torch.isfinite(du).all()) for du in rates):
        raise ValueError("the rate is non-finite at sampled initial states; change sample or the rate")
    if period is None:
        if any(not torch.equal(du, rates[0]) for du in rates[1:]):
            raise ValueError(
                "the rate depends on t, but a correction sees slope and state only; if it repeats in t, "
                "give its period=, otherwise make t a component of the state (with rate 1)"
            )
        return
    size = torch.stack([du.abs().amax(0) for du in rates]).amax(0)  # [d]
    allowed = 1e-6 * size + 1e-9 * size.max()
    with torch.no_grad():
        for t, du in zip(times, rates):
            later = at(t + period)
            if not bool(((later - du).abs() <= allowed).all()):
                raise ValueError(
                    f"the rate does not repeat with period = {period:g}: at t = {t:g} and one period "
                    f"later it differs by {(later - du).abs().max().item():.2g}"
                )
