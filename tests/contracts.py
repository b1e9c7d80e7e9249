"""What every member of a plug-in folder must satisfy. Members are found, not listed."""

import inspect
import pickle
from copy import deepcopy
from dataclasses import FrozenInstanceError, fields
from fractions import Fraction
from functools import partial

import pytest
import torch

from attractor import evolve, get_scheme
from attractor.attention import pdes
from attractor.attention.masks import open_faces
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.splitting import Splitting
from attractor.core.step import Step
from attractor.core.tableaus import ALL
from attractor.core.trees import defect, rosenbrock_defect
from attractor.ode import corrections, systems
from attractor.ode.corrections import BY_NAME
from attractor.residual import gates

# ---- schemes: everything in core/tableaus.py

schemes = pytest.mark.parametrize("scheme", ALL.values(), ids=lambda s: s.name)


def oscillator(t, u):
    q, p = u.chunk(2, -1)
    return torch.cat((p, -q.sin()), -1)


@schemes
def test_scheme_is_found_by_its_name(scheme):
    assert get_scheme(scheme.name) is scheme
    assert get_scheme(scheme) is scheme


@schemes
def test_scheme_meets_its_order_conditions_and_no_more(scheme):
    if isinstance(scheme, Splitting):
        kick_sees = [[d * (j < i) for j, d in enumerate(scheme.drift)] for i in range(len(scheme.kick))]
        drift_sees = [
            [k * (j <= i) for j, k in enumerate(scheme.kick)] for i in range(len(scheme.drift))
        ]
        assert defect(scheme.order, scheme.kick, kick_sees, drift_sees) < 1e-12
        assert defect(scheme.order + 1, scheme.kick, kick_sees, drift_sees) > 1e-3
    elif isinstance(scheme, Rosenbrock):
        weights = scheme.standard_form()
        assert all(rosenbrock_defect(p, *weights) < 1e-12 for p in range(1, scheme.order + 1))
        assert rosenbrock_defect(scheme.order + 1, *weights) > 1e-3
    else:
        rounding = (
            1e-12 if scheme.name in ("tsit5", "dop853") else 0
        )  # their coefficients are irrational
        assert all(defect(p, scheme.b, scheme.a) <= rounding for p in range(1, scheme.order + 1))
        assert defect(scheme.order + 1, scheme.b, scheme.a) > 10 * rounding
        assert all(isinstance(x, Fraction) for x in (*scheme.b, *scheme.c))


@schemes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_slope_keeps_shape_and_dtype(scheme, dtype, batch):
    u = torch.rand(*batch, 4, dtype=torch.float64).to(dtype)
    slope = scheme.slope(oscillator, 0.0, u, 0.1)
    assert slope.shape == u.shape
    assert slope.dtype == dtype


@schemes
def test_slope_is_the_rate_when_the_step_vanishes(scheme):
    u = torch.rand(5, 4, dtype=torch.float64)
    torch.testing.assert_close(scheme.slope(oscillator, 0.0, u, 1e-12), oscillator(0.0, u))


@schemes
def test_slope_is_the_same_for_number_and_tensor_steps(scheme):
    u, t = torch.rand(5, 4, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    each = torch.full((5, 1), 0.1, dtype=torch.float64)
    torch.testing.assert_close(
        scheme.slope(oscillator, t, u, 0.1), scheme.slope(oscillator, t, u, each), rtol=1e-14, atol=1e-14
    )


@schemes
def test_gradients_through_a_slope(scheme):
    u = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    dt = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda u, dt: scheme.slope(oscillator, 0.0, u, dt), (u, dt))


@pytest.mark.sampled(2)
@schemes
def test_slope_can_be_compiled_whole(scheme):
    u = torch.rand(5, 4, dtype=torch.float64)
    step = lambda u, dt: scheme.slope(oscillator, 0.0, u, dt)
    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    dt = torch.tensor(0.1, dtype=torch.float64)
    torch.testing.assert_close(whole(u, dt), step(u, dt))


