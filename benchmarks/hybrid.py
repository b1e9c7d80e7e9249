"""Hybrid solvers fitted with the default recipe, on initial states nobody saw.

The settings of the AttNS paper's Table 4 with at most 2,000 trajectories; mean square error over all
states of 500 test trajectories (a seed not used in fitting), for three seeds of the fit, plain scheme
beside it, and the longest wall time of a fit. Then the same solvers started far outside: angles up to pi/2, with and without the guard.
"""

import math
import time

import torch

from attractor import evolve, fit, systems
from attractor.ode.trajectories import fine_trajectories
from benchmarks.results import save

CASES = [
    ("elastic pendulum, T = 50", systems.ElasticPendulum(), "rk4", 0.1, 50.0, {"trajectories": 1000}),
    ("2-link pendulum, T = 10", systems.PendulumChain(2), "rk4", 0.1, 10.0, {"trajectories": 2000}),
    *(
        (f"spring-mass, {s}", systems.SpringMass(20), s, 0.2, 20.0, {"trajectories": 300, "width": 64})
        for s in ("euler", "heun", "rk3", "rk4")
    ),
]


SEEDS = (0, 1, 2)


def mean_square(solved, truth) -> float | None:
    return (solved.u - truth).square().mean().item() if bool(solved.ok.all()) else None


def row(name, system, scheme, dt, horizon, options) -> dict:
    solvers, seconds = [], []
    for seed in SEEDS:
        start = time.perf_counter()
        solvers.append(fit(system, dt=dt, horizon=horizon, scheme=scheme, seed=seed, **options))
        seconds.append(time.perf_counter() - start)
    u0 = system.sample(500, torch.Generator().manual_seed(20_261_115), torch.float64)
    steps = round(horizon / dt)
    t = torch.arange(steps + 1, dtype=torch.float64) * dt
    truth = fine_trajectories(system, u0, dt, steps, 64)
    found = {
        "case": name, "seconds": max(seconds), "trajectories": options["trajectories"],
        "hybrid": [mean_square(solver.solve(u0, horizon), truth) for solver in solvers],
        "correction": [type(solver.correction).__name__ for solver in solvers],
        "plain": mean_square(evolve(system, u0, t, scheme), truth),
    }  # fmt: skip
    if not isinstance(system, systems.SpringMass):
        far = u0.clone()
        angles = 1 if isinstance(system, systems.ElasticPendulum) else system.links
        far[:, :angles] *= 4  # [0, pi/8] becomes [0, pi/2]
        found |= {"far": outside(system, solvers[0], far, dt, horizon)}
    return found


def outside(system, solver, u0, dt, horizon) -> dict:
    """Mean and 99th percentile over trajectories of the error, far from where the fit knows."""
    steps = round(horizon / dt)
    truth = fine_trajectories(system, u0, dt, steps, 64)
    t = torch.arange(steps + 1, dtype=torch.float64) * dt
    found = {}
    for name, solved in {
        "plain": evolve(system, u0, t, solver.scheme),
        "guarded": solver.solve(u0, horizon),
        "unguarded": solver.solve(u0, horizon, guard=False),
    }.items():
        error = (solved.u - truth).square().mean((0, 2))
        found[name] = {
            "mean": error.mean().item(),
            "p99": error.quantile(0.99).item(),
            "lost": int((~solved.ok).sum()),
        }
        if solved.stats.guarded is not None:
            found[name]["guarded_steps"] = solved.stats.guarded.double().mean().item() / steps
    return found


def main() -> None:
    rows = []
    for case in CASES:
        with torch.no_grad():
            rows.append(row(*case))
        r = rows[-1]
        plain = "blown up" if r["plain"] is None else f"{r['plain']:.1e}"
        print(
            f"{r['case']:28} hybrid {[f'{e:.1e}' for e in r['hybrid']]}  plain {plain:>9}  "
            f"fitted in at most {r['seconds']:.0f} s"
        )
        for name, f in r.get("far", {}).items():
            print(f"    far, {name:9} mean {f['mean']:.1e}, 99 % {f['p99']:.1e}, lost {f['lost']}")
    save("hybrid", {"angle_far": math.pi / 2, "rows": rows})


if __name__ == "__main__":
    main()
