"""`at.tune` on twenty-five equations: the fastest way to three errors, beside SciPy and diffrax.

Run ``python -m benchmarks.tune`` for all of them, which takes hours on two cores, or a part of them with
``--only NAME --errors 1e-6 --batches 1000``; ``--workers N`` runs N cases at a time with ``--threads``
threads each. Every case has its own result, and ``--merge`` joins those of earlier runs.

SciPy and diffrax solve for the batch as one state, which is the fastest way to use them, with the largest
tolerance that reaches the error on trajectories of the same distribution. Radau takes batches of one only,
since its Jacobian is dense. diffrax is left out where it is not installed.
"""

import argparse
import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attractor as at
from attractor import systems
from attractor.core.step import with_parameters
from attractor.ode.jax_rates import jax_rate
from attractor.ode.samples import initial_states
from benchmarks.cases import add_options, machine_of, run
from benchmarks.results import save

F64 = {"dtype": torch.float64}
ERRORS = (1e-3, 1e-6, 1e-9)
BATCHES = (1, 1_000, 100_000)
PEER_BATCH = 1_000  # trajectories with which the tolerances of peers are chosen


@dataclass(frozen=True)
class Case:
    """An equation, and how long it is followed."""

    rate: Callable[..., Tensor]
    horizon: float
    sample: Callable[..., Tensor] | None = None
    parameters: Callable[..., Tensor] | None = None
    period: float | None = None
    chosen: bool = False  # by us, and not used while the search was written


def uniform(*bounds: tuple[float, float]) -> Callable[..., Tensor]:
    """A sampler of states, each component between its bounds."""
    low, high = torch.tensor(bounds, **F64).unbind(-1)

    def draw(n: int, generator: torch.Generator) -> Tensor:
        return low + (high - low) * torch.rand(n, len(bounds), generator=generator, **F64)

    return draw


def lotka_volterra(t: Any, u: Tensor, p: Tensor) -> Tensor:
    (x, y), (a, b, c, d) = u.unbind(-1), p.unbind(-1)
    return torch.stack((x * (a - b * y), y * (c * x - d)), -1)


def fitzhugh_nagumo(t: Any, u: Tensor, p: Tensor) -> Tensor:
    (v, w), (current, a) = u.unbind(-1), p.unbind(-1)
    return torch.stack((v - v**3 / 3 - w + current, 0.08 * (v + a - 0.8 * w)), -1)


def two_link(t: Any, u: Tensor, p: Tensor) -> Tensor:
    (a, b, da, db), (m1, m2, l1, l2) = u.unbind(-1), p.unbind(-1)
    g, turn = 9.8, a - b
    bottom = 2 * m1 + m2 - m2 * (2 * turn).cos()
    first = -g * (2 * m1 + m2) * a.sin() - m2 * g * (a - 2 * b).sin()
    first = first - 2 * turn.sin() * m2 * (db**2 * l2 + da**2 * l1 * turn.cos())
    second = da**2 * l1 * (m1 + m2) + g * (m1 + m2) * a.cos() + db**2 * l2 * m2 * turn.cos()
    return torch.stack((da, db, first / (l1 * bottom), 2 * turn.sin() * second / (l2 * bottom)), -1)


def duffing(t: Any, u: Tensor) -> Tensor:
    x, v = u.unbind(-1)
    return torch.stack((v, x - x**3 - 0.3 * v + 0.5 * torch.cos(1.2 * t) * torch.ones_like(x)), -1)


def planets(t: Any, u: Tensor) -> Tensor:
    """Two planets of a thousandth of the mass of their sun, which stands still."""
    one, two, v, w = u.split(2, -1)
    pull = lambda x: -x / x.square().sum(-1, keepdim=True) ** 1.5
    between = 1e-3 * pull(one - two)
    return torch.cat((v, w, pull(one) + between, pull(two) - between), -1)


