"""Equations whose parameters differ from trajectory to trajectory."""

import math

import numpy as np
import pytest
import torch

import attractor as at
from attractor.integrations import onnx
from attractor.ode import FineData, make_trajectories
from attractor.ode.compare import compare
from attractor.report import hybrid as report

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
        (torch.ones(3, 2, dtype=torch.long), "pass floating numbers"),
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


def few(n, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return around_one(n, generator), around_one(n, generator)


def test_dense_output_of_each_trajectory():
    u0, p = few(4)
    t, between = torch.linspace(0, 2, 21, **F64), torch.tensor([0.03, 0.77, 1.99], **F64)
    for options in ({}, {"scheme": "dopri5"}, {"rtol": 1e-9, "atol": 1e-11}):
        solved = at.evolve(spring, u0, t, parameters=p, dense=True, **options)
        truth = at.evolve(spring, u0, [0.0, *between.tolist()], "dop853", rtol=1e-12, parameters=p)
        torch.testing.assert_close(solved(between), truth.u[1:], rtol=0, atol=1e-5)


def test_event_times_and_their_gradients_follow_the_parameters():
    """u'' = -k u from (1, 0) crosses zero at pi / (2 sqrt(k)), which changes by -pi / (4 k^1.5)."""
    k = torch.tensor([[0.5], [1.0], [2.0], [3.0]], **F64, requires_grad=True)
    u0 = torch.tensor([1.0, 0.0], **F64).expand(4, 2)
    free = lambda t, u, p: torch.stack((u[..., 1], -p[..., 0] * u[..., 0]), -1)
    crossing = lambda t, u: u[..., 0]
    how = dict(parameters=k, rtol=1e-10, atol=1e-12, events=crossing)
    solved = at.evolve(free, u0, [0.0, 5.0], **how)
    when = solved.events.time
    torch.testing.assert_close(when, math.pi / 2 / k[:, 0].sqrt(), rtol=0, atol=1e-8)
    (grad,) = torch.autograd.grad(when.sum(), k)
    torch.testing.assert_close(grad, -math.pi / 4 * k.detach() ** -1.5, rtol=0, atol=1e-7)


def test_captured_steps_have_parameters(solver):
    u0, p = few(5)
    step = solver.capture(u0, steps=4, parameters=p)
    want = solver.solve(u0, 2.0, guard=False, parameters=p).final
    torch.testing.assert_close(step.advance(2), want)
    other_u, other_p = few(5, seed=9)
    want = solver.solve(other_u, 1.0, guard=False, parameters=other_p).final
    torch.testing.assert_close(step(other_u, parameters=other_p), want)
    with pytest.raises(ValueError, match=r"fitted to an equation with 2 parameters, and there are none"):
        solver.capture(u0)
    with pytest.raises(ValueError, match=r"parameters \[3, 2\] do not fit"):
        step.reset(u0, parameters=p[:3])


@pytest.mark.slow
def test_compiled_captured_steps_have_parameters(solver):
    u0, p = few(5)
    step = solver.capture(u0, steps=4, parameters=p, compile=True)
    want = solver.solve(u0, 1.0, guard=False, parameters=p).final
    torch.testing.assert_close(step.advance(), want)


@pytest.mark.slow
def test_a_comparison_draws_parameters(solver):
    how = dict(horizon=2.0, batch=20, sample=around_one, compile=False)
    result = compare(solver, parameters=around_one, **how)
    methods = {point.method for point in result.points}
    assert {"rk4", "dopri5", "dopri5, own steps"} <= methods
    generator = torch.Generator().manual_seed(2**40 + 1)
    u0, p = around_one(20, generator), around_one(20, generator)
    times = torch.arange(9, **F64) / 4
    truth = at.evolve(predator_and_prey, u0, times, "dop853", rtol=1e-12, parameters=p).u
    error = lambda u: (u - truth).square().mean().item()
    assert result.hybrid.error == pytest.approx(error(solver.solve(u0, 2.0, parameters=p).u), rel=1e-3)
    plain = at.evolve(predator_and_prey, u0, times, "rk4", parameters=p)
    assert result.plain("rk4")[0].error == pytest.approx(error(plain.u), rel=1e-3)
    for method in methods - {"rk4"}:  # everybody solves the same equations
        assert min(point.error for point in result.plain(method)) < 1e-5
    same = compare(solver, u0=u0, parameters=p, peers=False, schemes=(), **how)
    assert same.hybrid.error == result.hybrid.error
    with pytest.raises(ValueError, match="pass parameters=, a function"):
        compare(solver, **how)


def test_shards_hold_parameters(tmp_path):
    how = dict(
        trajectories=20, dt=0.25, horizon=2.0, sample=around_one, parameters=around_one, shard_size=8
    )
    data = make_trajectories(predator_and_prey, tmp_path / "data", **how)
    runs = FineData.open(tmp_path / "data").runs()
    assert [list(run.parameters.shape) for run in runs] == [[8, 2], [8, 2], [4, 2]]
    assert not torch.equal(runs[0].parameters[:4], runs[2].parameters)
    times = torch.arange(9, **F64) / 4
    for run in runs:
        truth = at.evolve(
            predator_and_prey, run.u[0], times, "dop853", rtol=1e-12, atol=1e-13,
            parameters=run.parameters,
        )  # fmt: skip
        torch.testing.assert_close(run.u, truth.u, rtol=0, atol=1e-8)
    again = make_trajectories(predator_and_prey, tmp_path / "data", **how)
    assert again.hash == data.hash

    fitting = dict(dt=0.25, horizon=2.0, sample=around_one, parameters=around_one, width=16)
    fitting |= dict(correction="stages", trajectories=20)
    assert at.fit(predator_and_prey, data=data, **fitting).parameter_count == 2
    other = lambda t, u, p: predator_and_prey(t, u, p + 1)
    with pytest.raises(ValueError, match="data of another equation"):
        at.fit(other, data=data, **fitting)
    fixed = lambda n, generator: torch.ones(n, 2, **F64)
    with pytest.raises(ValueError, match="holds other data"):
        make_trajectories(predator_and_prey, tmp_path / "data", **{**how, "parameters": fixed})

    path = tmp_path / "data" / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1 if content.find(b"parameters") < content.find(b'"u"') else -2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(at.CheckpointError, match="damaged"):
        FineData.open(tmp_path / "data").runs()


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_exported_steps_take_parameters(solver, suffix, tmp_path):
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
    exported = onnx.export(solver, tmp_path / f"step{suffix}", steps=2)
    assert exported.difference < 1e-12
    u0, p = few(6)
    want = solver.solve(u0, 0.5, guard=False, parameters=p).final
    if suffix == ".pt2":
        after = torch.export.load(exported.path).module()(u0, parameters=p)
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(exported.path)
        assert [x.name for x in session.get_inputs()] == ["u", "parameters"]
        feed = {"u": u0.numpy(), "parameters": p.numpy()}
        after = torch.from_numpy(session.run(None, feed)[0])
    torch.testing.assert_close(after, want, rtol=1e-12, atol=1e-12)


def test_solve_ivp_with_parameters(solver):
    solve_ivp = pytest.importorskip("scipy.integrate").solve_ivp
    from attractor.integrations.scipy import hybrid

    def fun(t, y, a, b):
        return [y[0] * (a - y[1]), y[1] * (y[0] - b)]

    y0, p = np.array([0.8, 1.1]), (0.7, 1.3)
    truth = solve_ivp(fun, (0, 2.1), y0, "DOP853", args=p, rtol=1e-12, atol=1e-13)
    solved = solve_ivp(fun, (0, 2.1), y0, hybrid(solver, parameters=p), args=p)
    assert len(solved.t) == 10
    np.testing.assert_allclose(solved.y[:, -1], truth.y[:, -1], atol=1e-4)
    with pytest.raises(ValueError, match="is not the equation"):
        solve_ivp(fun, (0, 2.1), y0, hybrid(solver, parameters=(0.7, 1.2)), args=p)
    for wrong in (None, 1.0, (1.0, 2.0, 3.0)):
        with pytest.raises(ValueError, match=r"use hybrid\(solver, parameters=\[\.\.\.\]\)"):
            hybrid(solver, parameters=wrong)


def test_a_report_draws_parameters(solver):
    rows = report.test(solver, 2.0, around_one, 0, around_one)["rows"]
    assert rows["hybrid"]["error"] < rows["plain rk4"]["error"]
    assert rows["plain rk4, half the step"]["error"] < rows["plain rk4"]["error"]


def test_guarded_steps_have_their_parameters(solver):
    u0 = torch.tensor([[1.0, 1.0], [1.1, 0.9], [0.9, 1.0]], **F64)
    p = torch.tensor([[1.0, 1.0], [9.0, 1.0], [1.2, 0.8]], **F64)
    together = solver.solve(u0, 1.0, parameters=p)
    assert together.status.tolist() == [at.Status.OK, at.Status.GUARDED, at.Status.OK]
    for i in range(3):
        alone = solver.solve(u0[i], 1.0, parameters=p[i])
        torch.testing.assert_close(together.u[:, i], alone.u, rtol=1e-12, atol=1e-12)
    differentiable = p.clone().requires_grad_()
    torch.testing.assert_close(solver.solve(u0, 1.0, parameters=differentiable).u, together.u)
