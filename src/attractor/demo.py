"""The demo: the three systems of the AttNS paper, solved with every scheme, and a hybrid solver.

It grows with the library. `run` computes, `write` makes the report; the command line calls both.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.core import evolve
from attractor.core.files import write_json
from attractor.core.splitting import Splitting
from attractor.core.tableaus import ALL
from attractor.ode import fit, systems

HORIZON = 10.0
STEPS = (0.2, 0.1, 0.05, 0.025)
SHOWN_STEP = 0.1
DRAWN = ("euler", "heun", "rk3", "rk4", "dopri5", "leapfrog", "yoshida4")
SYSTEMS: dict[str, systems.System] = {
    "spring-mass, 20 masses": systems.SpringMass(n=20),
    "elastic pendulum": systems.ElasticPendulum(),
    "pendulum chain, 2 links": systems.PendulumChain(links=2),
}


def jobs() -> int:
    """How many solves `run` makes."""
    return sum(1 for _ in _pairs()) * len(STEPS) + len(SYSTEMS) + 4


def run(
    trajectories: int = 100,
    seed: int = 0,
    device: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Errors and energy drifts of every scheme on every system, and a long energy comparison."""
    truth: dict[str, tuple[Tensor, Tensor]] = {}
    for name, system in SYSTEMS.items():
        progress(f"reference for {name}")
        generator = torch.Generator().manual_seed(seed)
        u0 = system.sample(trajectories, generator, torch.float64, device)
        times = torch.tensor([0.0, HORIZON], dtype=torch.float64)
        truth[name] = u0, evolve(system, u0, times, "dopri5", rtol=1e-12, atol=1e-13).final

    rows = []
    for name, scheme in _pairs():
        system, (u0, exact) = SYSTEMS[name], truth[name]
        for dt in STEPS:
            progress(f"{scheme.name} on {name}, dt {dt}")
            n = round(HORIZON / dt)
            times = torch.linspace(0, HORIZON, n + 1, dtype=torch.float64)
            solved = evolve(system, u0, times, scheme, every=n)
            energy = system.energy(u0)  # type: ignore[attr-defined]
            moved = system.energy(solved.final) - energy  # type: ignore[attr-defined]
            rows.append(
                {
                    "system": name,
                    "scheme": scheme.name,
                    "order": scheme.order,
                    "dt": dt,
                    "rate_calls": solved.stats.rate_calls,
                    "rms_error": _rms(solved.final - exact),
                    "energy_drift": (moved.abs() / energy.abs()).max().item(),
                    "lost": int((~solved.ok).sum()),
                }
            )
    return {
        "seed": seed,
        "trajectories": trajectories,
        "horizon": HORIZON,
        "rows": rows,
        "long": _long_run(seed, device, progress),
        "hybrid": _hybrid(trajectories, seed, device, progress),
    }