@schemes
def test_rate_calls_are_counted_truly(scheme):
    calls = 0

    def counting(t, u):
        nonlocal calls
        calls += 1
        return oscillator(t, u)

    scheme.slope(counting, 0.0, torch.rand(3, 4), 0.1)
    assert calls == scheme.rate_calls


@schemes
def test_scheme_cannot_be_changed(scheme):
    with pytest.raises(FrozenInstanceError):
        scheme.order = 7


@pytest.mark.parametrize(
    "scheme", [s for s in ALL.values() if getattr(s, "b_low", None)], ids=lambda s: s.name
)
def test_error_estimate_has_the_order_of_the_lower_scheme(scheme):
    u, t = torch.tensor([0.3, 0.8], dtype=torch.float64), torch.tensor(0.0)
    weights = [float(b - low) for b, low in zip(scheme.b, scheme.b_low)]
    sizes = []
    for h in (0.2, 0.1):
        stages = scheme.stages(oscillator, t, u, h)
        sizes.append((h * sum(w * k for w, k in zip(weights, stages))).norm().item())
    order = torch.tensor(sizes[0] / sizes[1]).log2().item()
    assert order == pytest.approx(scheme.order_low + 1, abs=0.6)


# ---- systems: everything ode/systems exports

SYSTEMS = [getattr(systems, name) for name in systems.__all__ if name != "System"]
STIFF = (systems.Robertson, systems.HIRES, systems.Oregonator, systems.Pollution)
every_system = pytest.mark.parametrize("make", SYSTEMS, ids=lambda c: c.__name__)


def states(system, n=5, dtype=torch.float64):
    return system.sample(n, torch.Generator().manual_seed(3), dtype)


def short(system):
    """A time over which the system is easy to solve tightly."""
    return 1e-3 if isinstance(system, STIFF) else 0.5


def test_every_file_of_the_folder_is_exported():
    from pathlib import Path

    folder = Path(inspect.getfile(systems)).parent
    files = {p.stem for p in folder.glob("*.py")} - {"__init__", "system"}
    assert files == {cls.__module__.rsplit(".", 1)[1] for cls in SYSTEMS}


@every_system
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)])
def test_rate_keeps_shape_and_dtype(make, dtype, batch):
    system = make()
    u = states(system, 6, dtype)[: max(1, torch.Size(batch).numel())].reshape(*batch, system.dim)
    du = system(torch.tensor(0.0), u)
    assert du.shape == u.shape
    assert du.dtype == dtype


@every_system
def test_trajectories_do_not_see_each_other(make):
    system = make()
    u = states(system, 6)
    du = system(0.0, u)
    for i in range(6):
        torch.testing.assert_close(system(0.0, u[i]), du[i], rtol=1e-12, atol=1e-12)


@every_system
def test_gradients_of_the_rate(make):
    system = make()
    u = states(system, 2) + 0.01
    # The differences of gradcheck are rounded; Pollution has rates of up to 4e9 here.
    atol = 10.0 if isinstance(system, systems.Pollution) else 1e-5
    assert torch.autograd.gradcheck(
        lambda u: system(0.0, u), (u.requires_grad_(),), rtol=1e-3, atol=atol
    )


@pytest.mark.sampled(3)
@every_system
def test_rate_can_be_compiled_whole(make):
    system = make()
    u = states(system)
    whole = torch.compile(lambda u: system(0.0, u), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(u), system(0.0, u))


@every_system
def test_samples_come_from_the_seed_alone(make):
    system = make()
    assert torch.equal(states(system), states(system))
    assert torch.equal(states(system, dtype=torch.float32), states(system).float())
    assert not torch.equal(
        states(system), system.sample(5, torch.Generator().manual_seed(4), torch.float64)
    )
    assert system.sample(0).shape == (0, system.dim)
    with pytest.raises(ValueError, match="cannot sample -1"):
        system.sample(-1)


