"""Systems, corrections, hybrid solvers, and their theory."""

import math
import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attractor as at
from attractor.ode import FineData, Grid, Paper, Ridge, theory
from attractor.ode.trust import TrustRegion
from tests.fuzz.judging import Call, calling, shaped, target
from tests.fuzz.strategies import FLOATS, WIDE, Maker
from tests.fuzz.targets.core import a_rate

SYSTEMS = [n for n in at.systems.__all__ if n != "System"]


def made(name: str) -> Any:
    return getattr(at.systems, name)()


def a_state(m: Maker, d: int, dtypes: Any = FLOATS, low: int = 0) -> Any:
    return m.tensor((*m.sizes(low, 2), d), dtypes, fill=m.pick(("normal", "large", "ones", "whole")))


for _name in SYSTEMS:
    _place = f"attractor.ode.systems.{_name}"

    @target(_place)
    def _construct(m: Maker, name: str = _name) -> Call:
        m.seed()
        make = getattr(at.systems, name)
        options = {}
        for field in fields(make):
            if field.init and m.chance(60):
                kind = type(field.default)
                options[field.name] = m.whole(1, 6) if kind is int else m.number(0.1, 10.0)
        if m.chance(3):
            options["unknown"] = 1
        return calling(make, **options)

    @target(f"{_place}()")
    def _rate(m: Maker, name: str = _name) -> Call:
        system = made(name)
        u = a_state(m, system.dim, WIDE)
        return calling(system, m.number(-1.0, 1.0), u, check=lambda r: shaped(*u.shape, dtype=u.dtype)(r),
                       finite=False, tolerance=1e-3)  # fmt: skip

    @target(f"{_place}.sample", random=True)
    def _sample(m: Maker, name: str = _name) -> Call:
        system, n, dtype = (
            made(name),
            m.whole(0, 5),
            m.choice([*FLOATS, None], odd=(torch.int64, torch.complex64)),
        )
        generator = m.choice([m.generator(), None])
        return calling(system.sample, n, generator, dtype, m.choice(["cpu", None], odd=("meta", "nowhere:3")),
                       check=lambda r: shaped(n, system.dim, dtype=dtype or torch.float32)(r))  # fmt: skip

    if hasattr(made(_name), "energy"):

        @target(f"{_place}.energy")
        def _energy(m: Maker, name: str = _name) -> Call:
            system = made(name)
            u = a_state(m, system.dim, WIDE)
            return calling(system.energy, u, check=lambda r: shaped(*u.shape[:-1], dtype=u.dtype)(r), finite=False,
                           tolerance=1e-3)  # fmt: skip

    if hasattr(made(_name), "exact"):

        @target(f"{_place}.exact")
        def _exact(m: Maker, name: str = _name) -> Call:
            system = at.systems.SpringMass(3) if name == "SpringMass" else made(name)
            n = m.whole_number(0, 3)
            t, u = m.tensor((n,), WIDE, fill="normal"), a_state(m, system.dim, WIDE)
            return calling(system.exact, t, u, check=lambda r: shaped(n, *u.shape, dtype=u.dtype)(r), finite=False,
                           tolerance=1e-2)  # fmt: skip


# Grids


def a_grid(m: Maker) -> Grid:
    shape = tuple(m.whole_number(1, 4) for _ in range(m.whole_number(1, 3)))
    return Grid(shape, m.whole_number(1, 2), m.pick((False, True)))


@target("attractor.ode.Grid")
def _grid(m: Maker) -> Call:
    m.seed()
    shape = m.choice([(4,), (2, 3), [5, 1], 6], odd=((), (0,), (2.5,), "4", None))
    return calling(Grid, shape, m.whole(1, 3), m.boolean())


@target("attractor.ode.Grid.field")
def _field(m: Maker) -> Call:
    grid = a_grid(m)
    return calling(grid.field, a_state(m, grid.dim + m.chance(10), WIDE))


@target("attractor.ode.Grid.state")
def _state(m: Maker) -> Call:
    grid = a_grid(m)
    shape = (*m.sizes(0, 2), grid.channels + m.chance(10), *grid.shape)
    return calling(grid.state, m.tensor(shape, WIDE, fill="normal"))


