"""Do hybrid solvers pay on this machine? Four systems over widths, against compiled plain schemes.

The default recipe with the network in float32, float64 states, 1,000 trajectories at once. m: plain steps
of the same scheme that reach the hybrid's error; m*: what a hybrid step costs in plain steps; the gain is
over the quickest of all others at that error, dopri5 with fixed steps, SciPy, torchdiffeq and diffrax
included (the last three once for each system).

``python -m benchmarks.compare --fastest`` fits by ``objective="time"`` for an error of 1e-6 instead, and
compares with one trajectory and with 1,000.
"""

import argparse
import json
from typing import Any

import torch

from attractor import HybridSolver, fit, systems
from attractor.ode.compare import compare
from attractor.ode.comparison import Comparison
from benchmarks.cases import measure_cpu_time
from benchmarks.results import FOLDER, machine, save

# name, system, dt, horizon, trajectories, widths (None: the linear correction), precisions
CASES = [
    ("2-link pendulum", systems.PendulumChain(2), 0.1, 10.0, 1000, (128, 256, 64), ("float32",)),
    ("elastic pendulum", systems.ElasticPendulum(), 0.1, 50.0, 500, (128, 64), ("float32", "float64")),
    ("2-link pendulum, dt = 0.2", systems.PendulumChain(2), 0.2, 10.0, 1000, (256, 128), ("float32",)),
    ("spring-mass, n = 20", systems.SpringMass(20), 0.2, 20.0, 300, (None,), ("float64",)),
    ("10-link pendulum", systems.PendulumChain(10), 0.1, 5.0, 500, (256, 1024), ("float32",)),
]


FASTEST = {
    "elastic pendulum": (systems.ElasticPendulum(), 20.0),
    "2-link pendulum": (systems.PendulumChain(2), 10.0),
}
ERROR = 1e-6  # relative, of final states


def fastest(name: str, cpu_time: bool) -> list[dict[str, Any]]:
    """Return a row per batch for the hybrid that reaches the error in the least time."""
    system, horizon = FASTEST[name]
    solver = fit(system, objective="time", error=ERROR, horizon=horizon)
    about = {
        "case": name, "horizon": horizon, "dt": solver.dt, "scheme": solver.scheme.name,
        "correction": solver.history[-1]["correction"],
        "degree": getattr(solver.correction, "config", {}).get("degree"),
        "fit_seconds": solver.history[-1]["seconds"], "machine": {**machine(), **({"clock": "CPU time"} if cpu_time else {})},
    }  # fmt: skip
    rows = []
    for batch in (1, 1_000):
        found = compare(solver, horizon=horizon, batch=batch)
        print(f"{name}, {batch:,}: {found.hybrid.error:.1e}; {found.verdict}", flush=True)
        rows.append({**about, "batch": batch, **numbers(found), "break_even": found.break_even})
    return rows


def numbers(found: Comparison) -> dict[str, Any]:
    """Return what a row of the results says about a comparison."""
    return {
        "error": found.hybrid.error, "m": found.m, "m_star": found.m_star, "gain": found.gain,
        "verdict": found.verdict, "milliseconds": found.hybrid.seconds * 1e3,
        "points": [[p.method, p.setting, p.error, p.seconds, p.rate_calls] for p in found.points],
    }  # fmt: skip


def described(solver: HybridSolver) -> dict[str, Any]:
    """Return the correction that a fit has chosen."""
    chosen = solver.history[-1]
    return {"correction": chosen["correction"], "state": chosen.get("state", False)}


def read() -> dict[str, Any]:
    """Return the results so far."""
    path = FOLDER / "compare.json"
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    """Continue with what is in results/. Remove the file to measure everything again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="first letters of cases; all by default")
    parser.add_argument("--fastest", action="store_true", help='fits by objective="time"')
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time")
    options = parser.parse_args()
    if options.cpu_time:
        measure_cpu_time()
    torch.set_num_threads(options.threads)
    if options.fastest:
        for name in options.names or FASTEST:
            measured = fastest(name, options.cpu_time)
            stored = read()
            others = [row for row in stored.get("fastest", []) if row["case"] != name]
            content = {"batch": 1000, "rows": [], **stored, "fastest": [*others, *measured]}
            save("compare", content)  # the machine is that of the other rows
        return
    stored = read()
    result = {"batch": 1000, "rows": stored.get("rows", []), "fastest": stored.get("fastest", [])}
    rows = result["rows"]
    done = {(r["case"], r["width"], r["precision"]) for r in rows}
    for name, system, dt, horizon, trajectories, widths, precisions in CASES:
        if options.names and not any(name.startswith(x) for x in options.names):
            continue
        for width, precision in [(w, p) for w in widths for p in precisions]:
            if (name, width, precision) in done:
                continue
            kind = {"correction": "linear"} if width is None else {"width": width}
            kind |= {"options": {"precision": precision}} if precision == "float32" else {}
            solver = fit(system, dt=dt, horizon=horizon, trajectories=trajectories, **kind)
            first = all(r["case"] != name for r in rows)
            found = compare(solver, horizon=horizon, peers=first)
            about = {"case": name, "width": width, "precision": precision, **described(solver)}
            rows.append({**about, **numbers(found)})
            print(
                f"{name}, width {width}, {precision}: {found.hybrid.error:.1e}; {found.verdict}",
                flush=True,
            )
            save("compare", result)


if __name__ == "__main__":
    main()
