"""What torchdiffeq's `odeint` offers besides methods: events, discontinuities, callbacks, structured states."""

import math

import pytest
import torch

import attractor as at
from attractor.core.implicit import TABLEAUS
from attractor.core.multistep import adams_weights

F64 = dict(dtype=torch.float64)
ADAPTIVE = ["dopri5", "bosh3", "tsit5", "dop853"]
FALL = lambda t, y: torch.stack((y[1], torch.full_like(y[1], -9.81)))


def span(t1, t0=0.0):
    return torch.tensor([t0, t1], **F64)


@pytest.mark.parametrize("method", [*ADAPTIVE, "rk4", "implicit_midpoint"])
@pytest.mark.parametrize("solve", [at.odeint, at.odeint_adjoint])
def test_an_event_and_its_gradients(method, solve):
    # From height a with speed b: t = (b + sqrt(b^2 + 2 g a)) / g, and the speed there is b - g t.
    y0 = torch.tensor([1.3, 0.7], **F64, requires_grad=True)
    options = {"step_size": 0.05} if method in ("rk4", "implicit_midpoint") else None
    t, y = solve(
        FALL, y0, span(1.0), method=method, event_fn=lambda t, y: y[0], options=options,
        **({"adjoint_params": ()} if solve is at.odeint_adjoint else {}),
    )  # fmt: skip
    root = math.sqrt(0.7**2 + 2 * 9.81 * 1.3)
    assert t.item() == pytest.approx((0.7 + root) / 9.81, rel=1e-9)
    assert y[-1, 1].item() == pytest.approx(-root, rel=1e-9)
    by_time = torch.autograd.grad(t, y0, retain_graph=True)[0]
    torch.testing.assert_close(
        by_time, torch.tensor([1 / root, (1 + 0.7 / root) / 9.81], **F64), rtol=1e-7, atol=0
    )
    by_speed = torch.autograd.grad(y[-1, 1], y0)[0]
    torch.testing.assert_close(by_speed, torch.tensor([-9.81, -0.7], **F64) / root, rtol=1e-7, atol=0)


def test_an_event_with_parameters_times_and_several_functions():
    a, level = (torch.tensor(x, **F64, requires_grad=True) for x in (0.8, 0.3))
    t0 = torch.tensor(0.4, **F64, requires_grad=True)
    y0 = torch.tensor([2.0], **F64, requires_grad=True)

    def solve(a, level, t0, y0):
        rate = lambda t, y: -a * y * torch.cos(0.1 * t)
        event = lambda t, y: torch.stack((y[0] - level, 100 - t))
        return at.odeint_event(rate, y0, t0, event_fn=event, rtol=1e-11, atol=1e-12)[0]

    assert torch.autograd.gradcheck(solve, (a, level, t0, y0), rtol=1e-5, atol=1e-7)


def test_events_backward_in_time():
    rate = lambda t, y: -y
    t, y = at.odeint_event(
        rate, torch.ones(1, **F64), torch.tensor(1.0, **F64), event_fn=lambda t, y: y[0] - 2, reverse_time=True
    )  # fmt: skip
    assert t.item() == pytest.approx(1 - math.log(2), rel=1e-6)
    assert y[-1].item() == pytest.approx(2, rel=1e-8)


def test_no_event_is_an_error():
    rate, event = lambda t, y: torch.ones_like(y), lambda t, y: y[0] + 1
    y0 = torch.ones(1, **F64)
    with pytest.raises(FloatingPointError, match="is there no event"):
        at.odeint(rate, y0, span(1.0), event_fn=event, options={"max_num_steps": 20})
    with pytest.raises(ValueError, match="events with fixed steps need the option step_size"):
        at.odeint(rate, y0, span(1.0), event_fn=event, method="rk4")


