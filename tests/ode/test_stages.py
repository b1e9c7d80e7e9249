"""Corrections that see the stages of a step, and the step itself."""

import pytest
import torch

import attractor as at
from attractor.core.step import Step, correction_of_step
from attractor.ode.closed_form import ridge
from attractor.ode.sparse_maps import sparse_solution
from attractor.ode.trajectories import fine_trajectories

F64 = {"dtype": torch.float64}


def rotation(t, u):
    x, y = u.unbind(-1)
    return torch.stack((y, -x), -1)


def circle(n, generator):
    return torch.randn(n, 2, generator=generator, **F64)


@pytest.mark.parametrize("scheme", ["euler", "rk4", "dopri5", "tsit5", "dop853"])
def test_a_linear_map_of_the_stages_is_exact_for_a_linear_equation(scheme):
    solver = at.fit(
        rotation, dt=0.5, horizon=5.0, scheme=scheme, correction="stages", width=0, sample=circle,
        trajectories=20,
    )  # fmt: skip
    assert solver.correction.config["stages"] == at.get_scheme(scheme).rate_calls
    u0 = circle(10, torch.Generator().manual_seed(5))
    turned = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], **F64) * 5.0
    truth = u0 @ torch.linalg.matrix_exp(turned).T
    torch.testing.assert_close(solver.solve(u0, 5.0).final, truth, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("system", "dt"), [("ElasticPendulum", 0.2), ("HenonHeiles", 0.4)])
def test_the_linear_map_beats_half_the_step(system, dt):
    """At the rate calls of the whole step, on trajectories that the fit has not seen."""
    system = getattr(at.systems, system)()
    solver = at.fit(system, dt=dt, horizon=20 * dt, correction="stages", width=0, trajectories=100)
    u0 = system.sample(50, torch.Generator().manual_seed(3), torch.float64)
    truth = fine_trajectories(system, u0, dt, 20, 8)[-1]
    error = lambda u: (u - truth).norm(dim=-1).median().item()
    half = at.evolve(system, u0, torch.arange(41, **F64) * dt / 2, "rk4").final
    assert error(solver.solve(u0, 20 * dt).final) < error(half)


def test_stages_and_widths_survive_saving(tmp_path):
    for width in (0, 8):
        how = dict(dt=0.4, horizon=4.0, scheme="tsit5", width=width, trajectories=100)
        solver = at.fit(at.systems.HenonHeiles(), correction="stages", **how)
        again = at.HybridSolver.load(solver.save(tmp_path / str(width)))
        u0 = at.systems.HenonHeiles().sample(5, torch.Generator().manual_seed(0), torch.float64)
        assert torch.equal(again.solve(u0, 4.0).u, solver.solve(u0, 4.0).u)
        assert again.scheme == solver.scheme


def test_a_splitting_has_no_stages():
    with pytest.raises(TypeError, match="leapfrog has no stages"):
        at.fit(
            at.systems.HarmonicOscillator(), dt=0.1, horizon=1.0, scheme="leapfrog", correction="stages"
        )


def test_the_number_of_stages_must_fit():
    correction = at.corrections.Stages(2, **F64)
    with pytest.raises(ValueError, match="sees 4 stages, and the step has 6"):
        at.evolve(rotation, torch.ones(3, 2, **F64), [0.0, 0.1], "dopri5", correction)
    with pytest.raises(ValueError, match="and the step has 0"):
        correction(torch.ones(3, 2, **F64), torch.ones(3, 2, **F64), 0.1)


def test_both_calls_of_a_correction_give_the_same_step():
    u0, t = torch.rand(4, 2, **F64), torch.linspace(0, 1, 6, **F64)

    def of_slope(u, slope, dt):
        return 0.1 * dt * slope

    def of_step(step):
        assert isinstance(step, Step)
        assert len(step.stages) == 4
        torch.testing.assert_close(sum(w * k for w, k in zip((1, 2, 2, 1), step.stages)) / 6, step.slope)
        return 0.1 * step.dt * step.slope

    results = [at.evolve(rotation, u0, t, "rk4", c).u for c in (of_slope, of_step)]
    assert torch.equal(*results)


def test_a_correction_of_one_argument_is_called_with_the_step():
    class Module(torch.nn.Module):
        def forward(self, step):
            return step.u

    for correction in (lambda step: step.u, Module()):
        assert correction_of_step(correction) is correction
    for correction in (lambda u, slope, dt: u, lambda *args: args[0]):
        assert correction_of_step(correction)(Step(1, 2, 3)) == 1
    with pytest.raises(TypeError, match="correction is a str"):
        correction_of_step("attns")


def test_compiled_stages_take_the_same_steps(compiler):
    torch.manual_seed(0)
    correction = at.corrections.Stages(2, **F64).requires_grad_(False)
    for p in correction.parameters():
        p.mul_(1e-2)
    u0, t = torch.rand(5, 2, **F64), torch.linspace(0, 1, 11, **F64)
    plain, fast = (at.evolve(rotation, u0, t, "rk4", correction, compile=c).u for c in (False, True))
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", [None, "float32"])
@pytest.mark.parametrize("states", [3, 20])  # sums, and products by BLAS
def test_compiled_networks_take_the_same_steps(compiler, precision, states):
    torch.manual_seed(0)
    correction = at.corrections.Stages(2, 8, precision=precision, **F64).requires_grad_(False)
    for p in correction.parameters():
        p.mul_(1e-2)
    u0, t = torch.rand(states, 2, **F64), torch.linspace(0, 1, 11, **F64)
    solve = lambda c: at.evolve(rotation, u0, t, "rk4", correction, every=10, compile=c).final
    torch.testing.assert_close(solve(True), solve(False), rtol=1e-8, atol=1e-8)


def test_the_linear_map_of_a_float32_network_is_in_float64():
    torch.manual_seed(0)
    net = at.corrections.Stages(2, 8, precision="float32", **F64).net.requires_grad_(False)
    net.head.weight.zero_()
    net.head.bias.zero_()
    x = torch.randn(5, 10, **F64)
    torch.testing.assert_close(net(x), x @ net.around.weight.T, rtol=1e-14, atol=1e-14)


def regression(outputs, rows=400, columns=30):
    """Return features, of which the last is 1, and targets that few of them explain."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator, **F64)
    x[:, 1] = x[:, 0] + 1e-10 * x[:, 1]  # nearly dependent
    x[:, -1] = 1
    w = torch.zeros(columns, outputs, **F64)
    for output in range(outputs):
        w[[2 + output, 9, 20 - output, columns - 1], output] = 1.0
    return x, x @ w + 1e-3 * torch.randn(rows, outputs, generator=generator, **F64), w


def solved(x, y, few=300):
    triangle = torch.linalg.qr(torch.cat((x, y), -1)[:few], mode="r")[1]
    full = ridge(triangle, x[few:], y[few:])
    return full, sparse_solution(triangle, x[few:], y[few:], full, torch.zeros(y.shape[-1], **F64))


def test_few_weights_are_found_where_few_matter():
    x, y, w = regression(3)
    full, few = solved(x, y)
    assert (full[0] != 0).all()
    assert (few[0][w != 0] - 1).abs().max() < 1e-2
    assert 12 <= (few[0] != 0).sum() <= 30
    assert few[2] <= 1.1 * full[2]


def test_maps_of_which_every_weight_matters_stay():
    x, _, _ = regression(1)
    generator = torch.Generator().manual_seed(1)
    full, few = solved(x, x @ torch.randn(len(x[0]), 2, generator=generator, **F64))
    assert few is full
