"""Device functions of all reaction-diffusion kernels: rows of a program, their keys, softmax weights."""

# Kernel arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from attractor.attention.kernels import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
NVIDIA = tl.constexpr(not INTERPRETED and torch.version.hip is None)


@triton.jit
def to_float32(scale):
    """Return a scalar argument as float32. `torch.compile` passes Python floats as float64."""
    return tl.full([], scale, tl.float32)


@triton.jit
def program_rows(first_block, blocks, heads, BLOCK_M: tl.constexpr):
    """Return (pair of batch and head, batch, head, rows) of a program; the last block comes first."""
    pair, block = tl.program_id(0) // blocks, first_block + blocks - 1 - tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    return pair.to(tl.int64), batch, head, block * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def key_interval(row, keys, CAUSAL: tl.constexpr):
    """Return the first and the last key of rows.

    The first is always 0. It is a tensor, like the last, because with a constant ptxas 12.9 spills more
    registers in `forward_kernel`.
    """
    lo, hi = row * 0, row * 0 + (keys - 1)
    if CAUSAL:
        hi = tl.minimum(hi, row)
    return lo, hi


@triton.jit
def inside(key, lo, hi):
    """Return whether keys ``[n]`` are in the intervals of rows, ``[rows, n]``."""
    return (key[None, :] >= lo[:, None]) & (key[None, :] <= hi[:, None])


@triton.jit
def load_rows(x, stride, row, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows ``[n, BLOCK_D]`` of x, with zeros for rows that are not valid and for columns from D."""
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = x + row.to(tl.int64)[:, None] * stride + column
    return tl.load(pointers, mask=valid[:, None] & (column < D), other=0.0)


@triton.jit
def store_rows(x, stride, row, tile, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the valid rows of a tile ``[n, BLOCK_D]``, without columns from D, in the dtype of x."""
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = x + row.to(tl.int64)[:, None] * stride + column
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=valid[:, None] & (column < D))


@triton.jit
def exp2(x):
    """Return 2 to the power of x, flushing results below 1e-38 to zero."""
    if NVIDIA:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def reciprocal(x):
    """Return 1 / x with an error of a few ulp, for magnitudes between 1e-19 and 1e19.

    Two elements share one division, which takes as long as eight multiplications.
    """
    if NVIDIA:
        y = tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $2, $3; rcp.approx.ftz.f32 t, t; "
            "mul.f32 $0, t, $3; mul.f32 $1, t, $2; }",
            "=&f,=&f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = 1 / x
    return y


@triton.jit
def softmax_weights(q, k, scale, lse, PRECISION: tl.constexpr):
    """Return the softmax weights ``[rows, n]`` of keys ``[n, D]``."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return exp2(scores * (scale * LOG2E) - (lse * LOG2E)[:, None])


@triton.jit
def logistic(weights, gain):
    """Return weights after the whole reaction, which multiplies infinitesimal weights by `gain`."""
    return weights * gain * reciprocal(1 + weights * (gain - 1))
