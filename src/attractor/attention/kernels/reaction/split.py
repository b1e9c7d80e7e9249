"""Kernels of split reaction-diffusion for keys that no causal wall reaches. Torch twin: `engines.tiled`.

The reaction acts first, exactly, and diffusion alone is linear: the values can take its steps instead
of the weights. What is left is softmax attention whose weights react.
"""

# Kernel arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from attractor.attention.kernels.reaction.device import (
    inside,
    key_interval,
    load_rows,
    logistic,
    program_rows,
    reciprocal,
    softmax_weights,
    store_rows,
    to_float32,
)


@triton.jit
def _key_ranges(hi, BLOCK_N: tl.constexpr):
    """Return (stop, end): all rows attend to all keys before stop, and no row to keys from end on."""
    return tl.maximum(tl.min(hi, 0) + 1, 0) // BLOCK_N * BLOCK_N, tl.max(hi, 0) + 1


@triton.jit
def _add_outputs(
    acc, q, k, v, stride_kn, stride_vn, begin, end, lo, hi, lse, gain, scale, keys,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the values of keys begin to end - 1, times their weights after the reaction, to `acc`."""
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, stride_kn, key, key < keys, D, BLOCK_D)
        w = softmax_weights(q, k_tile, scale, lse, PRECISION)
        if MASKED:
            w = tl.where(inside(key, lo, hi), w, 0.0)
        w = logistic(w, gain)
        v_tile = load_rows(v, stride_vn, key, key < keys, DV, BLOCK_DV)
        acc = tl.dot(w.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def split_forward_kernel(
    q, k, v, lse, beta, o, scale, queries, keys, heads,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr, BOUNDARY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the output of a block of rows over all keys but the BOUNDARY last ones of every row."""
    scale = to_float32(scale)
    pair, batch, head, row = program_rows(0, tl.cdiv(queries, BLOCK_M), heads, BLOCK_M)
    at = tl.minimum(row, queries - 1)
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    gain = tl.exp(tl.load(beta + head))
    lo, hi = key_interval(at, keys, CAUSAL)
    hi -= BOUNDARY
    lse = tl.load(lse + pair * queries + at)
    q = load_rows(q + batch * stride_qb + head * stride_qh, stride_qm, at, at >= 0, D, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    stop, end = _key_ranges(hi, BLOCK_N)
    acc = _add_outputs(
        acc, q, k, v, stride_kn, stride_vn, 0, stop, lo, hi, lse, gain, scale, keys, D, DV,
        BLOCK_N, BLOCK_D, BLOCK_DV, False, PRECISION,
    )  # fmt: skip
    acc = _add_outputs(
        acc, q, k, v, stride_kn, stride_vn, stop, end, lo, hi, lse, gain, scale, keys, D, DV,
        BLOCK_N, BLOCK_D, BLOCK_DV, True, PRECISION,
    )  # fmt: skip
    o += batch * stride_ob + head * stride_oh
    store_rows(o, stride_om, row, acc, row < queries, DV, BLOCK_DV)


@triton.jit
def _add_gradients(
    acc, excess, dbeta, q, do, k, v, stride_kn, stride_vn, begin, end, lo, hi, lse, delta, gain, scale,
    keys, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, COEFFICIENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what keys begin to end - 1 contribute to the sums of a block of rows."""
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, stride_kn, key, key < keys, D, BLOCK_D)
        w = softmax_weights(q, k_tile, scale, lse, PRECISION)
        if MASKED:
            w = tl.where(inside(key, lo, hi), w, 0.0)
        v_tile = load_rows(v, stride_vn, key, key < keys, DV, BLOCK_DV)
        dw = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        ratio = reciprocal(1 + w * (gain - 1))
        slope = gain * ratio
        if COEFFICIENTS:
            after = w * slope
            dbeta += tl.sum(dw * (after - after * after), 1)
        dscores = w * (dw * (slope * ratio) - delta[:, None])
        excess += tl.sum(dscores, 1)
        acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    return acc, excess, dbeta


@triton.jit
def split_backward_kernel(
    do, q, k, v, o, k_mean, lse, beta, dq, delta, excess, dcoefficients, scale, queries, keys, heads,
    stride_gb, stride_gh, stride_gm, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_mb, stride_mh, stride_mm, stride_db, stride_dh, stride_dm,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr,
    BOUNDARY: tl.constexpr, COEFFICIENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a block of queries, over all keys but the BOUNDARY last ones of every row.

    If BOUNDARY is not 0, `dq` and `excess` are the sums that `backward_kernel` completes.
    """
    scale = to_float32(scale)
    pair, batch, head, row = program_rows(0, tl.cdiv(queries, BLOCK_M), heads, BLOCK_M)
    at, valid = tl.minimum(row, queries - 1), row < queries
    line = pair * queries
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    gain = tl.exp(tl.load(beta + head))
    lo, hi = key_interval(at, keys, CAUSAL)
    hi -= BOUNDARY
    lse = tl.load(lse + line + at)
    q = load_rows(q + batch * stride_qb + head * stride_qh, stride_qm, at, at >= 0, D, BLOCK_D)
    do = load_rows(do + batch * stride_gb + head * stride_gh, stride_gm, at, valid, DV, BLOCK_DV)
    o = load_rows(o + batch * stride_ob + head * stride_oh, stride_om, at, valid, DV, BLOCK_DV)
    row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + line + row, row_delta, mask=valid)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_excess = tl.zeros([BLOCK_M], dtype=tl.float32)
    dbeta = tl.zeros([BLOCK_M], dtype=tl.float32)
    stop, end = _key_ranges(hi, BLOCK_N)
    acc, row_excess, dbeta = _add_gradients(
        acc, row_excess, dbeta, q, do, k, v, stride_kn, stride_vn, 0, stop, lo, hi, lse, row_delta,
        gain, scale, keys, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, False, COEFFICIENTS, PRECISION,
    )  # fmt: skip
    acc, row_excess, dbeta = _add_gradients(
        acc, row_excess, dbeta, q, do, k, v, stride_kn, stride_vn, stop, end, lo, hi, lse, row_delta,
        gain, scale, keys, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, True, COEFFICIENTS, PRECISION,
    )  # fmt: skip
    if BOUNDARY == 0:
        k_mean += batch * stride_mb + head * stride_mh
        acc -= row_excess[:, None] * load_rows(k_mean, stride_mm, at, valid, D, BLOCK_D).to(tl.float32)
        acc *= scale
    store_rows(dq + batch * stride_db + head * stride_dh, stride_dm, row, acc, valid, D, BLOCK_D)
    tl.store(excess + line + row, row_excess, mask=valid)
    if COEFFICIENTS:
        tl.store(dcoefficients + tl.program_id(0), tl.sum(tl.where(valid, dbeta, 0.0), 0))
