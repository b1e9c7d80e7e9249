"""The report of a fitted hybrid solver: new trajectories, what the fit tried, one page."""

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

TESTED = 100


def test(
    solver: HybridSolver, horizon: float, sample: Any, seed: int, parameters: Sampler | None
) -> dict[str, Any]:
    """The solver on trajectories that no fit of this seed has seen, beside its plain scheme.

    Args:
        sample, parameters: Samplers of initial states and of parameters, as for `fit`.

    Returns:
        rows: error and rate calls of each method; lines: their errors over time; and the times and
        states ``[times, n, d]`` of the hybrid.
    """
    generator = torch.Generator().manual_seed(seed + 2**41)
    u0 = initial_states(solver.rate, sample, TESTED, generator)
    u0 = u0.to(solver.device)
    p = sampled_parameters(parameters, TESTED, generator, solver.device)
    n = round(horizon / solver.dt)
    substeps = max(32, 2 * enough_substeps(solver.rate, u0, solver.dt, n, parameters=p))
    truth = fine_trajectories(solver.rate, u0, solver.dt, n, substeps, parameters=p)
    solve = partial(solver.solve, u0, horizon, parameters=p)
    plain = partial(evolve, solver.rate, u0, scheme=solver.plain_scheme, parameters=p)
    grid = lambda k: torch.arange(n * k + 1, dtype=torch.float64, device=u0.device) * (solver.dt / k)
    name = solver.plain_scheme.name
    with torch.no_grad():
        hybrid = solve()
        solved = {
            "hybrid": hybrid,
            "hybrid, not guarded": solve(guard=False),
            f"plain {name}": plain(t=grid(1)),
            f"plain {name}, half the step": plain(t=grid(2), every=2),
        }
    rows = {k: {"error": _error(s, truth), "rate_calls": s.stats.rate_calls} for k, s in solved.items()}
    lines = {
        k: (s.u - truth).square().mean((1, 2)).sqrt().tolist()
        for k, s in solved.items()
        if bool(s.ok.all())
    }
    states = hybrid.u[:, :5].double().cpu().numpy()
    return {"rows": rows, "lines": lines, "times": hybrid.t.tolist(), "states": states}


def curves(tested: dict[str, Any], most: int = 200) -> dict[str, Any]:
    """Of what `test` returns, times, errors and states, at most so many times."""
    every = -(-len(tested["times"]) // most)
    thin = {name: errors[::every] for name, errors in tested["lines"].items()}
    return {"times": tested["times"][::every], "errors": thin, "states": tested["states"][::every]}


def fit_page(
    solver: HybridSolver, name: str, tested: dict[str, Any], folder: Path, command: str
) -> Path:
    """report.html and the pictures in folder; returns the page's path."""
    chosen = solver.history[-1]
    tried = [row for row in solver.history if "chosen" not in row]
    over_time = figures.errors_over_time(tested["times"], tested["lines"], "new trajectories")
    drawn = figures.trajectories(
        tested["times"], tested["states"], f"{figures.literal(name)}: five of them"
    )
    how = figures.history(tried, chosen.get("plain"), "what the fit tried")

    page = Page(f"A hybrid solver for {name}")
    role = " in place of the rate" if solver.scheme.order == 0 else ""
    page.text(
        f"A step of {solver.scheme.name} with dt = {solver.dt:g}, corrected by "
        f"{type(solver.correction).__name__}{role}. Fitted in {chosen['seconds']:.0f} s; on "
        "trajectories that took no part in the fit its mean square error is "
        f"{chosen['rollout']:.1e} (median {chosen['median']:.1e}, worst {chosen['worst']:.1e}), "
        f"without the correction {chosen['plain']:.1e}."
    )
    page.section(f"{TESTED} new trajectories")
    rows = [[k, r["error"], r["rate_calls"]] for k, r in tested["rows"].items()]
    page.table(["", "mean square error", "rate calls"], rows)
    page.figure("Error over time on new trajectories", over_time)
    page.figure("Five trajectories", drawn)
    page.section("What the fit tried")
    page.figure("Held-out error of each candidate", how)
    page.section("Again")
    page.command(command)
    written = page.write(folder / "report.html")
    for stem, figure in (("errors", over_time), ("trajectories", drawn), ("history", how)):
        figures.write(figure, folder / f"{stem}.png")
    return written


def _error(solved: Trajectory, truth: Tensor) -> float:
    return (solved.u - truth).square().mean().item() if bool(solved.ok.all()) else float("inf")
