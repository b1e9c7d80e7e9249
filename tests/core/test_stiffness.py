import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attractor as at
from attractor.core.stiffness import jacobian
from benchmarks.stiffness import area_of_union, corners, grid_integral, random_nsi

F64 = dict(dtype=torch.float64)
STAGE = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])


def some_nsi(inputs=7, seed=0):
    return torch.rand(inputs, 9, generator=torch.Generator().manual_seed(seed), **F64) + 0.01


def test_jacobian_of_a_linear_rate_is_its_matrix():
    a = torch.rand(3, 3, **F64)
    u = torch.rand(4, 5, 3, **F64)
    torch.testing.assert_close(jacobian(lambda t, u: u @ a.T, u), a.expand(4, 5, 3, 3))
    assert jacobian(lambda t, u: torch.ones_like(u), u).abs().max() == 0
    assert jacobian(lambda t, u: u.detach().roll(1, -1) + t, u, 2.0).abs().max() == 0


def test_stiffness_index_of_known_problems():
    decay = torch.tensor([-1.0, -1000.0, 3.0])
    assert at.stiffness.stiffness_index(lambda t, u: u * decay, torch.rand(2, 3)).tolist() == [
        1000,
        1000,
    ]
    # A rotation has imaginary eigenvalues only.
    turn = at.systems.HarmonicOscillator(omega=5.0)
    assert at.stiffness.stiffness_index(turn, torch.rand(4, 2)).abs().max() < 1e-6
    # Van der Pol at (2, 0): eigenvalues solve x^2 + 3 mu x + 1 = 0.
    mu = 100.0
    expected = (3 * mu + np.sqrt(9 * mu**2 - 4)) / 2
    si = at.stiffness.stiffness_index(at.systems.VanDerPol(mu), torch.tensor([2.0, 0.0], **F64))
    assert si.item() == pytest.approx(expected, rel=1e-10)


def test_stiffness_index_depends_on_time_and_marks_what_is_not_finite():
    rate = lambda t, u: -t * u
    assert at.stiffness.stiffness_index(rate, torch.rand(2, 2), t=7.0).tolist() == [7, 7]
    poles = at.stiffness.stiffness_index(lambda t, u: 1 / u, torch.tensor([[1.0], [0.0]]))
    assert poles[0] == 1
    assert torch.isnan(poles[1])


def test_stiffness_aware_index():
    t = torch.tensor([0.0, 0.5, 2.0], **F64)
    solved = at.evolve(lambda t, u: -u, torch.tensor([[3.0, 4.0], [0.0, 0.0]], **F64), t, "euler")
    sai = at.stiffness.stiffness_aware_index(solved)
    assert sai.shape == (2, 2)
    torch.testing.assert_close(sai, torch.tensor([[1.0, 0.0], [1.0, 0.0]], **F64))


def test_stiffness_aware_index_tends_to_the_rate_over_the_state():
    system = at.systems.Lorenz()
    u0 = system.sample(3, dtype=torch.float64)
    solved = at.evolve(system, u0, torch.linspace(0, 1e-5, 3, **F64))
    expected = system(0.0, u0).norm(dim=-1) / u0.norm(dim=-1)
    torch.testing.assert_close(
        at.stiffness.stiffness_aware_index(solved)[0], expected, rtol=1e-3, atol=0
    )


def test_neural_stiffness_index():
    x, f = torch.rand(5, 4, 3, 3), torch.rand(5, 4, 3, 3)
    gate = torch.rand(5, 4, 1, 1) + 0.5
    norm = lambda y: y.flatten(1).norm(dim=1)
    torch.testing.assert_close(at.stiffness.neural_stiffness_index(x, x + f), norm(f) / norm(x))
    by_gate = at.stiffness.neural_stiffness_index(x, x + f * gate, gate)
    torch.testing.assert_close(by_gate, norm(f) / norm(x), rtol=1e-5, atol=0)
    by_two = at.stiffness.neural_stiffness_index(x, x + f, 2.0)
    torch.testing.assert_close(by_two, norm(f) / norm(x) / 2)
    with pytest.raises(ValueError, match="keeps the shape"):
        at.stiffness.neural_stiffness_index(x, x[:, :2])
    with pytest.raises(ValueError, match="step contains zeros"):
        at.stiffness.neural_stiffness_index(x, x + f, 0.0)
    with pytest.raises(ValueError, match="at least one feature"):
        at.stiffness.neural_stiffness_index(torch.ones(3), torch.ones(3))


def test_tns_is_the_area_of_the_union_of_rectangles():
    nsi, stage = random_nsi(50, torch.Generator().manual_seed(1))
    areas = [area_of_union(*corners(row, stage.numpy())) for row in nsi.numpy()]
    tns = at.stiffness.total_neural_stiffness(nsi, stage).item()
    assert tns == pytest.approx(np.mean(areas), rel=1e-13)


def test_tns_is_the_integral_over_all_thresholds():
    nsi, stage = random_nsi(20, torch.Generator().manual_seed(2))
    tns = at.stiffness.total_neural_stiffness(nsi, stage).item()
    assert grid_integral(nsi, stage, 1_500) == pytest.approx(tns, rel=1e-3)


