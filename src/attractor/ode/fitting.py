"""Fit a correction to the user's own equation."""

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core import Splitting, evolve, get_scheme, stiffness
from attractor.core.checks import check_number, check_whole, is_whole
from attractor.core.identity import Identity
from attractor.core.limits import check_folder, check_memory
from attractor.core.scheme import Rate
from attractor.core.step import with_parameters
from attractor.core.tableaus import AnyScheme
from attractor.ode.algorithm1 import train_on_pairs
from attractor.ode.closed_form import ClosedForm
from attractor.ode.corrections import BY_NAME, get_correction
from attractor.ode.hybrid_search import fastest_hybrid
from attractor.ode.pairs import Pairs, one_step
from attractor.ode.processes import Crew, Group
from attractor.ode.rate_checks import TIMES, check_rate
from attractor.ode.recipes import Paper, Recipe, Ridge, get_recipe
from attractor.ode.serialization import history_from_json
from attractor.ode.shards import FineData
from attractor.ode.solver import HybridSolver
from attractor.ode.trajectories import (
    LARGEST,
    PHASES,
    LostTrajectoriesError,
    Plan,
    Run,
    Sampler,
    check_states,
    enough_substeps,
    fine_trajectories,
    initial_states,
    make_runs,
    sampled_parameters,
    substeps_for,
    whole_steps,
)
from attractor.ode.trust import TrustRegion
from attractor.ode.unfinished import Unfinished
from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError
from attractor.train.generators import forked

SCALES = (0.25, 0.15, 0.4, 0.08, 0.7)  # of the random first layer, for standardised inputs
ADAM_ROUNDS = 5  # the last layer is solved, and rollouts are judged, after each
MARGIN = 1.5  # of the trust region: new trajectories of the sampler leave it in less than 1 % of cases
# Whether the slope or the state determines the error depends on the equation, so "auto" tries both.
AUTO: tuple[tuple[str, dict[str, Any]], ...] = (
    ("stages", {}),
    ("attns", {}),
    ("neurvec", {}),
    ("attns", {"state": True}),
)


