"""Loops in C compute what the same steps compute in torch, and leave to torch what they cannot express."""

import threading

import pytest
import torch

import attractor as at
from attractor.core.chunks import Guard, LoopResult, corrected_step
from attractor.core.grid import native_loop
from attractor.core.native import compiler
from attractor.core.native.scalars import Program
from attractor.core.native.steps import _functions
from attractor.core.tableaus import get_scheme
from attractor.ode.trust import TrustRegion

F64 = dict(dtype=torch.float64)
WEIGHTS = torch.randn(12, 12, generator=torch.Generator().manual_seed(3), **F64) / 12


def states(*shape, dtype=torch.float64):
    """Numbers between 0.2 and 0.9, where every function of the tests is smooth."""
    return 0.2 + 0.7 * torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def steps_in_torch(rate, scheme, correction, guard, t, dt, u, anywhere, parameters):
    """Return what `attractor.core.chunks.step_loop` describes, from steps in Python."""
    stayed = inside = torch.ones_like(anywhere)
    for i in range(len(t) + 1):
        if guard is not None:
            inside = guard.inside(u)
        if i == len(t) or not (inside | anywhere).all():
            break
        stayed = stayed & inside
        u = corrected_step(rate, scheme, correction, t[i], dt[i], u, parameters)
    return LoopResult(i, u, inside, stayed)


def run_both(rate, u, scheme="rk4", parameters=None, correction=None, guard=None, steps=5, size=0.01):
    """Return the results of the loop in C, which must exist, and of steps in torch."""
    scheme = get_scheme(scheme)
    t, dt = torch.linspace(0.1, 0.5, steps).to(u), torch.full((steps,), size).to(u)
    anywhere = torch.zeros(u.shape[:-1], dtype=torch.bool)
    step = rate, scheme, correction, guard, t, dt, u
    with torch.no_grad():
        native = native_loop(*step, parameters)
        assert native is not None
        fast = native(t, dt, torch.tensor(steps), u, anywhere, parameters)
        return fast, steps_in_torch(*step, anywhere, parameters)


def assert_equal(fast, plain, **tolerances):
    torch.testing.assert_close(fast.u, plain.u, **tolerances)
    assert int(fast.taken) == int(plain.taken)
    assert torch.equal(fast.inside, plain.inside)
    assert torch.equal(fast.stayed, plain.stayed)


def write_in_place(t, u):
    k = torch.empty_like(u)
    k[..., 0], k[..., 1:] = u[..., 1] * t, u[..., :-1] ** 2
    return k


def ring(t, u):
    left, right = torch.roll(u, 1, -1), torch.roll(u, -1, -1)
    grid = torch.linspace(0, 1, u.shape[-1], dtype=u.dtype)
    return left - 2 * u + right - u * (right - left) / 2 + torch.sin(3 * grid)


def attraction(t, u):
    q, v = u.unflatten(-1, (-1, 2)).chunk(2, -2)
    d = q[..., None, :, :] - q[..., :, None, :]
    k = (d / ((d * d).sum(-1, keepdim=True) + 0.1) ** 1.5).sum(-2)
    return torch.cat((v, k), -2).flatten(-2)


RATES = {
    "polynomial": lambda t, u: u**3 - 2 * u**2 + u / 3 - t,
    "powers": lambda t, u: u**0.5 + u**-1.5 + u**2.7 + 1.1**u + u ** u.roll(1, -1),
    "exponential": lambda t, u: torch.exp(-u) + torch.log1p(u) + torch.expm1(u) + torch.log(u),
    "circular": lambda t, u: torch.sin(u) * torch.cos(t) - torch.tan(u / 2) + torch.atan2(u, u + 1),
    "inverse": lambda t, u: torch.asin(u / 2) + torch.acos(u / 3) + torch.atan(u) + torch.rsqrt(u),
    "hyperbolic": lambda t, u: torch.sinh(u) + torch.cosh(u) + torch.tanh(u) + torch.sigmoid(u),
    "branches": lambda t, u: torch.where((u > 0.5) & ~(u > 0.8), u, -u) + u.clamp(0.3, 0.6),
    "signs": lambda t, u: (u - 0.5).abs() + torch.sign(u - 0.4) + torch.relu(u - 0.5) + (u > 0.5) * u,
    "extremes": lambda t, u: torch.maximum(u, u.flip(-1)) - torch.minimum(u, 1 - u),
    "sums": lambda t, u: u.mean(-1, keepdim=True) - u.cumsum(-1) / u.norm(dim=-1, keepdim=True),
    "reductions": lambda t, u: torch.where((u > 0.3).all(-1, keepdim=True), u.amax(-1, keepdim=True), u),
    "any": lambda t, u: torch.where((u[..., :6] > 0.8).any(-1), 1.0, t)[..., None] * u.amin(-1, True) - u,
    "indices": lambda t, u: u[..., [1, 2, 0, *range(3, u.shape[-1])]] * u[..., :1],
    "products": lambda t, u: torch.tanh(u @ WEIGHTS) - u,
    "rows": lambda t, u: torch.einsum("ij,...j->...i", WEIGHTS[::2].repeat(2, 1), u) - u,
    "cross": lambda t, u: torch.linalg.cross(u[..., :3], u[..., 3:6], dim=-1).repeat(*[1] * (u.dim() - 1), 4),
    "constants": lambda t, u: torch.arange(u.shape[-1]) // 2 * u + torch.full_like(u, 2.0),
    "padding": lambda t, u: torch.nn.functional.pad(u[..., 1:-1], (1, 1), value=0.5) - u,
    "writing": write_in_place,
    "ring": ring,
    "attraction": attraction,
}  # fmt: skip


