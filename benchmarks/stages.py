"""Corrections that see the stages: the linear map on all systems, and networks beside other corrections.

Cases "linear-SCHEME-SYSTEM" fit a linear map of the stages. Cases "network-SYSTEM-WIDTH-CORRECTION" fit a
network with five seeds. All have errors on 1,000 fresh trajectories beside plain steps of dt and dt / 2,
the cost m* of a compiled hybrid step in compiled plain steps, and the verdict of `compare`, compiled:

    python -m benchmarks.stages --workers 8 --threads 2 --stop 3000
    python -m benchmarks.stages --only linear trained 4096 --device cuda --folder out/stages-cuda

The step sizes are those at which plain rk4 has a relative error of 1e-3 to 1e-2 at the end, except those of
Robertson, which stability bounds, and of long chains, whose errors are larger. dop853 has three times the rate
calls of rk4, and takes steps three times as long.

Ten links: 1,024 random features leave a share of 0.3 of the error of a step, two half steps 0.07. Four times the
data, half the step, or features of neighbouring links only, change the 0.3 by at most 0.03. With 256 features,
1,000 steps of Adam bring it from 0.45 to 0.34; cases "trained" take more steps, and need a GPU.
"""

import argparse
import math
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attractor import HybridSolver, compare, evolve, fit, systems
from attractor.ode import Ridge
from attractor.ode.comparison import Comparison, methods_of, reach
from attractor.ode.pairs import one_step
from attractor.ode.trajectories import Run
from benchmarks.cases import Measure, add_options, containing, machine_of, name_of, run
from benchmarks.fresh import Fresh, seconds
from benchmarks.results import save

# system, step of rk4, number of steps
SYSTEMS: dict[str, tuple[Any, float, int]] = {
    "elastic pendulum": (systems.ElasticPendulum(), 0.05, 240),
    "2-link pendulum": (systems.PendulumChain(2), 0.08, 60),
    "three bodies": (systems.ThreeBody(), 0.1, 42),
    "Lorenz": (systems.Lorenz(), 0.02, 102),
    "van der Pol": (systems.VanDerPol(), 0.2, 30),
    "Hénon-Heiles": (systems.HenonHeiles(), 0.4, 48),
    "spring-mass": (systems.SpringMass(), 0.05, 204),
    "harmonic oscillator": (systems.HarmonicOscillator(), 0.4, 60),
    "logistic": (systems.Logistic(), 1.5, 6),
    "Robertson": (systems.Robertson(), 3.5e-4, 600),
    "5-link pendulum": (systems.PendulumChain(5), 0.1, 30),
    "10-link pendulum": (systems.PendulumChain(10), 0.1, 30),
    "elastic pendulum, dt 0.1": (systems.ElasticPendulum(), 0.1, 120),
    "elastic pendulum, dt 0.2": (systems.ElasticPendulum(), 0.2, 60),
}
TEN, ELASTIC = list(SYSTEMS)[:10], list(SYSTEMS)[-2:]
WIDTHS = {"5-link pendulum": 1024, "10-link pendulum": 1024}  # of networks; 256 elsewhere
TRAJECTORIES = {"5-link pendulum": 1500, "10-link pendulum": 3000}  # to learn from; 1,000 elsewhere
CORRECTIONS: dict[str, dict[str, Any]] = {
    "stages": {"correction": "stages"},
    "attns": {"correction": "attns"},
    "attns_state": {"correction": "attns", "options": {"state": True}},
    "neurvec": {"correction": "neurvec"},
    "csm": {"correction": "csm"},
    "fsnet": {"correction": "fsnet"},
    "attns_m": {"correction": "attns_m"},
    "trained": {"correction": "stages", "recipe": Ridge(adam_steps=20_000)},
}
SEEDS = range(5)
BUDGET = 30.0  # seconds after which a fit tries no further scale of the random weights
RIVALS = ("rk4", "dopri5", "dop853")
TIMED_STEPS = {1: 5_000, 1_000: 1_000}  # for m*, by batch: so many that the call itself does not count