@target("attractor.ode.Grid.restrict")
def _restrict(m: Maker) -> Call:
    grid, factor = a_grid(m), m.whole_number(1, 3)
    fine = Grid(tuple(factor * n for n in grid.shape), grid.channels, grid.walls)
    return calling(
        grid.restrict,
        a_state(m, fine.dim, WIDE),
        m.choice([fine], odd=(a_grid(m), None)),
        tolerance=1e-3,
    )


@target("attractor.ode.Grid.factor_of")
def _factor(m: Maker) -> Call:
    m.seed()
    return calling(a_grid(m).factor_of, m.choice([a_grid(m)], odd=((4,), None)))


@target("attractor.ode.Grid.coarsened")
def _coarsened(m: Maker) -> Call:
    m.seed()
    return calling(a_grid(m).coarsened, m.whole(1, 3))


# Corrections

CORRECTIONS = [n for n in at.corrections.__all__ if n != "get_correction"]
ACTIVATIONS = ["rational", "sine", "tanh", "relu", "gelu", "silu"]


@cache
def fitted(name: str, d: int, dtype: torch.dtype, **options: Any) -> Any:
    generator = torch.get_rng_state()
    kind = getattr(at.corrections, name)
    size = {"width": 8} if kind.fit_defaults else {}
    correction = kind(d, **size, **dict(options), dtype=dtype)
    torch.set_rng_state(generator)
    return correction.requires_grad_(False)


for _name in CORRECTIONS:
    _place = f"attractor.ode.corrections.{_name}"

    @target(_place, random=True)
    def _make(m: Maker, name: str = _name) -> Call:
        options: dict[str, Any] = {}
        if name == "Polynomial":
            options = {"degree": m.whole(1, 5), "odd": m.boolean()}
        elif name == "Patches":
            options = {
                "degree": m.whole(1, 3), "radius": m.whole(1, 3), "breadth": m.whole(0, 2),
                "walls": m.boolean(), "conservative": m.boolean(),
            }  # fmt: skip
        elif name != "Linear":
            options = {
                "width": m.whole(1, 9),
                "depth": m.whole(2, 4),
                "activation": m.choice(ACTIVATIONS),
            }
            if m.chance(30):
                options["body"] = m.choice(["mlp", "lstm", "transformer"])
            if m.chance(30):
                options["skip"] = m.boolean()
            if m.chance(20):
                options["precision"] = m.choice([None, "float32"])
        if m.chance(30):
            options["period"] = m.number(0.5, 3.0)
        if m.chance(30):
            options["dtype"] = m.choice(
                [torch.float64, torch.float32, None], odd=(torch.int64, "float32")
            )
        if m.chance(5):
            options["unknown"] = 1
        return calling(getattr(at.corrections, name), m.whole(1, 5), **options)

    def _arguments(m: Maker, name: str) -> tuple[Any, ...]:
        d, dtype = m.whole_number(1, 4), m.pick(WIDE)
        period = m.pick((None, None, 2.0))
        correction = fitted(name, d, dtype, period=period)
        batch = m.sizes(0, 2)
        state = lambda: m.tensor((*batch, d), [dtype], fill=m.pick(("normal", "ones", "large")))
        t = m.number(0.0, 5.0) if period or m.chance(20) else None
        return correction, state(), state(), m.number(0.01, 1.0), t

    @target(f"{_place}.forward")
    def _forward(m: Maker, name: str = _name) -> Call:
        correction, u, slope, dt, t = _arguments(m, name)
        check = lambda r: shaped(*u.shape, dtype=u.dtype)(r)
        return calling(correction, u, slope, dt, t, check=check, tolerance=1e-3)

    @target(f"{_place}.inputs")
    def _inputs(m: Maker, name: str = _name) -> Call:
        correction, *rest = _arguments(m, name)
        return calling(correction.inputs, *rest, tolerance=1e-3)

    if _name == "AttNSM":

        @target(f"{_place}.gain")
        def _gain(m: Maker, name: str = _name) -> Call:
            correction, _, slope, dt, _ = _arguments(m, name)
            return calling(correction.gain, slope, dt, tolerance=1e-3)


@target("attractor.ode.corrections.get_correction")
def _get_correction(m: Maker) -> Call:
    m.seed()
    return calling(
        at.corrections.get_correction, m.choice(["attns", "neurvec", "csm", "linear"]), finite=False
    )


# Solvers