@pytest.mark.sampled(4)
@every_system
def test_energy_is_conserved(make):
    system = make()
    if not hasattr(system, "energy"):
        pytest.skip("this system conserves nothing")
    u = states(system)
    solved = evolve(system, u, [0.0, short(system)], "dopri5", rtol=1e-12, atol=1e-13)
    assert solved.ok.all()
    torch.testing.assert_close(system.energy(solved.final), system.energy(u), rtol=1e-9, atol=1e-9)
    assert (solved.final - u).abs().max() > 1e-6  # it did move


@pytest.mark.sampled(2)
@every_system
def test_exact_solution_is_one(make):
    system = make()
    if not hasattr(system, "exact"):
        pytest.skip("no exact solution is known")
    u = states(system)
    t = torch.linspace(0, 2, 5, dtype=torch.float64)
    solved = evolve(system, u, t, "dopri5", rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(system.exact(t, u), solved.u, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(system.exact(t[:1], u)[0], u)


@every_system
def test_repr_makes_the_same_system(make):
    system = make()
    again = eval(repr(system), {make.__name__: make})  # a test of our own repr
    assert again == system
    assert hash(again) == hash(system)
    assert torch.equal(again(0.0, states(system)), system(0.0, states(system)))


@every_system
def test_system_says_what_it_is(make):
    assert make.__doc__
    assert not make.__doc__.startswith(f"{make.__name__}(")
    with pytest.raises((FrozenInstanceError, AttributeError)):
        setattr(make(), next((f.name for f in fields(make)), "dim"), 1)


@pytest.mark.parametrize("scheme", ALL.values(), ids=lambda s: s.name)
def test_schemes_can_be_copied(scheme):
    again = pickle.loads(pickle.dumps(scheme))
    assert again == scheme
    assert again.name == scheme.name


# ---- corrections: everything ode/corrections exports

CORRECTIONS = [BY_NAME[name] for name in BY_NAME]
every_correction = pytest.mark.parametrize("make", CORRECTIONS, ids=lambda c: c.__name__)


def small(make, **factory):
    torch.manual_seed(1)
    return make(4, **({"width": 16} if make.fit_defaults else {}), **factory)


def step_of(u, slope, t=None):
    """A step with four stages that depend on u and slope."""
    return Step(u, slope, 0.1, t, (slope, 0.5 * slope + u, slope * u, u))


def test_every_correction_is_exported_and_named():
    exported = {getattr(corrections, name) for name in corrections.__all__ if name != "get_correction"}
    assert exported == set(CORRECTIONS)
    with pytest.raises(ValueError, match="no correction is called 'attn'; there are attns"):
        corrections.get_correction("attn")


@every_correction
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_correction_keeps_shape_and_dtype(make, dtype, batch):
    u, slope = torch.rand(2, *batch, 4, dtype=dtype)
    correction = small(make, dtype=dtype)
    added = correction(step_of(u, slope))
    if not correction.needs_stages:
        assert torch.equal(added, correction(u, slope, 0.1))
    assert added.shape == u.shape
    assert added.dtype == dtype


@every_correction
def test_gradients_of_a_correction(make):
    correction = small(make, dtype=torch.float64)
    u, slope = torch.rand(2, 3, 4, dtype=torch.float64).requires_grad_().unbind(0)
    assert torch.autograd.gradcheck(lambda u, s: correction(step_of(u, s)), (u, slope))
    correction(step_of(u, slope)).square().sum().backward()
    assert all(p.grad is not None for p in correction.parameters())


@every_correction
def test_correction_is_rebuilt_from_its_config(make):
    correction = small(make)
    again = make(**correction.config)
    again.load_state_dict(correction.state_dict())
    step = step_of(*torch.rand(2, 3, 4))
    assert torch.equal(again(step), correction(step))


@pytest.mark.sampled(2)
@every_correction
def test_correction_can_be_compiled_whole(make):
    correction = small(make)
    step = step_of(*torch.rand(2, 3, 4))
    whole = torch.compile(correction, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(step), correction(step))


@every_correction
def test_correction_with_a_period_repeats_in_time(make):
    correction = small(make, dtype=torch.float64, period=2.0)
    u, slope = torch.rand(2, 3, 4, dtype=torch.float64)
    assert correction.timed
    assert not small(make).timed
    at = lambda t: correction(step_of(u, slope, torch.tensor(t, dtype=torch.float64)))
    torch.testing.assert_close(at(0.3), at(2.3))
    assert (at(0.3) - at(0.9)).abs().max() > 1e-6
    each = correction(step_of(u, slope, torch.tensor([0.3, 0.9, 0.3], dtype=torch.float64)))
    torch.testing.assert_close(each, torch.stack((at(0.3)[0], at(0.9)[1], at(0.3)[2])))
    with pytest.raises(ValueError, match="needs the time"):
        correction(step_of(u, slope))


VARIANTS = ({"body": "lstm"}, {"body": "transformer"}, {"state": True}, {"times_dt": True},
            {"activation": "sine", "depth": 3}, {"skip": False})  # fmt: skip
BODIES = [  # Patches has one last layer for all cells: tests/ode/test_patches.py
    (make, {"width": 16, "skip": True} if make.fit_defaults else {})
    for make in CORRECTIONS
    if make is not corrections.Patches
]
BODIES += [(corrections.Stages, {"width": 0})]
BODIES += [(corrections.AttNS, {"width": 16, "skip": True, **more}) for more in VARIANTS]


@pytest.mark.parametrize(("make", "options"), BODIES)
def test_last_layer_is_linear_in_its_features(make, options):
    """What a closed-form fit relies on, standardisation included."""
    correction = make(4, **options, dtype=torch.float64)
    net = correction.net
    u, slope = torch.rand(2, 50, 4, dtype=torch.float64) * 3 + 5
    step = step_of(u, slope)
    x = correction.inputs(step)
    mean, deviation = x.mean(0), x.std(0)
    scaled = (x - mean) / deviation
    weights = torch.randn(net.features(scaled).shape[-1], 4, dtype=torch.float64)
    net.set_head(weights)
    expected = net.features(scaled) @ weights
    torch.testing.assert_close(net(scaled), expected)
    net.standardise(mean, deviation)
    torch.testing.assert_close(net(x), expected, rtol=1e-9, atol=1e-9)
    again = make(**correction.config, dtype=torch.float64)
    again.load_state_dict(correction.state_dict())
    assert torch.equal(again(step), correction(step))


# ---- pdes: everything attention/pdes names

PDES = [*pdes.BY_NAME.values(), partial(pdes.ReactionDiffusion, split=True)]
LINEAR = [make for make in PDES if make().linear]
every_pde = pytest.mark.parametrize("make", PDES, ids=lambda p: repr(p()))
linear_pde = pytest.mark.parametrize("make", LINEAR, ids=lambda p: repr(p()))


def coefficients(pde):
    return [f.name for f in fields(pde) if not isinstance(getattr(pde, f.name), bool)]


def learnt(make, heads=2):
    """The PDE with a coefficient for every head, and those coefficients."""
    names = coefficients(make())
    start = [torch.linspace(1.0, 0.5, heads, dtype=torch.float64) * getattr(make(), n) for n in names]
    tensors = [s[:, None, None].requires_grad_() for s in start]
    return names, tensors


def maps(rows=6, keys=6, **options):
    return torch.rand(2, rows, keys, dtype=torch.float64, **options).softmax(-1)


def faces(keys=6):
    """Walls in every place, row by row: causal, windowed, torn into pieces, none at all."""
    causal = torch.ones(keys, keys, dtype=torch.bool).tril()
    torn = torch.rand(keys, keys) > 0.4
    return [None, open_faces(causal), open_faces(causal & causal.T.roll(2, 0)), open_faces(torn)]


def test_every_pde_is_in_a_file_and_has_a_name():
    from pathlib import Path

    files = {p.stem for p in Path(inspect.getfile(pdes)).parent.glob("*.py")} - {
        "__init__",
        "pde",
        "line",
        "learned",
        "scaling",
        "evolution",
    }
    assert (
        files == {cls.__module__.rsplit(".", 1)[1] for cls in pdes.BY_NAME.values()} == set(pdes.BY_NAME)
    )
    assert all(getattr(pdes, cls.__name__) is pdes.get_pde(name) for name, cls in pdes.BY_NAME.items())
    with pytest.raises(ValueError, match="no PDE is called 'heat'; there are diffusion, wave"):
        pdes.get_pde("heat")


@every_pde
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 1), (2, 3, 4)])
def test_steps_keep_shape_and_dtype(make, dtype, shape):
    u = torch.rand(shape).to(dtype)
    for line in (pdes.Line(), pdes.Line(periodic=True), pdes.Line(-len(shape))):
        moved = pdes.evolve(make(), u, line, 3, 1.0)
        assert moved.shape == u.shape
        assert moved.dtype == dtype


