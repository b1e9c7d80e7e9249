import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attractor as at
from attractor.ode.corrections.network import Rational
from attractor.ode.theory import (
    convergence_bound,
    curvature_distribution,
    lipschitz_bound,
    lipschitz_observed,
    second_derivative,
    steepest,
)
from attractor.ode.trajectories import fine_trajectories

F64 = dict(dtype=torch.float64)
coefficients = st.floats(-3, 3, width=16, allow_subnormal=False)


def states(n, d, seed=0):
    return 2 * torch.randn(n, d, generator=torch.Generator().manual_seed(seed), **F64)


# Lipschitz constants


@given(st.lists(coefficients, min_size=6, max_size=6))
def test_no_slope_of_a_rational_exceeds_its_steepest(six):
    activation = Rational(**F64)
    activation.top.data, activation.bottom.data = (
        torch.tensor(six[:4], **F64),
        torch.tensor(six[4:], **F64),
    )
    known = steepest(activation)
    x = torch.cat([sign * torch.logspace(-4, 3, 4001, **F64) for sign in (1, -1)])
    y = x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(activation(y).sum(), y)
    assert slopes.abs().max() <= known * (1 + 1e-9) + 1e-12


def test_the_steepest_slope_is_taken():
    x = torch.linspace(-30, 30, 600_001, **F64, requires_grad=True)
    for activation in (
        Rational(**F64),
        torch.nn.Tanh(),
        torch.nn.ReLU(),
        torch.nn.GELU(),
        torch.nn.SiLU(),
    ):
        (slopes,) = torch.autograd.grad(activation(x).sum(), x)
        assert slopes.abs().max().item() == pytest.approx(steepest(activation), rel=1e-7)
    straight = Rational(**F64)
    straight.bottom.data.zero_()
    assert steepest(straight) == math.inf
    straight.top.data = torch.tensor([1.0, -3.0, 0.0, 0.0], **F64)
    assert steepest(straight) == 3.0
    # x^2 / (1 + |x|) is steepest at infinity.
    straight.top.data, straight.bottom.data = (
        torch.tensor([0, 0, 1.0, 0], **F64),
        torch.tensor([1.0, 0], **F64),
    )
    assert steepest(straight) == 1.0


NETWORKS = [
    ("attns", {}),
    ("attns", {"times_dt": True, "skip": True, "activation": "tanh"}),
    ("attns", {"state": True, "depth": 3, "period": 2.0}),
    ("neurvec", {"activation": "silu", "skip": True, "depth": 4}),
    ("csm", {"skip": True}),
    ("csm", {"activation": "rational"}),
    ("fsnet", {"skip": True, "activation": "relu"}),
]


@pytest.mark.parametrize(("name", "options"), NETWORKS)
def test_observed_constants_stay_below_the_bound(name, options):
    for seed in range(3):
        torch.manual_seed(seed)
        correction = at.corrections.get_correction(name)(3, width=24, **options, **F64)
        with torch.no_grad():
            for p in correction.parameters():
                p += 0.3 * torch.randn_like(p)
        observed = lipschitz_observed(correction, states(200, 3), states(200, 3, 1), 0.1, 0.7)
        assert 0 < observed <= lipschitz_bound(correction, 0.1) * (1 + 1e-12)


def test_a_linear_map_has_one_constant_and_the_bound_is_it():
    u, slope = states(5, 3), states(5, 3, 1)
    for period in (None, 2.0):
        linear = at.corrections.Linear(3, period=period, **F64)
        norm = torch.linalg.matrix_norm(linear.net.head.weight[:, :3], 2).item()
        assert lipschitz_bound(linear, 0.1) == pytest.approx(norm, rel=1e-12)
        assert lipschitz_observed(linear, u, slope, 0.1, 0.7) == pytest.approx(norm, rel=1e-12)
    # One hidden unit with a straight line for an activation: nothing is lost in the product either.
    scaled = at.corrections.FSNet(3, width=1, **F64)
    scaled.scale_in.data, scaled.scale_out.data = states(2, 3).unbind()
    # Nor in sums, if all is positive: residual layers and the way around.
    positive = at.corrections.CSM(1, width=1, activation="rational", skip=True, **F64)
    for p in positive.parameters():
        p.data.abs_()
    for correction in (scaled, positive):
        for activation in correction.net.body.activations:
            activation.top.data = torch.tensor([0.4, 2.0, 0.0, 0.0], **F64)
            activation.bottom.data.zero_()
        d = correction.config["dim"]
        observed = lipschitz_observed(correction, u[:, :d], slope[:, :d], 0.1)
        assert observed == pytest.approx(lipschitz_bound(correction, 0.1), rel=1e-12)


