"""Softmax attention in O(T) memory that returns the log-sum-exp of its rows.

The log-sum-exp makes it possible to divide one softmax (`split_softmax`): a fused operator computes most
keys, and the few keys whose values differ from row to row are computed separately. The operators are
those of torch (`backends`) on CPUs, and on CUDA for causal masks, bands and packed documents. All other
scopes are computed in strips of rows, on CUDA in plain torch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention.engines.backends import PLAIN, aligned_rows
from attractor.attention.engines.selection import choose, first_row, may_sync
from attractor.attention.engines.strips import Operator, Strip, take_tokens
from attractor.attention.lengths import row_ranges
from attractor.attention.masks import Scope
from attractor.attention.precision import accumulate_dtype, first_derivatives_only

ROWS = 512  # rows per strip if rows may attend to different keys
ENTRIES = 1 << 23  # entries of a map that plain torch computes at a time


def split_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundary_scores: Sequence[Tensor],
    scope: Scope | None,
    scale: float,
    operator: Operator | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return attention with one softmax over the keys of a scope and over additional scores per row.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``.
        boundary_scores: At least one tensor of additional scores ``[batch, heads, queries, n]``, all of
            one dtype; -inf for masked entries.
        scope: The other keys of the softmax; None if there are none.
        scale: Scale of the scores.
        operator: The result of `selection.choose` for the scope; None to choose it here.

    Returns:
        The sum over the scope's keys of weight times value ``[batch, heads, last queries, value dim]``,
        without the first rows if these have no keys in the scope; and the weights of the additional
        scores, in tensors of the same shapes. The weights of a row sum to 1, or to 0 if the row may
        attend to no key.

    Requires: The gradients of both outputs come from one sum in which the weights enter linearly. Rows
    whose first gradient is zero have a zero second gradient.
    """
    out, *weights = _SplitSoftmax.apply(query, key, value, scope, scale, operator, *boundary_scores)
    return out, weights


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scope: Scope,
    scale: float,
    operator: Operator | None = None,
) -> Tensor:
    """Return the output of `attend`, ``[batch, heads, last queries, value dim]``, with gradients."""
    return _Attention.apply(query, key, value, scope, scale, operator)


def log_sum_exp(query: Tensor, key: Tensor, scope: Scope, scale: float) -> Tensor:
    """Return the log-sum-exp of scores ``[batch, heads, queries]``; -inf for rows without keys."""
    return _LogSumExp.apply(query, key, scope, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scope: Scope,
        scale: float,
        operator: Operator | None,
    ) -> Tensor:
        out, lse = attend(query, key, value, scope, scale, operator)
        ctx.options = scope, scale, operator
        ctx.save_for_backward(query, key, value, out, lse.masked_fill(lse == -torch.inf, 0.0))
        # See `_SplitSoftmax`: `attend` may have written to `out` in place.
        return out.clone() if torch.compiler.is_compiling() else out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *attend_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None


class _SplitSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scope: Scope | None,
        scale: float,
        operator: Operator | None,
        *boundary_scores: Tensor,
    ) -> tuple[Tensor, ...]:
        lse = torch.cat(boundary_scores, -1).logsumexp(-1)
        if scope is None:
            out, share = value.new_zeros(*query.shape[:-1], value.shape[-1]), lse.new_ones(())
        else:
            out, scope_lse = attend(query, key, value, scope, scale, operator)
            lse = torch.logaddexp(lse, scope_lse)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        if scope is not None:
            share = (scope_lse - lse).exp()[..., lse.shape[-1] - out.shape[-2] :, None]
        # The weights have separate memory. If they were views of one tensor, AOTAutograd could save both
        # the tensor and a view for the backward pass and declare both free for reuse, and Inductor would
        # overwrite the tensor before the view is read (torch 2.11 and 2.13).
        weights = [(x - lse[..., None]).exp() for x in boundary_scores]
        ctx.scope, ctx.scale, ctx.operator = scope, scale, operator
        # An alias of an output, or an output changed in place, must not be saved: torch 2.11 compiles
        # that to a gradient of zero.
        ctx.save_for_backward(query, key, value, out, share, lse, *weights)
        return out * share, *weights

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad_out: Tensor, *grad_weights: Tensor) -> tuple[Any, ...]:
        query, key, value, out, share, lse, *weights = ctx.saved_tensors
        total = lse.new_zeros(*lse.shape, 1)
        for grad_weight, weight in zip(grad_weights, weights):
            total = total + (grad_weight * weight).sum(-1, keepdim=True)
        grads: tuple[Any, ...] = None, None, None
        if ctx.scope is not None:
            grad = grad_out.to(value.dtype)
            top = total.shape[-2] - out.shape[-2]
            total = total + pad((grad_out * out).sum(-1, keepdim=True) * share, (0, 0, top, 0))
            out = output_with_product(grad, total[..., top:, :])
            options = ctx.scope, ctx.scale, ctx.operator
            grads = attend_backward(grad, query, key, value, out, lse, *options)
        grad_scores = [weight * (grad - total) for grad, weight in zip(grad_weights, weights)]
        return *grads, None, None, None, *grad_scores


