"""Gradients of keys, after all rows have been visited. Torch twin: `engines.tiled`.

The gradient of the score of key j is ``w (dw - delta - excess)``, where dw is the gradient of the
softmax weight w; `backward` explains `delta` and `excess`. A visit of the keys (`backward`) has summed
what belongs to ``w (dw - delta)``, and what is left is ``- w excess``. Keys of the split equation that
no causal wall reaches are not visited: their dw follows from stepped values, and both parts are
computed here.
"""

# Kernel arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from attractor.attention.kernels.reaction.device import (
    LOG2E,
    exp2,
    key_interval,
    load_rows,
    reciprocal,
    store_rows,
    to_float32,
)


@triton.jit
def _add_rows(
    dk, dv, k, v, q, do, stride_qm, stride_gm, begin, end, key, lse, delta, excess, gain, scale, queries,
    keys,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr, BOUNDARY: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what rows begin to end - 1 contribute to the gradients of a block of keys and values."""
    for start in range(begin, end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        at, valid = tl.minimum(row, queries - 1), row < queries
        q_tile = load_rows(q, stride_qm, at, at >= 0, D, BLOCK_D)
        scores = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        w = exp2(scores * (scale * LOG2E) - (tl.load(lse + at) * LOG2E)[None, :])
        if MASKED:
            lo, hi = key_interval(at, keys, CAUSAL)
            allowed = (key[:, None] >= lo[None, :]) & (key[:, None] <= hi[None, :])
            w = tl.where(allowed, w, 0.0)
        correction = tl.load(excess + at, mask=valid, other=0.0)
        if SPLIT:
            do_tile = load_rows(do, stride_gm, at, valid, DV, BLOCK_DV)
            dw = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
            ratio = reciprocal(1 + w * (gain - 1))
            after = w * (gain * ratio)
            total = correction + tl.load(delta + at, mask=valid, other=0.0)
            dw = dw * (gain * ratio * ratio) - total[None, :]
            if MASKED and BOUNDARY:
                interior = key[:, None] <= (hi - BOUNDARY)[None, :]
                after = tl.where(interior, after, 0.0)
                dw = tl.where(interior, dw, -correction[None, :])
            dv = tl.dot(after.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
            w *= dw
        else:
            w *= -correction[None, :]
        dk = tl.dot(w.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradients_kernel(
    do, q, k, v, lse, delta, excess, beta, dk_visits, dk, dv,
    scale, queries, keys, heads, stride_gb, stride_gh, stride_gm, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr, BOUNDARY: tl.constexpr, VISITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a block of keys and, if SPLIT, of their stepped values.

    VISITS: `dk_visits` has the sums of `backward_kernel`, over all keys or, if SPLIT, over the BOUNDARY
    last keys of every row.
    """
    scale = to_float32(scale)
    blocks = tl.cdiv(keys, BLOCK_N)
    pair, begin = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_N
    batch, head, pair = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64), pair.to(tl.int64)
    key = begin + tl.arange(0, BLOCK_N)
    q += batch * stride_qb + head * stride_qh
    do += batch * stride_gb + head * stride_gh
    lse += pair * queries
    delta += pair * queries
    excess += pair * queries
    k = load_rows(k + batch * stride_kb + head * stride_kh, stride_kn, key, key < keys, D, BLOCK_D)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    gain, v_tile, dv_acc = 1.0, k, dk_acc
    if SPLIT:
        gain = tl.exp(tl.load(beta + head))
        v += batch * stride_vb + head * stride_vh
        v_tile = load_rows(v, stride_vn, key, key < keys, DV, BLOCK_DV)
        dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
    # The first block of rows that attend to one of the keys, and the first whose rows need no mask.
    top, full = 0, 0
    if CAUSAL:
        top = tl.minimum(begin // BLOCK_M * BLOCK_M, queries)
        full = tl.minimum(tl.cdiv(begin + BLOCK_N - 1 + BOUNDARY, BLOCK_M) * BLOCK_M, queries)
    dk_acc, dv_acc = _add_rows(
        dk_acc, dv_acc, k, v_tile, q, do, stride_qm, stride_gm, top, full, key, lse, delta, excess, gain,
        scale, queries, keys, D, DV, BLOCK_M, BLOCK_D, BLOCK_DV, CAUSAL, SPLIT, BOUNDARY, True,
        PRECISION,
    )  # fmt: skip
    dk_acc, dv_acc = _add_rows(
        dk_acc, dv_acc, k, v_tile, q, do, stride_qm, stride_gm, full, queries, key, lse, delta, excess,
        gain, scale, queries, keys, D, DV, BLOCK_M, BLOCK_D, BLOCK_DV, CAUSAL, SPLIT, BOUNDARY, False,
        PRECISION,
    )  # fmt: skip
    if VISITS:
        dk_acc += load_rows(dk_visits + pair * keys * D, D, key, key < keys, D, BLOCK_D)
    store_rows(dk + pair * keys * D, D, key, dk_acc * scale, key < keys, D, BLOCK_D)
    if SPLIT:
        store_rows(dv + pair * keys * DV, DV, key, dv_acc, key < keys, DV, BLOCK_DV)
