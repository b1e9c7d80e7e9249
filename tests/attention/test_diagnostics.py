"""Measures of maps, and the paper's theorems as far as they hold."""

import math

import pytest
import torch

from attractor.attention import pde_attention, pdes
from attractor.attention.diagnostics import coefficients, hybrid_errors, trace
from attractor.attention.engines.dense import dense
from attractor.attention.masks import open_faces
from attractor.attention.performer import RandomFeatures, performer_dense

PDES = [pdes.Diffusion(0.2), pdes.Wave(0.4), pdes.ReactionDiffusion(0.2, 0.1),
        pdes.ReactionDiffusion(0.2, 0.1, split=True), pdes.AdvectionDiffusion(0.2, 0.1)]  # fmt: skip
every_pde = pytest.mark.parametrize("pde", PDES, ids=repr)
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": 3},
    "padding": {"key_padding": torch.arange(16) < torch.tensor([[16], [11]])},
    "documents": {"documents": torch.tensor([[0] * 5 + [1] * 11, [0] * 16]), "is_causal": True},
    "mask": {"attn_mask": torch.rand(16, 16, generator=torch.Generator().manual_seed(1)) > 0.3},
}
every_mask = pytest.mark.parametrize("kind", MASKS)


def qk(tokens=16, heads=2, size=1.0):
    return size * torch.randn(2, 2, heads, tokens, 4, dtype=torch.float64)


def peaked(tokens, sharp=40.0):
    """Queries and keys on a circle: each query attends to its own position, and to little else."""
    angle = torch.arange(tokens, dtype=torch.float64) * (2 * math.pi / (2 * tokens))
    points = torch.stack((angle.cos(), angle.sin()), -1)
    return sharp * tokens * points, points


@every_pde
@every_mask
@pytest.mark.parametrize("axis", ["key", "query", "both"])
def test_maps_are_those_of_dense(pde, kind, axis):
    q, k = qk()
    dt = 0.5
    found = trace(q, k, **MASKS[kind], pde=pde, steps=4, dt=dt, axis=axis)
    assert found.maps.shape == (5, 2, 2, 16, 16)
    assert found.times.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    eye = torch.eye(16, dtype=torch.float64).expand(2, 2, 16, 16)
    for steps in (0, 4):
        options = {**MASKS[kind], "pde": pde, "steps": steps, "dt": dt, "axis": axis}
        if axis != "key" and "is_causal" in MASKS[kind]:  # which pde_attention refuses
            _, A = dense(q, k, k, **options)
        else:
            A = pde_attention(q, k, eye, method="dense", **options)
        torch.testing.assert_close(found.maps[steps], A, rtol=0, atol=1e-15)
    for name, numbers in found.measures().items():
        assert numbers.shape == (5, 2, 2), name
        assert numbers.isfinite().all(), name
    assert found.leaked.max() == 0


def test_measures_by_hand():
    q, k = qk(tokens=3, heads=1)
    found = trace(q, k, is_causal=True, pde=pdes.Diffusion(0.1), steps=1)
    A = found.maps[0, 0, 0]
    rows = A.tolist()
    torch.testing.assert_close(found.row_mass[0, 0, 0], torch.ones(3).double())
    entropy = -sum(x * math.log(x) for row in rows for x in row if x) / 3
    assert found.entropy[0, 0, 0].item() == pytest.approx(entropy)
    variance = sum((x - 1 / 3) ** 2 for row in rows for x in row) / 9
    assert found.variance[0, 0, 0].item() == pytest.approx(variance)
    centre = [sum(j * x for j, x in enumerate(row)) for row in rows]
    spread = sum(x * (j - centre[i]) ** 2 for i, row in enumerate(rows) for j, x in enumerate(row)) / 3
    assert found.spread[0, 0, 0].item() == pytest.approx(math.sqrt(spread))
    distance = sum(x * (j - i) ** 2 for i, row in enumerate(rows) for j, x in enumerate(row)) / 3
    assert found.distance[0, 0, 0].item() == pytest.approx(math.sqrt(distance))
    second, third = rows[1], rows[2]
    bends = [second[1] - second[0], second[0] - second[1],
             third[1] - third[0], third[0] - 2 * third[1] + third[2], third[1] - third[2]]  # fmt: skip
    assert found.smoothness[0, 0, 0].item() == pytest.approx(sum(x * x for x in bends))


