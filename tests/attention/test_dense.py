"""Algorithm 1 against a literal loop and against SDPA; walls, masks, causality, errors."""

import dataclasses
import math
import warnings

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attractor.attention import CausalityError, assert_causal, pde_attention, pdes
from attractor.attention.call import _warned
from attractor.attention.diagnostics import trace
from attractor.attention.engines.dense import dense

PDES = [pdes.Diffusion(0.2), pdes.Wave(0.4), pdes.ReactionDiffusion(0.2, 0.1),
        pdes.ReactionDiffusion(0.2, 0.1, split=True), pdes.AdvectionDiffusion(0.2, 0.1)]  # fmt: skip
every_pde = pytest.mark.parametrize("pde", PDES, ids=repr)


def qkv(tokens=7, batch=2, heads=2, keys=None, dim=4, dtype=torch.float64):
    shape = (batch, heads, tokens, dim)
    key_shape = (batch, heads, keys or tokens, dim)
    return [torch.randn(s, dtype=torch.float64).to(dtype) for s in (shape, key_shape, key_shape)]


def kinds(n=7):
    """Every kind of mask: arguments of pde_attention, and the same as one boolean matrix."""
    below = torch.ones(n, n, dtype=torch.bool).tril()
    torn = (torch.rand(2, 2, n, n) > 0.3) | torch.eye(n, dtype=torch.bool)
    real = torch.arange(n) < torch.tensor([[n], [n - 3]])
    documents = torch.tensor([[0] * 3 + [1] * (n - 3), [5] * n])
    own = (documents[:, :, None] == documents[:, None])[:, None]
    bias = torch.randn(2, 1, n, n, dtype=torch.float64)
    gap = torch.arange(n) - torch.arange(n)[:, None]
    everywhere = torch.ones(n, n, dtype=torch.bool)
    return {
        "full": ({}, everywhere, 0),
        "causal": ({"is_causal": True}, below, 0),
        "bool": ({"attn_mask": torn}, torn, 0),
        "bias": ({"attn_mask": bias}, everywhere, bias),
        "-inf": ({"attn_mask": bias.masked_fill(~torn, -math.inf)}, torn, bias),
        "finfo.min": ({"attn_mask": bias.masked_fill(~torn, torch.finfo(torch.float64).min)}, torn, bias),
        "float16's min": ({"attn_mask": bias.masked_fill(~torn, -65504.0)}, torn, bias),
        "key padding": ({"key_padding": real}, real[:, None, None], 0),
        "documents": ({"documents": documents, "is_causal": True}, own & below, 0),
        "window": ({"window": 2}, gap.abs() <= 2, 0),
        "left window": ({"window": (2, 0)}, (gap >= -2) & (gap <= 0), 0),
        "open window": ({"window": (-1, 1)}, gap <= 1, 0),
        "all": ({"attn_mask": torn, "key_padding": real, "is_causal": True},
                torn & real[:, None, None] & below, 0),
    }  # fmt: skip


every_kind = pytest.mark.parametrize("kind", kinds())


