"""Hybrid and plain solvers of two pendulums, their costs, and the effect of smaller steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.core import evolve
from attractor.ode import HybridSolver, fit, systems
from attractor.ode.compare import Comparison, compare
from attractor.ode.systems.system import uniform

FRAMES = 8  # frames of a film per step
STARTS = 4  # initial states to choose from
TEST_TRAJECTORIES = 100
SCHEMES = ("heun", "rk3", "rk4", "dopri5")
STEPS = (0.2, 0.1, 0.05, 0.025)
Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Problem:
    """A pendulum, the range of its initial states, and the step of its solvers."""

    name: str
    system: Any
    low: tuple[float, ...]
    high: tuple[float, ...]
    dt: float = 0.2
    horizon: float = 10.0
    film_end: float = 10.0
    width: int = 256
    trajectories: int = 300

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return n random initial states ``[n, d]``."""
        return uniform(n, self.low, self.high, generator, dtype, device)

    def bobs(self, u: Tensor) -> Tensor:
        """Return positions ``[..., masses, 2]`` of states ``[..., d]``, with x to the right and y up."""
        if isinstance(self.system, systems.ElasticPendulum):
            angle, length = u[..., :1], u[..., 1:2]
        else:
            angle = u[..., : self.system.links]
            length = torch.ones_like(angle)
        places = torch.stack((length * angle.sin(), -length * angle.cos()), -1)
        return places.cumsum(-2)


PENDULUM = Problem(
    "elastic pendulum", systems.ElasticPendulum(length=3.0), (0.3, 3.0, 0, 0), (1.2, 3.8, 0, 0),
    film_end=20.0,
)  # fmt: skip
CHAIN = Problem(
    "pendulum chain, 3 links", systems.PendulumChain(links=3), (0.1,) * 3 + (0.0,) * 3,
    (0.45,) * 3 + (0.0,) * 3, dt=0.3, horizon=12.0, film_end=18.0, width=384, trajectories=500,
)  # fmt: skip


def run(seed: int, device: str, tell: Tell, small: bool) -> dict[str, Any]:
    """Fit and test both pendulums, compare solvers, and measure orders and energies of schemes."""
    less = lambda p: replace(p, width=48, trajectories=60, horizon=20 * p.dt, film_end=20 * p.dt)
    problems = [less(p) if small else p for p in (PENDULUM, CHAIN)]
    results: dict[str, Any] = {}
    for i, (key, problem) in enumerate(zip(("pendulum", "chain"), problems)):
        lines = iter(range(8))  # fine data, errors, five candidates
        report = lambda what, i=i, lines=lines, problem=problem: tell(
            f"{problem.name}: {what}", 0.25 * i + 0.03 * next(lines, 7)
        )
        solver = _fit(problem, seed, device, report)
        results[key] = _test(problem, solver, seed)
        if key == "pendulum":
            pendulum_solver = solver
    tell("does it pay?", 0.5)
    results["compare"] = _compare(problems[0], pendulum_solver, seed, small, tell).to_json()
    tell("orders of plain schemes", 0.92)
    results["orders"] = _orders(problems[0], seed, device)
    tell("energy over a long time", 0.96)
    results["energy"] = _energy(seed, device, 200 if small else 2000)
    return results


def _fit(problem: Problem, seed: int, device: str, report: Callable[[str], None]) -> HybridSolver:
    return fit(
        problem.system, dt=problem.dt, horizon=problem.horizon, correction="attns", width=problem.width,
        trajectories=problem.trajectories, sample=problem.sample, fine_dt=problem.dt / 16, seed=seed,
        device=device, progress=report,
    )  # fmt: skip


