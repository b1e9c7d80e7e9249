"""Fit a correction to the user's own equation."""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from attractor.common.checks import check_number, is_whole
from attractor.common.deprecation import moved_into
from attractor.core import Splitting, get_scheme
from attractor.core.identity import Identity
from attractor.core.rates import Rate
from attractor.core.tableaus import AnyScheme
from attractor.ode.algorithm1 import train_on_pairs
from attractor.ode.corrections import BY_NAME, get_correction
from attractor.ode.fine_data import FineData
from attractor.ode.fit_data import Problem, region_states
from attractor.ode.hybrid_search import fastest_hybrid
from attractor.ode.pairs import one_step
from attractor.ode.patch_fit import fit_patches
from attractor.ode.processes import Crew, Group
from attractor.ode.rate_checks import check_rate
from attractor.ode.recipes import Paper, Recipe, Ridge, get_recipe
from attractor.ode.ridge_search import Kind, RidgeSearch
from attractor.ode.rollouts import Rollouts, step_accuracy
from attractor.ode.samples import Sampler
from attractor.ode.solver import HybridSolver
from attractor.ode.trajectories import Run
from attractor.ode.trust import TrustRegion
from attractor.ode.unfinished import Unfinished
from attractor.storage.limits import check_folder, check_memory
from attractor.storage.objects import AnyPath
from attractor.train import generators

MARGIN = 1.5  # of the trust region: new trajectories of the sampler leave it in less than 1 % of cases
# Whether the slope or the state determines the error depends on the equation, so "auto" tries both.
AUTO: tuple[Kind, ...] = (
    ("stages", {}),
    ("attns", {}),
    ("neurvec", {}),
    ("attns", {"state": True}),
)


