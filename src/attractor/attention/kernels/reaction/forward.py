"""Forward kernel: weights take their steps while keys are visited. Torch twin: `engines.tiled`.

The keys of a block of rows are divided into segments of neighbouring keys. All segments are visited at
the same time, one key of each per iteration:

    iteration p:  weights of key p of every segment, ``[rows, segments]``: one matrix product
                  step 1 of key p - 1, step 2 of key p - 2, ..., from the tiles of three iterations
                  stepped weights of key p - steps, times its values: one matrix product

The neighbours of a key are therefore the tiles of the previous and the next iteration. A step is
elementwise float32 arithmetic on tiles without any shift, and only a halo at the ends of every segment
is computed twice. A wall is a mirror: a key next to a wall has its own weight as its neighbour.

Segments that no wall of any row reaches are visited without masks; the remaining keys with masks.
"""

# Kernel arguments have no types that mypy knows; tuples of tiles grow by addition only.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: RUF005

import triton
import triton.language as tl

from attractor.attention.kernels.reaction.device import (
    inside,
    key_interval,
    load_rows,
    logistic,
    program_rows,
    softmax_weights,
    to_float32,
)


@triton.jit
def clamp_index(index, count):
    """Return the nearest index that exists."""
    return tl.minimum(tl.maximum(index, 0), count - 1)