def planets_at(n: int, generator: torch.Generator) -> Tensor:
    angles = 2 * math.pi * torch.rand(n, 2, generator=generator, **F64)
    radii = torch.tensor([1.0, 1.8], **F64) + 0.1 * torch.rand(n, 2, generator=generator, **F64)
    at_angle = torch.stack((angles.cos(), angles.sin()), -1) * radii[..., None]
    speed = torch.stack((-angles.sin(), angles.cos()), -1) / radii[..., None].sqrt()
    return torch.cat((at_angle.flatten(1), speed.flatten(1)), -1)


def hires(t: Any, u: Tensor) -> Tensor:
    a, b, c, d, e, f, g, h = u.unbind(-1)
    return torch.stack(
        (-1.71 * a + 0.43 * b + 8.32 * c + 0.0007, 1.71 * a - 8.75 * b,
         -10.03 * c + 0.43 * d + 0.035 * e, 8.32 * b + 1.71 * c - 1.12 * d,
         -1.745 * e + 0.43 * f + 0.43 * g, -280 * f * h + 0.69 * d + 1.71 * e - 0.43 * f + 0.69 * g,
         280 * f * h - 1.81 * g, -280 * f * h + 1.81 * g), -1
    )  # fmt: skip


def burgers(t: Any, u: Tensor) -> Tensor:
    n = u.shape[-1]
    left, right = u.roll(1, -1), u.roll(-1, -1)
    return -(right**2 - left**2) * n / 4 + 0.02 * (right - 2 * u + left) * n**2


def korteweg_de_vries(t: Any, u: Tensor) -> Tensor:
    h = 20.0 / u.shape[-1]
    r, l, rr, ll = u.roll(-1, -1), u.roll(1, -1), u.roll(-2, -1), u.roll(2, -1)
    return -(u + r + l) / 3 * 6 * (r - l) / (2 * h) - (rr - 2 * r + 2 * l - ll) / (2 * h**3)


def waves(points: int, length: float, size: float) -> Callable[..., Tensor]:
    def draw(n: int, generator: torch.Generator) -> Tensor:
        x = torch.arange(points, **F64) * (2 * math.pi / points)
        phases = 2 * math.pi * torch.rand(n, 2, generator=generator, **F64)
        return size * ((x + phases[:, :1]).sin() + 0.5 * (2 * x + phases[:, 1:]).cos())

    return draw


def wire(t: Any, u: Tensor) -> Tensor:
    """A charged particle around a straight wire: the field of Biot and Savart."""
    x, v = u.split(3, -1)
    around = x[..., 0] ** 2 + x[..., 1] ** 2
    zero = torch.zeros_like(around)
    field = torch.stack((-x[..., 1] / around, x[..., 0] / around, zero), -1)
    return torch.cat((v, torch.linalg.cross(v, field)), -1)


def brusselator(t: Any, u: Tensor) -> Tensor:
    x, y = u.unbind(-1)
    return torch.stack((1 + x**2 * y - 4 * x, 3 * x - x**2 * y), -1)


def roessler(t: Any, u: Tensor) -> Tensor:
    x, y, z = u.unbind(-1)
    return torch.stack((-y - z, x + 0.2 * y, 0.2 + z * (x - 5.7)), -1)


def epidemic(t: Any, u: Tensor, p: Tensor) -> Tensor:
    (s, i, _), (spread, recover) = u.unbind(-1), p.unbind(-1)
    new, over = spread * s * i, recover * i
    return torch.stack((-new, new - over, over), -1)


def kuramoto(t: Any, u: Tensor) -> Tensor:
    speeds = torch.linspace(-1, 1, u.shape[-1]).to(u)
    return speeds + (u[..., None, :] - u[..., :, None]).sin().mean(-1)


def rigid_body(t: Any, u: Tensor) -> Tensor:
    x, y, z = u.unbind(-1)
    return torch.stack((-0.5 * y * z, 2 * x * z, -1.5 * x * y), -1)


