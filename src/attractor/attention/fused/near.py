"""Causal attention of a linear PDE: keys near the wall in one kernel, all others in a fused operator.

As in `wall`: a row's last keys, within reach of the wall behind its own, spread their weights over
twice the reach; all others go through the operator, with stepped values. Forward is three launches:
`values.step`, the operator, and `_forward`, which has both shares under one softmax. Backward gives the
operator the merged output and log-sum-exp, and adds the near share to what it returns: `_rows` what a
row needs, `_keys` what a key gets back, through the steps of its value too.

The share of a row is a few products of vectors, so kernels read the key and value rows at every offset,
as in `values`, and are bound by memory. Only keys up to its own are ever read for a row: nothing later
can change a bit of it.
"""

# Arguments of kernels have no types that mypy could know.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from attractor.attention import flash
from attractor.attention.fused.values import (
    added_up,
    by_rows,
    give_back,
    operator,
    room,
    rows_at,
    shared_out,
    step,
    strides,
    taps_gradient,
    tile,
)
from attractor.attention.masks import Scope
from attractor.attention.precision import first_derivatives_only


def causal(query: Tensor, key: Tensor, value: Tensor, taps: Tensor, scale: float) -> Tensor:
    """The output ``[batch, heads, tokens, value dim]``, for any number of tokens.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, as many heads and tokens each.
        taps: of the PDE and its steps, as `values.taps` makes them.
    """
    return _Causal.apply(query, key, value, taps, scale)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, taps: Tensor, scale: float
    ) -> Tensor:
        reach = taps.shape[-1] // 2
        stepped = step(value, taps, None)
        scope = _far(query, reach)
        far, far_lse = flash.attend(*_shifted(query, key, stepped, reach), scope, scale)
        out, lse = merge_near(query, key, value, far, far_lse, taps, scale)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, stepped, taps, out, lse)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, stepped, taps, out, lse = ctx.saved_tensors
        reach, needed = taps.shape[-1] // 2, ctx.needs_input_grad[3]
        grad = by_rows(grad)
        far = flash.attend_backward(
            grad[..., reach:, :], *_shifted(query, key, stepped, reach), out[..., reach:, :],
            lse[..., reach:], _far(query, reach), ctx.scale,
        )  # fmt: skip
        of_query, slopes, spread, near_taps = near_rows(
            grad, query, key, value, out, lse, taps, far[0], ctx.scale, needed
        )
        of_key, of_value, of_taps = near_keys(
            grad, query, value, slopes, spread, taps, far[1], far[2], needed
        )
        return of_query, of_key, of_value, of_taps + near_taps if needed else None, None


def _far(query: Tensor, reach: int) -> Scope:
    """Keys up to i - reach for row i are an ordinary causal problem, of fewer rows and keys."""
    size = max(query.shape[-2] - reach, 0)
    return Scope(size, size, right=0)


