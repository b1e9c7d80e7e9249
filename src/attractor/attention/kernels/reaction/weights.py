"""What all kernels of reaction-diffusion share: which keys a row has, and their weights."""

# Arguments of kernels have no types that mypy could know.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from attractor.attention.kernels import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
NVIDIA = tl.constexpr(not INTERPRETED and torch.version.hip is None)


@triton.jit
def single(scale):
    """In single precision: torch.compile hands numbers to kernels as doubles."""
    return tl.full([], scale, tl.float32)


@triton.jit
def limits(first, last, at, keys, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr):
    """The first and the last key of rows; the first is after the last where there are none."""
    lo, hi = at * 0, at * 0 + (keys - 1)
    if CAUSAL:
        hi = tl.minimum(hi, at)
    if INTERVALS:
        lo = tl.maximum(lo, tl.load(first + at))
        hi = tl.minimum(hi, tl.load(last + at))
    return lo, hi


@triton.jit
def rows_of(x, stride, at, ok, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of x, zeros where not ok, and beyond DIM."""
    column = tl.arange(0, COLUMNS)[None, :]
    where = x + at.to(tl.int64)[:, None] * stride + column
    return tl.load(where, mask=ok[:, None] & (column < DIM), other=0.0)


@triton.jit
def exp2(x):
    """2 to the x, without the scaling that results below 1e-38 would need."""
    if NVIDIA:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def inverse(x):
    """1 / x to a few units in the last place, for sizes between 1e-19 and 1e19.

    Two numbers share one division, as there are eight multiplications to be had for it.
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
def weights(query, key, scale, lse, PRECISION: tl.constexpr):
    """Of keys ``[n, dim]`` for rows, ``[rows, n]``."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    return exp2(scores * (scale * LOG2E) - (lse * LOG2E)[:, None])


@triton.jit
def logistic(x, grown):
    """Weights after the whole reaction, which alone would make small ones `grown` times as large."""
    return x * grown * inverse(1 + x * (grown - 1))
