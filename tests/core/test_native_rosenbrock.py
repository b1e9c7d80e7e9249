"""Rosenbrock schemes in C: the same steps as in torch, and exact derivatives."""

import pytest
import torch

import attractor as at
from attractor.core.native import control, native_rounds
from attractor.core.native.aten import UntranslatableError
from attractor.core.native.derivatives import jacobian
from attractor.core.native.tracing import traced
from tests.core.test_native import RATES

F64 = dict(dtype=torch.float64)


@pytest.fixture
def loops(monkeypatch):
    """Results of all calls of `native_rounds`."""
    results = []

    def record(*arguments):
        results.append(native_rounds(*arguments))
        return results[-1]

    monkeypatch.setattr("attractor.core.control.native_rounds", record)
    return results


def robertson(t, u):
    x, y, z = u.unbind(-1)
    first, second, third = 0.04 * x, 1e4 * y * z, 3e7 * y * y
    return torch.stack((second - first, first - second - third, third), -1)


def van_der_pol(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, 100 * (1 - x * x) * v - x), -1)


def forced(t, u, p):
    return -p * (u - torch.cos(t)) - torch.sin(t)


def start(*values, trajectories=11):
    torch.manual_seed(0)
    return torch.tensor(values, **F64) * (1 + 0.1 * torch.rand(trajectories, len(values), **F64))


CASES = {
    "robertson": (robertson, start(1, 1e-4, 1e-1), [0.0, 1.0, 40.0], {}),
    "van der Pol": (van_der_pol, start(2, 0), [0.0, 10.0, 80.0, 100.0], {}),
    "one trajectory": (van_der_pol, start(2, 0, trajectories=1)[0], [0.0, 10.0], {}),
    "backwards": (lambda t, u: u**3 - t, start(1, 0.5), [1.0, 0.5, -2.0], {}),
    "parameters": (forced, start(1, 1), [0.0, 3.0], dict(parameters=torch.logspace(0, 4, 11, **F64)[:, None])),
}  # fmt: skip


def assert_same(fast, plain, rtol=1e-9):
    torch.testing.assert_close(fast.u, plain.u, rtol=rtol, atol=1e-11)
    for name in ("accepted", "rejected"):
        assert torch.equal(getattr(fast.stats, name), getattr(plain.stats, name))
    assert fast.stats.rate_calls == plain.stats.rate_calls
    assert torch.equal(fast.ok, plain.ok)
    torch.testing.assert_close(fast.until, plain.until)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["rodas4", "rodas5p"])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_torch(case, scheme, loops):
    rate, u0, t, options = CASES[case]
    call = lambda **how: at.evolve(rate, u0, t, scheme, rtol=1e-5, atol=1e-8, **options, **how)
    assert_same(call(compile=True), call())
    assert len(loops) == 1
    assert loops[0] is not None


@pytest.mark.slow
def test_states_at_many_times_are_interpolated(loops):
    t = torch.linspace(0, 100, 301, **F64)
    call = lambda **how: at.evolve(van_der_pol, start(2, 0), t, "rodas5p", rtol=1e-5, atol=1e-8, **how)
    fast = call(compile=True)
    assert_same(fast, call())
    assert loops[0].with_interpolant > 10


