"""The gradient of the stencil table, from sums of other kernels and from rows at walls.

The gradient of an entry is a sum over all rows at its position between walls. For free rows, programs of
other kernels have computed partial sums. At each end of a sequence there is one row per position, whose
products are computed here. Walls inside a sequence have a launch of their own (`_walls`). A last launch
adds all sums, with one program per position and table, in an order that depends on shapes only.

Keys within reach of a wall that moves with the row (`boundary`) have separate products. A stepped value
that a causal row uses has all keys within reach after it, so positions with fewer keys after them belong
to boundary keys only.
"""

# Kernel arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attractor.attention.kernels.device import TILE, keys_to_walls, load_masked
from attractor.attention.kernels.launch import cdiv, faces_of, power_of_two, strides
from attractor.attention.kernels.operators import wrap_triton

PROGRAMS = 1024  # approximate number of programs that search for walls inside sequences
LINES = tl.constexpr(128)  # lines of sums, or rows at walls, that are added at a time
CHUNKS = [
    "tokens", "count", "batches", "heads", "chunks", "wall_chunks", "boundary_chunks", "edge_chunks"
]  # fmt: skip


class BoundarySums(NamedTuple):
    """Products of boundary weights and the gradients of stepped weights, summed by programs.

    Attributes:
        sums: ``[batch * heads * chunks, sides, reach, 2 reach]``, sums over keys without a second wall
            within reach. Causal rows have one side, windows have the left and the right side.
        edge_sums: ``[batch * heads * chunks, reach, reach, 2 reach]``, sums over keys of causal rows
            with a second wall within reach, by the number of keys before them.
    """

    sums: Tensor
    edge_sums: Tensor


