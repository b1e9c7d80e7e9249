"""Schemes, evolve, odeint and the stiffness indices."""

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import attractor as at
from tests.fuzz.judging import Call, calling, shaped, target
from tests.fuzz.strategies import WIDE, Maker

ALL_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def rates(d: int) -> list[Any]:
    """Rates of states of any size: linear, non-linear, in time, unstable, constant."""
    return [
        lambda t, u: -u,
        lambda t, u: torch.sin(u) - u,
        lambda t, u: u * torch.cos(torch.as_tensor(t)).to(u.real.dtype),
        lambda t, u: 0 * u,
        lambda t, u: torch.ones_like(u),
        lambda t, u: u * u,
        lambda t, u: 1e3 * u,
        lambda t, u: u.flip(-1) * -1.0,
    ]


def bad_rates() -> list[Any]:
    """What is no rate: other shapes, other types, no tensor, not even a function."""

    def refuses(t: Any, u: Tensor) -> Tensor:
        raise ValueError("this rate of a user's refuses everything")

    return [
        lambda t, u: u[..., :1].sum(),
        lambda t, u: u.double() if u.dtype != torch.float64 else u.float(),
        lambda t, u: 1.0,
        lambda t, u: None,
        lambda t, u: u * float("nan"),
        refuses,
        None,
        "rate",
    ]


def a_rate(m: Maker, d: int) -> Any:
    return m.pick(bad_rates()) if m.strange() else m.pick(rates(d))


def some_times(m: Maker, most: int = 6) -> Any:
    n = m.whole_number(1, most)
    if m.strange():
        return m.pick((
            torch.tensor([]), torch.tensor([0.0, 0.0]), torch.tensor([0.0, math.nan]), [0.0, 1.0, 0.5],
            torch.tensor([0.0, math.inf]), torch.ones(2, 2), None, "now", torch.tensor([0, 1, 2]), 3.0, [None],
            [0.0, "a"], torch.tensor([0.0, 1.0], device="meta"), torch.tensor([0.0, 1j]), torch.tensor([False, True]),
            torch.tensor([0.0, 1e300], dtype=torch.float64), torch.tensor([1e30, 1e30 + 1], dtype=torch.float64),
        ))  # fmt: skip
    start, size = m.pick((0.0, -1.0, 100.0)), m.pick((0.1, 0.01, 1.0))
    sign = m.pick((1.0, -1.0))
    t = start + sign * size * torch.arange(n, dtype=m.pick(WIDE))
    return t.tolist() if m.chance(20) else t


NAMES = ["rk4", *at.schemes.ALL]
PAIRS = [n for n, s in at.schemes.ALL.items() if getattr(s, "b_low", None)]


@target("attractor.evolve")
def _evolve(m: Maker) -> Call:
    d = m.whole_number(1, 4)
    batch = m.sizes(0, 2)
    dtypes = (*ALL_FLOATS, torch.complex64, torch.complex128)
    u0, f, t = m.tensor((*batch, d), dtypes), a_rate(m, d), some_times(m)
    options: dict[str, Any] = {"scheme": m.choice(NAMES)}
    if m.chance(30):
        options["correction"] = m.choice([lambda u, s, dt: 0.1 * u, lambda u, s, dt: torch.zeros_like(s)],
                                         odd=(lambda u, s, dt: 1.0, lambda u, s, dt: s.sum()))  # fmt: skip
    if m.chance(40):
        options["every"] = m.whole(1, 4)
    if m.chance(30):
        options["checkpoint"] = (
            m.pick((True, 2, False)) if not m.strange() else m.pick((0, -1, "yes", 1.5, []))
        )
    if m.chance(30):
        options["scheme"] = m.choice(PAIRS)
        options["rtol"], options["atol"] = m.number(1e-6, 1e-2), m.number(1e-6, 1e-2)
        options["max_steps"] = m.whole(1, 200)

    def check(result: Any) -> None:
        assert result.u.dtype == u0.dtype
        assert result.u.shape[1:] == u0.shape
        assert len(result.t) == len(result.u)
        assert result.ok.shape == u0.shape[:-1]
        assert bool(torch.isfinite(result.u).all())

    return calling(at.evolve, f, u0, t, check=check, tolerance=1e-2, layouts=False, **options)


