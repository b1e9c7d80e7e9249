"""Performer attention against its own dense form and against softmax; exact causality; linear memory."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attractor.attention import assert_causal, pdes
from attractor.attention.models import LanguageModel
from attractor.attention.performer import (
    PerformerAttention,
    RandomFeatures,
    performer_attention,
    performer_dense,
)

LINEAR = {
    "plain": None,
    "diffusion": pdes.Diffusion(0.2),
    "wave": pdes.Wave(0.4),
    "advection": pdes.AdvectionDiffusion(0.2, 0.1),
}
every_pde = pytest.mark.parametrize("pde", LINEAR)


class Smoothing:
    """A PDE of one's own that looks two keys away."""

    linear, reach = True, 2

    def check(self, dt, axis="key"):
        assert dt <= 1

    def step(self, u, velocity, line, dt):
        return u - dt * 0.02 * line.laplacian(line.laplacian(u)), velocity


def qkv(tokens=40, batch=2, heads=2, keys=None, dim=4, key_heads=None, dtype=torch.float64, size=1.0):
    key_shape = (batch, key_heads or heads, keys or tokens, dim)
    shapes = [(batch, heads, tokens, dim), key_shape, (*key_shape[:-1], 3)]
    return [(size * torch.randn(s, dtype=torch.float64)).to(dtype) for s in shapes]


def padding(kind, keys):
    place = torch.arange(keys)
    left, right = place >= torch.tensor([[0], [5]]), place < torch.tensor([[keys - 3], [keys]])
    return {"left": left, "right": right, "both": left & right & (place != 17)}.get(kind)


def close(found, expected):
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1e-3)


@pytest.mark.sampled(40)
@every_pde
@pytest.mark.parametrize("padded", [None, "left", "both"])
@pytest.mark.parametrize(("causal", "tokens", "keys", "chunk"), [
    (False, 40, 40, 8), (False, 9, 30, 8), (True, 40, 40, 8), (True, 40, 40, 128), (True, 41, 41, 16),
    (True, 30, 40, 8), (True, 40, 30, 8),
])  # fmt: skip
def test_equal_to_the_dense_form(pde, padded, causal, tokens, keys, chunk):
    q, k, v = (x.requires_grad_() for x in qkv(tokens, heads=4, keys=keys, key_heads=2))
    names = [n for n in ("alpha", "beta", "c") if hasattr(LINEAR[pde], n)]
    each = torch.tensor([1.0, 0.7, 0.2, 0.9], dtype=torch.float64)[:, None, None]
    tensors = [(each * getattr(LINEAR[pde], n)).requires_grad_() for n in names]
    equation = type(LINEAR[pde])(**dict(zip(names, tensors))) if names else None
    features = RandomFeatures(4, 10).double()
    options = dict(
        features=features,
        is_causal=causal,
        key_padding=padding(padded, keys),
        enable_gqa=True,
        pde=equation,
    )
    found = performer_attention(q, k, v, **options, chunk=chunk)
    truth, A = performer_dense(q, k, v, **options)
    close(found, truth)
    some = torch.ones(tokens, keys).tril().bool() if causal else torch.ones(tokens, keys).bool()
    if padded:
        some = some & padding(padded, keys)[:, None, None]
    torch.testing.assert_close(A.sum(-1), some.any(-1).expand(2, 4, tokens).double(), rtol=0, atol=1e-12)
    upstream = torch.randn_like(truth)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v, *tensors), upstream) for x in (found, truth))):
        close(a, b)


@pytest.mark.parametrize("steps", [0, 1, 8])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 33])
def test_any_number_of_steps_and_tokens(steps, tokens):
    q, k, v = qkv(tokens)
    features = torch.randn(2, 4, 9, dtype=torch.float64)  # directions of each head
    for causal in (False, True):
        for pde in (*LINEAR.values(), Smoothing()):
            options = dict(features=features, is_causal=causal, pde=pde, steps=steps, scale=0.3)
            close(
                performer_attention(q, k, v, **options, chunk=4), performer_dense(q, k, v, **options)[0]
            )


def test_fewer_dimensions():
    q, k, v = qkv()
    features = RandomFeatures(4, 8)
    full = performer_attention(q, k, v, features=features, is_causal=True, pde="wave")
    one = performer_attention(q[1, 0], k[1, 0], v[1, 0], features=features, is_causal=True, pde="wave")
    close(one, full[1, 0])


