import math

import pytest
import torch
from torch.autograd import forward_ad

import attractor as at
from attractor.core.compiling import count_operations

F64 = dict(dtype=torch.float64)


def orbit(t, u):
    q, v = u.chunk(2, -1)
    return torch.cat((v, -q * (q * q).sum(-1, keepdim=True) ** -1.5), -1)


def ellipse(e):
    return [1 - e, 0.0, 0.0, math.sqrt((1 + e) / (1 - e))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["bosh3", "dopri5", "tsit5", "dop853"])
def test_error_follows_the_tolerance(scheme):
    u0 = torch.tensor([ellipse(0.3)], **F64)
    errors = []
    for tolerance in (1e-4, 1e-6, 1e-8):
        solved = at.evolve(orbit, u0, [0.0, 2 * math.pi], scheme, rtol=tolerance, atol=tolerance)
        errors.append((solved.final - u0).abs().max().item())
        assert errors[-1] < 1e3 * tolerance
    assert errors[0] > 10 * errors[1] > 100 * errors[2]


def test_every_trajectory_has_its_own_steps():
    # A nearly circular and a very eccentric orbit side by side: the first is not slowed down.
    both = torch.tensor([ellipse(0.01), ellipse(0.95)], **F64)
    t = [0.0, 2 * math.pi]
    together = at.evolve(orbit, both, t, "dopri5", rtol=1e-8, atol=1e-8)
    for i in range(2):
        alone = at.evolve(orbit, both[i : i + 1], t, "dopri5", rtol=1e-8, atol=1e-8)
        assert together.stats.accepted[i] == alone.stats.accepted[0]
        assert together.stats.rejected[i] == alone.stats.rejected[0]
        torch.testing.assert_close(together.final[i], alone.final[0], rtol=1e-12, atol=1e-12)
    assert together.stats.accepted[1] > 2 * together.stats.accepted[0]


@pytest.mark.parametrize(
    ("scheme", "order"), [("dopri5", 5), ("tsit5", 5), ("bosh3", 4), ("adaptive_heun", 3)]
)
def test_states_inside_a_step_are_interpolated_to_order(scheme, order):
    # One forced step of size h and states inside it: the local error falls as the order says.
    from attractor.core.control import Control, controlled

    u0, errors = torch.tensor([[0.3, 1.1]], **F64), []
    rate = lambda t, u: torch.stack((u[..., 1], -u[..., 0].sin()), -1)
    for h in (0.4, 0.2, 0.1):
        t = torch.linspace(0, h, 9, **F64)
        control = Control(rtol=1e3, atol=1e3, first=h, least=h)
        inside = controlled(rate, u0, t, at.get_scheme(scheme), control)
        assert inside.stats.steps == 1
        truth = at.evolve(rate, u0, t, "dopri5", rtol=1e-13, atol=1e-14)
        errors.append((inside.u - truth.u).abs().max().item())
    assert math.log2(errors[1] / errors[2]) == pytest.approx(order, abs=0.5)


@pytest.mark.parametrize("tolerance", [1e-6, 1e-9, 1e-12])
def test_dop853_takes_the_steps_of_scipy(tolerance):
    from scipy.integrate import solve_ivp

    u0 = torch.tensor([ellipse(0.6)], **F64)
    ours = at.evolve(orbit, u0, [0.0, 6.0], "dop853", rtol=tolerance, atol=tolerance)
    rate = lambda t, y: orbit(t, torch.from_numpy(y)).numpy()
    theirs = solve_ivp(rate, (0, 6), u0[0].numpy(), "DOP853", rtol=tolerance, atol=tolerance)
    assert ours.stats.accepted.item() == pytest.approx(len(theirs.t) - 1, rel=0.2, abs=2)
    truth = at.evolve(orbit, u0, [0.0, 6.0], "dop853", rtol=1e-13, atol=1e-14).final[0]
    reached = (ours.final[0] - truth).abs().max().item()
    assert reached < 3 * abs(theirs.y[:, -1] - truth.numpy()).max() + 1e-12


