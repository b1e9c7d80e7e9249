"""Log-sum-exp of the scores of each row, and its mean key. Torch twin: `engines.softmax.log_sum_exp`."""

# Kernel arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from attractor.attention.kernels.reaction.device import (
    LOG2E,
    exp2,
    inside,
    key_interval,
    load_rows,
    program_rows,
    store_rows,
    to_float32,
)


@triton.jit
def log_sum_exp_kernel(
    q, k, lse, k_mean, scale, queries, keys, heads,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_mb, stride_mh, stride_mm,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, MEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the log-sum-exp of a block of rows, 0 for rows without keys, and the mean key if MEAN."""
    scale = to_float32(scale)
    pair, batch, head, row = program_rows(0, tl.cdiv(queries, BLOCK_M), heads, BLOCK_M)
    at, valid = tl.minimum(row, queries - 1), row < queries
    k += batch * stride_kb + head * stride_kh
    lo, hi = key_interval(at, keys, CAUSAL)
    q = load_rows(q + batch * stride_qb + head * stride_qh, stride_qm, at, at >= 0, D, BLOCK_D)
    maximum = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    stop = tl.min(hi, 0)  # the last key of the first row: all rows attend to it and the keys before it
    for start in range(0, tl.max(hi, 0) + 1, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        tile = load_rows(k, stride_kn, key, key < keys, D, BLOCK_D)
        scores = tl.dot(q, tl.trans(tile), input_precision=PRECISION) * (scale * LOG2E)
        if start + BLOCK_N - 1 > stop:
            scores = tl.where(inside(key, lo, hi), scores, -float("inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        weights = exp2(scores - base[:, None])
        rescale = tl.exp2(maximum - base)
        total = total * rescale + tl.sum(weights, 1)
        if MEAN:
            sums *= rescale[:, None]
            sums = tl.dot(weights.to(tile.dtype), tile, sums, input_precision=PRECISION)
        maximum = larger
    result = tl.where(total > 0, (maximum + tl.log2(total)) / LOG2E, 0.0)
    tl.store(lse + pair * queries + row, result, mask=valid)
    if MEAN:
        sums /= tl.where(total > 0, total, 1.0)[:, None]
        k_mean += batch * stride_mb + head * stride_mh
        store_rows(k_mean, stride_mm, row, sums, valid, D, BLOCK_D)
