"""The gradient of the stencil table, from sums that programs have left and from rows at walls.

The gradient of an entry is a sum over all rows of its place between walls. Of rows that have no wall
within reach there are many: programs of other kernels have added up theirs. At an end of a sequence
there is one row per place, whose products are computed here. Walls inside a sequence take a launch of
their own (`_walls`). One more launch adds up all sums, one program per place and table, in an order that
depends on nothing but shapes.

Keys within reach of a wall that moves with the row (`boundary`) have products of their own. A stepped
value that a causal row uses has all keys within reach after it, so places with fewer keys after them are
those of boundary keys alone.
"""

# Arguments of kernels have no types that mypy could know.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attractor.attention.kernels.device import TILE, load_masked, room
from attractor.attention.kernels.launch import cdiv, faces_of, power_of_two, strides
from attractor.attention.kernels.operators import wrap_triton

PROGRAMS = 1024  # about as many look for rows at walls inside of sequences
LINES = tl.constexpr(128)  # of sums, or of rows at walls, that are added up at a time
CHUNKS = [
    "tokens", "count", "batches", "heads", "chunks", "wall_chunks", "boundary_chunks", "edge_chunks"
]  # fmt: skip


class BoundarySums(NamedTuple):
    """Products of boundary weights and the gradients of stepped weights, summed by programs.

    Attributes:
        sums: ``[batch * heads * chunks, sides, reach, 2 reach]`` of keys that have no second wall within
            reach; the only side is that after a causal row, of a window the left side comes first.
        edge_sums: ``[batch * heads * chunks, reach, reach, 2 reach]`` of keys that have one, by the
            number of keys before them; only of causal rows.
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
    """Products of gradients and values of rows with a wall within reach, summed per place.

    If CAUSAL, only of rows with none after them: `do` has no others.
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
        before, after = room(open, open_t, key, tokens, REACH, True)
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
def _added(x, first, apart, pairs, chunks, size, offset, count, WIDTH: tl.constexpr):
    """The sum ``[WIDTH]`` of entries offset .. offset + count - 1 of lines ``[pairs, chunks, size]``.

    Only of the pairs first, first + apart, ..., as many as `pairs`.
    """
    line, entry = tl.arange(0, LINES), tl.arange(0, WIDTH)[None, :]
    sums = tl.zeros([LINES, WIDTH], dtype=x.dtype.element_ty)
    for start in range(0, pairs * chunks, LINES):
        n = start + line
        chunk = ((n // chunks) * apart + first) * chunks + n % chunks
        ok = (n < pairs * chunks)[:, None] & (entry < count)
        where = x + chunk.to(tl.int64)[:, None] * size + offset + entry
        sums += tl.load(where, mask=ok, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def _at_an_end(
    do, v, key, first, apart, pairs, tokens, heads, do_b, do_h, do_t, v_b, v_h, v_t,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Products of one row of every pair's gradients with the values within reach, summed ``[WIDTH]``."""
    column = tl.arange(0, COLUMNS)[None, :]
    entry = tl.arange(0, WIDTH)[None, :]
    sums = tl.zeros([TILE, WIDTH], dtype=TYPE)
    for start in range(0, pairs, TILE):
        member = start + tl.arange(0, TILE)
        pair = tl.minimum(member, pairs - 1) * apart + first
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
    """All there is for one place between walls, of one table; SIDES as in `BoundarySums`, 0 if none."""
    TYPE: tl.constexpr = d_stencil.dtype.element_ty
    SIZE: tl.constexpr = 2 * REACH * REACH
    ALL: tl.constexpr = 2 * REACH + 1
    LINES_OF_WALLS: tl.constexpr = (REACH + 1) * (REACH + 1) * ALL
    table, place = tl.program_id(0), tl.program_id(1)
    before, after = place // (REACH + 1), place % (REACH + 1)
    apart, pairs = heads, batches
    if tl.num_programs(0) == 1:
        apart, pairs = 1, batches * heads
    entry = tl.arange(0, WIDTH)
    total, start = tl.zeros([WIDTH], dtype=TYPE), 0
    if before + after == 2 * REACH:
        total = _added(free_sums, table, apart, pairs, chunks, ALL, 0, ALL, WIDTH)
    elif SIDES > 0 and after < REACH:
        m = REACH - 1 - after
        offset, size = m * 2 * REACH + m, 2 * REACH - m
        if before == REACH:
            offset += (SIDES - 1) * SIZE
            total = _added(
                boundary_sums, table, apart, pairs, boundary_chunks, SIDES * SIZE, offset, size, WIDTH
            )
        elif SIDES == 1:
            offset += before * SIZE
            total = _added(
                edge_sums, table, apart, pairs, edge_chunks, REACH * SIZE, offset, size, WIDTH
            )
    elif SIDES == 2:
        start = REACH - before
        offset, size = before * 2 * REACH, before + REACH + 1
        total = _added(
            boundary_sums, table, apart, pairs, boundary_chunks, SIDES * SIZE, offset, size, WIDTH
        )
    elif FACES:
        total = _added(
            wall_sums, table, apart, pairs, wall_chunks, LINES_OF_WALLS, place * ALL, ALL, WIDTH
        )
    else:
        key = tl.where(before < REACH, before, tokens - 1 - after)
        exists = (key >= 0) & (key < count) & (tl.minimum(key, REACH) == before)
        if exists & (tl.minimum(tokens - 1 - key, REACH) == after):
            total = _at_an_end(
                do, v, key, table, apart, pairs, tokens, heads, do_b, do_h, do_t, v_b, v_h, v_t,
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
        do: Gradients of the stepped values, of the first keys at least; those of all others are zero.
            Of windows only the strides are used: none of their rows is near an end.
        free_sums: Sums over rows without a wall within reach ``[batch * heads * chunks, 2 reach + 1]``.
        boundary: Of the boundary keys, with the same `open`. None: there are no boundary keys.
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
