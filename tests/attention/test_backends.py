"""Which operator serves a scope on CUDA, and whether it is asked the right thing.

On a CPU the operators are stood in for by plain torch with their arguments, results and limits, so that
choosing, cutting and layouts are tested everywhere; tests marked gpu run the real ones.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from attractor.attention import window_attention
from attractor.attention.engines import backends, selection, softmax, strips
from attractor.attention.masks import Scope

SCALE = 0.4


def reference(q, k, v, allowed, scale=SCALE):
    """Outputs and log-sum-exp of ``[..., tokens, dim]`` where allowed; +inf for rows without keys."""
    scores = (scale * q @ k.mT).masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return weights @ v, lse.masked_fill(lse == -torch.inf, torch.inf)


def reference_backward(grad, out, q, k, v, lse, allowed, scale=SCALE):
    scores = (scale * q @ k.mT).masked_fill(~allowed, -torch.inf)
    weights = (scores - lse[..., None]).exp()
    slopes = scale * weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    return slopes @ k, slopes.mT @ q, weights.mT @ grad


def band(rows, keys, left, right):
    """FlashAttention's: counted from the last row and key, and without an edge as long as all keys."""
    left, right = (-1 if side >= keys else side for side in (left, right))
    ahead = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    allowed = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        allowed &= ahead >= -left
    if right >= 0:
        allowed &= ahead <= right
    return allowed