@every_mask
@pytest.mark.parametrize("alpha", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("axis", ["key", "query", "both"])
def test_theorem_2_smoothness_and_variance_fall(kind, alpha, axis):
    q, k = qk(size=2.0)
    dt = 0.5 if axis == "both" else 1.0
    found = trace(q, k, **MASKS[kind], pde=pdes.Diffusion(alpha), steps=30, dt=dt, axis=axis)
    for measure in (found.smoothness, found.variance):
        assert (measure.diff(dim=0) <= 1e-15 * measure[0]).all()
        assert (measure[1] < measure[0]).all()


def test_theorem_2_fails_beyond_the_limit():
    q, k = qk(size=2.0)
    wild = pdes.Diffusion(torch.tensor(0.6).double())  # tensors are not checked
    found = trace(q, k, pde=wild, steps=60)
    assert found.smoothness[-1].min() > found.smoothness[0].max()


def variance(rows):
    """Of where rows attend."""
    keys = torch.arange(rows.shape[-1], dtype=torch.float64)
    return (rows * (keys - (rows * keys).sum(-1, keepdim=True)).square()).sum(-1)


@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_range_grows_like_the_root_of_time(alpha):
    found = trace(*peaked(101), pde=pdes.Diffusion(alpha), steps=40)
    middle = variance(found.maps[:, 50])
    torch.testing.assert_close(middle - middle[0], 2 * alpha * found.times, rtol=0, atol=1e-9)
    grown = (found.spread.square() - found.spread[0].square()).sqrt()  # of all rows, walls included
    slope = (grown[40] / grown[10]).log() / math.log(4)
    assert slope.item() == pytest.approx(0.5, abs=0.02)


def test_range_of_a_wave_grows_like_time():
    found = trace(*peaked(101), pde=pdes.Wave(0.8), steps=40)
    middle, n = variance(found.maps[:, 50]), torch.arange(41.0).double()
    torch.testing.assert_close(middle - middle[0], 0.8**2 * n * (n + 1), rtol=0, atol=1e-9)


def test_walls_stop_the_range():
    stopped = trace(*peaked(9), pde=pdes.Diffusion(0.4), steps=400)
    assert stopped.spread[-1].item() == pytest.approx(math.sqrt((9**2 - 1) / 12), rel=1e-6)  # uniform
    assert stopped.entropy[-1].item() == pytest.approx(math.log(9), rel=1e-6)


@every_mask
def test_entropy_grows_under_diffusion(kind):
    found = trace(*qk(size=2.0), **MASKS[kind], pde=pdes.Diffusion(0.3), steps=10)
    assert (found.entropy.diff(dim=0) >= -1e-14).all()
    torch.testing.assert_close(found.mass, torch.ones_like(found.mass), rtol=0, atol=1e-12)


def test_mass_of_reaction_grows():
    found = trace(*qk(), is_causal=True, pde=pdes.ReactionDiffusion(0.1, 0.1), steps=10)
    assert (found.mass.diff(dim=0) > 0).all()
    assert (found.row_mass[:, :, :, 0] - 1).abs().max() < 1e-12  # a lone key with weight 1 stays


@pytest.mark.parametrize("pde", [p for p in PDES if p.linear and not isinstance(p, pdes.Wave)], ids=repr)
def test_depth_adds_pseudo_time(pde):
    """D.4 (2): layers of one step each on a map are one layer of as many steps."""
    q, k = qk()
    found = trace(q, k, is_causal=True, pde=pde, steps=6)
    A, line = found.maps[0], pdes.Line(-1, open_faces(found.allowed))
    for layer in range(6):
        A = pdes.evolve(pde, A, line, 1, 1.0)
        torch.testing.assert_close(A, found.maps[layer + 1], rtol=0, atol=1e-15)


def test_depth_is_the_continuous_flow_to_first_order():
    """D.4 (3): the distance to the flow of the equation over the same time is O(dt)."""
    q, k = qk(size=2.0)
    unit = torch.eye(16, dtype=torch.float64)
    flow = torch.linalg.matrix_exp(4.0 * 0.25 * pdes.Line().laplacian(unit))
    errors = []
    for steps in (8, 16, 32):
        maps = trace(q, k, pde=pdes.Diffusion(0.25), steps=steps, dt=4.0 / steps).maps
        errors.append((maps[-1] - maps[0] @ flow).norm().item())
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("start", ["exact", "window", "performer"])
def test_hybrid_bound_d5_does_not_hold(start):
    """Its right side tends to the error at the start as time grows and dt falls; its left side does not."""
    q, k = (x[None] for x in peaked(16, 0.5)) if start == "window" else qk(size=0.7)
    _, exact = dense(q, k, k, pde=PDES[0], steps=0, dt=1.0)
    cheap = {
        "exact": lambda: exact,
        "window": lambda: dense(q, k, k, window=5, pde=PDES[0], steps=0, dt=1.0)[1],
        "performer": lambda: performer_dense(q, k, k, features=RandomFeatures(4, 4096))[1],
    }[start]()
    ends = []
    for dt in (0.5, 0.25):
        to_start, to_truth = hybrid_errors(
            exact, cheap, pdes.Line(), pde=pdes.Diffusion(0.5), steps=int(250 / dt), dt=dt
        )
        assert to_start.shape == to_truth.shape == (250 / dt + 1, *exact.shape[:-2])
        assert math.exp(-0.5 * 4 * math.sin(math.pi / 32) ** 2 * 250) < 0.01  # exp(-alpha lambda_min T)
        assert (to_start[-1] > 2 * to_start[0]).all()
        torch.testing.assert_close(to_start[-1], (exact - 1 / 16).norm(dim=(-2, -1)), rtol=0.01, atol=0)
        assert (to_truth.diff(dim=0) <= 1e-15).all()  # what does hold
        assert torch.equal(to_truth[0], to_start[0])
        ends.append(to_start[-1])
    torch.testing.assert_close(*ends, rtol=1e-3, atol=0)  # so O(dt) is not what is missing


def test_leaks_are_seen():
    q, k = qk()
    sealed, leaking = (
        trace(q, k, is_causal=True, pde="diffusion", steps=4, walls=walls)
        for walls in ("mask", "sequence")
    )
    assert sealed.leaked.max() == 0
    assert (leaking.leaked.diff(dim=0) > 0).all()
    assert torch.equal(sealed.maps[0], leaking.maps[0])


def test_maps_give_what_pde_attention_gives():
    q, k = qk()
    v = torch.randn(2, 2, 16, 5, dtype=torch.float64)
    found = trace(q, k, None, True, 0.3, pde="wave", steps=3)
    out = pde_attention(q, k, v, is_causal=True, scale=0.3, pde="wave", steps=3)
    torch.testing.assert_close(found.maps[-1] @ v, out, rtol=1e-12, atol=1e-13)


def test_shared_heads_and_fewer_dimensions():
    q, k = qk(heads=4)
    found = trace(q, k[:, :2], is_causal=True, enable_gqa=True, pde="diffusion")
    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        trace(q, k[:, :2], is_causal=True, pde="diffusion")
    assert found.maps.shape == (5, 2, 4, 16, 16)
    one = trace(q[0, 0], k[0, 0], is_causal=True, pde="diffusion")
    assert one.spread.shape == (5,)
    torch.testing.assert_close(one.spread, found.spread[:, 0, 0])


def test_long_texts_are_refused():
    q = torch.empty(1, 8, 65536, 64, device="meta")
    with pytest.raises(ValueError, match=r"5 maps of \[1, 8, 65536, 65536\], .* fewer texts"):
        trace(q, q, pde="diffusion")
    with pytest.raises(ValueError, match="dt = 9 is unstable"):
        trace(*qk(), pde="diffusion", dt=9.0)


def test_coefficients_of_layers():
    model = torch.nn.ModuleDict(
        {
            "first": pdes.LearnedPDE("diffusion", heads=4),
            "second": pdes.LearnedPDE("advection_diffusion"),
            "other": torch.nn.Linear(2, 2),
        }
    )
    with torch.no_grad():
        model["first"].alpha_raw += torch.tensor([-0.1, 0.0, 0.0, 1.0])
    rows = coefficients(model)
    assert [(r["name"], r["pde"], r["coefficient"], r["heads"]) for r in rows] == [
        ("first", "Diffusion", "alpha", 4),
        ("second", "AdvectionDiffusion", "alpha", 1),
        ("second", "AdvectionDiffusion", "beta", 1),
    ]
    alpha = model["first"]().alpha
    assert rows[0]["min"] == pytest.approx(alpha.min().item())
    assert rows[0]["max"] == pytest.approx(alpha.max().item())
    assert rows[0]["mean"] == pytest.approx(alpha.mean().item())
    assert rows[0]["deviation"] == pytest.approx(alpha.std(correction=0).item(), rel=1e-5)
    assert rows[0]["share"] == pytest.approx(2 * alpha.max().item())
    assert rows[1]["mean"] == pytest.approx(0.1)
    assert rows[2]["mean"] == pytest.approx(0.03)
    assert coefficients(torch.nn.Linear(2, 2)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["causal", *(pytest.param(x, marks=pytest.mark.slow) for x in ("full", "padding"))]
)
def test_pictures(kind, tmp_path):
    pytest.importorskip("matplotlib")
    from attractor.report import figures, maps

    found = {
        "diffusion": trace(*qk(), **MASKS[kind], pde="diffusion", steps=2),
        "wave": trace(*qk(), **MASKS[kind], pde="wave", walls="sequence", steps=3),
    }
    for i, figure in enumerate((maps.through_time(found, title="maps"), maps.measures(found))):
        assert figures.write(figure, tmp_path / f"{i}.png").stat().st_size > 10_000
    one = {"a head": trace(*(x[0, 0] for x in qk()), is_causal=True, pde="diffusion")}
    figures.write(maps.measures(one, head=0), tmp_path / "one.png")
    figures.write(maps.through_time(one), tmp_path / "map.png")


def test_the_edge_of_a_mask_is_drawn_where_it_is():
    pytest.importorskip("matplotlib")
    from attractor.report.maps import edge

    segments = edge(torch.ones(2, 3).tril().bool())
    sides = [[(0.5, -0.5), (0.5, 0.5)], [(1.5, 0.5), (1.5, 1.5)]]
    assert segments == [*sides, [(0.5, 0.5), (1.5, 0.5)]]
    assert edge(torch.ones(4, 4).bool()) == []