@target("attractor.odeint", raises=(FloatingPointError,))
def _odeint(m: Maker) -> Call:
    return _solving(m, at.odeint)


@target("attractor.odeint_adjoint", raises=(FloatingPointError,))
def _odeint_adjoint(m: Maker) -> Call:
    return _solving(m, at.odeint_adjoint)


def _solving(m: Maker, solve: Any) -> Call:
    shape, t = m.sizes(0, 3), some_times(m, 4)
    y0 = m.tensor(shape, ALL_FLOATS if m.chance(20) else WIDE, layout="plain")
    several = m.chance(25)
    if several:
        y0 = (y0, m.tensor(m.sizes(0, 2), [y0.dtype] if isinstance(y0, Tensor) else WIDE))
    f = m.pick((
        lambda t, y: -y, lambda t, y: y * 0.5, lambda t, y: torch.zeros_like(y), lambda t, y: torch.sin(y),
    )) if not m.strange() else m.pick((None, lambda t, y: 1.0, lambda t, y: y * math.nan, lambda t, y: y * y * 1e3))  # fmt: skip
    func = (lambda t, y: tuple(f(t, part) for part in y)) if several else f
    methods = [
        None,
        "dopri5",
        "bosh3",
        "fehlberg2",
        "adaptive_heun",
        "euler",
        "midpoint",
        "heun2",
        "heun3",
        "rk4",
    ]
    options: dict[str, Any] = {"method": m.choice(methods, odd=(at.schemes.RK4, at.schemes.LEAPFROG))}
    if m.chance(40):
        options["rtol"], options["atol"] = m.number(1e-5, 1e-2), m.number(1e-6, 1e-2)
    adaptive = options["method"] in (None, "dopri5", "bosh3", "fehlberg2", "adaptive_heun")
    if m.chance(40):
        names = (
            ["first_step", "safety", "min_step", "max_step", "ifactor", "dfactor"]
            if adaptive
            else ["step_size"]
        )
        name = m.choice(names)
        name = name if isinstance(name, str) else "no_such_option"
        low, high = {"safety": (0.5, 0.9), "ifactor": (2.0, 10.0), "dfactor": (0.1, 0.5)}.get(
            name, (0.05, 0.5)
        )
        options["options"] = {name: m.number(low, high)}
    if adaptive:
        options["options"] = {"max_num_steps": 300, **options.get("options", {})}
    if m.chance(3):
        options["event_fn"] = lambda t, y: y.sum()

    def check(result: Any) -> None:
        for part, like in zip(result if several else [result], y0 if several else [y0]):
            assert part.shape == (len(t), *like.shape)
            assert part.dtype == like.dtype

    # Fixed steps that blow up are infinite from there on, as documented.
    return calling(
        solve, func, y0, t, check=check, finite=None if adaptive else False, layouts=False, **options
    )


