"""Hybrid solvers of two pendulums beside plain ones, whether they pay, and what smaller steps bring."""

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

FRAMES = 8  # of a film, in a step
STARTS = 4  # a reader can choose from
TESTED = 100
SCHEMES = ("heun", "rk3", "rk4", "dopri5")
STEPS = (0.2, 0.1, 0.05, 0.025)
Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Problem:
    """A pendulum, where it may start, and the big step it is solved with."""

    name: str
    system: Any
    low: tuple[float, ...]
    high: tuple[float, ...]
    dt: float = 0.2
    horizon: float = 10.0
    shown: float = 10.0
    width: int = 256
    trajectories: int = 300

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states ``[n, d]``."""
        return uniform(n, self.low, self.high, generator, dtype, device)

    def bobs(self, u: Tensor) -> Tensor:
        """Where the masses of states ``[..., d]`` are: ``[..., masses, 2]``, x to the right, y up."""
        if isinstance(self.system, systems.ElasticPendulum):
            angle, length = u[..., :1], u[..., 1:2]
        else:
            angle = u[..., : self.system.links]
            length = torch.ones_like(angle)
        places = torch.stack((length * angle.sin(), -length * angle.cos()), -1)
        return places.cumsum(-2)


PENDULUM = Problem(
    "elastic pendulum", systems.ElasticPendulum(length=3.0), (0.3, 3.0, 0, 0), (1.2, 3.8, 0, 0),
    shown=20.0,
)  # fmt: skip
CHAIN = Problem(
    "pendulum chain, 3 links", systems.PendulumChain(links=3), (0.1,) * 3 + (0.0,) * 3,
    (0.45,) * 3 + (0.0,) * 3, dt=0.3, horizon=12.0, shown=18.0, width=384, trajectories=500,
)  # fmt: skip


def run(seed: int, device: str, tell: Tell, small: bool) -> dict[str, Any]:
    """Fits, films and errors of both pendulums; a comparison; orders and energies of plain schemes."""
    less = lambda p: replace(p, width=48, trajectories=60, horizon=20 * p.dt, shown=20 * p.dt)
    problems = [less(p) if small else p for p in (PENDULUM, CHAIN)]
    found: dict[str, Any] = {}
    for i, (key, problem) in enumerate(zip(("pendulum", "chain"), problems)):
        lines = iter(range(8))  # fine data, errors, five candidates
        told = lambda what, i=i, lines=lines, problem=problem: tell(
            f"{problem.name}: {what}", 0.25 * i + 0.03 * next(lines, 7)
        )
        solver = _fitted(problem, seed, device, told)
        found[key] = _tried(problem, solver, seed)
        if key == "pendulum":
            kept = solver
    tell("does it pay?", 0.5)
    found["compare"] = _compared(problems[0], kept, seed, small, tell).to_json()
    tell("orders of plain schemes", 0.92)
    found["orders"] = _orders(problems[0], seed, device)
    tell("energy over a long time", 0.96)
    found["energy"] = _energy(seed, device, 200 if small else 2000)
    return found


def _fitted(problem: Problem, seed: int, device: str, told: Callable[[str], None]) -> HybridSolver:
    return fit(
        problem.system, dt=problem.dt, horizon=problem.horizon, correction="attns", width=problem.width,
        trajectories=problem.trajectories, sample=problem.sample, fine_dt=problem.dt / 16, seed=seed,
        device=device, progress=told,
    )  # fmt: skip


@torch.no_grad()
def _tried(problem: Problem, solver: HybridSolver, seed: int) -> dict[str, Any]:
    """The exact solution, plain RK4 and the hybrid from new starts: how far off they are, and a film."""
    like = next(solver.correction.parameters())
    generator = torch.Generator().manual_seed(seed + 2**42)
    u0 = problem.sample(TESTED, generator, like.dtype, like.device)
    n = round(problem.shown / problem.dt)
    grid = lambda k: torch.arange(n * k + 1, dtype=torch.float64, device=u0.device) * (problem.dt / k)
    exact = evolve(problem.system, u0, grid(4 * FRAMES), "dopri5", every=4).u
    ways = {
        "RK4": evolve(problem.system, u0, grid(1), "rk4").u,
        "AttNS": solver.solve(u0, problem.shown).u,
    }
    films = {"exact": exact, **{k: _between(problem.system, u, problem.dt) for k, u in ways.items()}}
    bobs = {name: problem.bobs(u) for name, u in films.items()}
    # Of the mass that is furthest off, [frames, tested].
    off = {k: (bobs[k] - bobs["exact"]).norm(dim=-1).amax(-1) for k in ways}
    chosen = solver.history[-1]
    return {
        "name": problem.name, "dt": problem.dt, "shown": problem.shown,
        "fitted_from": problem.trajectories, "fit_seconds": chosen["seconds"], "tested": TESTED,
        "off_at_end": {
            k: {"median": d[-1].median().item(), "largest": d[-1].max().item()} for k, d in off.items()
        },
        "drawn": {
            "step": problem.dt / FRAMES,
            "springs": isinstance(problem.system, systems.ElasticPendulum),
            "names": list(films),
            "points": {k: _rounded(_by_start(b.flatten(2)), 3) for k, b in bobs.items()},
            "off": {k: _rounded(_by_start(d), 5) for k, d in off.items()},
            "median_off": {k: d.median(1).values[::FRAMES].tolist() for k, d in off.items()},
        },
    }  # fmt: skip


def _by_start(x: Tensor) -> Tensor:
    """``[frames, tested, ...]`` of the starts that are shown, ``[starts, frames, ...]``."""
    return x[:, :STARTS].transpose(0, 1)


def _between(rate: Any, u: Tensor, dt: float) -> Tensor:
    """States ``[n + 1, ...]`` a step apart with `FRAMES` to a step: cubics with the rate's slopes."""
    slope = rate(0.0, u) * dt
    s = (torch.arange(FRAMES, dtype=u.dtype, device=u.device) / FRAMES).view(-1, 1, 1)
    a, b, da, db = (x.unsqueeze(1) for x in (u[:-1], u[1:], slope[:-1], slope[1:]))
    inside = (
        (1 + 2 * s) * (1 - s) ** 2 * a + s * (1 - s) ** 2 * da
        + s**2 * (3 - 2 * s) * b + s**2 * (s - 1) * db
    )  # fmt: skip
    return torch.cat((inside.flatten(0, 1), u[-1:]))