@triton.jit
def initial_weights(
    q, k, key, lo, hi, lse, scale,
    MASKED: tl.constexpr, BOUNDARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the weights ``[rows, n]`` of keys before the first step.

    MASKED: Weights of keys outside of a row's interval are 0.
    BOUNDARY: Unless 0, only the BOUNDARY last keys of every row have weights.
    """
    weights = softmax_weights(q, k, scale, lse, PRECISION)
    if MASKED:
        weights = tl.where(inside(key, lo, hi), weights, 0.0)
    if BOUNDARY:
        weights = tl.where(key[None, :] > hi[:, None] - BOUNDARY, weights, 0.0)
    return weights


@triton.jit
def zero_tiles(ROWS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr):
    """Return a tuple of COUNT float32 tiles of zeros."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([ROWS, COLUMNS], dtype=tl.float32),)
    return tiles


@triton.jit
def free_segments(lo, hi, HALO: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (first key, length) of segments that no wall of any row reaches."""
    start = tl.max(lo, 0) + HALO + 1
    return start, tl.maximum(tl.min(hi, 0) + 1 - HALO - start, 0) // BLOCK_N


@triton.jit
def _edge_segments(lo, hi, start, length, BLOCK_N: tl.constexpr, BOUNDARY: tl.constexpr):
    """Return (first keys, ends, length) of segments for other keys, half of them before the free ones.

    BOUNDARY: Only the keys that the weights of the BOUNDARY last keys of a row can spread to.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    segment = tl.arange(0, BLOCK_N)
    begin, end = tl.min(lo, 0), tl.max(hi, 0) + 1
    if BOUNDARY:
        begin = tl.maximum(begin, tl.min(hi, 0) + 1 - 2 * BOUNDARY)
        start, length = begin, 0
    elif length == 0:
        start = (begin + end) // 2
    left, right = tl.cdiv(start - begin, HALF), tl.cdiv(end - start - length * BLOCK_N, HALF)
    left, right = tl.maximum(left, 0), tl.maximum(right, 0)
    before = segment < HALF
    after = start + length * BLOCK_N
    first = tl.where(before, begin + segment * left, after + (segment - HALF) * right)
    stop = tl.where(before, tl.minimum(first + left, start), tl.minimum(first + right, end))
    return first, stop, tl.maximum(left, right)


@triton.jit
def _advance(
    weights, carry, alpha, beta, key, lo, hi,
    STEPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the weights after all steps of the keys STEPS before, and the carry for the next iteration.

    A step is ``new = w (1 - 2 alpha + beta - beta w) + alpha (left + right)``. For every step the carry
    has the new weight of the previous key without the share of its right neighbour, and alpha times the
    weight of that key.
    """
    stay = 1 - 2 * alpha + beta
    following = ()
    for s in tl.static_range(STEPS):
        share, left_share = alpha * weights, carry[2 * s + 1]
        right, left = share, left_share
        if MASKED:
            right = tl.where((key - s)[None, :] > hi[:, None], left_share, share)
            left = tl.where((key - s)[None, :] <= lo[:, None], share, left_share)
        new = carry[2 * s] + right
        following = following + (weights * (stay - beta * weights) + left, share)
        weights = new
    return weights, following


@triton.jit
def _visit(
    acc, q, k, v, stride_kn, stride_vn, start, stop, length, lo, hi, lse, alpha, beta, gain, scale, keys,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STEPS: tl.constexpr, MASKED: tl.constexpr,
    BOUNDARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the values of the keys of all segments, times their stepped weights, to `acc`."""
    carry = zero_tiles(BLOCK_M, BLOCK_N, 2 * STEPS)
    for p in tl.range(-STEPS, length + STEPS, loop_unroll_factor=1 if MASKED else 2):
        key = start + p
        ready = key - STEPS
        k_tile = load_rows(k, stride_kn, clamp_index(key, keys), key < keys, D, BLOCK_D)
        weights = initial_weights(q, k_tile, key, lo, hi, lse, scale, MASKED, BOUNDARY, PRECISION)
        if BOUNDARY:
            weights = logistic(weights, gain)
        weights, carry = _advance(weights, carry, alpha, beta, key, lo, hi, STEPS, MASKED)
        if MASKED:
            weights = tl.where(inside(ready, lo, hi), weights, 0.0)
        v_tile = load_rows(v, stride_vn, ready, (ready >= start) & (ready < stop), DV, BLOCK_DV)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def forward_kernel(
    q, k, v, lse, alpha, beta, o_interior, o, scale, queries, keys, heads,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr,
    BOUNDARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the output of a block of rows.

    BOUNDARY: Unless 0, the reaction acts first, exactly, and only the BOUNDARY last keys of every row
    are visited. `o_interior`, with the strides of `o`, has the output of the other keys.
    """
    scale = to_float32(scale)
    pair, batch, head, row = program_rows(0, tl.cdiv(queries, BLOCK_M), heads, BLOCK_M)
    at = tl.minimum(row, queries - 1)
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    a, b, gain = tl.load(alpha + head), tl.load(beta + head), 1.0
    if BOUNDARY:
        b, gain = 0.0, tl.exp(b)
    lo, hi = key_interval(at, keys, CAUSAL)
    lse = tl.load(lse + pair * queries + at)
    q = load_rows(q + batch * stride_qb + head * stride_qh, stride_qm, at, at >= 0, D, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    column = tl.arange(0, BLOCK_DV)
    o += batch * stride_ob + head * stride_oh
    # With offsets from here, instead of `store_rows` at the end, ptxas 12.9 spills fewer registers.
    offset = row.to(tl.int64)[:, None] * stride_om + column[None, :]
    mask = (row < queries)[:, None] & (column < DV)[None, :]
    if BOUNDARY:
        o_interior += batch * stride_ob + head * stride_oh
        acc = tl.load(o_interior + offset, mask=mask, other=0.0)
    start, length = free_segments(lo, hi, STEPS, BLOCK_N)
    edges, stop, edge_length = _edge_segments(lo, hi, start, length, BLOCK_N, BOUNDARY)
    if not BOUNDARY:  # noqa: SIM102  (known at compile time)
        if length > 0:
            segment = start + length * tl.arange(0, BLOCK_N)
            acc = _visit(
                acc, q, k, v, stride_kn, stride_vn, segment, segment + length, length, lo, hi, lse, a, b,
                gain, scale, keys, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STEPS, False, BOUNDARY,
                PRECISION,
            )  # fmt: skip
    acc = _visit(
        acc, q, k, v, stride_kn, stride_vn, edges, stop, edge_length, lo, hi, lse, a, b, gain, scale,
        keys, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STEPS, True, BOUNDARY, PRECISION,
    )  # fmt: skip
    tl.store(o + offset, acc.to(o.dtype.element_ty), mask=mask)
