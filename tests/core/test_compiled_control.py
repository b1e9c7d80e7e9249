"""Rounds under error control as one compiled loop: the results are those of the Python loop."""

import math

import pytest
import torch

import attractor as at
from attractor.core import control
from attractor.core.control import controlled
from attractor.core.rounds import Control, rounded

F64 = dict(dtype=torch.float64)


def kepler(t, u):
    x, y, vx, vy = u.unbind(-1)
    pull = (x * x + y * y) ** -1.5
    return torch.stack((vx, vy, -x * pull, -y * pull), -1)


def orbits(*eccentricities, **how):
    states = [[1 - e, 0.0, 0.0, math.sqrt((1 + e) / (1 - e))] for e in eccentricities]
    return torch.tensor(states, **{**F64, **how})


def until_singular(t, u):
    return u**2  # infinite at t = 1 / u0


def not_a_number_later(t, u):
    return torch.where((t > 0.4) & (u > 1.5), torch.nan, -u)


def driven(t, u, p):
    return torch.stack((u[..., 1], -p[..., 0] * u[..., 0].sin() + p[..., 1] * t[..., 0].cos()), -1)


def shrinking(t, u):
    return -u * t.cos()


ROWS = torch.tensor([[1.0], [2.0], [0.5]], **F64)
P = torch.tensor([[1.0, 0.1], [2.0, 0.3], [0.5, 0.0]], **F64)
STARTS = torch.tensor([[0.3, 1.0], [1.2, 0.1], [0.0, 0.0]], **F64)
TWO = [0.0, 3.0]
SPREAD = torch.tensor([[0.0, 0.1, 0.0], [2.0, 3.0, 4.0], [3.0, 9.0, 5.0]], **F64)

_D = at.schemes.DOPRI5
LANDING = at.Scheme("dopri5 without an interpolant", _D.a, _D.b, _D.c, 5, b_low=_D.b_low)

# rate, u0, t, scheme and arguments
CASES = {
    "dop853": (kepler, orbits(0.1, 0.5, 0.9), [0.0, 10.0], "dop853", dict(rtol=1e-7, atol=1e-7)),
    "tsit5": (kepler, orbits(0.1, 0.7), TWO, "tsit5", dict(rtol=1e-6)),
    "back in time": (kepler, orbits(0.1, 0.7), [3.0, -1.0], "dopri5", dict(rtol=1e-6)),
    "one orbit": (kepler, orbits(0.3), TWO, "dop853", dict(rtol=1e-8)),
    "no batch": (shrinking, ROWS[:, 0], TWO, "tsit5", dict(rtol=1e-6)),
    "batch of two dimensions": (shrinking, ROWS.expand(2, 3, 1), TWO, "tsit5", dict(rtol=1e-6)),
    "float32": (kepler, orbits(0.1, 0.7, dtype=torch.float32), TWO, "dopri5", dict(rtol=1e-4)),
    "parameters": (driven, STARTS, TWO, "dop853", dict(rtol=1e-8, parameters=P)),
    "one row of parameters": (driven, STARTS, TWO, "tsit5", dict(rtol=1e-5, parameters=P[1])),
    "tolerances per component": (
        kepler, orbits(0.1, 0.7), TWO, "tsit5",
        dict(rtol=torch.tensor([1e-5, 1e-6, 1e-3, 1e-3], **F64), atol=torch.tensor([[1e-6], [1e-9]], **F64)),
    ),
    "no absolute tolerance": (shrinking, 0 * ROWS, TWO, "dop853", dict(rtol=1e-6, atol=0.0)),
    "singular": (until_singular, 0.4 * ROWS, TWO, "dopri5", dict(rtol=1e-6)),
    "not a number": (not_a_number_later, 2.0 * ROWS, TWO, "tsit5", dict(rtol=1e-6)),
    "max_steps": (kepler, orbits(0.1, 0.99), [0.0, 6.0], "dopri5", dict(rtol=1e-8, max_steps=60)),
    "wanted times": (kepler, orbits(0.1, 0.7), [0.0, 3.0, 3.1, 9.0], "dop853", dict(rtol=1e-8)),
    "times per trajectory": (driven, STARTS, SPREAD, "tsit5", dict(rtol=1e-8, parameters=P)),
    "landing": (kepler, orbits(0.1, 0.7), [0.0, 3.0, 3.1, 9.0], LANDING, dict(rtol=1e-8)),
}  # fmt: skip