@every_pde
@pytest.mark.parametrize("periodic", [False, True])
def test_gradients_of_the_steps_and_their_coefficients(make, periodic):
    names, tensors = learnt(make)
    u, line = (
        maps(2, 4).requires_grad_(),
        pdes.Line(open=None if periodic else faces(4)[1][:2], periodic=periodic),
    )
    run = lambda u, *cs: pdes.evolve(make(**dict(zip(names, cs))), u, line, 3, 1.0)
    assert torch.autograd.gradcheck(run, (u, *tensors))


@every_pde
def test_coefficients_of_heads_are_those_of_each_head(make):
    names, tensors = learnt(make)
    u = maps()
    together = pdes.evolve(make(**dict(zip(names, tensors))), u, pdes.Line(), 4, 1.0)
    for head in range(2):
        alone = make(**{n: t[head].item() for n, t in zip(names, tensors)})
        torch.testing.assert_close(
            together[head], pdes.evolve(alone, u[head], pdes.Line(), 4, 1.0), rtol=1e-13, atol=1e-15
        )
    assert make(**dict(zip(names, tensors))).max_dt() == pytest.approx(
        min(make(**{n: t[head].item() for n, t in zip(names, tensors)}).max_dt() for head in range(2))
    )


@linear_pde
def test_rows_keep_their_mass(make):
    for opened in faces():
        u = maps()
        moved = pdes.evolve(make(), u, pdes.Line(open=opened), 8, 1.0)
        assert (moved.sum(-1) - 1).abs().max() < 1e-12
        assert (moved - u).abs().max() > 1e-6
    assert (
        pdes.evolve(make(), maps(), pdes.Line(periodic=True), 8, 1.0).sum(-1) - 1
    ).abs().max() < 1e-12