@moved_into("options", "depth", "activation", "precision")
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
    trajectories: int | None = None,
    sample: Sampler | None = None,
    reference: Rate | None = None,
    parameters: Sampler | None = None,
    fine_dt: float | None = None,
    period: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    budget: float | None = None,
    data: FineData | list[Run] | AnyPath | str | None = None,
    options: Mapping[str, Any] | None = None,
    out: AnyPath | str | None = None,
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
            AttNS; with a `reference` "patches". "auto" tries only those that accept all of `options`.
        recipe: How the weights are found: "default" (random hidden weights and a last layer in closed
            form, which takes seconds) or "paper" (Algorithm 1 of the AttNS paper). With other options
            than the usual ones, `Ridge` or `Paper`, such as ``Paper(epochs=100)``.
        width: Of the network. None: 512 by default, the correction's own with the paper's recipe.
        trajectories: Number of trajectories to learn from; further ones are held out. None: 1,000, or
            for ``correction="patches"`` enough for 200,000 patches.
        sample: ``(n, generator=...) -> [n, d]`` initial states, for a rate of your own.
        reference: For ``correction="patches"``: the equation on a finer grid, whose initial states are
            sampled. The correction is fitted to its trajectories, restricted to the grid of
            `system_or_rate`, and so corrects the grid and the step at once.
        parameters: ``(n, generator=...) -> [n, k]`` parameters of the equation, one row per trajectory.
            The rate is then called as ``rate(t, u, p)``, the correction sees p, and one solver serves
            all parameters that the sampler draws.
        fine_dt: Step of the fine data. None: found by refinement.
        period: Period of a rate that depends on t; its phase becomes a feature. A rate that depends on t
            without a period raises.
        seed: Seed of initial states and weights. The same seed gives the same solver.
        device: Where the fit is computed.
        budget: Number of seconds after which no further candidate is tried.
        data: Fine data made before by `make_trajectories`: the object, its folder or URL, or its runs.
            Held-out trajectories are still made from `sample`.
        options: Further options of the correction, such as ``{"depth": 3}``, ``{"activation": "tanh"}``
            (by default sines; stages: cubic) or ``{"precision": "float32"}``, which computes the network
            in float32, which is faster, and fits it as such.
        out: Folder, or URL of one in an object store, in which a long fit is kept, at most twice a
            minute and at its end: after each candidate, or epoch of recipe "paper". The same call
            continues an interrupted fit and finds the same weights; fine data are made again, or passed
            as `data`.
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
    if correction == "patches" or (reference is not None and correction == "auto"):
        others = {
            "objective": objective != "error", "recipe": recipe != Ridge(), "width": width is not None,
            "budget": budget is not None, "data": data is not None, "out": out is not None,
            "process_group": process_group is not None,
        }  # fmt: skip
        if any(others.values()):
            names = ", ".join(name for name, is_passed in others.items() if is_passed)
            raise ValueError(f'correction="patches" has no {names}; leave it out')
        assert dt is not None
        return fit_patches(
            system_or_rate, reference, scheme, dt=dt, horizon=horizon, sample=sample,
            parameters=parameters, trajectories=trajectories, fine_dt=fine_dt, period=period, seed=seed,
            device=device, options=options or {}, progress=progress,
        )  # fmt: skip
    if reference is not None:
        raise ValueError('reference= is the equation on a finer grid; it needs correction="patches"')
    trajectories = 1000 if trajectories is None else trajectories
    if dt is None:
        assert error is not None
        chosen_by_it = {
            "correction": correction not in ("auto", "polynomial", "stages"),
            "recipe": recipe != Ridge(), "fine_dt": fine_dt is not None, "data": data is not None,
            "options": bool(options), "out": out is not None,
            "process_group": process_group is not None,
        }  # fmt: skip
        if any(chosen_by_it.values()):
            names = ", ".join(name for name, is_passed in chosen_by_it.items() if is_passed)
            raise ValueError(f'objective="time" chooses the correction itself; leave out {names}')
        return fastest_hybrid(
            fit, system_or_rate, scheme, error=float(error), horizon=horizon, sample=sample,
            correction="stages" if correction == "auto" and width is not None else correction,
            parameters=parameters, widths=None if width is None else (width,),
            trajectories=trajectories, budget=budget, device=device, period=period, seed=seed,
            progress=progress,
        )  # fmt: skip
    problem = Problem(
        system_or_rate, sample, parameters, dt, horizon, trajectories, period, seed, device
    )
    seed = problem.plan.seed
    _check_adam(correction, recipe)
    if data is not None and sample is None and not hasattr(system_or_rate, "sample"):
        raise ValueError(
            "data= holds the trajectories to learn from; those that are held out start from sample=: "
            "pass it as well, a function (n, generator=...) -> states [n, d]"
        )
    few, few_p = problem.few()
    shared: dict[str, Any] = {"period": period, **(options or {})}
    if few_p is not None:
        shared["parameters"] = few_p.shape[-1]
    if width is not None:
        shared["width"] = width
    candidates = _candidates(correction, recipe, scheme, few.shape[-1], shared)
    check_rate(system_or_rate, [(0.0, few, few_p)], horizon, period)
    if width is not None and is_whole(width):
        check_memory(
            f"width = {width:,}: layers and least squares of this size",
            3 * 8 * width**2,
            "use a smaller width",
            device,
        )
    progress("fine data")
    train, held_out, test, substeps = problem.make(data, fine_dt, few, few_p)
    progress("errors of plain steps")
    timed = period is not None
    seen = any(BY_NAME[name].needs_stages for name, _ in candidates)
    pairs = one_step(system_or_rate, scheme, dt, train, timed, seen)
    trust = TrustRegion.around(region_states(pairs), MARGIN, few.shape[-1])
    rollouts = Rollouts(system_or_rate, scheme, dt, held_out, crew)

    what = {
        "recipe": recipe.name, "correction": correction, "seed": seed,
        "options": repr([*sorted(shared.items(), key=lambda item: item[0])]), **asdict(recipe),
        "data": pairs.hash if out is not None or crew.count > 1 else "",
    }  # fmt: skip
    crew.check_agreement(what)
    unit = "epoch" if isinstance(recipe, Paper) else "candidate"
    unfinished = Unfinished(out, what, unit, crew.rank == 0)
    unfinished.began = started
    generator = torch.Generator().manual_seed(seed)
    with unfinished.locked(crew):
        if isinstance(recipe, Paper):
            ((name, own),) = candidates
            with generators.own(seed):
                factory = {"device": pairs.u.device, "dtype": torch.float32}
                model: nn.Module = get_correction(name)(pairs.u.shape[-1], **shared, **own, **factory)
            history = train_on_pairs(
                model, pairs, recipe.epochs, recipe.loss_scale, generator, progress, unfinished, crew
            )
            chosen: dict[str, Any] = {"correction": name, "selection": rollouts.error(model)}
            trust = trust.to(torch.float32)
        else:
            search = RidgeSearch(
                pairs, rollouts, shared, recipe.adam_steps, unfinished, budget, progress, generator
            )
            best = search.run(candidates)
            history, model, (name, own) = search.history, best.model, best.kind
            chosen = {"correction": name, **own, "scale": best.scale, "selection": best.rollout}
    model.requires_grad_(False)
    if not math.isfinite(chosen["selection"]):
        raise rollouts.lost()

    progress("test trajectories")
    tested = replace(rollouts, runs=test)
    errors, plain = tested.errors(model), tested.errors(None).mean().item()
    if not bool(torch.isfinite(errors).all()):
        raise tested.lost()
    accuracy = step_accuracy(model, one_step(system_or_rate, scheme, dt, test, timed, seen))
    trust.accuracy = accuracy.to(trust.mean)
    rollout = crew.agreed_number(errors.mean().item(), few)
    chosen |= {
        "rollout": rollout, "median": errors.median().item(), "worst": errors.max().item(),
        "plain": plain, "substeps": substeps, "seconds": unfinished.seconds,
    }  # fmt: skip
    if not rollout < plain and plain > 0:
        warnings.warn(
            f"the correction makes held-out trajectories worse: mean square error {rollout:.1e}, plain "
            f"{plain:.1e}; give it more trajectories or width, or a smaller dt",
            stacklevel=3,
        )
    history = [*history, {"chosen": True, **chosen}]
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


def _candidates(
    correction: str, recipe: Recipe, scheme: AnyScheme, dim: int, options: dict[str, Any]
) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return the corrections to try, each of which accepts the options."""
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


def _check_adam(correction: str, recipe: Recipe) -> None:
    """Raise if hidden weights are to be trained that the correction does not have."""
    hidden = correction == "auto" or get_correction(correction).fit_defaults
    if isinstance(recipe, Ridge) and recipe.adam_steps and not hidden:
        raise ValueError(
            f"adam_steps = {recipe.adam_steps}: the {correction} correction has no hidden weights"
        )