def literal(q, k, v, allowed, bias, pde, steps, dt):
    """Row by row, key by key, with Python's numbers."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    allowed = allowed.expand(*q.shape[:-1], k.shape[-2])
    bias = torch.as_tensor(bias, dtype=torch.float64).expand(allowed.shape)
    for *lead, i in torch.cartesian_prod(*(torch.arange(s) for s in q.shape[:-1])).tolist():
        b, h = lead
        ok, keys = allowed[b, h, i].tolist(), range(k.shape[-2])
        score = [
            (q[b, h, i] @ k[b, h, j]).item() / math.sqrt(q.shape[-1]) + bias[b, h, i, j].item()
            for j in keys
        ]
        if not any(ok):
            continue
        total = sum(math.exp(score[j]) for j in keys if ok[j])
        a = [math.exp(score[j]) / total if ok[j] else 0.0 for j in keys]
        velocity = [0.0 for _ in keys]
        if getattr(pde, "split", False):
            r = pde.beta * dt * steps
            a = [x / (x + (1 - x) * math.exp(-r)) for x in a]
        for _ in range(steps):
            near = lambda j, ok=ok: [m for m in (j - 1, j + 1) if 0 <= m < len(ok) and ok[m] and ok[j]]
            spread = [sum(a[m] - a[j] for m in near(j)) for j in keys]
            drift = [sum((m - j) * (a[m] + a[j]) / 2 for m in near(j)) for j in keys]
            if isinstance(pde, pdes.Wave):
                velocity = [w + dt * pde.c**2 * s for w, s in zip(velocity, spread)]
                a = [x + dt * w for x, w in zip(a, velocity)]
            elif isinstance(pde, pdes.AdvectionDiffusion):
                a = [x + dt * (pde.alpha * s + pde.beta * d) for x, s, d in zip(a, spread, drift)]
            elif isinstance(pde, pdes.ReactionDiffusion) and not pde.split:
                a = [x + dt * (pde.alpha * s + pde.beta * x * (1 - x)) for x, s in zip(a, spread)]
            else:
                a = [x + dt * pde.alpha * s for x, s in zip(a, spread)]
        out[b, h, i] = sum(a[j] * v[b, h, j] for j in keys)
    return out


@every_pde
@every_kind
def test_dense_is_the_literal_algorithm(pde, kind):
    options, allowed, bias = kinds()[kind]
    q, k, v = qkv()
    found = pde_attention(q, k, v, **options, pde=pde, steps=3, dt=0.9)
    torch.testing.assert_close(
        found, literal(q, k, v, allowed, bias, pde, 3, 0.9), rtol=1e-12, atol=1e-13
    )


@every_kind
def test_no_steps_are_sdpa(kind):
    options, allowed, bias = kinds()[kind]
    q, k, v = qkv()
    found = pde_attention(q, k, v, **options, pde="wave", steps=0)
    mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -math.inf) + bias
    torch.testing.assert_close(found, sdpa(q, k, v, mask), rtol=1e-12, atol=1e-13)
    if not {"key_padding", "documents", "window"} & options.keys() and kind not in (
        "finfo.min",
        "float16's min",
    ):
        torch.testing.assert_close(found, sdpa(q, k, v, **options), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("queries", "keys"), [(5, 8), (8, 5), (1, 1), (1, 6), (2, 1)])
def test_no_steps_are_sdpa_for_other_lengths_and_scales(queries, keys):
    q, k, v = qkv(queries, keys=keys)
    for causal in (False, True):
        found = pde_attention(q, k, v[..., :3], None, 0.0, causal, 0.3, pde="diffusion", steps=0)
        torch.testing.assert_close(found, sdpa(q, k, v[..., :3], None, 0.0, causal, scale=0.3))
        pde_attention(q, k, v, is_causal=causal, pde="diffusion", steps=3)


@every_pde
@every_kind
def test_rows_of_linear_maps_sum_to_one(pde, kind):
    options, _, _ = kinds()[kind]
    _, A = dense(*qkv(), **options, pde=pde, steps=4, dt=1.0)
    assert A.shape == (2, 2, 7, 7)
    if pde.linear:
        assert (A.sum(-1) - 1).abs().max() < 1e-12


@pytest.mark.sampled(24)
@every_pde
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"window": (3, 0)}, {"attn_mask": torch.ones(9, 9).tril().bool()}]
)
def test_exact_causality(pde, dtype, options):
    q, k, v = qkv(9, dtype=dtype)
    before = pde_attention(q, k, v, **options, pde=pde)
    for i in range(8):
        late = [
            torch.cat((x[..., : i + 1, :], 3 * torch.randn_like(x[..., i + 1 :, :])), -2)
            for x in (q, k, v)
        ]
        after = pde_attention(*late, **options, pde=pde)
        assert torch.equal(before[..., : i + 1, :], after[..., : i + 1, :])
        assert not torch.equal(before[..., i + 1, :], after[..., i + 1, :])


@every_pde
@pytest.mark.parametrize("walls", ["sequence", "periodic"])
def test_maps_without_walls_leak_and_are_caught(pde, walls):
    attend = lambda x, walls: pde_attention(x, x, x, is_causal=True, pde=pde, steps=2, walls=walls)
    x = qkv(9)[0]
    assert_causal(lambda x: attend(x, "mask"), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CausalityError, match="output 0 sees its future"):
            assert_causal(lambda x: attend(x, walls), x)


@pytest.mark.parametrize("walls", ["sequence", "periodic"])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.ones(7, 7).tril().bool()}])
def test_leaking_walls_warn_once(walls, options):
    _warned.clear()
    with pytest.warns(UserWarning, match="lets attention flow through the causal mask"):
        pde_attention(*qkv(), **options, pde="diffusion", walls=walls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pde_attention(*qkv(), **options, pde="diffusion", walls=walls)
        _warned.clear()
        pde_attention(*qkv(), pde="diffusion", walls=walls, window=2)  # not causal: nothing to warn of


def test_masks_may_be_mapped_over():
    q, k, v = qkv()
    bias = torch.randn(2, 7, 7, dtype=torch.float64)

    def attend(q, k, v, bias):
        return pde_attention(q, k, v, bias, pde="diffusion", method="dense")

    torch.testing.assert_close(torch.vmap(attend)(q, k, v, bias), attend(q, k, v, bias[:, None]))


def test_walls_of_the_sequence_and_none():
    q, k, v = qkv()
    A = (q @ k.mT / 2).softmax(-1)
    ends = torch.eye(7, dtype=torch.float64).roll(1, 0) + torch.eye(7, dtype=torch.float64).roll(-1, 0)
    for walls, corner in (("sequence", 0.0), ("periodic", 1.0)):
        stencil = ends.clone()
        stencil[0, -1] = stencil[-1, 0] = corner
        M = torch.eye(7) + 0.2 * (stencil - stencil.sum(0).diag())
        found = pde_attention(q, k, v, pde=pdes.Diffusion(0.2), steps=3, walls=walls)
        torch.testing.assert_close(found, A @ M.matrix_power(3) @ v, rtol=1e-12, atol=1e-13)


@every_pde
def test_query_axis_is_the_key_axis_of_the_transposed_map(pde):
    q, k, v = qkv(6, keys=5)
    padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    _, A = dense(q, k, v, key_padding=padding, pde=pde, steps=0, dt=1.0)
    _, moved = dense(q, k, v, key_padding=padding, pde=pde, steps=3, dt=1.0, axis="query")
    torch.testing.assert_close(moved.mT, pdes.evolve(pde, A.mT, pdes.Line(), 3, 1.0))
    if pde.linear:
        torch.testing.assert_close(moved.sum(-2), A.sum(-2))
        _, both = dense(q, k, v, key_padding=padding, pde=pde, steps=3, dt=1.0, axis="both")
        torch.testing.assert_close(both.sum((-2, -1)), A.sum((-2, -1)))
        assert both[1, :, :, 3:].abs().max() == 0


def test_both_axes_step_both_at_once():
    q, k, v = qkv()
    _, A = dense(q, k, v, pde=pdes.Diffusion(0.1), steps=0, dt=1.0)
    _, once = dense(q, k, v, pde=pdes.Diffusion(0.1), steps=1, dt=1.0, axis="both")
    _, keys = dense(q, k, v, pde=pdes.Diffusion(0.1), steps=1, dt=1.0)
    _, queries = dense(q, k, v, pde=pdes.Diffusion(0.1), steps=1, dt=1.0, axis="query")
    torch.testing.assert_close(once, keys + queries - A)


@pytest.mark.parametrize("axis", ["query", "both"])
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"window": (2, 0)}, {"attn_mask": torch.ones(7, 7).tril().bool()}]
)
def test_other_axes_refuse_causal_attention(axis, options):
    with pytest.raises(ValueError, match="a causal model would see its future; use axis='key'"):
        pde_attention(*qkv(), **options, pde="diffusion", axis=axis)


@every_pde
@pytest.mark.parametrize("shared", [2, 4])
def test_shared_heads_are_repeated_heads(pde, shared):
    q, _, _ = qkv(heads=4)
    _, k, v = qkv(heads=4 // shared)
    found = pde_attention(q, k, v, is_causal=True, enable_gqa=True, pde=pde)
    repeated = (x.repeat_interleave(shared, 1) for x in (k, v))
    torch.testing.assert_close(found, pde_attention(q, *repeated, is_causal=True, pde=pde))
    torch.testing.assert_close(
        pde_attention(q, k, v, enable_gqa=True, pde=pde, steps=0), sdpa(q, k, v, enable_gqa=True)
    )


@every_pde
def test_padded_tokens_are_ignored_entirely(pde):
    q, k, v = qkv()
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    found = pde_attention(q, k, v, key_padding=real, pde=pde)
    other_k, other_v = (torch.where(real[:, None, :, None], x, 7 * torch.randn_like(x)) for x in (k, v))
    assert torch.equal(found, pde_attention(q, other_k, other_v, key_padding=real, pde=pde))
    short = pde_attention(q[1:], k[1:, :, :4], v[1:, :, :4], pde=pde)
    torch.testing.assert_close(found[1:], short)


@every_pde
@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_are_separate_calls(pde, causal):
    q, k, v = qkv(8, batch=1)
    found = pde_attention(
        q, k, v, is_causal=causal, documents=torch.tensor([[3] * 5 + [8] * 3]), pde=pde
    )
    parts = [slice(0, 5), slice(5, 8)]
    apart = [pde_attention(q[:, :, p], k[:, :, p], v[:, :, p], is_causal=causal, pde=pde) for p in parts]
    torch.testing.assert_close(found, torch.cat(apart, 2))


@every_pde
def test_rows_without_keys_are_zero_and_so_are_their_gradients(pde):
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = torch.ones(7, 7).tril().bool()
    mask[3] = False
    out = pde_attention(q, k, v, mask, pde=pde)
    assert torch.equal(out[..., 3, :], torch.zeros(2, 2, 4))
    assert out.isfinite().all()
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][..., 3, :].abs().max() == 0


def test_dropout_acts_on_the_first_map():
    q, k, v = qkv()
    torch.manual_seed(5)
    _, first = dense(q, k, v, dropout_p=0.5, pde=PDES[0], steps=0, dt=1.0)
    torch.manual_seed(5)
    _, moved = dense(q, k, v, dropout_p=0.5, pde=PDES[0], steps=3, dt=1.0)
    assert 0.2 < (first == 0).double().mean() < 0.8
    torch.testing.assert_close(moved, pdes.evolve(PDES[0], first, pdes.Line(), 3, 1.0))


@every_pde
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_steps_in_float32(pde, dtype):
    q, k, v = qkv(16, dtype=dtype)
    out, A = dense(q, k, v, is_causal=True, pde=pde, steps=4, dt=1.0)
    assert out.dtype == dtype
    assert A.dtype == torch.float32
    truth = pde_attention(q.double(), k.double(), v.double(), is_causal=True, pde=pde)
    plain = sdpa(q, k, v, is_causal=True).double() - sdpa(
        q.double(), k.double(), v.double(), is_causal=True
    )
    assert (out.double() - truth).abs().max() < 4 * plain.abs().max() + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_are_not_rounded_to_half_precision(dtype):
    torch.manual_seed(0)
    q, k, v = (x.to(dtype) for x in (8 * torch.randn(1, 4, 1, 128), *torch.randn(2, 1, 4, 200, 128)))
    _, A = dense(q, k, v, pde=pdes.Diffusion(), steps=0, dt=1.0)
    truth = (q.double() @ k.double().mT / 128**0.5).softmax(-1)
    assert (A - truth).abs().max() < 1e-5


@every_pde
def test_gradients_with_a_bias_and_coefficients_of_heads(pde):
    q, k, v = (x.requires_grad_() for x in qkv(3, batch=1, dim=2))
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64).requires_grad_()
    names = [n for n in ("alpha", "beta", "c") if hasattr(pde, n)]
    more = {"split": pde.split} if hasattr(pde, "split") else {}
    tensors = [
        (torch.tensor([1.0, 0.7]).double() * getattr(pde, n))[:, None, None].requires_grad_()
        for n in names
    ]

    def run(q, k, v, bias, *cs):
        heads = type(pde)(**dict(zip(names, cs)), **more)
        return pde_attention(q, k, v, bias, is_causal=True, pde=heads, steps=2)

    assert torch.autograd.gradcheck(run, (q, k, v, bias, *tensors))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pde", "kind"),
    [(PDES[0], "causal"),
     *(pytest.param(pde, "causal", marks=pytest.mark.slow) for pde in PDES[1:]),
     *(pytest.param(PDES[0], kind, marks=pytest.mark.slow)
       for kind in ("-inf", "key padding", "documents", "window"))],
    ids=repr,
)  # fmt: skip
def test_attention_can_be_compiled_whole(pde, kind):
    options, _, _ = kinds()[kind]
    q, k, v = qkv()
    attend = lambda q, k, v: pde_attention(q, k, v, **options, pde=pde)
    whole = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(q, k, v), attend(q, k, v))


def test_fewer_dimensions():
    q, k, v = qkv()
    full = pde_attention(q, k, v, is_causal=True, pde="diffusion")
    torch.testing.assert_close(pde_attention(q[0], k[0], v[0], is_causal=True, pde="diffusion"), full[0])
    torch.testing.assert_close(
        pde_attention(q[0, 0], k[0, 0], v[0, 0], is_causal=True, pde="diffusion"), full[0, 0]
    )


@every_pde
def test_a_map_without_heads_keeps_its_dimensions(pde):
    q, k, v = (x[0, 0] for x in qkv())
    coefficients = {
        field.name: torch.full((1, 1, 1), getattr(pde, field.name), dtype=q.dtype)
        for field in dataclasses.fields(pde)
        if type(getattr(pde, field.name)) is float
    }
    learnt = dataclasses.replace(pde, **coefficients)
    out = pde_attention(q, k, v, pde=learnt, method="dense")
    assert torch.equal(out, pde_attention(q, k, v, pde=pde, method="dense"))
    assert trace(q, k, pde=learnt).maps.shape == (5, 7, 7)


class Smoothing:
    """A PDE of one's own."""

    linear = True

    def max_dt(self, axis="key"):
        return 6.25

    def check(self, dt, axis="key"):
        assert dt <= self.max_dt(axis)

    def step(self, u, velocity, line, dt):
        return u - dt * 0.02 * line.laplacian(line.laplacian(u)), velocity