@linear_pde
def test_stepping_the_values_is_the_adjoint(make):
    """<A M, V> = <A, V M^T> for the matrix M of all steps, row by row and on the whole."""
    for line in (*(pdes.Line(open=opened) for opened in faces()), pdes.Line(periodic=True)):
        a, v = maps(), torch.randn(2, 6, 6, dtype=torch.float64)
        left = (pdes.evolve(make(), a, line, 5, 1.0) * v).sum(-1)
        right = (a * pdes.evolve(make(), v, line.adjoint, 5, 1.0)).sum(-1)
        torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-14)
    opened = torch.rand(5) > 0.3  # one row of walls for all: then A(Nt) V = A(0) W
    values = torch.randn(2, 6, 3, dtype=torch.float64)
    a = maps()
    left = pdes.evolve(make(), a, pdes.Line(open=opened), 5, 1.0) @ values
    right = a @ pdes.evolve(make(), values, pdes.Line(-2, opened[:, None]).adjoint, 5, 1.0)
    torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-14)


@every_pde
def test_nothing_passes_a_wall(make):
    u, opened = maps(), faces()[1]
    u = u.tril()
    moved = pdes.evolve(make(), u, pdes.Line(open=opened), 8, 1.0)
    assert torch.equal(moved, moved.tril())
    assert not torch.equal(pdes.evolve(make(), u, pdes.Line(), 8, 1.0).triu(1), torch.zeros(2, 6, 6))


