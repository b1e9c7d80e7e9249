import numpy as np
import pytest
import torch

import attractor as at

solve_ivp = pytest.importorskip("scipy.integrate").solve_ivp
from attractor.integrations.scipy import hybrid  # noqa: E402


def rate(t, u):
    theta, r, omega, v = u
    return [
        omega,
        v,
        (-9.8 * np.sin(theta) - 2 * omega * v) / r,
        r * omega**2 - 40 * (r - 10) + 9.8 * np.cos(theta),
    ]


@pytest.fixture(scope="module")
def method():
    how = dict(dt=0.1, horizon=5.0, trajectories=80, width=128, fine_dt=0.0125)
    return hybrid(at.fit(at.systems.ElasticPendulum(), **how))


Y0 = np.array([0.3, 10.0, 0.0, 0.0])


@pytest.fixture(scope="module")
def truth():
    return solve_ivp(rate, (0, 5), Y0, "DOP853", rtol=1e-12, atol=1e-12, dense_output=True)


def test_steps_are_big_and_exact(method, truth):
    solved = solve_ivp(rate, (0, 5), Y0, method=method)
    assert solved.success
    assert len(solved.t) == 51
    np.testing.assert_allclose(solved.y, truth.sol(solved.t), atol=1e-6)
    coarse = solve_ivp(rate, (0, 5), Y0, "RK45", max_step=0.1, first_step=0.1, rtol=10, atol=10)
    assert (
        np.abs(solved.y[:, -1] - truth.y[:, -1]).max()
        < 1e-3 * np.abs(coarse.y[:, -1] - truth.y[:, -1]).max()
    )


def test_times_between_steps(method, truth):
    times = np.array([0.0, 0.033, 0.5, 0.77, 1.234, 4.99, 5.0])
    solved = solve_ivp(rate, (0, 5), Y0, method=method, t_eval=times, dense_output=True)
    np.testing.assert_allclose(solved.y, truth.sol(times), atol=1e-6)
    np.testing.assert_allclose(solved.sol(0.05), truth.sol(0.05), atol=1e-6)
    np.testing.assert_allclose(solved.sol([3.33, 0.05]), truth.sol([3.33, 0.05]), atol=1e-6)


def test_a_horizon_that_is_no_multiple_of_the_step(method, truth):
    solved = solve_ivp(rate, (0, 4.97), Y0, method=method)
    assert solved.t[-1] == 4.97
    np.testing.assert_allclose(solved.y[:, -1], truth.sol(4.97), atol=1e-6)


def test_events(method, truth):
    lowest = lambda t, u: u[0]
    lowest.terminal = True
    solved = solve_ivp(rate, (0, 5), Y0, method=method, events=lowest)
    exact = solve_ivp(rate, (0, 5), Y0, "DOP853", rtol=1e-12, atol=1e-12, events=lowest)
    assert solved.status == 1
    assert solved.t_events[0][0] == pytest.approx(exact.t_events[0][0], abs=1e-7)


def test_what_cannot_be_done_says_so(method):
    with pytest.raises(ValueError, match="goes forward in time"):
        solve_ivp(rate, (5, 0), Y0, method=method)
    with pytest.raises(ValueError, match="mean nothing to a hybrid solver"):
        solve_ivp(rate, (0, 5), Y0, method=method, rtol=1e-3)


def test_odeint_takes_a_solver():
    system = at.systems.HarmonicOscillator()
    solver = at.fit(system, dt=0.5, horizon=5.0, correction="linear", trajectories=10)
    y0 = system.sample(4, dtype=torch.float64)
    t = torch.tensor([1.0, 1.5, 4.0], dtype=torch.float64)
    y = at.odeint(system, y0, t, method=solver)
    torch.testing.assert_close(y, system.exact(t - 1, y0), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"whole steps of the solver's dt = 0\.5"):
        at.odeint(system, y0, t + torch.tensor([0.0, 0.1, 0.1]), method=solver)
    with pytest.raises(ValueError, match="no options"):
        at.odeint(system, y0, t, method=solver, options={"step_size": 0.1})


def exploding(width=8):
    """u' = u^2 from 4 reaches infinity at 1/4; steps of 1/2 jump over it."""
    correction = at.corrections.NeurVec(1, width=width, dtype=torch.float64)
    return hybrid(at.HybridSolver(lambda t, u: u**2, "rk4", correction, 0.5))


@pytest.mark.slow
def test_a_last_step_that_cannot_be_followed_is_no_success():
    solved = solve_ivp(lambda t, u: u**2, (0, 0.4), [4.0], method=exploding())
    assert not solved.success
    assert "followed beyond t = 0.25" in solved.message
    assert np.isfinite(solved.y).all()
    assert solved.t[-1] == 0


def test_states_between_steps_are_nan_where_they_cannot_be_followed():
    solved = solve_ivp(lambda t, u: u**2, (0, 0.5), [4.0], method=exploding(), dense_output=True)
    inside = solved.sol([0.4, 0.1, 0.3])[0]
    assert np.isnan(inside[[0, 2]]).all()
    assert inside[1] == pytest.approx(4 / 0.6)


class Nothing(torch.nn.Module):
    """A correction without parameters."""

    def forward(self, u, slope, dt):
        return torch.zeros_like(u)


def test_a_correction_needs_no_parameters():
    solver = at.HybridSolver(lambda t, u: -u, "rk4", Nothing(), 0.1)
    solved = solve_ivp(lambda t, u: -u, (0, 1), [1.0, 2.0], method=hybrid(solver))
    np.testing.assert_allclose(solved.y[:, -1], np.exp(-1) * np.array([1, 2]), rtol=1e-6)