def fit(
    system_or_rate: Rate,
    *,
    dt: float | None = None,
    horizon: float,
    objective: str = "error",
    error: float | None = None,
    scheme: str | AnyScheme = "rk4",
    correction: str = "auto",
    recipe: str | Recipe = "default",
    width: int | None = None,
    depth: int | None = None,
    activation: str | None = None,
    precision: str | None = None,
    trajectories: int = 1000,
    sample: Sampler | None = None,
    parameters: Sampler | None = None,
    fine_dt: float | None = None,
    period: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    budget: float | None = None,
    data: FineData | list[Run] | Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    process_group: Group = None,
    progress: Callable[[str], None] = lambda message: None,
) -> HybridSolver:
    """Learn the error of a step of `dt`, and return a solver that takes such steps.

    The error that the solver reports, `fit_error`, is measured on trajectories that took no part in the
    fit, not even in the choice between candidates.

    Args:
        system_or_rate: One of `attractor.systems`, or any ``(t, u) -> du`` with `sample`.
        dt: The large step. None with ``objective="time"``, which chooses it.
        horizon: The duration of trajectories, a whole number of steps.
        objective: "error": the smallest error with steps of `dt`. "time": a polynomial of the state
            without any scheme ("identity"), or a linear map or a narrow network of the stages of
            `scheme`, whose degree or width and step size reach `error` in the least time, compiled, on
            this machine. A `width` leaves out polynomials. `tune` also says whether a plain scheme is
            faster.
        error: The error to reach with ``objective="time"``, as in `tune`.
        scheme: The scheme to correct. "identity" takes no step at all, so that the correction is the
            whole change of the state and the rate is not called.
        correction: A name of `attractor.corrections`, or "auto": the slope (AttNS), the state (NeurVec)
            or both, whichever has the smallest error on held-out rollouts; with the paper's recipe
            AttNS. "auto" tries only those that accept all of `options`.
        recipe: How the weights are found: "default" (random hidden weights and a last layer in closed
            form, which takes seconds) or "paper" (Algorithm 1 of the AttNS paper). With other options
            than the usual ones, `Ridge` or `Paper`, such as ``Paper(epochs=100)``.
        width, depth, activation: Of the network. None: 512 and sines (stages: cubic) by default, the
            correction's own (the paper's) with the paper's.
        precision: "float32" computes the network in float32, which is faster, and fits it as such.
        trajectories: Number of trajectories to learn from; further ones are held out.
        sample: ``(n, generator=...) -> [n, d]`` initial states, for a rate of your own.
        parameters: ``(n, generator=...) -> [n, k]`` parameters of the equation, one row per trajectory.
            The rate is then called as ``rate(t, u, p)``, the correction sees p, and one solver serves
            all parameters that the sampler draws.
        fine_dt: Step of the fine data. None: found by refinement.
        period: Period of a rate that depends on t; its phase becomes a feature. A rate that depends on t
            without a period raises.
        seed: Seed of initial states and weights. The same seed gives the same solver.
        device: Where the fit is computed.
        budget: Number of seconds after which no further candidate is tried.
        data: Fine data made before by `make_trajectories`: the object, its folder, or its runs.
            Held-out trajectories are still made from `sample`.
        options: Further options of the correction, such as ``{"body": "lstm"}``.
        out: Folder in which a long fit is kept, at most twice a minute and at its end: after each
            candidate, or epoch of recipe "paper". The same call continues an interrupted fit and finds
            the same weights; fine data are made again, or passed as `data`.
        process_group: Processes that share the work, all of which make the same call and return the same
            solver, that of a single process up to rounding: a `torch.distributed` group, or "world" for
            all processes that ``torchrun`` or ``accelerate launch`` started. None: this process alone,
            whatever groups exist.
        progress: Called with a message at each stage.

    Returns:
        A `HybridSolver` in float64 (recipe "paper": float32) with `history` and a trust region.

    Raises:
        ValueError, TypeError: The input cannot be fitted; as far as possible before time is spent.
        LostTrajectoriesError: No candidate can follow the held-out trajectories to the horizon.
        CheckpointError: `out` holds another fit.
    """
    started, crew = time.monotonic(), Crew.of(process_group)
    scheme, recipe = get_scheme(scheme), get_recipe(recipe)
    if out is not None and crew.rank == 0:
        check_folder("out =", out)
    _check_objective(objective, dt, error)
    if dt is None:
        assert error is not None
        usual = {
            "correction": correction in ("auto", "polynomial", "stages"),
            "recipe": recipe == Ridge(),
            "depth": depth is None, "activation": activation is None, "precision": precision is None,
            "fine_dt": fine_dt is None, "data": data is None, "options": not options,
            "out": out is None, "process_group": process_group is None,
        }  # fmt: skip
        if not all(usual.values()):
            given = ", ".join(name for name, is_usual in usual.items() if not is_usual)
            raise ValueError(f'objective="time" chooses the correction itself; leave out {given}')
        family = "stages" if correction == "auto" and width is not None else correction
        return fastest_hybrid(
            fit, system_or_rate, scheme, correction=family, error=float(error), horizon=horizon,
            sample=sample, parameters=parameters, widths=None if width is None else (width,),
            trajectories=trajectories, budget=budget, device=device, period=period, seed=seed,
            progress=progress,
        )  # fmt: skip
    steps = whole_steps(dt, horizon)
    _check_choices(correction, recipe, trajectories, period)
    held_out = max(4, min(100, trajectories // 10))
    spread = 1 if period is None else PHASES
    plan = Plan(trajectories, dt, steps, 1, seed, min(LARGEST, math.ceil(trajectories / spread)), period)
    seed = plan.seed
    few_phases = math.ceil(held_out / min(4, spread))
    if data is not None and sample is None and not hasattr(system_or_rate, "sample"):
        raise ValueError(
            "data= holds the trajectories to learn from; those that are held out start from sample=: "
            "pass it as well, a function (n, generator=...) -> states [n, d]"
        )
    few = initial_states(system_or_rate, sample, 16, plan.generator(0, "trial"), device)
    few_p = sampled_parameters(parameters, 16, plan.generator(0, "trial parameters"), device)
    sizes = {"width": width, "depth": depth, "activation": activation, "precision": precision}
    shared: dict[str, Any] = {"period": period, **(options or {})}
    if few_p is not None:
        shared["parameters"] = few_p.shape[-1]
    shared |= {key: value for key, value in sizes.items() if value is not None}
    candidates = _candidates(correction, recipe, scheme, few.shape[-1], shared)
    check_rate(system_or_rate, [(0.0, few, few_p)], horizon, period)

    if width is not None and is_whole(width):
        check_memory(
            f"width = {width:,}: layers and least squares of this size",
            3 * 8 * width**2,
            "use a smaller width",
            device,
        )
    if data is None:
        check_states(trajectories, steps, few.shape[-1], 1, device)
    progress("fine data")
    if fine_dt is None:
        substeps = enough_substeps(system_or_rate, few, dt, steps, period=period, parameters=few_p)
    else:
        substeps = substeps_for(dt, fine_dt)
    new = lambda stream: replace(
        plan, trajectories=held_out, stream=stream, shard_size=few_phases, substeps=substeps
    )
    plans = [new("held out"), new("test")]
    if data is None:
        plans.append(replace(plan, substeps=substeps))
    held, test, *made = _runs(system_or_rate, sample, parameters, device, plans)
    check_rate(system_or_rate, _along(held, dt), horizon, period)
    if data is None:
        (runs,) = made
    else:
        runs = _from_data(data, system_or_rate, dt, few, few_p, substeps, period, device)
    progress("errors of plain steps")
    timed = period is not None
    seen = any(BY_NAME[name].needs_stages for name, _ in candidates)
    pairs = one_step(system_or_rate, scheme, dt, runs, timed, seen)
    trust = TrustRegion.around(_region_of(pairs), MARGIN, few.shape[-1])
    judge = _Judge(system_or_rate, scheme, dt, held, crew)

    what = {
        "recipe": recipe.name, "correction": correction, "seed": seed,
        "options": repr([*sorted(shared.items(), key=lambda item: item[0])]), **asdict(recipe),
        "data": pairs.hash if out is not None or crew.count > 1 else "",
    }  # fmt: skip
    crew.check_agreement(what)
    unit = "epoch" if isinstance(recipe, Paper) else "candidate"
    unfinished = Unfinished(out, what, unit, crew.rank == 0)
    unfinished.began = started
    with unfinished.locked(crew):
        if isinstance(recipe, Paper):
            ((name, own),) = candidates
            with forked(pairs.u.device):
                torch.manual_seed(seed)
                factory = {"device": pairs.u.device, "dtype": torch.float32}
                model: nn.Module = get_correction(name)(pairs.u.shape[-1], **shared, **own, **factory)
            generator = torch.Generator().manual_seed(seed)
            history = train_on_pairs(
                model, pairs, recipe.epochs, recipe.loss_scale, generator, progress, unfinished, crew
            )
            chosen: dict[str, Any] = {"correction": name, "selection": judge(model)}
            trust = trust.to(torch.float32)
        else:
            adam_steps = recipe.adam_steps
            search = _Search(pairs, judge, seed, shared, adam_steps, unfinished, budget, progress, crew)
            search.take_up()
            crew.wait()  # until all have read what is there
            model = search.run(candidates)
            history, best = search.history, search.best
            name, own = best["kind"]
            chosen = {"correction": name, **own, "scale": best["scale"], "selection": best["rollout"]}
    model.requires_grad_(False)
    if not math.isfinite(chosen["selection"]):
        raise LostTrajectoriesError(_why_lost(system_or_rate, scheme, dt, horizon, held))

    progress("test trajectories")
    tested = replace(judge, held=test)
    errors, plain = tested.errors(model), tested.errors(None)
    if not bool(torch.isfinite(errors).all()):
        raise LostTrajectoriesError(_why_lost(system_or_rate, scheme, dt, horizon, test))
    accuracy = _step_accuracy(model, one_step(system_or_rate, scheme, dt, test, timed, seen))
    trust.accuracy = accuracy.to(trust.mean)
    chosen |= {
        "rollout": crew.agreed_number(errors.mean().item(), few),
        "median": errors.median().item(), "worst": errors.max().item(), "plain": plain.mean().item(),
    }  # fmt: skip
    history = [
        *history,
        {"chosen": True, **chosen, "substeps": substeps, "seconds": unfinished.seconds},
    ]
    _warn_if_useless(chosen["rollout"], chosen["plain"])
    return HybridSolver(system_or_rate, scheme, model, dt, trust, history)


def _check_objective(objective: str, dt: float | None, error: float | None) -> None:
    """Raise unless there is a step size, or an error for which one is chosen."""
    if objective not in ("error", "time"):
        raise ValueError(f"objective {objective!r} is neither 'error' nor 'time'")
    if objective == "error":
        if dt is None or error is not None:
            raise ValueError('objective="error" takes dt=, the step size, and no error=')
        return
    if dt is not None or error is None:
        raise ValueError('objective="time" takes error=, the error to reach, and chooses dt itself')
    check_number("error", error)
    if not 0 < error < 1:
        raise ValueError(f"error = {error} must be between 0 and 1; it is relative to the states")


@dataclass(frozen=True)
class _Judge:
    """Mean square errors on rollouts of trajectories that a fit does not learn from."""

    rate: Rate
    scheme: AnyScheme
    dt: float
    held: list[Run]
    crew: Crew

    def __call__(self, candidate: nn.Module | None) -> float:
        """Return the mean over all trajectories; infinite if one is lost."""
        return self.crew.agreed_number(self.errors(candidate).mean().item(), self.held[0].u)

    def errors(self, candidate: nn.Module | None) -> Tensor:
        """Return the error of each trajectory ``[n]``, in float64; infinite where it is lost.

        Components that are constant along all trajectories, such as parameters that are carried along as
        states, do not count: every scheme has them right.
        """
        own = torch.float64 if candidate is None else next(candidate.parameters()).dtype
        moves = torch.stack([(run.u - run.u[:1]).abs().amax((0, 1)) for run in self.held]).amax(0)
        size = torch.stack([run.u.abs().amax((0, 1)) for run in self.held]).amax(0)
        varies = moves > 1e-12 * size
        varies = varies if bool(varies.any()) else torch.ones_like(varies)
        errors = []
        for run in self.held:
            steps = torch.arange(len(run.u), dtype=torch.float64, device=run.u.device)
            with torch.no_grad():
                t = run.t0 + steps * self.dt
                solved = evolve(
                    self.rate, run.u[0].to(own), t, self.scheme, candidate, parameters=run.parameters
                )
            square = (solved.u.double() - run.u)[..., varies].square().mean((0, 2))
            errors.append(torch.where(solved.ok, square, math.inf))
        return torch.cat(errors)


def _step_accuracy(model: nn.Module, pairs: Pairs) -> Tensor:
    """Root mean square error of one corrected step ``[d]``, rounding of the model's dtype included."""
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        added = model(pairs.to(dtype).step()).double()
    rounding = torch.finfo(dtype).eps * pairs.u.abs()
    return ((added - pairs.error).square() + rounding.square()).mean(0).sqrt()


def _why_lost(rate: Rate, scheme: AnyScheme, dt: float, horizon: float, runs: list[Run]) -> str:
    """The message for a fit without a finite error, with the index that shows stiffness."""
    run = runs[0]
    few = run.u[:: max(1, len(run.u) // 8), :8].flatten(0, 1)
    stiff = ""
    try:
        own = None if run.parameters is None else run.parameters[:8].repeat(len(few) // 8, 1)
        bound = with_parameters(rate, own)
        index = stiffness.stiffness_index(bound, few, t=run.t0).max().item()
    except (RuntimeError, ValueError, TypeError):
        index = math.nan  # a rate that torch cannot differentiate
    if math.isfinite(index) and dt * index > 1:
        stiff = (
            "The equation is stiff there: its stiffness index, the largest |Re| of an eigenvalue of the "
            f"Jacobian, is {index:.3g}, so that dt times the index is {dt * index:.3g}, where explicit "
            f"schemes such as {scheme.name} need at most 2 to 3. Use dt <= {2 / index:.1g}."
        )
    return (
        f"no correction of {scheme.name} with dt = {dt:g} can follow all held-out trajectories to the "
        f"horizon {horizon:g}: states become non-finite. "
        f"{stiff or 'Use a smaller dt, a shorter horizon, more trajectories or more training.'}"
    )


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

    def run(self, candidates: Sequence[tuple[str, dict[str, Any]]]) -> nn.Module:
        """Try the candidates, then other scales of the best one; return the best correction."""
        for name, own in candidates:
            self.attempt(name, own, SCALES[0])
        name, own = self.best["kind"]
        if hasattr(self.best["model"].net, "spread"):  # otherwise nothing in it is random
            for scale in SCALES[1:]:
                self.attempt(name, own, scale)
        self.put_down(last=True)
        return self.best["model"]

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
        """Return the correction of a candidate."""
        like = self.pairs.u
        kind = get_correction(name)
        options = {
            **kind.fit_defaults,
            **self.shared,
            **own,
            "dtype": torch.float64,
            "device": like.device,
        }
        with forked(like.device):  # the weights that are drawn here are not kept
            return kind(like.shape[-1], **options)

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
            self.history, self.done = history_from_json(config["history"]), config["done"]
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


def _candidates(
    correction: str, recipe: Recipe, scheme: AnyScheme, dim: int, options: dict[str, Any]
) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The corrections to try, each of which accepts the options."""
    automatic = correction == "auto" and isinstance(recipe, Ridge)
    name = "attns" if correction == "auto" else correction
    accepted, reasons = [], []
    for kind, own in AUTO if automatic else ((name, {}),):
        if automatic and scheme.order == 0 and kind != "neurvec":
            continue  # the slope is 0
        if kind == "stages":
            if isinstance(scheme, Splitting | Identity):
                reasons.append(f"{kind}: {scheme.name} has no stages")
                continue
            own = {"stages": scheme.rate_calls, **own}
        try:
            get_correction(kind)(dim, **options, **own, device="meta")
        except TypeError as error:
            reasons.append(f"{kind}: {error}")
        else:
            accepted.append((kind, own))
    if not accepted:
        raise TypeError(
            f"no correction of correction={correction!r} accepts the options {sorted(options)}; "
            + "; ".join(dict.fromkeys(reasons))
        )
    return tuple(accepted)


def _runs(
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
        wanted = [(plans[i], k) for i, k in together]
        made |= zip(together, make_runs(rate, sample, wanted, device, parameters))
    return [[made[i, k] for k in range(plan.shards)] for i, plan in enumerate(plans)]


def _region_of(pairs: Pairs) -> Tensor:
    """States for a trust region, at most about 100,000, followed by their parameters."""
    some = slice(None, None, max(1, len(pairs.u) // 100_000))
    if pairs.parameters is None:
        return pairs.u[some]
    return torch.cat((pairs.u[some], pairs.parameters[some]), -1)


def _from_data(
    data: Any,
    rate: Rate,
    dt: float,
    few: Tensor,
    parameters: Tensor | None,
    substeps: int,
    period: float | None,
    device: Any,
) -> list[Run]:
    dim, count = few.shape[-1], None if parameters is None else parameters.shape[-1]
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
    sizes = {None if run.parameters is None else run.parameters.shape[-1] for run in data}
    if sizes != {count}:
        raise ValueError(
            f"data= has {sizes} parameters a trajectory and parameters= draws {count}; they must agree"
        )
    runs = [run.to(device) for run in data]
    _check_data(rate, runs[0], dt, substeps, period)
    return runs


def _check_data(rate: Rate, run: Run, dt: float, substeps: int, period: float | None) -> None:
    """Raise if states do not follow the equation, where they move most; they may be noisy."""
    u = run.u[:, :64]
    if not bool(torch.isfinite(u).all()):
        raise ValueError("data= holds non-finite states")
    moves = u.diff(dim=0).norm(dim=-1).median(-1).values  # [steps]
    k = int(moves.argmax())
    move, size = moves[k].item(), u[k].norm(dim=-1).median().item()
    t0 = 0.0 if period is None else run.t0 + k * dt
    own = None if run.parameters is None else run.parameters[:64]
    after = fine_trajectories(rate, u[k], dt, 1, substeps, t0, parameters=own)[-1]
    off = (after - u[k + 1]).norm(dim=-1).median().item()
    if off > max(move / 2, 1e-9 * size):
        raise ValueError(
            f"data= does not follow this equation: within dt = {dt:g} its states move by {move:.2g}, "
            f"and they end {off:.2g} from where the rate takes them; pass the data of this rate"
        )


def _check_choices(correction: str, recipe: Recipe, trajectories: int, period: float | None) -> None:
    check_whole("trajectories", trajectories, 1)
    hidden = correction == "auto" or get_correction(correction).fit_defaults
    if isinstance(recipe, Ridge) and recipe.adam_steps and not hidden:
        raise ValueError(
            f"adam_steps = {recipe.adam_steps}: the {correction} correction has no hidden weights"
        )
    if period is not None and not 0 < period < math.inf:
        raise ValueError(f"period = {period} must be a positive number")


def _along(runs: list[Run], dt: float) -> list[tuple[float, Tensor, Tensor | None]]:
    """Times, states ``[n, d]`` and parameters along trajectories, at most `TIMES` of them."""
    points = [
        (run.t0 + k * dt, run.u[k, :16], None if run.parameters is None else run.parameters[:16])
        for run in runs
        for k in range(len(run.u))
    ]
    return points[:: math.ceil(len(points) / TIMES)]
