"""Rosenbrock schemes: order, stability, error control, gradients, and what happens when a step fails."""

import math

import pytest
import torch
from scipy.integrate import solve_ivp

import attractor as at
from attractor.core.linearisation import linearised

F64 = dict(dtype=torch.float64)
schemes = pytest.mark.parametrize("scheme", ["rodas4", "rodas5p"])
one_scheme = pytest.mark.parametrize(
    "scheme", [pytest.param("rodas4", marks=pytest.mark.slow), "rodas5p"]
)  # where a test takes a second


def van_der_pol(t, u, mu=1.0):
    x, v = u.unbind(-1)
    return torch.stack((v, mu * (1 - x**2) * v - x), -1)


def driven(t, u):
    """A nonlinear rate that depends on time."""
    x, v = u.unbind(-1)
    return torch.stack((v, -(x**3) - 0.2 * v), -1) + torch.cos(2 * t) * torch.tensor([0.0, 1.0]).to(u)


def prothero_robinson(t, u, stiffness=1e6):
    """``u' = -stiffness (u - cos t) - sin t``, whose solution from 1 at t = 0 is cos t."""
    return -stiffness * (u - torch.cos(t)) - torch.sin(t)


def decay_with(t, u, p):
    return -p * u


# Accuracy


@schemes
@pytest.mark.parametrize("rate", [van_der_pol, driven], ids=["autonomous", "in time"])
def test_steps_converge_with_the_order(scheme, rate):
    u0 = torch.tensor([[2.0, 0.0], [0.5, 1.0]], **F64)
    truth = at.evolve(rate, u0, [0.0, 2.0], "dop853", rtol=1e-12, atol=1e-13).final
    errors = []
    for n in (40, 80):
        t = torch.linspace(0, 2, n + 1, **F64)
        errors.append((at.evolve(rate, u0, t, scheme).final - truth).abs().max().item())
    order = at.get_scheme(scheme).order
    assert order - 0.3 < math.log2(errors[0] / errors[1]) < order + 1.2


@schemes
def test_schemes_are_l_stable(scheme):
    """|R(z)| <= 1 on the imaginary axis, and R is of the order 1 / z far on the left."""
    scheme = at.get_scheme(scheme)

    def growth(a, b):
        matrix = torch.tensor([[a, -b], [b, a]], **F64)
        u = torch.tensor([1.0, 0.0], **F64)
        return (u + scheme.slope(lambda t, u: u @ matrix.T, 0.0, u, 1.0)).norm().item()

    assert max(growth(0.0, 10**k) for k in torch.linspace(-3, 6, 40).tolist()) <= 1 + 1e-12
    assert max(growth(-0.01 * 10**k, 10**k) for k in torch.linspace(-3, 6, 40).tolist()) <= 1 + 1e-12
    assert growth(-1e4, 0.0) < 1e-2
    assert growth(-1e8, 0.0) == pytest.approx(1e-4 * growth(-1e4, 0.0), rel=1e-2)


@schemes
def test_the_stiff_limit_of_prothero_and_robinson(scheme):
    u0 = torch.ones(1, 1, **F64)
    t = torch.linspace(0, 10, 21, **F64)
    errors = at.evolve(prothero_robinson, u0, t, scheme).u[:, 0, 0] - torch.cos(t)
    assert errors.abs().max() < 1e-4
    tight = at.evolve(prothero_robinson, u0, [0.0, 10.0], scheme, rtol=1e-8, atol=1e-8)
    assert abs(tight.final.item() - math.cos(10.0)) < 1e-7
    assert tight.stats.steps < 400  # dopri5 needs 3 million


@one_scheme
def test_dense_output_is_of_the_order_of_the_error_estimate(scheme):
    u0 = torch.tensor([[2.0, 0.0]], **F64)
    inside = torch.linspace(0, 2, 37, **F64)
    truth = at.evolve(van_der_pol, u0, inside, "dop853", rtol=1e-13, atol=1e-14).u
    errors = []
    for n in (20, 40):
        solved = at.evolve(van_der_pol, u0, torch.linspace(0, 2, n + 1, **F64), scheme, dense=True)
        errors.append((solved(inside) - truth).abs().max().item())
    assert math.log2(errors[0] / errors[1]) > at.get_scheme(scheme).error_order
    controlled = at.evolve(van_der_pol, u0, [0.0, 2.0], scheme, rtol=1e-8, atol=1e-8, dense=True)
    assert (controlled(inside) - truth).abs().max() < 1e-6
    torch.testing.assert_close(
        at.evolve(van_der_pol, u0, inside, scheme, rtol=1e-8, atol=1e-8).u, controlled(inside)
    )