@torch.no_grad()
def _test(problem: Problem, solver: HybridSolver, seed: int) -> dict[str, Any]:
    """Return errors and films of plain RK4 and the hybrid from new initial states."""
    like = next(solver.correction.parameters())
    generator = torch.Generator().manual_seed(seed + 2**42)
    u0 = problem.sample(TEST_TRAJECTORIES, generator, like.dtype, like.device)
    n = round(problem.film_end / problem.dt)
    grid = lambda k: torch.arange(n * k + 1, dtype=torch.float64, device=u0.device) * (problem.dt / k)
    exact = evolve(problem.system, u0, grid(4 * FRAMES), "dopri5", every=4).u
    ways = {
        "RK4": evolve(problem.system, u0, grid(1), "rk4").u,
        "AttNS": solver.solve(u0, problem.film_end).u,
    }
    films = {"exact": exact, **{k: _between(problem.system, u, problem.dt) for k, u in ways.items()}}
    bobs = {name: problem.bobs(u) for name, u in films.items()}
    # The largest distance of a mass, [frames, trajectories].
    distances = {k: (bobs[k] - bobs["exact"]).norm(dim=-1).amax(-1) for k in ways}
    last_row = solver.history[-1]
    return {
        "name": problem.name, "dt": problem.dt, "shown": problem.film_end,
        "fitted_from": problem.trajectories, "fit_seconds": last_row["seconds"],
        "tested": TEST_TRAJECTORIES,
        "off_at_end": {
            k: {"median": d[-1].median().item(), "largest": d[-1].max().item()}
            for k, d in distances.items()
        },
        "drawn": {
            "step": problem.dt / FRAMES,
            "springs": isinstance(problem.system, systems.ElasticPendulum),
            "names": list(films),
            "points": {k: _round(_by_start(b.flatten(2)), 3) for k, b in bobs.items()},
            "off": {k: _round(_by_start(d), 5) for k, d in distances.items()},
            "median_off": {k: d.median(1).values[::FRAMES].tolist() for k, d in distances.items()},
        },
    }  # fmt: skip


def _by_start(x: Tensor) -> Tensor:
    """Select the trajectories of a film: ``[frames, all, ...]`` becomes ``[starts, frames, ...]``."""
    return x[:, :STARTS].transpose(0, 1)


def _between(rate: Any, u: Tensor, dt: float) -> Tensor:
    """Interpolate states ``[n + 1, ...]`` with `FRAMES` per step by cubic Hermite polynomials."""
    slope = rate(0.0, u) * dt
    s = (torch.arange(FRAMES, dtype=u.dtype, device=u.device) / FRAMES).view(-1, 1, 1)
    a, b, da, db = (x.unsqueeze(1) for x in (u[:-1], u[1:], slope[:-1], slope[1:]))
    inside = (
        (1 + 2 * s) * (1 - s) ** 2 * a + s * (1 - s) ** 2 * da
        + s**2 * (3 - 2 * s) * b + s**2 * (s - 1) * db
    )  # fmt: skip
    return torch.cat((inside.flatten(0, 1), u[-1:]))


def _compare(problem: Problem, solver: HybridSolver, seed: int, small: bool, tell: Tell) -> Comparison:
    fractions = iter(0.5 + 0.42 * i / 20 for i in range(20))
    report = lambda what: tell(f"does it pay? {what}", next(fractions, 0.9))
    horizon = 5 * problem.dt if small else 4.0
    return compare(
        solver, horizon=horizon, sample=problem.sample, batch=100, compile=False, peers=not small,
        seed=seed + 1, progress=report,
    )  # fmt: skip


def _orders(problem: Problem, seed: int, device: str) -> dict[str, list[tuple[float, float]]]:
    """Return root mean square errors after 4 time units, by scheme and step."""
    generator = torch.Generator().manual_seed(seed)
    u0 = problem.sample(20, generator, torch.float64, device)
    times = lambda n: torch.linspace(0, 4, n + 1, dtype=torch.float64)
    exact = evolve(problem.system, u0, times(1), "dopri5", rtol=1e-12, atol=1e-13).final
    final = lambda scheme, n: evolve(problem.system, u0, times(n), scheme, every=n).final
    return {
        scheme: [(dt, _rms(final(scheme, round(4 / dt)) - exact)) for dt in STEPS] for scheme in SCHEMES
    }