@every_pde
@pytest.mark.parametrize("axis", ["key", "query", "both"])
def test_steps_within_the_limit_stay_small(make, axis):
    pde = make()
    lines = {"key": pdes.Line(), "query": pdes.Line(-2), "both": pdes.Plane(pdes.Line(), pdes.Line(-2))}
    pde.check(pde.max_dt(axis), axis)
    u = torch.rand(16, 16, dtype=torch.float64)
    assert pdes.evolve(pde, u, lines[axis], 200, 0.98 * pde.max_dt(axis)).abs().max() < 100
    with pytest.raises(
        ValueError, match=r"dt = .* is unstable for .* \(limit .*\); take 3 times as many"
    ):
        pde.check(2.5 * pde.max_dt(axis), axis)
    with pytest.raises(ValueError, match="axis 'keys' is not one of key, query, both"):
        pde.max_dt("keys")


@pytest.mark.sampled(1)
@every_pde
def test_steps_can_be_compiled_whole(make):
    names, tensors = learnt(make)
    line = pdes.Line(open=faces()[1])

    def run(u, *cs):
        pde = make(**dict(zip(names, cs)))
        return pdes.evolve(pde, u, line, 3, 1.0) + pdes.evolve(make(), u, line.adjoint, 3, 1.0)

    whole = torch.compile(run, fullgraph=True, backend="aot_eager")
    u = maps()
    torch.testing.assert_close(whole(u, *tensors), run(u, *tensors))


@every_pde
def test_repr_makes_the_same_pde(make):
    pde = make()
    again = eval(repr(pde), {type(pde).__name__: type(pde)})  # a test of our own repr
    assert again == pde
    assert hash(again) == hash(pde)
    name = coefficients(pde)[0]
    assert make(**{name: 0.07}) != pde
    tensor = torch.rand(2, 1, 1)
    assert make(**{name: tensor}) == make(**{name: tensor})
    assert make(**{name: tensor}) != make(**{name: tensor.clone()})
    with pytest.raises(FrozenInstanceError):
        setattr(pde, name, 1.0)
    with pytest.raises(ValueError, match=f"{name} = nan of"):
        make(**{name: float("nan")})


@every_pde
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("axis", ["key", "both"])
def test_learnt_coefficients_start_where_told_and_stay_stable(make, heads, axis):
    pde, names = make(), coefficients(make())
    learned = pdes.LearnedPDE(pde, heads, dt=0.7, axis=axis)
    for name in names:
        value = getattr(learned(), name)
        assert value.shape == (heads or 1, 1, 1)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, torch.full_like(value, getattr(pde, name)), rtol=3e-7, atol=0)
    slopes = torch.autograd.grad(sum(getattr(learned(), n).sum() for n in names), learned.parameters())
    assert all((g.abs() > 0.02).all() and (g.abs() < 20).all() for g in slopes)
    for corner in torch.cartesian_prod(
        *[torch.tensor([-1e9, -20.0, -3.0, 0.0, 3.0, 20.0, 1e9])] * len(names)
    ):
        with torch.no_grad():
            for parameter, raw in zip(learned.parameters(), corner.reshape(-1)):
                parameter.fill_(raw)
        numbers = {n: getattr(learned(), n).flatten()[0].item() for n in names}
        make(**numbers).check(0.7, axis)  # raises if it is not stable


# ---- gates: everything residual/gates exports

every_gate = pytest.mark.parametrize("make", gates.BY_NAME.values(), ids=gates.BY_NAME)
every_precision = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)


def branch(size=(4, 5), batch=3, channels=6, dtype=torch.float64):
    """The output of a residual branch, and its shortcut."""
    return torch.randn(2, batch, channels, *size, dtype=torch.float64).to(dtype).unbind(0)


def stirred(gate):
    """The gate with every parameter and statistic moved away from where it starts."""
    with torch.no_grad():
        statistics = [(name, b) for name, b in gate.named_buffers() if "running" in name]
        for name, p in [*gate.named_parameters(), *statistics]:
            p.add_(0.4 * torch.rand_like(p) if "running_var" in name else 0.4 * torch.randn_like(p))
    return gate