class StandIns:
    """The operators of torch.ops.aten, and what they refuse."""

    def __init__(self):
        self.calls = []
        self.plans = {}
        self._scaled_dot_product_flash_attention_for_cpu = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        )
        self._scaled_dot_product_flash_attention_for_cpu_backward = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        )

    def _ready(self, name, *tensors, most=256):
        self.calls.append(name)
        for x in tensors:
            assert x.stride(-1) == 1
            assert x.shape[-1] % 8 == 0
            assert x.shape[-1] <= most
            assert all(size > 0 for size in x.shape)
            assert all(step > 0 for size, step in zip(x.shape, x.stride()) if size > 1)

    def _corner(self, q, k, causal):
        rows, keys = q.shape[-2], k.shape[-2]
        assert rows == keys or not causal
        return torch.ones(rows, keys, dtype=torch.bool).tril() if causal else torch.ones(rows, keys) > 0

    def _scaled_dot_product_cudnn_attention(
        self, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
        return_debug_mask=False, *, scale=None,
    ):  # fmt: skip
        self._ready("cudnn", query, key, value, most=128)
        assert attn_bias is None
        assert compute_log_sumexp
        assert key.shape[-2] > 1
        out, lse = reference(query, key, value, self._corner(query, key, is_causal), scale)
        return out, lse[..., None], None, None, *query.shape[2:3], *key.shape[2:3], None, None, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        self._ready("cudnn backward", grad_out, query, key, value, out, most=128)
        assert logsumexp.shape == (*query.shape[:-1], 1)
        assert logsumexp.is_contiguous()
        assert attn_bias is cum_seq_q is cum_seq_k is None
        assert (max_q, max_k) == (query.shape[-2], key.shape[-2])
        # A plan is kept for query, key and value, and grad and out are read as they lay when it was made.
        asked = tuple((x.shape, x.stride()) for x in (query, key, value))
        assert self.plans.setdefault(asked, (grad_out.stride(), out.stride())) == (
            grad_out.stride(),
            out.stride(),
        )
        allowed = self._corner(query, key, is_causal)
        lse = logsumexp[..., 0]
        return reference_backward(grad_out, out, query, key, value, lse, allowed, scale)

    def _scaled_dot_product_efficient_attention(
        self, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *,
        scale=None,
    ):  # fmt: skip
        self._ready("efficient", query, key, value, most=1 << 16)
        out, lse = reference(query, key, value, self._corner(query, key, is_causal), scale)
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return out, pad(lse, (0, -lse.shape[-1] % 32), value=torch.nan), None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset,
        dropout_p, grad_input_mask, is_causal=False, *, scale=None,
    ):  # fmt: skip
        self._ready("efficient backward", grad_out_, query, key, value, out, most=1 << 16)
        assert logsumexp.shape[-1] % 32 == 0
        lse, allowed = logsumexp[..., : query.shape[-2]], self._corner(query, key, is_causal)
        return *reference_backward(grad_out_, out, query, key, value, lse, allowed, scale), None

    def _flash_attention_forward(
        self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        self._ready("flash" if cum_seq_q is None else "packed", query, key, value)
        assert query.shape[-1] == value.shape[-1]
        assert not is_causal
        sides = window_size_left, window_size_right
        if cum_seq_q is None:  # [batch, tokens, heads, dim]
            assert query.shape[0] <= backends.GRID
            assert query.shape[1] <= key.shape[1] or sides == (-1, -1)
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            out, lse = reference(q, k, v, band(max_q, max_k, *sides), scale)
            return out.transpose(1, 2).contiguous(), lse, None, None, None
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0])
        for own, part in self._sequences(query, key, cum_seq_q, cum_seq_k, max_q, max_k, sides):
            q, k, v = (x[own].transpose(0, 1) for x in (query, key, value))
            found, lse[:, own] = reference(q, k, v, part, scale)
            out[own] = found.transpose(0, 1)
        return out, lse, None, None, None

    def _sequences(self, query, key, cum_seq_q, cum_seq_k, max_q, max_k, sides):
        assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
        assert cum_seq_q.is_contiguous()
        assert torch.equal(cum_seq_q, cum_seq_k)
        ends = cum_seq_q.tolist()
        assert ends[0] == 0
        assert ends[-1] == len(query) == len(key)
        assert max(b - a for a, b in pairwise(ends)) <= max_q == max_k
        left, right = (-1 if side >= max_k else side for side in sides)
        for a, b in pairwise(ends):
            assert b > a or b == ends[-1]  # only the last ones may be empty
            if b > a:
                yield slice(a, b), band(b - a, b - a, left, right)

    def _flash_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
        is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        name = "flash backward" if cum_seq_q is None else "packed backward"
        self._ready(name, grad_out, query, key, value, out)
        assert logsumexp.is_contiguous()
        sides = window_size_left, window_size_right
        if cum_seq_q is None:
            assert logsumexp.shape == (query.shape[0], query.shape[2], query.shape[1])
            given = (x.transpose(1, 2) for x in (grad_out, out, query, key, value))
            grads = reference_backward(*given, logsumexp, band(max_q, max_k, *sides), scale)
            return tuple(x.transpose(1, 2).contiguous() for x in grads)
        assert logsumexp.shape == (query.shape[1], query.shape[0])
        grads = [torch.empty_like(x) for x in (query, key, value)]
        for own, part in self._sequences(query, key, cum_seq_q, cum_seq_k, max_q, max_k, sides):
            given = (x[own].transpose(0, 1) for x in (grad_out, out, query, key, value))
            for x, y in zip(grads, reference_backward(*given, logsumexp[:, own], part, scale)):
                x[own] = y.transpose(0, 1)
        return tuple(grads)


@pytest.fixture
def gpu(monkeypatch):
    """The choices made on CUDA, with stand-ins in double precision; `.prefers` is what SDPA would take."""
    stand_ins = StandIns()
    state = SimpleNamespace(ops=stand_ins, prefers="cudnn", flash=True)
    monkeypatch.setattr(backends, "_aten", stand_ins)
    monkeypatch.setattr(selection, "HALF", (torch.float64,))
    monkeypatch.setattr(selection, "preferred", lambda *_: state.prefers)
    monkeypatch.setattr(selection, "flash_works", lambda *_: state.flash)
    monkeypatch.setattr(selection, "efficient_works", lambda: True)
    monkeypatch.setattr(softmax, "choose", selection.choose_on_cuda)
    return state


T = 45
EQUAL = torch.arange(T)[None].expand(2, -1).div(9, rounding_mode="floor")
UNEQUAL = torch.stack((torch.repeat_interleave(torch.tensor([7, 2, 9]), torch.tensor([3, 1, 41])),
                       torch.arange(T).ge(20).long()))  # fmt: skip
