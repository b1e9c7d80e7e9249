"""The shapes of programs, and arguments of the launches of linear kernels.

The rows of a program are divided into strands of consecutive rows. Each thread holds 16 bytes of a row,
or of each piece of a row, of one strand. It loads the rows of its strand and those within reach once,
before the first one is used, and computes all sums from registers.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Per kernel: the pieces of a row, the rows of a strand, and the warps. Longer strands load fewer rows
# twice but need more registers.
TILES = {
    "step": (1, 8, 4),
    "step_backward": (1, 16, 4),
    "causal_forward": (1, 2, 4),
    "causal_backward_rows": (1, 2, 4),
    "causal_backward_keys": (1, 4, 4),
    "window_forward": (2, 2, 4),
    "window_backward_rows": (2, 2, 4),
    "window_backward_keys": (2, 4, 4),
    "few_tokens": (1, 1, 4),  # `step` and its backward; fast to compile
}
FEW_TOKENS = 16  # largest number of tokens, such as global tokens, for the tile "few_tokens"


class Shape(NamedTuple):
    """The shape of a program, in compile-time constants.

    Attributes:
        columns: Columns of queries and keys, a power of 2.
        value_columns: Columns of values, a power of 2.
        strands: Number of strands.
        run: Number of rows per strand.
        pieces: Number of pieces per row.
        warps: Number of warps.
    """

    columns: int
    value_columns: int
    strands: int
    run: int
    pieces: int
    warps: int

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return self.strands * self.run


@cache
def shape_of(
    tile: tuple[int, int, int], dim: int, value_dim: int, dtype: torch.dtype, reach: int
) -> Shape:
    """Return the shape of programs of a kernel."""
    pieces, run, warps = tile
    columns, value_columns = (max(16, power_of_two(n)) for n in (dim, value_dim))
    if pieces > 1:  # pieces have at least 64 bytes
        pieces = max(1, min(pieces, min(columns, value_columns) * dtype.itemsize // 64))
    run //= (2 if reach > 4 else 1) * (2 if dtype == torch.float64 else 1)  # these need more registers
    strands = max(1, 32 * warps * 16 * pieces // (max(columns, value_columns) * dtype.itemsize))
    return Shape(columns, value_columns, strands, max(run, 1), pieces, warps)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n, ten times as fast as Triton's function."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, size: int) -> int:
    """Return n / size rounded up; n may be a symbol."""
    return -(-n // size)


def two_floats(number: float) -> tuple[float, float]:
    """Return two float32 numbers with this sum, because kernels take no float64 arguments."""
    product = (2.0**29 + 1.0) * number  # subtracting it rounds away all but the leading 24 bits
    high = product - (product - number)
    return high, number - high


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, heads and tokens; 0 where a dimension has one entry."""
    (batch, heads, _, _), (b, h, t, _) = x.shape, x.stride()
    return (b if batch > 1 else 0), (h if heads > 1 else 0), t


def faces_of(open: Tensor | None, other: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return the faces, or `other` if they are None, and the strides of batch, heads and keys."""
    if open is None:
        return other, (0, 0, 0)
    faces = open.view(torch.uint8)[..., 0, :]
    return faces, strides(faces.unsqueeze(-1))


def table_stride(stencil: Tensor) -> int:
    """Return the stride between the stencil tables of two heads; 0 where one table serves all heads."""
    return stencil.stride(0) if stencil.shape[0] > 1 else 0