@pytest.mark.slow
def test_many_states_cost_no_steps():
    u0 = torch.tensor([ellipse(0.3), ellipse(0.6)], **F64)
    few = at.evolve(orbit, u0, torch.linspace(0, 6, 2, **F64), "dopri5", rtol=1e-7, atol=1e-7)
    many = at.evolve(orbit, u0, torch.linspace(0, 6, 500, **F64), "dopri5", rtol=1e-7, atol=1e-7)
    assert many.stats.rate_calls == few.stats.rate_calls
    assert torch.equal(many.final, few.final)
    fine = at.evolve(orbit, u0, torch.linspace(0, 6, 500, **F64), "dopri5", rtol=1e-12, atol=1e-12)
    assert (many.u - fine.u).abs().max() < 1e-4


def test_rate_calls_are_counted_truly():
    calls = 0

    def counting(t, u):
        nonlocal calls
        calls += 1
        return -u

    for scheme in ("dopri5", "bosh3", "fehlberg2"):
        calls = 0
        solved = at.evolve(counting, torch.ones(3, 1, **F64), [0.0, 2.0], scheme, rtol=1e-6, atol=1e-8)
        assert solved.stats.rate_calls == calls
        calls = 0
        u0 = torch.ones(3, 1, **F64, requires_grad=True)
        assert at.evolve(counting, u0, [0.0, 2.0], scheme, rtol=1e-6).stats.rate_calls == calls