def _shifted(query: Tensor, key: Tensor, value: Tensor, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    size = max(query.shape[-2] - reach, 0)
    return query[..., reach:, :], key[..., :size, :], value[..., :size, :]


@triton.jit
def _column(x, n: tl.constexpr, WIDTH: tl.constexpr):
    """Column n of ``[rows, WIDTH]``."""
    return tl.sum(tl.where((tl.arange(0, WIDTH) == n)[None, :], x, 0.0), 1)


@triton.jit
def _scores(
    query, key, key_t, at, column, inside, scale, scale_rest,
    REACH: tl.constexpr, ROWS: tl.constexpr, NEAR: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Scores ``[rows, NEAR]``; entry m is of key ``at - reach + 1 + m``, -inf if there is none."""
    entry = tl.arange(0, NEAR)[None, :]
    scores = tl.full([ROWS, NEAR], -float("inf"), dtype=TYPE)
    for m in tl.static_range(REACH):
        there = at - (REACH - 1 - m)
        ok = there >= 0
        rows = rows_at(key, key_t, there, column, ok[:, None] & inside, TYPE)
        score = tl.sum(query * rows, 1)
        score = score * scale + score * scale_rest
        scores = tl.where((entry == m) & ok[:, None], score[:, None], scores)
    return scores


@triton.jit
def _matrix(taps, at, m: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr):
    """What weight 1 of entry m becomes, ``[rows, WIDTH]``: entry n at key ``at - 2 reach + 1 + n``."""
    before = tl.minimum(tl.maximum(at - (REACH - 1 - m), 0), REACH)
    kind = (before * (REACH + 1) + (REACH - 1 - m)) * (2 * REACH + 1)
    tap = tl.arange(0, WIDTH) - m
    ok = (tap >= 0) & (tap < 2 * REACH - m)
    return tl.load(taps + kind[:, None] + tap[None, :], mask=ok[None, :], other=0.0)


@triton.jit
def _forward(
    query, key, value, far, far_lse, taps, out, lse,
    scale, scale_rest, tokens, heads,
    query_b, query_h, query_t, key_b, key_h, key_t,
    value_b, value_h, value_t, far_b, far_h, far_t,
    out_b, out_h, out_t, taps_h,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, NEAR: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some rows of one head: near weights, spread, times values, with the far share."""
    TYPE: tl.constexpr = taps.dtype.element_ty
    blocks = tl.cdiv(tokens, ROWS)
    pair = tl.program_id(0) // blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    at = tl.minimum(row, tokens - 1)
    column, deep = tl.arange(0, COLUMNS), tl.arange(0, DEEP)
    inside, deep_inside = (column < DIM)[None, :], (deep < DEPTH)[None, :]
    query += batch * query_b + head * query_h
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    far += batch * far_b + head * far_h
    taps += head * taps_h
    own = rows_at(query, query_t, at, column, inside, TYPE)
    scores = _scores(own, key, key_t, at, column, inside, scale, scale_rest, REACH, ROWS, NEAR, TYPE)
    late = at >= REACH
    far_lse += pair.to(tl.int64) * (tokens - REACH)
    beyond = tl.load(far_lse + (at - REACH), mask=late, other=-float("inf")).to(TYPE)
    most = tl.maximum(tl.max(scores, 1), beyond)
    total = tl.sum(tl.exp(scores - most[:, None]), 1) + tl.exp(beyond - most)
    total = most + tl.log(total)
    tl.store(lse + pair.to(tl.int64) * tokens + row, total, mask=row < tokens)
    weights = tl.exp(scores - total[:, None])
    spread = tl.zeros([ROWS, WIDTH], dtype=TYPE)
    for m in tl.static_range(REACH):
        spread += _column(weights, m, NEAR)[:, None] * _matrix(taps, at, m, REACH, WIDTH)
    sums = rows_at(far, far_t, at - REACH, deep, late[:, None] & deep_inside, TYPE)
    sums *= tl.exp(beyond - total)[:, None]
    for n in tl.static_range(2 * REACH):
        there = at - (2 * REACH - 1 - n)
        rows = rows_at(value, value_t, there, deep, (there >= 0)[:, None] & deep_inside, TYPE)
        sums += _column(spread, n, WIDTH)[:, None] * rows
    out += batch * out_b + head * out_h + row.to(tl.int64)[:, None] * out_t + deep[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=(row < tokens)[:, None] & deep_inside)


@triton.jit
def _rows(
    grad, query, key, value, out, lse, taps, far,
    of_query, slopes, spreads, parts, firsts,
    scale, scale_rest, tokens, heads,
    grad_b, grad_h, grad_t, query_b, query_h, query_t,
    key_b, key_h, key_t, value_b, value_h, value_t,
    out_b, out_h, out_t, far_b, far_h, far_t,
    found_b, found_h, found_t, taps_h,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, NEAR: tl.constexpr, WIDTH: tl.constexpr,
    OF_TAPS: tl.constexpr,
):  # fmt: skip
    """The gradients of some queries; those of their near scores, and spread weights, for `_keys`."""
    TYPE: tl.constexpr = taps.dtype.element_ty
    blocks = tl.cdiv(tokens, ROWS)
    pair, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    at = tl.minimum(row, tokens - 1)
    column, deep = tl.arange(0, COLUMNS), tl.arange(0, DEEP)
    inside, deep_inside = (column < DIM)[None, :], (deep < DEPTH)[None, :]
    grad += batch * grad_b + head * grad_h
    query += batch * query_b + head * query_h
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    out += batch * out_b + head * out_h
    far += batch * far_b + head * far_h
    taps += head * taps_h
    entry, wide_entry = tl.arange(0, NEAR)[None, :], tl.arange(0, WIDTH)
    own = rows_at(query, query_t, at, column, inside, TYPE)
    scores = _scores(own, key, key_t, at, column, inside, scale, scale_rest, REACH, ROWS, NEAR, TYPE)
    total = tl.load(lse + pair.to(tl.int64) * tokens + at)
    weights = tl.exp(scores - total[:, None])
    slope = rows_at(grad, grad_t, at, deep, deep_inside, TYPE)
    inner = tl.sum(slope * rows_at(out, out_t, at, deep, deep_inside, TYPE), 1)
    of_spread = tl.zeros([ROWS, WIDTH], dtype=TYPE)
    for n in tl.static_range(2 * REACH):
        there = at - (2 * REACH - 1 - n)
        rows = rows_at(value, value_t, there, deep, (there >= 0)[:, None] & deep_inside, TYPE)
        of_spread += tl.where((wide_entry == n)[None, :], tl.sum(slope * rows, 1)[:, None], 0.0)
    spread = tl.zeros([ROWS, WIDTH], dtype=TYPE)
    of_scores = tl.zeros([ROWS, NEAR], dtype=TYPE)
    sums = rows_at(far, far_t, at - REACH, column, (at >= REACH)[:, None] & inside, TYPE)
    for m in tl.static_range(REACH):
        weight, matrix = _column(weights, m, NEAR), _matrix(taps, at, m, REACH, WIDTH)
        spread += weight[:, None] * matrix
        of_score = weight * (tl.sum(of_spread * matrix, 1) - inner)
        of_score = of_score * scale + of_score * scale_rest
        of_scores += tl.where(entry == m, of_score[:, None], 0.0)
        there = at - (REACH - 1 - m)
        rows = rows_at(key, key_t, there, column, (there >= 0)[:, None] & inside, TYPE)
        sums += of_score[:, None] * rows
        if OF_TAPS:
            counted = tl.where(row < tokens, weight, 0.0)
            place = (REACH - 1 - m) * (2 * REACH + 1) + wide_entry - m
            ok = (wide_entry >= m) & (wide_entry < 2 * REACH)
            far_off = tl.where(there >= REACH, counted, 0.0)
            part = parts + tl.program_id(0).to(tl.int64) * (REACH * (2 * REACH + 1)) + place
            tl.store(part, tl.sum(far_off[:, None] * of_spread, 0), mask=ok)
            if block == 0:
                for before in range(REACH):
                    near_first = tl.where(there == before, counted, 0.0)
                    first = firsts + (pair.to(tl.int64) * REACH + before) * (REACH * (2 * REACH + 1))
                    tl.store(first + place, tl.sum(near_first[:, None] * of_spread, 0), mask=ok)
    written = (row < tokens)[:, None]
    of_query += batch * found_b + head * found_h + row.to(tl.int64)[:, None] * found_t
    tl.store(of_query + column[None, :], sums.to(of_query.dtype.element_ty), mask=written & inside)
    slopes += pair.to(tl.int64) * REACH * tokens + entry.to(tl.int64) * tokens + row[:, None]
    tl.store(slopes, of_scores, mask=written & (entry < REACH))
    wide_entry = wide_entry[None, :]
    spreads += pair.to(tl.int64) * 2 * REACH * tokens + wide_entry.to(tl.int64) * tokens + row[:, None]
    tl.store(spreads, spread, mask=written & (wide_entry < 2 * REACH))


@triton.jit
def _keys(
    grad, query, value, slopes, spreads, taps, far_key,
    far_value, of_key, of_value, parts, tokens, heads, repeat,
    grad_b, grad_h, grad_t, query_b, query_h, query_t,
    value_b, value_h, value_t,
    far_key_b, far_key_h, far_key_t, far_value_b, far_value_h, far_value_t,
    of_key_b, of_key_h, of_key_t, of_value_b, of_value_h, of_value_t,
    taps_h,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, TAPS: tl.constexpr, OF_TAPS: tl.constexpr,
):  # fmt: skip
    """The gradients of some keys and their values, `repeat` blocks of one head one after the other."""
    TYPE: tl.constexpr = taps.dtype.element_ty
    chunks = tl.cdiv(tokens, ROWS * repeat)
    pair = tl.program_id(0) // chunks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    column, deep = tl.arange(0, COLUMNS), tl.arange(0, DEEP)
    inside, deep_inside = (column < DIM)[None, :], (deep < DEPTH)[None, :]
    grad += batch * grad_b + head * grad_h
    query += batch * query_b + head * query_h
    value += batch * value_b + head * value_h
    far_key += batch * far_key_b + head * far_key_h
    far_value += batch * far_value_b + head * far_value_h
    of_key += batch * of_key_b + head * of_key_h
    of_value += batch * of_value_b + head * of_value_h
    slopes += pair.to(tl.int64) * REACH * tokens
    spreads += pair.to(tl.int64) * 2 * REACH * tokens
    taps += head * taps_h
    free = tl.zeros([ROWS, TAPS], dtype=TYPE)
    for block in range(repeat):
        row = ((tl.program_id(0) % chunks) * repeat + block) * ROWS + tl.arange(0, ROWS)
        at = tl.minimum(row, tokens - 1)
        written = (row < tokens)[:, None]
        sums = rows_at(far_key, far_key_t, at, column, (at < tokens - REACH)[:, None] & inside, TYPE)
        for n in tl.static_range(REACH):
            there = at + n
            ok = there < tokens
            slope = tl.load(slopes + (REACH - 1 - n) * tokens + there, mask=ok, other=0.0)
            rows = rows_at(query, query_t, there, column, ok[:, None] & inside, TYPE)
            sums += slope[:, None] * rows
        where = of_key + row.to(tl.int64)[:, None] * of_key_t + column[None, :]
        tl.store(where, sums.to(of_key.dtype.element_ty), mask=written & inside)
        sums = tl.zeros([ROWS, DEEP], dtype=TYPE)
        for n in tl.static_range(2 * REACH):
            there = at + n
            ok = there < tokens
            spread = tl.load(spreads + (2 * REACH - 1 - n) * tokens + there, mask=ok, other=0.0)
            rows = rows_at(grad, grad_t, there, deep, ok[:, None] & deep_inside, TYPE)
            sums += spread[:, None] * rows
        held = tl.zeros([ROWS, DEEP], dtype=TYPE)
        if OF_TAPS:
            held = rows_at(value, value_t, at, deep, written & deep_inside, TYPE)
        before, after = room(value, 0, at, tokens, 2 * REACH, False)
        sums, free = give_back(
            far_value, far_value_t, tokens - REACH, held, taps, at, before, after, deep, deep_inside,
            sums, free, REACH, TAPS, OF_TAPS,
        )  # fmt: skip
        where = of_value + row.to(tl.int64)[:, None] * of_value_t + deep[None, :]
        tl.store(where, sums.to(of_value.dtype.element_ty), mask=written & deep_inside)
    if OF_TAPS:
        tap = tl.arange(0, TAPS)
        parts += tl.program_id(0).to(tl.int64) * (2 * REACH + 1) + tap
        tl.store(parts, tl.sum(free, 0), mask=tap < 2 * REACH + 1)


@operator("merge_near")
def merge_near(
    query: Tensor, key: Tensor, value: Tensor, far: Tensor, far_lse: Tensor, taps: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs ``[batch, heads, tokens, value dim]`` and their log-sum-exp ``[batch, heads, tokens]``.

    Args:
        far: what the operator makes of the last rows, ``[batch, heads, tokens - reach, value dim]``.
        far_lse: its log-sum-exp ``[batch, heads, tokens - reach]``.
    """
    query, key, value, far, taps = (*map(by_rows, (query, key, value, far)), taps.contiguous())
    out, lse = _merge_near_like(query, key, value, far, far_lse, taps, scale)
    sizes, blocks, warps = _sizes(query, value, taps)
    near, width = _pow2(sizes[0]), _pow2(2 * sizes[0])
    wrap_triton(_forward)[(blocks,)](
        query, key, value, far, far_lse.contiguous(), taps, out, lse, *_two(scale),
        query.shape[2], query.shape[1], *strides(query), *strides(key), *strides(value), *strides(far),
        *strides(out), _taps_stride(taps), *sizes, near, width, num_warps=warps,
    )  # fmt: skip
    return out, lse


def _merge_near_like(
    query: Tensor, key: Tensor, value: Tensor, far: Tensor, far_lse: Tensor, taps: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(by_rows(value)), taps.new_empty(query.shape[:3])


@operator("near_rows")
def near_rows(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, taps: Tensor,
    far: Tensor, scale: float, of_taps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of query, and what `near_keys` needs; the near share of that of the taps.

    Args:
        far: the far share of the gradient of query ``[batch, heads, tokens - reach, dim]``.

    Returns:
        The gradient of query, that of near scores, times the scale, ``[batch, heads, reach, tokens]``,
        spread weights ``[batch, heads, 2 reach, tokens]``, and the gradient of the taps, without
        entries if it is not wanted.
    """
    grad, query, key, value, out, far = map(by_rows, (grad, query, key, value, out, far))
    taps, reach = taps.contiguous(), taps.shape[-1] // 2
    of_query, slopes, spread, _ = _near_rows_like(
        grad, query, key, value, out, lse, taps, far, scale, of_taps
    )
    sizes, blocks, warps = _sizes(query, value, taps)
    batch, heads = query.shape[:2]
    shape = reach, 2 * reach + 1
    parts = taps.new_zeros(blocks if of_taps else 0, *shape)
    firsts = taps.new_zeros(batch * heads if of_taps else 0, reach, *shape)
    near, width = _pow2(reach), _pow2(2 * reach)
    wrap_triton(_rows)[(blocks,)](
        grad, query, key, value, out, lse.contiguous(), taps, far, of_query, slopes, spread, parts,
        firsts, *_two(scale), query.shape[2], heads, *strides(grad), *strides(query), *strides(key),
        *strides(value), *strides(out), *strides(far), *strides(of_query), _taps_stride(taps), *sizes,
        near, width, of_taps, num_warps=warps,
    )  # fmt: skip
    if not of_taps:
        return of_query, slopes, spread, taps.new_empty(0)
    found = torch.zeros_like(taps)
    found[:, :reach, :reach] = added_up(firsts, taps, batch, heads)
    found[:, reach, :reach] = added_up(parts, taps, batch, heads)
    return of_query, slopes, spread, found


def _near_rows_like(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, taps: Tensor,
    far: Tensor, scale: float, of_taps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, tokens = query.shape[:3]
    reach = taps.shape[-1] // 2
    slopes = taps.new_empty(batch, heads, reach, tokens)
    spread = taps.new_empty(batch, heads, 2 * reach, tokens)
    of_query = torch.empty_like(by_rows(query))
    return of_query, slopes, spread, taps.new_empty(taps.shape if of_taps else 0)


@operator("near_keys")
def near_keys(
    grad: Tensor, query: Tensor, value: Tensor, slopes: Tensor, spread: Tensor, taps: Tensor,
    far_key: Tensor, far_value: Tensor, of_taps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of key and value, and the far share of that of the taps.

    Args:
        slopes, spread: as `near_rows` gives them.
        far_key, far_value: the operator's gradients of keys and stepped values, which are of the first
            tokens - reach.
    """
    grad, query, value, far_key, far_value = map(by_rows, (grad, query, value, far_key, far_value))
    taps, (batch, heads, tokens) = taps.contiguous(), query.shape[:3]
    of_key, of_value, _ = _near_keys_like(
        grad, query, value, slopes, spread, taps, far_key, far_value, of_taps
    )
    sizes, _, warps = _sizes(query, value, taps)
    repeat, programs = shared_out(batch * heads, triton.cdiv(tokens, sizes[3]), of_taps)
    parts = taps.new_empty(programs if of_taps else 0, taps.shape[-1])
    wrap_triton(_keys)[(programs,)](
        grad, query, value, slopes, spread, taps, far_key, far_value, of_key, of_value, parts,
        tokens, heads, repeat, *strides(grad), *strides(query), *strides(value), *strides(far_key),
        *strides(far_value), *strides(of_key), *strides(of_value), _taps_stride(taps), *sizes,
        _pow2(2 * sizes[0] + 1), of_taps, num_warps=warps,
    )  # fmt: skip
    if not of_taps:
        return of_key, of_value, taps.new_empty(0)
    return of_key, of_value, taps_gradient(far_value, value, None, taps, parts)


def _near_keys_like(
    grad: Tensor, query: Tensor, value: Tensor, slopes: Tensor, spread: Tensor, taps: Tensor,
    far_key: Tensor, far_value: Tensor, of_taps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_key, of_value = torch.empty_like(by_rows(query)), torch.empty_like(by_rows(value))
    return of_key, of_value, taps.new_empty(taps.shape if of_taps else 0)


merge_near.register_fake(_merge_near_like)
near_rows.register_fake(_near_rows_like)
near_keys.register_fake(_near_keys_like)


def _sizes(query: Tensor, value: Tensor, taps: Tensor) -> tuple[tuple[int, ...], int, int]:
    """(reach, dim, value dim, rows, columns, value columns) of a program; how many; and their warps."""
    dim, depth = int(query.shape[-1]), int(value.shape[-1])
    rows, _, warps = tile(max(dim, depth), query.dtype)
    columns, deep = (tile(x, query.dtype)[1] for x in (dim, depth))
    blocks = query.shape[0] * query.shape[1] * triton.cdiv(query.shape[2], rows)
    return (int(taps.shape[-1]) // 2, dim, depth, rows, columns, deep), blocks, warps


def _pow2(n: int) -> int:
    return max(2, triton.next_power_of_2(n))


def _taps_stride(taps: Tensor) -> int:
    return taps.stride(0) if taps.shape[0] > 1 else 0


def _two(scale: float) -> tuple[float, float]:
    """A number as a sum of two, for kernels take them in single precision."""
    far = (2.0**29 + 1.0) * scale  # rounds away all but the leading 24 bits
    high = far - (far - scale)
    return high, scale - high