CONSECUTIVE = torch.arange(T)[None].expand(2, -1) % 3
PADDED = torch.arange(T) < torch.tensor([T, 30])[:, None, None, None]

SCOPES = {
    "all": (Scope(T, T), "cudnn"),
    "more keys": (Scope(20, T), "cudnn"),
    "causal": (Scope(T, T, right=0), "cudnn"),
    "causal, far": (Scope(T, T, right=-4), "cudnn"),
    "one far key": (Scope(5, 5, right=-4), "flash"),
    "no far key": (Scope(4, 4, right=-4), None),
    "fewer than none": (Scope(3, 3, right=-4), None),
    "no rows": (Scope(0, 0, right=0), None),
    "no keys": (Scope(5, 0), None),
    "causal, more keys": (Scope(20, T, right=-4), "cudnn"),
    "causal, more rows": (Scope(T, 20, right=-4), "plain"),
    "window": (Scope(T, T, 7, 5), "flash"),
    "window back": (Scope(T, T, 7, 0), "flash"),
    "window ahead": (Scope(T, T, 0, 6), "flash"),
    "window, far": (Scope(T, T, 10, -4), "flash"),
    "window, far ahead": (Scope(T, T, -3, 9), "flash"),
    "window of one": (Scope(T, T, 4, -4), "flash"),
    "window of none": (Scope(T, T, 3, -4), None),
    "one edge": (Scope(T, T, 7, None), "flash"),
    "other edge": (Scope(T, T, None, 5), "flash"),
    "edge ahead": (Scope(T, T, -5, None), "flash"),
    "window as wide as all": (Scope(T, T, T - 1, 3), "flash"),
    "window wider than all": (Scope(T, T, T + 9, -3), "flash"),
    "moved": (Scope(20, 29, 0, 9), "flash"),
    "moved, far": (Scope(20, 29, -2, 7), "flash"),
    "moved, cut short": (Scope(20, 23, 0, 9), "flash"),
    "moved, rows without keys": (Scope(30, 23, 0, 9), "flash"),
    "window, more rows": (Scope(T, 20, 7, 5), "plain"),
    "documents": (Scope(T, T, documents=EQUAL), "packed"),
    "documents, causal": (Scope(T, T, right=0, documents=UNEQUAL), "packed"),
    "documents, far": (Scope(T, T, right=-4, documents=UNEQUAL), "packed"),
    "documents, further than most": (Scope(T, T, right=-12, documents=UNEQUAL), "packed"),
    "documents, window": (Scope(T, T, 6, 3, documents=UNEQUAL), "packed"),
    "documents, window, far": (Scope(T, T, 6, -2, documents=EQUAL), "packed"),
    "documents, window, far ahead": (Scope(T, T, -2, 6, documents=EQUAL), "packed"),
    "documents, no window": (Scope(T, T, 1, -2, documents=EQUAL), None),
    "documents, one for all": (Scope(T, T, right=-4, documents=EQUAL[:1]), "plain"),
    "torn documents": (Scope(T, T, right=-4, documents=CONSECUTIVE), "plain"),
    "padding": (Scope(T, T, valid_keys=PADDED), "plain"),
    "padding, causal": (Scope(T, T, right=-4, valid_keys=PADDED), "plain"),
    "padding, window": (Scope(T, T, 7, 3, valid_keys=PADDED), "plain"),
    "bias": (Scope(T, T, bias=torch.randn(T, T)[None, None]), "plain"),
}  # fmt: skip

LAYOUTS = {
    "heads first": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of more": lambda x: pad(x, (8, 8, 3, 2, 1, 0))[:, 1:, 3 : 3 + x.shape[2], 8:-8],
}


def inputs(scope, depths=(16, 16), layout="heads first", batch=2):
    torch.manual_seed(0)
    sizes = (scope.queries, depths[0]), (scope.keys, depths[0]), (scope.keys, depths[1])
    return [LAYOUTS[layout](torch.randn(batch, 3, *size, dtype=torch.float64)) for size in sizes]


