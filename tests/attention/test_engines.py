"""Every engine equals the dense truth: outputs, all gradients, masks, types; what is picked, and why."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attractor.attention import (
    assert_causal,
    explain,
    pde_attention,
    pdes,
    window_attention,
    windows,
)
from attractor.attention.context_parallel import context_parallel_attention
from attractor.attention.engines import tiled
from attractor.attention.pdes import Line, evolve, take_steps

TOKENS = (1, 2, 3, 7, 64, 257)
STEPS = (1, 2, 4, 8)
LINEAR = ("diffusion", "wave", "advection_diffusion")
ANYWHERE = ("bool", "-inf")  # masks that put walls anywhere: not for "stepped"


def coefficients(heads, dtype=torch.float64):
    """Different for every head, within the limits of all PDEs."""
    alpha = torch.linspace(0.05, 0.3, heads, dtype=dtype).view(heads, 1, 1).requires_grad_()
    beta = torch.linspace(0.1, -0.05, heads, dtype=dtype).view(heads, 1, 1).requires_grad_()
    return alpha, beta


def equation(name, alpha, beta):
    if name == "split":
        return pdes.ReactionDiffusion(alpha, beta, split=True), (alpha, beta)
    if name in ("diffusion", "wave"):
        return pdes.get_pde(name)(alpha), (alpha,)
    return pdes.get_pde(name)(alpha, beta), (alpha, beta)


def masks(tokens):
    """Arguments of every kind that hides something, for a batch of two."""
    real = torch.arange(tokens) < torch.tensor([[tokens], [tokens - tokens // 3]])
    documents = torch.arange(tokens).div(5, rounding_mode="floor").expand(2, -1)
    torn = torch.rand(2, 1, tokens, tokens) > 0.3
    return {
        "full": {},
        "causal": {"is_causal": True},
        "key padding": {"key_padding": real},
        "documents": {"documents": documents},
        "window": {"window": (6, 3)},
        "causal key padding": {"is_causal": True, "key_padding": real.flip(-1)},
        "causal documents": {"is_causal": True, "documents": documents.flip(-1)},
        "documents in pieces": {"documents": torch.arange(tokens).remainder(3).expand(2, -1)},
        "causal window": {"is_causal": True, "window": (20, -1)},
        "wide window": {"window": (30, 40)},
        "open window": {"window": (-1, 2)},
        "bool": {"attn_mask": torn},
        "bias": {"attn_mask": torch.randn(1, 2, tokens, tokens, dtype=torch.float64), "is_causal": True},
        "-inf": {"attn_mask": torch.zeros(2, 1, tokens, tokens).double().masked_fill(~torn, -torch.inf)},
        "all": {"key_padding": real, "documents": documents, "window": (20, 7)},
    }  # fmt: skip


def both(name, tokens, mask, steps, shared, method, dtype=torch.float64, keys=None, depth=8):
    """Outputs and gradients, of dense in float64 and of the method in dtype."""
    heads = 4
    shapes = [(2, heads, tokens, 8), (2, heads // shared, keys or tokens, 8),
              (2, heads // shared, keys or tokens, depth)]  # fmt: skip
    inputs = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    found = []
    for method_, dtype_ in (("dense", torch.float64), (method, dtype)):
        q, k, v = (x.to(dtype_).detach().requires_grad_() for x in inputs)
        pde, leaves = equation(
            name, *coefficients(heads, torch.float64 if dtype_.itemsize == 8 else torch.float32)
        )
        # Heads of the bias and of a torn mask are two: the first two heads of four see it repeated.
        given = {
            key_: x.repeat(1, 2, 1, 1) if torch.is_tensor(x) and x.ndim == 4 and x.shape[1] == 2 else x
            for key_, x in mask.items()
        }
        out = pde_attention(
            q, k, v, pde=pde, steps=steps, method=method_, enable_gqa=shared > 1, **given
        )
        torch.manual_seed(1)
        grad = torch.randn(out.shape, dtype=torch.float64).to(dtype_)
        found.append((out, *torch.autograd.grad(out, (q, k, v, *leaves), grad)))
    return found


def worst(truth, others):
    """The largest difference of any entry, relative to the largest entry, or to 1."""
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1)).item() for a, b in zip(truth, others))


@pytest.mark.sampled(14)
@pytest.mark.parametrize("kind", [kind for kind in masks(7) if kind not in ANYWHERE])
@pytest.mark.parametrize("name", LINEAR)
def test_stepped_equals_dense(name, kind):
    torch.manual_seed(0)
    for tokens, steps in ((1, 2), (2, 1), (7, 8), (64, 1), (161, 4)):
        shared = 4 if steps in (2, 4) else 1
        found = both(name, tokens, masks(tokens)[kind], steps, shared, "stepped")
        assert worst(*found) < 1e-12, (tokens, steps, shared)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", masks(7))
@pytest.mark.parametrize("name", [*pdes.BY_NAME, "split"])
def test_tiled_equals_dense(name, kind, monkeypatch):
    monkeypatch.setattr(tiled, "COLUMNS", 48)
    monkeypatch.setattr(tiled, "ENTRIES", 48 * 8 * 100)
    torch.manual_seed(0)
    for tokens, steps, shared in ((1, 2, 4), (3, 1, 1), (64, 4, 1), (150, 8, 4)):
        found = both(name, tokens, masks(tokens)[kind], steps, shared, "tiled")
        assert worst(*found) < 1e-12, (tokens, steps, shared)


@pytest.mark.slow
@pytest.mark.parametrize("kind", masks(7))
@pytest.mark.parametrize("name", [*pdes.BY_NAME, "split"])
@pytest.mark.parametrize("method", ["stepped", "tiled"])
def test_equal_dense_everywhere(name, kind, method):
    if method == "stepped" and (name not in LINEAR or kind in ANYWHERE):
        pytest.skip("stepped is for linear PDEs and walls that all rows share or that move with them")
    torch.manual_seed(0)
    for tokens in TOKENS:
        for steps in STEPS:
            for shared in (1, 4):
                found = both(name, tokens, masks(tokens)[kind], steps, shared, method)
                assert worst(*found) < 1e-12, (tokens, steps, shared)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["stepped", "tiled"])
@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"window": (9, 2)}, {"window": (-1, 3)}], ids=str
)
def test_other_numbers_of_keys_and_of_value_dims(method, mask):
    torch.manual_seed(0)
    for tokens, keys in ((5, 90), (90, 5), (40, 100), (100, 40)):
        for depth in (3, 8, 20):
            found = both("advection_diffusion", tokens, mask, 4, 1, method, keys=keys, depth=depth)
            assert worst(*found) < 1e-12, (tokens, keys, depth)


def test_a_single_key_with_padding_and_a_window():
    torch.manual_seed(0)
    for real in (True, False):
        for mask in ({"window": (5, 2)}, {"window": (0, -1), "is_causal": True}, {"is_causal": True}):
            given = mask | {"key_padding": torch.tensor([[real], [True]])}
            for name in LINEAR:
                found = both(name, 100, given, 6, 2, "stepped", keys=1)
                assert worst(*found) < 1e-12, (mask, name)


@pytest.mark.parametrize("name", LINEAR)
def test_axis_query_steps_the_outputs(name):
    q, k, v = torch.randn(3, 2, 4, 70, 8, dtype=torch.float64)
    pde, _ = equation(name, *coefficients(4))
    real = torch.arange(70) < torch.tensor([[70], [50]])
    documents = torch.arange(70).div(9, rounding_mode="floor").expand(2, -1)
    for mask in (
        {},
        {"key_padding": real},
        {"documents": documents},
        {"attn_mask": torch.randn(1, 70).double()},
    ):
        found = [
            pde_attention(q, k, v, pde=pde, axis="query", method=m, **mask) for m in ("dense", "stepped")
        ]
        torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("walls", ["sequence", "periodic"])
@pytest.mark.filterwarnings("ignore:walls")
def test_leaking_walls_are_the_same_leak(walls):
    q, k, v = torch.randn(3, 2, 4, 70, 8, dtype=torch.float64)
    torn = torch.rand(70, 70) > 0.5
    for mask in ({}, {"is_causal": True}, {"window": 5}, {"attn_mask": torn}):
        for name in LINEAR:
            pde, _ = equation(name, *coefficients(4))
            found = [
                pde_attention(q, k, v, pde=pde, walls=walls, method=m, **mask)
                for m in ("dense", "stepped")
            ]
            torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16,
     *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.float64, torch.float16))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("method", ["stepped", "tiled"])
@pytest.mark.parametrize("name", [*pdes.BY_NAME, "split"])
def test_no_bit_of_the_past_changes_with_the_future(name, method, dtype):
    if method == "stepped" and name not in LINEAR:
        pytest.skip("stepped is for linear PDEs")
    pde, _ = equation(name, 0.2, 0.1)
    torch.manual_seed(0)
    for mask in (
        {"is_causal": True},
        {"window": (11, 0)},
        {"is_causal": True, "documents": torch.arange(90)[None] // 20},
    ):

        def model(x, mask=mask):
            return pde_attention(x, x.flip(-1), x * 0.5, pde=pde, steps=3, method=method, **mask)

        assert_causal(model, torch.randn(1, 2, 90, 8).to(dtype))


@pytest.mark.parametrize("name", LINEAR)
def test_rows_still_sum_to_one_under_every_mask(name):
    torch.manual_seed(0)
    pde, _ = equation(name, 0.2, 0.1)
    q, k = torch.randn(2, 2, 2, 80, 8, dtype=torch.float64)
    ones = torch.ones(2, 2, 80, 1, dtype=torch.float64)
    for kind, mask in masks(80).items():
        none = pde_attention(q, k, ones, pde=pde, steps=0, method="dense", **mask)
        for method in ("dense", "tiled", *(() if kind in ANYWHERE else ("stepped",))):
            mass = pde_attention(q, k, ones, pde=pde, steps=4, method=method, **mask)
            assert (mass - none.round()).abs().max() < 1e-12, (kind, method)


@pytest.mark.parametrize("method", ["dense", "stepped", "tiled"])
def test_rows_without_keys_are_zero_and_have_no_gradient(method):
    q, k, v = (torch.randn(1, 2, 80, 8, requires_grad=True) for _ in range(3))
    real = torch.zeros(1, 80, dtype=torch.bool)
    for mask in ({"key_padding": real}, {"key_padding": real, "is_causal": True},
                 {"key_padding": real, "window": 3}, {"attn_mask": real[:, None, None].expand(1, 1, 80, 80)}):  # fmt: skip
        out = pde_attention(q, k, v, pde="diffusion", method=method, **mask)
        assert not out.any()
        for grad in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)):
            assert not grad.any()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "kind",
    ["causal", "key padding", "bias",
     *(pytest.param(x, marks=pytest.mark.slow) for x in ("full", "causal documents", "window"))],
)  # fmt: skip
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("method", ["stepped", "tiled"])
@pytest.mark.parametrize("name", [*pdes.BY_NAME, "split"])
def test_half_precision_is_as_exact_as_dense(name, method, dtype, kind):
    if method == "stepped" and name not in LINEAR:
        pytest.skip("stepped is for linear PDEs")
    mask = masks(150)[kind]
    torch.manual_seed(3)
    truth, ours = both(name, 150, mask, 4, 1, method, dtype)
    torch.manual_seed(3)
    _, dense = both(name, 150, mask, 4, 1, "dense", dtype)
    for n, (exact, a, b) in enumerate(zip(truth, ours, dense)):
        error, allowed = (((x.double() - exact) ** 2).mean().sqrt().item() for x in (a, b))
        few = torch.finfo(dtype).eps / 4 * exact.abs().max().item() if n > 3 else 1e-7
        assert error <= (2 if n == 0 else 3) * allowed + few, (n, error, allowed)


def test_dropout_is_on_the_first_map():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 100, 4, dtype=torch.float64)
    v = torch.eye(100, dtype=torch.float64)[None, None]
    for mask in ({}, {"is_causal": True}):
        kept = pde_attention(q, k, v, dropout_p=0.4, pde="diffusion", steps=0, method="tiled", **mask)
        whole = pde_attention(q, k, v, pde="diffusion", steps=0, **mask)
        inside = whole > 0
        ratio = kept[inside] / whole[inside]
        assert set(ratio.round(decimals=9).tolist()) == {0.0, round(1 / 0.6, 9)}
        assert (ratio == 0).double().mean() == pytest.approx(0.4, abs=0.02)
    torch.manual_seed(5)
    kept = pde_attention(q, k, v, dropout_p=0.4, pde="diffusion", steps=0, method="tiled")
    torch.manual_seed(5)
    moved = pde_attention(q, k, v, dropout_p=0.4, pde="diffusion", steps=3, method="tiled")
    torch.testing.assert_close(
        moved, evolve(pdes.Diffusion(), kept, Line(-1), 3, 1.0), rtol=0, atol=1e-12
    )
    assert not pde_attention(q, k, v, dropout_p=1.0, pde="wave", method="tiled").any()


def test_gradients_through_dropout_use_the_same_map():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 70, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def f(q, k, v):
        torch.manual_seed(9)
        return pde_attention(q, k, v, dropout_p=0.5, pde="reaction_diffusion", steps=2, method="tiled")[
            ..., ::30, :
        ]

    assert torch.autograd.gradcheck(f, (q, k, v), fast_mode=True)


def test_renormalise_brings_back_rows_that_sum_to_one():
    q, k = torch.randn(2, 1, 2, 90, 8, dtype=torch.float64)
    v = torch.ones(1, 2, 90, 3, dtype=torch.float64)
    pde = pdes.ReactionDiffusion(0.1, 0.5)
    for method in ("dense", "tiled"):
        plain = pde_attention(q, k, v, is_causal=True, pde=pde, method=method)
        assert (plain > 1.01).any()
        out = pde_attention(q, k, v, is_causal=True, pde=pde, method=method, renormalise=True)
        torch.testing.assert_close(out, v, rtol=0, atol=1e-12)


def test_no_steps_is_ordinary_attention():
    q, k, v = torch.randn(3, 2, 2, 90, 8)
    for causal in (False, True):
        out = pde_attention(q, k, v, is_causal=causal, pde="wave", steps=0)
        assert torch.equal(out, sdpa(q, k, v, is_causal=causal))


def test_a_causal_mask_given_as_a_matrix_is_recognised():
    q, k, v = torch.randn(3, 1, 2, 90, 8, dtype=torch.float64)
    below = torch.ones(90, 90, dtype=torch.bool).tril()
    real = torch.arange(90) < 80
    for mask in (
        below,
        below & real,
        real[None].expand(90, 90),
        torch.zeros(90, 90).double().masked_fill(~below, -torch.inf),
    ):
        assert explain(q, k, v, mask, pde="diffusion").method == "stepped"
        found = [pde_attention(q, k, v, mask, pde="diffusion", method=m) for m in ("dense", "stepped")]
        torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    torn = torch.rand(90, 90) > 0.5
    assert explain(q, k, v, torn, pde="diffusion") == explain(
        q, k, v, torn, is_causal=True, pde="diffusion"
    )
    assert explain(q, k, v, torn, pde="diffusion").method == "tiled"


def test_what_auto_picks_and_why():
    q, k, v = torch.randn(3, 1, 2, 90, 8)
    bias = torch.zeros(90, 90, requires_grad=True)
    long = torch.randn(1, 2, 800, 8)
    for choice, method, reason in [
        (explain(q, k, v, pde="wave", is_causal=True), "stepped", "Wave is linear"),
        (explain(long, long, long, pde="reaction_diffusion"), "tiled", "not linear"),
        (explain(q, k, v, pde="reaction_diffusion"), "dense", "the map is small"),
        (explain(q, k, v, pde="wave", dropout_p=0.1), "stepped", "linear"),
        (explain(q, k, v, pde="wave", dropout_p=0.1, is_causal=True), "tiled", "dropout"),
        (explain(q, k, v, pde="wave", dropout_p=0.1, window=5), "tiled", "dropout"),
        (explain(q[..., :3, :], k, v, pde="wave"), "dense", "3 rows"),
        (explain(q, k, v, bias, pde="wave"), "dense", "gradient"),
        (explain(q, k, v, pde="wave", axis="both"), "dense", "both"),
        (explain(q, k, v, pde="wave", axis="query"), "stepped", "linear"),
        (explain(q, k, v, pde="wave", axis="query", window=3), "dense", "query axis"),
        (explain(q, k, v, pde="wave", method="dense"), "dense", "requested"),
    ]:  # fmt: skip
        assert choice.method == method
        assert reason in choice.reason


def test_an_engine_that_cannot_says_why():
    q, k, v = torch.randn(3, 1, 2, 90, 8)
    with pytest.raises(ValueError, match="not linear; use 'tiled' or 'dense'"):
        pde_attention(q, k, v, pde="reaction_diffusion", method="stepped")
    with pytest.raises(ValueError, match="axis 'both'"):
        pde_attention(q, k, v, pde="diffusion", axis="both", method="stepped")
    with pytest.raises(ValueError, match="use 'stepped' or 'dense'"):
        pde_attention(q, k, v, pde="diffusion", axis="query", method="tiled")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"dropout_p": 0.1, "is_causal": True},
            "dropout near a wall that moves with the row needs the weights themselves; use 'tiled' or",
        ),
        ({"dropout_p": 0.1, "attn_mask": "causal"}, "dropout near a wall that moves with the row"),
        ({"attn_mask": "torn"}, "attn_mask puts walls anywhere; use 'tiled' or 'dense'"),
        ({"attn_mask": "torn bias"}, "attn_mask puts walls anywhere"),
        ({"attn_mask": "torn", "window": 5, "is_causal": True}, "attn_mask puts walls anywhere"),
    ],
    ids=str,
)
def test_stepped_never_runs_another_engine(options, reason):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 90, 8)
    torn = torch.rand(90, 90) > 0.5
    causal = torch.ones(90, 90, dtype=torch.bool).tril()
    masks = {"torn": torn, "causal": causal, "torn bias": torch.zeros(90, 90).masked_fill(~torn, -1e9)}
    options = {name: masks.get(x, x) for name, x in options.items()} | {"pde": "wave", "steps": 2}
    for call in (pde_attention, explain):
        with pytest.raises(ValueError, match=reason):
            call(q, k, v, method="stepped", **options)
    assert explain(q, k, v, **options).method == "tiled"


@pytest.mark.parametrize("padded", [False, True])
def test_dropout_of_the_map_is_dropout_with_stepped_values(padded):
    """The mean over many draws is the output without dropout, and no draw is it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 30, 4).expand(4000, -1, -1, -1) for _ in range(3))
    options = {"pde": "diffusion", "method": "stepped"}
    if padded:
        options["key_padding"] = torch.arange(30)[None].expand(4000, -1) > 8
    draws = pde_attention(q, k, v, dropout_p=0.3, **options)
    whole = pde_attention(q[:1], k[:1], v[:1], **options | {
        name: x[:1] for name, x in options.items() if name == "key_padding"
    })  # fmt: skip
    spread = draws.std(0) / len(draws) ** 0.5
    assert (draws.mean(0) - whole[0]).abs().lt(5 * spread).all()
    assert draws.std(0).min() > 1e-3