@one_scheme
def test_error_control_agrees_with_radau(scheme):
    rate = lambda t, u: van_der_pol(t, u, 1e3)
    t = torch.tensor([0.0, 100.0, 400.0, 900.0], **F64)
    numbers = lambda t, u: [u[1], 1e3 * (1 - u[0] ** 2) * u[1] - u[0]]
    truth = solve_ivp(numbers, (0, 900), [2.0, 0.0], "Radau", t, rtol=1e-10, atol=1e-12).y.T
    how = dict(rtol=1e-4, atol=1e-7)
    solved = at.evolve(rate, torch.tensor([2.0, 0.0], **F64), t, scheme, **how)
    assert solved.ok
    torch.testing.assert_close(solved.u, torch.from_numpy(truth), rtol=1e-2, atol=1e-5)
    assert solved.stats.steps < 400  # tsit5 needs 300,000
    whole = at.odeint(rate, torch.tensor([2.0, 0.0], **F64), t, method=scheme, **how)
    torch.testing.assert_close(whole, torch.from_numpy(truth), rtol=1e-2, atol=1e-5)


@one_scheme
def test_backward_in_time(scheme):
    u0 = torch.tensor([[2.0, 0.0]], **F64)
    there = at.evolve(driven, u0, [0.0, 1.0], scheme, rtol=1e-10, atol=1e-12).final
    back = at.evolve(driven, there, [1.0, 0.0], scheme, rtol=1e-10, atol=1e-12).final
    torch.testing.assert_close(back, u0, rtol=1e-7, atol=1e-7)


@one_scheme
def test_float32(scheme):
    u0 = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    rate = lambda t, u: van_der_pol(t, u, 100.0)
    solved = at.evolve(rate, u0, [0.0, 5.0], scheme, rtol=1e-4, atol=1e-5)
    exact = at.evolve(rate, u0.double(), [0.0, 5.0], scheme, rtol=1e-6, atol=1e-7)
    assert solved.u.dtype == torch.float32
    assert solved.ok.all()
    torch.testing.assert_close(solved.final.double(), exact.final, rtol=2e-3, atol=2e-3)


# Batches


@one_scheme
def test_a_batch_takes_the_steps_of_its_trajectories(scheme):
    u0 = torch.tensor([[2.0, 0.0], [0.1, -3.0], [1.0, 1.0]], **F64)
    p = torch.tensor([[1.0], [10.0], [50.0]], **F64)
    rate = lambda t, u, p: van_der_pol(t, u, p[..., 0])
    solve = lambda u, p: at.evolve(rate, u, [0.0, 0.5, 2.0], scheme, rtol=1e-4, atol=1e-6, parameters=p)
    together = solve(u0, p)
    assert len(set(together.stats.accepted.tolist())) == 3
    for i in range(3):
        alone = solve(u0[i], p[i])
        torch.testing.assert_close(alone.u, together.u[:, i], rtol=1e-9, atol=1e-9)
        assert alone.stats.accepted == together.stats.accepted[i]