def linear(name: str, scheme: str, device: str) -> dict[str, Any]:
    """A linear map of the stages."""
    system, dt, steps = SYSTEMS[name]
    dt, steps = (dt, steps) if scheme == "rk4" else (3 * dt, steps // 3)
    fresh = Fresh.draw(system, dt, dt * steps, device=device)
    options: Any = {"dt": dt, "horizon": dt * steps, "scheme": scheme, "device": device}
    solver = fit(system, correction="stages", width=0, **options)
    found: dict[str, Any] = {batch: compared(solver, dt * steps, batch) for batch in TIMED_STEPS}
    return {
        "kind": "linear", "system": name, **options, **plain_errors(fresh, scheme),
        "share": share_of_step(solver, fresh), "hybrid": fresh.errors(fresh.hybrid(solver)),
        "fit_seconds": solver.history[-1]["seconds"], "weights": weights_of(solver),
        "m_star": {batch: cost_of_step(solver, fresh, batch) for batch in TIMED_STEPS},
        "comparisons": {batch: _short(comparison) for batch, comparison in found.items()},
    }  # fmt: skip


def weights_of(solver: HybridSolver) -> list[int]:
    """Return the number of weights of a linear map that are not 0, and of all."""
    weight = solver.correction.net.head.weight
    return [int((weight != 0).sum()), weight.numel()]


def network(name: str, correction: str, width: int, seeds: Sequence[int], device: str) -> dict[str, Any]:
    """A correction with a network, once per seed; the time is that of the solver with the least error."""
    system, dt, steps = SYSTEMS[name]
    fresh = Fresh.draw(system, dt, dt * steps, device=device)
    fixed: Any = {"dt": dt, "horizon": dt * steps, "width": width, "device": device}
    fixed["trajectories"] = TRAJECTORIES.get(name, 1000)
    budget = BUDGET if width < 4096 else 0.0
    solvers = [
        fit(system, seed=seed, budget=budget, **CORRECTIONS[correction], **fixed) for seed in seeds
    ]
    errors = [fresh.errors(fresh.hybrid(solver)) for solver in solvers]
    mse = [e["mse"] if e["lost"] == 0 else math.inf for e in errors]
    best = solvers[mse.index(min(mse))]
    comparison = compared(best, dt * steps, 1000)
    by_seed = [at_error(comparison, error) for error in mse]
    return {
        "kind": "network", "system": name, "correction": correction, **fixed,
        **plain_errors(fresh, "rk4"), "hybrid": errors,
        "share": [share_of_step(solver, fresh) for solver in solvers],
        "fit_seconds": [solver.history[-1]["seconds"] for solver in solvers],
        "m": [c.m for c in by_seed], "gain": [c.gain for c in by_seed],
        "m_star": {1000: cost_of_step(best, fresh, 1000)} if correction == "stages" else {},
        "comparisons": {1000: _short(comparison)},
    }  # fmt: skip


def compared(solver: HybridSolver, horizon: float, batch: int) -> Comparison:
    """Return what `compare` says, compiled, about a batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about tolerances that other libraries give up at
        return compare(solver, horizon=horizon, batch=batch, schemes=RIVALS)


def at_error(comparison: Comparison, error: float) -> Comparison:
    """Return the comparison for a solver of the same cost with a larger mean square error."""
    about, ways = comparison.about, [comparison.plain(m) for m in methods_of(comparison.points)]
    reached = [point for way in ways if (point := reach(way, error)) is not None]
    own = next((p for p in reached if p.method == about["scheme"]), None)
    return replace(
        comparison, hybrid=replace(comparison.hybrid, error=error),
        m=about["dt"] / own.setting if own else math.inf,
        rival=min(reached, key=lambda p: p.seconds, default=None),
    )  # fmt: skip


def cost_of_step(solver: HybridSolver, fresh: Fresh, batch: int) -> dict[str, float]:
    """Return m*: the time of a compiled hybrid step over a plain one, without and with the guard.

    The guard tests each state but replaces no step, because its region is unbounded here.
    """
    n, u0 = TIMED_STEPS[batch], fresh.u0[:batch]
    t = torch.arange(n + 1, dtype=torch.float64, device=u0.device) * solver.dt
    alone = HybridSolver(solver.rate, solver.scheme, solver.correction, solver.dt)
    solve: Any = {"every": n, "compile": True}
    with torch.no_grad(), _unbounded(solver):
        took = seconds(
            {
                "plain": lambda: evolve(solver.rate, u0, t, solver.scheme, **solve),
                "unguarded": lambda: alone.solve(u0, n * solver.dt, **solve),
                "guarded": lambda: solver.solve(u0, n * solver.dt, **solve),
            }
        )
        lost = int((~alone.solve(u0, n * solver.dt, **solve).ok).sum())
    plain = took["plain"]["seconds"]
    return {
        "plain_step_seconds": plain / n,
        "unguarded": took["unguarded"]["seconds"] / plain,
        "guarded": took["guarded"]["seconds"] / plain,
        "lost": lost,
    }


@contextmanager
def _unbounded(solver: HybridSolver) -> Any:
    assert solver.trust is not None
    limit = solver.trust.limit.clone()
    solver.trust.limit.fill_(math.inf)
    yield
    solver.trust.limit.copy_(limit)


def plain_errors(fresh: Fresh, scheme: str) -> dict[str, Any]:
    """Return the errors of plain steps of dt and dt / 2."""
    return {
        "plain": fresh.errors(fresh.plain(scheme)), "half": fresh.errors(fresh.plain(scheme, 2))
    }  # fmt: skip


def share_of_step(solver: HybridSolver, fresh: Fresh) -> dict[str, float]:
    """Return the share of the error of one plain step that two half steps, and the hybrid, leave."""
    scheme, dt = solver.scheme, solver.dt
    pairs = one_step(solver.rate, scheme, dt, [Run(0.0, fresh.truth)], False, stages=True)
    with torch.no_grad():
        left = pairs.error - solver.correction(pairs.step())
        u = pairs.u
        for i in range(2):
            u = u + dt / 2 * scheme.slope(solver.rate, pairs.t[0] + i * dt / 2, u, dt / 2)
    halves = pairs.u + dt * pairs.slope + pairs.error - u
    size = lambda error: (error / fresh.scale).square().mean().sqrt().item()
    plain = size(pairs.error)
    return {"halves": size(halves) / plain, "hybrid": size(left) / plain}


def _short(comparison: Comparison) -> dict[str, Any]:
    return {key: x for key, x in comparison.to_json().items() if key not in ("points", "about")}


def cases(device: str, most: int) -> dict[str, Measure]:
    """All cases, the most important first, with at most so many seeds."""
    of_network = lambda name, correction, width, seeds: (
        name_of("network", name, width, correction),
        partial(network, name, correction, width, seeds[:most], device),
    )
    nets = ["5-link pendulum", "10-link pendulum", *TEN[:5]]
    lines = lambda names, scheme: [
        (name_of("linear", scheme, name), partial(linear, name, scheme, device)) for name in names
    ]
    return dict(
        [
            of_network("5-link pendulum", "stages", 1024, SEEDS),
            *lines(ELASTIC, "rk4"),
            *lines(TEN, "dop853"),
            *lines(TEN, "rk4"),
            *(of_network(name, "stages", WIDTHS.get(name, 256), SEEDS) for name in nets),
            *lines(nets[:2], "rk4"),
            *(of_network(name, "stages", width, SEEDS) for width in (64, 256) for name in nets[:2]),
            *(of_network(name, other, WIDTHS.get(name, 256), SEEDS) for other in CORRECTIONS
              for name in reversed(nets) if other != "trained"),
            *(of_network(name, "trained", 1024, SEEDS[:3]) for name in reversed(nets[:2])),
            *(of_network(name, "stages", 4096, SEEDS[:1]) for name in nets[:2]),
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name contains a text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds per network")
    add_options(parser, "out/stages")
    options = parser.parse_args()
    rows = run("stages", containing(options.only, cases(options.device, options.seeds)), options)
    if rows is None:
        return
    lines = [row for row in rows if row.get("kind") == "linear"]
    pays = sum(row["comparisons"]["1000"]["pays"] for row in lines)
    print(f"the linear map of the stages pays in {pays} of {len(lines)} cases at batch 1,000")
    name = "stages" if options.device == "cpu" else "stages_gpu"
    save(name, {"threads": options.threads, "rows": rows, "machine": machine_of(rows)})


if __name__ == "__main__":
    main()
