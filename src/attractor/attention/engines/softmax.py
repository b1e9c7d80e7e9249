"""Softmax attention in O(T) memory that returns the log-sum-exp of its rows.

With it, one softmax can be divided: most keys go through a fused operator, the few whose values differ
from row to row are computed separately, and both get one normalisation (`split_softmax`). The operators
are torch's own (`backends`) where one serves a scope: on CPUs, and on CUDA for causal masks, bands and
packed documents. All other scopes are computed in strips of rows, on CUDA in plain torch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention.engines.backends import PLAIN, Operator, Strip, in_rows, part
from attractor.attention.engines.selection import choose, first_row, may_sync
from attractor.attention.lengths import strips
from attractor.attention.masks import Scope
from attractor.attention.precision import accumulate_dtype, first_derivatives_only

ROWS = 512  # of a strip whose rows differ in what they may attend to
ENTRIES = 1 << 23  # entries of a map that plain torch holds at a time


def split_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near: Sequence[Tensor],
    scope: Scope | None,
    scale: float,
    operator: Operator | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return attention under one softmax over the keys of a scope and over further scores per row.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``.
        near: At least one tensor of further scores ``[batch, heads, queries, n]``, all of one dtype;
            -inf for masked ones.
        scope: The other keys that the softmax is over. None: there are none.
        operator: What `selection.choose` returns for the scope. None: it is chosen here.

    Returns:
        The sum over the scope's keys of weight times value ``[batch, heads, last queries, value dim]``,
        without the first rows if these have no keys in scope; and the weights of the further scores
        ``[batch, heads, queries, n]``, one tensor per tensor of `near`. All weights of a row sum to 1,
        or to 0 if it may attend to no key.

    Requires: The gradients of both outputs come from one sum in which the weights enter linearly. Rows
    whose first gradient is zero have a zero second gradient.
    """
    out, *weights = _SplitSoftmax.apply(query, key, value, scope, scale, operator, *near)
    return out, weights


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scope: Scope,
    scale: float,
    operator: Operator | None = None,
) -> Tensor:
    """Return attention within a scope, ``[batch, heads, last queries, value dim]``, as `attend` does."""
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
        *near: Tensor,
    ) -> tuple[Tensor, ...]:
        lse = torch.cat(near, -1).logsumexp(-1)
        if scope is None:
            part, share = value.new_zeros(*query.shape[:-1], value.shape[-1]), lse.new_ones(())
        else:
            part, part_lse = attend(query, key, value, scope, scale, operator)
            lse = torch.logaddexp(lse, part_lse)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        if scope is not None:
            share = (part_lse - lse).exp()[..., lse.shape[-1] - part.shape[-2] :, None]
        # Weights of their own memory: if they were views of one tensor, AOTAutograd could save both the
        # tensor and a view for the backward pass and declare both free for reuse, and Inductor would
        # overwrite the tensor before the view is read (torch 2.11 and 2.13).
        weights = [(x - lse[..., None]).exp() for x in near]
        ctx.scope, ctx.scale, ctx.operator = scope, scale, operator
        # Neither another name for an output nor one changed in place may be saved: torch 2.11 compiles
        # that to a gradient of zero.
        ctx.save_for_backward(query, key, value, part, share, lse, *weights)
        return part * share, *weights

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad_far: Tensor, *grad_weights: Tensor) -> tuple[Any, ...]:
        query, key, value, part, share, lse, *weights = ctx.saved_tensors
        total = lse.new_zeros(*lse.shape, 1)
        for of_weight, weight in zip(grad_weights, weights):
            total = total + (of_weight * weight).sum(-1, keepdim=True)

        def of_near() -> list[Tensor]:
            return [weight * (of_weight - total) for of_weight, weight in zip(grad_weights, weights)]

        if ctx.scope is None:
            return None, None, None, None, None, None, *of_near()
        grad = grad_far.to(value.dtype)
        top = total.shape[-2] - part.shape[-2]
        total = total + pad((grad_far * part).sum(-1, keepdim=True) * share, (0, 0, top, 0))
        out = output_with_product(grad, total[..., top:, :])
        how = ctx.scope, ctx.scale, ctx.operator
        grads = attend_backward(grad, query, key, value, out, lse, *how)
        return *grads, None, None, None, *of_near()