def write(results: dict[str, Any], folder: Path) -> Path:
    """The report page, the numbers as JSON and the pictures, in folder; returns the page's path."""
    from attractor.report import Page, figures

    write_json(folder / "results.json", results)
    errors: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in SYSTEMS}
    for row in results["rows"]:
        if row["scheme"] in DRAWN:
            line = errors[row["system"]].setdefault(row["scheme"], [])
            line.append((row["dt"], row["rms_error"]))
    converge = [figures.convergence(lines, name) for name, lines in errors.items()]
    drift = figures.drift(results["long"], "Hénon-Heiles, dt = 0.3")
    for name, figure in zip(("springs", "pendulum", "chain", "energy"), (*converge, drift)):
        figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")

    page = Page("attractor: the demo")
    page.text(
        "Attention as time stepping starts with time stepping. Three systems, every scheme, "
        f"{results['trajectories']} trajectories each, solved to t = {HORIZON:g}."
    )
    page.section("Halve the step: how much better?")
    page.text(
        "Each line is a scheme, one for every order; the steeper, the higher. A line that ends "
        "before the largest step blew up there: such trajectories are flagged, not returned as NaN."
    )
    page.figure("Error against step size on three systems", *converge)
    for name in SYSTEMS:
        page.section(f"{name}, dt = {SHOWN_STEP}")
        page.table(
            ["scheme", "order", "rate calls", "error", "energy drift", "lost"], table(results, name)
        )
    hybrid = results["hybrid"]
    page.section("Learn the error of a big step")
    page.text(
        f"A correction fitted in {hybrid['seconds']:.0f} s to {hybrid['fitted_from']} trajectories of "
        f"the 2-link pendulum, steps of {SHOWN_STEP}. Tried on 100 others:"
    )
    rows = [[name, row["error"], row["rate_calls"]] for name, row in hybrid["rows"].items()]
    page.table(["", "mean square error", "rate calls"], rows)
    learned = figures.errors_over_time(hybrid["times"], hybrid["lines"], "2-link pendulum")
    page.figure("Error over time of hybrid and plain solvers", learned)
    page.text(
        "Fewer rate calls are not less time: the network costs some, too. attractor compare tells "
        "whether a solver pays on your machine."
    )
    page.command(
        "attractor fit pendulum-chain -o links=2 --out out/fit\nattractor compare out/fit/solver"
    )
    page.section("Energy over a long time")
    page.text(
        "Leapfrog and Yoshida's composition are symplectic: their energy error swings but does not "
        "grow. A Runge-Kutta scheme's grows with every step, however small."
    )
    page.figure("Energy error over time on Hénon-Heiles", drift)
    page.section("Again")
    page.command(f"attractor demo --seed {results['seed']} --out {folder}")
    return page.write(folder / "report.html")


def table(results: dict[str, Any], system: str) -> list[list[Any]]:
    """The rows of one system at the step the report shows."""
    return [
        [r["scheme"], r["order"], r["rate_calls"], r["rms_error"], r["energy_drift"], r["lost"]]
        for r in results["rows"]
        if r["system"] == system and r["dt"] == SHOWN_STEP
    ]


def _pairs() -> list[tuple[str, Any]]:
    """Every system with every scheme that can step it."""
    return [
        (name, scheme)
        for name, system in SYSTEMS.items()
        for scheme in ALL.values()
        if isinstance(system, systems.SpringMass) or not isinstance(scheme, Splitting)
    ]


def _long_run(seed: int, device: str | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Relative energy error over 6,000 steps of Hénon-Heiles, the largest of ten orbits."""
    system, lines = systems.HenonHeiles(), {}
    u0 = system.sample(10, torch.Generator().manual_seed(seed), torch.float64, device)
    times = torch.linspace(0, 1800, 6001, dtype=torch.float64)
    for scheme in ("leapfrog", "rk4"):
        progress(f"{scheme} for 6,000 steps")
        solved = evolve(system, u0, times, scheme, every=10)
        error = ((system.energy(solved.u) - system.energy(u0)) / system.energy(u0)).abs().amax(-1)
        lines[scheme] = (solved.t[1:].tolist(), error[1:].tolist())
    return lines


def _hybrid(
    trajectories: int, seed: int, device: str | None, progress: Callable[[str], None]
) -> dict[str, Any]:
    """A hybrid solver of the 2-link pendulum, beside plain ones."""
    from attractor.report import hybrid

    system, count = systems.PendulumChain(links=2), 3 * trajectories
    progress("fitting a hybrid solver")
    solver = fit(
        system, dt=SHOWN_STEP, horizon=HORIZON, trajectories=count, width=256, seed=seed, device=device
    )
    progress("trying it on new trajectories")
    tested = hybrid.test(solver, HORIZON, None, seed)
    seconds = solver.history[-1]["seconds"]
    parts = {k: tested[k] for k in ("rows", "times", "lines")}
    return {"fitted_from": count, "seconds": seconds, **parts}


def _rms(error: Tensor) -> float:
    value = error.square().mean().sqrt().item()
    return value if math.isfinite(value) else math.inf
