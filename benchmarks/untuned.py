"""The default of `fit` on ten equations that nothing was tuned on, and whether `compare` was right about it.

`fit` gets dt, horizon and sample, nothing else. Errors are those of 1,000 fresh trajectories beside plain rk4
with the same step and with half of it. The verdict of `compare`, compiled, is then checked on other fresh
trajectories: plain schemes get the fewest steps that reach the hybrid's error, and all are timed in turns:

    python -m benchmarks.untuned --workers 8 --threads 2
"""

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attractor import compare, fit
from benchmarks.cases import Measure, add_options, containing, machine_of, name_of, number, run
from benchmarks.fresh import FIXED, Fresh, seconds
from benchmarks.results import save
from benchmarks.tune import CASES, brusselator, kuramoto, lotka_volterra, roessler, uniform


def predator_and_prey(t: Any, u: Tensor) -> Tensor:
    p = torch.tensor([1.1, 0.9, 0.8, 1.0]).to(u)
    return lotka_volterra(t, u, p.expand(*u.shape[:-1], 4))


def thomas(t: Any, u: Tensor) -> Tensor:
    """The cyclically symmetric attractor of Thomas."""
    return u.roll(-1, -1).sin() - 0.2 * u


def double_well(t: Any, u: Tensor) -> Tensor:
    """Two particles, each in a double well, joined by a spring."""
    x, v = u.chunk(2, -1)
    return torch.cat((v, x - x**3 + 0.3 * (x.flip(-1) - x)), -1)


def three_species(t: Any, u: Tensor) -> Tensor:
    """A food chain of Lotka and Volterra."""
    x, y, z = u.unbind(-1)
    return torch.stack((x * (1 - y), y * (x - 1 - 0.5 * z), z * (0.5 * y - 0.4)), -1)


def spherical_pendulum(t: Any, u: Tensor) -> Tensor:
    angle, _, speed, turn = u.unbind(-1)
    return torch.stack(
        (speed, turn, angle.sin() * angle.cos() * turn**2 - 9.8 * angle.sin(),
         -2 * speed * turn * angle.cos() / angle.sin()), -1
    )  # fmt: skip


# rate, dt, number of steps, initial states; the first three are problems that users tried
EQUATIONS: dict[str, tuple[Callable[..., Tensor], float, int, Callable[..., Tensor]]] = {
    "planets": (CASES["planets"].rate, 0.2, 50, CASES["planets"].sample),
    "Lotka-Volterra": (predator_and_prey, 0.25, 40, uniform((0.5, 1.5), (0.5, 1.5))),
    "particle at a wire": (CASES["particle at a wire"].rate, 0.25, 40, CASES["particle at a wire"].sample),
    "Brusselator": (brusselator, 0.1, 50, uniform((0.5, 2), (1, 3))),
    "Rössler": (roessler, 0.2, 50, uniform((-4, 4), (-4, 4), (0, 1))),
    "Kuramoto, 8 oscillators": (kuramoto, 0.5, 20, CASES["Kuramoto, 8 oscillators"].sample),
    "Thomas' attractor": (thomas, 0.5, 40, uniform((-3, 3), (-3, 3), (-3, 3))),
    "double well": (double_well, 0.25, 40, uniform((-1.5, 1.5), (-1.5, 1.5), (-0.5, 0.5), (-0.5, 0.5))),
    "three species": (three_species, 0.25, 40, uniform((0.5, 1.5), (0.5, 1.5), (0.5, 1.5))),
    "spherical pendulum": (spherical_pendulum, 0.1, 50, uniform((0.8, 1.2), (0, 0), (-0.3, 0.3), (3, 4))),
}  # fmt: skip


def default(name: str) -> dict[str, Any]:
    """Fit an equation by default, ask `compare`, and check its verdict."""
    rate, dt, steps, sample = EQUATIONS[name]
    settings: Any = {"dt": dt, "horizon": dt * steps, "sample": sample}
    fresh = Fresh.draw(rate, **settings)
    solver = fit(rate, **settings)
    chosen = {"correction": type(solver.correction).__name__, **solver.correction.config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about tolerances that other libraries give up at
        comparison = compare(solver, horizon=dt * steps, sample=sample)
    return {
        "system": name, "dt": dt, "horizon": dt * steps, "dim": fresh.u0.shape[-1],
        "plain": fresh.errors(fresh.plain("rk4")), "half": fresh.errors(fresh.plain("rk4", 2)),
        "hybrid": fresh.errors(fresh.hybrid(solver)), "chosen": chosen,
        "fit_seconds": solver.history[-1]["seconds"],
        "comparison": {k: x for k, x in comparison.to_json().items() if k not in ("points", "about")},
        "check": check(solver, Fresh.draw(rate, **settings, seed=1)),
    }  # fmt: skip


def check(solver: Any, fresh: Fresh) -> dict[str, Any]:
    """Time the hybrid and plain solvers that reach its error.

    Returns:
        Among others the gain over the fastest other solver; None if none reaches the error.
    """
    error = fresh.error(fresh.hybrid(solver).final)
    ways = fresh.ways(error, FIXED)
    with torch.no_grad():
        solve = partial(fresh.hybrid, solver, every=fresh.steps, compile=True)
        times = seconds({"hybrid": solve, **{way.name: way.solve for way in ways}})
    own = times["hybrid"]["seconds"]
    gain = min((times[way.name]["seconds"] / own for way in ways), default=None)
    return {"error": error, "times": times, "gain": gain}


def held(row: dict[str, Any]) -> bool:
    """Return whether the check confirms the direction of the verdict."""
    return row["comparison"]["pays"] == (number(row["check"]["gain"]) > 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name contains a text")
    add_options(parser, "out/untuned")
    options = parser.parse_args()
    cases: dict[str, Measure] = {name_of(name): partial(default, name) for name in EQUATIONS}
    rows = run("untuned", containing(options.only, cases), options)
    if rows is None:
        return
    measured = [row for row in rows if "failure" not in row]
    for row in measured:
        finals = ", ".join(f"{k} {number(row[k]['final']):.1e}" for k in ("plain", "half", "hybrid"))
        print(f"{row['system']:24} {finals}; {row['comparison']['verdict']}; held: {held(row)}")
    better = sum(number(row["hybrid"]["final"]) < number(row["half"]["final"]) for row in measured)
    pays = sum(row["comparison"]["pays"] for row in measured)
    print(
        f"of {len(measured)} equations the default beats half the step on {better}, pays on {pays}, and the "
        f"verdict held on {sum(map(held, measured))}"
    )
    save("untuned", {"threads": options.threads, "rows": rows, "machine": machine_of(rows)})


if __name__ == "__main__":
    main()
