"""Kernels over blocks of keys: log-sum-exp and mean key; and split reaction-diffusion off the walls.

Where the reaction comes first and no wall is near, values are stepped instead of weights: what is left
is a softmax whose weights react.
"""

# Arguments of kernels have no types that mypy could know.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from attractor.attention.kernels.reaction.weights import (
    LOG2E,
    exp2,
    inverse,
    limits,
    logistic,
    rows_of,
    single,
    weights,
)


@triton.jit
def sums_kernel(
    query, key, first, last, lse, mean, scale, queries,
    keys, heads, query_b, query_h, query_t, key_b, key_h, key_t,
    mean_b, mean_h, mean_t,
    DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, MEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of some rows' scores, 0 where there are none, and the mean key."""
    scale = single(scale)
    blocks = tl.cdiv(queries, ROWS)
    pair, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    at, real = tl.minimum(row, queries - 1), row < queries
    key += batch * key_b + head * key_h
    lo, hi = limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    own = rows_of(query + batch * query_b + head * query_h, query_t, at, at >= 0, DIM, COLUMNS)
    most = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    inner, outer = tl.max(lo, 0), tl.min(hi, 0)
    for start in range(tl.min(lo, 0), tl.max(hi, 0) + 1, KEYS):
        here = start + tl.arange(0, KEYS)
        tile = rows_of(key, key_t, here, here < keys, DIM, COLUMNS)
        scores = tl.dot(own, tl.trans(tile), input_precision=PRECISION) * (scale * LOG2E)
        if (start < inner) | (start + KEYS - 1 > outer):
            ok = (here[None, :] >= lo[:, None]) & (here[None, :] <= hi[:, None])
            scores = tl.where(ok, scores, -float("inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new == -float("inf"), 0.0, new)
        x = exp2(scores - base[:, None])
        less = tl.exp2(most - base)
        total = total * less + tl.sum(x, 1)
        if MEAN:
            sums = tl.dot(x.to(tile.dtype), tile, sums * less[:, None], input_precision=PRECISION)
        most = new
    found = tl.where(total > 0, (most + tl.log2(total)) / LOG2E, 0.0)
    tl.store(lse + pair.to(tl.int64) * queries + row, found, mask=real)
    if MEAN:
        column = tl.arange(0, COLUMNS)
        sums /= tl.where(total > 0, total, 1.0)[:, None]
        mean += batch * mean_b + head * mean_h + row.to(tl.int64)[:, None] * mean_t + column[None, :]
        tl.store(mean, sums.to(mean.dtype.element_ty), mask=real[:, None] & (column < DIM)[None, :])


@triton.jit
def _full(lo, hi, KEYS: tl.constexpr):
    """Blocks of keys as (begin, first that all rows may attend to, end of these, end)."""
    begin, end = tl.min(lo, 0) // KEYS * KEYS, tl.max(hi, 0) + 1
    full = tl.cdiv(tl.max(lo, 0), KEYS) * KEYS
    stop = tl.maximum(tl.min(hi, 0) + 1, 0) // KEYS * KEYS
    full = tl.minimum(full, tl.maximum(stop, begin))
    return begin, tl.maximum(full, begin), tl.maximum(stop, tl.maximum(full, begin)), end


@triton.jit
def _far_part(
    sums, query, key, value, key_t, value_t, begin, end, lo,
    hi, lse, grown, scale, keys,
    DIM: tl.constexpr, DEPTH: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` with the values of keys begin .. end, times weights after the reaction."""
    for start in range(begin, end, KEYS):
        here = start + tl.arange(0, KEYS)
        tile = rows_of(key, key_t, here, here < keys, DIM, COLUMNS)
        x = weights(query, tile, scale, lse, PRECISION)
        if MASKED:
            x = tl.where((here[None, :] >= lo[:, None]) & (here[None, :] <= hi[:, None]), x, 0.0)
        x = logistic(x, grown)
        met = rows_of(value, value_t, here, here < keys, DEPTH, DEEP)
        sums = tl.dot(x.to(met.dtype), met, sums, input_precision=PRECISION)
    return sums


@triton.jit
def far_kernel(
    query, key, value, lse, growth, first, last, out, scale,
    queries, keys, heads,
    query_b, query_h, query_t, key_b, key_h, key_t,
    value_b, value_h, value_t, out_b, out_h, out_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr,
    NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one head, all keys but the last NEAR."""
    scale = single(scale)
    blocks = tl.cdiv(queries, ROWS)
    pair, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    at = tl.minimum(row, queries - 1)
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    grown = tl.exp(tl.load(growth + head))
    lo, hi = limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    hi -= NEAR
    lse = tl.load(lse + pair.to(tl.int64) * queries + at)
    own = rows_of(query + batch * query_b + head * query_h, query_t, at, at >= 0, DIM, COLUMNS)
    sums = tl.zeros([ROWS, DEEP], dtype=tl.float32)
    begin, full, stop, end = _full(lo, hi, KEYS)
    if INTERVALS:
        sums = _far_part(
            sums, own, key, value, key_t, value_t, begin, full, lo, hi, lse, grown, scale, keys, DIM,
            DEPTH, KEYS, COLUMNS, DEEP, True, PRECISION,
        )  # fmt: skip
    sums = _far_part(
        sums, own, key, value, key_t, value_t, full, stop, lo, hi, lse, grown, scale, keys, DIM, DEPTH,
        KEYS, COLUMNS, DEEP, False, PRECISION,
    )  # fmt: skip
    sums = _far_part(
        sums, own, key, value, key_t, value_t, stop, end, lo, hi, lse, grown, scale, keys, DIM, DEPTH,
        KEYS, COLUMNS, DEEP, True, PRECISION,
    )  # fmt: skip
    deep = tl.arange(0, DEEP)
    out += batch * out_b + head * out_h + row.to(tl.int64)[:, None] * out_t + deep[None, :]
    inside = (row < queries)[:, None] & (deep < DEPTH)[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _far_rows_part(
    sums, rest, of_b, query, grad, key, value, key_t,
    value_t, begin, end, lo, hi, lse, inner, grown, scale,
    keys, DIM: tl.constexpr, DEPTH: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, MASKED: tl.constexpr, SLOPES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As in `walks`, for keys begin .. end and stepped values."""
    for start in range(begin, end, KEYS):
        here = start + tl.arange(0, KEYS)
        tile = rows_of(key, key_t, here, here < keys, DIM, COLUMNS)
        x = weights(query, tile, scale, lse, PRECISION)
        if MASKED:
            x = tl.where((here[None, :] >= lo[:, None]) & (here[None, :] <= hi[:, None]), x, 0.0)
        met = rows_of(value, value_t, here, here < keys, DEPTH, DEEP)
        y = tl.dot(grad, tl.trans(met), input_precision=PRECISION)
        part = inverse(1 + x * (grown - 1))
        slope = grown * part
        if SLOPES:
            after = x * slope
            of_b += tl.sum(y * (after - after * after), 1)
        slope = x * (y * (slope * part) - inner[:, None])
        rest += tl.sum(slope, 1)
        sums = tl.dot(slope.to(tile.dtype), tile, sums, input_precision=PRECISION)
    return sums, rest, of_b


@triton.jit
def far_rows_kernel(
    grad, query, key, value, out, mean, lse, growth, first,
    last, of_query, total, parts, scale, queries, keys, heads,
    grad_b, grad_h, grad_t, query_b, query_h, query_t,
    key_b, key_h, key_t, value_b, value_h, value_t,
    out_b, out_h, out_t, mean_b, mean_h, mean_t,
    found_b, found_h, found_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr,
    NEAR: tl.constexpr, SLOPES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `walks.rows_kernel`; where keys near a wall are still to come, unfinished sums."""
    scale = single(scale)
    blocks = tl.cdiv(queries, ROWS)
    pair, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    at, real = tl.minimum(row, queries - 1), row < queries
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    grown = tl.exp(tl.load(growth + head))
    lo, hi = limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    hi -= NEAR
    line = pair.to(tl.int64) * queries
    lse = tl.load(lse + line + at)
    own = rows_of(query + batch * query_b + head * query_h, query_t, at, at >= 0, DIM, COLUMNS)
    slope = rows_of(grad + batch * grad_b + head * grad_h, grad_t, at, real, DEPTH, DEEP)
    inner = rows_of(out + batch * out_b + head * out_h, out_t, at, real, DEPTH, DEEP).to(tl.float32)
    inner = tl.sum(inner * slope.to(tl.float32), 1)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    rest = tl.zeros([ROWS], dtype=tl.float32)
    of_b = tl.zeros([ROWS], dtype=tl.float32)
    begin, full, stop, end = _full(lo, hi, KEYS)
    if INTERVALS:
        sums, rest, of_b = _far_rows_part(
            sums, rest, of_b, own, slope, key, value, key_t, value_t, begin, full, lo, hi, lse, inner,
            grown, scale, keys, DIM, DEPTH, KEYS, COLUMNS, DEEP, True, SLOPES, PRECISION,
        )  # fmt: skip
    sums, rest, of_b = _far_rows_part(
        sums, rest, of_b, own, slope, key, value, key_t, value_t, full, stop, lo, hi, lse, inner, grown,
        scale, keys, DIM, DEPTH, KEYS, COLUMNS, DEEP, False, SLOPES, PRECISION,
    )  # fmt: skip
    sums, rest, of_b = _far_rows_part(
        sums, rest, of_b, own, slope, key, value, key_t, value_t, stop, end, lo, hi, lse, inner, grown,
        scale, keys, DIM, DEPTH, KEYS, COLUMNS, DEEP, True, SLOPES, PRECISION,
    )  # fmt: skip
    if NEAR == 0:
        mean += batch * mean_b + head * mean_h
        sums -= rest[:, None] * rows_of(mean, mean_t, at, real, DIM, COLUMNS).to(tl.float32)
        sums *= scale
        rest += inner
    column = tl.arange(0, COLUMNS)
    inside = real[:, None] & (column < DIM)[None, :]
    where = batch * found_b + head * found_h + row.to(tl.int64)[:, None] * found_t + column[None, :]
    tl.store(of_query + where, sums.to(of_query.dtype.element_ty), mask=inside)
    tl.store(total + line + row, rest, mask=real)
    if SLOPES:
        tl.store(parts + tl.program_id(0), tl.sum(tl.where(real, of_b, 0.0), 0))


@triton.jit
def _far_keys_part(
    of_key, of_value, key, value, query, grad, query_t, grad_t,
    begin, end, here, lse, total, first, last, grown, scale,
    queries, keys, DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr,
    NEAR: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both sums with what rows begin .. end give back to some keys."""
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        at, real = tl.minimum(row, queries - 1), row < queries
        own = rows_of(query, query_t, at, at >= 0, DIM, COLUMNS)
        slope = rows_of(grad, grad_t, at, real, DEPTH, DEEP)
        x = tl.dot(key, tl.trans(own), input_precision=PRECISION)
        x = exp2(x * (scale * LOG2E) - (tl.load(lse + at) * LOG2E)[None, :])
        if MASKED:
            lo, hi = limits(first, last, at, keys, CAUSAL, INTERVALS)
            ok = (here[:, None] >= lo[None, :]) & (here[:, None] <= (hi - NEAR)[None, :])
            x = tl.where(ok & real[None, :], x, 0.0)
        y = tl.dot(value, tl.trans(slope), input_precision=PRECISION)
        part = inverse(1 + x * (grown - 1))
        after = x * (grown * part)
        of_value = tl.dot(after.to(slope.dtype), slope, of_value, input_precision=PRECISION)
        inner = tl.load(total + at, mask=real, other=0.0)
        x = x * (y * (grown * part * part) - inner[None, :])
        of_key = tl.dot(x.to(own.dtype), own, of_key, input_precision=PRECISION)
    return of_key, of_value


@triton.jit
def far_keys_kernel(
    grad, query, key, value, lse, total, growth, first,
    last, of_key, of_value, scale, queries, keys, heads,
    grad_b, grad_h, grad_t, query_b, query_h, query_t,
    key_b, key_h, key_t, value_b, value_h, value_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr,
    NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys and their stepped values."""
    scale = single(scale)
    blocks = tl.cdiv(keys, KEYS)
    pair, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    begin = block * KEYS
    here = begin + tl.arange(0, KEYS)
    query += batch * query_b + head * query_h
    grad += batch * grad_b + head * grad_h
    grown = tl.exp(tl.load(growth + head))
    line = pair.to(tl.int64) * queries
    own = rows_of(key + batch * key_b + head * key_h, key_t, here, here < keys, DIM, COLUMNS)
    met = rows_of(value + batch * value_b + head * value_h, value_t, here, here < keys, DEPTH, DEEP)
    of_own = tl.zeros([KEYS, COLUMNS], dtype=tl.float32)
    of_met = tl.zeros([KEYS, DEEP], dtype=tl.float32)
    first += batch * queries
    last += batch * queries
    top, whole = 0, 0  # the first block with a row that sees one of the keys; one that sees all
    if CAUSAL:
        top = tl.minimum((begin + NEAR) // ROWS * ROWS, queries)
        whole = tl.minimum(tl.cdiv(begin + KEYS - 1 + NEAR, ROWS) * ROWS, queries)
    if INTERVALS:
        whole = queries
    of_own, of_met = _far_keys_part(
        of_own, of_met, own, met, query, grad, query_t, grad_t, top, whole, here, lse + line,
        total + line, first, last, grown, scale, queries, keys, DIM, DEPTH, ROWS, COLUMNS, DEEP, CAUSAL,
        INTERVALS, NEAR, True, PRECISION,
    )  # fmt: skip
    if not INTERVALS:
        of_own, of_met = _far_keys_part(
            of_own, of_met, own, met, query, grad, query_t, grad_t, whole, queries, here, lse + line,
            total + line, first, last, grown, scale, queries, keys, DIM, DEPTH, ROWS, COLUMNS, DEEP,
            CAUSAL, INTERVALS, NEAR, False, PRECISION,
        )  # fmt: skip
    column, deep = tl.arange(0, COLUMNS)[None, :], tl.arange(0, DEEP)[None, :]
    at, ok = here.to(tl.int64)[:, None], (here < keys)[:, None]
    of_key += pair.to(tl.int64) * keys * DIM + at * DIM + column
    tl.store(of_key, (of_own * scale).to(of_key.dtype.element_ty), mask=ok & (column < DIM))
    of_value += pair.to(tl.int64) * keys * DEPTH + at * DEPTH + deep
    tl.store(of_value, of_met.to(of_value.dtype.element_ty), mask=ok & (deep < DEPTH))


@triton.jit
def _rest_part(
    sums, key, query, query_t, begin, end, here, lse, rest,
    first, last, scale, queries, keys,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    INTERVALS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` with the queries of rows begin .. end, times `rest` and the weights of some keys."""
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        at, real = tl.minimum(row, queries - 1), row < queries
        own = rows_of(query, query_t, at, at >= 0, DIM, COLUMNS)
        x = tl.dot(key, tl.trans(own), input_precision=PRECISION)
        x = exp2(x * (scale * LOG2E) - (tl.load(lse + at) * LOG2E)[None, :])
        if MASKED:
            lo, hi = limits(first, last, at, keys, CAUSAL, INTERVALS)
            x = tl.where((here[:, None] >= lo[None, :]) & (here[:, None] <= hi[None, :]), x, 0.0)
        x *= tl.load(rest + at, mask=real, other=0.0)[None, :]
        sums = tl.dot(x.to(own.dtype), own, sums, input_precision=PRECISION)
    return sums


@triton.jit
def rest_kernel(
    query, key, lse, rest, first, last, found, of_key, scale,
    queries, keys, heads, query_b, query_h, query_t, key_b, key_h, key_t,
    DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys: what one walk `found`, less what it could not know, times scale."""
    scale = single(scale)
    blocks = tl.cdiv(keys, KEYS)
    pair, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    begin = block * KEYS
    here = begin + tl.arange(0, KEYS)
    query += batch * query_b + head * query_h
    line = pair.to(tl.int64) * queries
    own = rows_of(key + batch * key_b + head * key_h, key_t, here, here < keys, DIM, COLUMNS)
    sums = tl.zeros([KEYS, COLUMNS], dtype=tl.float32)
    first += batch * queries
    last += batch * queries
    top, whole = 0, 0  # the first block with a row that sees one of the keys; one that sees all
    if CAUSAL:
        top = tl.minimum(begin // ROWS * ROWS, queries)
        whole = tl.minimum(tl.cdiv(begin + KEYS - 1, ROWS) * ROWS, queries)
    if INTERVALS:
        whole = queries
    sums = _rest_part(
        sums, own, query, query_t, top, whole, here, lse + line, rest + line, first, last, scale,
        queries, keys, DIM, ROWS, COLUMNS, CAUSAL, INTERVALS, True, PRECISION,
    )  # fmt: skip
    if not INTERVALS:
        sums = _rest_part(
            sums, own, query, query_t, whole, queries, here, lse + line, rest + line, first, last, scale,
            queries, keys, DIM, ROWS, COLUMNS, CAUSAL, INTERVALS, False, PRECISION,
        )  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    where = pair.to(tl.int64) * keys * DIM + here.to(tl.int64)[:, None] * DIM + column
    inside = (here < keys)[:, None] & (column < DIM)
    sums = (tl.load(found + where, mask=inside, other=0.0) - sums) * scale
    tl.store(of_key + where, sums.to(of_key.dtype.element_ty), mask=inside)