@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
def test_operators_are_those_of_torch(rate):
    fast, plain = run_both(rate, states(5, 12))
    assert_equal(fast, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("scheme", ["euler", "midpoint", "rk4", "dopri5", "dop853"])
def test_schemes_and_shapes(scheme):
    for shape in ((3,), (1, 3), (40, 3), (2, 3, 3)):
        fast, plain = run_both(RATES["circular"], states(*shape), scheme)
        assert fast.u.shape == shape
        assert_equal(fast, plain, rtol=1e-13, atol=1e-13)


def test_float32():
    fast, plain = run_both(RATES["circular"], states(9, 3, dtype=torch.float32))
    assert fast.u.dtype == torch.float32
    assert_equal(fast, plain, rtol=2e-6, atol=2e-6)


def test_parameters_of_trajectories():
    fast, plain = run_both(lambda t, u, p: p[..., :1] * u - p[..., 1:] * u**2, states(11, 2), "dopri5",
                           parameters=torch.rand(11, 3, **F64)[:, :3])  # fmt: skip
    assert_equal(fast, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("features", [0, 16])
def test_corrections_and_trust_regions(features):
    """Steps end before the first one that leaves, for all trajectories together."""

    def correction(step):
        x = torch.cat((step.u, step.slope, *step.stages), -1)
        weights = torch.linspace(-1, 1, x.shape[-1] * max(features, 3), **F64).view(x.shape[-1], -1)
        hidden = x @ weights
        return 1e-3 * (hidden if not features else torch.sin(hidden) @ torch.ones(features, 3, **F64))

    u = states(21, 3)
    for bound in (3.0, 1.2):
        guard = Guard(lambda u, bound=bound: (u.abs() < bound).all(-1), None)
        fast, plain = run_both(
            lambda t, u: u * u + 0.5, u, correction=correction, guard=guard, steps=12, size=0.05
        )
        assert (int(fast.taken) == 12) == (bound == 3.0)
        assert_equal(fast, plain, rtol=1e-12, atol=1e-12)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "shape", [(40, 3), pytest.param((1, 3), marks=SLOW), pytest.param((9, 17), marks=SLOW)], ids=str
)
def test_regions_and_networks_in_float32(shape):
    """A fitted trust region and a network in float32 do not keep steps of float64 states from a loop."""
    u = states(*shape)
    correction = at.corrections.Stages(shape[-1], 4, precision="float32", **F64).requires_grad_(False)
    correction.net.head.weight.mul_(1e-3)
    for away in (0.0, 5.0):
        seen = u[:1] + away + 3 * (torch.rand(500, shape[-1], **F64) - 0.5)
        guard = TrustRegion.around(seen).guard(get_scheme("rk4"))
        fast, plain = run_both(lambda t, u: torch.sin(u) - u / 2, u, correction=correction, guard=guard)
        assert_equal(fast, plain, rtol=1e-6, atol=1e-6)
        assert (int(fast.taken) > 0) == (away == 0.0)


@pytest.mark.parametrize("dim", [1, 3, pytest.param(13, marks=SLOW)])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_linear_maps_of_stages(dim, share):
    """A map with few weights is written weight by weight."""
    generator = torch.Generator().manual_seed(1)
    correction = at.corrections.Stages(dim, 0, stages=6, **F64).requires_grad_(False)
    weight = correction.net.head.weight
    weight.mul_(torch.rand(weight.shape, generator=generator, **F64) < share)
    u, scheme = states(21, dim), get_scheme("dopri5")
    fast, plain = run_both(lambda t, u: u * u + 0.5 - t, u, "dopri5", correction=correction)
    assert_equal(fast, plain, rtol=1e-12, atol=1e-12)
    t = torch.zeros(2, **F64)
    step = _functions(lambda t, u: u * u, scheme, correction, None, t, t, u, None)
    assert (step.affine is None) == (share == 1.0)


def refused(rate, *shape, parameters=None, dtype=torch.float64):
    u = states(*shape, dtype=dtype)
    t = torch.linspace(0, 1, 4).to(u)
    with torch.no_grad():
        return native_loop(rate, get_scheme("rk4"), None, None, t, t + 0.1, u, parameters) is None


OF_TRAJECTORIES = torch.rand(4, 1, **F64)
OTHERS = {
    "a mean over trajectories": lambda t, u: u - u.mean(0),
    "weights for each trajectory": lambda t, u: u * OF_TRAJECTORIES,
    "random numbers": lambda t, u: u + torch.randn(3, dtype=u.dtype),
    "unknown operators": lambda t, u: torch.special.bessel_j0(u),
    "numbers of another dtype": lambda t, u: torch.sin(u.float()).double(),
    "integers": lambda t, u: u.round().long() * u,
    "a branch on the state": lambda t, u: u if u.sum() > 0 else -u,
    "an index from the state": lambda t, u: u[..., u[0].argsort()],
    "a rate of another shape": lambda t, u: u[..., :1],
}


@pytest.mark.parametrize("rate", OTHERS.values(), ids=OTHERS)
def test_other_rates_are_left_to_torch(rate):
    assert refused(rate, 4, 3)


def test_other_states_are_left_to_torch():
    rate = RATES["polynomial"]
    assert not refused(rate, 4, 3)
    assert refused(rate, 4, 3, dtype=torch.bfloat16)
    assert refused(rate, 4, 0)


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiler, "_LIBRARIES", {})
    compiler.compiled_library.cache_clear()
    assert refused(lambda t, u: u * 1.2345, 4, 3)
    compiler.compiled_library.cache_clear()


