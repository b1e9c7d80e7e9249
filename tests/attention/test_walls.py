"""A mask may be written with -inf or with any large negative number: both are walls, for every engine."""

import pytest
import torch

from attractor.attention import assert_causal, explain, masks, pde_attention, pdes, trace

LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32)}
WRITTEN = {
    "-inf": -torch.inf,
    "-1e9": -1e9,
    "-1e4": -1e4,
    "-1e4 twice": -2e4,
    "lowest": LOWEST[torch.float32],
    "half of the lowest": LOWEST[torch.float32] / 2,
    "lowest of bfloat16": LOWEST[torch.bfloat16],
    "lowest of float16": LOWEST[torch.float16],
}
every_wall = pytest.mark.parametrize("wall", WRITTEN.values(), ids=WRITTEN)
METHODS = ("auto", "dense", "stepped", "tiled")


def future(tokens, wall, dtype=torch.float32):
    return (
        torch.zeros(tokens, tokens).masked_fill(torch.ones(tokens, tokens).triu(1) > 0, wall).to(dtype)
    )


def alibi(heads, tokens):
    """ALiBi's bias of a causal model, [heads, tokens, tokens], without its mask."""
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
    position = torch.arange(tokens)
    return -slopes[:, None, None] * (position[:, None] - position).abs()


@pytest.mark.sampled(12)
@every_wall
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [12, 80])
def test_a_causal_model_that_writes_its_mask_is_causal(wall, method, tokens):
    mask = future(tokens, wall)
    model = lambda x: pde_attention(x, x.flip(-1), 0.5 * x, mask, pde="wave", method=method)
    x = torch.randn(1, 2, tokens, 8)
    assert_causal(model, x)
    torch.testing.assert_close(
        model(x), pde_attention(x, x.flip(-1), 0.5 * x, is_causal=True, pde="wave", method="dense")
    )


@pytest.mark.sampled(4)
@every_wall
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pde", ["diffusion", "reaction_diffusion"])
def test_in_half_precision(wall, dtype, pde):
    x = torch.randn(1, 2, 70, 8).to(dtype)
    for kind in (dtype, torch.float32):
        mask = future(70, wall, kind)
        assert_causal(lambda x, mask=mask: pde_attention(x, x, x, mask, pde=pde), x)


@every_wall
def test_a_number_is_as_good_as_bools(wall):
    """Bit by bit, padding, sums with a bias and rows without keys among them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 70, 8)
    open = torch.rand(2, 1, 70, 70) > 0.4
    open[0, :, 7] = False
    bias = 3 * torch.randn(2, 1, 70, 70)
    for pde in ("diffusion", "reaction_diffusion"):
        written = [
            pde_attention(q, k, v, mask, pde=pde)
            for mask in (
                torch.where(open, bias, wall),
                torch.where(open, bias, bias + wall),
                bias.masked_fill(~open, -torch.inf),
            )
        ]
        assert torch.equal(written[0], written[2])
        assert torch.equal(written[1], written[2])
        assert not written[0][0, :, 7].any()
    seen = [trace(q, k, torch.where(open, bias, x), pde="wave").maps for x in (wall, -torch.inf)]
    assert torch.equal(*seen)


def test_the_threshold_is_one_number_in_every_type():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        biases = torch.tensor(
            [masks.WALL, masks.WALL + 64, -1e4, 0.0, torch.nan, -torch.inf], dtype=dtype
        )
        assert masks.walls_of_bias(biases).tolist() == [True, False, True, False, False, True]


@pytest.mark.parametrize("method", METHODS)
def test_alibi_is_a_bias(method):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 90, 4, dtype=torch.float64)
    bias = alibi(8, 90).double() * 180  # as steep as it is after 16,000 tokens
    assert bias.min() < -8000
    assert not masks.walls_of_bias(bias).any()
    options = {"pde": pdes.Diffusion(0.2), "is_causal": True}
    out = pde_attention(q, k, v, bias, method=method, **options)
    past = torch.ones(90, 90, dtype=torch.bool).tril()
    A = (q @ k.mT / 2 + bias).masked_fill(~past, -torch.inf).softmax(-1)
    for _ in range(4):
        flux = 0.2 * A.diff(dim=-1) * past[:, 1:]
        A = A + torch.nn.functional.pad(flux, (0, 1)) - torch.nn.functional.pad(flux, (1, 0))
    torch.testing.assert_close(out, A @ v, rtol=1e-10, atol=1e-12)


def test_a_wall_on_alibis_slope_holds_nothing_back():
    """Where ALiBi's bias falls below the threshold the weights of all neighbours have long been 0."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 90, 4, dtype=torch.float64)
    steep, gentle = (alibi(8, 90)[:1].double() * slope for slope in (400.0, 180.0))
    assert masks.walls_of_bias(steep).any()
    found = [pde_attention(q, k, v, x, is_causal=True, pde="diffusion") for x in (steep, gentle)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_a_bias_is_not_a_wall():
    q, k, v = torch.randn(3, 1, 1, 70, 8, dtype=torch.float64)
    bias = torch.zeros(70, 70, dtype=torch.float64)
    bias[:, 30] = -3000.0  # no weight at first
    seen = trace(q, k, bias, pde="diffusion", steps=1)
    assert seen.maps[0][..., 30].max() == 0
    assert seen.maps[1][..., 30].min() > 0
    assert explain(q, k, v, bias, pde="diffusion").method == "stepped"


@pytest.mark.parametrize("axis", ["query", "both"])
def test_a_mask_that_is_causal_is_refused_on_other_axes(axis):
    x = torch.randn(1, 2, 12, 8)
    with pytest.raises(ValueError, match="would see its future"):
        pde_attention(x, x, x, future(12, -1e9), pde="diffusion", axis=axis)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "dense", "tiled"])
def test_compiled(method):
    mask = future(40, -1e9)
    attend = lambda x: pde_attention(x, x.flip(-1), 0.5 * x, mask, pde="diffusion", method=method)
    whole = torch.compile(attend, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 2, 40, 8)
    torch.testing.assert_close(whole(x), attend(x))
    assert_causal(whole, x)


@pytest.mark.gpu
@every_wall
@pytest.mark.parametrize("method", METHODS)
def test_on_a_gpu(wall, method):
    mask = future(300, wall).cuda()
    x = torch.randn(1, 2, 300, 64, device="cuda")
    assert_causal(lambda x: pde_attention(x, x, x, mask, pde="diffusion", method=method), x)
