"""Softmax attention in O(T) memory that hands out the log-sum-exp of its rows.

With it one softmax can be shared out: most keys go through a fused operator, the few whose values
differ from row to row are done by hand, and both get one normalisation (`split_softmax`). The
operators are torch's own where one returns the log-sum-exp: on CPUs, and on CUDA if nothing but
causality is masked. Everything else is plain torch, a strip of rows at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention.masks import Scope, part_of
from attractor.attention.precision import first_derivatives_only, wide

ROWS = 512  # of a strip whose rows differ in what they may attend to
HELD = 1 << 23  # entries of a map that plain torch holds at a time

_aten: Any = torch.ops.aten


def split_softmax(
    query: Tensor, key: Tensor, value: Tensor, near: Tensor, scope: Scope | None, scale: float
) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of a scope and over some more scores a row.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``.
        near: the other scores ``[batch, heads, queries, n]``, -inf for none.
        scope: which keys the rest of the softmax is over; None: none.

    Returns:
        The sum over the scope's keys of weight times value ``[batch, heads, last queries, value dim]``,
        without the first rows if these have no keys in scope, and the weights of the other scores
        ``[batch, heads, queries, n]``; of the type of `near`. All weights of a row add up to 1, or to
        0 if it may attend to nothing.

    Gradients of the two outputs must come from one sum, in which the weights enter linearly; a row
    whose first gradient is zero must have a second one that is zero.
    """
    return _SplitSoftmax.apply(query, key, value, near, scope, scale)


def log_sum_exp(query: Tensor, key: Tensor, scope: Scope, scale: float) -> Tensor:
    """Of the scores of every row ``[batch, heads, queries]``; -inf if it may attend to nothing."""
    return _LogSumExp.apply(query, key, scope, scale)


class _SplitSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        near: Tensor,
        scope: Scope | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        lse = near.logsumexp(-1)
        if scope is None:
            far = near.new_zeros(*query.shape[:-1], value.shape[-1])
        else:
            far, far_lse = attend(query, key, value, scope, scale)
            lse = torch.logaddexp(lse, far_lse)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        if scope is not None:
            share = (far_lse - lse).exp()[..., lse.shape[-1] - far.shape[-2] :, None]
            far = far.to(near.dtype) * share
        weights = (near - lse[..., None]).exp()
        ctx.scope, ctx.scale = scope, scale
        # Neither another name for the output nor one changed in place may be saved: torch 2.11 compiles
        # that to a gradient of zero.
        saved = far if far.dtype == value.dtype else far.to(value.dtype)
        ctx.save_for_backward(query, key, value, saved, weights, lse)
        return far, weights

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad_far: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        query, key, value, far, weights, lse = ctx.saved_tensors
        # The operator's backward subtracts <grad, out> from every score's gradient. For one softmax
        # over both sets of keys it must be the sum over both, so it is given an out that makes it so:
        # the merged one, of which only the product with grad_far is known, and only that matters.
        other = (grad_weights * weights).sum(-1, keepdim=True)
        top = other.shape[-2] - far.shape[-2]
        total = other + pad((grad_far * far).sum(-1, keepdim=True), (0, 0, top, 0))
        grad_near = weights * (grad_weights - total)
        if ctx.scope is None:
            return None, None, None, grad_near, None, None
        size = grad_far.norm(dim=-1, keepdim=True)
        per_grad = torch.where(size > 1e-30, other[..., top:, :] / size / size, 0.0)
        out = torch.addcmul(far, grad_far, per_grad)
        grads = attend_backward(
            grad_far.to(value.dtype), query, key, value, out.to(value.dtype), lse, ctx.scope, ctx.scale
        )
        return *grads, grad_near, None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, scope: Scope, scale: float) -> Tensor:
        _, lse = attend(query, key, key, scope, scale)
        ctx.scope, ctx.scale = scope, scale
        ctx.save_for_backward(query, key, lse)
        return lse

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, lse = ctx.saved_tensors
        # Values of zero, and an output whose product with its gradient is -grad: what is left of the
        # operator's backward is weights * grad.
        top = _first_row(ctx.scope)
        first = torch.zeros_like(query[..., top:, :])
        first[..., 0] = 1
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        out = first * -grad[..., top:, None].to(query.dtype)
        grads = attend_backward(first, query, key, torch.zeros_like(key), out, lse, ctx.scope, ctx.scale)
        return grads[0], grads[1], None, None