@every_pde
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_exact_causality(pde, dtype):
    features = RandomFeatures(4, 10)
    q, k, v = qkv(21, dtype=dtype)
    attend = lambda q, k, v: performer_attention(
        q, k, v, features=features, is_causal=True, pde=LINEAR[pde], chunk=8
    )
    before = attend(q, k, v)
    for i in (0, 1, 3, 6, 7, 8, 12, 15, 16, 19):
        size = 30 if i % 2 else 1  # a future that dwarfs the past, or not
        late = [
            torch.cat((x[..., : i + 1, :], size * torch.randn_like(x[..., i + 1 :, :])), -2)
            for x in (q, k, v)
        ]
        after = attend(*late)
        assert torch.equal(before[..., : i + 1, :], after[..., : i + 1, :])
        assert not torch.equal(before[..., i + 1, :], after[..., i + 1, :])


@every_pde
def test_gradients_do_not_reach_the_future(pde):
    features = RandomFeatures(4, 10)
    assert_causal(
        lambda x: performer_attention(
            x, x, x, features=features, is_causal=True, pde=LINEAR[pde], steps=3, chunk=4
        ),
        qkv(14)[0],
    )


@pytest.mark.parametrize("causal", [False, True])
def test_error_against_softmax_falls_with_the_root_of_the_features(causal):
    q, k, v = (x[0] for x in qkv(64, dim=8, heads=1, batch=1))
    q, k = 0.5 * q, 0.5 * k  # the variance grows exponentially with their squares
    truth = sdpa(q[None], k[None], v[None], is_causal=causal)
    errors = []
    for count in (64, 1024):
        q16, k16, v16 = (x.expand(1, 16, *x.shape[1:]) for x in (q, k, v))
        features = RandomFeatures(8, count, heads=16).double()  # 16 draws at once
        found = performer_attention(q16, k16, v16, features=features, is_causal=causal)
        errors.append((found - truth).square().mean().sqrt().item())
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)
    assert errors[1] < 0.1


def test_features_are_unbiased_and_orthogonality_helps():
    x, y = 0.3 * torch.randn(2, 50, 8).double()
    kernel = (x * y).sum(-1).exp()
    spread = {}
    for orthogonal in (True, False):
        phi = RandomFeatures(8, 16, heads=4000, orthogonal=orthogonal).double()
        found = (phi(x[None]) * phi(y[None])).sum(-1)
        torch.testing.assert_close(found.mean(0), kernel, rtol=0.05, atol=0)
        spread[orthogonal] = found.var(0).mean()
    assert spread[True] < 0.9 * spread[False]
    directions = RandomFeatures(8, 20).projection.double()
    gram = directions[:, :8].T @ directions[:, :8]
    torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [3.0, 12.0])