def output_with_product(grad: Tensor, total: Tensor) -> Tensor:
    """Return a multiple of `grad` whose inner product with it is `total` ``[..., rows, 1]``.

    `attend_backward` subtracts <grad, out> from the gradient of every score and uses `out` for nothing
    else. For one softmax over its keys and others, it must subtract the sum over both: `total`.
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
        # Values of zero, and an output whose product with its gradient is -grad: what is left of the
        # operator's backward is weights * grad.
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
    zeros and -inf; if the first rows are such, the output begins after them. `operator` is what
    `selection.choose` returns for the scope; None: it is chosen here.
    """
    query, key, value = (in_rows(x) for x in (query, key, value))
    if operator is None:
        operator = choose(query, key, value, scope)
    top = first_row(scope)
    out = lse = None
    for strip in _strips(query, scope, operator):
        strip_out, strip_lse = operator.forward(*strip.cut(query, key, value), strip, scale)
        if strip.empty_rows is not None:
            strip_out = strip_out.masked_fill(strip.empty_rows[..., None], 0.0)
            strip_lse = strip_lse.masked_fill(strip.empty_rows, -torch.inf)
        if strip.rows.start == top and strip.rows.stop == scope.queries:
            return strip_out, pad(strip_lse, (top, 0), value=-torch.inf) if top else strip_lse
        if out is None or lse is None:
            out, lse = _nothing(query, value, scope)
        lse[..., strip.rows] = strip_lse
        out[..., strip.rows.start - top : strip.rows.stop - top, :] = strip_out
    return _nothing(query, value, scope) if out is None or lse is None else (out, lse)


def _nothing(query: Tensor, value: Tensor, scope: Scope) -> tuple[Tensor, Tensor]:
    """Return what `attend` does for rows without keys."""
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

    With weights ``exp(score - lse)`` the gradient of a score is ``weight * (<grad, value> - <grad,
    out>)``. `grad` and `out` are of the last rows, as `attend` returns them.
    """
    grad, query, key, value, out = (in_rows(x) for x in (grad, query, key, value, out))
    if operator is None:
        operator = choose(query, key, value, scope)
    sums = None
    top = first_row(scope)
    for strip in _strips(query, scope, operator):
        rows = slice(strip.rows.start - top, strip.rows.stop - top)
        grads = operator.backward(
            part(grad, rows), part(out, rows), *strip.cut(query, key, value), lse[..., strip.rows],
            strip, scale,
        )  # fmt: skip
        if operator.strip is not None:
            return (
                _placed(grads[0], strip.rows, query),
                _placed(grads[1], strip.columns, key),
                _placed(grads[2], strip.columns, value),
            )
        if sums is None:  # sums over strips lose little in half precision if kept in float32
            sums = [torch.zeros_like(x, dtype=accumulate_dtype(x.dtype)) for x in (query, key, value)]
        sums[0][..., strip.rows, :] += grads[0]
        sums[1][..., strip.columns, :] += grads[1]
        sums[2][..., strip.columns, :] += grads[2]
    if sums is None:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    return sums[0].to(query.dtype), sums[1].to(key.dtype), sums[2].to(value.dtype)


def _placed(x: Tensor, where: slice, whole: Tensor) -> Tensor:
    """Return a tensor like `whole` that holds x in some of its tokens and zeros elsewhere."""
    if x.shape == whole.shape:
        return x
    full = torch.empty_like(whole)
    full[..., : where.start, :], full[..., where.stop :, :] = 0.0, 0.0
    full[..., where, :] = x
    return full


def _strips(query: Tensor, scope: Scope, operator: Operator) -> Iterator[Strip]:
    """Yield the rows that may attend to some key: one strip if the operator can, else many."""
    if operator.strip is not None:
        rows, columns = operator.strip.rows, operator.strip.columns
        if rows.start < rows.stop and columns.start < columns.stop:
            yield operator.strip
        return
    height = ROWS
    if scope.left is not None and scope.right is not None:  # a strip meets its height and a band's width
        height = min(ROWS, max(128, (scope.left + scope.right) // 2))
    if operator is PLAIN:
        height = _plain_height(scope, ENTRIES // max(1, query.shape[0] * query.shape[1]))
    ranges = _document_columns(scope, height) if may_sync(query.device) else None
    for n, (start, stop) in enumerate(strips(first_row(scope), scope.queries, height)):
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
    """Return the height of strips with that many entries of a map."""
    if scope.left is None or scope.right is None:
        return max(1, entries // max(1, scope.keys))
    width = scope.left + scope.right  # and the height: height * (height + width) entries
    return max(1, int((width * width + 4 * entries) ** 0.5 - width) // 2)


def _document_columns(scope: Scope, height: int) -> tuple[list[int], list[int]] | None:
    """Return for each strip the first key of its documents, and one past the last."""
    ranges = scope.document_ranges()
    if ranges is None:
        return None
    top = first_row(scope)
    sides = (-top, -(scope.queries - top) % height)
    first = pad(ranges[0], sides, value=scope.keys).unflatten(-1, (-1, height)).amin((0, 2))
    last = pad(ranges[1], sides, value=0).unflatten(-1, (-1, height)).amax((0, 2))
    begins, ends = torch.stack((first, last)).tolist()  # the device is waited for once
    return begins, ends
