"""The gradient of the taps, from sums that programs have left and from rows at walls.

A tap's gradient is a sum over all rows of its kind. Of rows that feel no wall there are many: programs
of other kernels have summed their share of them. At an end of a sequence there is one row of a kind, so
its products are made here. Walls inside take a pass of their own (`_walls`). One launch adds up all of
it, a program for every kind of row and table, in an order that depends on nothing but shapes.

Near a causal wall rows leave products of their own. There a key whose stepped value is used at all, by
later rows, has as many keys after it as the reach: kinds with fewer are those of near keys alone.
"""

# Arguments of kernels have no types that mypy could know.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

from attractor.attention.kernels.rows import TILE, faces_of, room, rows_at, strides
from attractor.attention.kernels.taps import parts_of, power_of_two, wrap_triton

PROGRAMS = 1024  # about so many look for rows at walls inside of sequences
LINES = tl.constexpr(128)  # of parts, or of rows at walls, that are added up at a time


@triton.jit(do_not_specialize=["tokens", "heads", "blocks"])
def _walls(
    grad, value, open, parts, tokens, heads, blocks,
    grad_b, grad_h, grad_t, value_b, value_h, value_t, open_b, open_h, open_t,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, KINDS: tl.constexpr,
    TAPS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Products of gradients and values of the rows that feel a wall, added up for each kind of them.

    If NEAR only of rows that feel none after them: grad has no others.
    """
    TYPE: tl.constexpr = parts.dtype.element_ty
    pair, chunk = tl.program_id(0), tl.program_id(1)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    grad += batch * grad_b + head * grad_h
    value += batch * value_b + head * value_h
    open += batch * open_b + head * open_h
    kinds, tap_of = tl.arange(0, KINDS)[:, None], tl.arange(0, TAPS)[None, :]
    found = tl.zeros([KINDS, TAPS], dtype=TYPE)
    for n in range(blocks):
        row = (chunk * blocks + n) * TILE + tl.arange(0, TILE)
        at = tl.minimum(row, tokens - 1)
        before, after = room(open, open_t, at, tokens, REACH, True)
        felt = (before + after < 2 * REACH) & (row < tokens)
        if NEAR:
            felt = felt & (after == REACH)
        if tl.max(felt.to(tl.int32), 0) > 0:
            own = rows_at(grad, grad_t, at, column, felt[:, None] & inside, TYPE)
            hit = (before * (REACH + 1) + after)[None, :] == kinds
            for tap in range(2 * REACH + 1):
                step = tap - REACH
                ok = (step >= -before) & (step <= after) & felt
                there = rows_at(value, value_t, at + step, column, ok[:, None] & inside, TYPE)
                products = tl.sum(own * there, 1)
                of_kind = tl.sum(tl.where(hit, products[None, :], 0.0), 1)
                found += tl.where(tap_of == tap, of_kind[:, None], 0.0)
    size: tl.constexpr = (REACH + 1) * (REACH + 1) * (2 * REACH + 1)
    parts += (pair.to(tl.int64) * tl.num_programs(1) + chunk) * size
    ok = (kinds < (REACH + 1) * (REACH + 1)) & (tap_of < 2 * REACH + 1)
    tl.store(parts + kinds * (2 * REACH + 1) + tap_of, found, mask=ok)


@triton.jit
def _added(parts, first, apart, pairs, chunks, size, offset, count, TAPS: tl.constexpr):
    """The sum ``[TAPS]`` of entries offset .. offset + count - 1 of lines ``[pairs, chunks, size]``.

    Of the pairs first, first + apart, ... only, so many.
    """
    line, tap = tl.arange(0, LINES), tl.arange(0, TAPS)[None, :]
    sums = tl.zeros([LINES, TAPS], dtype=parts.dtype.element_ty)
    for start in range(0, pairs * chunks, LINES):
        at = start + line
        there = ((at // chunks) * apart + first) * chunks + at % chunks
        ok = (at < pairs * chunks)[:, None] & (tap < count)
        where = parts + there.to(tl.int64)[:, None] * size + offset + tap
        sums += tl.load(where, mask=ok, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def _at_an_end(
    grad, value, at, first, apart, pairs, tokens, heads,
    grad_b, grad_h, grad_t, value_b, value_h, value_t,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Products of row `at` of every pair's gradients with the values within reach, summed ``[TAPS]``."""
    column = tl.arange(0, COLUMNS)[None, :]
    tap_of = tl.arange(0, TAPS)[None, :]
    found = tl.zeros([TILE, TAPS], dtype=TYPE)
    for start in range(0, pairs, TILE):
        member = start + tl.arange(0, TILE)
        pair = tl.minimum(member, pairs - 1) * apart + first
        batch, head = (pair // heads).to(tl.int64)[:, None], (pair % heads).to(tl.int64)[:, None]
        ok = (member < pairs)[:, None] & (column < DIM)
        row = (member * 0 + at).to(tl.int64)[:, None]
        own = grad + batch * grad_b + head * grad_h + row * grad_t + column
        own = tl.load(own, mask=ok, other=0.0).to(TYPE)
        for tap in tl.static_range(2 * REACH + 1):
            place = row + (tap - REACH)
            met = value + batch * value_b + head * value_h + place * value_t + column
            met = tl.load(met, mask=ok & (place >= 0) & (place < tokens), other=0.0).to(TYPE)
            found += tl.where(tap_of == tap, tl.sum(own * met, 1)[:, None], 0.0)
    return tl.sum(found, 0)


@triton.jit(
    do_not_specialize=[
        "tokens", "count", "batches", "heads", "chunks", "inner_chunks", "near_chunks"
    ]
)  # fmt: skip
def _gather(
    grad, value, free, inner, near, firsts, found, tokens, count, batches, heads,
    chunks, inner_chunks, near_chunks,
    grad_b, grad_h, grad_t, value_b, value_h, value_t,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr,
    FACES: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One kind of row, of one table: everything there is for its taps.

    Rows with few keys after them are met near a causal wall only if NEAR: their products are in `near`
    ``[pairs, chunks, reach, 2 reach]``, and of the first rows of all in `firsts`, a line for each; with
    FACES `firsts` is by keys before a near key, ``[pairs, chunks, reach, reach, 2 reach]``.
    """
    TYPE: tl.constexpr = found.dtype.element_ty
    table, kind = tl.program_id(0), tl.program_id(1)
    before, after = kind // (REACH + 1), kind % (REACH + 1)
    apart, pairs = heads, batches
    if tl.num_programs(0) == 1:
        apart, pairs = 1, batches * heads
    tap = tl.arange(0, TAPS)
    total = tl.zeros([TAPS], dtype=TYPE)
    if before + after == 2 * REACH:
        total = _added(free, table, apart, pairs, chunks, 2 * REACH + 1, 0, 2 * REACH + 1, TAPS)
    elif NEAR and after < REACH:
        m = REACH - 1 - after
        offset, many = m * 2 * REACH + m, 2 * REACH - m
        size = REACH * 2 * REACH
        end = before + after + 1
        if before == REACH:
            total = _added(near, table, apart, pairs, near_chunks, size, offset, many, TAPS)
            end = 2 * REACH - 1
        if FACES:
            if before < REACH:
                lines, there = REACH * size, before * size + offset
                total = _added(firsts, table, apart, pairs, near_chunks, lines, there, many, TAPS)
        else:
            for row in range(before + after, end):
                there = row * size + offset
                total += _added(firsts, table, apart, pairs, 1, 2 * REACH * size, there, many, TAPS)
    elif FACES:
        kinds: tl.constexpr = (REACH + 1) * (REACH + 1)
        there = kind * (2 * REACH + 1)
        total = _added(
            inner, table, apart, pairs, inner_chunks, kinds * (2 * REACH + 1), there, 2 * REACH + 1, TAPS
        )
    else:
        at = tl.where(before < REACH, before, tokens - 1 - after)
        there = (at >= 0) & (at < count) & (tl.minimum(at, REACH) == before)
        if there & (tl.minimum(tokens - 1 - at, REACH) == after):
            total = _at_an_end(
                grad, value, at, table, apart, pairs, tokens, heads, grad_b, grad_h, grad_t, value_b,
                value_h, value_t, REACH, DIM, COLUMNS, TAPS, TYPE,
            )  # fmt: skip
    found += (table * tl.num_programs(1) + kind) * (2 * REACH + 1)
    tl.store(found + tap, total, mask=tap < 2 * REACH + 1)


def taps_gradient(
    grad: Tensor,
    value: Tensor,
    open: Tensor | None,
    taps: Tensor,
    free: Tensor,
    near: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Of the shape of taps.

    Args:
        grad: of the first keys, at least; that of the others is zero.
        free: programs' sums over rows that feel no wall ``[batch * heads * chunks, 2 reach + 1]``.
        near: what `near_rows` leaves, of rows near a causal wall; for the same `open`.
    """
    (batch, heads, tokens, dim), reach = value.shape, int(taps.shape[-1]) // 2
    found, pairs = taps.new_empty(taps.shape), batch * heads
    columns, width = max(16, power_of_two(int(dim))), power_of_two(2 * reach + 1)
    inner, inner_chunks = free, 1
    if open is not None:
        blocks = parts_of(tokens, TILE.value)
        repeat = max(1, min(blocks, pairs * blocks // PROGRAMS))
        inner_chunks = parts_of(blocks, repeat)
        inner = taps.new_empty(pairs * inner_chunks, *taps.shape[1:])
        faces, face_strides = faces_of(open, value)
        wrap_triton(_walls)[pairs, inner_chunks](
            grad, value, faces, inner, tokens, heads, repeat, *strides(grad), *strides(value),
            *face_strides, reach, int(dim), columns, power_of_two((reach + 1) ** 2), width,
            near is not None, num_warps=4,
        )  # fmt: skip
    sums, firsts = (free, free) if near is None else near
    wrap_triton(_gather)[taps.shape[0], (reach + 1) ** 2](
        grad, value, free, inner, sums, firsts, found, tokens, grad.shape[2], batch, heads,
        free.shape[0] // pairs, inner_chunks, 1 if near is None else sums.shape[0] // pairs,
        *strides(grad), *strides(value), reach, int(dim), columns, width, open is not None,
        near is not None, num_warps=4,
    )  # fmt: skip
    return found