def truth(query, key, value, scope):
    """The map itself: which entries are allowed, scores, and `attend` by it."""
    allowed = scope.tile(slice(0, scope.queries), slice(0, scope.keys), query.device)
    if allowed is None:
        allowed = torch.ones(scope.queries, scope.keys, dtype=torch.bool, device=query.device)
    scores = SCALE * query @ key.mT
    if scope.bias is not None:
        scores = scores + scope.bias
    scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return scores, weights @ value, lse


@pytest.mark.sampled(60)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SCOPES)
def test_outputs_and_gradients_are_those_of_the_map(kind, layout, gpu):
    scope, expected = SCOPES[kind]
    query, key, value = inputs(scope, layout=layout)
    scores, out, lse = truth(query, key, value, scope)
    top = selection.first_row(scope)
    found, found_lse = softmax.attend(query, key, value, scope, SCALE)
    torch.testing.assert_close(found, out[..., top:, :], rtol=0, atol=1e-12)
    torch.testing.assert_close(found_lse, lse, rtol=0, atol=1e-12)
    assert gpu.ops.calls == ([expected] if expected not in (None, "plain") else [])

    # A share of a softmax over more keys: another output, and a larger log-sum-exp.
    grad, merged = torch.randn(2, *out.shape, dtype=torch.float64)
    more = torch.logaddexp(lse, torch.randn_like(lse))
    weights = (scores - more[..., None]).exp()
    slopes = SCALE * weights * (grad @ value.mT - (grad * merged).sum(-1, keepdim=True))
    expected_grads = slopes @ key, slopes.mT @ query, weights.mT @ grad
    grads = softmax.attend_backward(
        grad[..., top:, :], query, key, value, merged[..., top:, :], more, scope, SCALE
    )
    for a, b in zip(grads, expected_grads):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    if expected not in (None, "plain"):
        assert gpu.ops.calls[1:] == [f"{expected} backward"]


@pytest.mark.sampled(80)
@pytest.mark.parametrize("kind", SCOPES)
@pytest.mark.parametrize("prefers", ["cudnn", "flash", "efficient", "plain"])
def test_one_softmax_over_the_scope_and_other_scores(kind, prefers, gpu):
    gpu.prefers, gpu.flash = prefers, prefers in ("cudnn", "flash")
    scope, _ = SCOPES[kind]
    leaves = [x.requires_grad_() for x in inputs(scope)]
    near = torch.randn(2, 3, scope.queries, 4, dtype=torch.float64, requires_grad=True)
    more = torch.randn(2, 3, 4, 16, dtype=torch.float64, requires_grad=True)
    scores, _, _ = truth(*leaves, scope)
    weights = torch.cat((scores, near), -1).softmax(-1)
    expected = weights[..., : scope.keys] @ leaves[2] + weights[..., scope.keys :] @ more
    far, (rest,) = softmax.split_softmax(*leaves, [near], scope, SCALE)
    found = pad(far, (0, 0, scope.queries - far.shape[-2], 0)) + rest @ more
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(found)
    everything = (*leaves, near, more)
    pairs = zip(*(torch.autograd.grad(x, everything, grad) for x in (found, expected)))
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["causal, far", "window, far", "documents, far"])
@pytest.mark.parametrize("depths", [(16, 17), (12, 12), (20, 5), (136, 136), (264, 8)])
@pytest.mark.parametrize("prefers", ["cudnn", "flash"])
def test_any_depth_is_padded_to_what_operators_take(kind, depths, prefers, gpu):
    gpu.prefers = prefers
    scope, _ = SCOPES[kind]
    query, key, value = (x / 4 for x in inputs(scope, depths))
    _, out, lse = truth(query, key, value, scope)
    found, found_lse = softmax.attend(query, key, value, scope, SCALE)
    torch.testing.assert_close(found, out[..., selection.first_row(scope) :, :], rtol=0, atol=1e-12)
    torch.testing.assert_close(found_lse, lse, rtol=0, atol=1e-12)
    if kind == "causal, far":
        deep = max(depths)
        assert gpu.ops.calls == ["efficient" if deep > 256 else "flash" if deep > 128 else prefers]


