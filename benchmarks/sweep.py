"""Parameter sweeps: one hybrid solver for 1,000 trajectories with 1,000 parameters.

One fit with a sampler of parameters serves all of them. Beside it are fits with fixed parameters, for ten of
the parameters; compiled plain schemes with as many steps as reach the hybrid's error; SciPy's DOP853 at that
error; and the number of trajectories from which on the fit and the compilation have paid for themselves:

    python -m benchmarks.sweep --workers 8 --threads 2
"""

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attractor import fit
from benchmarks.cases import Measure, add_options, containing, machine_of, name_of, number, run
from benchmarks.fresh import Fresh, seconds
from benchmarks.results import save
from benchmarks.tune import CASES

COUNT = 1_000  # parameters, with one trajectory each
SINGLE = 10  # parameters that have a fit of their own
SINGLE_COUNT = 100  # fresh trajectories of each of them
TRAJECTORIES = (
    4_000  # of the fit for all parameters; with 1,000 the guard replaces ten times as many steps
)
WIDTHS = (256, 64, 0, 1024)
# name in benchmarks.tune, and for each scheme the step and the number of steps
SYSTEMS: dict[str, dict[str, tuple[float, int]]] = {
    "Lotka-Volterra sweep": {"rk4": (0.5, 20), "dop853": (1.0, 10)},
    "FitzHugh-Nagumo sweep": {"rk4": (0.5, 80), "dop853": (1.0, 40)},
    "2-link sweep": {"rk4": (0.05, 200), "dop853": (0.2, 50)},
}


def sweep(name: str, scheme: str, width: int) -> dict[str, Any]:
    """One solver for all parameters, and what it competes with."""
    case, (dt, steps) = CASES[name], SYSTEMS[name][scheme]
    settings: Any = {"dt": dt, "horizon": dt * steps, "sample": case.sample}
    fresh = Fresh.draw(case.rate, **settings, parameters=case.parameters, count=COUNT)
    fixed: Any = {"scheme": scheme, "correction": "stages", "width": width, **settings}
    solver = fit(case.rate, parameters=case.parameters, trajectories=TRAJECTORIES, **fixed)
    errors = fresh.errors(fresh.hybrid(solver))
    fit_seconds = solver.history[-1]["seconds"]

    ways = fresh.ways(errors["final"])
    solve = partial(fresh.hybrid, solver, every=steps, compile=True)
    calls = {"hybrid": solve, "unguarded": partial(solve, guard=False)}
    with torch.no_grad():
        times = seconds({**calls, **{way.name: way.solve for way in ways}})
    own, unguarded = times.pop("hybrid"), times.pop("unguarded")
    rivals = [
        {"name": way.name, "error": way.error, **times[way.name],
         "break_even": break_even(fit_seconds, own, times[way.name])}
        for way in ways
    ]  # fmt: skip
    return {
        "system": name, "scheme": scheme, "width": width, "dt": dt, "horizon": dt * steps,
        "plain": fresh.errors(fresh.plain(scheme)), "half": fresh.errors(fresh.plain(scheme, 2)),
        "hybrid": errors, "guarded": int(fresh.hybrid(solver).stats.guarded.sum()),
        "fit_seconds": fit_seconds, **own, "unguarded_seconds": unguarded["seconds"], "rivals": rivals,
        "single": [single(case.rate, solver, fresh.parameters[i], fixed) for i in range(SINGLE)],
    }  # fmt: skip


def single(rate: Callable[..., Tensor], shared: Any, p: Tensor, fixed: Any) -> dict[str, float]:
    """A fit with fixed parameters beside the one for all of them, on the same fresh trajectories."""
    bound = lambda t, u: rate(t, u, p.expand(*u.shape[:-1], len(p)))
    fresh = Fresh.draw(bound, fixed["dt"], fixed["horizon"], fixed["sample"], count=SINGLE_COUNT)
    own = fit(bound, **fixed)
    by_shared = shared.solve(fresh.u0, fixed["horizon"], parameters=p)
    return {
        "own": fresh.error(fresh.hybrid(own).final), "shared": fresh.error(by_shared.final),
        "fit_seconds": own.history[-1]["seconds"],
    }  # fmt: skip


def break_even(fit_seconds: float, own: dict[str, float], rival: dict[str, float]) -> float:
    """Return the number of trajectories from which on the hybrid is faster, its fit included."""
    saved = (rival["seconds"] - own["seconds"]) / COUNT
    compiling = lambda times: times["first_seconds"] - times["seconds"]
    spent = fit_seconds + compiling(own) - compiling(rival)
    return max(0.0, spent / saved) if saved > 0 else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name contains a text")
    add_options(parser, "out/sweep")
    options = parser.parse_args()
    cases: dict[str, Measure] = {
        name_of(name, scheme, width): partial(sweep, name, scheme, width)
        for width in WIDTHS
        for scheme in ("rk4", "dop853")
        for name in SYSTEMS
    }
    rows = run("sweep", containing(options.only, cases), options)
    if rows is None:
        return
    for row in (row for row in rows if "failure" not in row):
        rival = min(row["rivals"], key=lambda r: r["seconds"], default=None)
        ratio = statistics.median(number(s["shared"]) / number(s["own"]) for s in row["single"])
        beside = (
            "none reaches it" if rival is None else f"{1e3 * rival['seconds']:.2f} ms {rival['name']}"
        )
        even = 0.0 if rival is None else number(rival["break_even"])
        print(
            f"{row['name']:32} error {number(row['hybrid']['final']):.1e} (half the step {number(row['half']['final']):.1e}), "
            f"{1e3 * row['seconds']:.2f} ms, {beside}, break-even {even:,.0f}, error over that of a fit "
            f"per parameter {ratio:.2g}"
        )
    save("sweep", {"threads": options.threads, "rows": rows, "machine": machine_of(rows)})


if __name__ == "__main__":
    main()