@pytest.fixture
def loops(monkeypatch):
    """Rounds that the compiled loop took, one number per call."""
    taken = []

    def recorded(function):
        def call(*args):
            result = function(*args)
            if result is not None:
                taken.append(result[0])
            return result

        return call

    for name in ("compiled_rounds", "native_rounds"):
        monkeypatch.setattr(control, name, recorded(getattr(control, name)))
    return taken


def assert_same(fast, plain):
    single = plain.u.dtype == torch.float32  # in which the last bits of an estimate decide about a step
    for name in ("steps", "rate_calls", "accepted", "rejected"):
        counts = (torch.as_tensor(getattr(x.stats, name)).double() for x in (fast, plain))
        torch.testing.assert_close(*counts, rtol=0.1 if single else 0.0, atol=1.0 if single else 0.0)
    assert torch.equal(fast.status, plain.status)
    assert torch.equal(fast.ok, plain.ok)
    torch.testing.assert_close(fast.until, plain.until, rtol=1e-9, atol=0)
    close = 1e-4 if single else 1e-9
    torch.testing.assert_close(fast.u[:, plain.ok], plain.u[:, plain.ok], rtol=close, atol=close)
    torch.testing.assert_close(fast.u, plain.u, rtol=0.1, atol=close)  # beside a singularity


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_compiled_rounds_are_those_of_the_python_loop(case, compiler, loops):
    rate, u0, t, scheme, how = CASES[case]
    with torch.no_grad():
        plain = at.evolve(rate, u0, t, scheme, **how)
        assert loops == []
        fast = at.evolve(rate, u0, t, scheme, compile=True, **how)
    assert_same(fast, plain)
    if len(t) == 2 or compiler == "native":
        assert loops == [fast.stats.steps]
    else:
        assert 0 < sum(loops) < plain.stats.steps


@pytest.mark.slow
@pytest.mark.parametrize("least", [0.0, 0.05])
def test_compiled_rounds_with_pi_control_and_a_first_and_least_step(least, compiler, loops):
    how = Control(rtol=1e-6, atol=1e-8, beta=0.08, first=0.3, least=least, most=0.5)
    args = kepler, orbits(0.1, 0.7), torch.tensor(TWO, **F64), at.schemes.DOPRI5, how
    with torch.no_grad():
        plain, fast = (controlled(*args, compile=compile) for compile in (False, True))
    assert_same(fast, plain)
    assert loops == [plain.stats.steps]


@pytest.mark.slow
def test_one_compiled_loop_serves_all_tolerances_times_and_parameters(compiler, monkeypatch):
    made, compile = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **how: made.append(1) or compile(*args, **how))
    with torch.no_grad():
        at.evolve(driven, STARTS, TWO, "tsit5", parameters=P, rtol=1e-6, compile=True)
        with torch.compiler.set_stance("fail_on_recompile"):
            for t, p, tolerance in (
                (TWO, 2 * P, 1e-5),
                ([3.0, 1.0], P, 1e-8),
                ([1.0, 9.0], 0 * P, 1e-3),
            ):
                how = dict(parameters=p, rtol=tolerance, atol=tolerance)
                fast = at.evolve(driven, STARTS, t, "tsit5", compile=True, **how)
                assert_same(fast, at.evolve(driven, STARTS, t, "tsit5", **how))
    # The loop, or the rate and the norm; and one attempt for rounds in Python, which is not called.
    assert len(made) in ((1, 2, 3) if compiler == "native" else (2,))