def gated(gate, f, x):
    """One pass through a stage of one block."""
    gate.start()
    return gate(f, x)


def test_every_gate_is_in_a_file_and_has_a_name():
    from pathlib import Path

    files = {p.stem for p in Path(inspect.getfile(gates)).parent.glob("*.py")}
    assert (
        files - {"__init__", "gate", "excitation"}
        == {cls.__module__.rsplit(".", 1)[1] for cls in gates.BY_NAME.values()}
        == set(gates.BY_NAME)
    )
    for name, cls in gates.BY_NAME.items():
        assert cls.__name__.lower() == name
        assert cls.__name__ in gates.__all__
        assert getattr(gates, cls.__name__) is cls is gates.get_gate(name)
        assert type(gates.make_gate(name, 6)) is cls
    with pytest.raises(ValueError, match="no gate is called 'senet'; the names are none, se, cbam"):
        gates.get_gate("senet")


@every_gate
def test_gate_is_made_with_its_channels_first(make):
    first, *options = inspect.signature(make).parameters.values()
    assert first.name == "channels"
    assert all(o.default is not o.empty for o in options)
    assert {o.name for o in options if o.kind is o.KEYWORD_ONLY} >= {"identity", "device", "dtype"}
    assert make.__doc__ is not None
    paper = inspect.getmodule(make).__doc__
    assert paper.startswith(make.__name__)
    assert any(str(year) in paper for year in range(2018, 2025))
    assert all(p.device.type == "meta" for p in make(6, device="meta").state_dict().values())
    assert {p.dtype for p in make(6, dtype=torch.float64).parameters()} == {torch.float64}
    for wrong in (0, -3, 2.0, True, "64"):
        with pytest.raises(ValueError, match=rf"{make.__name__}\(channels=.*positive integer"):
            make(wrong)
    for shape in ((3, 5, 4, 4), (3, 6), (3, 6, 4), (6, 4, 4)):
        with pytest.raises(ValueError, match=r"takes \[batch, 6, height, width\]"):
            make(6)(torch.rand(shape), torch.rand(shape))


@every_gate
@every_precision
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (7, 4), (9, 9)])
def test_gate_keeps_shape_and_dtype_at_any_size(make, dtype, size):
    f, x = branch(size, dtype=dtype)
    before = f.clone()
    for gate in (
        make(6, dtype=dtype),
        make(6, identity=True, dtype=dtype),
        stirred(make(6, dtype=dtype)),
    ):
        for training in (True, False):
            out = gated(gate.train(training), f, x)
            assert out.shape == f.shape
            assert out.dtype == dtype
            assert out.isfinite().all()
    assert torch.equal(f, before)


@every_gate
@pytest.mark.parametrize("identity", [False, True])
def test_gate_multiplies_by_its_weights(make, identity):
    gate = stirred(make(6, identity=identity, dtype=torch.float64))
    f, x = branch()
    gate.start()
    factor = gate.weights(f, x)
    assert factor.dtype == f.dtype
    assert torch.broadcast_shapes(factor.shape, f.shape) == f.shape
    assert factor.min() >= 0
    assert factor.max() <= (2**make.sigmoids if identity else 1)
    assert factor.std() > 1e-4  # it does look at f
    if not make.normalisation:
        torch.testing.assert_close(gated(gate, f, x), f * factor, rtol=1e-13, atol=1e-14)
    if not make.needs_x:
        assert torch.equal(gated(gate, f, None), gated(gate, f, x))


@every_gate
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_of_a_gate(make, training):
    gate = stirred(make(6, dtype=torch.float64)).train(training)
    names, parameters = zip(*gate.named_parameters())
    f, x = (t.requires_grad_() for t in branch((2, 3)))

    def run(f, x, *parameters):
        gate.start()
        return torch.func.functional_call(gate, dict(zip(names, parameters)), (f, x))

    assert torch.autograd.gradcheck(run, (f, x, *parameters), fast_mode=True)


