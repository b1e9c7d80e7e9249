"""Corrections of fields by polynomials of patches, their loop in C, their trust region and their fit."""

import copy

import pytest
import torch

import attractor as at
from attractor.core.step import Step
from attractor.ode.corrections import Patches, patches
from attractor.ode.grids import Grid
from attractor.ode.patch_region import PatchRegion

F64 = {"dtype": torch.float64}


def small(dtype=torch.float64, **options):
    """A correction whose steps move states a little."""
    torch.manual_seed(0)
    correction = Patches(**options, dtype=dtype).requires_grad_(False)
    for net in correction.net:
        torch.nn.init.normal_(net.head.weight, std=0.02)
    return correction


def no_rate(t, u, p=None):
    raise AssertionError("the rate was called")


SIZES = [
    {"dim": 64}, {"dim": 37, "radius": 3, "degree": 4}, {"dim": 90, "shape": (9, 10), "degree": 2},
    {"dim": 30, "walls": True, "parameters": 2}, {"dim": 30, "period": 2.0, "conservative": False},
]  # fmt: skip
MORE_SIZES = [
    {"dim": 24, "channels": 2, "degree": 2}, {"dim": 90, "shape": (9, 10), "degree": 2, "walls": True},
    {"dim": 240, "shape": (4, 5, 6), "channels": 2, "degree": 1, "walls": True},
    {"dim": 20, "shape": (5, 4), "conservative": False, "radius": 1, "degree": 2, "walls": True},
    {"dim": 8, "shape": (8, 1), "degree": 2, "walls": True}, {"dim": 3, "radius": 4, "degree": 2},
]  # fmt: skip


