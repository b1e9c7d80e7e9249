"""Do hybrid solvers pay on this machine? Four systems over widths, against compiled plain schemes.

The default recipe with the network in float32, float64 states, 1,000 trajectories at once. m: plain steps
of the same scheme that reach the hybrid's error; m*: what a hybrid step costs in plain steps; the gain is
over the quickest of all others at that error, dopri5 with fixed steps, SciPy, torchdiffeq and diffrax
included (the last three once for each system).
"""

import json
import sys

from attractor import fit, systems
from attractor.ode.compare import compare
from benchmarks.results import FOLDER, save

# name, system, dt, horizon, trajectories, widths (None: the linear correction), precisions
CASES = [
    ("2-link pendulum", systems.PendulumChain(2), 0.1, 10.0, 1000, (128, 256, 64), ("float32",)),
    ("elastic pendulum", systems.ElasticPendulum(), 0.1, 50.0, 500, (128, 64), ("float32", "float64")),
    ("2-link pendulum, dt = 0.2", systems.PendulumChain(2), 0.2, 10.0, 1000, (256, 128), ("float32",)),
    ("spring-mass, n = 20", systems.SpringMass(20), 0.2, 20.0, 300, (None,), ("float64",)),
    ("10-link pendulum", systems.PendulumChain(10), 0.1, 5.0, 500, (256, 1024), ("float32",)),
]


def main() -> None:
    """Goes on with what is in results/: remove the file to measure everything again."""
    path = FOLDER / "compare.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {(r["case"], r["width"], r["precision"]) for r in rows}
    for name, system, dt, horizon, trajectories, widths, precisions in CASES:
        if sys.argv[1:] and not any(name.startswith(x) for x in sys.argv[1:]):
            continue
        for width, precision in [(w, p) for w in widths for p in precisions]:
            if (name, width, precision) in done:
                continue
            kind = {"correction": "linear"} if width is None else {"width": width}
            kind |= {"options": {"precision": precision}} if precision == "float32" else {}
            solver = fit(system, dt=dt, horizon=horizon, trajectories=trajectories, **kind)
            first = all(r["case"] != name for r in rows)
            found = compare(solver, horizon=horizon, peers=first)
            chosen = solver.history[-1]
            rows.append({
                "case": name, "width": width, "precision": precision, "correction": chosen["correction"],
                "state": chosen.get("state", False), "error": found.hybrid.error, "m": found.m,
                "m_star": found.m_star, "gain": found.gain, "verdict": found.verdict,
                "milliseconds": found.hybrid.seconds * 1e3,
                "points": [[p.method, p.setting, p.error, p.seconds, p.rate_calls] for p in found.points],
            })  # fmt: skip
            print(
                f"{name}, width {width}, {precision}: {found.hybrid.error:.1e}; {found.verdict}",
                flush=True,
            )
            save("compare", {"batch": 1000, "rows": rows})


if __name__ == "__main__":
    main()