def test_what_cannot_be_bounded_is_still_observed():
    u, slope = states(20, 3), states(20, 3, 1)
    cases = [(at.corrections.AttNSM(3, width=8, **F64), "multiplies by the slope")]
    cases += [
        (at.corrections.AttNS(3, width=8, body=body, **F64), body) for body in ("lstm", "transformer")
    ]
    for correction, why in cases:
        with pytest.raises(ValueError, match=f"(?i){why}"):
            lipschitz_bound(correction, 0.1)
        assert lipschitz_observed(correction, u, slope, 0.1) > 0
    with pytest.raises(ValueError, match="no known bound"):
        lipschitz_bound(torch.nn.Linear(3, 3), 0.1)


# Second derivatives


def test_second_derivative_of_known_solutions():
    oscillator = at.systems.HarmonicOscillator(omega=3.0)
    u = states(40, 2).reshape(4, 10, 2)
    torch.testing.assert_close(second_derivative(oscillator, u), -9 * u)
    # u = sin(t^2) has u' = 2 t cos(t^2), a rate of t alone; u'' = 2 cos(t^2) - 4 t^2 sin(t^2).
    rate = lambda t, u: (2 * t * torch.cos(t * t)).expand_as(u)
    known = 2 * math.cos(1.44) - 4 * 1.44 * math.sin(1.44)
    torch.testing.assert_close(second_derivative(rate, u, 1.2), torch.full_like(u, known))
    # u' = t u: u'' = u + t^2 u.
    torch.testing.assert_close(second_derivative(lambda t, u: t * u, u, 0.5), 1.25 * u)


@pytest.mark.parametrize("name", [name for name in at.systems.__all__ if name != "System"])
def test_second_derivatives_of_all_systems_are_those_of_their_trajectories(name):
    system = getattr(at.systems, name)()
    u0 = system.sample(5, torch.Generator().manual_seed(3), torch.float64)
    h = {"Robertson": 1e-5, "HIRES": 1e-4, "Oregonator": 1e-5, "Pollution": 1e-14}.get(name, 1e-3)
    before, now, after = fine_trajectories(system, u0, h, 2, 4)
    difference = (after - 2 * now + before) / h**2
    known = second_derivative(system, now)
    assert (difference - known).abs().max() <= 1e-3 * known.abs().max() + 1e-6


def test_curvature_distribution_of_a_circle():
    # |u''| of a circle is max(|cos|, |sin|), below sqrt(3)/2 for a third of all angles.
    angle = torch.linspace(0, 2 * math.pi, 12_001, **F64)[:-1] + 1e-4
    circle = torch.stack((angle.cos(), angle.sin()), -1).reshape(30, 400, 2)
    oscillator = at.systems.HarmonicOscillator()
    levels = torch.tensor([0.5, 3**0.5 / 2, 1.1], **F64)
    share = lambda **options: curvature_distribution(oscillator, circle, levels, **options).tolist()
    assert share() == pytest.approx([0, 1 / 3, 1], abs=1e-3)
    assert share(of="components") == pytest.approx([1 / 3, 2 / 3, 1], abs=1e-3)
    assert share(of="trajectories") == [0, 0, 1]
    assert share(t=torch.arange(30.0)) == share()
    growing = curvature_distribution(lambda t, u: t * u, torch.ones(3, 2, 1), [1.5], t=torch.arange(3.0))
    assert growing.item() == pytest.approx(1 / 3)  # 1 + t^2


# Theorem 5.1