@cache
def solver(dtype: torch.dtype = torch.float64, correction: str = "AttNS") -> at.HybridSolver:
    system = at.systems.HarmonicOscillator()
    generator = torch.get_rng_state()
    network: Any = fitted(correction, 2, dtype)
    trust = TrustRegion.around(system.sample(50, torch.Generator().manual_seed(0), dtype))
    torch.set_rng_state(generator)
    return at.HybridSolver(system, "rk4", network, 0.1, trust)


@target("attractor.HybridSolver")
def _hybrid_solver(m: Maker) -> Call:
    rate, dt = a_rate(m, 2), m.number(0.01, 1.0)
    scheme = m.choice(["rk4", "euler", "leapfrog"])
    correction = m.choice([fitted("AttNS", 2, torch.float64), fitted("Linear", 2, torch.float64)])
    trust = m.choice([None, TrustRegion(2)])
    return calling(
        at.HybridSolver, rate, scheme, correction, dt, trust, m.choice([None, [], [{"rollout": 0.1}]])
    )


@target("attractor.HybridSolver.step")
def _step(m: Maker) -> Call:
    dtype = m.pick(WIDE)
    u = a_state(m, 2, [dtype])
    return calling(solver(dtype).step, u, m.number(-1.0, 5.0), check=lambda r: shaped(*u.shape, dtype=dtype)(r),
                   tolerance=1e-3)  # fmt: skip


@target("attractor.HybridSolver.solve")
def _solve(m: Maker) -> Call:
    dtype = m.pick(WIDE)
    u, n = a_state(m, 2, [dtype]), m.whole_number(0, 4)
    t0 = m.number(-1.0, 1.0)
    t_end = t0 + n * 0.1 if isinstance(t0, float) and math.isfinite(t0) and abs(t0) < 10 else 1.0
    t_end = m.number(0.0, 1.0) if m.strange() else t_end

    def check(result: Any) -> None:
        assert result.u.shape[1:] == u.shape
        assert result.u.dtype == dtype

    return calling(
        solver(dtype).solve,
        u,
        t_end,
        t0,
        m.whole(1, 3),
        m.flag(),
        check=check,
        finite=None,
        tolerance=1e-3,
    )


@target("attractor.HybridSolver.to", raises=(RuntimeError, TypeError))  # as torch's own .to
def _to(m: Maker) -> Call:
    like = solver(torch.float32)
    own = at.HybridSolver(
        like.rate, like.scheme, fitted("Linear", 2, m.pick(WIDE), period=m.seed() + 1.0), 0.1
    )
    return calling(
        own.to, m.choice([torch.float64, "cpu", torch.float32], odd=(torch.int64, "nowhere:1"))
    )


@target("attractor.HybridSolver.capture", random=True, raises=(RuntimeError,))
def _capture(m: Maker) -> Call:
    dtype = m.pick(WIDE)
    return calling(lambda u, steps: solver(dtype).capture(u, steps=steps).advance(), a_state(m, 2, [dtype], 1),
                   m.whole(1, 3), finite=False, layouts=False)  # fmt: skip


@target("attractor.HybridSolver.save", slow=True, raises=(OSError,))
def _save(m: Maker) -> Call:
    m.seed()
    place = m.choice(["", "a/b"], odd=("file", "file/below"))

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "file").write_text("a file")
            solver().save(Path(folder) / place if isinstance(place, str) else place)

    return Call(run)


