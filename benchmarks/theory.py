"""The AttNS paper's Section 5 in numbers: Lipschitz constants, error bounds, Table 6, errors over dt.

Corrections are AttNS of width 128 fitted to 200 trajectories, with recipe "paper" to 20 of them: the
paper's 500 epochs, but one batch each, which is far too little for it. Constants and errors are the
largest over 30 test trajectories of another seed.
"""

import dataclasses
import math
from itertools import pairwise

import torch

from attractor import evolve, fit, systems
from attractor.ode.theory import (
    convergence_bound,
    curvature_distribution,
    lipschitz_bound,
    lipschitz_observed,
)
from attractor.ode.trajectories import fine_trajectories
from benchmarks.results import save

DT, HORIZON = 0.1, 10.0
SYSTEMS = {"elastic pendulum": systems.ElasticPendulum(), "2-link pendulum": systems.PendulumChain(2)}
PAPER = dict(recipe="paper", epochs=500, trajectories=20)
RECIPES = [
    ("euler, default", dict(scheme="euler")),
    ("rk4, default", dict(scheme="rk4")),
    ("rk4, paper's", dict(scheme="rk4", **PAPER)),
]
LOSS_SCALE = {"elastic pendulum": 1e6, "2-link pendulum": 1.0}
STEPS = (0.1, 0.05, 0.025, 0.0125)
TABLE_6 = {  # system, horizon, distance of states, levels, the paper's percentages
    "spring-mass": (
        systems.SpringMass(20), 20.0, 0.1, range(30, 271, 30),
        (55.35, 80.51, 91.84, 96.68, 98.57, 99.41, 99.76, 99.91, 99.97),
    ),
    "2-link pendulum": (
        systems.PendulumChain(2), 10.0, 0.05, range(5, 46, 5),
        (41.10, 65.93, 80.55, 89.48, 94.66, 97.61, 99.03, 99.71, 99.95),
    ),
}  # fmt: skip


def truth_of(system, n, dt, horizon):
    u0 = system.sample(n, torch.Generator().manual_seed(1_000), torch.float64)
    return fine_trajectories(system, u0, dt, round(horizon / dt), max(4, round(dt / 0.005)))


def attns(system, dt, horizon, **options):
    options = dict(correction="attns", width=128, trajectories=200) | options
    return fit(system, dt=dt, horizon=horizon, **options).to(torch.float64)


def bounds(solver, truth) -> dict:
    """Theorem 5.1 after 1 and after 10 units of time, as far as no trajectory is lost."""
    found = {}
    for end in (1.0, HORIZON):
        try:
            bound = convergence_bound(solver, truth[: round(end / DT) + 1])
        except ValueError as lost:
            print(f"    T = {end:g}: {lost}")
            continue
        numbers = found[f"{end:g}"] = dataclasses.asdict(bound)
        print(
            f"    T = {end:g}:", ", ".join(f"{k} {x:.2e}" for k, x in numbers.items() if x is not None)
        )
    return found


def constants(name, system) -> list[dict]:
    """Lipschitz constants of fitted corrections, and Theorem 5.1 after 1 and after 10 units of time."""
    truth, rows = truth_of(system, 30, DT, HORIZON), []
    for recipe, options in RECIPES:
        if "recipe" in options:
            options = options | {"loss_scale": LOSS_SCALE[name]}
        solver = attns(system, DT, HORIZON, **options)
        u = truth.flatten(0, 1)
        slope = solver.scheme.slope(system, 0.0, u, DT)
        bound = lipschitz_bound(solver.correction, DT)
        observed = lipschitz_observed(solver.correction, u, slope, DT)
        print(f"{name}, {recipe}: Lipschitz bound {bound:.2e}, observed {observed:.2e}", flush=True)
        row = {"case": f"{name}, {recipe}", "bound": bound, "observed": observed}
        rows.append(row | {"convergence": bounds(solver, truth)})
    return rows


def curvatures() -> dict:
    """Table 6, by all three readings of it."""
    found = {}
    for name, (system, horizon, dt, levels, paper) in TABLE_6.items():
        truth, at = truth_of(system, 1000, dt, horizon), torch.tensor(levels)
        shares = {
            of: (100 * curvature_distribution(system, truth, at, of)).tolist()
            for of in ("states", "components", "trajectories")
        }
        found[name] = {"levels": list(levels), "paper": paper, **shares}
        for of, row in {"level": list(levels), "paper": paper, **shares}.items():
            print(f"{name:16} {of:13}", " ".join(f"{x:7.2f}" for x in row))
    return found


def over_dt(system, horizon=2.0) -> dict:
    """Root mean square error at the end, and its order from each dt to the next."""
    found: dict[str, list] = {}
    for dt in STEPS:
        truth = truth_of(system, 100, dt, horizon)
        u0, t = truth[0], torch.arange(len(truth), dtype=torch.float64) * dt
        for scheme in ("euler", "rk4"):
            hybrid = attns(system, dt, horizon, scheme=scheme)
            for name, correction in ((scheme, None), (f"{scheme} + AttNS", hybrid.correction)):
                end = evolve(system, u0, t, scheme, correction).final
                found.setdefault(name, []).append((end - truth[-1]).square().mean().sqrt().item())
    rows = {
        name: {"errors": e, "orders": [math.log2(a / b) for a, b in pairwise(e)]}
        for name, e in found.items()
    }
    for name, row in rows.items():
        errors, orders = (" ".join(form.format(x) for x in row[k]) for k, form in
                          (("errors", "{:.1e}"), ("orders", "{:.1f}")))  # fmt: skip
        print(f"{name:14} errors {errors}, orders {orders}", flush=True)
    return {"dt": STEPS, "horizon": horizon, "rows": rows}


def main() -> None:
    table_6 = curvatures()
    steps = over_dt(SYSTEMS["2-link pendulum"])
    rows = [row for name, system in SYSTEMS.items() for row in constants(name, system)]
    save("theory", {"constants": rows, "table_6": table_6, "over_dt": steps})


if __name__ == "__main__":
    main()