@pytest.mark.slow
def test_a_rate_that_branches_on_its_state_is_stepped_in_python(compiler, loops):
    def rate(t, u):
        return -u if float(u.sum()) < 1e9 else u

    with torch.no_grad():
        plain = at.evolve(rate, ROWS, TWO, "tsit5", rtol=1e-6)
        assert_same(at.evolve(rate, ROWS, TWO, "tsit5", rtol=1e-6, compile=True), plain)
    assert loops == []


@pytest.mark.slow
def test_gradients_of_compiled_parameters(compiler, loops):
    def gradient(compile):
        p = P.clone().requires_grad_()
        solved = at.evolve(driven, STARTS, TWO, "tsit5", parameters=p, rtol=1e-8, compile=compile)
        return torch.autograd.grad(solved.final.sum(), p)[0]

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-8, atol=1e-8)
    assert loops == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_sizes_are_rounded_to_twelve_bits(dtype):
    x = torch.logspace(-30, 30, 601, dtype=dtype)
    near = rounded(x)
    assert ((near - x).abs() <= x * 2**-12).all()
    mantissa = torch.frexp(near).mantissa * 2**12
    assert torch.equal(mantissa, mantissa.round())
    assert rounded(torch.tensor([1e-200, 1e200], **F64)).isfinite().all()


@pytest.mark.parametrize("scheme", ["bosh3", "dopri5", "tsit5", "dop853"])
def test_states_at_many_times_are_computed_in_the_loop(scheme, loops):
    """Some of the times are ends of steps, and some trajectories end at times of their own."""
    start, last = torch.zeros(1, 5, **F64), torch.tensor([2.0, 3.0, 4.0, 1.0, 2.5], **F64)
    own = start + torch.linspace(0, 1, 40, **F64)[:, None] ** 2 * last
    u0 = orbits(0.0, 0.2, 0.4, 0.6, 0.8)
    for t in (own, own[:, 2], own.flip(0)):
        with torch.no_grad():
            plain = at.evolve(kepler, u0, t, scheme, rtol=1e-6, atol=1e-8)
            fast = at.evolve(kepler, u0, t, scheme, rtol=1e-6, atol=1e-8, compile=True)
        assert_same(fast, plain)
        assert loops.pop() == plain.stats.steps


def test_blocks_of_trajectories_take_their_own_rounds(loops):
    """A trajectory takes the same steps alone and among 50 others, on two threads."""
    u0, count = orbits(*torch.linspace(0, 0.9, 51).tolist()), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            together = at.evolve(kepler, u0, TWO, "dop853", rtol=1e-7, compile=True)
            for i in (0, 25, 50):
                alone = at.evolve(kepler, u0[i : i + 1], TWO, "dop853", rtol=1e-7, compile=True)
                torch.testing.assert_close(alone.u[:, 0], together.u[:, i], rtol=1e-12, atol=1e-12)
                assert alone.stats.steps == together.stats.accepted[i] + together.stats.rejected[i]
    finally:
        torch.set_num_threads(count)
    assert loops[0] == together.stats.steps


def test_norms_of_the_error(loops):
    for norm in (lambda e: e.abs().amax(-1, keepdim=True), lambda e: e[..., :1].abs()):
        how = Control(rtol=1e-6, atol=1e-8, norm=norm)
        args = kepler, orbits(0.1, 0.7), torch.tensor(TWO, **F64), at.schemes.DOPRI5, how
        with torch.no_grad():
            plain, fast = (controlled(*args, compile=compile) for compile in (False, True))
        assert_same(fast, plain)
        assert loops.pop() == plain.stats.steps


@pytest.mark.slow
def test_parameters_with_gradients_are_stepped_in_torch(loops):
    """The rate reads them where nobody can see that before it is called."""
    settings = {"pull": torch.tensor(1.0, **F64, requires_grad=True)}

    def rate(t, u):
        return -settings["pull"] * u

    solved = at.evolve(rate, ROWS, TWO, "tsit5", rtol=1e-6, compile=True)
    (gradient,) = torch.autograd.grad(solved.final.sum(), settings["pull"])
    torch.testing.assert_close(gradient, -3 * ROWS.sum() * math.exp(-3), rtol=1e-5, atol=0.0)
    assert loops == []