@target("attractor.HybridSolver.load", slow=True, raises=(OSError,))
def _load(m: Maker) -> Call:
    """A saved solver, one of its files damaged now and then: tests/train has more of that."""
    damage = m.strange()
    rate = m.choice([None, at.systems.HarmonicOscillator()], odd=(at.systems.Lorenz(), lambda t, u: u))
    seed, cut = m.seed(), m.pick((0, 1, -1))

    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            solver().save(folder)
            if damage:
                path = sorted(p for p in Path(folder).iterdir() if p.is_file())[seed % 2]
                content = bytearray(path.read_bytes())
                content[seed % len(content)] ^= 1 << seed % 8
                path.write_bytes(
                    bytes(content[: len(content) // 2] if cut == 1 else b"" if cut == -1 else content)
                )
            return at.HybridSolver.load(folder, rate).dt

    return Call(run)


@target("attractor.HybridSolver.from_pretrained")
def _from_pretrained(m: Maker) -> Call:
    name = m.choice(
        ["elastic-pendulum", "henon-heiles"], odd=("", "elastic", "no/such/folder", Path("nowhere"))
    )
    rate = m.choice([None], odd=(at.systems.Lorenz(), at.systems.HenonHeiles()))
    return Call(lambda: at.HybridSolver.from_pretrained(name, rate).dt)


def a_fit(m: Maker) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dt": m.number(0.1, 0.5),
        "trajectories": m.whole(8, 12),
        "width": m.whole(4, 8),
    }
    options["horizon"] = options["dt"] * 2 if isinstance(options["dt"], float) else 1.0
    options["horizon"] = m.number(0.2, 1.0) if m.strange() else options["horizon"]
    options["correction"] = m.choice(["linear", "attns", "stages"])
    if options["correction"] == "linear" and m.tame:
        del options["width"]  # which it does not have
    if m.chance(30):
        options["scheme"] = m.choice(["rk4", "euler", "heun"])
    if m.chance(20):
        options["fine_dt"] = m.number(0.01, 0.05)
    if m.chance(20):
        options["seed"] = m.whole(0, 5)
    if m.chance(10):
        options["sample"] = m.pick(
            (lambda n, generator: torch.ones(n, 2), lambda n, generator: torch.ones(n), 3)
        )
    if m.chance(10):
        options["period"] = m.number(0.5, 2.0)
    if m.chance(30):
        recipes = ["default", Ridge(), Ridge(adam_steps=5), Paper(epochs=2), Paper(3, 10.0)]
        options["recipe"] = m.choice(recipes, odd=(Ridge, Paper, {"epochs": 2}, 1e-3))
    if m.chance(10):
        options["parameters"] = m.choice([None], odd=SAMPLERS)
    if m.chance(10):
        options["budget"] = m.number(0.0, 1.0)
    return options


# Samplers of parameters that no equation here takes, or that return no parameters.
SAMPLERS = (
    lambda n, generator: torch.ones(n, 1),
    lambda n, generator: torch.ones(n),
    lambda n, generator: torch.ones(n + 1, 1),
    lambda n, generator: torch.ones(n, 1, dtype=torch.int64),
    lambda n, generator: torch.full((n, 1), math.nan),
    lambda n: torch.ones(n, 1),
    lambda n, generator: None,
    torch.ones(3, 1),
)


@target("attractor.ode.Ridge")
def _ridge(m: Maker) -> Call:
    m.seed()
    return calling(Ridge, m.whole(0, 100))


@target("attractor.ode.Paper")
def _paper(m: Maker) -> Call:
    m.seed()
    return calling(Paper, m.whole(1, 100), m.number(0.1, 1e6))


@target("attractor.fit", slow=True, raises=(FloatingPointError,))
def _fit(m: Maker) -> Call:
    system = m.choice(
        [at.systems.HarmonicOscillator(), at.systems.Logistic()],
        odd=(lambda t, u: -u, at.systems.Lorenz),
    )
    options = a_fit(m)
    return Call(lambda: at.fit(system, **options).dt)


@target("attractor.make_trajectories", slow=True, raises=(OSError,))
def _make_trajectories(m: Maker) -> Call:
    system = m.choice([at.systems.HarmonicOscillator(), at.systems.Lorenz()], odd=(lambda t, u: -u,))
    options = {"trajectories": m.whole(1, 5), "dt": m.number(0.1, 0.2), "fine_dt": m.number(0.02, 0.1)}
    options["horizon"] = 2 * options["dt"] if isinstance(options["dt"], float) else 1.0
    if m.chance(30):
        options["shard_size"] = m.whole(1, 5)
    options["seed"] = m.whole(0, 9)

    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return at.make_trajectories(system, folder, **options).hash

    return Call(run)


@cache
def fine_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    at.make_trajectories(
        at.systems.HarmonicOscillator(), folder, trajectories=4, dt=0.1, horizon=0.2, shard_size=2
    )
    return folder


@target("attractor.ode.FineData.open", raises=(OSError,))
def _open(m: Maker) -> Call:
    m.seed()
    place = m.choice(
        [fine_folder(), str(fine_folder())], odd=(fine_folder() / "nothing", fine_folder().parent)
    )
    return calling(lambda place: FineData.open(place).hash, place)


@target("attractor.ode.FineData.runs")
def _runs(m: Maker) -> Call:
    m.seed()
    return calling(lambda: [run.u for run in FineData.open(fine_folder()).runs()])


@target("attractor.compare", slow=True)
def _compare(m: Maker) -> Call:
    options: dict[str, Any] = {
        "horizon": m.number(0.2, 0.4),
        "batch": m.whole(1, 4),
        "compile": False,
        "peers": False,
    }
    options["schemes"] = m.choice([("rk4",), ("euler", "dopri5")], odd=((), ("nothing",), (None,)))
    if m.chance(40):
        options["u0"] = m.tensor((2, 2), [torch.float64])
    return Call(lambda: at.compare(solver(), **options).verdict)


def a_tuning(m: Maker) -> dict[str, Any]:
    options: dict[str, Any] = {
        "error": m.number(1e-4, 1e-2),
        "horizon": m.number(0.5, 1.0),
        "batch": m.whole(1, 4),
        "budget": m.number(0.0, 0.1),
        "compile": False,
    }
    if m.chance(20):
        options["sample"] = m.pick(
            (lambda n, generator: torch.ones(n, 2), lambda n, generator: torch.ones(n), 3)
        )
    if m.chance(20):
        options["parameters"] = m.choice([None], odd=SAMPLERS)
    if m.chance(20):
        options["seed"] = m.whole(0, 5)
    if m.chance(20):
        options["period"] = m.number(0.5, 2.0)
    if m.chance(10):
        options["device"] = m.choice(["cpu", None], odd=("meta", "nowhere:3"))
    return options


@target("attractor.tune", slow=True)
def _tune(m: Maker) -> Call:
    system = m.choice(
        [at.systems.HarmonicOscillator(), at.systems.Logistic()],
        odd=(
            lambda t, u: -u, at.systems.Lorenz, lambda t, u: u * math.nan, lambda t, u: 1e9 * u * u,
            lambda t, u: u[..., :1], lambda u: -u,
        ),
    )  # fmt: skip
    options = a_tuning(m)
    if not hasattr(system, "sample") and m.chance(80):
        options["sample"] = lambda n, generator: torch.rand(n, 2, generator=generator)
    return Call(lambda: at.tune(system, **options).report.winner.error)


@cache
def tuned() -> Any:
    with torch.random.fork_rng():
        return at.tune(
            at.systems.HarmonicOscillator(), error=1e-3, horizon=1.0, batch=2, budget=0.0, compile=False
        )


@target("attractor.TunedSolver.solve")
def _tuned_solve(m: Maker) -> Call:
    u0 = a_state(m, 2, WIDE)
    options = {"compile": m.choice([None, False], odd=("yes",))} if m.chance(20) else {}
    if m.chance(20):
        options["parameters"] = m.choice([None], odd=(torch.ones(1), "p", 1.0, torch.tensor([1])))
    return calling(
        lambda *args, **more: tuned().solve(*args, **more).u, u0, m.number(0.5, 1.0), m.number(0.0, 0.25),
        check=lambda r: shaped(2, *u0.shape, dtype=u0.dtype)(r), tolerance=1e-3, layouts=False, **options,
    )  # fmt: skip


@target("attractor.TunedSolver.save", slow=True, raises=(OSError,))
def _tuned_save(m: Maker) -> Call:
    m.seed()
    place = m.choice(["new", "a/b"], odd=("", "file", "file/below"))

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "file").write_text("a file")
            tuned().save(Path(folder) / place if isinstance(place, str) else place)

    return Call(run)