def tracer(t: Any, u: Tensor) -> Tensor:
    """A tracer between 100 vortices of pulsating strength, seen from a turning frame."""
    strength, angle, radius, phase = VORTICES.unbind()
    x = u[..., 0, None] - radius * angle.cos()
    y = u[..., 1, None] - radius * angle.sin()
    flow = strength * (1 + 0.5 * torch.cos(2 * math.pi / 5 * t + phase)) / (x.square() + y.square())
    return torch.stack((-(flow * y).sum(-1) - u[..., 1], (flow * x).sum(-1) + u[..., 0]), -1)


def asteroid(t: Any, u: Tensor) -> Tensor:
    """An orbit around an asteroid of 200 point masses, seen from the asteroid, which spins."""
    x, v = u.split(3, -1)
    apart = MASSES - x[..., None, :]
    pull = (apart / apart.square().sum(-1, keepdim=True) ** 1.5).mean(-2)
    spin = torch.stack((0.25 * x[..., 0] + v[..., 1], 0.25 * x[..., 1] - v[..., 0], 0 * x[..., 0]), -1)
    return torch.cat((v, pull + spin), -1)


def mirror(t: Any, u: Tensor) -> Tensor:
    """A charged particle between two coils of 64 pieces of wire: the law of Biot and Savart."""
    x, v = u.split(3, -1)
    apart = x[..., None, :] - WIRE
    field = torch.linalg.cross(PIECES.expand_as(apart), apart)
    field = (field / apart.square().sum(-1, keepdim=True) ** 1.5).sum(-2)
    return torch.cat((v, torch.linalg.cross(v, field)), -1)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **F64)


VORTICES = torch.stack(
    (0.05 * normal(0, 100), math.pi * normal(1, 100), 1.6 + normal(2, 100).abs(), normal(3, 100))
)
MASSES = torch.tensor([0.35, 0.2, 0.2], **F64) * normal(4, 200, 3)
TURN = torch.arange(64, **F64) * (2 * math.pi / 64)
COIL = torch.stack((TURN.cos(), TURN.sin(), 0 * TURN), -1)
ABOVE = torch.tensor([0.0, 0.0, 1.0], **F64)
WIRE = torch.cat((COIL + ABOVE, COIL - ABOVE))
PIECES = torch.linalg.cross(ABOVE.expand_as(COIL), COIL).repeat(2, 1) * (2 * math.pi / 64)


