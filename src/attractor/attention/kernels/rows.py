"""What kernels of linear PDEs share: rows in registers, walls, and the shapes of programs.

A program has some strands, runs of neighbouring rows. A thread has 16 bytes of a row, of one strand: it
loads the rows of its run and those within reach once, all before the first is needed, and makes every
sum from registers. Rows near walls, which are few, are done a tile of rows at a time.
"""

# Arguments of kernels have no types that mypy could know; tuples of tiles grow, by addition alone.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: RUF005

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attractor.attention.kernels import INTERPRETED
from attractor.attention.kernels.taps import power_of_two

# The run of a strand, and warps. Longer runs load fewer rows twice, and need more registers.
TILES = {
    "step": (8, 4),
    "step_backward": (16, 4),
    "near": (2, 4),
    "near_rows": (2, 4),
    "near_keys": (4, 4),
    "few": (1, 4),  # `step` and its backward, of few tokens: quick to compile
}
FEW = 16  # global tokens, which are stepped apart
SIZES = ["tokens", "heads", "taps_h"]  # arguments whose values need no kernels of their own
NVIDIA = tl.constexpr(not INTERPRETED and torch.version.hip is None)
PIECE = tl.constexpr(8)  # columns whose products are summed first: a thread's, in half precision
TILE = tl.constexpr(16)  # rows near walls that are done at a time: at least twice the reach


def shape(name: str, dims: tuple[int, ...], dtype: torch.dtype, reach: int) -> tuple[int, ...]:
    """(strands, run, warps, columns for each of dims) of a program of that kernel."""
    return _shape(TILES[name], dims, dtype, reach)


@cache
def _shape(
    tile: tuple[int, int], dims: tuple[int, ...], dtype: torch.dtype, reach: int
) -> tuple[int, ...]:
    run, warps = tile
    columns = [max(16, power_of_two(dim)) for dim in dims]
    strands = max(1, 32 * warps * 16 // (max(columns) * dtype.itemsize))
    run //= (2 if reach > 4 else 1) * (2 if dtype == torch.float64 else 1)  # these need more registers
    return strands, max(run, 1), warps, *columns


def by_rows(x: Tensor) -> Tensor:
    """x with every row in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, heads, and tokens; 0 where there is one for all."""
    (batch, heads, _, _), (b, h, t, _) = x.shape, x.stride()
    return (b if batch > 1 else 0), (h if heads > 1 else 0), t


def faces_of(open: Tensor | None, other: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Something to point to, and its strides along batch, heads and keys."""
    if open is None:
        return other, (0, 0, 0)
    faces = open.view(torch.uint8)[..., 0, :]
    return faces, strides(faces.unsqueeze(-1))


def table_stride(taps: Tensor) -> int:
    """From one head's taps to the next's; 0 where one table serves all."""
    return taps.stride(0) if taps.shape[0] > 1 else 0


@triton.jit
def room(open, stride, at, tokens, SPAN: tl.constexpr, FACES: tl.constexpr):
    """How many keys there are before and after each, up to the next wall or SPAN."""
    before, after = tl.minimum(at, SPAN), tl.minimum(tokens - 1 - at, SPAN)
    if FACES:
        left, right = (at >= 0).to(tl.int32), (at >= 0).to(tl.int32)
        before, after = at * 0, at * 0
        for n in tl.static_range(SPAN):
            face = at - 1 - n
            left *= tl.load(open + face * stride, mask=face >= 0, other=0).to(tl.int32)
            face = at + n
            right *= tl.load(open + face * stride, mask=face < tokens - 1, other=0).to(tl.int32)
            before, after = before + left, after + right
    return before, after


@triton.jit
def no_wall(
    open, stride, start, tokens,
    SPAN: tl.constexpr, ROWS: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Whether no wall but the ends of the sequence is within SPAN of these rows."""
    face = start - SPAN + tl.arange(0, SEEN)
    seen = (face >= 0) & (face < tl.minimum(start + ROWS + SPAN, tokens) - 1)
    shut = tl.load(open + face * stride, mask=seen, other=1) == 0
    return tl.max(shut.to(tl.int32), 0) == 0


@triton.jit
def rows_at(x, stride, at, column, ok, DTYPE: tl.constexpr):
    """Rows of x in that type, zeros where not ok; only what is ok is read."""
    where = at.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(x + where, mask=ok, other=0.0).to(DTYPE)


@triton.jit
def rows_from(
    x, stride, first, tokens, COUNT: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Rows ``first .. first + COUNT - 1`` of every strand, as they are; beyond an end, the row there."""
    column = tl.arange(0, COLUMNS)[None, :]
    rows = ()
    for n in tl.static_range(COUNT):
        at = tl.minimum(tl.maximum(first + n, 0), tokens - 1)
        where = x + at.to(tl.int64)[:, None] * stride + column
        if DIM == COLUMNS:
            rows = rows + (tl.load(where),)
        else:
            rows = rows + (tl.load(where, mask=column < DIM, other=0.0),)
    return rows


@triton.jit
def wide(x, TYPE: tl.constexpr):
    """x in that type."""
    if NVIDIA and x.dtype == tl.bfloat16 and tl.float32 == TYPE:
        # Two at a time, an instruction for each: the compiler takes three.
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = x.to(TYPE)
    return y


@triton.jit
def write_rows(x, stride, at, rows, ok, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of x, in its type, where ok."""
    column = tl.arange(0, COLUMNS)[None, :]
    mask = ok[:, None]
    if DIM != COLUMNS:
        mask = mask & (column < DIM)
    where = x + at.to(tl.int64)[:, None] * stride + column
    tl.store(where, rows.to(x.dtype.element_ty), mask=mask)
