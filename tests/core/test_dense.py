"""Dense output, times and tolerances per trajectory, and events of `evolve`."""

import math

import numpy as np
import pytest
import torch

import attractor as at
from attractor.core.tableaus import DOP853
from attractor.core.trajectory import Status

F64 = dict(dtype=torch.float64)
PENDULUM = lambda t, u: torch.stack((u[..., 1], -u[..., 0].sin()), -1)
U0 = torch.tensor([[0.5, 0.1], [1.5, -0.3], [2.5, 0.4]], **F64)


def truth(u0, t):
    return at.evolve(PENDULUM, u0, t, "dop853", rtol=1e-13, atol=1e-14).u


@pytest.mark.parametrize("scheme", ["bosh3", "dopri5", "tsit5", "dop853"])
@pytest.mark.parametrize("back", [False, True])
def test_dense_output_is_as_exact_as_the_steps(scheme, back):
    t = torch.linspace(0, 5, 6, **F64)
    t = t.flip(0) if back else t
    solved = at.evolve(PENDULUM, U0, t, scheme, rtol=1e-8, atol=1e-9, dense=True)
    torch.testing.assert_close(solved(t), solved.u, rtol=1e-12, atol=1e-12)
    times = torch.linspace(0.0, 5, 57, **F64)
    exact = truth(U0, times.flip(0)).flip(0)
    if back:
        exact_at_5 = truth(U0, torch.cat((times[-1:], times[:-1].flip(0))))
        exact = exact_at_5.flip(0)
    else:
        exact = truth(U0, times)
    assert solved(times).shape == (57, 3, 2)
    torch.testing.assert_close(solved(times), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(solved(2.345), solved(torch.tensor([2.345], **F64))[0])


@pytest.mark.parametrize(
    ("scheme", "order"), [("rk4", 4), ("heun3", 4), ("dopri5", 5), ("tsit5", 5), ("dop853", 8)]
)
def test_the_interpolant_of_a_grid_has_its_order(scheme, order):
    # One step: the local error of an interpolant of order p is of order p + 1, up to that of the scheme.
    def error(h):
        t = torch.tensor([0.0, h], **F64)
        solved = at.evolve(PENDULUM, U0, t, scheme, dense=True)
        inside = torch.linspace(0.1, 0.9, 5, **F64) * h
        return (solved(inside) - truth(U0, torch.cat((t[:1], inside)))[1:]).abs().max().item()

    first, second = (0.8, 0.4) if scheme == "dop853" else (0.2, 0.1)
    assert math.log2(error(first) / error(second)) > order - 0.5


def test_dop853_has_the_published_coefficients():
    published = pytest.importorskip("scipy.integrate._ivp.dop853_coefficients")
    rows = [np.array(row, dtype=float) for row in DOP853.dense_rows]
    np.testing.assert_allclose(np.stack(rows), published.D, rtol=1e-15)
    for i, row in enumerate(DOP853.dense_a):
        np.testing.assert_allclose(np.array(row, dtype=float), published.A[13 + i, : 13 + i], rtol=1e-15)


def test_dense_output_is_differentiable():
    k = torch.tensor(1.3, **F64, requires_grad=True)
    times = torch.tensor([0.2, 0.77, 1.4], **F64, requires_grad=True)

    def states(u0, k, times):
        rate = lambda t, u: torch.stack((u[..., 1], -k * u[..., 0].sin()), -1)
        solved = at.evolve(rate, u0, [0.0, 1.5], "dopri5", rtol=1e-9, atol=1e-10, dense=True)
        return solved(times)

    inputs = (U0.clone().requires_grad_(), k, times)
    assert torch.autograd.gradcheck(states, inputs, rtol=1e-4, atol=1e-5, fast_mode=True)
    grid = at.evolve(PENDULUM, inputs[0], torch.linspace(0, 1.5, 31, **F64), dense=True)
    controlled = at.evolve(PENDULUM, inputs[0], [0.0, 1.5], rtol=1e-9, dense=True)
    by = [torch.autograd.grad(solved(0.77).sum(), inputs[0])[0] for solved in (grid, controlled)]
    torch.testing.assert_close(*by, rtol=1e-4, atol=1e-5)


def test_dense_output_of_the_lost_and_errors():
    u0 = torch.tensor([[0.1], [2.0]], **F64)
    for how in ({"rtol": 1e-6}, {"scheme": "rk4"}):
        solved = at.evolve(lambda t, u: u**2, u0, torch.linspace(0, 2, 401, **F64), dense=True, **how)
        states = solved(torch.tensor([0.31, 1.9], **F64))
        assert torch.isfinite(states).all()
        torch.testing.assert_close(states[:, 0, 0], 0.1 / (1 - 0.1 * torch.tensor([0.31, 1.9], **F64)))
        assert states[0, 1].item() == pytest.approx(2 / (1 - 0.62), rel=1e-4)
        with pytest.raises(ValueError, match=r"the solved interval is \[0, 2\]"):
            solved(2.1)
    with pytest.raises(ValueError, match=r"evolve\(..., dense=True\)"):
        at.evolve(lambda t, u: -u, u0, [0.0, 1.0])(0.5)
    with pytest.raises(ValueError, match="use every=1"):
        at.evolve(lambda t, u: -u, u0, [0.0, 0.5, 1.0], dense=True, every=2)


def test_times_per_trajectory():
    ends = torch.tensor([1.0, 2.0, 4.0], **F64)
    t = torch.linspace(0, 1, 5, **F64)[:, None] * ends + 0.1
    for scheme in ("dopri5", "dop853", at.schemes.BOSH3):
        solved = at.evolve(lambda t, u: -u * t, U0, t, scheme, rtol=1e-9, atol=1e-11, dense=True)
        exact = U0 * torch.exp(-(t**2 - 0.01) / 2)[..., None]
        torch.testing.assert_close(solved.u, exact, rtol=1e-6, atol=1e-8)
        assert torch.equal(solved.until, t[-1])
        middle = t[[1]] + 0.01
        torch.testing.assert_close(
            solved(middle), U0 * torch.exp(-(middle**2 - 0.01) / 2)[..., None], rtol=1e-6, atol=1e-8
        )
        alone = at.evolve(lambda t, u: -u * t, U0[:1], t[:, 0], scheme, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(alone.u[:, 0], solved.u[:, 0], rtol=1e-9, atol=1e-11)
    times = t.clone().requires_grad_()
    solve = lambda u0, t: at.evolve(lambda t, u: -u * t, u0, t, rtol=1e-9, atol=1e-11).u
    assert torch.autograd.gradcheck(
        solve, (U0.clone().requires_grad_(), times), fast_mode=True, rtol=1e-4
    )
    assert "5 times in [0.1, 4.1]" in repr(solved)
    with pytest.raises(ValueError, match=r"t has shape \[5, 2\]; pass a 1-D tensor of times, or \[n\+1"):
        at.evolve(lambda t, u: -u, U0, t[:, :2], rtol=1e-5)
    with pytest.raises(ValueError, match=r"pass a 1-D tensor of times$"):
        at.evolve(lambda t, u: -u, U0, t)


def test_tolerances_per_component_and_trajectory():
    rate = lambda t, u: u * torch.cos(5 * t)
    solve = lambda rtol: at.evolve(
        rate, torch.ones(2, 2, **F64), [0.0, 3.0], "dopri5", rtol=rtol, atol=1e-12
    )
    mixed = solve(torch.tensor([[1e-3], [1e-9]], **F64))
    assert torch.equal(mixed.u[:, 0], solve(1e-3).u[:, 0])
    assert torch.equal(mixed.u[:, 1], solve(1e-9).u[:, 1])
    components = solve(torch.tensor([1e-3, 1e-9], **F64))
    assert solve(1e-3).stats.steps < components.stats.steps <= solve(1e-9).stats.steps
    with pytest.raises(ValueError, match=r"rtol = .*; a tolerance is a number >= 0"):
        solve(torch.tensor([1e-3, -1.0]))


def fall(t, u):
    return torch.stack((u[..., 1], torch.full_like(u[..., 1], -9.81)), -1)


HEIGHTS = torch.tensor([[1.0, 0.0], [2.0, 1.0], [50.0, 0.0]], **F64)


@pytest.mark.parametrize("scheme", ["bosh3", "dopri5", "tsit5", "dop853"])
def test_each_trajectory_ends_at_its_own_event(scheme):
    t = torch.linspace(0, 2, 9, **F64)
    u0 = HEIGHTS.clone().requires_grad_()
    solved = at.evolve(fall, u0, t, scheme, rtol=1e-9, atol=1e-10, events=lambda t, u: u[..., 0])
    root = (HEIGHTS[:, 1] ** 2 + 2 * 9.81 * HEIGHTS[:, 0]).sqrt()
    times = (HEIGHTS[:, 1] + root) / 9.81
    assert solved.status.tolist() == [Status.EVENT, Status.EVENT, Status.OK]
    assert solved.ok.all()
    assert solved.events.index.tolist() == [0, 0, -1]
    torch.testing.assert_close(solved.events.time[:2], times[:2], rtol=1e-9, atol=0)
    torch.testing.assert_close(solved.until, torch.cat((times[:2], t[-1:])))
    assert torch.isnan(solved.events.time[2])
    torch.testing.assert_close(solved.events.state[:2, 1], -root[:2], rtol=1e-9, atol=0)
    torch.testing.assert_close(solved.final[:2], solved.events.state[:2])
    reached = t[:, None] < times
    exact = HEIGHTS[:, 0] + HEIGHTS[:, 1] * t[:, None] - 9.81 / 2 * t[:, None] ** 2
    torch.testing.assert_close(solved.u[..., 0][reached], exact[reached])
    assert "2 of 3 ended by an event" in repr(solved)

    (gradient,) = torch.autograd.grad(solved.events.time[:2].sum(), u0, retain_graph=True)
    expected = torch.stack((1 / root, (1 + HEIGHTS[:, 1] / root) / 9.81), -1)
    torch.testing.assert_close(gradient[:2], expected[:2], rtol=1e-7, atol=1e-12)
    assert (gradient[2] == 0).all()
    (gradient,) = torch.autograd.grad(solved.final[:2, 1].sum(), u0)
    expected = -torch.stack((9.81 / root, HEIGHTS[:, 1] / root), -1)
    torch.testing.assert_close(gradient[:2], expected[:2], rtol=1e-7, atol=1e-12)


def test_the_first_of_several_events_counts():
    events = [lambda t, u: u[..., 0], lambda t, u: 0.3 - t]
    with torch.no_grad():
        solved = at.evolve(fall, HEIGHTS, [0.0, 2.0], rtol=1e-8, events=events, dense=True)
    assert solved.events.index.tolist() == [1, 1, 1]
    torch.testing.assert_close(solved.until, torch.full((3,), 0.3, **F64))
    torch.testing.assert_close(solved(1.0)[:, 1], HEIGHTS[:, 1] - 9.81 * 0.3)
    torch.testing.assert_close(solved(0.2)[:, 1], HEIGHTS[:, 1] - 9.81 * 0.2)


def test_gradients_of_events_by_parameters():
    level, k = (torch.tensor(x, **F64, requires_grad=True) for x in (0.2, 1.1))

    def solve(level, k, u0):
        rate = lambda t, u: -k * u + 0.1 * t
        solved = at.evolve(
            rate,
            u0,
            [0.0, 9.0],
            rtol=1e-10,
            atol=1e-11,
            events=lambda t, u: u[..., 0] - level - 0.05 * t,
        )
        return solved.events.time, solved.events.state

    u0 = torch.tensor([[1.0], [2.0]], **F64, requires_grad=True)
    assert torch.autograd.gradcheck(solve, (level, k, u0), rtol=1e-4, atol=1e-6)


def test_what_events_need():
    with pytest.raises(ValueError, match="events need error control"):
        at.evolve(fall, HEIGHTS, [0.0, 1.0], events=lambda t, u: u[..., 0])
    with pytest.raises(
        ValueError, match=r"returned \[3, 2\] for states .* one number per trajectory, \[3\]"
    ):
        at.evolve(fall, HEIGHTS, [0.0, 1.0], rtol=1e-3, events=lambda t, u: u)
    with pytest.raises(TypeError, match="events must be a function"):
        at.evolve(fall, HEIGHTS, [0.0, 1.0], rtol=1e-3, events=[1])


def test_pi_control_reaches_the_same_accuracy():
    from attractor.core.control import Control, controlled

    t = torch.tensor([0.0, 5.0], **F64)
    for beta in (0.0, 0.04, 0.08):
        control = Control(rtol=1e-8, atol=1e-10, beta=beta)
        solved = controlled(PENDULUM, U0, t, at.schemes.DOPRI5, control)
        torch.testing.assert_close(solved.final, truth(U0, t)[-1], rtol=1e-6, atol=1e-7)