CASES = {
    "elastic pendulum": Case(systems.ElasticPendulum(), 20.0),
    "2-link pendulum": Case(systems.PendulumChain(2), 10.0),
    "5-link pendulum": Case(systems.PendulumChain(5), 5.0),
    "spring-mass": Case(systems.SpringMass(), 10.0),
    "Lorenz": Case(systems.Lorenz(), 3.0),
    "van der Pol": Case(systems.VanDerPol(), 10.0),
    "Hénon-Heiles": Case(systems.HenonHeiles(), 20.0),
    "three bodies": Case(systems.ThreeBody(), 4.0),
    "planets": Case(planets, 20.0, planets_at),
    "Lotka-Volterra sweep": Case(
        lotka_volterra, 10.0, uniform((0.5, 1.5), (0.5, 1.5)),
        uniform((0.7, 1.3), (0.7, 1.3), (0.7, 1.3), (0.7, 1.3)),
    ),
    "FitzHugh-Nagumo sweep": Case(
        fitzhugh_nagumo, 40.0, uniform((-1, 1), (-0.5, 0.5)), uniform((0.4, 0.8), (0.6, 0.8))
    ),
    "2-link sweep": Case(
        two_link, 10.0, uniform((-0.4, 0.4), (-0.4, 0.4), (0, 0), (0, 0)),
        uniform((0.7, 1.3), (0.7, 1.3), (0.7, 1.3), (0.7, 1.3)),
    ),
    "forced Duffing": Case(
        duffing, 12.0, uniform((-1.5, 1.5), (-1.5, 1.5)), period=2 * math.pi / 1.2
    ),
    "HIRES": Case(hires, 5.0, uniform(*((0.0, 1.0),) * 8)),
    "Burgers, 64 points": Case(burgers, 1.0, waves(64, 1.0, 0.5)),
    "Korteweg-de Vries, 64 points": Case(korteweg_de_vries, 1.0, waves(64, 20.0, 0.5)),
    "particle at a wire": Case(
        wire, 20.0, uniform((0.8, 1.2), (-0.2, 0.2), (0, 0), (-0.3, 0.3), (0.2, 0.5), (-0.5, 0.5))
    ),
    "Brusselator": Case(brusselator, 10.0, uniform((0.5, 2), (1, 3)), chosen=True),
    "Rössler": Case(roessler, 10.0, uniform((-4, 4), (-4, 4), (0, 1)), chosen=True),
    "epidemic sweep": Case(
        epidemic, 30.0, uniform((0.9, 0.98), (0.01, 0.05), (0, 0)), uniform((0.4, 1.2), (0.1, 0.3)),
        chosen=True,
    ),
    "Kuramoto, 8 oscillators": Case(kuramoto, 10.0, uniform(*((0, 2 * math.pi),) * 8), chosen=True),
    "rigid body": Case(rigid_body, 20.0, uniform((0.5, 1.5), (0.5, 1.5), (0.5, 1.5)), chosen=True),
    "tracer, 100 vortices": Case(
        tracer, 10.0, uniform((-0.5, 0.5), (-0.5, 0.5)), period=5.0, chosen=True
    ),
    "orbit, 200 masses": Case(
        asteroid, 10.0,
        uniform((1.8, 2.2), (-0.2, 0.2), (-0.2, 0.2), (-0.1, 0.1), (-0.4, -0.2), (-0.1, 0.1)), chosen=True,
    ),
    "magnetic mirror, 128 pieces": Case(
        mirror, 10.0,
        uniform((-0.2, 0.2), (-0.2, 0.2), (-0.2, 0.2), (-0.4, 0.4), (-0.4, 0.4), (-0.2, 0.2)), chosen=True,
    ),
}  # fmt: skip