@target("attractor.TunedSolver.load", slow=True, raises=(OSError,))
def _tuned_load(m: Maker) -> Call:
    """A saved solver, one of its files damaged now and then."""
    damage = m.strange()
    rate = m.choice(
        [None, at.systems.HarmonicOscillator()], odd=(at.systems.Lorenz(), lambda t, u: u, 3)
    )
    seed, cut = m.seed(), m.pick((0, 1, -1))

    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            tuned().save(folder)
            if damage:
                files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
                path = files[seed % len(files)]
                content = bytearray(path.read_bytes())
                content[seed % len(content)] ^= 1 << seed % 8
                path.write_bytes(
                    bytes(content[: len(content) // 2] if cut == 1 else b"" if cut == -1 else content)
                )
            return at.TunedSolver.load(folder, rate).report.horizon

    return Call(run)


# Theory and trust


@target("attractor.ode.trust.TrustRegion")
def _trust(m: Maker) -> Call:
    m.seed()
    return calling(TrustRegion, m.whole(1, 20))


@target("attractor.ode.trust.TrustRegion.around")
def _around(m: Maker) -> Call:
    n, d = m.whole_number(0, 12), m.whole_number(1, 4)
    u = m.tensor((n, d), WIDE)
    return calling(lambda u: TrustRegion.around(u).limit, u, layouts=False)


@target("attractor.ode.trust.TrustRegion.distance")
def _distance(m: Maker) -> Call:
    dtype = m.pick(WIDE)
    u = a_state(m, 2, [dtype])
    return calling(
        solver(dtype).trust.distance, u, check=lambda r: shaped(*u.shape[:-1], dtype=dtype)(r)
    )  # type: ignore[union-attr]


@target("attractor.ode.trust.TrustRegion.inside")
def _inside(m: Maker) -> Call:
    dtype = m.pick(WIDE)
    u = a_state(m, 2, [dtype])
    return calling(
        solver(dtype).trust.inside, u, check=lambda r: shaped(*u.shape[:-1], dtype=torch.bool)(r)
    )  # type: ignore[union-attr]


@target("attractor.ode.theory.steepest")
def _steepest(m: Maker) -> Call:
    from attractor.ode.corrections.network import Rational, Sine

    good: list[Any] = [Sine(), nn.Tanh(), nn.ReLU(), nn.GELU(), nn.SiLU()]
    rational = Rational(dtype=torch.float64)
    with torch.no_grad():
        rational.top.copy_(torch.randn(4, generator=m.generator(), dtype=torch.float64))
        rational.bottom.copy_(torch.randn(2, generator=m.generator(), dtype=torch.float64))
    activation = m.choice([rational, *good], odd=(nn.Softplus(), nn.Linear(2, 2)))
    return calling(theory.steepest, activation)


@target("attractor.ode.theory.lipschitz_bound")
def _bound(m: Maker) -> Call:
    m.seed()
    known = [fitted(n, m.whole_number(1, 3), m.pick(WIDE)) for n in CORRECTIONS if n != "AttNSM"]
    correction = m.choice(known, odd=(fitted("AttNSM", 2, torch.float32), nn.Linear(2, 2)))
    return calling(theory.lipschitz_bound, correction, m.number(0.01, 1.0))


@target("attractor.ode.theory.lipschitz_observed")
def _observed(m: Maker) -> Call:
    d, dtype, batch = m.whole_number(1, 3), m.pick(WIDE), m.sizes(0, 2)
    state = lambda: m.tensor((*batch, d), [dtype], fill=m.pick(("normal", "ones")))
    correction = fitted(m.pick(CORRECTIONS), d, dtype)
    return calling(
        theory.lipschitz_observed, correction, state(), state(), m.number(0.01, 1.0), tolerance=1e-3
    )


@target("attractor.ode.theory.second_derivative")
def _second(m: Maker) -> Call:
    d = m.whole_number(1, 3)
    u = m.tensor((*m.sizes(0, 2), d), WIDE)
    return calling(
        theory.second_derivative, a_rate(m, d), u, m.number(-1.0, 1.0), finite=False, tolerance=1e-3
    )


@target("attractor.ode.theory.curvature_distribution")
def _curvature(m: Maker) -> Call:
    times, n, d = m.whole_number(1, 3), m.whole_number(1, 3), m.whole_number(1, 3)
    u, levels = m.tensor((times, n, d), WIDE), m.tensor((m.whole_number(0, 3),), WIDE)
    t = m.maybe(lambda: m.tensor((times,), WIDE, fill="normal"))
    return calling(theory.curvature_distribution, a_rate(m, d), u, levels,
                   m.choice(["states", "components", "trajectories"]), t, layouts=False)  # fmt: skip


@target("attractor.ode.theory.convergence_bound", slow=True)
def _convergence(m: Maker) -> Call:
    truth = m.tensor((m.whole_number(1, 3), m.whole_number(1, 2), 2), [torch.float64], fill="normal")
    return calling(theory.convergence_bound, solver(), truth, finite=False, layouts=False)