def test_what_serves_when_an_operator_is_not_there(gpu):
    def call(kind, **state):
        vars(gpu).update(state)
        gpu.ops.calls.clear()
        scope, _ = SCOPES[kind]
        softmax.attend(*inputs(scope), scope, SCALE)
        return gpu.ops.calls

    assert call("causal", prefers="cudnn") == ["cudnn"]
    assert call("causal", prefers="flash") == ["flash"]
    assert call("causal", prefers="efficient") == ["efficient"]
    assert call("causal", prefers="plain") == []
    assert call("one far key", prefers="cudnn", flash=False) == ["efficient"]
    assert call("window", flash=False) == []
    assert call("documents", flash=False) == []
    assert call("documents", flash=True) == ["packed"]


def test_bands_are_for_half_precision(gpu, monkeypatch):
    monkeypatch.setattr(selection, "HALF", (torch.float16,))
    for kind in ("window", "documents"):
        scope, _ = SCOPES[kind]
        _, out, _ = truth(*inputs(scope), scope)
        found, _ = softmax.attend(*inputs(scope), scope, SCALE)
        torch.testing.assert_close(found, out, rtol=0, atol=1e-12)
    assert not gpu.ops.calls


def test_more_sequences_than_a_launch_holds(gpu, monkeypatch):
    monkeypatch.setattr(backends, "GRID", 5)
    monkeypatch.setattr(selection, "GRID", 5)
    scope, _ = SCOPES["documents"]
    scope = replace(scope, documents=scope.documents.clone())  # 10 of them, not looked at before
    softmax.attend(*inputs(scope), scope, SCALE)
    assert not gpu.ops.calls
    scope, _ = SCOPES["window"]  # 2 x 3 heads, which then are no batches
    _, out, _ = truth(*inputs(scope), scope)
    torch.testing.assert_close(softmax.attend(*inputs(scope), scope, SCALE)[0], out, rtol=0, atol=1e-12)
    assert gpu.ops.calls == ["flash"]


def test_documents_are_looked_at_once_until_they_change(gpu, monkeypatch):
    looks, pack = [], selection._pack
    monkeypatch.setattr(selection, "_pack", lambda *given: (looks.append(1), pack(*given))[1])
    documents = EQUAL.clone()

    def attend(right=0):
        scope = Scope(T, T, right=right, documents=documents)
        _, out, _ = truth(*inputs(scope), scope)
        found, _ = softmax.attend(*inputs(scope), scope, SCALE)
        torch.testing.assert_close(found, out[..., selection.first_row(scope) :, :], rtol=0, atol=1e-12)
        return len(looks)

    assert [attend(), attend(), attend(-2), attend(-2)] == [1, 1, 2, 2]
    documents.copy_(UNEQUAL)
    assert [attend(), attend(-2), attend()] == [3, 4, 4]
    documents.copy_(CONSECUTIVE)
    assert [attend(), attend()] == [5, 5]
    with torch.inference_mode():
        documents = EQUAL.clone()  # has no version
        assert [attend(), attend()] == [6, 7]


@pytest.mark.parametrize("flip", [False, True], ids=["ascending", "descending"])
def test_where_documents_begin(flip, gpu):
    lengths = torch.tensor([[1, 1, 5, 30, 8], [20, 1, 1, 1, 22]])
    ids = torch.stack([torch.repeat_interleave(torch.arange(5), row) for row in lengths])
    scope = Scope(T, T, right=0, documents=4 - ids if flip else ids)
    packed = selection._packed(scope).packed
    assert packed.cu_seqlens.tolist() == [0, *lengths.flatten().cumsum(0).tolist()]
    assert (packed.cu_seqlens.dtype, packed.max_seqlen) == (torch.int32, 30)
    assert not selection.has_split_documents(scope.documents)
    scope.documents[1, -1] = scope.documents[1, 0]
    assert selection.has_split_documents(scope.documents)
    assert selection._packed(scope) is None