@pytest.mark.slow
def test_compiled_stepped_does_not_look_at_a_mask():
    q, k, v = torch.randn(3, 1, 2, 90, 8)
    mask = torch.zeros(90, 90)

    def attend(q, k, v, mask, method):
        return pde_attention(q, k, v, mask, pde="wave", method=method)

    whole = torch.compile(attend, backend="aot_eager")
    with pytest.raises(ValueError, match="compiled code cannot see"):
        whole(q, k, v, mask, "stepped")
    torch.testing.assert_close(whole(q, k, v, mask, "auto"), attend(q, k, v, mask, "stepped"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*pdes.BY_NAME, "split"])
def test_coefficients_of_texts_and_heads(name, causal):
    """[texts, heads, 1, 1], on queries of any number of dimensions, with their gradients."""
    torch.manual_seed(0)
    for shape, lead in (((2, 3), (2, 3)), ((2, 3), (4, 2, 3)), ((2, 1), (4, 2, 3)), ((4, 1, 3), (4, 2, 3)),
                        ((1, 1, 3), (3,)), ((1, 1), ())):  # fmt: skip
        inputs = [torch.randn(*lead, 70, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        random = [torch.rand(*shape, 1, 1, dtype=torch.float64) for _ in range(2)]
        pde, leaves = equation(
            name, (0.1 + 0.2 * random[0]).requires_grad_(), (0.1 * random[1]).requires_grad_()
        )
        found = {}
        for method in ("dense", "tiled", "auto", *(("stepped",) if name in LINEAR else ())):
            out = pde_attention(*inputs, is_causal=causal, pde=pde, steps=3, method=method)
            found[method] = out, *torch.autograd.grad(out, (*inputs, *leaves), torch.ones_like(out))
        for method, others in found.items():
            assert worst(found["dense"], others) < 1e-12, (shape, lead, method)


def test_coefficients_in_another_type_than_the_tensors():
    x = torch.randn(1, 2, 40, 4)
    alpha, beta = (torch.full((2, 1, 1), size, dtype=torch.float64) for size in (0.2, 0.1))
    for name in (*pdes.BY_NAME, "split"):
        truth = pde_attention(x, x, x, pde=equation(name, 0.2, 0.1)[0])
        for method in ("dense", "tiled"):
            out = pde_attention(x, x, x, pde=equation(name, alpha, beta)[0], method=method)
            torch.testing.assert_close(out, truth)


def test_flags_are_flags():
    """A scale in the place of is_causal is not taken for True."""
    x = torch.randn(1, 2, 9, 4)
    for name in ("is_causal", "enable_gqa", "renormalise"):
        with pytest.raises(TypeError, match=f"{name} = 0.125 must be True or False"):
            pde_attention(x, x, x, pde="wave", **{name: 0.125})


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_in_parts_broadcast_as_others_do(causal):
    query, key = (
        torch.randn(3, 4, 40, 8, dtype=torch.float64),
        torch.randn(1, 1, 40, 8, dtype=torch.float64),
    )
    alpha = torch.rand(3, 4, 1, 1, dtype=torch.float64) / 3
    for q in (query, query.expand(2, 3, 4, 40, 8)):
        options = {"pde": pdes.Diffusion(alpha), "is_causal": causal}
        out = context_parallel_attention(q, key, key, **options)
        torch.testing.assert_close(out, pde_attention(q, key, key, method="dense", **options))


def test_a_pde_of_ones_own_says_its_reach():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Smoothing:
        kappa: float = 0.02
        linear = True
        reach = 2

        def max_dt(self, axis="key"):
            return 1 / 8 / self.kappa

        def check(self, dt, axis="key"):
            pass

        def step(self, u, velocity, line, dt):
            return u - dt * self.kappa * line.laplacian(line.laplacian(u)), velocity

    q, k, v = torch.randn(3, 1, 2, 150, 8, dtype=torch.float64)
    for mask in ({}, {"is_causal": True}, {"window": (20, 5)}):
        truth = pde_attention(q, k, v, pde=Smoothing(), method="dense", **mask)
        for method in ("stepped", "tiled"):
            out = pde_attention(q, k, v, pde=Smoothing(), method=method, **mask)
            torch.testing.assert_close(out, truth, rtol=0, atol=1e-12)
    del Smoothing.reach
    with pytest.raises(ValueError, match="reach"):
        pde_attention(q, k, v, pde=Smoothing(), method="stepped")
    assert "reach" in explain(q, k, v, pde=Smoothing()).reason


def global_mask(tokens, window, count, causal):
    gap = torch.arange(tokens) - torch.arange(tokens)[:, None]
    first = torch.arange(tokens) < count
    allowed = (gap >= -window[0]) & ((gap <= window[1]) | (window[1] < 0)) | first | first[:, None]
    return allowed & (gap <= 0) if causal else allowed


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    ["advection_diffusion", "reaction_diffusion", None,
     *(pytest.param(x, marks=pytest.mark.slow) for x in ("diffusion", "wave", "split"))],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_windows_with_global_tokens_equal_dense(name, causal, monkeypatch):
    monkeypatch.setattr(windows, "ROWS", 32)
    torch.manual_seed(0)
    tokens = 150
    real = torch.arange(tokens) < torch.tensor([[tokens], [tokens - 20]])
    for count, window in (
        (1, (5, 5)),
        (4, (30, 20)),
        (3, (1, 0)),
        (0, (9, 9)),
        (200, (5, 5)),
        (2, (40, 1)),
        (2, (7, -1)),
    ):
        for padding in (None, real):
            leaves = [
                torch.randn(2, 2, tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
            ]
            pde, coefs = (None, ()) if name is None else equation(name, *coefficients(2))
            out = window_attention(
                *leaves,
                window=window,
                global_tokens=count,
                is_causal=causal,
                key_padding=padding,
                pde=pde,
            )
            truth = pde_attention(
                *leaves, global_mask(tokens, window, count, causal), key_padding=padding,
                pde=pde or "diffusion", steps=4 if pde else 0, method="dense",
            )  # fmt: skip
            grad = torch.randn_like(out)
            inputs = (*leaves, *coefs)
            found = [(o, *torch.autograd.grad(o, inputs, grad)) for o in (truth, out)]
            assert worst(*found) < 1e-12, (count, window, padding is None)


@pytest.mark.parametrize(
    ("tokens", "window", "count", "steps"),
    [
        (35, (20, 14), 4, 3),
        (38, (30, 12), 4, 5),
        (16, (2, 18), 1, 1),
        (20, (6, 20), 0, 5),
        (5, (3, 14), 0, 3),
    ],
)
def test_windows_that_reach_beyond_a_short_text(tokens, window, count, steps):
    for padding in (None, torch.arange(tokens)[None] < tokens - 3):
        leaves = [
            torch.randn(1, 2, tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
        ]
        pde = pdes.Wave(0.3)
        common = {"key_padding": padding, "pde": pde, "steps": steps}
        out = window_attention(*leaves, window=window, global_tokens=count, **common)
        mask = global_mask(tokens, window, count, False)
        truth = pde_attention(*leaves, mask, method="dense", **common)
        grad = torch.randn_like(out)
        assert worst(*((o, *torch.autograd.grad(o, leaves, grad)) for o in (truth, out))) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("method", ["stepped", "tiled"])
def test_compiled_code_gives_the_same(method):
    q, k, v = (torch.randn(1, 2, 100, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    alpha, _ = coefficients(2)
    name = "diffusion" if method == "stepped" else "reaction_diffusion"

    def f(q, k, v, alpha):
        pde = pdes.Diffusion(alpha) if name == "diffusion" else pdes.ReactionDiffusion(alpha, 0.1)
        return pde_attention(q, k, v, is_causal=True, pde=pde, steps=2, method=method)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    found = []
    for function in (f, compiled):
        out = function(q, k, v, alpha)
        found.append((out, *torch.autograd.grad(out, (q, k, v, alpha), torch.ones_like(out))))
    # Before torch 2.12 a compiled gradient has the scale in single precision.
    assert worst(*found) < (1e-12 if method == "stepped" or torch.__version__ >= "2.12" else 1e-7)


def test_start_comes_before_the_steps():
    u = torch.rand(20, dtype=torch.float64)
    pde = pdes.ReactionDiffusion(0.2, 0.3, split=True)
    reacted = pde.start(u, 4 * 0.5)
    torch.testing.assert_close(
        evolve(pde, u, Line(), 4, 0.5), take_steps(pdes.Diffusion(0.2), reacted, Line(), 4, 0.5)
    )


@pytest.mark.parametrize("name", [*pdes.BY_NAME, "split"])
def test_autocast_is_as_if_given_its_type(name):
    torch.manual_seed(0)
    pde, leaves = equation(name, *coefficients(2, torch.float32))
    for mask in ({}, {"is_causal": True}, {"window": (30, 5)}):
        q, k, v = (torch.randn(1, 2, 100, 8, requires_grad=True) for _ in range(3))
        truth = pde_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), pde=pde, **mask)
        with torch.autocast("cpu", torch.bfloat16):
            out = pde_attention(q, k, v, pde=pde, **mask)
        assert torch.equal(out, truth)
        for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v, *leaves)) for x in (out, truth))):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["stepped", "tiled"])