class Jump:
    """A rate that changes at t = 0.5, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, t, y):
        self.calls += 1
        return -0.5 * y if t < 0.5 else y**2


@pytest.mark.parametrize("method", ADAPTIVE)
@pytest.mark.parametrize("back", [False, True])
def test_steps_end_at_jumps(method, back):
    t = span(0.0, 1.0) if back else span(1.0)
    y0 = torch.tensor([1 / (math.exp(0.25) - 0.5)] if back else [1.0], **F64)
    plain, told = Jump(), Jump()
    how = dict(method=method, rtol=1e-9, atol=1e-9)
    at.odeint(plain, y0, t, **how)
    y = at.odeint(told, y0, t, **how, options={"jump_t": torch.tensor([0.5])})
    assert told.calls < plain.calls
    exact = 1.0 if back else 1 / (math.exp(0.25) - 0.5)
    assert y[-1].item() == pytest.approx(exact, rel=1e-7)


def test_steps_end_at_step_t():
    starts = []
    rate = lambda t, y: -y
    rate.callback_step = lambda t, y, dt: starts.append(t.item())
    at.odeint(rate, torch.ones(1, **F64), span(3.0), options={"step_t": [0.123, 2.5]})
    assert {0.123, 2.5} <= set(starts)


@pytest.mark.parametrize("method", ["euler", "heun2", "rk4", "explicit_adams", "trapezoid"])
def test_perturbed_rates_are_not_called_at_the_ends_of_steps(method):
    seen = []
    rate = lambda t, y: (seen.append(t.item()), -y)[1]
    for perturb in (False, True):
        seen.clear()
        y = at.odeint(
            rate, torch.ones(1, **F64), span(1.0), method=method, options={"step_size": 0.25, "perturb": perturb}
        )  # fmt: skip
        assert (0.25 in seen) is not perturb
        assert y[-1].item() == pytest.approx(math.exp(-1), rel=0.2)


@pytest.mark.parametrize(("interp", "order"), [("linear", 2), ("cubic", 4)])
def test_interpolation_between_fixed_steps_has_its_order(interp, order):
    t = torch.tensor([0.0, 0.337, 0.871, 2.0], **F64)

    def error(step):
        options = {"step_size": step, "interp": interp}
        y = at.odeint(lambda t, y: y * t.cos(), torch.ones(1, **F64), t, method="rk4", options=options)
        return (y[1:3, 0] - torch.exp(t[1:3].sin())).abs().max().item()

    assert math.log2(error(0.1) / error(0.0125)) / 3 > order - 0.5


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0, **F64))
        self.counts = {}
        for name in ("callback_step", "callback_accept_step", "callback_reject_step"):
            for end in ("", "_adjoint"):
                self.counts[name + end] = 0
                setattr(self, name + end, lambda t, y, dt, key=name + end: self.count(key, y))

    def count(self, key, y):
        assert y.shape == (2, 3)
        self.counts[key] += 1

    def forward(self, t, y):
        return -self.weight * y * (20 * t).sin()


def test_callbacks_of_adaptive_steps():
    f = Counting()
    y = at.odeint_adjoint(f, torch.rand(2, 3, **F64), span(1.0), options={"first_step": 2.0})
    counts = f.counts
    assert counts["callback_reject_step"] > 0
    assert counts["callback_step"] == counts["callback_accept_step"] + counts["callback_reject_step"]
    assert counts["callback_step_adjoint"] == 0
    y.sum().backward()
    assert counts["callback_step_adjoint"] == counts["callback_step"]
    assert counts["callback_accept_step_adjoint"] == counts["callback_accept_step"]


def test_callbacks_of_fixed_steps():
    f = Counting()
    with pytest.warns(UserWarning, match="does not call callback_accept_step, callback_reject_step"):
        y = at.odeint_adjoint(
            f, torch.rand(2, 3, **F64), span(1.0), method="rk4", options={"step_size": 0.1}
        )
    y.sum().backward()
    assert f.counts["callback_step"] == f.counts["callback_step_adjoint"] == 10


@pytest.mark.parametrize("method", ["dopri5", "rk4", "gl4"])
def test_dicts_and_arguments(method):
    k = torch.tensor(1.7, **F64, requires_grad=True)
    rate = lambda t, y, k: {"q": y["p"], "p": -k * y["q"]}
    y0 = {"p": torch.zeros(2, **F64), "q": torch.tensor([1.0, 2.0], **F64)}
    t = torch.linspace(0, 1, 21, **F64)
    y = at.odeint(rate, y0, t, method=method, args=(k,))
    assert list(y) == ["p", "q"]
    frequency = math.sqrt(1.7)
    torch.testing.assert_close(y["q"][-1], y0["q"] * math.cos(frequency), rtol=1e-5, atol=1e-7)
    (gradient,) = torch.autograd.grad(y["q"][-1, 0], k)
    assert gradient.item() == pytest.approx(-math.sin(frequency) / (2 * frequency), rel=1e-4)
    with pytest.raises(ValueError, match="func returned list for a dict with the keys"):
        at.odeint(lambda t, y: [y["q"], y["p"]], y0, t, method=method)


def test_tolerances_per_component():
    # Only the second component is wanted exactly.
    rate = lambda t, y: torch.stack((y[0].cos(), y[1] * t.cos()))
    y0 = torch.tensor([0.0, 1.0], **F64)
    solve = lambda tol: at.odeint(rate, y0, span(2.0), rtol=0.0, atol=tol)
    exact = math.exp(math.sin(2.0))
    error = lambda y: abs(y[-1, 1].item() - exact)
    assert error(solve(torch.tensor([1e-2, 1e-9], **F64))) < 1e-8 < error(solve(1e-2))
    parts = lambda tol: at.odeint(
        lambda t, y: (-y[0], y[1] * t.cos()), (torch.ones(1, **F64), torch.ones(2, **F64)), span(2.0),
        rtol=tol, atol=tol,
    )  # fmt: skip
    assert abs(parts((1e-2, 1e-10))[1][-1, 0].item() - exact) < 1e-8


@pytest.mark.parametrize("solver", ["LSODA", "RK45", "DOP853"])
def test_scipy_solver(solver):
    k, y0 = torch.tensor(0.9, **F64), torch.tensor([1.0, 2.0], **F64)
    rate = lambda t, y: -y * t.cos()
    for t in (torch.linspace(0, 1, 4, **F64), torch.linspace(1, 0, 4, **F64)):
        y = at.odeint(rate, y0, t, method="scipy_solver", options={"solver": solver})
        exact = y0 * torch.exp(t[0].sin() - t.sin())[:, None]
        torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-6)
    args = [x.clone().requires_grad_() for x in (k, y0, torch.linspace(0, 1, 3, **F64))]
    solve = lambda k, y0, t: at.odeint_adjoint(
        lambda t, y: -k * y * t.cos(), y0, t, method="scipy_solver", options={"solver": solver},
        adjoint_params=(k,), rtol=1e-10, atol=1e-11,
    )  # fmt: skip
    assert torch.autograd.gradcheck(solve, args, rtol=1e-4, atol=1e-5, fast_mode=True)


ORDERS = {
    "implicit_euler": 1, "implicit_midpoint": 2, "trapezoid": 2, "radauIIA3": 3, "gl4": 4, "radauIIA5": 5,
    "gl6": 6, "sdirk2": 2, "trbdf2": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", list(TABLEAUS))
def test_implicit_methods_have_their_order_and_gradients(name):
    rate = lambda t, y: torch.stack((y[1] * t.cos(), -y[0].sin() + 0.1 * t))
    y0 = torch.tensor([1.0, 0.5], **F64)
    truth = at.odeint(rate, y0, span(1.0), method="dop853", rtol=1e-13, atol=1e-14)[-1]
    error = lambda n: (
        (at.odeint(rate, y0, torch.linspace(0, 1, n + 1, **F64), method=name)[-1] - truth).norm().item()
    )
    assert math.log2(error(4) / error(8)) == pytest.approx(ORDERS[name], abs=0.45)
    solve = lambda y0, t: at.odeint(rate, y0, t, method=name)
    t = torch.linspace(0, 1, 4, **F64, requires_grad=True)
    assert torch.autograd.gradcheck(solve, (y0.clone().requires_grad_(), t), fast_mode=True)


def test_adams_weights_are_the_textbook_s():
    assert adams_weights(4, implicit=False) == pytest.approx([x / 24 for x in (55, -59, 37, -9)])
    assert adams_weights(4, implicit=True) == pytest.approx([x / 24 for x in (9, 19, -5, 1)])


@pytest.mark.parametrize("method", ["explicit_adams", "implicit_adams"])
def test_adams_methods(method):
    rate = lambda t, y: y * t.cos()
    for t in (
        torch.linspace(0, 2, 41, **F64),
        torch.cat((torch.linspace(0, 1, 30), torch.tensor([2.0]))),
    ):
        options = {"max_order": 6} if len(t) == 41 else {"step_size": 0.05, "max_order": 6}
        y = at.odeint(rate, torch.ones(1, **F64), t.double(), method=method, options=options)
        torch.testing.assert_close(y[:, 0], torch.exp(t.double().sin()), rtol=2e-5, atol=0)
    solve = lambda y0, t: at.odeint(rate, y0, t, method=method)
    t = torch.linspace(0, 1, 8, **F64, requires_grad=True)
    assert torch.autograd.gradcheck(solve, (torch.ones(1, **F64, requires_grad=True), t), fast_mode=True)


def test_vmap_over_fixed_steps_and_a_clear_error_otherwise():
    y0, t = torch.rand(3, 2, **F64), torch.linspace(0, 1, 11, **F64)
    rate = lambda t, y: -y * t.cos()
    batched = torch.func.vmap(lambda y: at.odeint(rate, y, t, method="rk4"))(y0)
    torch.testing.assert_close(batched.transpose(0, 1), at.odeint(rate, y0, t, method="rk4"))
    with pytest.raises(ValueError, match=r"does not run under torch.func.vmap. States have batch"):
        torch.func.vmap(lambda y: at.odeint(rate, y, t))(y0)


def test_rejected_attempts_leave_no_trace_in_gradients():
    # The first step, far too long, looks below zero: a NaN that is rejected must leave no trace.
    y0 = torch.tensor([4.0], **F64, requires_grad=True)
    y = at.odeint(lambda t, y: -y.sqrt(), y0, span(1.0), options={"first_step": 50.0})
    (gradient,) = torch.autograd.grad(y[-1].sum(), y0)
    torch.testing.assert_close(gradient, torch.tensor([0.75], **F64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ADAPTIVE)
def test_forward_mode(method):
    one = torch.ones(2, **F64)
    solve = lambda y: at.odeint(lambda t, y: -y, y, span(1.0), method=method, rtol=1e-9)[-1]
    _, tangent = torch.func.jvp(solve, (one,), (one,))
    torch.testing.assert_close(tangent, one * math.exp(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["dopri5", "bosh3", "dopri8", "rk4"])
def test_rates_that_are_gradients_themselves(method):
    """As in continuous normalising flows and Hamiltonian networks: with and without checkpoints."""

    class Pendulum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.strength = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def forward(self, t, u):
            with torch.enable_grad():
                u.requires_grad_(True)
                q, p = u.chunk(2, -1)
                energy = (p**2 / 2 - self.strength * q.cos()).sum()
                (grad,) = torch.autograd.grad(energy, u, create_graph=True)
            dq, dp = grad.chunk(2, -1)
            return torch.cat((dp, -dq), -1)

    rate, t = Pendulum(), torch.linspace(0, 1, 4, dtype=torch.float64)
    explicit = lambda t, u: torch.cat((u[..., 1:], -rate.strength * u[..., :1].sin()), -1)
    results = []
    for f, solve in ((rate, at.odeint), (rate, at.odeint_adjoint), (explicit, at.odeint)):
        u0 = torch.tensor([[0.3, 0.4], [1.0, -0.2]], dtype=torch.float64)
        final = solve(f, u0, t, method=method)[-1].sum()
        results.append(torch.stack((final.detach(), torch.autograd.grad(final, rate.strength)[0])))
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])