@schemes
def test_states_of_any_batch_shape(scheme):
    u0 = torch.rand(2, 3, 2, **F64) + 0.5
    solved = at.evolve(driven, u0, [0.0, 1.0], scheme, rtol=1e-6, atol=1e-6)
    flat = at.evolve(driven, u0.flatten(0, 1), [0.0, 1.0], scheme, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(solved.final.flatten(0, 1), flat.final)
    assert at.evolve(driven, u0[:0], [0.0, 1.0], scheme, rtol=1e-6).u.shape == (2, 0, 3, 2)


# Derivatives


def test_derivatives_of_a_rate_are_those_of_autograd():
    u, t = torch.rand(4, 2, **F64), torch.rand(4, 1, **F64)
    jacobian, in_time = linearised("rodas4", driven, t, u)
    for i in range(4):
        du, dt = torch.autograd.functional.jacobian(driven, (t[i], u[i]))[::-1]
        torch.testing.assert_close(jacobian[i], du)
        torch.testing.assert_close(in_time[i], dt[:, 0])


def test_rates_that_write_into_new_tensors():
    def rate(t, u):
        du = torch.empty_like(u)
        du[..., 0] = u[..., 1]
        du[..., 1] = -u[..., 0] * u[..., 1]
        return du

    stacked = lambda t, u: torch.stack((u[..., 1], -u[..., 0] * u[..., 1]), -1)
    u = torch.rand(3, 2, **F64)
    torch.testing.assert_close(linearised("rodas4", rate, 0.0, u), linearised("rodas4", stacked, 0.0, u))


@schemes
@pytest.mark.parametrize("pair", [False, True], ids=["in the state", "in the state and in time"])
@pytest.mark.parametrize("how", [{}, dict(rtol=1e-6, atol=1e-8)], ids=["grid", "control"])
def test_a_jacobian_of_the_user(scheme, pair, how):
    calls = 0

    def rate(t, u, p):
        return -p * (u - torch.cos(t))

    def jacobian(t, u, p):
        nonlocal calls
        calls += 1
        matrix = torch.diag_embed((-p).expand(u.shape))
        return (matrix, (-p * torch.sin(t)).expand(u.shape)) if pair else matrix

    u0, p = torch.rand(3, 2, **F64), torch.tensor([1.0, 100.0], **F64).requires_grad_()
    t = torch.linspace(0, 1, 6, **F64)
    own = at.evolve(rate, u0, t, scheme, parameters=p, jacobian=jacobian, **how)
    assert calls
    plain = at.evolve(rate, u0, t, scheme, parameters=p, **how)
    torch.testing.assert_close(own.u, plain.u, rtol=1e-10, atol=1e-12)
    assert own.stats.rate_calls == plain.stats.rate_calls
    torch.testing.assert_close(
        *(torch.autograd.grad(x.final.sum(), p) for x in (own, plain)), rtol=1e-8, atol=1e-12
    )


@one_scheme
def test_a_wrong_jacobian_costs_accuracy_and_no_more(scheme):
    u0, t = torch.ones(1, 1, **F64), [0.0, 1.0]
    zero = lambda t, u: torch.zeros(*u.shape, u.shape[-1], **F64)
    solved = at.evolve(lambda t, u: -u, u0, t, scheme, jacobian=zero, rtol=1e-4, atol=1e-4)
    assert solved.final.item() == pytest.approx(math.exp(-1), abs=1e-3)


@one_scheme
@pytest.mark.parametrize("how", [{}, dict(rtol=1e-5, atol=1e-7)], ids=["grid", "control"])
def test_gradients_are_those_of_finite_differences(scheme, how):
    t = torch.linspace(0, 0.5, 4, **F64)

    def end(u0, p):
        rate = lambda t, u, p: van_der_pol(t, u, p[..., 0])
        return at.evolve(rate, u0, t, scheme, parameters=p, **how).final

    u0 = torch.tensor([[2.0, 0.0], [1.0, 0.5]], **F64).requires_grad_()
    p = torch.tensor([[1.0], [20.0]], **F64).requires_grad_()
    # Under error control gradients treat step sizes as constants, so that they differ by the tolerance.
    tolerance = dict(atol=1e-7) if not how else dict(atol=2e-3, rtol=2e-3)
    assert torch.autograd.gradcheck(end, (u0, p), **tolerance)


@schemes
def test_checkpoints_do_not_change_gradients(scheme):
    u0 = torch.tensor([[2.0, 0.0]], **F64).requires_grad_()
    t = torch.linspace(0, 1, 12, **F64)
    grads = [
        torch.autograd.grad(at.evolve(van_der_pol, u0, t, scheme, checkpoint=c).final.sum(), u0)[0]
        for c in (None, 4)
    ]
    torch.testing.assert_close(*grads)


@schemes
def test_transforms(scheme):
    t = torch.linspace(0, 1, 6, **F64)
    end = lambda u: at.evolve(van_der_pol, u, t, scheme).final
    u0 = torch.rand(3, 2, **F64)
    torch.testing.assert_close(torch.func.vmap(end)(u0), end(u0))
    jacobians = torch.func.vmap(torch.func.jacrev(end))(u0)
    for i in range(3):
        torch.testing.assert_close(jacobians[i], torch.autograd.functional.jacobian(end, u0[i]))


def test_under_inference_mode():
    with torch.inference_mode():
        u = at.evolve(van_der_pol, torch.ones(2, 2), [0.0, 1.0], "rodas4", rtol=1e-4, atol=1e-4)
    assert u.ok.all()


# Failures


@schemes
def test_a_singular_matrix_costs_a_rejected_step(scheme):
    """I - gamma h J is singular for u' = u at h = 1 / gamma."""
    gamma = at.get_scheme(scheme).gamma
    control = at.core.rounds.Control(rtol=1e-6, atol=1e-6, first=1 / gamma)
    u0 = torch.tensor([[1.0], [2.0]], **F64)
    t = torch.tensor([0.0, 2 / gamma], **F64)
    solved = at.core.control.controlled(lambda t, u: u, u0, t, at.get_scheme(scheme), control)
    assert solved.ok.all()
    assert (solved.stats.rejected > 0).all()
    torch.testing.assert_close(solved.final, u0 * math.exp(2 / gamma), rtol=1e-4, atol=0.0)


@schemes
@pytest.mark.parametrize("how", [{}, dict(rtol=1e-6, atol=1e-6)], ids=["grid", "control"])
def test_a_jacobian_that_is_not_finite_loses_its_trajectory_only(scheme, how):
    rate = lambda t, u: -u.abs().sqrt()
    nan_at_zero = lambda t, u: torch.diag_embed(-0.5 / u.abs().sqrt())
    u0 = torch.tensor([[1.0, 1.0], [0.0, 1.0], [4.0, 1.0]], **F64).requires_grad_()
    t = torch.linspace(0, 1, 9, **F64)
    solved = at.evolve(rate, u0, t, scheme, jacobian=nan_at_zero, **how)
    assert solved.ok.tolist() == [True, False, True]
    assert solved.status.tolist() == [at.Status.OK, at.Status.LOST, at.Status.OK]
    assert torch.equal(solved.final[1], u0[1])
    assert solved.until[1] == 0
    others = at.evolve(rate, u0[::2], t, scheme, jacobian=nan_at_zero, **how)
    torch.testing.assert_close(solved.u[:, ::2], others.u, rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(solved.final[::2].sum(), u0)
    assert gradient[::2].isfinite().all()


@schemes
def test_blow_up_is_reported(scheme):
    u0 = torch.tensor([[1.0], [-1.0]], **F64)
    solved = at.evolve(lambda t, u: u**2, u0, [0.0, 2.0], scheme, rtol=1e-3, atol=1e-3)
    assert solved.ok.tolist() == [False, True]
    assert solved.until[0].item() == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (dict(compile=True), "compile=True is not implemented for rodas4 with equal steps"),
        (dict(u0=torch.ones(2, 2, dtype=torch.complex128)), "real states"),
        (dict(jacobian=3), "jacobian is a int; pass a function"),
        (dict(jacobian=lambda t, u: 1.0), "jacobian returned a float; return a tensor"),
        (dict(jacobian=lambda t, u: u), r"jacobian returned \[2, 2\].* return \[2, 2, 2\]"),
        (dict(jacobian=lambda t, u: torch.zeros(2, 2, 2)), r"float32.*return \[2, 2, 2\] in torch.float64"),
        (dict(scheme="rk4", jacobian=lambda t, u: u), "rk4 does not use it"),
        (dict(f=lambda t, u: torch.from_numpy(u.numpy()).to(u)), "needs the Jacobian of the rate"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    given = dict(f=lambda t, u: -u, u0=torch.ones(2, 2, **F64), t=[0.0, 1.0], scheme="rodas4") | call
    with pytest.raises((ValueError, TypeError), match=message):
        at.evolve(**given)
    if "compile" not in call:
        with pytest.raises((ValueError, TypeError), match=message):
            at.evolve(**{**given, "scheme": given["scheme"].replace("rk4", "bosh3")}, rtol=1e-3) if (
                given["scheme"] != "rk4"
            ) else at.evolve(**given)


RODAS4 = at.schemes.RODAS4
PARTS = dict(
    name="mine", gamma=RODAS4.gamma, a=RODAS4.a, c=RODAS4.c, b=RODAS4.b, order=4, b_low=RODAS4.b_low
)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (dict(order=5), "claims order 5, but the conditions of order 5 have a residual"),
        (dict(gamma=0), "gamma = 0 must be positive"),
        (dict(a=RODAS4.a[:-1]), r"rows of a have \[0, 1, 2, 3, 4\] entries"),
        (dict(b_low=RODAS4.b), "b_low is not an embedded slope"),
        (dict(b_low=[1]), "b_low has 1 entries but b has 6"),
        (dict(c=None), "lists of rows"),
        (dict(b=[*RODAS4.b[:-1], math.nan]), "not a list of coefficients|not finite"),
    ],
)
def test_bad_coefficients_are_named(parts, message):
    with pytest.raises((ValueError, TypeError), match=message):
        at.Rosenbrock(**{**PARTS, **parts})


def test_published_times_follow_from_the_coefficients():
    alpha, d = at.schemes.RODAS4.alpha, at.schemes.RODAS4.d
    assert alpha == pytest.approx((0, 0.386, 0.21, 0.63, 1, 1), abs=1e-12)
    assert d == pytest.approx((0.25, -0.1043, 0.1035, -0.0362, 0, 0), abs=1e-12)
    alpha, d = at.schemes.RODAS5P.alpha, at.schemes.RODAS5P.d
    times = (0, 0.6358126895828704, 0.4095798393397535, 0.9769306725060716, 0.4288403609558664, 1, 1, 1)
    in_time = (0.21193756319429014, -0.42387512638858027, -0.3384627126235924, 1.8046452872882734,
               2.325825639765069, 0, 0, 0)  # fmt: skip
    assert alpha == pytest.approx(times, abs=1e-12)
    assert d == pytest.approx(in_time, abs=1e-12)


def test_repr():
    assert repr(at.schemes.RODAS4) == "Rosenbrock('rodas4', order 4 (error from order 3), 6 stages)"


@schemes
def test_a_hybrid_of_a_linearly_implicit_step_is_saved_and_loaded(scheme, tmp_path):
    correction = at.corrections.Stages(2, stages=at.get_scheme(scheme).rate_calls - 1, width=0).double()
    solver = at.HybridSolver(at.systems.VanDerPol(), scheme, correction, 0.1)
    u0 = torch.rand(3, 2, **F64)
    before = solver.solve(u0, 1.0).final
    solver.save(tmp_path / "solver")
    again = at.HybridSolver.load(tmp_path / "solver")
    assert again.scheme == at.get_scheme(scheme)
    torch.testing.assert_close(again.solve(u0, 1.0).final, before, rtol=0, atol=0)


def test_events_have_gradients():
    fall = lambda t, u: torch.stack((u[..., 1], torch.full_like(u[..., 1], -9.81)), -1)
    u0 = torch.tensor([[1.0, 0.0], [2.0, 0.0]], **F64).requires_grad_()
    solved = at.evolve(fall, u0, [0.0, 5.0], "rodas5p", rtol=1e-8, events=lambda t, u: u[..., 0])
    torch.testing.assert_close(solved.events.time, (2 * u0[:, 0] / 9.81).sqrt())
    (gradient,) = torch.autograd.grad(solved.events.time.sum(), u0)
    torch.testing.assert_close(gradient[:, 0], 1 / (2 * 9.81 * u0[:, 0]).sqrt())


def test_a_discontinuity_in_time():
    rate = lambda t, y: torch.where(t < 1, -y, -100 * y)
    t, y0 = torch.tensor([0.0, 1.0, 1.1], **F64), torch.ones(2, **F64)
    y = at.odeint(rate, y0, t, method="rodas4", options={"jump_t": [1.0]})
    expected = torch.tensor([0.0, -1.0, -11.0], **F64).exp()
    torch.testing.assert_close(y[:, 0], expected, rtol=1e-6, atol=1e-9)
