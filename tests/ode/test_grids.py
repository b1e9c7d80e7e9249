"""Fields on grids: coarsening, patches, and the systems that have a grid."""

import math

import pytest
import torch

import attractor as at
from attractor.ode.grids import Grid, grid_of

F64 = {"dtype": torch.float64}
GRIDS = [Grid((6,)), Grid((4, 6)), Grid((4, 6), channels=2), Grid((6,), walls=True), Grid((2, 3, 4))]
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)


@every_grid
def test_restriction_keeps_the_mean_and_undoes_repetition(grid):
    fine = Grid(tuple(3 * n for n in grid.shape), grid.channels, grid.walls)
    u = torch.rand(5, fine.dim, **F64)
    means = grid.field(grid.restrict(u, fine)).flatten(2).mean(-1)
    torch.testing.assert_close(means, fine.field(u).flatten(2).mean(-1))
    coarse = torch.rand(2, grid.dim, **F64)
    field = grid.field(coarse)
    for axis in range(2, field.dim()):
        field = field.repeat_interleave(3, axis)
    torch.testing.assert_close(grid.restrict(fine.state(field), fine), coarse)
    assert fine.coarsened(3) == grid
    assert torch.equal(grid.restrict(coarse, grid), coarse)


@every_grid
def test_neighbours_are_those_of_a_padded_field(grid):
    """Periodic ghosts are those of "circular" padding, mirror images those of "symmetric" padding."""
    import numpy as np

    field = np.arange(grid.cells).reshape(grid.shape)
    padded = np.pad(field, 2, mode="symmetric" if grid.walls else "wrap")
    for offset in ((0,) * field.ndim, (1,) * field.ndim, (-2,) * field.ndim):
        inner = tuple(slice(2 + k, 2 + k + n) for k, n in zip(offset, grid.shape))
        assert grid.neighbours(offset).tolist() == padded[inner].ravel().tolist()


def test_patches_lie_around_faces_and_cells():
    assert Grid((5,)).patches(0, 2, 1)[0].tolist() == [4, 0, 1, 2]
    assert Grid((5,)).patches(None, 1, 0)[4].tolist() == [3, 4, 0]
    assert Grid((5,), channels=2).patches(0, 1, 0)[0].tolist() == [0, 1, 5, 6]
    assert Grid((3, 4)).patches(1, 1, 0)[5].tolist() == [5, 6]
    assert Grid((3, 4)).patches(0, 1, 1)[5].tolist() == [4, 5, 6, 8, 9, 10]


@pytest.mark.parametrize(
    ("coarse", "fine"),
    [
        (Grid((6,)), Grid((16,))),
        (Grid((4, 4)), Grid((8, 16))),
        (Grid((4,)), Grid((8,), walls=True)),
        (Grid((4,)), Grid((8,), channels=2)),
        (Grid((4,)), Grid((2, 2))),
    ],
)
def test_grids_that_do_not_coarsen_evenly_are_refused(coarse, fine):
    with pytest.raises(ValueError, match="does not coarsen evenly"):
        coarse.restrict(torch.rand(fine.dim), fine)


def test_bad_grids_are_refused():
    with pytest.raises(ValueError, match="number of cells along each axis"):
        Grid((0, 4))
    with pytest.raises(ValueError, match="must divide 2"):
        Grid((4, 6)).coarsened(4)
    with pytest.raises(ValueError, match=r"states of .* are tensors \[\*batch, 24\]"):
        Grid((4, 6)).field(torch.rand(3, 23))
    with pytest.raises(ValueError, match="need the grid"):
        grid_of(lambda t, u: u)


def exact_means(system, u0_coefficients, t):
    """Means over cells at time t by the Cole-Hopf transform, for initial waves with these coefficients.

    ``u = -2 nu (log phi)_x``, so that a mean is a difference of ``log phi`` at the faces, and phi is the
    convolution of its initial values with a Gaussian, here by the trapezoidal rule.
    """
    nu, length = system.viscosity, system.length
    number = torch.arange(1, u0_coefficients.shape[-1] // 2 + 1, **F64)
    k = 2 * math.pi / length * number[:, None]
    y = torch.linspace(-length, 2 * length, 6001, **F64)[:-1]
    cosine, sine = (u0_coefficients / number.repeat(2) / math.sqrt(2)).chunk(2, -1)
    integral = cosine @ ((k * y).sin() / k) - sine @ ((k * y).cos() / k)
    faces = torch.linspace(0, length, system.cells + 1, **F64)
    exponent = -((faces[:, None] - y) ** 2) / (4 * nu * t) - integral[:, None] / (2 * nu)
    log_phi = exponent.logsumexp(-1)
    return -2 * nu * log_phi.diff(dim=-1) * system.cells / length


@pytest.mark.parametrize("order", [2, 4])
def test_burgers_converges_to_the_solution_of_cole_and_hopf(order):
    draws = torch.randn(3, 8, generator=torch.Generator().manual_seed(2), **F64)
    errors = []
    for cells in (64, 128):
        system = at.systems.Burgers(cells, viscosity=0.3, order=order)
        u0 = system.sample(3, torch.Generator().manual_seed(2), torch.float64)
        solved = at.evolve(system, u0, [0.0, 0.5], "dopri5", rtol=1e-10, atol=1e-12)
        exact = exact_means(system, draws, 0.5)
        assert exact.abs().max() > 0.3
        errors.append((solved.final - exact).abs().max().item())
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.5)


def test_burgers_conserves_the_mean_and_its_samples_coarsen():
    coarse, fine = at.systems.Burgers(16), at.systems.Burgers(64)
    u, v = (s.sample(4, torch.Generator().manual_seed(0), torch.float64) for s in (coarse, fine))
    torch.testing.assert_close(coarse.grid.restrict(v, fine.grid), u)
    torch.testing.assert_close(coarse(0.0, u + 1).mean(-1), torch.zeros(4, **F64), atol=1e-13, rtol=0)
    with pytest.raises(ValueError, match="order = 3"):
        at.systems.Burgers(order=3)
    with pytest.raises(ValueError, match="cells = 2"):
        at.systems.Burgers(2)