def test_a_pde_of_ones_own():
    q, k, v = qkv()
    _, A = dense(q, k, v, is_causal=True, pde=Smoothing(), steps=4, dt=2.0)
    assert torch.equal(A, A.tril())
    torch.testing.assert_close(A.sum(-1), torch.ones(2, 2, 7, dtype=torch.float64))
    assert_causal(lambda x: pde_attention(x, x, x, is_causal=True, pde=Smoothing(), dt=2.0), q)
    stepped = pdes.evolve(Smoothing(), v, pdes.Line(-2).adjoint, 4, 2.0)
    torch.testing.assert_close(pde_attention(q, k, v, pde=Smoothing(), dt=2.0), sdpa(q, k, stepped))


@every_pde
def test_linear_pdes_may_step_the_values_instead(pde):
    q, k, v = qkv()
    stepped = pdes.evolve(pde, v, pdes.Line(-2).adjoint, 4, 1.0)
    gap = (pde_attention(q, k, v, pde=pde) - sdpa(q, k, stepped)).abs().max()
    assert (gap < 1e-14) == pde.linear


WRONG = {
    "no PDE is called 'heat'": {"pde": "heat"},
    "is not an equation; pass one such as": {"pde": pdes.Diffusion},
    "dt = 7 is unstable": {"dt": 7.0},
    "dt = -1 must be": {"dt": -1},
    "steps = -1 must be a whole number": {"steps": -1},
    "steps = 2.0 must be": {"steps": 2.0},
    "axis 'keys' is not one of key": {"axis": "keys"},
    "walls 'none' is not one of mask": {"walls": "none"},
    "method 'flash' is not one of auto, dense": {"method": "flash"},
    "dropout_p = 2 is not a probability": {"dropout_p": 2},
    "pass bools, True = attend": {"attn_mask": torch.ones(7, 7, dtype=torch.int64)},
    r"attn_mask \[6, 7\] does not broadcast to \[2, 2, 7, 7\]": {"attn_mask": torch.ones(6, 7).bool()},
    r"key_padding \[7, 2\] must be \[2, 7\]": {"key_padding": torch.ones(7, 2).bool()},
    "pass bools, True = a valid token": {"key_padding": torch.ones(2, 7)},
    "pass integer ids": {"documents": torch.ones(2, 7)},
    r"window \(1, 2, 3\) must be": {"window": (1, 2, 3)},
    "window -2 must be": {"window": -2},
    r"the numbers of heads differ; pass enable_gqa": {"key": torch.rand(2, 3, 7, 4), "value": torch.rand(2, 3, 7, 4)},
    "must divide query's": {"key": torch.rand(2, 3, 7, 4), "value": torch.rand(2, 3, 7, 4), "enable_gqa": True},
    "last dimension of query and key": {"key": torch.rand(2, 2, 7, 3)},
    "same number of tokens": {"key": torch.rand(2, 2, 6, 4)},
    "dimensions before the heads": {"query": torch.rand(3, 2, 7, 4)},
    r"\[\*batch, heads, tokens, dim\]": {"query": torch.rand(3, 7, 4)},
    "one floating-point type": {"query": torch.rand(2, 2, 7, 4).double()},
    "as many queries as keys": {"query": torch.rand(2, 2, 5, 4), "documents": torch.zeros(2, 7).long()},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_errors_teach(message):
    right = {name: torch.rand(2, 2, 7, 4) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=message):
        pde_attention(**{**right, "pde": "diffusion", **WRONG[message]})
    with pytest.raises(ValueError, match="needs a query of"):
        pde_attention(*torch.rand(3, 2, 7, 4), pde="diffusion", key_padding=torch.ones(2, 7).bool())