def test_large_queries_and_keys_stay_finite(causal, dtype, size):
    """Keys so long that every feature underflows in float32, unless it has a scale of its own."""
    q, k, v = qkv(50, dtype=torch.float64)
    q, k = size * q, size * k + 4 * size  # a common offset, as trained keys have
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    options = dict(features=RandomFeatures(4, 32), is_causal=causal, pde="diffusion")
    out = performer_attention(q, k, v, **options, chunk=8)
    assert out.isfinite().all()
    assert (out.abs() <= v.abs().max() * 1.01).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), (q, k, v)))
    truth, _ = performer_dense(*(x.double() for x in (q, k, v)), **options)
    if size == 3.0 and dtype == torch.float32:
        torch.testing.assert_close(out.double(), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_is_as_exact_as_the_dense_form(dtype, causal):
    q, k, v = (x.requires_grad_() for x in qkv(64, dtype=dtype))
    options = dict(features=RandomFeatures(4, 32), is_causal=causal, pde="diffusion")
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth, _ = performer_dense(*wide, **options)
    dense, _ = performer_dense(q, k, v, **options)
    found = performer_attention(q, k, v, **options, chunk=16)
    assert found.dtype == dtype
    error = lambda x: (x.double() - truth).abs().max()
    assert error(found) <= 2 * error(dense)
    upstream = torch.randn_like(truth)
    exact = torch.autograd.grad(truth, wide, upstream)
    slopes = [torch.autograd.grad(x, (q, k, v), upstream.to(dtype)) for x in (found, dense)]
    for a, b, c in zip(*slopes, exact):
        assert (a.double() - c).abs().max() <= 3 * (b.double() - c).abs().max()


def saved(tokens, causal):
    """Bytes kept for the backward, and the largest tensor made."""
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    q, k, v = (x.requires_grad_() for x in qkv(tokens, dim=16, batch=1, dtype=torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = performer_attention(
            q, k, v, features=RandomFeatures(16, 32), is_causal=causal, pde="diffusion"
        )
    out.sum().backward()
    return sum(held.values())


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_the_tokens(causal):
    short, long = saved(2048, causal), saved(8192, causal)
    assert long / short == pytest.approx(4, rel=0.05)
    assert long < 8192 * 8192  # of a map of one head it would be four times as much


def test_pdes_that_are_not_linear_need_the_map():
    q, k, v = qkv()
    options = dict(features=RandomFeatures(4, 8), is_causal=True, pde="reaction_diffusion")
    with pytest.raises(
        ValueError, match=r"is not linear, so its map has to be built .* use performer_dense"
    ):
        performer_attention(q, k, v, **options)
    out, A = performer_dense(q, k, v, **options)
    assert torch.equal(A, A.tril())
    assert (A.sum(-1) > 1 + 1e-6).any()
    close(out, A @ v)


def test_redraw_save_and_load():
    layer = PerformerAttention(4, 24)
    q, k, v = qkv(dtype=torch.float32)
    options = dict(is_causal=True, key_padding=None, pde=pdes.Diffusion(0.1), steps=2, dt=1.0)
    before, state = layer(q, k, v, **options), {n: t.clone() for n, t in layer.state_dict().items()}
    layer.redraw(torch.Generator().manual_seed(3))
    assert not torch.equal(before, layer(q, k, v, **options))
    again = PerformerAttention(4, 24)
    again.redraw(torch.Generator().manual_seed(3))
    assert torch.equal(layer(q, k, v, **options), again(q, k, v, **options))
    again.load_state_dict(state)
    assert torch.equal(before, again(q, k, v, **options))
    assert not list(layer.parameters())
    assert "dim=4, count=24" in repr(layer)
    close(layer(q, k, v, pde=None, steps=0, is_causal=False), layer(q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_can_be_compiled_whole(causal):
    q, k, v = qkv()
    features = RandomFeatures(4, 8).double()
    real = padding("left", 40)
    attend = lambda q, k, v: performer_attention(
        q, k, v, features=features, is_causal=causal, key_padding=real, pde=LINEAR["wave"], chunk=16
    )
    whole = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(q, k, v), attend(q, k, v))


def test_models_take_it_as_their_attention():
    model = LanguageModel(
        11,
        dim=16,
        heads=2,
        layers=2,
        hidden=16,
        pde="diffusion",
        attention=PerformerAttention(8, 16, chunk=4),
    )
    ids = torch.randint(11, (2, 10))
    assert_causal(model, ids)
    model.train()
    model(ids).logsumexp(-1).mean().backward()
    slopes = [p.grad for n, p in model.named_parameters() if n.endswith("alpha_raw")]
    assert len(slopes) == 2
    assert all(slope.abs().min() > 0 for slope in slopes)


@pytest.mark.parametrize("heads", [None, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_without_heads_are_one_head(heads, causal):
    q, k, v = torch.randn(3, 90, 4, dtype=torch.float64)
    features = RandomFeatures(4, 8, heads=heads).double()
    pde = pdes.LearnedPDE("diffusion").double()()
    options = {"features": features, "is_causal": causal, "pde": pde}
    out = performer_attention(q, k, v, **options)
    assert out.shape == v.shape
    torch.testing.assert_close(out, performer_dense(q, k, v, **options)[0])
    torch.testing.assert_close(out, performer_attention(q[None], k[None], v[None], **options)[0])


def test_errors_teach():
    q, _, v = qkv(key_heads=1)
    for attend in (performer_attention, performer_dense):
        with pytest.raises(TypeError, match=r"is_causal = 0.5 must be True or False"):
            attend(q, q, q, features=torch.randn(4, 8), is_causal=0.5)
    with pytest.raises(ValueError, match=r"features \[3, 8\] must be \[4, count\]"):
        performer_attention(q, q, v, features=torch.randn(3, 8))
    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        performer_attention(*qkv(heads=4, key_heads=2), features=torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"key_padding \[2, 3\] must be \[2, 40\]"):
        performer_attention(q, q, q, features=torch.randn(4, 8), key_padding=torch.ones(2, 3).bool())
    with pytest.raises(ValueError, match="dt = 7 is unstable"):
        performer_attention(q, q, q, features=torch.randn(4, 8), pde="diffusion", dt=7.0)
    with pytest.raises(ValueError, match="no PDE is called"):
        performer_attention(q, q, q, features=torch.randn(4, 8), pde="heat")
    with pytest.raises(ValueError, match="steps = -1 must be"):
        performer_attention(q, q, q, features=torch.randn(4, 8), pde="wave", steps=-1)
    with pytest.raises(ValueError, match="must be at least 1"):
        RandomFeatures(4, 0)


def test_negative_scales_turn_the_queries():
    q, k, v = qkv()
    features = RandomFeatures(4, 8).double()
    a = performer_attention(q, k, v, features=features, scale=-0.4)
    close(a, performer_attention(-q, k, v, features=features, scale=0.4))
    b = performer_attention(q, k, v, features=features)
    close(b, performer_attention(q, k, v, features=features, scale=1 / math.sqrt(4)))