def _energy(seed: int, device: str, steps: int) -> dict[str, Any]:
    """Return the largest relative energy error of ten Hénon-Heiles orbits at fifty times."""
    system, lines = systems.HenonHeiles(), {}
    u0 = system.sample(10, torch.Generator().manual_seed(seed), torch.float64, device)
    times = 0.3 * torch.arange(steps + 1, dtype=torch.float64)
    for scheme in ("leapfrog", "rk4"):
        solution = evolve(system, u0, times, scheme, every=steps // 50)
        error = ((system.energy(solution.u) - system.energy(u0)) / system.energy(u0)).abs().amax(-1)
        lines[scheme] = solution.t[1:].tolist(), error[1:].tolist()
    return {"steps": steps, "lines": lines}


def show(page: Any, results: dict[str, Any]) -> None:
    """Add this part to a page."""
    from attractor.report import live

    page.script(Path(__file__).with_name("pendulum.js").read_text())
    pendulum, chain = results["pendulum"], results["chain"]
    page.heading("Large steps with and without a correction")
    _film(page, "pendulum", pendulum)
    far = pendulum["off_at_end"]
    page.text(
        f"A ball on a spring, solved with steps of {pendulum['dt']:g}. The error of plain RK4 is "
        f"{far['RK4']['median']:.2g} after {pendulum['shown']:g} time units (the median of "
        f"{pendulum['tested']} new initial states). The error of AttNS, the same scheme with a "
        f"correction computed from its slope, is {far['AttNS']['median']:.2g}. The correction was "
        f"fitted in {pendulum['fit_seconds']:.0f} s to {pendulum['fitted_from']} other trajectories; "
        "between steps the film interpolates with cubics."
    )
    page.heading("A chain of pendulums")
    _film(page, "chain", chain)
    far = chain["off_at_end"]
    page.text(
        f"Three rods, solved with steps of {chain['dt']:g}. After {chain['shown']:g} time units the "
        f"error of a ball is {far['RK4']['median']:.2g} with plain RK4, which smooths the motion, and "
        f"{far['AttNS']['median']:.2g} with AttNS (medians; the largest errors are "
        f"{far['RK4']['largest']:.2g} and {far['AttNS']['largest']:.2g}). The chain is chaotic, so "
        "every error grows with time; a correction only makes it smaller at first."
    )
    comparison = Comparison.from_json(results["compare"])
    page.heading("Does it pay?")
    page.plot("Error against seconds for each method", live.work_precision(comparison), 440)
    page.text(
        "Each line is a method with several step sizes (dotted: tolerances), and the star is the hybrid "
        "solver. A method is faster if its line reaches the error of the star to the left of it. For "
        f"the elastic pendulum on this machine: {comparison.verdict}. Here m is the number of plain "
        "steps that reach the error of a hybrid step, and m* is the cost of a hybrid step in plain "
        "steps."
    )
    page.heading("The effect of smaller steps")
    orders = {k: (list(STEPS), [error for _, error in v]) for k, v in results["orders"].items()}
    figure = live.lines(orders, x="step", y="root mean square error", log="xy", marks=True)
    figure["layout"]["xaxis"]["tickvals"] = list(STEPS)
    page.plot("Error against step for four schemes", figure, 380)
    page.text(
        "Halving the step divides the error by 2 to the power of the scheme's order, so that lines of "
        "higher order are steeper. A correction reduces the error without smaller steps."
    )
    energy = results["energy"]
    lines = live.lines(energy["lines"], x="time", y="relative energy error", log="y")
    page.plot("Energy error over time", lines, 340)
    last = {k: line[1][-1] for k, line in energy["lines"].items()}
    page.text(
        f"Over {energy['steps']:,} steps of a star in a galaxy (Hénon-Heiles) RK4 loses energy with "
        f"every step, {_percent(last['rk4'])} in total. Leapfrog is symplectic: its error oscillates, "
        f"by {_percent(max(energy['lines']['leapfrog'][1]))} at most, and does not grow."
    )


def summary(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, value) lines for the terminal."""
    rows = []
    for key in ("pendulum", "chain"):
        one = results[key]
        far = {k: f"{v['median']:.2g}" for k, v in one["off_at_end"].items()}
        what = f"error after t = {one['shown']:g}: RK4 {far['RK4']}, AttNS {far['AttNS']}"
        rows.append((f"{one['name']}, dt {one['dt']:g}", what))
    return [*rows, ("does it pay?", results["compare"]["verdict"])]


def _film(page: Any, name: str, results: dict[str, Any]) -> None:
    from attractor.report import live
    from attractor.report.page import script_json

    data = {k: v for k, v in results["drawn"].items() if k != "median_off"}
    last = len(data["points"]["exact"][0]) - 1
    starts = {str(i): f"{i + 1}" for i in range(len(data["points"]["exact"]))}
    controls = (
        live.button(f"{name}-play", "Pause")
        + live.slider(f"{name}-time", "time", 0, last, 0)
        + live.choice(f"{name}-start", "start", starts)
    )
    page.live(
        f"Film of the {results['name']}: exact, plain RK4, AttNS",
        f'<div class="controls">{controls}</div><canvas id="{name}-canvas" class="film"></canvas>'
        f'<div id="{name}-numbers" class="numbers"></div>',
        f'attractorPendulum("{name}", {script_json(data)});',
    )


def _round(x: Tensor, digits: int) -> list[Any]:
    """Return nested lists of rounded numbers, which are short as JSON."""

    def short(value: Any) -> Any:
        return [short(v) for v in value] if isinstance(value, list) else round(value, digits)

    return short(x.tolist())


def _rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item()


def _percent(part: float) -> str:
    return f"{100 * part:.2g}\u00a0%"