@pytest.mark.parametrize("name", [*pdes.BY_NAME, "split"])
def test_on_a_gpu_as_exact_as_dense(name, method, dtype):
    if method == "stepped" and name not in LINEAR:
        pytest.skip("stepped is for linear PDEs")
    tokens = 300
    for kind, mask in masks(tokens).items():
        if method == "stepped" and kind in ANYWHERE:
            continue
        torch.manual_seed(0)
        inputs = torch.randn(3, 2, 2, tokens, 64, dtype=torch.float64)
        grad = torch.randn(2, 2, tokens, 64, dtype=torch.float64)
        found = []
        for method_, dtype_ in (("dense", torch.float64), ("dense", dtype), (method, dtype)):
            q, k, v = (x.to("cuda", dtype_).requires_grad_() for x in inputs.to(dtype))
            given = {n: x.cuda() if torch.is_tensor(x) else x for n, x in mask.items()}
            pde, leaves = equation(name, *(c.cuda().detach().requires_grad_() for c in coefficients(2, max(dtype_, torch.float32, key=lambda d: d.itemsize))))  # fmt: skip
            out = pde_attention(q, k, v, pde=pde, steps=4, method=method_, **given)
            found.append((out, *torch.autograd.grad(out, (q, k, v, *leaves), grad.to("cuda", dtype_))))
        if dtype == torch.float64:
            assert worst(found[0], found[2]) < 1e-12, kind
            continue
        for n, (exact, b, a) in enumerate(zip(*found)):
            error, allowed = (((x.double() - exact) ** 2).mean().sqrt().item() for x in (a, b))
            floor = (
                32 * torch.finfo(dtype).eps * exact.abs().max().item() if n > 3 else 1e-6
            )  # few numbers
            assert error <= (2 if n == 0 else 3) * allowed + floor, (kind, n, error, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_causal_on_a_gpu_to_the_bit(dtype):
    torch.manual_seed(0)
    x = torch.randn(1, 2, 500, 64, device="cuda").to(dtype)
    for name in pdes.BY_NAME:
        assert_causal(
            lambda x, name=name: pde_attention(x, x.flip(-1), x * 0.5, is_causal=True, pde=name), x
        )


def test_diffusion_within_its_limit_keeps_the_map_from_turning_negative():
    torch.manual_seed(0)
    q, k = 4 * torch.randn(2, 2, 2, 60, 8, dtype=torch.float64)
    eye = torch.eye(60, dtype=torch.float64).expand(2, 2, 60, 60)
    for alpha in (0.1, 0.499):
        for kind, mask in masks(60).items():
            for method in ("dense", "tiled", *(() if kind in ANYWHERE else ("stepped",))):
                A = pde_attention(q, k, eye, pde=pdes.Diffusion(alpha), steps=8, method=method, **mask)
                assert A.min() >= -1e-15


def test_second_derivatives_raise_instead_of_being_wrong():
    q, k, v = (torch.randn(1, 1, 80, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for mask in ({"is_causal": True}, {"window": 5}):
        for method in ("stepped", "tiled"):
            out = pde_attention(q, k, v, pde="diffusion", method=method, **mask)
            with pytest.raises(RuntimeError, match="use method='dense'"):
                torch.autograd.grad(out.sum(), q, create_graph=True)
        out = pde_attention(q, k, v, pde="diffusion", method="dense", **mask)
        (slope,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
        assert torch.autograd.grad((slope**2).sum(), q)[0].any()


@pytest.mark.parametrize("axis", ["query", "both"])
def test_padding_does_not_flow_into_real_rows(axis):
    q, k, v = torch.randn(3, 2, 2, 90, 8, dtype=torch.float64)
    real = torch.arange(90) < torch.tensor([[90], [60]])
    documents = torch.arange(90).div(40, rounding_mode="floor").expand(2, -1)
    for mask in ({}, {"documents": documents}):
        found = []
        for change in (0, 1):
            padding = change * 5.0 * ~real[:, None, :, None]
            found.append(
                pde_attention(
                    q + padding,
                    k + padding,
                    v + padding,
                    key_padding=real,
                    axis=axis,
                    pde="diffusion",
                    **mask,
                )
            )
        assert torch.equal(found[0][1, :, :60], found[1][1, :, :60])


def test_explain_raises_where_the_call_would():
    q, k, v = torch.randn(3, 1, 2, 90, 8)
    with pytest.raises(TypeError):
        explain(q, k, v, pde="wave", is_casual=True)
    with pytest.raises(ValueError, match="not one of auto"):
        explain(q, k, v, pde="wave", method="flash")
    with pytest.raises(ValueError, match="use axis='key'"):
        explain(q, k, v, pde="wave", is_causal=True, axis="query")
    with pytest.raises(ValueError, match="call it"):
        pde_attention(q, k, v, pde=pdes.LearnedPDE("diffusion"))


@pytest.mark.parametrize("method", ["stepped", "tiled"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("place", range(3))
def test_rows_may_lie_in_memory_as_they_like(method, causal, place):
    torch.manual_seed(place)
    given = list(torch.randn(3, 2, 3, 128, 16, dtype=torch.float64))
    grad, pde = torch.randn(2, 3, 128, 16, dtype=torch.float64), pdes.Diffusion(0.1)

    def run(inputs, method):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = pde_attention(*inputs, is_causal=causal, pde=pde, method=method)
        return out, *torch.autograd.grad(out, inputs, grad)

    expected = run(given, "dense")
    turned = given[place].mT.contiguous().mT
    spaced = torch.stack((given[place], given[place]), -1).flatten(-2)[..., ::2]
    for strange in (turned, spaced):
        assert strange.stride(-1) > 1
        found = run([strange if i == place else x for i, x in enumerate(given)], method)
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_machine_code_gives_the_same_gradients():
    torch.manual_seed(0)
    alpha = torch.full((2, 1, 1), 0.1, requires_grad=True)
    inputs = [*torch.randn(3, 1, 2, 160, 16).unbind(0), alpha]
    inputs = [x.detach().requires_grad_() for x in inputs]
    grad = torch.randn(1, 2, 160, 16)

    def attend(query, key, value, alpha):
        return pde_attention(
            query, key, value, is_causal=True, pde=pdes.Diffusion(alpha), method="stepped"
        )

    plain = torch.autograd.grad(attend(*inputs), inputs, grad)
    compiled = torch.compile(attend, fullgraph=True)  # Inductor; "aot_eager" forgives what it does not
    for x, y in zip(torch.autograd.grad(compiled(*inputs), inputs, grad), plain):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 2])
def test_machine_code_gives_the_same_gradients_of_windows(count):
    """Two calls in one graph, with and without a PDE: their gradients are added up."""
    torch.manual_seed(count)
    alpha = torch.full((1, 1, 1), 0.1, requires_grad=True)
    inputs = [*torch.randn(3, 1, 2, 50, 16).unbind(0), alpha]
    inputs = [x.detach().requires_grad_() for x in inputs]
    grad = torch.randn(1, 2, 50, 16)
    options = {"window": (10, 0), "global_tokens": count, "is_causal": True, "steps": 2}

    def attend(query, key, value, alpha):
        found = window_attention(query, key, value, pde=pdes.Diffusion(alpha), **options)
        return found + window_attention(query, key, value, pde=None, **options)

    plain = torch.autograd.grad(attend(*inputs), inputs, grad)
    torch._dynamo.reset()  # a number of global tokens that changed would be a variable
    compiled = torch.compile(attend, fullgraph=True)
    for x, y in zip(torch.autograd.grad(compiled(*inputs), inputs, grad), plain):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_machine_code_does_not_overwrite_the_weights_of_global_tokens():
    """Inductor may write into a tensor that the backward pass saved while a view of it is still needed."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 130, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grad = torch.randn(2, 3, 130, 8, dtype=torch.float64)
    options = {"window": (7, 0), "global_tokens": 3, "is_causal": True, "steps": 3}

    def attend(query, key, value):
        return window_attention(query, key, value, pde=pdes.Diffusion(0.2), **options)

    plain = torch.autograd.grad(attend(*inputs), inputs, grad)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True)
    for x, y in zip(torch.autograd.grad(compiled(*inputs), inputs, grad), plain):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options", [{"pde": "reaction_diffusion"}, {"pde": "wave", "dropout_p": 0.3}], ids=str
)
def test_windows_with_global_tokens_and_padding_have_finite_gradients(options):
    real = torch.tensor([[False] * 4 + [True] * 4])
    leaves = [torch.randn(1, 1, 8, 4, requires_grad=True) for _ in range(3)]
    out = window_attention(
        *leaves, window=1, global_tokens=1, is_causal=True, key_padding=real, **options
    )
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("right", [0, 2, -1])
@pytest.mark.parametrize("name", [None, "wave", "reaction_diffusion"])
def test_windows_without_a_limit_on_the_left_have_global_tokens(name, right):
    q, k, v = torch.randn(3, 1, 2, 12, 4, dtype=torch.float64)
    found, truth = (
        window_attention(q, k, v, window=(left, right), global_tokens=2, pde=name) for left in (-1, 11)
    )
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_ids_of_documents_may_be_of_any_integer_type(dtype):
    q, k, v = torch.randn(3, 1, 1, 8, 4, dtype=torch.float64)
    real = torch.tensor([[True] * 3 + [False, True, True, True, False]])
    documents = torch.tensor([[0] * 4 + [127 if dtype == torch.int8 else 128] * 4])
    options = {"key_padding": real, "axis": "query", "pde": "diffusion"}
    truth = pde_attention(q, k, v, documents=documents, **options)
    assert torch.equal(pde_attention(q, k, v, documents=documents.to(dtype), **options), truth)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("mask", [{"is_causal": True}, {"window": (3, 0)}, {}], ids=str)
def test_scales_that_are_not_positive(scale, mask):
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 80, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, 2, 80, 8, dtype=torch.float64)

    def found(**options):
        out = pde_attention(*leaves, scale=scale, **mask, **options)
        return out, *torch.autograd.grad(out, leaves, grad)

    for name, methods in (
        ("diffusion", ("auto", "stepped", "tiled")),
        ("reaction_diffusion", ("tiled",)),
    ):
        truth = found(pde=name, method="dense")
        for method in methods:
            assert worst(truth, found(pde=name, method=method)) < 1e-12


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_windows_with_scales_that_are_not_positive(scale):
    q, k, v = torch.randn(3, 1, 2, 80, 8, dtype=torch.float64)
    for causal in (True, False):
        out = window_attention(
            q, k, v, window=20, global_tokens=1, is_causal=causal, scale=scale, pde="diffusion"
        )
        mask = global_mask(80, (20, 0 if causal else 20), 1, causal)
        truth = pde_attention(q, k, v, mask, scale=scale, pde="diffusion", method="dense")
        torch.testing.assert_close(out, truth)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_texts_in_parts_with_scales_that_are_not_positive(scale):
    q, k, v = torch.randn(3, 1, 2, 80, 8, dtype=torch.float64)
    out = context_parallel_attention(q, k, v, "diffusion", is_causal=True, scale=scale)
    truth = pde_attention(q, k, v, is_causal=True, scale=scale, pde="diffusion", method="dense")
    torch.testing.assert_close(out, truth)


def far_biases(tokens):
    """Rows all of whose keys carry one large number; as masks, and what goes with them."""
    padding = torch.zeros(2, 1, 1, tokens)
    padding[0, ..., :5] = -8e3  # not yet a wall
    rows = torch.zeros(tokens, tokens)
    rows[3], rows[4], rows[6, :7] = -8e3, 1e9, torch.linspace(1e9, 1e9 + 1e4, 7)
    torn = rows.masked_fill(torch.ones(tokens, tokens).bernoulli(0.7).triu(1) > 0, -torch.inf)
    documents = torch.arange(tokens).div(3, rounding_mode="floor").expand(2, -1)
    real = torch.arange(tokens).expand(2, -1) >= torch.tensor([[2], [0]])
    return {
        "padding, causal": (padding, {"is_causal": True}),
        "padding, window": (padding, {"window": (2, 1)}),
        "padding, documents": (padding, {"documents": documents}),
        "padding twice": (padding, {"is_causal": True, "key_padding": real}),
        "one row": (torch.full((1, tokens), -8e3), {}),
        "one row, query axis": (torch.full((1, tokens), -8e3), {"axis": "query"}),
        "rows": (rows, {"is_causal": True}),
        "rows, per text": (rows, {"is_causal": True, "key_padding": real}),
        "torn": (torn, {}),
    }  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", far_biases(9))
def test_a_large_bias_of_a_whole_row_does_not_matter(kind):
    torch.manual_seed(0)
    for tokens in (9, 600):
        mask, options = far_biases(tokens)[kind]
        q, k, v = torch.randn(3, 2, 2, tokens, 4)
        v = torch.cat((v, torch.ones(2, 2, tokens, 1)), -1)
        exact = (x.double() for x in (q, k, v, mask))
        truth = pde_attention(*exact, pde="diffusion", method="dense", **options)
        for method in ("auto", "dense", "stepped", "tiled"):
            if method == "tiled" and "axis" in options:
                continue
            if method == "stepped" and kind == "torn":
                continue
            out = pde_attention(q, k, v, mask, pde="diffusion", method=method, **options)
            assert (out - truth).abs().max() < 1e-5, (tokens, method)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["padding, causal", *(pytest.param(x, marks=pytest.mark.slow) for x in ("padding, window", "rows"))],
)
def test_large_biases_compiled_whole(kind):
    torch.manual_seed(0)
    mask, options = far_biases(70)[kind]
    q, k, v = torch.randn(3, 2, 2, 70, 4)

    method = "tiled" if kind == "rows" else "stepped"

    def attend(q, k, v, mask):
        return pde_attention(q, k, v, mask, pde="diffusion", method=method, **options)

    whole = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(q, k, v, mask), attend(q, k, v, mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [{}, {"is_causal": True}], ids=str)
def test_a_float32_bias_is_not_rounded_to_half_precision(dtype, mask):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 80, 8).to(dtype)
    bias = 300 + torch.randn(80)
    exact = (x.double() for x in (q, k, v, bias))
    truth = pde_attention(*exact, pde="diffusion", method="dense", **mask)
    for method in ("dense", "stepped", "tiled"):
        out = pde_attention(q, k, v, bias, pde="diffusion", method=method, **mask)
        assert (out - truth).abs().max() < 4 * torch.finfo(dtype).eps, method
