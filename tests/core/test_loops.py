"""Compiled steps on a grid are one loop: the same states as steps in Python, whatever the rate does."""

import pytest
import torch

import attractor as at
from attractor.core.march import March
from attractor.ode.trust import TrustRegion

F64 = dict(dtype=torch.float64)
T = torch.linspace(0, 2, 41, **F64)


def damped(t, u):
    q, v = u.unbind(-1)
    return torch.stack((v, -q - 0.1 * t * v), -1)


def states(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), **F64)


@pytest.fixture
def loops(monkeypatch):
    """One entry per run that was a loop."""
    count = list[int]()
    loop_chunk = March._loop_chunk
    monkeypatch.setattr(
        March, "_loop_chunk", lambda self, *args: count.append(1) or loop_chunk(self, *args)
    )
    return count


def both(rate, u0, scheme="rk4", **options):
    plain = at.evolve(rate, u0, T, scheme, every=40, **options)
    fast = at.evolve(rate, u0, T, scheme, every=40, compile=True, **options)
    assert torch.equal(fast.ok, plain.ok)
    torch.testing.assert_close(fast.until, plain.until)
    return plain, fast


@pytest.mark.parametrize(
    "shape",
    [(7, 2), pytest.param((2,), marks=pytest.mark.slow), pytest.param((2, 3, 2), marks=pytest.mark.slow),
     pytest.param((0, 2), marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_loop_takes_the_same_steps(shape, compiler, loops):
    with torch.no_grad():
        plain, fast = both(damped, states(*shape))
    torch.testing.assert_close(fast.u, plain.u, rtol=1e-13, atol=1e-13)
    assert fast.stats == plain.stats
    assert bool(loops) == (0 not in shape)


@pytest.mark.slow
def test_a_loop_serves_any_number_of_steps(compiler, loops):
    with torch.no_grad():
        u0, counts = states(7, 2), []
        for n in (20, 10, 7):
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            fast = at.evolve(damped, u0, T[: 2 * n + 1], every=n, compile=True)
            torch.testing.assert_close(fast.u, at.evolve(damped, u0, T[: 2 * n + 1], every=n).u)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert counts[1:] == [0, 0]  # nothing is compiled again
    assert len(loops) == 6


@pytest.mark.slow
def test_trajectories_with_parameters_and_lost_ones(compiler, loops):
    def rate(t, u, p):
        return torch.where(u > 0.9, u * u * 1e200, -p * u)

    with torch.no_grad():
        plain, fast = both(rate, states(9, 2), parameters=states(9, 2))
    assert loops
    assert not plain.ok.all()
    torch.testing.assert_close(fast.u, plain.u, rtol=1e-12, atol=1e-12)
    assert torch.equal(fast.status, plain.status)


@pytest.mark.slow
def test_rates_that_a_loop_cannot_hold_are_compiled_without_it(compiler):
    calls = []

    def counting(t, u):
        calls.append(1)
        return -u

    def branching(t, u):
        return -u if float(u.sum()) > 0 else u

    def writing(t, u):
        out = torch.empty_like(u)
        out[..., 0], out[..., 1] = u[..., 1], -u[..., 0]
        return out

    for rate in (counting, branching, writing):
        with torch.no_grad():
            plain, fast = both(rate, states(5, 2))
        torch.testing.assert_close(fast.u, plain.u, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
def test_gradients_take_no_loop(compiler, loops):
    net = torch.nn.Linear(2, 2, **F64)
    plain, fast = both(lambda t, u: net(u).tanh(), states(5, 2))
    assert not loops
    (a,) = torch.autograd.grad(plain.final.sum(), net.weight)
    (b,) = torch.autograd.grad(fast.final.sum(), net.weight)
    torch.testing.assert_close(b, a)
    both(damped, states(5, 2))  # nothing to differentiate
    assert loops


@pytest.mark.slow
def test_a_loop_stops_for_guarded_steps(compiler, loops):
    correction = at.corrections.Stages(2, dtype=torch.float64)
    with torch.no_grad():
        for weights in correction.parameters():
            weights.mul_(1e-3)
    trust = TrustRegion.around(states(200, 2) - 0.5)
    solver = at.HybridSolver(damped, "rk4", correction, 0.05, trust)
    u0 = 1.6 * (states(9, 2) - 0.5)
    with torch.no_grad():
        for guard in (None, False):
            plain = solver.solve(u0, 2.0, every=40, guard=guard)
            fast = solver.solve(u0, 2.0, every=40, guard=guard, compile=True)
            assert torch.equal(fast.status, plain.status)
            assert 0 < (plain.status != 0).sum() < 9
            torch.testing.assert_close(fast.u, plain.u, rtol=1e-12, atol=1e-12)
            if guard is None:
                assert torch.equal(fast.stats.guarded, plain.stats.guarded)
                assert fast.stats.steps == plain.stats.steps
    assert loops
