"""Outside of its trust region a hybrid solver takes plain substeps, and says so."""

import copy
import math

import pytest
import torch

import attractor as at
from attractor.core.trajectory import Status
from attractor.ode import trust
from attractor.ode.trajectories import fine_trajectories
from attractor.ode.trust import TrustRegion, controlled_step, settled_substeps

F64 = dict(dtype=torch.float64)


class Nothing(torch.nn.Module):
    """A correction that adds nothing."""

    def forward(self, u, slope, dt):
        return torch.zeros_like(u)


class Explosion(torch.nn.Module):
    """A correction that overflows outside of [-1, 1]."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight, **F64))

    def forward(self, u, slope, dt):
        return self.weight * torch.expm1(1e4 * (u.abs() - 1).clamp(min=0))


def decay(t, u):
    return -torch.sinh(u)


def exact_decay(u0, t):
    return 2 * torch.atanh(torch.tanh(u0 / 2) * math.exp(-t))


def interval(accuracy=None):
    region = TrustRegion.around(torch.linspace(-1, 1, 101, **F64)[:, None])
    if accuracy is not None:
        region.accuracy = torch.tensor([accuracy], **F64)
    return region


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_guarded_step_is_replaced_not_corrected(compile):
    """Adding the difference to a plain step would cancel here, or be inf - inf."""
    solver = at.HybridSolver(decay, "rk4", Nothing(), 0.2, interval())
    u0 = torch.arange(5.0, 5.5, 0.05, **F64)[:, None]
    solved = solver.solve(u0, 0.2, compile=compile)
    two = at.evolve(decay, u0, torch.tensor([0.0, 0.1, 0.2], **F64), "rk4")
    assert solved.ok.all()
    torch.testing.assert_close(solved.final, two.final, rtol=1e-13, atol=0)
    assert solved.stats.guarded.tolist() == [1] * len(u0)
    torch.testing.assert_close(solver.step(u0), two.final, rtol=1e-13, atol=0)


def test_substeps_are_as_many_as_the_accuracy_of_the_fit_needs():
    u0 = torch.tensor([[0.5], [2.0], [3.0], [5.0]], **F64)
    calls = {}
    for accuracy in (1e-4, 1e-7, 1e-10):
        solver = at.HybridSolver(decay, "rk4", Nothing(), 0.2, interval(accuracy))
        solved = solver.solve(u0, 0.2)
        assert (solved.final - exact_decay(u0, 0.2))[1:].abs().max() < 10 * accuracy
        calls[accuracy] = solved.stats.rate_calls
    assert calls[1e-4] < calls[1e-7] < calls[1e-10]


def test_substeps_of_a_trajectory_do_not_depend_on_its_neighbours():
    u0 = torch.tensor([[1.5], [5.0], [3.0]], **F64)
    t, tolerance = torch.tensor(0.0, **F64), torch.tensor([1e-9], **F64)
    ways = (decay, controlled_step), (only_one_time, controlled_step), (decay, settled_substeps)
    for rate, step in ways:
        together, _ = step(rate, t, 0.2, u0, tolerance)
        for i in range(3):
            alone, _ = step(rate, t, 0.2, u0[i : i + 1], tolerance)
            assert torch.equal(alone, together[i : i + 1])


def only_one_time(t, u):
    return decay(t, u) if t >= 0 else u  # t cannot be a tensor of several times


@pytest.mark.parametrize("rate", [decay, only_one_time])
def test_substeps_count_their_calls_of_the_rate(rate):
    calls = []
    counted = lambda t, u: calls.append(1) or rate(t, u)
    u0, t = torch.tensor([[1.5], [5.0]], **F64), torch.tensor(0.0, **F64)
    _, count = controlled_step(counted, t, 0.2, u0, torch.tensor([1e-9], **F64))
    assert count == len(calls) - 2 * (rate is only_one_time)  # calls that the rate refuses


SYSTEMS = [
    (at.systems.ElasticPendulum(), 4.0), (at.systems.VanDerPol(), 4.0), (at.systems.HenonHeiles(), 6.0),
    (at.systems.SpringMass(), 2.0), (at.systems.PendulumChain(2), 0.5), (at.systems.Logistic(), 3.0),
]  # fmt: skip


@pytest.mark.parametrize(("system", "dt"), SYSTEMS, ids=str)
@pytest.mark.parametrize("tolerance", [1e-6, 1e-3, 1e-9])
@pytest.mark.sampled(6)
def test_substeps_agree_to_the_tolerance(system, dt, tolerance):
    u0 = 1.3 * system.sample(20, torch.Generator().manual_seed(1), **F64)
    truth = at.evolve(system, u0, [0.0, dt], "dop853", rtol=1e-13, atol=1e-13).final
    allowed = torch.full((u0.shape[-1],), tolerance, **F64)
    state, _ = controlled_step(system, torch.tensor(0.0, **F64), dt, u0, allowed)
    assert (state - truth).abs().max() < tolerance


@pytest.mark.parametrize("scheme", ["rk4", "identity"])
def test_float32_substeps_are_not_asked_for_more_than_rounding(scheme):
    u0 = torch.tensor([[2.0], [5.0]])
    region = interval(1e-12).to(torch.float32)
    solved = at.HybridSolver(lambda t, u: -u, scheme, Nothing(), 0.2, region).solve(u0, 0.4)
    assert solved.ok.all()
    torch.testing.assert_close(solved.final, u0 * math.exp(-0.4), rtol=1e-5, atol=1e-6)


def test_a_trajectory_that_does_not_arrive_is_lost(monkeypatch):
    monkeypatch.setattr(trust, "MOST_ATTEMPTS", 3)
    solver = at.HybridSolver(decay, "identity", Nothing(), 0.2, interval(1e-12))
    solved = solver.solve(torch.tensor([[5.0], [0.5]], **F64), 0.2)
    assert solved.status.tolist() == [Status.LOST, Status.OK]
    assert solved.final[0] == 5.0


@pytest.mark.slow
def test_compiled_substeps_of_large_steps(compiler):
    """For numbers of trajectories that are filled up, and parameters beside them."""
    rate = lambda t, u, p: -p * torch.sinh(u)
    t, tolerance = torch.tensor(0.0, **F64), torch.tensor([1e-9], **F64)
    for n in (1, 3, 17):
        u0, p = torch.linspace(1.0, 5.0, n, **F64)[:, None], torch.linspace(1.0, 2.0, n, **F64)[:, None]
        with torch.no_grad():
            how = dict(tolerance=tolerance, parameters=p)
            (plain, calls), (fast, compiled_calls) = (
                controlled_step(rate, t, 2.0, u0, **how, compile=compile) for compile in (False, True)
            )
        assert fast.shape == plain.shape
        assert compiled_calls == calls
        torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def duffing():
    def rate(t, u):
        x, v = u.unbind(-1)
        return torch.stack((v, x - x**3), -1)

    sample = lambda n, generator: 0.3 * torch.randn(n, 2, generator=generator, **F64) + 1
    how = dict(dt=0.2, horizon=4.0, sample=sample, width=64, trajectories=100, fine_dt=0.02)
    solver = at.fit(rate, **how)
    solver.trust.accuracy.clamp_(min=1e-10)  # fewer substeps
    return rate, sample, solver


def test_the_guard_keeps_the_accuracy_of_the_fit(duffing):
    """Of states in the distribution, half are declared to be outside."""
    rate, sample, solver = duffing
    u0 = sample(50, torch.Generator().manual_seed(3))
    truth = fine_trajectories(rate, u0, 0.2, 20, 40)
    error = lambda solved: (solved.u - truth).square().mean().item()
    narrow = TrustRegion.around(u0[:25] * 0.5 + 0.5)
    narrow.accuracy = solver.trust.accuracy
    guarded = at.HybridSolver(rate, "rk4", solver.correction, 0.2, narrow).solve(u0, 4.0)
    assert guarded.stats.guarded.double().mean() > 5
    assert error(guarded) < 4 * error(solver.solve(u0, 4.0, guard=False)) + 1e-17
    assert guarded.status.tolist() == [
        Status.GUARDED if n else Status.OK for n in guarded.stats.guarded.tolist()
    ]


def test_far_outside_the_default_follows_the_equation_and_shows_it(duffing):
    rate, _, solver = duffing
    far = torch.tensor([[6.0, 0.0], [0.0, 8.0], [1.0, 0.1]], **F64)
    truth = fine_trajectories(rate, far, 0.2, 5, 400)
    solved = solver.solve(far, 1.0)
    torch.testing.assert_close(solved.final, truth[-1], rtol=1e-2, atol=0)
    assert solved.status.tolist() == [Status.GUARDED, Status.GUARDED, Status.OK]
    assert "2 of 3 left the trust region (guarded)" in repr(solved)


def test_a_correction_that_is_applied_outside_is_marked(duffing):
    _, _, solver = duffing
    far = torch.tensor([[6.0, 0.0], [1.0, 0.1]], **F64)
    solved = solver.solve(far, 0.2, guard=False)
    assert solved.status.tolist() == [Status.EXTRAPOLATED, Status.OK]
    assert solved.stats.guarded is None
    assert "all ok" not in repr(solved)
    assert "1 of 2 left the trust region (not guarded)" in repr(solved)
    # A short visit between two kept states shows as well.
    back = at.HybridSolver(lambda t, u: -50 * u, "rk4", Nothing(), 0.02, interval())
    assert (
        back.solve(torch.tensor([[1.2]], **F64), 1.0, every=50, guard=False).status.item()
        == Status.EXTRAPOLATED
    )


def test_a_guard_is_out_of_the_way_inside(duffing):
    _, sample, solver = duffing
    u0 = sample(20, torch.Generator().manual_seed(4))
    guarded, free = solver.solve(u0, 4.0), solver.solve(u0, 4.0, guard=False)
    stays = guarded.status == Status.OK
    assert stays.sum() > 15
    assert torch.equal(guarded.u[:, stays], free.u[:, stays])


def test_neighbours_outside_change_no_bit_and_no_gradient(duffing):
    _, sample, solver = duffing
    stiffness = torch.tensor(1.0, **F64, requires_grad=True)

    def scaled(t, u):
        x, v = u.unbind(-1)
        return torch.stack((v, x - stiffness * x**3), -1)

    mixed = at.HybridSolver(scaled, "rk4", solver.correction, 0.2, solver.trust)
    inside = sample(3, torch.Generator().manual_seed(8))
    both = torch.cat((inside, torch.tensor([[5.0, 0.0]], **F64)))
    alone, together = mixed.solve(inside, 2.0), mixed.solve(both, 2.0)
    assert together.stats.guarded.tolist()[:3] == [0, 0, 0]
    assert torch.equal(alone.u, together.u[:, :3])
    of = lambda solved: torch.autograd.grad(solved.u[:, :3].sum(), stiffness)[0]
    torch.testing.assert_close(of(together), of(alone), rtol=1e-12, atol=0)


def test_gradients_through_guarded_steps_are_those_of_the_solution():
    solver = at.HybridSolver(decay, "rk4", Explosion(), 0.2, interval(1e-10))
    u0 = torch.tensor([[0.4], [1.5], [5.4]], **F64, requires_grad=True)
    solved = solver.solve(u0, 0.2)
    gradient = torch.autograd.grad(solved.final.sum(), (u0, *solver.correction.parameters()))
    exact = u0.detach().clone().requires_grad_()
    truth = torch.autograd.grad(exact_decay(exact, 0.2).sum(), exact)[0]
    torch.testing.assert_close(gradient[0][1:], truth[1:], rtol=1e-6, atol=0)
    assert gradient[1].isfinite()  # where the correction overflows it is not computed


def test_checkpointing_changes_nothing(duffing):
    _, _, solver = duffing
    u0 = torch.tensor([[1.0, 0.2], [4.0, 0.0]], **F64)
    t = torch.arange(11, **F64) * 0.2
    from attractor.core.grid import on_grid

    gradients = []
    for checkpoint in (None, 2):
        start = u0.clone().requires_grad_()
        region = copy.deepcopy(solver.trust)
        region.accuracy.fill_(1e-6)
        how = dict(checkpoint=checkpoint, guard=region.guard(solver.scheme))
        solved = on_grid(solver.rate, start, t, solver.scheme, solver.correction, **how)
        gradients.append(torch.autograd.grad(solved.final.sum(), start)[0])
        assert solved.status.tolist() == [Status.OK, Status.GUARDED]
    assert torch.equal(*gradients)


def test_what_is_lost_outside_leaves_the_others_alone():
    blow_up = lambda t, u: u**2
    solver = at.HybridSolver(blow_up, "rk4", Nothing(), 0.1, interval(1e-8))
    u0 = torch.tensor([[0.2], [3.0], [1.5]], **F64)
    solved = solver.solve(u0, 0.5)
    assert solved.status.tolist() == [Status.OK, Status.LOST, Status.GUARDED]
    assert solved.ok.tolist() == [True, False, True]
    assert solved.until[1] == pytest.approx(0.3)
    assert solved.stats.guarded.tolist() == [0, 3, 5]
    torch.testing.assert_close(solved.final[[0, 2]], (u0 / (1 - 0.5 * u0))[[0, 2]], rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(2,), (2, 3, 2), (0, 2)], ids=str)
def test_batches_of_any_shape_are_guarded_with_and_without_gradients(duffing, shape):
    _, _, solver = duffing
    generator = torch.Generator().manual_seed(5)
    u0 = 1 + torch.randn(shape, generator=generator, **F64)
    u0[..., :1] *= torch.linspace(1, 6, u0[..., :1].numel(), **F64).reshape(u0[..., :1].shape)
    if len(shape) == 1:
        u0 = torch.tensor([6.0, 0.0], **F64)
    with torch.no_grad():
        solved = solver.solve(u0, 1.0)
    start = u0.clone().requires_grad_()
    graphed = solver.solve(start, 1.0)
    assert solved.u.shape == (6, *shape)
    assert solved.status.shape == shape[:-1]
    assert torch.equal(graphed.status, solved.status)
    torch.testing.assert_close(graphed.u, solved.u, rtol=1e-12, atol=1e-12)
    if u0.numel():
        assert (solved.status == Status.GUARDED).any()
    (gradient,) = torch.autograd.grad(graphed.u.sum(), start)
    assert gradient.shape == u0.shape
    rows = u0.reshape(-1, 2)
    for i, row in enumerate(rows):
        alone = solver.solve(row, 1.0)
        torch.testing.assert_close(alone.u, solved.u.reshape(6, -1, 2)[:, i], rtol=1e-12, atol=1e-12)
        single = row.clone().requires_grad_()
        (own,) = torch.autograd.grad(solver.solve(single, 1.0).u.sum(), single)
        torch.testing.assert_close(own, gradient.reshape(-1, 2)[i], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_compiled_steps_where_some_trajectories_leave(duffing):
    _, sample, solver = duffing
    u0 = torch.cat((sample(6, torch.Generator().manual_seed(2)), torch.tensor([[6.0, 0.0]], **F64)))
    eager = solver.solve(u0, 2.0)
    assert Status.GUARDED in eager.status.tolist()
    assert Status.OK in eager.status.tolist()
    with torch.no_grad():
        compiled = solver.solve(u0, 2.0, compile=True)
    assert torch.equal(compiled.status, eager.status)
    assert torch.equal(compiled.stats.guarded, eager.stats.guarded)
    torch.testing.assert_close(compiled.u, eager.u, rtol=1e-9, atol=1e-9)


def test_guard_without_a_region():
    solver = at.HybridSolver(decay, "rk4", Nothing(), 0.2)
    u0 = torch.tensor([[0.5]], **F64)
    assert solver.solve(u0, 0.2).status.item() == Status.OK
    for call in (solver.solve, solver.step):
        with pytest.raises(ValueError, match="guard=True needs a trust region"):
            call(u0, 0.2, guard=True)


def test_reasons_of_error_control():
    t = [0.0, 2.0]
    blown = at.evolve(lambda t, u: u**2, torch.tensor([[1.0], [0.1]], **F64), t, rtol=1e-6)
    assert blown.status.tolist() == [Status.STEP_UNDERFLOW, Status.OK]
    slow = at.evolve(lambda t, u: -1000 * u, torch.ones(2, 1), t, rtol=1e-6, max_steps=5)
    assert slow.status.tolist() == [Status.STEP_LIMIT] * 2
    assert "stopped by max_steps" in repr(slow)
    start = torch.tensor([[math.nan], [1.0]], **F64)
    assert at.evolve(lambda t, u: -u, start, t, rtol=1e-6).status.tolist() == [Status.LOST, Status.OK]
    assert at.evolve(lambda t, u: -u, start, t).status.tolist() == [Status.LOST, Status.OK]