@pytest.mark.slow
def test_a_scheme_without_an_interpolant_of_its_own(loops):
    rodas4 = at.schemes.RODAS4
    parts = {name: getattr(rodas4, name) for name in ("gamma", "a", "c", "b", "order", "b_low")}
    own = at.Rosenbrock("own", **parts)  # of order 4: steps end at the wanted times
    call = lambda **how: at.evolve(
        van_der_pol, start(2, 0), [0.0, 1.0, 2.5, 20.0], own, rtol=1e-5, atol=1e-8, **how
    )
    assert_same(call(compile=True), call())
    assert loops[0] is not None


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RATES)
def test_derivatives_are_those_of_torch(name):
    rate, u = (
        RATES[name],
        0.2 + 0.6 * torch.rand(2, 12, **F64, generator=torch.Generator().manual_seed(3)),
    )
    function = traced(lambda t, u: rate(t, u), ("t", "u"), constants=True)(torch.ones((), **F64), u)
    derivatives = jacobian(function, 12)
    t = torch.tensor(0.3, **F64)
    wanted = torch.func.jacrev(lambda t, u: rate(t, u), argnums=(1, 0))(t, u[0])
    values = evaluated(derivatives, [t.item()], u[0].tolist())
    torch.testing.assert_close(values[:144].view(12, 12), wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(values[144:], wanted[1], rtol=1e-12, atol=1e-12)


def evaluated(function, t, u):
    """Return the outputs of a program for one trajectory, computed by torch."""
    infix = {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum,
        "min": torch.minimum, "neg": torch.neg, "and": torch.logical_and, "or": torch.logical_or,
        "not": torch.logical_not, "where": torch.where, "cbrt": lambda x: x ** (1 / 3),
    }  # fmt: skip
    values = {}
    for node in function.program.needed(function.outputs):
        operation, arguments = function.program.operations[node]
        if operation == "constant":
            values[node] = torch.tensor(arguments[0], **F64)
        elif operation == "leaf":
            source, place, _ = arguments[0]
            values[node] = torch.tensor({"t": t, "u": u}[source][place[0] if place else 0], **F64)
        else:
            x = [values[argument] for argument in arguments]
            if operation == "dot":
                half = len(x) // 2
                values[node] = torch.stack(x[:half]) @ torch.stack(x[half:])
            else:
                values[node] = (infix.get(operation) or getattr(torch, operation))(*x)
    return torch.stack([values[node].double() for node in function.outputs])


@pytest.mark.slow
def test_rows_are_exchanged_where_pivots_are_small(loops):
    # I - gamma h J has zeros on its diagonal for some step sizes, and each trajectory has its own.
    turn = torch.randn(8, 8, **F64, generator=torch.Generator().manual_seed(1))
    matrix = 30 * (turn - turn.T) + 20 * torch.eye(8, **F64).roll(1, 0)
    rate = lambda t, u: u @ matrix - 40 * u
    call = lambda **how: at.evolve(
        rate, start(*range(1, 9)), [0.0, 0.3], "rodas4", rtol=1e-6, atol=1e-9, **how
    )
    assert_same(call(compile=True), call())
    assert loops[0] is not None


def test_trajectories_that_blow_up_are_lost(loops):
    u0 = torch.tensor([[1.0], [-1.0], [2.0]], **F64)
    call = lambda **how: at.evolve(
        lambda t, u: u**2, u0, [0.0, 2.0], "rodas4", rtol=1e-4, atol=1e-4, **how
    )
    fast, plain = call(compile=True), call()
    assert fast.ok.tolist() == plain.ok.tolist() == [False, True, False]
    torch.testing.assert_close(fast.until, plain.until)
    assert loops[0] is not None


@pytest.mark.slow
def test_float32(loops):
    u0 = start(2, 0).float()
    call = lambda **how: at.evolve(van_der_pol, u0, [0.0, 20.0], "rodas4", rtol=1e-3, atol=1e-5, **how)
    torch.testing.assert_close(call(compile=True).final, call().final, rtol=1e-3, atol=1e-4)
    assert loops[0] is not None


def test_the_jacobian_of_a_user_is_called_in_torch(loops):
    called = []

    def derivative(t, u):
        called.append(1)
        return -50 * torch.eye(2, **F64).expand(*u.shape, 2)

    u0 = start(1, 1)
    end = at.evolve(
        lambda t, u: -50 * u, u0, [0.0, 1.0], "rodas4", rtol=1e-6, atol=1e-9, compile=True,
        jacobian=derivative,
    ).final  # fmt: skip
    assert loops == [None]
    assert called
    assert end.abs().max() < 1e-6


def test_large_states_and_unknown_operators_are_left_to_torch(loops):
    large = torch.ones(2, 41, **F64)
    special = lambda t, u: -torch.special.bessel_j0(u)
    for rate, u0 in ((lambda t, u: -u, large), (special, torch.ones(2, 3, **F64))):
        call = lambda **how: at.evolve(rate, u0, [0.0, 0.1], "rodas4", rtol=1e-3, atol=1e-6, **how)  # noqa: B023
        torch.testing.assert_close(call(compile=True).final, call().final)
    assert loops == [None] * 2


def test_operations_without_a_known_derivative_are_named():
    function = traced(lambda t, u: torch.cos(u), ("t", "u"))(torch.ones(1, **F64), torch.ones(2, **F64))
    program = function.program.copy()
    (node,) = {
        node for node in program.needed(function.outputs[:1]) if program.operations[node][0] == "cos"
    }
    program.operations[node] = ("lgamma", program.operations[node][1])
    with pytest.raises(UntranslatableError, match="the derivative of lgamma is not known"):
        jacobian(type(function)(program, function.outputs, ()), 2)


@pytest.mark.slow
def test_gradients_are_those_of_torch(loops):
    rate = torch.tensor([3.0], **F64, requires_grad=True)
    call = lambda **how: at.evolve(
        lambda t, u: -rate * u**2, start(1, 2), [0.0, 1.0], "rodas4", rtol=1e-6, atol=1e-9, **how
    )
    fast, plain = (
        torch.autograd.grad(call(**how).final.sum(), rate)[0] for how in ({"compile": True}, {})
    )
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=0)
    assert not any(loops)


@pytest.mark.slow
def test_tensors_that_change_are_read_again(loops):
    weights = torch.tensor([1.0, 0.0], **F64)
    rate = lambda t, u: -weights * u
    call = lambda: at.evolve(
        rate, start(1, 1), [0.0, 1.0], "rodas4", rtol=1e-8, atol=1e-10, compile=True
    )
    for _ in range(2):
        torch.testing.assert_close(call().final, start(1, 1) * torch.exp(-weights), rtol=1e-6, atol=1e-8)
        weights += 1
    assert all(loops)


@pytest.mark.slow
def test_tables_of_weights_belong_to_their_functions(monkeypatch):
    weights = torch.randn(12, 12, **F64, generator=torch.Generator().manual_seed(0))
    rate = lambda t, u: torch.tanh(u @ weights) - 3 * u @ weights.T.abs()
    sources = []
    original = control.library_of
    monkeypatch.setattr(
        control, "library_of",
        lambda functions, key, source, *rest, **how: (
            sources.append(source()) or original(functions, key, source, *rest, **how)
        ),
    )  # fmt: skip
    call = lambda **how: at.evolve(
        rate, start(*[0.1] * 12), [0.0, 0.1], "rodas4", rtol=1e-5, atol=1e-8, **how
    )
    assert_same(call(compile=True), call())
    assert "rate_weights0[]" in sources[0]