def output_with_product(grad: Tensor, total: Tensor) -> Tensor:
    """Return a multiple of `grad` whose inner product with it is `total` ``[..., rows, 1]``.

    `attend_backward` uses `out` only to subtract <grad, out> from the gradient of every score. For one
    softmax over its keys and other keys, it must subtract the sum over both, `total`.
    """
    size = torch.linalg.vector_norm(grad, dim=-1, keepdim=True, dtype=total.dtype)
    return (grad * torch.where(size > 1e-30, total / size / size, 0.0)).to(grad.dtype)


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
        # With values of zero, and an output whose product with its gradient is -grad, the operator's
        # backward computes weights * grad.
        top = first_row(ctx.scope)
        first = torch.zeros_like(query[..., top:, :])
        first[..., 0] = 1
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        out = first * -grad[..., top:, None].to(query.dtype)
        grads = attend_backward(first, query, key, torch.zeros_like(key), out, lse, ctx.scope, ctx.scale)
        return grads[0], grads[1], None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scope: Scope,
    scale: float,
    operator: Operator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs ``[batch, heads, last queries, value dim]`` and their log-sum-exp.

    The log-sum-exp ``[batch, heads, queries]`` has at least float32. Rows that may attend to no key have
    zeros and -inf. If the first rows are such, the output begins after them.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``.
        scope: Which keys a query may attend to.
        scale: Scale of the scores.
        operator: The result of `selection.choose` for the scope; None to choose it here.
    """
    query, key, value = (aligned_rows(x) for x in (query, key, value))
    if operator is None:
        operator = choose(query, key, value, scope)
    top = first_row(scope)
    out = lse = None
    for strip in _strips(query, scope, operator):
        strip_out, strip_lse = operator.forward(*strip.select(query, key, value), strip, scale)
        if strip.empty_rows is not None:
            strip_out = strip_out.masked_fill(strip.empty_rows[..., None], 0.0)
            strip_lse = strip_lse.masked_fill(strip.empty_rows, -torch.inf)
        if strip.rows.start == top and strip.rows.stop == scope.queries:
            return strip_out, pad(strip_lse, (top, 0), value=-torch.inf) if top else strip_lse
        if out is None or lse is None:
            out, lse = _empty_result(query, value, scope)
        lse[..., strip.rows] = strip_lse
        out[..., strip.rows.start - top : strip.rows.stop - top, :] = strip_out
    return _empty_result(query, value, scope) if out is None or lse is None else (out, lse)


def _empty_result(query: Tensor, value: Tensor, scope: Scope) -> tuple[Tensor, Tensor]:
    """Return the result of `attend` for rows without keys."""
    rows = scope.queries - first_row(scope)
    out = value.new_zeros(*query.shape[:2], rows, value.shape[-1])
    return out, query.new_full(query.shape[:-1], -torch.inf, dtype=accumulate_dtype(query.dtype))


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scope: Scope,
    scale: float,
    operator: Operator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, for any finite log-sum-exp and any output.

    With weights ``exp(score - lse)``, the gradient of a score is ``weight * (<grad, value> - <grad,
    out>)``. `grad` and `out` have the rows that `attend` returns.
    """
    grad, query, key, value, out = (aligned_rows(x) for x in (grad, query, key, value, out))
    if operator is None:
        operator = choose(query, key, value, scope)
    sums = None
    top = first_row(scope)
    for strip in _strips(query, scope, operator):
        rows = slice(strip.rows.start - top, strip.rows.stop - top)
        grads = operator.backward(
            take_tokens(grad, rows), take_tokens(out, rows), *strip.select(query, key, value),
            lse[..., strip.rows], strip, scale,
        )  # fmt: skip
        if operator.strip is not None:
            return (
                _scatter_tokens(grads[0], strip.rows, query),
                _scatter_tokens(grads[1], strip.columns, key),
                _scatter_tokens(grads[2], strip.columns, value),
            )
        if sums is None:  # sums over strips are accumulated in at least float32
            sums = [torch.zeros_like(x, dtype=accumulate_dtype(x.dtype)) for x in (query, key, value)]
        sums[0][..., strip.rows, :] += grads[0]
        sums[1][..., strip.columns, :] += grads[1]
        sums[2][..., strip.columns, :] += grads[2]
    if sums is None:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    return sums[0].to(query.dtype), sums[1].to(key.dtype), sums[2].to(value.dtype)