@triton.jit(do_not_specialize=["tokens", "heads", "blocks"])
def _walls(
    do, v, open, wall_sums, tokens, heads, blocks,
    do_b, do_h, do_t, v_b, v_h, v_t, open_b, open_h, open_t,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Store products of gradients and values of rows with a wall within reach, summed per position.

    If CAUSAL, only rows without a wall after them count, because `do` is zero for the others.
    """
    TYPE: tl.constexpr = wall_sums.dtype.element_ty
    pair, chunk = tl.program_id(0), tl.program_id(1)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    do += batch * do_b + head * do_h
    v += batch * v_b + head * v_h
    open += batch * open_b + head * open_h
    places, entry = tl.arange(0, PLACES)[:, None], tl.arange(0, WIDTH)[None, :]
    sums = tl.zeros([PLACES, WIDTH], dtype=TYPE)
    for block in range(blocks):
        row = (chunk * blocks + block) * TILE + tl.arange(0, TILE)
        key = tl.minimum(row, tokens - 1)
        before, after = keys_to_walls(open, open_t, key, tokens, REACH, True)
        near = (before + after < 2 * REACH) & (row < tokens)
        if CAUSAL:
            near = near & (after == REACH)
        if tl.max(near.to(tl.int32), 0) > 0:
            grad = load_masked(do, do_t, key, column, near[:, None] & inside, TYPE)
            own = (before * (REACH + 1) + after)[None, :] == places
            for n in range(2 * REACH + 1):
                offset = n - REACH
                ok = (offset >= -before) & (offset <= after) & near
                value = load_masked(v, v_t, key + offset, column, ok[:, None] & inside, TYPE)
                products = tl.sum(grad * value, 1)
                of_place = tl.sum(tl.where(own, products[None, :], 0.0), 1)
                sums += tl.where(entry == n, of_place[:, None], 0.0)
    size: tl.constexpr = (REACH + 1) * (REACH + 1) * (2 * REACH + 1)
    wall_sums += (pair.to(tl.int64) * tl.num_programs(1) + chunk) * size
    ok = (places < (REACH + 1) * (REACH + 1)) & (entry < 2 * REACH + 1)
    tl.store(wall_sums + places * (2 * REACH + 1) + entry, sums, mask=ok)


@triton.jit
def _sum_lines(x, first, stride, pairs, chunks, size, offset, count, WIDTH: tl.constexpr):
    """Return the sum ``[WIDTH]`` of entries offset .. offset + count - 1 of ``[pairs, chunks, size]``.

    The sum is over `pairs` pairs: first, first + stride, first + 2 stride, ...
    """
    line, entry = tl.arange(0, LINES), tl.arange(0, WIDTH)[None, :]
    sums = tl.zeros([LINES, WIDTH], dtype=x.dtype.element_ty)
    for start in range(0, pairs * chunks, LINES):
        n = start + line
        chunk = ((n // chunks) * stride + first) * chunks + n % chunks
        ok = (n < pairs * chunks)[:, None] & (entry < count)
        where = x + chunk.to(tl.int64)[:, None] * size + offset + entry
        sums += tl.load(where, mask=ok, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def _at_an_end(
    do, v, key, first, stride, pairs, tokens, heads, do_b, do_h, do_t, v_b, v_h, v_t,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Return the products of one row of gradients with the values within reach, summed over pairs."""
    column = tl.arange(0, COLUMNS)[None, :]
    entry = tl.arange(0, WIDTH)[None, :]
    sums = tl.zeros([TILE, WIDTH], dtype=TYPE)
    for start in range(0, pairs, TILE):
        member = start + tl.arange(0, TILE)
        pair = tl.minimum(member, pairs - 1) * stride + first
        batch, head = (pair // heads).to(tl.int64)[:, None], (pair % heads).to(tl.int64)[:, None]
        ok = (member < pairs)[:, None] & (column < DIM)
        row = (member * 0 + key).to(tl.int64)[:, None]
        grad = tl.load(do + batch * do_b + head * do_h + row * do_t + column, mask=ok, other=0.0)
        grad = grad.to(TYPE)
        for n in tl.static_range(2 * REACH + 1):
            place = row + (n - REACH)
            value = v + batch * v_b + head * v_h + place * v_t + column
            value = tl.load(value, mask=ok & (place >= 0) & (place < tokens), other=0.0).to(TYPE)
            sums += tl.where(entry == n, tl.sum(grad * value, 1)[:, None], 0.0)
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=CHUNKS)
def _gather(
    do, v, free_sums, wall_sums, boundary_sums, edge_sums, d_stencil, tokens, count, batches, heads,
    chunks, wall_chunks, boundary_chunks, edge_chunks, do_b, do_h, do_t, v_b, v_h, v_t,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    FACES: tl.constexpr, SIDES: tl.constexpr,
):  # fmt: skip
    """Store the gradient at one position between walls of one table.

    SIDES: Number of sides in `BoundarySums`, 0 without boundary keys.
    """
    TYPE: tl.constexpr = d_stencil.dtype.element_ty
    SIZE: tl.constexpr = 2 * REACH * REACH
    ALL: tl.constexpr = 2 * REACH + 1
    LINES_OF_WALLS: tl.constexpr = (REACH + 1) * (REACH + 1) * ALL
    table, place = tl.program_id(0), tl.program_id(1)
    before, after = place // (REACH + 1), place % (REACH + 1)
    stride, pairs = heads, batches
    if tl.num_programs(0) == 1:
        stride, pairs = 1, batches * heads
    entry = tl.arange(0, WIDTH)
    total, start = tl.zeros([WIDTH], dtype=TYPE), 0
    if before + after == 2 * REACH:
        total = _sum_lines(free_sums, table, stride, pairs, chunks, ALL, 0, ALL, WIDTH)
    elif SIDES > 0 and after < REACH:
        m = REACH - 1 - after
        offset, size = m * 2 * REACH + m, 2 * REACH - m
        if before == REACH:
            offset += (SIDES - 1) * SIZE
            total = _sum_lines(
                boundary_sums, table, stride, pairs, boundary_chunks, SIDES * SIZE, offset, size, WIDTH
            )
        elif SIDES == 1:
            offset += before * SIZE
            total = _sum_lines(
                edge_sums, table, stride, pairs, edge_chunks, REACH * SIZE, offset, size, WIDTH
            )
    elif SIDES == 2:
        start = REACH - before
        offset, size = before * 2 * REACH, before + REACH + 1
        total = _sum_lines(
            boundary_sums, table, stride, pairs, boundary_chunks, SIDES * SIZE, offset, size, WIDTH
        )
    elif FACES:
        total = _sum_lines(
            wall_sums, table, stride, pairs, wall_chunks, LINES_OF_WALLS, place * ALL, ALL, WIDTH
        )
    else:
        key = tl.where(before < REACH, before, tokens - 1 - after)
        exists = (key >= 0) & (key < count) & (tl.minimum(key, REACH) == before)
        if exists & (tl.minimum(tokens - 1 - key, REACH) == after):
            total = _at_an_end(
                do, v, key, table, stride, pairs, tokens, heads, do_b, do_h, do_t, v_b, v_h, v_t,
                REACH, DIM, COLUMNS, WIDTH, TYPE,
            )  # fmt: skip
    d_stencil += (table * tl.num_programs(1) + place) * ALL
    tl.store(d_stencil + entry, tl.zeros([WIDTH], dtype=TYPE), mask=entry < start)
    tl.store(d_stencil + start + entry, total, mask=start + entry < ALL)


def stencil_gradient(
    do: Tensor,
    value: Tensor,
    open: Tensor | None,
    stencil: Tensor,
    free_sums: Tensor,
    boundary: BoundarySums | None = None,
) -> Tensor:
    """Return the gradient of the stencil table.

    Args:
        do: Gradients of the stepped values of the first keys; those of later keys are zero. For windows,
            which have no rows near the ends, only the strides are used.
        value: ``[batch, heads, keys, dim]``.
        open: bool ``[batch or 1, heads or 1, 1, keys - 1]``, False at walls; None if only the ends are
            walls.
        stencil: The table.
        free_sums: Sums over free rows ``[batch * heads * chunks, 2 reach + 1]``.
        boundary: Sums of the boundary keys, or None if there are none.
    """
    (batch, heads, tokens, dim), reach = value.shape, int(stencil.shape[-1]) // 2
    d_stencil, pairs = stencil.new_empty(stencil.shape), batch * heads
    columns, width = max(16, power_of_two(int(dim))), power_of_two(2 * reach + 1)
    wall_sums, wall_chunks = free_sums, 1
    if open is not None:
        blocks = cdiv(tokens, TILE.value)
        repeat = max(1, min(blocks, pairs * blocks // PROGRAMS))
        wall_chunks = cdiv(blocks, repeat)
        wall_sums = stencil.new_empty(pairs * wall_chunks, *stencil.shape[1:])
        faces, face_strides = faces_of(open, value)
        wrap_triton(_walls)[pairs, wall_chunks](
            do, value, faces, wall_sums, tokens, heads, repeat, *strides(do), *strides(value),
            *face_strides, reach, int(dim), columns, power_of_two((reach + 1) ** 2), width,
            boundary is not None, num_warps=4,
        )  # fmt: skip
    sums, edge_sums = (free_sums, free_sums) if boundary is None else boundary
    wrap_triton(_gather)[stencil.shape[0], (reach + 1) ** 2](
        do, value, free_sums, wall_sums, sums, edge_sums, d_stencil, tokens, do.shape[2], batch, heads,
        free_sums.shape[0] // pairs, wall_chunks, sums.shape[0] // pairs, edge_sums.shape[0] // pairs,
        *strides(do), *strides(value), reach, int(dim), columns, width, open is not None,
        0 if boundary is None else int(sums.shape[1]), num_warps=4,
    )  # fmt: skip
    return d_stencil