class Peers:
    """Other libraries at one error.

    Args:
        batch: Number of trajectories. The tolerance is chosen with `PEER_BATCH` of them at most.
        limit: Seconds after which a method is given up.
    """

    def __init__(self, case: Case, error: float, batch: int, limit: float) -> None:
        self.case, self.error, self.batch, self.limit = case, error, batch, limit
        self.count = min(batch, PEER_BATCH)
        self.u0, self.p = self.problem(self.count)
        truth = at.evolve(
            case.rate, self.u0, [0.0, case.horizon], "dop853", rtol=max(1e-13, 1e-4 * error),
            atol=max(1e-15, 1e-6 * error), parameters=self.p,
        )  # fmt: skip
        scale = truth.u.square().mean((0, 1)).sqrt()
        self.truth, self.scale = truth.final, torch.where(scale > 0, scale, 1.0)
        self.smallest = float(self.scale.min())

    def problem(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return initial states ``[count, d]`` and parameters."""
        generator = torch.Generator().manual_seed(2**41 + 1)
        u0 = initial_states(self.case.rate, self.case.sample, count, generator)
        return u0, self.case.parameters and self.case.parameters(count, generator=generator)

    def largest_tolerance(self, solve: Callable[[float], Tensor | None]) -> dict[str, float] | None:
        """Return the error and the time at the largest tolerance that reaches the error, if one does."""
        began, tolerance = time.perf_counter(), min(1e-2, 10 * self.error)
        while tolerance > 1e-13 and time.perf_counter() - began < self.limit:
            start = time.perf_counter()
            final = solve(tolerance)
            seconds = time.perf_counter() - start
            if final is not None:
                error = ((final - self.truth).square().mean(0).sqrt() / self.scale).max().item()
                if error <= self.error:
                    return {"seconds": seconds, "error": error, "tolerance": tolerance}
            tolerance *= 0.3
        return None

    def scipy(self, method: str) -> dict[str, float] | None:
        """Return the time of SciPy's method; that of larger batches is scaled up from `PEER_BATCH`."""
        from scipy.integrate import solve_ivp

        rate, start = with_parameters(self.case.rate, self.p), self.u0.reshape(-1).numpy()

        def numbers(t: float, y: Any) -> Any:
            u = torch.from_numpy(y).reshape(self.u0.shape)
            return rate(torch.tensor(t, **F64), u).reshape(-1).numpy()

        def solve(tolerance: float) -> Tensor | None:
            options = {"rtol": tolerance, "atol": 0.1 * tolerance * self.smallest}
            solved = solve_ivp(
                numbers, (0.0, self.case.horizon), start, method, [self.case.horizon], **options
            )
            return (
                torch.from_numpy(solved.y[:, -1].copy()).reshape(self.u0.shape)
                if solved.success
                else None
            )

        result = self.largest_tolerance(solve)
        return result and {**result, "seconds": result["seconds"] * self.batch / self.count}

    def diffrax(self, method: str) -> dict[str, float] | None:
        """Return the least time of three compiled solves by diffrax's method."""
        import diffrax
        import jax

        jax.config.update("jax_enable_x64", True)
        solver, horizon = getattr(diffrax, method)(), self.case.horizon

        def compiled(u0: Tensor, p: Tensor | None) -> Callable[[float], Tensor | None]:
            term = diffrax.ODETerm(jax_rate(self.case.rate, u0, p))
            start, args = u0.numpy(), None if p is None else p.numpy()

            @jax.jit
            def solved(tolerance: float) -> Any:
                control = diffrax.PIDController(tolerance, 0.1 * tolerance * self.smallest)
                return diffrax.diffeqsolve(
                    term, solver, 0.0, horizon, None, start, args, saveat=diffrax.SaveAt(t1=True),
                    stepsize_controller=control, max_steps=1_000_000, throw=False,
                )  # fmt: skip

            def solve(tolerance: float) -> Tensor | None:
                solution = solved(tolerance)
                final = torch.from_numpy(np.array(solution.ys[0]))
                return final if solution.result == diffrax.RESULTS.successful else None

            return solve

        solve = compiled(self.u0, self.p)
        result = self.largest_tolerance(solve)
        if result is None:
            return None
        if self.count < self.batch:
            solve = compiled(*self.problem(self.batch))
            solve(result["tolerance"])  # compiles
        times = []
        for _ in range(3):
            start = time.perf_counter()
            solve(result["tolerance"])
            times.append(time.perf_counter() - start)
        return {**result, "seconds": min(times)}


def measure(name: str, error: float, batch: int, budget: float) -> dict[str, Any]:
    """One row of the table."""
    case, row = CASES[name], {"case": name, "error": error, "batch": batch}
    row["chosen"] = case.chosen
    try:
        tuned = at.tune(
            case.rate, error=error, horizon=case.horizon, sample=case.sample, batch=batch,
            parameters=case.parameters, period=case.period, budget=budget,
        )  # fmt: skip
        row["report"] = tuned.report.to_json()
    except ValueError as failure:
        row["failure"] = str(failure)
    methods = ("DOP853", "LSODA", "Radau") if batch == 1 else ("DOP853",)
    with torch.no_grad():
        peers = Peers(case, error, batch, budget)
        row["scipy"] = {method: peers.scipy(method) for method in methods}
        if importlib.util.find_spec("diffrax"):
            row["diffrax"] = {method: peers.diffrax(method) for method in ("Tsit5", "Dopri8")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--errors", nargs="*", type=float, default=list(ERRORS))
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--budget", type=float, default=60.0)
    add_options(parser, "out/tune-benchmark", workers=0)
    options = parser.parse_args()
    rows = run(
        "tune",
        {
            f"{list(CASES).index(name):02d}-{error:g}-{batch}": partial(
                measure, name, error, batch, options.budget
            )
            for batch in options.batches
            for error in options.errors
            for name in options.only
        },
        options,
    )
    if rows is not None:
        save(
            "tune",
            {
                "budget": options.budget,
                "threads": options.threads,
                "rows": rows,
                "machine": machine_of(rows),
            },
        )


if __name__ == "__main__":
    main()
