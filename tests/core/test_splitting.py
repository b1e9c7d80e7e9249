import itertools

import pytest
import torch

import attractor as at


def test_leapfrog_is_velocity_verlet():
    force = lambda q: -q.sin()
    rate = lambda t, u: torch.cat((u[..., 2:], force(u[..., :2])), -1)
    u, h = torch.rand(5, 4, dtype=torch.float64), 0.1
    q, p = u.chunk(2, -1)
    half = p + h / 2 * force(q)
    q = q + h * half
    expected = torch.cat((q, half + h / 2 * force(q)), -1)
    torch.testing.assert_close(u + h * at.schemes.LEAPFROG.slope(rate, 0.0, u, h), expected)


@pytest.mark.parametrize("name", ["leapfrog", "yoshida4"])
def test_step_is_symplectic_and_reversible(name):
    scheme, system = at.get_scheme(name), at.systems.HenonHeiles()
    u, h = system.sample(1, dtype=torch.float64)[0], 0.3
    step = lambda u, h=h: u + h * scheme.slope(system, 0.0, u, h)
    j = torch.autograd.functional.jacobian(step, u)
    omega = torch.zeros(4, 4, dtype=torch.float64)
    omega[:2, 2:], omega[2:, :2] = torch.eye(2), -torch.eye(2)
    torch.testing.assert_close(j.T @ omega @ j, omega, atol=1e-12, rtol=0)
    torch.testing.assert_close(step(step(u), -h), u, atol=1e-14, rtol=0)
    rk4 = torch.autograd.functional.jacobian(
        lambda u: u + h * at.schemes.RK4.slope(system, 0.0, u, h), u
    )
    assert (rk4.T @ omega @ rk4 - omega).abs().max() > 1e-5


@pytest.mark.slow
def test_energy_error_stays_bounded_while_rk4_drifts():
    from benchmarks.energy import drift

    leapfrog, rk4 = drift("leapfrog", 4_000, 0.3), drift("rk4", 4_000, 0.3)
    assert max(leapfrog) < 1.2 * leapfrog[0]
    assert rk4[-1] > 4 * rk4[0]
    assert rk4[-1] > 2 * leapfrog[-1]


def test_a_rate_that_is_not_separable_is_refused():
    pendulum = at.systems.ElasticPendulum()
    with pytest.raises(ValueError, match=r"needs a separable rate .* but p' changed with p"):
        at.evolve(pendulum, pendulum.sample(3), torch.linspace(0, 1, 5), "leapfrog")
    damped = lambda t, u: torch.cat((u[..., 1:] + u[..., :1], -u[..., :1]), -1)
    with pytest.raises(ValueError, match="but q' changed with q"):
        at.evolve(damped, torch.ones(3, 2), torch.linspace(0, 1, 5), "yoshida4")


def test_an_odd_state_is_refused():
    with pytest.raises(ValueError, match=r"even size, not one of shape \[4, 3\]"):
        at.evolve(lambda t, u: u, torch.ones(4, 3), torch.linspace(0, 1, 5), "leapfrog")


@pytest.mark.parametrize(
    ("kick", "drift", "order", "message"),
    [
        ((0.5, 0.5), (1.0,), 3, "claims order 3, but the conditions of order 3"),
        ((1.0,), (1.0,), 2, "pass order=1"),
        ((0.5, 0.4), (1.0,), 2, "the kicks add up to 0.9"),
        ((0.5, 0.5), (0.9,), 2, "the drifts add up to 0.9"),
        ((0.3, 0.4, 0.3), (1.0,), 1, "do not alternate"),
    ],
)
def test_a_wrong_splitting_is_refused(kick, drift, order, message):
    with pytest.raises(ValueError, match=message):
        at.Splitting("mine", kick, drift, order)


def test_time_dependent_force_keeps_the_order():
    from benchmarks.order import measured
    from benchmarks.problems import PROBLEMS

    forced = next(p for p in PROBLEMS if p.name == "forced")
    assert measured(forced, at.schemes.YOSHIDA4, 80)[0] == pytest.approx(4, abs=0.1)


def test_rounding_is_no_dependence():
    # Separable, though its formula mixes q and p: H = ((q - p)^2 + (q + p)^2) / 4.
    def rate(t, u):
        q, p = u.chunk(2, -1)
        return torch.cat((((q + p) - (q - p)) / 2, -((q - p) + (q + p)) / 2), -1)

    u0 = torch.randn(50, 4)
    solved = at.evolve(rate, u0, torch.linspace(0, 1, 11), "leapfrog")
    assert solved.ok.all()


def test_damping_that_sets_in_later_is_found():
    rate = lambda t, u: torch.stack((u[..., 1], -u[..., 0] - t * u[..., 1]), -1)
    with pytest.raises(ValueError, match="p' changed with p"):
        at.evolve(rate, torch.ones(3, 2), torch.linspace(0, 1, 5), "leapfrog")


def test_rates_that_differentiate():
    """Hamilton's equations by autograd, as in Hamiltonian networks."""

    def rate(t, u):
        u = u.requires_grad_() if u.is_leaf else u
        q, p = u.chunk(2, -1)
        (grad,) = torch.autograd.grad((p**2 / 2 - q.cos()).sum(), u, create_graph=True)
        dq, dp = grad.chunk(2, -1)
        return torch.cat((dp, -dq), -1)

    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    u0 = torch.rand(3, 2, dtype=torch.float64)
    plain = lambda t, u: torch.cat((u[..., 1:], -u[..., :1].sin()), -1)
    for how in ({"scheme": "leapfrog"}, {"scheme": "dopri5", "rtol": 1e-9}):
        solved = at.evolve(rate, u0, t, **how).final.detach()
        torch.testing.assert_close(solved, at.evolve(plain, u0, t, **how).final)


def test_order_and_strings():
    assert at.Splitting("x", kick=("1/2", "1/2"), drift=(1,), order=2) == at.Splitting(
        "x", kick=(0.5, 0.5), drift=(1.0,), order=2
    )
    for order in (0, -3, 1.5, True):
        with pytest.raises(ValueError, match="must be a whole number"):
            at.Splitting("x", kick=(0.5, 0.5), drift=(1.0,), order=order)


BOTH = [
    at.schemes.LEAPFROG,
    at.get_scheme("yoshida4"),
    at.Splitting("drift first", kick=(0, 1), drift=(0.5, 0.5), order=2),
    at.Splitting("one sided", kick=(1,), drift=(1,), order=1),
]


@pytest.mark.parametrize("scheme", BOTH, ids=lambda s: s.name)
@pytest.mark.parametrize("how", [{}, {"every": 7}, {"checkpoint": True}], ids=str)
def test_what_a_step_knows_of_the_rate_is_carried_to_the_next(scheme, how):
    calls = 0

    def rate(t, u):
        nonlocal calls
        calls += 1
        q, p = u.chunk(2, -1)
        return torch.cat((p * (1 + t), -q.sin() * (1 + t**2)), -1)

    u0, t = torch.rand(5, 4, dtype=torch.float64), torch.linspace(0, 4, 41, dtype=torch.float64)
    solved = at.evolve(rate, u0, t, scheme, **how)
    assert solved.stats.rate_calls == calls - 6  # which look whether it is separable
    assert calls <= 40 * (scheme.rate_calls - 0.8 * scheme.saved_calls) + 6
    u = u0
    for now, after in itertools.pairwise(t):
        u = u + (after - now) * scheme.slope(rate, now, u, after - now)
    torch.testing.assert_close(solved.final, u, rtol=1e-13, atol=1e-13)