def _compared(problem: Problem, solver: HybridSolver, seed: int, small: bool, tell: Tell) -> Comparison:
    done = iter(0.5 + 0.42 * i / 20 for i in range(20))
    told = lambda what: tell(f"does it pay? {what}", next(done, 0.9))
    horizon = 5 * problem.dt if small else 4.0
    return compare(
        solver, horizon=horizon, sample=problem.sample, batch=100, compile=False, peers=not small,
        seed=seed + 1, progress=told,
    )  # fmt: skip


def _orders(problem: Problem, seed: int, device: str) -> dict[str, list[tuple[float, float]]]:
    """Root mean square errors after 4 time units, by scheme and step."""
    generator = torch.Generator().manual_seed(seed)
    u0 = problem.sample(20, generator, torch.float64, device)
    times = lambda n: torch.linspace(0, 4, n + 1, dtype=torch.float64)
    exact = evolve(problem.system, u0, times(1), "dopri5", rtol=1e-12, atol=1e-13).final
    solved = lambda scheme, n: evolve(problem.system, u0, times(n), scheme, every=n).final
    return {
        scheme: [(dt, _rms(solved(scheme, round(4 / dt)) - exact)) for dt in STEPS] for scheme in SCHEMES
    }


def _energy(seed: int, device: str, steps: int) -> dict[str, Any]:
    """Relative energy error of Hénon-Heiles, the largest of ten orbits, at fifty times."""
    system, lines = systems.HenonHeiles(), {}
    u0 = system.sample(10, torch.Generator().manual_seed(seed), torch.float64, device)
    times = 0.3 * torch.arange(steps + 1, dtype=torch.float64)
    for scheme in ("leapfrog", "rk4"):
        solved = evolve(system, u0, times, scheme, every=steps // 50)
        error = ((system.energy(solved.u) - system.energy(u0)) / system.energy(u0)).abs().amax(-1)
        lines[scheme] = solved.t[1:].tolist(), error[1:].tolist()
    return {"steps": steps, "lines": lines}


def show(page: Any, found: dict[str, Any]) -> None:
    """Adds this part to a page."""
    from attractor.report import live

    page.script(Path(__file__).with_name("pendulum.js").read_text())
    pendulum, chain = found["pendulum"], found["chain"]
    page.heading("One big step, three ways")
    _film(page, "pendulum", pendulum)
    far = pendulum["off_at_end"]
    page.text(
        f"A ball on a spring, solved with steps of {pendulum['dt']:g}: plain RK4 drifts away and is "
        f"{far['RK4']['median']:.2g} off after {pendulum['shown']:g} time units (the median of "
        f"{pendulum['tested']} new starts), while AttNS, the same scheme with a correction computed "
        f"from its slope, is {far['AttNS']['median']:.2g} off. The correction was fitted in "
        f"{pendulum['fit_seconds']:.0f} s to {pendulum['fitted_from']} other trajectories; between "
        "steps the film follows cubics."
    )
    page.heading("The same with a chain")
    _film(page, "chain", chain)
    far = chain["off_at_end"]
    page.text(
        f"Three rods, steps of {chain['dt']:g}: after {chain['shown']:g} time units a ball is "
        f"{far['RK4']['median']:.2g} off with plain RK4, which irons the kinks out, and "
        f"{far['AttNS']['median']:.2g} with AttNS (medians; at worst {far['RK4']['largest']:.2g} and "
        f"{far['AttNS']['largest']:.2g}). The chain is chaotic, so every error grows in the end: a "
        "correction only makes it start smaller."
    )
    compared = Comparison.from_json(found["compare"])
    page.heading("Does it pay?")
    page.plot("Error against seconds for each method", live.work_precision(compared), 440)
    page.text(
        "Each line is a method with smaller and smaller steps (dotted: tolerances), and the star is the "
        "hybrid solver. A line that crosses the star's height to its left is faster. For the elastic "
        f"pendulum on this machine: {compared.verdict}. Here m is the number of plain steps that reach "
        "the error of a hybrid step, and m* is the cost of a hybrid step in plain steps."
    )
    page.heading("What smaller steps bring, and what they do not")
    orders = {k: (list(STEPS), [error for _, error in v]) for k, v in found["orders"].items()}
    figure = live.lines(orders, x="step", y="root mean square error", log="xy", marks=True)
    figure["layout"]["xaxis"]["tickvals"] = list(STEPS)
    page.plot("Error against step for four schemes", figure, 380)
    page.text(
        "Halve the step and the error falls by 2 to the power of the scheme's order: the steeper, the "
        "higher. A correction is the other way to the bottom of this picture, without the smaller step."
    )
    energy = found["energy"]
    lines = live.lines(energy["lines"], x="time", y="relative energy error", log="y")
    page.plot("Energy error over time", lines, 340)
    last = {k: line[1][-1] for k, line in energy["lines"].items()}
    page.text(
        f"Over {energy['steps']:,} steps of a star in a galaxy (Hénon-Heiles) RK4 loses energy with "
        f"every step, {_percent(last['rk4'])} of it in the end. Leapfrog is symplectic: its error "
        f"swings, by {_percent(max(energy['lines']['leapfrog'][1]))} at most, and does not grow."
    )


def told(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal: what, and what was found."""
    rows = []
    for key in ("pendulum", "chain"):
        one = found[key]
        far = {k: f"{v['median']:.2g}" for k, v in one["off_at_end"].items()}
        what = f"RK4 is {far['RK4']} off after t = {one['shown']:g}, AttNS {far['AttNS']}"
        rows.append((f"{one['name']}, dt {one['dt']:g}", what))
    return [*rows, ("does it pay?", found["compare"]["verdict"])]


def _film(page: Any, name: str, found: dict[str, Any]) -> None:
    from attractor.report import live
    from attractor.report.page import script_json

    drawn = {k: v for k, v in found["drawn"].items() if k != "median_off"}
    last = len(drawn["points"]["exact"][0]) - 1
    starts = {str(i): f"{i + 1}" for i in range(len(drawn["points"]["exact"]))}
    controls = (
        live.button(f"{name}-play", "Pause")
        + live.slider(f"{name}-time", "time", 0, last, 0)
        + live.choice(f"{name}-start", "start", starts)
    )
    page.live(
        f"Film of the {found['name']}: exact, plain RK4, AttNS",
        f'<div class="controls">{controls}</div><canvas id="{name}-canvas" class="film"></canvas>'
        f'<div id="{name}-numbers" class="numbers"></div>',
        f'attractorPendulum("{name}", {script_json(drawn)});',
    )


def _rounded(x: Tensor, digits: int) -> list[Any]:
    """Nested lists with few digits, short as JSON."""

    def short(value: Any) -> Any:
        return [short(v) for v in value] if isinstance(value, list) else round(value, digits)

    return short(x.tolist())


def _rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item()


def _percent(part: float) -> str:
    return f"{100 * part:.2g}\u00a0%"