@target("attractor.odeint_event", raises=(FloatingPointError,))
def _odeint_event(m: Maker) -> Call:
    """A state that moves at speed 1 in each component meets a level; or what is no such problem."""
    y0 = m.tensor(m.sizes(0, 2), WIDE, fill="zeros", layout="plain")
    several = m.chance(25)
    func = m.choice(
        [lambda t, y: torch.ones_like(y), lambda t, y: torch.ones_like(y) + 0 * t],
        odd=(lambda t, y: 1.0, lambda t, y: y * math.nan, lambda t, y: torch.ones(7), lambda y: y),
    )
    level = m.pick((0.5, 1.5))
    events = [lambda t, y: y.sum() - level * y.numel(), lambda t, y: t - level]
    odd_events = (
        lambda t, y: y, lambda t, y: 1.0, lambda t, y: None, lambda t, y: t * math.nan, lambda t, y: t > 1,
        lambda t, y: torch.ones(2), lambda t, y: t + 1, lambda y: y, lambda t, y: t.reshape(1, 1) - 1,
    )  # fmt: skip
    event = m.choice(events, odd=odd_events)
    t0 = torch.tensor(0.0, dtype=torch.float64)
    if m.strange():
        t0 = m.pick((0.0, None, "now", torch.tensor([0.0, 1.0]), torch.tensor(math.nan), torch.tensor([]),
                     torch.tensor(1j), torch.tensor(True), torch.tensor(0.0, device="meta"),
                     torch.tensor(math.inf), [0.0]))  # fmt: skip
    options: dict[str, Any] = {
        "method": m.choice([None, "dopri5", "bosh3", "rk4", "euler", "explicit_adams"])
    }
    adaptive = options["method"] in (None, "dopri5", "bosh3")
    options["options"] = {"max_num_steps": 300} if adaptive else {"step_size": m.number(0.1, 0.3)}
    if m.chance(20):
        options["rtol"], options["atol"] = m.number(1e-5, 1e-3), m.number(1e-6, 1e-3)
    if m.chance(10):
        options["odeint_interface"] = m.choice([at.odeint, at.odeint_adjoint], odd=(at.evolve,))
    if m.chance(10):
        options["reverse_time"] = m.boolean()
    if several:
        one, meets = func, event
        func = (lambda t, y: {"a": one(t, y["a"])}) if callable(one) else one
        event = (lambda t, y: meets(t, y["a"])) if callable(meets) else meets
        y0 = {"a": y0}

    # A state of no numbers has no event in its sum; a backward solve leaves the level behind.
    return Call(lambda: at.odeint_event(func, y0, t0, event_fn=event, **options), finite=False)


def coefficient(m: Maker) -> Any:
    good = (0, 1, "1/2", Fraction(1, 3), 0.5, "2/3", -1, "1/6")
    odd = (math.nan, math.inf, "half", None, 1j, [1], "1/0", torch.tensor(0.5), 1e400, "1e5")
    return m.pick(odd if m.strange() else good)


@target("attractor.Scheme")
def _scheme(m: Maker) -> Call:
    known = m.pick(["rk4", "heun", "bosh3", "dopri5", "euler"])
    like: Any = at.get_scheme(known)
    options = {
        "name": known,
        "a": like.a,
        "b": like.b,
        "c": like.c,
        "order": like.order,
        "b_low": like.b_low,
    }
    for key in list(options):
        if m.chance(20):
            options[key] = {
                "name": m.pick(("mine", "", None, 3)),
                "order": m.whole(1, 5),
            }.get(key) or [coefficient(m) for _ in range(m.whole_number(0, 4))]
    if m.chance(30):
        options["a"] = [[coefficient(m) for _ in range(i)] for i in range(m.whole_number(0, 4))]
    if m.chance(10):
        options[m.pick(["a", "b", "c"])] = m.pick((None, 3, "rk4", [None], [[[]]], {}))
    return calling(at.Scheme, finite=False, **options)


@target("attractor.Splitting")
def _splitting(m: Maker) -> Call:
    row = lambda: [coefficient(m) for _ in range(m.whole_number(0, 4))]
    kick, drift = ((0.5, 0.5), (1,)) if m.chance(40) else (row(), row())
    if m.chance(8):
        kick = m.pick((None, 3, "kick", [[1]]))
    name = m.pick(("mine", "", None))
    return calling(at.Splitting, name, kick, drift, m.whole(1, 5), finite=False)