def test_documents_that_may_not_be_looked_at_go_in_strips(gpu, monkeypatch):
    for module in (selection, softmax):
        monkeypatch.setattr(module, "may_sync", lambda _: False)
    for kind in ("documents", "documents, far", "torn documents"):
        scope, _ = SCOPES[kind]
        _, out, lse = truth(*inputs(scope), scope)
        found, found_lse = softmax.attend(*inputs(scope), scope, SCALE)
        torch.testing.assert_close(found, out[..., selection.first_row(scope) :, :], rtol=0, atol=1e-12)
        torch.testing.assert_close(found_lse, lse, rtol=0, atol=1e-12)
    assert not gpu.ops.calls


def test_documents_that_must_be_consecutive_are_packed_unseen(gpu, monkeypatch):
    """As in the capture of a graph, which has room for any number of documents."""
    monkeypatch.setattr(selection, "may_sync", lambda _: False)
    choose = lambda scope: selection.choose_on_cuda(*inputs(scope), scope, consecutive=True)
    for kind in ("documents", "documents, far"):
        scope, _ = SCOPES[kind]
        _, out, lse = truth(*inputs(scope), scope)
        found, found_lse = softmax.attend(*inputs(scope), scope, SCALE, choose(scope))
        torch.testing.assert_close(found, out[..., selection.first_row(scope) :, :], rtol=0, atol=1e-12)
        torch.testing.assert_close(found_lse, lse, rtol=0, atol=1e-12)
    assert set(gpu.ops.calls) == {"packed"}
    with pytest.raises(RuntimeError, match="must be consecutive"):
        choose(SCOPES["torn documents"][0])


@pytest.mark.parametrize("kind", ["documents, far", "documents, window"])
def test_a_document_does_not_touch_another(kind, gpu):
    """To the bit, and though rows are beside keys of the document before."""
    scope, _ = SCOPES[kind]
    query, key, value = inputs(scope)
    grad = torch.randn_like(value)
    top = selection.first_row(scope)

    def run(*given):
        leaves = [x.clone().requires_grad_() for x in given]
        none = torch.full((2, 3, T, 1), -torch.inf, dtype=torch.float64)
        out, _ = softmax.split_softmax(*leaves, [none], scope, SCALE)
        return out, *torch.autograd.grad(out, leaves, grad[..., top:, :])

    own = (scope.documents == scope.documents[:, -1:])[:, None, :, None]
    before = run(query, key, value)
    after = run(*(torch.where(own, x, x + torch.randn_like(x)) for x in (query, key, value)))
    same = own.expand_as(value)
    assert torch.equal(before[0][same[..., top:, :]], after[0][same[..., top:, :]])
    for a, b in zip(before[1:], after[1:]):
        assert torch.equal(a[same], b[same])


@pytest.mark.parametrize("height", [3, 64])
def test_strips_of_plain_torch_hold_a_limited_map(height, gpu, monkeypatch):
    monkeypatch.setattr(softmax, "ENTRIES", 6 * height * T)
    monkeypatch.setattr(selection, "flash_works", lambda _: False)
    held, plain = [], backends.plain

    def watched(q, k, v, strip, scale):
        held.append(6 * q.shape[-2] * k.shape[-2])
        return plain(q, k, v, strip, scale)

    watching = strips.Operator("watched", watched, backends.plain_backward)
    for module in (softmax, selection):
        monkeypatch.setattr(module, "PLAIN", watching)
    for kind in ("window", "window, far", "documents, far", "padding, causal"):
        scope, _ = SCOPES[kind]
        _, out, _ = truth(*inputs(scope), scope)
        found, _ = softmax.attend(*inputs(scope), scope, SCALE)
        torch.testing.assert_close(found, out[..., selection.first_row(scope) :, :], rtol=0, atol=1e-12)
    assert max(held) <= softmax.ENTRIES
    assert len(held) < 4 * T