def test_tns_is_the_integral_of_the_surface():
    nsi = some_nsi()
    m1, m2 = (torch.linspace(0, top, 201, **F64)[:-1] + top / 400 for top in (2.0, 1.2))
    surface = at.stiffness.stiffness_surface(nsi, STAGE, m1, m2)
    assert surface.shape == (200, 200)
    tns = at.stiffness.total_neural_stiffness(nsi, STAGE).item()
    assert surface.sum().item() * (2.0 / 200) * (1.2 / 200) == pytest.approx(tns, rel=2e-2)
    assert surface[3, 5] == at.stiffness.stiffness_surface(nsi, STAGE, m1[3].item(), m2[5].item())


@given(scale=st.floats(0.01, 100), seed=st.integers(0, 1000))
def test_tns_grows_linearly_with_nsi(scale, seed):
    nsi = some_nsi(seed=seed)
    once = at.stiffness.total_neural_stiffness(nsi, STAGE).item()
    assert at.stiffness.total_neural_stiffness(scale * nsi, STAGE).item() == pytest.approx(scale * once)


@given(seed=st.integers(0, 1000))
def test_bound_of_the_notes(seed):
    # NSI <= L * mean, so TNS <= (L - 1) max NSI with L the largest stage's number of blocks.
    nsi = some_nsi(inputs=1, seed=seed)
    assert at.stiffness.total_neural_stiffness(nsi, STAGE) <= 2 * nsi.max()


def test_calm_networks_have_no_stiffness():
    assert at.stiffness.total_neural_stiffness(torch.full((3, 9), 0.4, **F64), STAGE) < 1e-12
    assert at.stiffness.total_neural_stiffness(torch.zeros(3, 9, **F64), STAGE) == 0


def test_first_blocks_are_left_out_or_not():
    nsi = some_nsi()
    louder = nsi.clone()
    louder[:, [0, 3, 7]] = 1e6
    tns = at.stiffness.total_neural_stiffness
    assert tns(nsi, STAGE) == tns(louder, STAGE)
    assert tns(louder, STAGE, drop_first=False) > 1e5
    names = torch.tensor([7, 7, 7, 2, 2, 2, 2, 5, 5])
    torch.testing.assert_close(tns(nsi, names), tns(nsi, STAGE))


def test_mean_over_inputs_too():
    nsi = some_nsi()
    by_stage = at.stiffness.total_neural_stiffness(nsi, STAGE, mean="stage")
    areas = []
    for row in nsi.numpy():
        a, b = [], []
        for s in range(3):
            blocks = (s == STAGE).nonzero()[1:, 0].numpy()
            a += list(row[blocks] / nsi.numpy()[:, blocks].mean() - 1)
            b += list(row[blocks])
        areas.append(area_of_union(np.array(a), np.array(b)))
    assert by_stage.item() == pytest.approx(np.mean(areas), rel=1e-12)
    with pytest.raises(ValueError, match="pass 'input' or 'stage'"):
        at.stiffness.total_neural_stiffness(nsi, STAGE, mean="all")


def test_proportion_counts_blocks():
    nsi = torch.tensor([[9.0, 1.0, 3.0, 9.0, 2.0, 2.0]], **F64)
    stage = torch.tensor([0, 0, 0, 1, 1, 1])
    proportion = at.stiffness.stiffness_proportion
    # counted blocks: 1, 3 (mean 2) and 2, 2 (mean 2); a = -1/2, 1/2, 0, 0
    assert proportion(nsi, stage, 0.0, 0.0) == 3 / 4
    assert proportion(nsi, stage, 0.5, 0.0) == 1 / 4
    assert proportion(nsi, stage, 0.5, 3.1) == 0
    assert proportion(nsi, stage, torch.tensor([0.0, 0.5]), torch.tensor([0.0, 2.5, 3.1])).tolist() == [
        [3 / 4, 1 / 4, 0],
        [1 / 4, 1 / 4, 0],
    ]


@pytest.mark.parametrize(
    ("nsi", "stage", "message"),
    [
        (torch.rand(9), STAGE, r"nsi has shape \[9\]"),
        (torch.rand(0, 9), STAGE, "with at least one input"),
        (torch.rand(2, 9), STAGE[:5], "one label for each of the 9 blocks"),
        (torch.full((2, 9), torch.inf), STAGE, "negative or non-finite"),
        (-torch.rand(2, 9) - 1, STAGE, "negative or non-finite"),
        (torch.rand(2, 3), torch.arange(3), "pass drop_first=False"),
    ],
)
def test_bad_input_is_named(nsi, stage, message):
    with pytest.raises(ValueError, match=message):
        at.stiffness.total_neural_stiffness(nsi, stage)


def test_inside_inference_mode():
    with torch.inference_mode():
        assert at.stiffness.stiffness_index(lambda t, u: -2 * u, torch.ones(3, 1)).tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match="complex"):
        at.stiffness.stiffness_index(lambda t, u: u, torch.ones(1, 1, dtype=torch.complex64))


def test_half_precision_does_not_overflow():
    x = torch.full((2, 1000), 5000.0, dtype=torch.float16)
    assert at.stiffness.neural_stiffness_index(x, 2 * x).tolist() == pytest.approx([1, 1], rel=1e-3)


def test_equal_blocks_reach_their_mean():
    nsi = torch.full((1, 4), 0.1, **F64)
    stage = torch.zeros(4, dtype=torch.long)
    assert at.stiffness.stiffness_surface(nsi, stage, 0.0, 0.0) == 1
    assert at.stiffness.stiffness_proportion(nsi.float(), stage, 0.0, 0.0) == 1