@every_gate
def test_gradients_of_a_gate_are_finite_where_nothing_varies(make):
    gate = stirred(make(6))
    for f in (torch.zeros(3, 6, 4, 4), torch.ones(3, 6, 1, 1), torch.full((3, 6, 4, 4), 1e4)):
        out = gated(gate, f.requires_grad_(), f.detach())
        gradients = torch.autograd.grad(out.square().mean(), [f, *gate.parameters()])
        assert all(g.isfinite().all() for g in gradients)


@every_gate
@every_precision
@pytest.mark.parametrize("training", [True, False])
def test_gate_that_starts_at_one_changes_nothing_and_learns(make, dtype, training):
    gate = make(6, identity=True, dtype=dtype).train(training)
    f, x = branch(dtype=dtype)
    plain = torch.nn.BatchNorm2d(6, dtype=dtype).train(training)(f) if make.normalisation else f
    for _ in range(3):  # blocks of a stage
        out = gate(f, x)
        assert torch.equal(out, plain)
    out.float().square().sum().backward()
    own = [p for n, p in gate.named_parameters() if not n.startswith("norm.") or not make.normalisation]
    assert any(p.grad.abs().max() > 0 for p in own)
    with torch.no_grad():
        for p in own:
            p.sub_(0.1 * p.grad.sign())
    assert not torch.equal(gated(gate, f, x), plain)


@every_gate
def test_gate_is_restored_from_its_state(make):
    gate = stirred(make(6))
    f, x = branch(dtype=torch.float32)
    gated(gate, f, x)  # statistics move
    again = make(6)
    again.load_state_dict(gate.state_dict(), strict=True)
    for training in (True, False):
        assert torch.equal(gated(again.train(training), f, x), gated(gate.train(training), f, x))


@every_gate
def test_gate_can_be_copied_after_use(make):
    gate = stirred(make(6))
    f, x = branch(dtype=torch.float32)
    gated(gate, f.requires_grad_(), x)
    again = deepcopy(gate)
    assert torch.equal(gated(again, f, x), gated(gate, f, x))
    assert not {id(p) for p in again.parameters()} & {id(p) for p in gate.parameters()}
    assert len(again.state_dict()) == len(gate.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [pytest.param(x, marks=() if name in ("se", "dia", "stepnet") else pytest.mark.slow)
     for name, x in gates.BY_NAME.items()],
    ids=gates.BY_NAME,
)  # fmt: skip
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gate_can_be_compiled_whole(make, training):
    gate = stirred(make(6)).train(training)
    twin = deepcopy(gate)
    whole = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for size in ((4, 5), (6, 3)):
        f, x = branch(size, dtype=torch.float32)
        results = []
        for g, run in ((gate, gate), (twin, whole)):
            g.start()
            g.zero_grad()
            leaf = f.clone().requires_grad_()
            out = run(run(leaf, x), x)  # two blocks
            out.square().sum().backward()
            results.append([out, leaf.grad, *(p.grad for p in g.parameters())])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@every_gate
def test_samples_of_a_batch_do_not_see_each_other(make):
    gate = stirred(make(6, dtype=torch.float64)).eval()
    f, x = branch()
    together = gated(gate, f, x)
    alone = torch.cat([gated(gate, f[i : i + 1], x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-13)


@every_gate
def test_gate_under_autocast_keeps_its_statistics_wide(make):
    gate = stirred(make(32)).eval()
    f, x = branch(batch=8, channels=32, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = gated(gate, f, x)
    assert out.dtype == torch.bfloat16
    exact = gated(deepcopy(gate).double(), f.double(), x.double())
    assert (out - exact).abs().max() < 0.02 * exact.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        gate.start()
        assert gate.weights(f.float(), x.float()).dtype == torch.float32


@every_gate
def test_gate_keeps_channels_last(make):
    gate = stirred(make(6))
    f, x = (t.to(memory_format=torch.channels_last) for t in branch(dtype=torch.float32))
    out = gated(gate, f, x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()
    torch.testing.assert_close(out, gated(gate, f.contiguous(), x.contiguous()))