def a_step(m: Maker, scheme: Any) -> tuple[Any, ...]:
    d = 2 * m.whole_number(1, 2)
    u = m.tensor((*m.sizes(0, 2), d), ALL_FLOATS)
    split = isinstance(scheme, at.Splitting)
    f = (
        (lambda t, u: torch.cat((u[..., u.shape[-1] // 2 :], -u[..., : u.shape[-1] // 2]), -1))
        if split
        else a_rate(m, d)
    )
    return f, m.number(-1.0, 1.0), u, m.number(-0.5, 0.5)


for _kind, _names in (
    ("Scheme", [n for n in NAMES if n not in ("leapfrog", "yoshida4", "rodas4", "rodas5p")]),
    ("Splitting", ["leapfrog", "yoshida4"]),
    ("Rosenbrock", ["rodas4", "rodas5p"]),
):

    @target(f"attractor.{_kind}.slope")
    def _slope(m: Maker, names: list[str] = _names) -> Call:
        scheme = at.get_scheme(m.pick(names))
        f, t, u, dt = a_step(m, scheme)
        check = lambda result: shaped(*u.shape, dtype=u.dtype)(result)
        return calling(scheme.slope, f, t, u, dt, check=check, finite=False, tolerance=1e-3)

    @target(f"attractor.{_kind}.check_rate")
    def _check_rate(m: Maker, names: list[str] = _names) -> Call:
        scheme = at.get_scheme(m.pick(names))
        f, t, u, _ = a_step(m, scheme)
        return calling(scheme.check_rate, f, t, u, layouts=False)


for _kind, _names in (("Scheme", ["rk4", "dopri5", "euler"]), ("Rosenbrock", ["rodas4", "rodas5p"])):

    @target(f"attractor.{_kind}.stages")
    def _stages(m: Maker, names: list[str] = _names) -> Call:
        scheme: Any = at.get_scheme(m.pick(names))
        f, t, u, dt = a_step(m, scheme)
        return calling(scheme.stages, f, t, u, dt, finite=False, tolerance=1e-3)


@target("attractor.Rosenbrock")
def _rosenbrock(m: Maker) -> Call:
    like: Any = at.get_scheme(m.pick(["rodas4", "rodas5p"]))
    keys = ("name", "gamma", "a", "c", "b", "order", "b_low", "dense_rows")
    options: dict[str, Any] = {key: getattr(like, key) for key in keys}
    for key in keys:
        if m.chance(15):
            options[key] = {
                "name": m.pick(("mine", "", None, 3)),
                "order": m.whole(1, 6),
                "gamma": m.pick((0, -1, None, "1/4", math.nan, math.inf, [1])),
            }.get(key) or [coefficient(m) for _ in range(m.whole_number(0, 4))]
    if m.chance(30):
        options["a"] = [[coefficient(m) for _ in range(i)] for i in range(m.whole_number(0, 4))]
    if m.chance(10):
        options[m.pick(["a", "c", "b"])] = m.pick((None, 3, "rodas4", [None], [[[]]], {}))
    return calling(at.Rosenbrock, finite=False, **options)


@target("attractor.get_scheme")
def _get_scheme(m: Maker) -> Call:
    m.seed()
    near = lambda: m.pick(NAMES)[: m.whole_number(1, 5)] + m.pick(("", "x", "5", "\0", "é"))
    return calling(
        at.get_scheme, m.choice(NAMES, odd=(near(), at.schemes.RK4, {}, ("rk4",))), finite=False
    )


# Stiffness


@target("attractor.core.stiffness.jacobian")
def _jacobian(m: Maker) -> Call:
    d = m.whole_number(1, 4)
    u = m.tensor((*m.sizes(0, 2), d))
    return calling(at.stiffness.jacobian, a_rate(m, d), u, m.number(-1.0, 1.0),
                   check=lambda r: shaped(*u.shape, u.shape[-1], dtype=u.dtype)(r))  # fmt: skip


@target("attractor.core.stiffness.stiffness_index")
def _stiffness_index(m: Maker) -> Call:
    d = m.whole_number(1, 4)
    u = m.tensor((*m.sizes(0, 2), d), ALL_FLOATS)
    return calling(at.stiffness.stiffness_index, a_rate(m, d), u, m.number(-1.0, 1.0),
                   check=lambda r: shaped(*u.shape[:-1], dtype=u.dtype)(r))  # fmt: skip


@target("attractor.core.stiffness.stiffness_aware_index")
def _sai(m: Maker) -> Call:
    n, d = m.whole_number(1, 5), m.whole_number(1, 3)
    batch = m.sizes(0, 2)
    u = m.tensor(
        (n, *batch, d), (*ALL_FLOATS, torch.complex64), fill=m.pick(("normal", "ones", "large"))
    )
    t = (
        torch.arange(n, dtype=torch.float64)
        if not m.strange()
        else m.pick((torch.zeros(n), torch.zeros(n + 2), None))
    )
    ok = torch.ones(batch, dtype=torch.bool)
    trajectory: Any = (
        at.Trajectory(t, u, at.Stats(0, 0, 0), ok, ok) if not m.strange() else m.pick((None, u, "path"))
    )
    return calling(
        at.stiffness.stiffness_aware_index, trajectory, check=lambda r: shaped(n - 1, *batch)(r)
    )


@target("attractor.core.stiffness.neural_stiffness_index")
def _nsi(m: Maker) -> Call:
    shape = (m.pick((2, 1, 3, 0)), *m.sizes(1, 3))
    dtype = m.pick(ALL_FLOATS)
    fill = m.pick(("normal", "large", "ones"))
    x, y = m.tensor(shape, [dtype], fill), m.tensor(shape, [dtype])
    step = (
        m.maybe(lambda: m.number(0.1, 2.0))
        if m.flag()
        else m.maybe(lambda: m.tensor(shape, [dtype], "ones"))
    )
    return calling(at.stiffness.neural_stiffness_index, x, y, step, check=lambda r: shaped(shape[0])(r))


def profile_of(m: Maker) -> tuple[Any, Any]:
    inputs, blocks = m.pick((2, 1, 3, 0)), m.whole_number(0, 6)
    nsi = m.tensor((inputs, blocks), (*WIDE, torch.float16))
    nsi = (
        nsi.abs() if isinstance(nsi, Tensor) and nsi.dtype not in (torch.bool,) and m.chance(90) else nsi
    )
    stage = m.integers((blocks,), 0, 2)
    return nsi, stage.tolist() if isinstance(stage, Tensor) and stage.device.type == "cpu" and m.chance(
        10
    ) else stage


for _name in ("stiffness_surface", "stiffness_proportion"):

    @target(f"attractor.core.stiffness.{_name}")
    def _surface(m: Maker, name: str = _name) -> Call:
        nsi, stage = profile_of(m)
        one = lambda: m.number(0.0, 2.0) if m.flag() else m.tensor((m.whole_number(0, 3),), WIDE)
        first, second = one(), one()

        def check(result: Any) -> None:
            shape = (*torch.as_tensor(first).shape, *torch.as_tensor(second).shape)
            shaped(*shape, dtype=nsi.dtype)(result)
            assert bool(((result >= 0) & (result <= 1)).all())

        return calling(getattr(at.stiffness, name), nsi, stage, first, second, m.boolean(),
                       m.choice(["input", "stage"]), check=check)  # fmt: skip


@target("attractor.core.stiffness.silent_stages")
def _silent_stages(m: Maker) -> Call:
    _, stage = profile_of(m)
    return calling(at.stiffness.silent_stages, stage, m.boolean(), m.choice(["input", "stage"]),
                   check=lambda found: set(found) <= set(stage.tolist()))  # fmt: skip


@target("attractor.core.stiffness.total_neural_stiffness")
def _tns(m: Maker) -> Call:
    nsi, stage = profile_of(m)
    return calling(at.stiffness.total_neural_stiffness, nsi, stage, m.boolean(), m.choice(["input", "stage"]),
                   check=lambda r: shaped(dtype=nsi.dtype)(r))  # fmt: skip
