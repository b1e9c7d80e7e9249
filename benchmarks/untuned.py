"""Hybrid solvers on other systems than those of the paper: does a fit beat plain rk4 at half the step?

Most settings of the recipe were found elsewhere; that it chooses between slope and state, and its sines, not.

The defaults of `fit` at width 256 from 300 trajectories, three seeds; mean square error over 100 test
trajectories of another seed, beside plain rk4 with the same step and with half of it (whose rate calls
are twice as many; the network's cost is not counted here).
"""

import statistics

import torch

from attractor import evolve, fit, systems
from attractor.ode.trajectories import fine_trajectories
from benchmarks.results import save

CASES = [
    ("Lorenz", systems.Lorenz(), 0.05, 2.0),
    ("Hénon-Heiles", systems.HenonHeiles(), 0.5, 20.0),
    ("van der Pol, mu = 2", systems.VanDerPol(2.0), 0.1, 5.0),
    ("three bodies", systems.ThreeBody(), 0.05, 3.0),
    ("3-link pendulum", systems.PendulumChain(3), 0.1, 5.0),
]
SEEDS = (1, 2, 3)
KINDS = ("attns", "neurvec", "auto")


def row(name, system, dt, horizon) -> dict:
    steps = round(horizon / dt)
    u0 = system.sample(100, torch.Generator().manual_seed(1_000), torch.float64)
    truth = fine_trajectories(system, u0, dt, steps, 64)
    error = lambda solved: (solved.u - truth).square().mean().item() if solved.ok.all() else None
    t = torch.arange(2 * steps + 1, dtype=torch.float64) * dt / 2
    found = {
        "case": name,
        "plain": error(evolve(system, u0, t[::2])),
        "half": error(evolve(system, u0, t, every=2)),
    }
    for correction in KINDS:
        options = dict(dt=dt, horizon=horizon, trajectories=300, width=256, correction=correction)
        found[correction] = [error(fit(system, seed=s, **options).solve(u0, horizon)) for s in SEEDS]
    return found


def main() -> None:
    rows = []
    for case in CASES:
        with torch.no_grad():
            rows.append(row(*case))
        r = rows[-1]
        fits = {k: [f"{x:.1e}" for x in r[k]] for k in KINDS}
        print(f"{r['case']:20} plain {r['plain']:.1e}, half step {r['half']:.1e}, {fits}", flush=True)
    better = [r["case"] for r in rows if statistics.median(r["auto"]) < r["half"]]
    print(f"auto beats rk4 at half the step on {len(better)} of {len(rows)}: {', '.join(better)}")
    save("untuned", {"seeds": SEEDS, "rows": rows})


if __name__ == "__main__":
    main()