@pytest.mark.parametrize(
    "options", [*SIZES, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE_SIZES)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loop_in_c_takes_the_steps_of_torch(options, dtype):
    correction, dim = small(dtype, **options), options["dim"]
    u = torch.randn(7, dim, dtype=dtype)
    count = options.get("parameters", 0)
    p = torch.rand(7, count, dtype=dtype) if count else None
    solver = at.HybridSolver(no_rate, "identity", correction, 0.1)
    expected = u
    for i in range(8):
        time = torch.tensor(0.1 * i, dtype=dtype)
        expected = expected + correction(Step(expected, torch.zeros_like(u), 0.1, time, (), p))
    fast = solver.solve(u, 0.8, every=8, compile=True, parameters=p).final
    assert correction.net in patches._KERNELS
    torch.testing.assert_close(fast, expected)
    assert (fast - u).abs().max() > 0.1


@pytest.mark.parametrize("walls", [False, True])
def test_fluxes_conserve_the_mean_of_each_channel(walls):
    correction = small(dim=2 * 6 * 8, shape=(6, 8), channels=2, walls=walls, degree=2)
    u = torch.randn(3, 96, **F64)
    added = correction.grid.field(correction(u, u, 0.1))
    assert added.abs().max() > 1e-2
    torch.testing.assert_close(added.sum((-1, -2)), torch.zeros(3, 2, **F64), atol=1e-13, rtol=0)


@pytest.mark.parametrize("conservative", [True, False])
def test_a_moved_field_is_corrected_as_the_field(conservative):
    correction = small(dim=48, shape=(6, 8), degree=2, conservative=conservative)
    grid, u = correction.grid, torch.randn(3, 48, **F64)
    move = lambda u: grid.state(torch.roll(grid.field(u), (2, 3), (-2, -1)))
    torch.testing.assert_close(correction(move(u), u, 0.1), move(correction(u, u, 0.1)))


def test_a_far_cell_has_no_influence():
    correction = small(dim=20, radius=2)
    u = torch.randn(20, **F64)
    changed = u.clone()
    changed[10] += 1
    difference = (correction(changed, u, 0.1) - correction(u, u, 0.1)).abs()
    assert set(difference.nonzero().flatten().tolist()) == {8, 9, 10, 11, 12}


def test_a_wrong_size_is_refused():
    with pytest.raises(ValueError, match="dim = 20 is not 1 channels times the cells"):
        Patches(20, shape=(3, 7))
    with pytest.raises(ValueError, match=r"states of .* are tensors"):
        small(dim=20)(torch.rand(3, 19, **F64), torch.rand(3, 19, **F64), 0.1)
    with pytest.raises(TypeError, match="conservative"):
        Patches(20, conservative=1)


def region_of(correction, u):
    return PatchRegion.around(u, correction, 1.5)


@pytest.mark.parametrize("options", [{"dim": 37}, {"dim": 48, "shape": (6, 8), "breadth": 0}], ids=str)
def test_region_holds_its_states_and_none_far_away(options):
    correction = small(**options)
    u = torch.randn(200, options["dim"], **F64)
    region = region_of(correction, u)
    assert region.inside(u).all()
    far = u[:5].clone()
    far[:, 7] += 20
    assert not region.inside(far).any()
    assert not region.inside(torch.full_like(far, torch.nan)).any()


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_guard_takes_steps_of_trajectories_outside(compile):
    """The rate is zero, so that guarded trajectories stay where they are."""
    correction = small(dim=24, radius=2)
    u = torch.randn(50, 24, generator=torch.Generator().manual_seed(1), **F64)
    region = region_of(correction, u)
    solver = at.HybridSolver(lambda t, u: torch.zeros_like(u), "identity", correction, 0.1, region)
    outside = 10 * u[:3]
    solved = solver.solve(torch.cat((outside, 0.5 * u[:4])), 0.2, compile=compile)
    assert torch.equal(solved.final[:3], outside)
    alone = solver.solve(0.5 * u[:4], 0.2, compile=False, guard=False)
    torch.testing.assert_close(solved.final[3:], alone.final)
    assert (solved.final[3:] - 0.5 * u[:4]).abs().max() > 1e-2
    assert solved.stats.guarded.tolist() == [2, 2, 2, 0, 0, 0, 0]


def heat(t, u):
    return 2 * (torch.roll(u, 1, -1) - 2 * u + torch.roll(u, -1, -1))


def heat_states(n, generator):
    return torch.randn(n, 8, generator=generator, dtype=torch.float64)


def test_fit_of_a_linear_equation_is_exact():
    """Its flow is a circulant matrix, which a patch of all cells can hold."""
    solver = at.fit(
        heat, dt=0.5, horizon=2.0, sample=heat_states, scheme="identity", correction="patches",
        trajectories=20, options={"grid": Grid((8,)), "radius": 4, "degree": 1, "noise": 0.0},
    )  # fmt: skip
    k = torch.fft.fftfreq(8, 1 / 8, **F64)
    decay = torch.exp(-4 * (1 - torch.cos(2 * torch.pi * k / 8)) * 2.0)
    u = heat_states(5, torch.Generator().manual_seed(3))
    exact = torch.fft.ifft(torch.fft.fft(u) * decay).real
    torch.testing.assert_close(solver.solve(u, 2.0).final, exact, atol=1e-8, rtol=1e-6)


@pytest.fixture(scope="module")
def burgers():
    """A solver of 16 cells fitted to 64, with the grids' systems."""
    coarse, fine = at.systems.Burgers(16, 0.3), at.systems.Burgers(64, 0.3)
    solver = at.fit(
        coarse, reference=fine, dt=0.125, horizon=0.5, scheme="identity", trajectories=60,
        options={"radius": 2, "degree": 4}, fine_dt=0.125 / 8,
    )  # fmt: skip
    return coarse, fine, solver


def test_fit_corrects_the_grid_and_the_step_at_once(burgers):
    coarse, fine, solver = burgers
    v = fine.sample(20, torch.Generator().manual_seed(77), torch.float64)
    u = coarse.grid.restrict(v, fine.grid)
    truth = at.evolve(fine, v, [0.0, 0.5], "dopri5", rtol=1e-9).final
    truth = coarse.grid.restrict(truth, fine.grid)
    plain = at.evolve(coarse, u, [0.0, 0.5], "dopri5", rtol=1e-9).final
    fitted = solver.solve(u, 0.5).final
    assert (fitted - truth).norm() < 0.05 * (plain - truth).norm()
    torch.testing.assert_close(fitted.mean(-1), u.mean(-1), atol=1e-14, rtol=0)
    assert solver.correction.config["conservative"]
    assert solver.history[-1]["cells"] == 64


def test_solver_of_a_field_is_saved_with_its_region(burgers, tmp_path):
    coarse, _, solver = burgers
    solver.save(tmp_path / "solver")
    again = at.HybridSolver.load(tmp_path / "solver")
    u = coarse.sample(4, torch.Generator().manual_seed(5), torch.float64)
    assert torch.equal(again.solve(3 * u, 0.5).final, solver.solve(3 * u, 0.5).final)
    assert torch.equal(again.trust.distance(u), solver.trust.distance(u))
    assert again.rate == coarse
    twin = copy.deepcopy(solver)
    assert torch.equal(twin.solve(u, 0.5).final, solver.solve(u, 0.5).final)


QUICK = {"dt": 0.125, "horizon": 0.25, "scheme": "identity", "trajectories": 4, "fine_dt": 0.125}


def test_what_cannot_be_fitted_is_refused_at_once():
    coarse, fine = at.systems.Burgers(16, 0.3), at.systems.Burgers(32, 0.3)
    with pytest.raises(ValueError, match="does not coarsen evenly"):
        at.fit(coarse, reference=at.systems.Burgers(40, 0.3), **QUICK)
    with pytest.raises(
        ValueError, match="draws states of 16 numbers, and those of the fine grid have 32"
    ):
        at.fit(coarse, reference=fine, sample=coarse.sample, **QUICK)
    with pytest.raises(ValueError, match="need the grid"):
        at.fit(heat, sample=heat_states, correction="patches", **QUICK)
    with pytest.raises(ValueError, match='correction="patches" has no width, budget'):
        at.fit(coarse, reference=fine, width=3, budget=1.0, **QUICK)
    with pytest.raises(ValueError, match='needs correction="patches"'):
        at.fit(coarse, reference=fine, correction="attns", **QUICK)
    place = torch.linspace(0, 1, 8, **F64)
    with pytest.raises(ValueError, match="the rate depends on the place: for a field moved by 2 cells"):
        at.fit(
            lambda t, u: heat(t, u) * place, sample=heat_states, correction="patches",
            options={"grid": Grid((8,))}, **QUICK,
        )  # fmt: skip
    with pytest.raises(ValueError, match="the mean over all cells changes"):
        at.fit(
            lambda t, u: heat(t, u) - u, sample=heat_states, correction="patches",
            options={"grid": Grid((8,)), "conservative": True}, **QUICK,
        )  # fmt: skip


def test_a_rate_that_does_not_conserve_the_mean_has_values_in_place_of_fluxes():
    solver = at.fit(
        lambda t, u: heat(t, u) - u, sample=heat_states, correction="patches",
        options={"grid": Grid((8,)), "radius": 4, "degree": 1}, **(QUICK | {"trajectories": 20}),
    )  # fmt: skip
    assert not solver.correction.config["conservative"]
    u = heat_states(3, torch.Generator().manual_seed(3))
    decay = torch.exp(torch.tensor(-0.25, **F64))
    torch.testing.assert_close(
        solver.solve(u, 0.25, guard=False).final.mean(-1), u.mean(-1) * decay, atol=1e-4, rtol=1e-3
    )


def test_solver_of_two_grids_is_not_compared_on_one(burgers):
    with pytest.raises(ValueError, match="corrects a grid of 16 cells towards one of 64"):
        at.compare(burgers[2], horizon=0.5)


def test_one_fit_serves_a_range_of_viscosities():
    def rate(t, u, p):
        right = torch.roll(u, -1, -1)
        flux = (u + right).square() / 8 - p * (right - u)
        return torch.roll(flux, 1, -1) - flux

    def viscosity(n, generator):
        return 0.5 + torch.rand(n, 1, generator=generator, dtype=torch.float64)

    def states(n, generator):
        return 0.3 * torch.randn(n, 8, generator=generator, dtype=torch.float64)

    solver = at.fit(
        rate, dt=0.25, horizon=1.0, sample=states, parameters=viscosity, scheme="identity",
        correction="patches", trajectories=150, fine_dt=0.125,
        options={"grid": Grid((8,)), "radius": 3, "degree": 3},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(9)
    u, p = states(10, generator), viscosity(10, generator)
    exact = at.evolve(rate, u, [0.0, 1.0], "dopri5", rtol=1e-9, parameters=p).final
    wrong = solver.solve(u, 1.0, parameters=p.flip(0), guard=False).final
    error = (solver.solve(u, 1.0, parameters=p, guard=False).final - exact).norm()
    assert error < 0.02 * exact.norm()
    assert error < 0.3 * (wrong - exact).norm()


def test_a_fit_that_is_worse_than_plain_steps_says_so():
    """A cubic reaction moves states far within a step, which a polynomial of low degree cannot follow."""
    with pytest.warns(UserWarning, match="plain steps of rk4 on the same grid have a smaller error"):
        at.fit(
            lambda t, u: heat(t, u) / 20 + u - u**3, sample=heat_states, correction="patches", dt=0.1,
            horizon=0.5, scheme="identity", trajectories=20, fine_dt=0.0125,
            options={"grid": Grid((8,)), "radius": 1, "degree": 2},
        )  # fmt: skip