def test_a_rate_that_changes_is_traced_again():
    class Decay:
        def __init__(self):
            self.speed, self.weight = 1.0, torch.tensor(1.0, **F64)

        def __call__(self, t, u):
            return -self.speed * self.weight * u

    decay, u = Decay(), states(4, 2)
    t = torch.linspace(0, 1, 21, **F64)

    def end():
        with torch.no_grad():
            return at.evolve(decay, u, t, "rk4", every=20, compile=True).u[-1] / u

    expected = torch.ones_like(u)
    torch.testing.assert_close(end(), expected * torch.tensor(-1.0, **F64).exp(), rtol=1e-6, atol=0)
    decay.speed = 2.0
    torch.testing.assert_close(end(), expected * torch.tensor(-2.0, **F64).exp(), rtol=1e-5, atol=0)
    decay.weight.mul_(0.5)
    torch.testing.assert_close(end(), expected * torch.tensor(-1.0, **F64).exp(), rtol=1e-6, atol=0)
    decay.weight = torch.tensor(0.0, **F64)
    torch.testing.assert_close(end(), expected)


def test_threads_share_a_loop():
    rate, results = RATES["circular"], [None] * 8

    def solve(i):
        with torch.no_grad():
            results[i] = at.evolve(
                rate,
                states(4, 3) + i / 10,
                torch.linspace(0, 1, 21, **F64),
                "rk4",
                every=20,
                compile=True,
            ).u[-1]

    threads = [threading.Thread(target=solve, args=(i,)) for i in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        plain = at.evolve(rate, states(4, 3) + i / 10, torch.linspace(0, 1, 21, **F64), "rk4", every=20)
        torch.testing.assert_close(result, plain.u[-1], rtol=1e-12, atol=1e-12)


def test_many_trajectories_on_many_threads():
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fast, plain = run_both(RATES["circular"], states(1003, 3))
    finally:
        torch.set_num_threads(count)
    assert_equal(fast, plain, rtol=1e-13, atol=1e-13)


def test_programs_of_scalars():
    program = Program()
    x, y = program.leaf("u", (0,)), program.leaf("u", (1,))
    assert program.node("add", x, y) == program.node("add", x, y)
    assert program.node("mul", program.constant(1.0), x) == x
    assert program.value(program.node("sub", program.constant(3.0), program.constant(1.0))) == 2.0
    assert program.constant(0.0) != program.constant(-0.0)
    assert program.total([program.node("mul", x, program.constant(0.0)), y]) == y
    square = program.node("pow", x, program.constant(2.0))
    assert program.operations[square] == ("mul", (x, x))
