"""Transforms of `torch.func`, and forward mode: "auto" finds the engine that can, the others say which."""

import pytest
import torch
from torch.autograd import forward_ad

from attractor.attention import (
    PDEAttention,
    explain,
    pde_attention,
    pdes,
    performer_attention,
    performer_dense,
    window_attention,
)

OTHERS = ("stepped", "tiled")  # and "fused", on a GPU
CAUSAL = pytest.mark.parametrize("causal", [False, True])


def attention(causal=True, method="auto"):
    def attend(q, k, v, alpha=0.1):
        return pde_attention(q, k, v, is_causal=causal, pde=pdes.Diffusion(alpha), method=method)

    return attend


def qkv():
    torch.manual_seed(0)
    return torch.randn(3, 3, 2, 70, 8, dtype=torch.float64)


@CAUSAL
def test_vmap_is_a_loop(causal):
    given = qkv()
    attend = attention(causal)
    found = torch.func.vmap(attend)(*given)
    torch.testing.assert_close(found, torch.stack([attend(*x) for x in zip(*given)]))


@CAUSAL
def test_gradients_are_those_of_autograd(causal):
    alpha = torch.tensor([0.1, 0.2]).double().view(2, 1, 1)
    given = [*qkv(), alpha]

    def loss(*x):
        return attention(causal)(*x).square().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*given)
    leaves = [x.clone().requires_grad_() for x in given]
    torch.testing.assert_close(found, torch.autograd.grad(loss(*leaves), leaves))
    each = torch.func.vmap(torch.func.grad(loss))(*given[:3])  # a gradient for each text
    torch.testing.assert_close(each, found_without(loss, given[:3]))


def found_without(loss, given):
    q, k, v = (x.clone().requires_grad_() for x in given)
    return torch.stack([torch.autograd.grad(loss(*x), x[0])[0] for x in zip(q, k, v)])


@CAUSAL
def test_forward_derivatives_are_differences(causal):
    q, k, v = qkv()
    attend, moved = attention(causal), torch.randn_like(q)
    _, slope = torch.func.jvp(lambda x: attend(x, k, v), (q,), (moved,))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(attend(forward_ad.make_dual(q, moved), k, v)).tangent
    differences = (attend(q + 1e-6 * moved, k, v) - attend(q - 1e-6 * moved, k, v)) / 2e-6
    torch.testing.assert_close(slope, differences, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(dual, slope)


def test_a_layer_goes_through_functional_calls():
    torch.manual_seed(0)
    layer, x = PDEAttention(16, 2, pde="wave", causal=True).double(), torch.randn(3, 70, 16).double()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, text):
        return torch.func.functional_call(layer, parameters, (text[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    layer(x).square().sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(each[name].sum(0), p.grad)


@pytest.mark.slow
@pytest.mark.parametrize("method", OTHERS)
def test_other_engines_say_what_to_use(method):
    q, k, v = qkv()
    attend = attention(method=method)
    message = rf"method '{method}' cannot do this: .*; use 'dense'"
    with pytest.raises(ValueError, match=message):
        torch.func.vmap(attend)(q, k, v)
    with pytest.raises(ValueError, match=message):
        torch.func.grad(lambda x: attend(x, k, v).sum())(q)
    with pytest.raises(ValueError, match=message):
        torch.func.jvp(lambda x: attend(x, k, v), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(ValueError, match=message):
        attend(forward_ad.make_dual(q, q), k, v)
    attend(q, k, v)


def test_the_reason_is_explained():
    seen = []

    def attend(x):
        seen.append(explain(x, x, x, pde="diffusion"))
        return x.sum()

    torch.func.grad(attend)(qkv()[0])
    assert seen[0].method == "dense"
    assert "torch.func" in seen[0].reason


def test_windows_and_performers_say_what_to_use():
    q, k, v = qkv()[:, None]
    features = torch.randn(8, 16).double()
    options = {"features": features, "is_causal": True, "pde": "diffusion"}
    with pytest.raises(ValueError, match=r"window_attention cannot do this: .* use pde_attention"):
        torch.func.grad(lambda x: window_attention(x, k, v, window=9, pde="diffusion").sum())(q)
    with pytest.raises(ValueError, match=r"performer_attention with a PDE .* use performer_dense"):
        torch.func.grad(lambda x: performer_attention(x, k, v, **options).sum())(q)
    found = torch.func.grad(lambda x: performer_dense(x, k, v, **options)[0].square().sum())(q)
    q.requires_grad_()
    loss = performer_attention(q, k, v, **options).square().sum()
    torch.testing.assert_close(found, *torch.autograd.grad(loss, q))


@pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.10 compiles no such transforms")
@CAUSAL
@pytest.mark.slow
def test_compiled_transforms_go_through_stepped_values(causal):
    q, k, v = qkv()

    def loss(x, method):
        return attention(causal, method)(x, k, v).square().sum()

    truth = torch.func.grad(loss)(q, "dense")
    compiled = torch.compile(torch.func.grad(loss), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, "stepped"), truth)
    mapped = torch.compile(torch.func.vmap(attention(causal, "stepped")), backend="aot_eager")
    torch.testing.assert_close(mapped(q, k, v), attention(causal)(q, k, v))
