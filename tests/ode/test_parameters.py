"""Equations whose parameters differ from trajectory to trajectory."""

import pytest
import torch

import attractor as at

F64 = {"dtype": torch.float64}


def spring(t, u, p):
    """x'' = -k x - c x', with p = (k, c)."""
    x, v = u.unbind(-1)
    k, c = p.unbind(-1)
    return torch.stack((v, -k * x - c * v), -1)


def predator_and_prey(t, u, p):
    x, y = u.unbind(-1)
    a, b = p.unbind(-1)
    return torch.stack((x * (a - y), y * (x - b)), -1)


def around_one(n, generator, low=0.5, high=1.5):
    return low + (high - low) * torch.rand(n, 2, generator=generator, **F64)


@pytest.mark.parametrize("options", [{}, {"rtol": 1e-8}, {"compile": True}], ids=str)
def test_each_trajectory_has_its_parameters(options):
    generator = torch.Generator().manual_seed(0)
    u0, p = around_one(6, generator), around_one(6, generator)
    t = torch.linspace(0, 2, 41, **F64)
    together = at.evolve(spring, u0, t, parameters=p, **options)
    for i in range(6):
        alone = at.evolve(
            lambda t, u, i=i: spring(t, u, p[i]), u0[i], t, **{**options, "compile": False}
        )
        torch.testing.assert_close(together.u[:, i], alone.u, rtol=1e-7, atol=1e-9)


def test_one_row_of_parameters_serves_all_trajectories():
    u0, t = around_one(4, torch.Generator()), torch.linspace(0, 1, 11, **F64)
    p = torch.tensor([1.0, 0.1], **F64)
    one, each = (at.evolve(spring, u0, t, parameters=x).u for x in (p, p.expand(4, 2)))
    assert torch.equal(one, each)


def test_gradients_reach_the_parameters():
    generator = torch.Generator().manual_seed(0)
    u0, p = around_one(3, generator), around_one(3, generator).requires_grad_()
    t = torch.linspace(0, 1, 6, **F64)
    for options in ({}, {"rtol": 1e-6}, {"checkpoint": True}):
        solve = lambda p, options=options: at.evolve(spring, u0, t, parameters=p, **options).final
        assert torch.autograd.gradcheck(solve, (p,), atol=1e-4, rtol=1e-3)


def test_a_lost_trajectory_does_not_touch_the_gradients_of_others():
    def blowing_up(t, u, p):
        return p[..., :1] * u**2

    u0 = torch.tensor([[1.0], [0.1]], **F64)
    p = torch.tensor([[5.0], [1.0]], **F64, requires_grad=True)
    solved = at.evolve(blowing_up, u0, torch.linspace(0, 2, 41, **F64), parameters=p)
    assert solved.ok.tolist() == [False, True]
    (grad,) = torch.autograd.grad(solved.final[1].sum(), p)
    assert torch.isfinite(grad).all()
    assert grad[0].item() == 0
    assert grad[1].item() > 0


def test_parameters_that_do_not_fit_are_refused():
    u0, t = torch.ones(3, 2, **F64), [0.0, 1.0]
    for wrong, message in (
        (torch.ones(2, 2, **F64), "do not fit"),
        (torch.tensor(1.0), "do not fit"),
        (torch.ones(3, 2, dtype=torch.long), "give floating numbers"),
        ([1.0, 2.0], "parameters is a list"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            at.evolve(spring, u0, t, parameters=wrong)


@pytest.fixture(scope="module")
def solver():
    return at.fit(
        predator_and_prey, dt=0.25, horizon=5.0, sample=around_one, parameters=around_one,
        correction="stages", width=256, trajectories=150,
    )  # fmt: skip


def test_one_fit_serves_all_parameters(solver):
    generator = torch.Generator().manual_seed(7)
    u0, p = around_one(100, generator), around_one(100, generator)
    times = torch.arange(81, **F64) / 16
    truth = at.evolve(predator_and_prey, u0, times, "dop853", parameters=p).final
    error = lambda u: (u - truth).norm(dim=-1).median().item()
    half = at.evolve(predator_and_prey, u0, torch.arange(41, **F64) / 8, "rk4", parameters=p).final
    solved = solver.solve(u0, 5.0, parameters=p)
    assert error(solved.final) < error(half)
    step = solver.step(u0, parameters=p)
    torch.testing.assert_close(step, solver.solve(u0, 0.25, parameters=p).final)


def test_the_trust_region_covers_states_and_parameters(solver):
    u0 = torch.ones(2, 2, **F64)
    p = torch.tensor([[1.0, 1.0], [9.0, 1.0]], **F64)
    solved = solver.solve(u0, 1.0, parameters=p)
    assert solved.status.tolist() == [at.Status.OK, at.Status.GUARDED]
    truth = at.evolve(predator_and_prey, u0, torch.arange(129, **F64) / 128, "dop853", parameters=p)
    assert (solved.final - truth.final).abs().max() < 1e-3


def test_parameters_survive_saving(solver, tmp_path):
    again = at.HybridSolver.load(solver.save(tmp_path / "sweep"), rate=predator_and_prey)
    generator = torch.Generator().manual_seed(1)
    u0, p = around_one(5, generator), around_one(5, generator)
    assert torch.equal(again.solve(u0, 1.0, parameters=p).u, solver.solve(u0, 1.0, parameters=p).u)
    other = lambda t, u, p: predator_and_prey(t, u, p + 1)
    with pytest.raises(at.CheckpointError, match="another equation"):
        at.HybridSolver.load(tmp_path / "sweep", rate=other)


def test_a_solver_without_its_parameters_says_so(solver):
    with pytest.raises(ValueError, match=r"fitted to an equation with 2 parameters, and there are none"):
        solver.solve(torch.ones(3, 2, **F64), 1.0)
    with pytest.raises(ValueError, match=r"pass parameters= \[\*batch, 2\]"):
        solver.step(torch.ones(3, 2, **F64), parameters=torch.ones(3, 3, **F64))