def test_backward_in_time():
    u0 = torch.tensor([ellipse(0.4)], **F64)
    there = at.evolve(orbit, u0, [0.0, 1.0, 3.0], "dopri5", rtol=1e-10, atol=1e-12)
    back = at.evolve(orbit, there.final, [3.0, 1.0, 0.0], "dopri5", rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(back.final, u0, rtol=0, atol=1e-7)
    torch.testing.assert_close(back.u[1], there.u[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize(
    "rate",
    [
        lambda t, u: t * u,
        lambda t, u: torch.stack([t * x for x in u.unbind(-1)], -1),
    ],
    ids=["whole state", "components"],
)
def test_time_fits_rates_of_either_style(batch, rate):
    u0 = torch.rand(*batch, 2, **F64) + 0.5
    solved = at.evolve(rate, u0, [0.0, 1.0], "dopri5", rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(solved.final, u0 * math.exp(0.5), rtol=1e-8, atol=0)
    torch.testing.assert_close(at.evolve(rate, u0, torch.linspace(0, 1, 101, **F64)).final, solved.final)


def test_error_of_the_rate_is_shown_as_it_was():
    with pytest.raises(ValueError, match=r"returned shape \[4, 2, 1\]"):
        at.evolve(lambda t, u: u[..., None], torch.rand(4, 2), [0.0, 1.0], "dopri5", rtol=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", [None, 4, True])
def test_gradients_of_a_controlled_solve(checkpoint):
    u0 = torch.tensor([[0.5, 0.1], [1.5, -0.3]], **F64, requires_grad=True)
    t = torch.tensor([0.1, 0.7, 1.3], **F64, requires_grad=True)
    k = torch.tensor(1.3, **F64, requires_grad=True)

    def solve(u0, t, k):
        rate = lambda t, u: torch.stack(
            (u[..., 1], -k * u[..., 0].sin() + 0.1 * t.cos().reshape(-1)), -1
        )
        how = dict(rtol=1e-9, atol=1e-10, checkpoint=checkpoint)
        return at.evolve(rate, u0, t, "dopri5", **how).u

    fast = checkpoint is not None  # along random directions: the solve is the same
    assert torch.autograd.gradcheck(solve, (u0, t, k), rtol=1e-4, atol=1e-5, fast_mode=fast)


@pytest.mark.parametrize("scheme", ["dopri5", "bosh3", "fehlberg2"])
def test_gradient_of_a_wanted_time_is_the_rate_there(scheme):
    u0 = torch.tensor([[0.5, 0.1]], **F64)
    t = torch.linspace(0, 2, 7, **F64, requires_grad=True)
    rate = lambda t, u: torch.stack((u[..., 1], -u[..., 0].sin()), -1)
    solved = at.evolve(rate, u0, t, scheme, rtol=1e-7, atol=1e-8)
    (gradient,) = torch.autograd.grad(solved.u[:, 0, 0].sum(), t)
    torch.testing.assert_close(gradient[1:], solved.u[1:, 0, 1].detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(gradient.sum(), torch.tensor(0.0, **F64), rtol=0, atol=1e-3)  # no clock


def test_a_least_step_that_the_clock_rounds_up_is_taken():
    from attractor.core.control import Control, controlled

    control = Control(rtol=1e-6, atol=1e-8, first=0.3, least=0.05, max_steps=100)
    t = torch.tensor([0.0, 3.0], **F64)
    solved = controlled(orbit, torch.tensor([ellipse(0.7)], **F64), t, at.schemes.DOPRI5, control)
    assert solved.ok.all()
    assert solved.stats.accepted.item() <= 61


def test_gradients_survive_attempts_that_fail():
    # The first step, far too long, looks below zero: a NaN that is rejected must leave no trace.
    from attractor.core.control import Control, controlled

    u0 = torch.tensor([[4.0]], **F64, requires_grad=True)
    control = Control(rtol=1e-9, atol=1e-9, first=50.0)
    solved = controlled(
        lambda t, u: -u.sqrt(), u0, torch.tensor([0.0, 1.0], **F64), at.schemes.DOPRI5, control
    )
    assert solved.stats.rejected.item() > 0
    torch.testing.assert_close(solved.final, torch.tensor([[2.25]], **F64))  # (2 - t/2)^2
    (gradient,) = torch.autograd.grad(solved.final.sum(), u0)
    torch.testing.assert_close(gradient, torch.tensor([[0.75]], **F64), rtol=1e-6, atol=0)


def test_a_singularity_is_a_loss_and_the_others_go_on():
    # u' = u^2 reaches infinity at 1 / u0
    u0 = torch.tensor([[0.1], [2.0], [0.2]], **F64)
    solved = at.evolve(lambda t, u: u**2, u0, torch.linspace(0, 1, 11, **F64), "dopri5", rtol=1e-6)
    assert solved.ok.tolist() == [True, False, True]
    assert torch.isfinite(solved.u).all()
    assert solved.until[1].item() == pytest.approx(0.5, abs=1e-3)
    torch.testing.assert_close(solved.u[4, 1], torch.tensor([2 / (1 - 0.8)], **F64), rtol=1e-4, atol=0)
    torch.testing.assert_close(solved.final[0], torch.tensor([0.1 / 0.9], **F64), rtol=1e-5, atol=0)


def test_max_steps_gives_up_those_that_have_not_arrived():
    u0 = torch.tensor([ellipse(0.01), ellipse(0.99)], **F64)
    solved = at.evolve(orbit, u0, [0.0, 6.0], "dopri5", rtol=1e-8, atol=1e-8, max_steps=100)
    assert solved.ok.tolist() == [True, False]
    assert solved.stats.steps == 100
    assert 0 < solved.until[1] < 6


def test_stiff_robertson_reaches_its_known_answer():
    # Hairer and Wanner II: at t = 40 the state is 0.7158, 9.185e-6, 0.2842
    system = at.systems.Robertson()
    u0 = torch.tensor([1.0, 0.0, 0.0], **F64)
    solved = at.evolve(system, u0, [0.0, 0.4], "dopri5", rtol=1e-6, atol=1e-10)
    known = torch.tensor([9.8517e-01, 3.3864e-05, 1.4794e-02], **F64)
    torch.testing.assert_close(solved.final, known, rtol=1e-4, atol=0)
    assert at.stiffness.stiffness_index(system, solved.final).item() > 1e3


def test_float32_takes_the_default_tolerances():
    u0 = torch.tensor([ellipse(0.1)])
    solved = at.evolve(orbit, u0, torch.linspace(0, 6, 13), "dopri5", rtol=1e-7, atol=1e-9)
    assert solved.ok.all()
    assert solved.u.dtype == torch.float32


@pytest.mark.slow
def test_compiled_attempts_are_the_same(compiler):
    u0 = torch.tensor([ellipse(0.3), ellipse(0.6)], **F64)
    how = dict(rtol=1e-7, atol=1e-9)
    with torch.no_grad():
        plain = at.evolve(orbit, u0, [0.0, 2.0], "dopri5", **how)
        fast = at.evolve(orbit, u0, [0.0, 2.0], "dopri5", compile=True, **how)
    torch.testing.assert_close(fast.final, plain.final, rtol=1e-9, atol=1e-9)


# Found by trying to break it


def test_infinite_states_do_not_pass():
    rate = lambda t, u: torch.full_like(u, 1e38)
    how = dict(rtol=1e-3, max_steps=300)
    solved = at.evolve(rate, torch.full((2, 1), 1e38), [0.0, 100.0], "dopri5", **how)
    assert not solved.ok.any()
    assert torch.isfinite(solved.u).all()


def test_a_least_step_does_not_let_nan_pass():
    rate = lambda t, y: torch.where(t > 0.5, torch.nan, -y)
    with pytest.raises(FloatingPointError):
        at.odeint(
            rate,
            torch.ones(2, **F64),
            torch.tensor([0.0, 1.0], **F64),
            method="dopri5",
            options={"min_step": 0.01},
        )


def test_a_rate_that_mixes_times_is_refused():
    a = torch.tensor([[0.0, 1], [-1, 0]], **F64)
    mixing = lambda t, u: u @ (a * (1 + t)).T
    with pytest.raises(ValueError, match="mixes the times of different trajectories"):
        at.evolve(mixing, torch.rand(2, 2, **F64), [0.0, 1.0], "dopri5", rtol=1e-6)


def test_far_from_time_zero():
    t = torch.tensor([1e9, 1e9 + 1], **F64)
    solved = at.evolve(lambda t, u: -u, torch.ones(1, 1, **F64), t, "dopri5", rtol=1e-10, atol=1e-12)
    assert solved.final.item() == pytest.approx(math.exp(-1), rel=1e-9)


def test_a_parameter_that_comes_into_play_later_has_its_gradient():
    p = torch.tensor(1.0, **F64, requires_grad=True)
    rate = lambda t, u: -u if t.max() < 0.5 else -p * u
    solved = at.evolve(rate, torch.ones(1, 1, **F64), [0.0, 1.0], "dopri5", rtol=1e-8)
    (gradient,) = torch.autograd.grad(solved.final.sum(), p)
    assert gradient.item() == pytest.approx(-0.5 * math.exp(-1), rel=2e-2)


def test_forward_mode():
    solve = lambda u: at.evolve(lambda t, u: -u, u, [0.0, 1.0], "dopri5", rtol=1e-9).final
    one = torch.ones(2, 1, **F64)
    _, tangent = torch.func.jvp(solve, (one,), (one,))
    torch.testing.assert_close(tangent, one * math.exp(-1), rtol=1e-6, atol=0)


def test_low_precision_and_zeros():
    zero = torch.tensor([[1.0, 0.0]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        solved = at.evolve(lambda t, u: -u, zero.to(dtype), [0.0, 1.0], "dopri5", rtol=1e-2)
        assert solved.ok.all()
        assert solved.final[0, 0].item() == pytest.approx(math.exp(-1), rel=3e-2)
    exact_zero = at.evolve(lambda t, u: -u, zero, [0.0, 1.0], "dopri5", rtol=1e-4, atol=0.0)
    assert exact_zero.ok.all()
    steep = at.evolve(
        lambda t, u: torch.full_like(u, 1e16), torch.ones(1, 1), [0.0, 1e-12], "dopri5", rtol=1e-4
    )
    assert steep.ok.all()
    assert at.odeint(lambda t, y: -y, torch.ones(0, 3), torch.tensor([0.0, 1.0])).shape == (2, 0, 3)


@pytest.mark.slow
def test_memory_of_gradients_grows_with_the_wanted_times_only():
    system, kept = at.systems.VanDerPol(5.0), []
    u0 = system.sample(50, dtype=torch.float64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        solved = at.evolve(
            system, u0, torch.linspace(0, 5, 6, **F64), "dopri5", rtol=1e-7, checkpoint=True
        )
    assert solved.stats.steps > 150
    assert sum(kept) < 0.5 * solved.stats.steps * u0.nbytes
    assert torch.isfinite(torch.autograd.grad(solved.u.sum(), u0)[0]).all()


def test_a_parameter_hidden_from_sight_has_its_gradient_when_it_comes_into_play():
    # It does not act at the start, and sits in a dictionary, where a look at the closure ends.
    held, calls = {"theta": torch.tensor(2.0, **F64, requires_grad=True)}, 0

    def rate(t, y):
        nonlocal calls
        calls += 1
        return -held["theta"] * y if t.max() > 0.5 else -y

    t = torch.tensor([0.0, 0.5, 1.0], **F64)
    solved = at.evolve(rate, torch.ones(1, 1, **F64), t, "dopri5", rtol=1e-7, atol=1e-9)
    assert solved.stats.rate_calls == calls
    (gradient,) = torch.autograd.grad(solved.final.sum(), held["theta"])
    assert gradient.item() == pytest.approx(-0.5 * math.exp(-1.5), rel=2e-2)
    y = at.odeint(rate, torch.ones(1, **F64), t)
    (gradient,) = torch.autograd.grad(y[-1].sum(), held["theta"])
    assert gradient.item() == pytest.approx(-0.5 * math.exp(-1.5), rel=2e-2)
    with torch.no_grad():
        assert not at.odeint(rate, torch.ones(1, **F64), t).requires_grad


def decay(p, u0=None, t=(0.0, 1.0)):
    """exp(-p) from 1, by a rate in which p acts from the start."""
    u0 = torch.ones(2, 1, **F64) if u0 is None else u0
    return at.evolve(lambda t, u: -p * u, u0, t, "dopri5", rtol=1e-9, atol=1e-11).final


def test_forward_mode_of_a_parameter():
    p = torch.tensor(0.7, **F64)
    value, tangent = torch.func.jvp(decay, (p,), (torch.ones_like(p),))
    torch.testing.assert_close(tangent, -value, rtol=1e-6, atol=0)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(decay(forward_ad.make_dual(p, torch.ones_like(p)))).tangent
    torch.testing.assert_close(tangent, -value, rtol=1e-6, atol=0)


def test_forward_mode_with_plain_duals():
    one, times = torch.ones(2, 1, **F64), torch.tensor([0.0, 1.0], **F64)
    with forward_ad.dual_level(), torch.no_grad():  # forward mode does not ask for gradients
        moved = forward_ad.unpack_dual(decay(1.0, forward_ad.make_dual(one, one)))
        torch.testing.assert_close(moved.tangent, one * math.exp(-1), rtol=1e-6, atol=0)
        for direction, sign in (((1.0, 0.0), 1), ((0.0, 1.0), -1)):  # d/dt0 and d/dt1 of e^(t0 - t1)
            t = forward_ad.make_dual(times, torch.tensor(direction, **F64))
            moved = forward_ad.unpack_dual(decay(1.0, one, t))
            torch.testing.assert_close(moved.tangent, sign * one * math.exp(-1), rtol=1e-6, atol=0)
        grid = forward_ad.make_dual(times, torch.tensor([0.0, 1.0], **F64))  # u (1 - h), one step
        moved = forward_ad.unpack_dual(at.evolve(lambda t, u: -u, one, grid, "euler").final)
        torch.testing.assert_close(moved.tangent, -one)


def test_forward_mode_of_a_parameter_that_comes_into_play_later():
    p = torch.tensor(1.0, **F64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(p, torch.ones_like(p))
        rate = lambda t, u: -u if t.max() < 0.5 else -dual * u
        final = at.evolve(rate, torch.ones(1, 1, **F64), [0.0, 1.0], "dopri5", rtol=1e-8).final
        tangent = forward_ad.unpack_dual(final).tangent
    assert tangent.item() == pytest.approx(-0.5 * math.exp(-1), rel=2e-2)


CASH_KARP = at.Scheme(
    "cash_karp",
    a=[
        [],
        ["1/5"],
        ["3/40", "9/40"],
        ["3/10", "-9/10", "6/5"],
        ["-11/54", "5/2", "-70/27", "35/27"],
        ["1631/55296", "175/512", "575/13824", "44275/110592", "253/4096"],
    ],
    b=["37/378", 0, "250/621", "125/594", 0, "512/1771"],
    c=[0, "1/5", "3/10", "3/5", 1, "7/8"],
    order=5,
    b_low=["2825/27648", 0, "18575/48384", "13525/55296", "277/14336", "1/4"],
)


@pytest.mark.slow
@pytest.mark.parametrize("back", [False, True])
def test_wanted_times_are_as_exact_as_steps_without_an_interpolant_of_that_order(back):
    spring = lambda t, u: torch.stack((u[..., 1], -u[..., 0]), -1)
    u0, t = torch.tensor([[1.0, 0.0], [0.1, 2.0]], **F64), torch.linspace(0, 10, 31, **F64)
    t, how = t.flip(0) if back else t, dict(rtol=1e-8, atol=1e-10)
    at_all = at.evolve(spring, u0, t, CASH_KARP, **how)
    at_end = at.evolve(spring, u0, t[[0, -1]], CASH_KARP, **how)
    truth = at.evolve(spring, u0, t, "dopri5", rtol=1e-13, atol=1e-14).u
    assert (at_all.u - truth).abs().max() < 3 * (at_end.final - truth[-1]).abs().max()
    assert at_all.stats.steps <= at_end.stats.steps + len(t)


def test_a_short_step_to_a_wanted_time_does_not_make_the_next_ones_short():
    u0, how = torch.tensor([ellipse(0.3)], **F64), dict(rtol=1e-8, atol=1e-10)
    plain = at.evolve(orbit, u0, [0.0, 3.0, 6.0], CASH_KARP, **how)
    close = at.evolve(orbit, u0, [0.0, 3.0, 3.0 + 1e-9, 6.0], CASH_KARP, **how)
    assert close.stats.steps <= plain.stats.steps + 2


def test_gradients_where_steps_end_at_wanted_times():
    u0 = torch.tensor([[0.5, 0.1], [1.5, -0.3]], **F64, requires_grad=True)
    t = torch.tensor([0.1, 0.7, 1.3], **F64, requires_grad=True)
    rate = lambda t, u: torch.stack((u[..., 1], -u[..., 0].sin()), -1)
    solve = lambda u0, t: at.evolve(rate, u0, t, CASH_KARP, rtol=1e-11, atol=1e-12).u
    assert torch.autograd.gradcheck(solve, (u0, t), rtol=1e-4, atol=1e-5, fast_mode=True)


@pytest.mark.slow
def test_wanted_times_inside_a_step_cost_no_operations_of_their_own():
    u0 = torch.tensor([ellipse(0.3), ellipse(0.6), ellipse(0.1)], **F64)
    times = lambda n: torch.linspace(0, 6, n, **F64)
    solve = lambda n, u0=u0: at.evolve(orbit, u0, times(n), "dopri5", rtol=1e-6).u
    counted = lambda n: count_operations(lambda: solve(n))
    assert counted(2001) < 1.2 * counted(101)
    u = u0.clone().requires_grad_()
    counted = lambda n: count_operations(lambda: solve(n, u)[-1].sum().backward())
    assert counted(2001) < 1.2 * counted(101)
    torch.testing.assert_close(solve(2001)[::20], solve(101), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(solve(2001, u), solve(2001))


@pytest.mark.parametrize(
    "rate",
    [
        lambda t, u: -u * float(t),
        lambda t, u: u * math.cos(t),
        lambda t, u: -u if t < 0.5 else u,
        lambda t, u: u * t.item(),
    ],
)
def test_a_rate_that_takes_time_for_one_number_is_told_so(rate):
    t, u0 = torch.linspace(0, 1, 3), torch.ones(3, 2)
    assert at.evolve(rate, u0, t).ok.all()  # on a grid it is one
    with pytest.raises(
        ValueError,
        match=r"treats t as one number .* t has shape \[3, 1\]. Use tensor operations such as torch.cos",
    ):
        at.evolve(rate, u0, t, "dopri5", rtol=1e-4)


@pytest.mark.parametrize("how", [{"rtol": 1e-8}, {"atol": 1e-8}, {"rtol": 1e-8, "atol": 1e-10}], ids=str)
def test_a_tolerance_alone_chooses_an_adaptive_scheme(how):
    u0, t = torch.tensor([[1.0], [2.0]], **F64), torch.tensor([0.0, 1.0], **F64)
    solved = at.evolve(lambda t, u: -u, u0, t, **how)
    assert torch.equal(solved.u, at.evolve(lambda t, u: -u, u0, t, "dopri5", **how).u)
    assert at.evolve(lambda t, u: -u, u0, t).stats.steps == 1  # without one, a step per time
    with pytest.raises(ValueError, match="rk4 has no embedded pair"):
        at.evolve(lambda t, u: -u, u0, t, "rk4", **how)