def _scatter_tokens(x: Tensor, tokens: slice, like: Tensor) -> Tensor:
    """Return a tensor with the shape of `like` that contains x in some tokens, and zeros elsewhere."""
    if x.shape == like.shape:
        return x
    result = torch.empty_like(like)
    result[..., : tokens.start, :], result[..., tokens.stop :, :] = 0.0, 0.0
    result[..., tokens, :] = x
    return result


def _strips(query: Tensor, scope: Scope, operator: Operator) -> Iterator[Strip]:
    """Yield the rows with keys, in one strip if the operator can compute it, otherwise in many."""
    if operator.strip is not None:
        rows, columns = operator.strip.rows, operator.strip.columns
        if rows.start < rows.stop and columns.start < columns.stop:
            yield operator.strip
        return
    height = ROWS
    if scope.left is not None and scope.right is not None:  # a strip has height + width of band keys
        height = min(ROWS, max(128, (scope.left + scope.right) // 2))
    if operator is PLAIN:
        height = _plain_height(scope, ENTRIES // max(1, query.shape[0] * query.shape[1]))
    ranges = _document_columns(scope, height) if may_sync(query.device) else None
    for n, (start, stop) in enumerate(row_ranges(first_row(scope), scope.queries, height)):
        rows = slice(start, stop)
        columns = scope.columns(rows)
        if ranges is not None:
            columns = slice(max(columns.start, ranges[0][n]), min(columns.stop, ranges[1][n]))
        if columns.stop <= columns.start:
            continue
        allowed = scope.tile(rows, columns, query.device)
        empty_rows = None if allowed is None else ~allowed.any(-1)
        bias = scope.bias_tile(rows, columns)
        yield Strip(rows, columns, False, allowed, bias, empty_rows)


def _plain_height(scope: Scope, entries: int) -> int:
    """Return the height of strips with this number of entries of the map."""
    if scope.left is None or scope.right is None:
        return max(1, entries // max(1, scope.keys))
    width = scope.left + scope.right  # a strip has height * (height + width) entries
    return max(1, int((width * width + 4 * entries) ** 0.5 - width) // 2)


def _document_columns(scope: Scope, height: int) -> tuple[list[int], list[int]] | None:
    """Return, for each strip, the first key of its documents and one past the last key."""
    ranges = scope.document_ranges()
    if ranges is None:
        return None
    top = first_row(scope)
    sides = (-top, -(scope.queries - top) % height)
    first = pad(ranges[0], sides, value=scope.keys).unflatten(-1, (-1, height)).amin((0, 2))
    last = pad(ranges[1], sides, value=0).unflatten(-1, (-1, height)).amax((0, 2))
    begins, ends = torch.stack((first, last)).tolist()  # one synchronisation with the device
    return begins, ends
