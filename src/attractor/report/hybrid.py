"""The report of a fitted hybrid solver: errors on new trajectories and the history of the fit."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.core import Trajectory, evolve
from attractor.ode.samples import Sampler, initial_states, sampled_parameters
from attractor.ode.solver import HybridSolver
from attractor.ode.substeps import enough_substeps
from attractor.ode.trajectories import fine_trajectories
from attractor.report import figures
from attractor.report.page import Page

TEST_TRAJECTORIES = 100


def test(
    solver: HybridSolver, horizon: float, sample: Any, seed: int, parameters: Sampler | None
) -> dict[str, Any]:
    """Solve trajectories that no fit with this seed has used, with the hybrid and its plain scheme.

    Args:
        solver: The hybrid solver.
        horizon: The duration of the trajectories.
        sample, parameters: Samplers of initial states and of parameters, as for `fit`.
        seed: The seed of the fit.

    Returns:
        rows: error and rate calls of each method; lines: their errors over time; and the times and
        states ``[times, n, d]`` of the hybrid.
    """
    generator = torch.Generator().manual_seed(seed + 2**41)
    u0 = initial_states(solver.rate, sample, TEST_TRAJECTORIES, generator)
    u0 = u0.to(solver.device)
    p = sampled_parameters(parameters, TEST_TRAJECTORIES, generator, solver.device)
    n = round(horizon / solver.dt)
    substeps = max(32, 2 * enough_substeps(solver.rate, u0, solver.dt, n, parameters=p))
    truth = fine_trajectories(solver.rate, u0, solver.dt, n, substeps, parameters=p)
    solve = partial(solver.solve, u0, horizon, parameters=p)
    plain = partial(evolve, solver.rate, u0, scheme=solver.plain_scheme, parameters=p)
    times_of = lambda k: torch.arange(n * k + 1, dtype=torch.float64, device=u0.device) * (solver.dt / k)
    name = solver.plain_scheme.name
    with torch.no_grad():
        hybrid = solve()
        solutions = {
            "hybrid": hybrid,
            "hybrid, not guarded": solve(guard=False),
            f"plain {name}": plain(t=times_of(1)),
            f"plain {name}, half the step": plain(t=times_of(2), every=2),
        }
    rows = {
        k: {"error": _error(s, truth), "rate_calls": s.stats.rate_calls} for k, s in solutions.items()
    }
    lines = {
        k: (s.u - truth).square().mean((1, 2)).sqrt().tolist()
        for k, s in solutions.items()
        if bool(s.ok.all())
    }
    states = hybrid.u[:, :5].double().cpu().numpy()
    return {"rows": rows, "lines": lines, "times": hybrid.t.tolist(), "states": states}


def curves(results: dict[str, Any], most: int = 200) -> dict[str, Any]:
    """Return times, errors and states of the result of `test`, at at most `most` times."""
    every = -(-len(results["times"]) // most)
    thin = {name: errors[::every] for name, errors in results["lines"].items()}
    return {"times": results["times"][::every], "errors": thin, "states": results["states"][::every]}


def fit_page(
    solver: HybridSolver, name: str, results: dict[str, Any], folder: Path, command: str
) -> Path:
    """Write report.html and the pictures to a folder; return the path of the page."""
    last_row = solver.history[-1]
    candidates = [row for row in solver.history if "chosen" not in row]
    error_figure = figures.errors_over_time(results["times"], results["lines"], "new trajectories")
    state_figure = figures.trajectories(
        results["times"], results["states"], f"{figures.literal(name)}: five of them"
    )
    history_figure = figures.history(candidates, last_row.get("plain"), "candidates of the fit")

    page = Page(f"A hybrid solver for {name}")
    role = " in place of the rate" if solver.scheme.order == 0 else ""
    page.text(
        f"A step of {solver.scheme.name} with dt = {solver.dt:g}, corrected by "
        f"{type(solver.correction).__name__}{role}. Fitted in {last_row['seconds']:.0f} s; on "
        "trajectories that were not used in the fit its mean square error is "
        f"{last_row['rollout']:.1e} (median {last_row['median']:.1e}, worst {last_row['worst']:.1e}), "
        f"without the correction {last_row['plain']:.1e}."
    )
    page.section(f"{TEST_TRAJECTORIES} new trajectories")
    rows = [[k, r["error"], r["rate_calls"]] for k, r in results["rows"].items()]
    page.table(["", "mean square error", "rate calls"], rows)
    page.figure("Error over time on new trajectories", error_figure)
    page.figure("Five trajectories", state_figure)
    page.section("Candidates of the fit")
    page.figure("Held-out error of each candidate", history_figure)
    page.section("Repeat this run")
    page.command(command)
    path = page.write(folder / "report.html")
    pictures = {"errors": error_figure, "trajectories": state_figure, "history": history_figure}
    for stem, figure in pictures.items():
        figures.write(figure, folder / f"{stem}.png")
    return path


def _error(solution: Trajectory, truth: Tensor) -> float:
    return (solution.u - truth).square().mean().item() if bool(solution.ok.all()) else float("inf")