def test_layouts_differ_but_cudnn_reads_one(gpu):
    """Gradients and outputs come in all layouts; a plan kept from before must still read them right."""
    scope, _ = SCOPES["causal, far"]
    query, key, value = inputs(scope)
    grad, out = torch.randn(2, *value.shape, dtype=torch.float64)
    lse = torch.randn(2, 3, T, dtype=torch.float64) + 4
    found = [
        softmax.attend_backward(
            first(grad[..., 4:, :]), query, key, value, second(out[..., 4:, :]), lse, scope, SCALE
        )
        for first in (*LAYOUTS.values(), torch.clone)
        for second in (*LAYOUTS.values(), torch.clone)
    ]
    assert len(gpu.ops.plans) == 1
    for grads in found[1:]:
        for a, b in zip(grads, found[0]):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["causal, far", "window", "window, far", "documents, far"])
def test_compiled_code_takes_the_same_operators_but_cudnn(kind, gpu, monkeypatch):
    monkeypatch.setattr(selection, "preferred", torch.compiler.assume_constant_result(_cudnn))
    monkeypatch.setattr(selection, "flash_works", torch.compiler.assume_constant_result(_true))
    scope, expected = SCOPES[kind]
    monkeypatch.setattr(backends, "_aten", torch.ops.aten)
    targets = []

    def look(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *given: given

    torch._dynamo.reset()
    compiled = torch.compile(softmax.attend, fullgraph=True, backend=look)
    compiled(*inputs(scope), scope, SCALE)
    names = {"cudnn": "_scaled_dot_product_cudnn_attention", "flash": "_flash_attention_forward"}
    called = [target for target in targets if "attention" in target]
    expected = (
        "flash" if expected == "cudnn" else expected
    )  # whose gradients torch 2.11 compiles wrongly
    assert called == ([f"aten.{names[expected]}"] if expected in names else [])


def _cudnn(device, dtype, dim):
    return "cudnn"


def _true(device):
    return True


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(6, 0), (6, 3), (12, -1)])
@pytest.mark.parametrize("pde", ["diffusion", None])
def test_windows_with_global_tokens_by_operators(causal, window, pde, gpu, monkeypatch):
    leaves = [torch.randn(2, 2, 90, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grad, found = torch.randn(2, 2, 90, 8, dtype=torch.float64), []
    for choose in (selection.choose, selection.choose_on_cuda):
        monkeypatch.setattr(softmax, "choose", choose)
        out = window_attention(
            *leaves, window=window, global_tokens=3, is_causal=causal, pde=pde, steps=2
        )
        found.append((out, *torch.autograd.grad(out, leaves, grad)))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert "flash" in gpu.ops.calls
    assert "flash backward" in gpu.ops.calls


def on_gpu(scope):
    move = lambda x: x if x is None else x.cuda()
    return Scope(
        scope.queries, scope.keys, scope.left, scope.right, move(scope.valid_keys), move(scope.documents),
        move(scope.mask), move(scope.bias),
    )  # fmt: skip


def check_on_gpu(scope, dtype, layout, batch=2, depth=64):
    """Outputs and merged gradients against float64, beside plain torch in the same type."""
    scope = on_gpu(scope)
    exact = [x.cuda().to(dtype).double() for x in inputs(scope, (depth, depth), layout, batch)]
    given = [LAYOUTS[layout](x.to(dtype)) for x in exact]
    scores, out, lse = truth(*exact, scope)
    top = selection.first_row(scope)
    grad, merged = (torch.randn_like(out).to(dtype) for _ in range(2))
    more = torch.logaddexp(lse, torch.randn_like(lse)).float().double()
    weights = (scores - more[..., None]).exp()
    inner = (grad.double() * merged.double()).sum(-1, keepdim=True)
    slopes = SCALE * weights * (grad.double() @ exact[2].mT - inner)
    expected = out[..., top:, :], slopes @ exact[1], slopes.mT @ exact[0], weights.mT @ grad.double()
    errors = []
    for choose in (selection.choose, lambda *_: backends.PLAIN):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(softmax, "choose", choose)
            found, found_lse = softmax.attend(*given, scope, SCALE)
            grads = softmax.attend_backward(
                LAYOUTS[layout](grad)[..., top:, :], *given, merged[..., top:, :],
                more.float() if dtype != torch.float64 else more, scope, SCALE,
            )  # fmt: skip
        torch.testing.assert_close(found_lse.double(), lse, rtol=0, atol=2e-3)
        errors.append([
            ((a.double() - b) ** 2).mean().sqrt().item() if b.numel() else 0.0
            for a, b in zip((found, *grads), expected)
        ])  # fmt: skip
    for n, (ours, theirs) in enumerate(zip(*errors)):
        assert ours <= (2 if n == 0 else 3) * theirs + 1e-6, (n, ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", SCOPES)
def test_on_a_gpu_outputs_and_gradients_are_those_of_the_map(kind, dtype):
    for layout in ("heads first", "tokens first"):
        check_on_gpu(SCOPES[kind][0], dtype, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_on_a_gpu_every_backend_that_the_user_allows(backend):
    scope = Scope(300, 300, right=-4)
    with sdpa_kernel([getattr(SDPBackend, backend), SDPBackend.MATH]):
        given = torch.empty(1, 1, 300, 64, device="cuda", dtype=torch.bfloat16)
        name = selection.choose(given, given, given, scope).forward.__name__
        assert name == ("plain" if backend.startswith("EFF") else backend.split("_")[0].lower())
        check_on_gpu(scope, torch.bfloat16, "heads first")
    with sdpa_kernel(SDPBackend.MATH):
        assert selection.choose(given, given, given, scope) is backends.PLAIN


@pytest.mark.gpu
def test_on_a_gpu_longer_than_a_block_of_any_operator():
    documents = torch.tensor([0, 0, 1, 2, 3]).repeat_interleave(200)[None].expand(2, -1)
    for scope in (
        Scope(1000, 1000, right=-4),
        Scope(1000, 1000, 252, -4),
        Scope(700, 956, -4, 252),
        Scope(1000, 1000, right=-4, documents=documents),
        Scope(1000, 1000, 96, -4, documents=documents),
    ):
        for layout, dtype in zip(LAYOUTS, (torch.bfloat16, torch.float16, torch.bfloat16)):
            check_on_gpu(scope, dtype, layout)


@pytest.mark.gpu
def test_on_a_gpu_deterministic_gradients_on_request():
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 4, 1500, 64, device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        for scope in (Scope(1500, 1500, right=-4), Scope(1500, 1500, 200, -4)):
            assert selection.choose(q, k, v, scope).forward is backends.flash
            top = selection.first_row(scope)
            out, lse = softmax.attend(q, k, v, scope, SCALE)
            given = grad[..., top:, :], q, k, v, out, lse, scope, SCALE
            first = softmax.attend_backward(*given)
            for _ in range(20):
                assert all(torch.equal(a, b) for a, b in zip(softmax.attend_backward(*given), first))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal, far", "window, far", "documents, far"])
def test_on_a_gpu_compiled_and_captured(kind):
    scope = on_gpu(SCOPES[kind][0])
    given = [x.cuda().bfloat16().requires_grad_() for x in inputs(scope, (64, 64))]
    near = torch.randn(2, 3, T, 4, device="cuda", requires_grad=True)

    def both(*given):
        far, (weights,) = softmax.split_softmax(*given[:3], given[3:], scope, SCALE)
        loss = far.square().sum() + (pad(far, (0, 0, T - far.shape[-2], 0))[..., :4] * weights).sum()
        return far, *torch.autograd.grad(loss, given)

    def forward(*given):
        return softmax.split_softmax(*given[:3], given[3:], scope, SCALE)[0]

    plain = [x.detach() for x in both(*given, near)]
    compiled = torch.compile(forward, fullgraph=True)(*given, near)
    torch.testing.assert_close(compiled, plain[0], rtol=1e-2, atol=1e-2)
    slopes = torch.autograd.grad(compiled.square().sum(), given)
    expected = torch.autograd.grad(forward(*given, near).square().sum(), given)
    for a, b in zip(slopes, expected):  # rows with few keys are small differences of large numbers
        assert ((a - b).double().norm() / b.double().norm()).item() < 0.02
    del compiled  # what is kept of it belongs to this stream, and a capture must not wait for that
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both(*given, near)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(*given, near)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, plain):
        assert ((a - b).double().norm() / b.double().norm()).item() < 0.02
