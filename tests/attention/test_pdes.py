"""What each PDE promises beyond the contract of all: limits, signs, directions, exact solutions."""

import math

import pytest
import torch

from attractor.attention.masks import open_faces
from attractor.attention.pdes import (
    AdvectionDiffusion,
    Diffusion,
    Line,
    Plane,
    ReactionDiffusion,
    Wave,
    evolve,
)

RING = Line(periodic=True)  # the fastest wave, +1 -1 +1 -1, fits exactly: limits are sharp
TORUS = Plane(RING, Line(-2, periodic=True))


def peak(n=9, at=4):
    row = torch.zeros(n, dtype=torch.float64)
    row[at] = 1.0
    return row


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "pde", [Diffusion(0.1), Diffusion(0.37), Wave(0.15), Wave(0.8), ReactionDiffusion(0.2, 0.0)]
)
@pytest.mark.parametrize(("axis", "space"), [("key", RING), ("both", TORUS)])
def test_limit_is_sharp(pde, axis, space):
    u = torch.rand(8, 8, dtype=torch.float64)
    below, above = (evolve(pde, u, space, 1000, f * pde.max_dt(axis)).abs().max() for f in (0.999, 1.01))
    assert below < 100
    assert above > 1e6


def test_limit_of_advection_is_sharp_where_it_is_advection_s():
    pde = AdvectionDiffusion(alpha=0.05, beta=0.8)
    assert pde.max_dt() == pytest.approx(2 * 0.05 / 0.64)
    amplify = lambda dt: torch.fft.fft(evolve(pde, peak(512, 0), RING, 1, dt)).abs().max()
    assert amplify(0.999 * pde.max_dt()) < 1 + 1e-12
    assert amplify(1.01 * pde.max_dt()) > 1 + 1e-9


def test_limits_as_designed():
    assert Diffusion(0.1).max_dt() == pytest.approx(5)
    assert Diffusion(0.1).max_dt("both") == pytest.approx(2.5)
    assert Wave(0.2).max_dt("query") == pytest.approx(5)
    assert Wave(0.2).max_dt("both") == pytest.approx(5 / math.sqrt(2))
    assert AdvectionDiffusion(0.1, 0.03).max_dt() == pytest.approx(5)
    assert ReactionDiffusion(0.1, -0.05).max_dt() == pytest.approx(4)
    assert ReactionDiffusion(0.1, 0.05, split=True).max_dt() == pytest.approx(5)
    assert Diffusion(0.0).max_dt() == math.inf
    assert AdvectionDiffusion(0.0, 0.1).max_dt() == 0


def test_unstable_settings_say_what_to_do():
    with pytest.raises(
        ValueError,
        match=r"limit 5, 1 / \(2 alpha\), axis 'key'\); take 2 times as many steps with dt=3.5",
    ):
        Diffusion().check(7.0)
    with pytest.raises(ValueError, match="choose other coefficients"):
        AdvectionDiffusion(0.0, 0.1).check(1.0)
    with pytest.raises(
        ValueError, match=r"alpha = -0\.1 of Diffusion must be a finite number of at least 0"
    ):
        Diffusion(-0.1)
    Diffusion(torch.tensor(9.0)).check(7.0)  # learnt coefficients are not checked


@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0])
def test_diffusion_stays_positive_within_its_limit(alpha):
    for opened in (None, torch.rand(4, 31) > 0.3):
        u = evolve(Diffusion(alpha), torch.rand(4, 32).double(), Line(open=opened), 20, 0.5 / alpha)
        assert u.min() >= 0


@pytest.mark.parametrize("beta", [-0.2, 0.2])
def test_advection_stays_positive_where_diffusion_is_strong_enough(beta):
    u = evolve(AdvectionDiffusion(0.1, beta), peak(), Line(), 50, 2.5)
    assert u.min() >= 0


def test_advection_moves_mass_to_lower_keys():
    keys = torch.arange(41.0, dtype=torch.float64)
    u = evolve(AdvectionDiffusion(0.1, 0.05), peak(41, 20), Line(), 10, 1.0)
    assert (u @ keys).item() == pytest.approx(20 - 10 * 0.05)
    u = evolve(AdvectionDiffusion(0.1, 0.3), peak(41, 20), Line(), 1000, 1.0)
    assert u.argmax() == 0  # and piles up at the wall


def test_variance_of_diffusion_grows_with_time():
    keys = torch.arange(81.0, dtype=torch.float64) - 40
    u = evolve(Diffusion(0.1), peak(81, 40), Line(), 30, 1.0)
    assert (u @ keys**2).item() == pytest.approx(2 * 0.1 * 30)


def test_wave_is_the_leapfrog_recurrence_and_travels_at_its_speed():
    u = [peak(41, 20)] * 2
    pde, dt = Wave(0.5), 1.6
    for _ in range(20):
        u.append(2 * u[-1] - u[-2] + (0.5 * dt) ** 2 * Line().laplacian(u[-1]))
    torch.testing.assert_close(evolve(pde, peak(41, 20), Line(), 20, dt), u[-1], rtol=1e-12, atol=1e-12)
    smooth = torch.exp(-((torch.arange(401.0).double() - 200) ** 2) / 200)
    moved = evolve(Wave(1.0), smooth, Line(), 100, 0.5)  # d'Alembert: half of it in each direction
    torch.testing.assert_close(moved, (smooth.roll(50) + smooth.roll(-50)) / 2, rtol=0, atol=0.02)


@pytest.mark.parametrize("beta", [0.3, -0.3])
def test_reaction_is_logistic_growth(beta):
    u = torch.linspace(0, 1, 11, dtype=torch.float64)
    grown = u * math.exp(2 * beta) / (1 - u + u * math.exp(2 * beta))
    torch.testing.assert_close(
        evolve(ReactionDiffusion(0.0, beta, split=True), u, Line(), 4, 0.5), grown
    )
    euler = evolve(ReactionDiffusion(0.0, beta), u, Line(), 2000, 0.001)
    torch.testing.assert_close(euler, grown, rtol=1e-3, atol=1e-4)


def test_split_and_plain_reaction_agree_as_pseudo_time_shrinks():
    u = torch.rand(3, 16, dtype=torch.float64)
    gap = []
    for time in (0.02, 0.01):
        a, b = (
            evolve(ReactionDiffusion(0.3, 0.4, split), u, Line(), 4, time / 4) for split in (False, True)
        )
        gap.append((a - b).abs().max().item())
    assert gap[0] / gap[1] == pytest.approx(4, abs=0.3)


def test_open_faces_need_both_neighbours():
    allowed = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]]).bool()
    assert open_faces(allowed).tolist() == [[True, False, False], [True, True, True]]
    assert open_faces(allowed, -2).tolist() == [[True, True, False, True]]
    assert open_faces(allowed[:, :1]).shape == (2, 1)  # broadcasts over all faces


def test_line_of_one_position_does_not_move():
    for line in (Line(), RING, Line().adjoint, Line(open=torch.ones(1, 0, dtype=torch.bool))):
        u = torch.rand(3, 1)
        assert torch.equal(line.laplacian(u), torch.zeros(3, 1))
        assert torch.equal(line.gradient(u), torch.zeros(3, 1))