@pytest.fixture(scope="module")
def hybrids():
    """Solvers whose error is far from zero, with the truth: fitted ones and a random network."""
    pendulum = at.systems.PendulumChain(2)
    options = dict(dt=0.1, horizon=1.0, correction="attns", width=16, trajectories=20, fine_dt=0.0125)
    solvers = [at.fit(pendulum, scheme=scheme, **options) for scheme in ("euler", "rk4")]
    logistic = at.systems.Logistic()
    torch.manual_seed(4)
    solvers += [
        at.HybridSolver(logistic, "euler", correction(1, width=4, **F64), 0.1)
        for correction in (at.corrections.AttNS, at.corrections.NeurVec, at.corrections.AttNSM)
    ]
    found = []
    for solver in solvers:
        u0 = solver.rate.sample(8, torch.Generator().manual_seed(9), torch.float64)
        found.append((solver, fine_trajectories(solver.rate, u0, 0.1, 10, 20)))
    return found


@pytest.mark.slow
def test_the_error_stays_below_every_bound(hybrids):
    for solver, truth in hybrids:
        found = convergence_bound(solver, truth)
        assert found.actual > 1e-7
        assert found.actual <= found.propagated * (1 + 1e-6)
        assert found.propagated <= found.classical * (1 + 1e-9)
        assert found.actual <= found.theorem
        assert (found.alpha is None) == (solver.scheme.name != "euler")


def test_a_step_is_as_steep_as_the_theorem_allows(hybrids):
    for solver, truth in hybrids[:3]:
        found = convergence_bound(solver, truth)
        limit = 1 + solver.dt * found.slope_constant * (1 + found.attention_constant)
        assert found.step_constant <= limit * (1 + 1e-9)


def test_the_residuals_carried_to_the_end_are_the_error():
    # One component: norms are numbers, and with residuals of one sign nothing cancels.
    decay = lambda t, u: -u
    correction = at.corrections.Linear(1, **F64)
    correction.net.head.weight.data.fill_(0.01)
    correction.net.head.bias.data.zero_()
    truth = torch.exp(-0.1 * torch.arange(11.0, **F64))[:, None, None]
    found = convergence_bound(at.HybridSolver(decay, "euler", correction, 0.1), truth)
    assert found.step_constant == pytest.approx(0.91)
    assert found.actual == pytest.approx(0.91**10 - math.exp(-1)) == pytest.approx(found.propagated)
    assert found.curvature == pytest.approx(1.0)
    assert found.slope_constant == pytest.approx(1.0)
    assert found.alpha == pytest.approx(math.exp(2) / 2)


def test_rates_with_time_and_constant_rates_have_bounds_too():
    correction = at.corrections.AttNS(1, width=4, period=2 * math.pi, **F64)
    forced = lambda t, u: t.cos() - u
    truth = fine_trajectories(forced, states(4, 1), 0.1, 10, 20)
    found = convergence_bound(at.HybridSolver(forced, "heun", correction, 0.1), truth)
    assert 0 < found.actual <= found.propagated * (1 + 1e-9) <= found.theorem
    drift = lambda t, u: torch.ones_like(u)
    truth = states(4, 1) + 0.1 * torch.arange(11.0, **F64)[:, None, None]
    found = convergence_bound(at.HybridSolver(drift, "euler", correction, 0.1), truth)
    assert 0 < found.actual <= found.propagated * (1 + 1e-9) <= found.theorem
    assert found.alpha == 0


def test_alpha_bounds_euler_only_with_the_lipschitz_constant_below_the_line():
    growth, end, dt = 0.1, 1.0, 0.01
    t = torch.arange(101, **F64) * dt
    euler = at.evolve(lambda t, u: growth * u, torch.ones(1, 1, **F64), t, "euler").final.item()
    error, M = math.exp(growth * end) - euler, growth**2 * math.exp(growth * end)
    rise = M * math.exp(2 * end * growth) * dt
    assert (
        growth * rise / 2
        < error
        < M * math.expm1(end * growth) / (2 * growth) * dt
        < rise / (2 * growth)
    )


def test_other_dtypes_and_lost_trajectories_are_refused(hybrids):
    solver, truth = hybrids[0]
    with pytest.raises(ValueError, match=r"use solver.to"):
        convergence_bound(solver, truth.float())
    explosion = at.HybridSolver(lambda t, u: u**9, "euler", at.corrections.AttNS(1, 4, **F64), 1.0)
    with pytest.raises(ValueError, match="loses 2 of 2"):
        convergence_bound(explosion, torch.full((30, 2, 1), 5.0, **F64))