def attend(
    query: Tensor, key: Tensor, value: Tensor, scope: Scope, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs ``[batch, heads, last queries, value dim]``, and log-sum-exp ``[batch, heads, queries]``.

    Every head of query has its own key and value. The log-sum-exp is in float32 at least; rows that
    may attend to nothing have zeros and -inf, and if the first rows are such, the output begins after
    them.
    """
    query, key, value = (_in_rows(x) for x in (query, key, value))
    forward, _ = _operator(query, key, value, scope)
    lse = query.new_empty(query.shape[:-1], dtype=wide(query.dtype))
    done = top = _first_row(scope)
    lse[..., :top] = -torch.inf
    out = value.new_empty(*query.shape[:2], scope.queries - top, value.shape[-1])
    for strip in _strips(query, scope, forward is _plain):
        part, part_lse = forward(*strip.cut(query, key, value), strip, scale)
        if strip.keyless is not None:
            part = part.masked_fill(strip.keyless[..., None], 0.0)
            part_lse = part_lse.masked_fill(strip.keyless, -torch.inf)
        lse[..., done : strip.rows.start] = -torch.inf
        lse[..., strip.rows] = part_lse
        if part.shape == out.shape:
            return part, lse
        out[..., done - top : strip.rows.start - top, :] = 0.0
        out[..., strip.rows.start - top : strip.rows.stop - top, :] = part
        done = strip.rows.stop
    out[..., done - top :, :], lse[..., done:] = 0.0, -torch.inf
    return out, lse


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scope: Scope,
    scale: float,
    onto: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, for any finite log-sum-exp and any output.

    Those of query and key are added to `onto` where it is given.

    grad and out are of the last rows, as `attend` gives them. With the weights ``exp(score - lse)`` the
    gradient of a score is ``weight * (<grad, value> - <grad, out>)``.
    """
    grad, query, key, value, out = (_in_rows(x) for x in (grad, query, key, value, out))
    _, backward = _operator(query, key, value, scope)
    grads = None
    top = _first_row(scope)
    single = _one_strip(scope) and backward is not _plain_backward
    for strip in _strips(query, scope, backward is _plain_backward):
        rows = [x[..., strip.rows.start - top : strip.rows.stop - top, :] for x in (grad, out)]
        parts = backward(*rows, *strip.cut(query, key, value), lse[..., strip.rows], strip, scale)
        if single:
            return (
                _grown(parts[0], strip.rows, query, onto and onto[0]),
                _grown(parts[1], strip.columns, key, onto and onto[1]),
                _grown(parts[2], strip.columns, value),
            )
        if grads is None:  # sums over strips lose little in half precision if kept in single
            grads = [torch.zeros_like(x, dtype=wide(x.dtype)) for x in (query, key, value)]
            grads[:2] = onto or grads[:2]
        grads[0][..., strip.rows, :] += parts[0]
        grads[1][..., strip.columns, :] += parts[1]
        grads[2][..., strip.columns, :] += parts[2]
    if grads is None:
        return *(onto or (torch.zeros_like(query), torch.zeros_like(key))), torch.zeros_like(value)
    if onto is not None:
        return *onto, grads[2].to(value.dtype)
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


def _in_rows(x: Tensor) -> Tensor:
    """x with the numbers of a row side by side: torch's operators read them so without asking."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _grown(part: Tensor, where: slice, whole: Tensor, onto: Tensor | None = None) -> Tensor:
    """A tensor like `whole`, zero but for that part of its tokens; or `onto`, with it added."""
    if onto is not None:
        onto[..., where, :] += part
        return onto
    if part.shape == whole.shape:
        return part
    full = torch.empty_like(whole)
    full[..., : where.start, :], full[..., where.stop :, :] = 0.0, 0.0
    full[..., where, :] = part
    return full


@dataclass(frozen=True, eq=False)
class Strip:
    """Some rows, the keys they meet, and which of these they may attend to.

    Attributes:
        causal: row i may attend to keys up to i, both counted within the strip.
        allowed: bool, or None for all.
        bias: added to the scores, or None.
        keyless: the rows that may attend to nothing, bool ``[batch or 1, heads or 1, rows]``, or None.
    """

    rows: slice
    columns: slice
    causal: bool
    allowed: Tensor | None
    bias: Tensor | None
    keyless: Tensor | None

    def cut(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The strip's part of all three."""
        return query[..., self.rows, :], key[..., self.columns, :], value[..., self.columns, :]

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """allowed and bias, as one mask to add."""
        if self.allowed is None:
            return None if self.bias is None else self.bias.to(dtype)
        zero = torch.zeros((), dtype=dtype, device=self.allowed.device)
        return torch.where(self.allowed, zero if self.bias is None else self.bias.to(dtype), -torch.inf)


def _first_row(scope: Scope) -> int:
    """The first row that the band gives a key."""
    return 0 if scope.right is None else min(max(-scope.right, 0), scope.queries)


def _strips(query: Tensor, scope: Scope, plain: bool) -> Iterator[Strip]:
    """The rows that may attend to something: one strip if an operator can do it, else many."""
    if _one_strip(scope) and not plain:
        rows = slice(_first_row(scope), scope.queries)
        columns = scope.columns(rows)
        if rows.start < rows.stop and columns.stop > 0:
            yield _whole(scope, rows, columns)
        return
    height = ROWS
    if scope.left is not None and scope.right is not None:  # a strip meets its height and a band's width
        height = min(ROWS, max(128, (scope.left + scope.right) // 2))
    if plain:
        height = max(1, HELD // (query.shape[0] * query.shape[1] * scope.keys))
    ranges = None if torch.compiler.is_compiling() else _document_columns(scope, height)
    for n, start in enumerate(range(_first_row(scope), scope.queries, height)):
        rows = slice(start, min(start + height, scope.queries))
        columns = scope.columns(rows)
        if ranges is not None:
            columns = slice(max(columns.start, ranges[0][n]), min(columns.stop, ranges[1][n]))
        if columns.stop <= columns.start:
            continue
        allowed = scope.tile(rows, columns, query.device)
        keyless = None if allowed is None else ~allowed.any(-1)
        bias = None if scope.bias is None else part_of(scope.bias, rows, columns)
        yield Strip(rows, columns, False, allowed, bias, keyless)


def _one_strip(scope: Scope) -> bool:
    corner = scope.left is None and (scope.right is None or scope.right <= 0)
    return corner and scope.documents is None and scope.mask is None


def _whole(scope: Scope, rows: slice, columns: slice) -> Strip:
    bias = None if scope.bias is None else part_of(scope.bias, rows, columns)
    if scope.real is None:
        return Strip(rows, columns, scope.right is not None, None, bias, None)
    real = scope.real[..., columns]
    if scope.right is None:
        return Strip(rows, columns, False, real, bias, ~real.any(-1))
    so_far = real.long().cumsum(-1)[..., 0, :] > 0  # row i has a key if there is a real one up to i
    beyond = (rows.stop - rows.start) - so_far.shape[-1]
    so_far = torch.cat((so_far, so_far[..., -1:].expand(*so_far.shape[:-1], beyond)), -1)
    return Strip(rows, columns, True, real, bias, ~so_far)


def _document_columns(scope: Scope, height: int) -> tuple[list[int], list[int]] | None:
    """For each strip the first key of its documents, and one past the last."""
    ranges = scope.document_ranges()
    if ranges is None:
        return None
    top = _first_row(scope)
    sides = (-top, -(scope.queries - top) % height)
    first = pad(ranges[0], sides, value=scope.keys).unflatten(-1, (-1, height)).amin((0, 2))
    last = pad(ranges[1], sides, value=0).unflatten(-1, (-1, height)).amax((0, 2))
    return first.tolist(), last.tolist()


def _operator(query: Tensor, key: Tensor, value: Tensor, scope: Scope) -> tuple[Any, Any]:
    """(forward, backward) for these tensors and this scope."""
    if query.device.type == "cpu":
        return _cpu, _cpu_backward
    free = _one_strip(scope) and scope.real is None and scope.bias is None
    square = scope.right is None or scope.queries == scope.keys
    same = query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    if query.device.type == "cuda" and free and square and same:
        if query.dtype in (torch.float16, torch.bfloat16):
            return _cuda_flash, _cuda_flash_backward
        if query.dtype == torch.float32:
            return _cuda_efficient, _cuda_efficient_backward
    return _plain, _plain_backward


def _cpu(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    q_dim, v_dim = q.shape[-1], v.shape[-1]
    q, k, v = (_deeper(x, max(q_dim, v_dim)) for x in (q, k, v))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, strip.causal, attn_mask=strip.additive(q.dtype), scale=scale
    )
    return out[..., :v_dim], lse


def _cpu_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q_dim, v_dim = q.shape[-1], v.shape[-1]
    grad, out, q, k, v = (_deeper(x, max(q_dim, v_dim)) for x in (grad, out, q, k, v))
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, strip.causal, attn_mask=strip.additive(q.dtype), scale=scale
    )
    return grads[0][..., :q_dim], grads[1][..., :q_dim], grads[2][..., :v_dim]


def _deeper(x: Tensor, dim: int) -> Tensor:
    """x with zeros up to that dim: the operator wants the same for all."""
    return x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1]))


def _cuda_flash(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, strip.causal, False, scale=scale)
    return found[0], found[1]


def _cuda_flash_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.empty((), dtype=torch.long, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, strip.causal,
        none, none, scale=scale,
    )  # fmt: skip


def _cuda_efficient(
    q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, strip.causal, scale=scale
    )
    return out, lse[..., : q.shape[-2]]  # the operator rounds their number up


def _cuda_efficient_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.empty((), dtype=torch.long, device=q.device)
    lse = pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, none, none, 0.0, (True, True, True, False), strip.causal,
        scale=scale,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


def _plain(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, strip, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return weights.to(v.dtype) @ v, lse


def _plain_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(q, k, strip, scale) - lse[..., None]).exp()
    inner = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    slopes = (weights * ((grad @ v.mT).to(lse.dtype) - inner)).to(q.dtype)
    return scale * (slopes @ k), scale * (slopes.mT @ q), weights.to(v.dtype).mT @ grad


def _scores(q: Tensor, k: Tensor, strip: Strip, scale: float) -> Tensor:
    scores = (q * scale).to(wide(q.dtype)) @ k.mT.to(wide(k.dtype))
    mask = strip.additive(scores.dtype)
    return scores if mask is None else scores + mask
