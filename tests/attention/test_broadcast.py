"""What SDPA broadcasts every engine broadcasts: as if expanded, with gradients summed over the copies."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attractor.attention import explain, pde_attention, trace, window_attention

BATCH, HEADS, TOKENS, DIM = 3, 4, 70, 8
# The dimensions of query, key and value before their tokens; what they make together is in `expanded`.
SHAPES = {
    "one key for all texts": ((BATCH, HEADS), (1, HEADS), (1, HEADS)),
    "one query for all texts": ((1, HEADS), (BATCH, HEADS), (BATCH, HEADS)),
    "only value has texts": ((1, HEADS), (1, HEADS), (BATCH, HEADS)),
    "one head of keys": ((BATCH, HEADS), (BATCH, 1), (BATCH, 1)),
    "one head of queries": ((BATCH, 1), (BATCH, HEADS), (BATCH, HEADS)),
    "keys without texts": ((BATCH, HEADS), (HEADS,), (HEADS,)),
    "keys without heads": ((BATCH, HEADS), (), (1, 1)),
    "queries without texts": ((), (BATCH, HEADS), (HEADS,)),
}
GQA = {
    "one key for all texts": ((BATCH, HEADS), (1, 2), (1, 2)),
    "other heads of values": ((BATCH, HEADS), (BATCH, 2), (BATCH, HEADS)),
    "both": ((1, HEADS), (BATCH, 1), (2,)),
}


def inputs(shapes):
    torch.manual_seed(0)
    return [torch.randn(*s, TOKENS, DIM, dtype=torch.float64, requires_grad=True) for s in shapes]


def expanded(x):
    """As many texts and heads as there are, heads shared in the order of GQA."""
    while x.ndim < 4:
        x = x[None]
    x = x.repeat_interleave(HEADS // x.shape[1], dim=1)
    return x.expand(BATCH, -1, -1, -1)


def with_gradients(given, attend=pde_attention, whole=False, **options):
    """The output and all gradients, of what is given or of all that is `expanded` from it."""
    out = attend(*(map(expanded, given) if whole else given), **options)
    torch.manual_seed(1)
    return out, *torch.autograd.grad(out, given, torch.randn(BATCH, HEADS, TOKENS, DIM).double())


@pytest.mark.sampled(30)
@pytest.mark.parametrize("method", ["dense", "stepped", "tiled"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("shapes", "gqa"),
    [*((s, False) for s in SHAPES.values()), *((s, True) for s in GQA.values())],
    ids=[*SHAPES, *(f"gqa, {kind}" for kind in GQA)],
)
def test_broadcast_inputs_are_as_good_as_expanded_ones(shapes, gqa, causal, method):
    options = {"pde": "wave", "method": method, "is_causal": causal}
    given = inputs(shapes)
    found = with_gradients(given, enable_gqa=gqa, **options)
    truth = with_gradients(given, whole=True, **options)
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
    ordinary = pde_attention(*given, enable_gqa=gqa, steps=0, **options)
    torch.testing.assert_close(ordinary, sdpa(*given, is_causal=causal, enable_gqa=gqa))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("method", ["dense", "stepped", "tiled"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shapes", [((BATCH, HEADS),) * 3, SHAPES["one query for all texts"]], ids=str)
def test_one_row_of_a_mask_serves_all_texts(shapes, causal, method):
    torch.manual_seed(2)
    given = inputs(shapes)
    options = {"pde": "diffusion", "method": method, "is_causal": causal}
    rows = {
        "documents": torch.arange(TOKENS).div(9, rounding_mode="floor")[None],
        "key_padding": (torch.arange(TOKENS) < TOKENS - 7)[None],
        "attn_mask": torch.rand(1, 1, TOKENS, TOKENS) > 0.2,
    }
    for chosen in (("documents",), ("key_padding",), ("attn_mask",), tuple(rows)):
        if method == "stepped" and "attn_mask" in chosen:
            continue  # which this mask is not for
        some = {name: rows[name] for name in chosen}
        every = {name: x.expand(BATCH, *x.shape[1:]) for name, x in some.items()}
        found = with_gradients(given, **options, **some)
        truth = with_gradients(given, whole=True, **options, **every)
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
        choices = explain(*given, **options, **some), explain(*map(expanded, given), **options, **every)
        assert choices[0] == choices[1]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_windows_and_traces_broadcast_too(shapes):
    given = inputs(shapes)
    options = {"window": 9, "global_tokens": 2, "pde": "diffusion"}
    real = (torch.arange(TOKENS) < 60)[None]
    found = with_gradients(given, window_attention, key_padding=real, **options)
    real = real.expand(BATCH, -1)
    truth = with_gradients(given, window_attention, whole=True, key_padding=real, **options)
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
    query, key, _ = inputs(SHAPES["keys without texts"])
    seen, truth = (trace(query, k, pde="diffusion").maps for k in (key, expanded(key)))
    torch.testing.assert_close(seen, truth)


def test_what_does_not_broadcast_is_refused():
    query, key, value = inputs(((2, 2), (3, 2), (3, 2)))
    with pytest.raises(ValueError, match="must be the same, or 1 where they broadcast"):
        pde_attention(query, key, value, pde="diffusion")
    ids = torch.zeros(2, TOKENS, dtype=torch.long)
    with pytest.raises(ValueError, match=r"documents \[2, 70\] must be \[3, 70\], or \[1, 70\] for all"):
        pde_attention(key, key, value, pde="diffusion", documents=ids)
