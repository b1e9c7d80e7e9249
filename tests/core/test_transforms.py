"""Transforms of torch.func over `evolve` and `odeint`: what works, and errors where it cannot."""

import pytest
import torch
from torch.autograd.functional import hessian as reference_hessian
from torch.autograd.functional import jacobian
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import attractor as at

T = torch.linspace(0, 1, 12, dtype=torch.float64)
CONTROL = {"rtol": 1e-6, "atol": 1e-8}
SAYS = r"does not run under torch.func.vmap. States have batch dimensions already: pass all states"


def states(*shape):
    return torch.randn(*shape, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


THREE = states(3)  # vmap draws no random numbers


def pendulum(t, u):
    return torch.stack((u[..., 1], -torch.sin(u[..., 0])), -1)


def with_length(t, u, p):
    return torch.stack((u[..., 1], -p[..., 0] * torch.sin(u[..., 0])), -1)


def forced(t, u):
    return torch.stack((u[..., 1], torch.cos(t) - u[..., 0]), -1)


def final(u, t=T, rate=pendulum, **options):
    return at.evolve(rate, u, t, **options).final


def energy(u, **options):
    return final(u, **options).square().sum()


def each(function, *inputs):
    return torch.stack([function(*row) for row in zip(*inputs)])


@pytest.mark.parametrize("scheme", ["euler", "rk4", "dopri5", "leapfrog"])
@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_vmap_over_states(scheme, shape):
    rate = at.systems.HarmonicOscillator() if scheme == "leapfrog" else pendulum
    solve = lambda u: final(u, rate=rate, scheme=scheme)
    torch.testing.assert_close(vmap(solve)(states(*shape)), each(solve, states(*shape)))


def test_vmap_over_everything_a_trajectory_has():
    def solve(u):
        found = at.evolve(pendulum, u, T, every=3)
        return found.u, found.t, found.ok, found.until, found.status

    u = states(4, 3)
    ours, theirs = vmap(solve)(u), [solve(row) for row in u]
    for i, part in enumerate(ours):
        assert torch.equal(part, torch.stack([found[i] for found in theirs]))


def test_vmap_over_parameters():
    u, p = states(3), torch.rand(4, 3, 1, dtype=torch.float64)
    solve = lambda p: final(u, rate=with_length, parameters=p)
    torch.testing.assert_close(vmap(solve)(p), each(solve, p))


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_vmap_over_what_a_rate_closes_over(grad_enabled):
    solve = lambda k: final(THREE, rate=lambda t, u: -k * u)
    k = torch.arange(1.0, 4.0, dtype=torch.float64)
    with torch.set_grad_enabled(grad_enabled):
        torch.testing.assert_close(vmap(solve)(k), each(solve, k))


@pytest.mark.parametrize("method", ["evolve", "odeint"])
def test_vmap_over_times(method):
    t = torch.stack([end * T for end in (1.0, 2.0, -0.5)])
    if method == "evolve":
        solve = lambda t: final(THREE, t, forced)
    else:
        solve = lambda t: at.odeint(forced, THREE, t, method="rk4")[-1]
    torch.testing.assert_close(vmap(solve)(t), each(solve, t))


def test_vmap_over_states_and_times_and_parameters():
    u, p = states(4, 3), torch.rand(4, 3, 1, dtype=torch.float64)
    t = torch.stack([end * T for end in (1.0, 2.0, 0.5, 3.0)])
    solve = lambda u, t, p: final(u, t, with_length, parameters=p)
    torch.testing.assert_close(vmap(solve)(u, t, p), each(solve, u, t, p))
    nested = vmap(vmap(solve, (0, None, 0)))(u, t, p)
    torch.testing.assert_close(nested, each(solve, u, t, p))


def test_dense_output_under_vmap():
    solve = lambda u: at.evolve(pendulum, u, T, dense=True)(torch.tensor([0.3, 0.7]))
    torch.testing.assert_close(vmap(solve)(states(4, 3)), each(solve, states(4, 3)))


def test_a_corrected_step_under_vmap():
    torch.manual_seed(0)
    correction = at.corrections.AttNS(2, width=8, dtype=torch.float64)
    solve = lambda u: at.evolve(pendulum, u, T, "euler", correction).final
    torch.testing.assert_close(vmap(solve)(states(4, 3)), each(solve, states(4, 3)))


def test_a_lost_trajectory_keeps_its_last_finite_state_under_vmap():
    rate = lambda t, u: u**3
    u = torch.tensor([[0.1], [1e80], [0.2], [torch.nan]], dtype=torch.float64)
    solve = lambda u: (lambda s: (s.u, s.ok, s.until, s.status))(at.evolve(rate, u, T))
    own = [solve(row) for row in u]
    for i, part in enumerate(vmap(solve)(u)):
        torch.testing.assert_close(part, torch.stack([x[i] for x in own]), equal_nan=True)
    healthy = lambda u: at.evolve(rate, u, T).final.sum()
    slopes = vmap(grad(healthy))(u)
    torch.testing.assert_close(slopes[::2], each(lambda row: jacobian(healthy, row), u[::2]))


@pytest.mark.parametrize("options", [{}, CONTROL], ids=["fixed steps", "error control"])
class TestDerivatives:
    def test_reverse_mode(self, options):
        u = states(3)
        torch.testing.assert_close(
            grad(lambda u: energy(u, **options))(u), jacobian(lambda u: energy(u, **options), u)
        )
        torch.testing.assert_close(
            jacrev(lambda u: final(u, **options))(u), jacobian(lambda u: final(u, **options), u)
        )

    def test_forward_mode(self, options):
        u, solve = states(3), lambda u: final(u, **options)
        torch.testing.assert_close(jacfwd(solve)(u), jacobian(solve, u))
        (slope,) = [jvp(solve, (u,), (torch.ones_like(u),))[1]]
        torch.testing.assert_close(slope, jacobian(solve, u).sum((-2, -1)))

    def test_second_derivatives(self, options):
        u, value = states(2), lambda u: energy(u, **options)
        torch.testing.assert_close(hessian(value)(u), reference_hessian(value, u))

    def test_derivatives_with_respect_to_times(self, options):
        solve = lambda t: final(states(3), t, forced, **options)
        _, slope = jvp(solve, (T,), (T,))
        torch.testing.assert_close(slope, jacobian(solve, T) @ T)

    def test_recomputation_is_refused(self, options):
        with pytest.raises(ValueError, match=r"checkpoint = True does not work under torch.func.grad"):
            grad(lambda u: energy(u, checkpoint=True, **options))(states(3))


def test_derivatives_per_example():
    u = states(4, 3)
    torch.testing.assert_close(vmap(grad(energy))(u), jacobian(lambda u: energy(u), u))
    torch.testing.assert_close(grad(lambda u: vmap(final)(u).square().sum())(u), jacobian(energy, u))
    torch.testing.assert_close(vmap(jacrev(final))(u), each(lambda row: jacobian(final, row), u))
    torch.testing.assert_close(vmap(jacfwd(final))(u), each(lambda row: jacobian(final, row), u))


@pytest.mark.parametrize(
    "call",
    [
        lambda: vmap(lambda u: final(u, **CONTROL))(states(4, 3)),
        lambda: vmap(lambda u: final(u, **CONTROL))(states(4)),
        lambda: vmap(lambda k: final(THREE, rate=lambda t, u: -k * u, **CONTROL))(torch.rand(4)),
        lambda: vmap(lambda t: final(THREE, t, **CONTROL))(torch.stack((T, 2 * T))),
        lambda: vmap(grad(lambda u: energy(u, **CONTROL)))(states(4, 3)),
        lambda: vmap(lambda u: at.odeint(pendulum, u, T))(states(4)),
        lambda: vmap(lambda u: at.odeint_adjoint(pendulum, u, T))(states(4)),
        lambda: vmap(lambda t: at.odeint(pendulum, THREE, t))(torch.stack((T, 2 * T))),
        lambda: vmap(lambda u: at.odeint(pendulum, u, T, method="implicit_adams"))(states(4)),
        lambda: vmap(lambda t: at.odeint(pendulum, THREE, t, method="rk4", options={"step_size": 0.1}))(
            torch.stack((T, 2 * T))
        ),
        lambda: vmap(
            lambda u: at.odeint_event(pendulum, u, torch.tensor(0.0), event_fn=lambda t, y: y[..., 0])
        )(states(4)),
    ],
)
def test_decisions_that_depend_on_values_say_what_to_do_instead(call):
    with pytest.raises(ValueError, match=SAYS):
        call()


def test_an_error_of_the_rate_itself_stays():
    def rate(t, u):
        return u * u.sum().item()

    for solve in (final, lambda u, rate: at.odeint(rate, u, T)):
        with pytest.raises(RuntimeError, match=r"vmap: .*\.item\(\)"):
            vmap(lambda u, solve=solve: solve(u, rate=rate))(states(4, 3))


def test_odeint_adjoint_refuses_transforms_that_do_not_recompute():
    with pytest.raises(ValueError, match="use odeint in place of odeint_adjoint"):
        grad(lambda u: at.odeint_adjoint(pendulum, u, T)[-1].sum())(states(3))


def test_a_solver_with_a_trust_region_says_so():
    system = at.systems.HarmonicOscillator()
    solver = at.fit(system, dt=0.5, horizon=1.0, trajectories=20, correction="linear")
    with pytest.raises(ValueError, match=SAYS):
        vmap(lambda u: solver.solve(u, 1.0).final)(states(4, 3))
