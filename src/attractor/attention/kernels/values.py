"""All steps of a linear PDE on the values, in one pass over them.

Every stepped value is a sum over the keys within reach, with the taps of its place between walls
(`taps`). Rows that feel no wall have all the same, so a program makes its sums from registers (`rows`);
the few others are left out there, and done a tile at a time with taps looked up for each.

The gradient of values is the transposed sum. That of the taps is a sum over rows, of products of
gradients and values: programs add up those of their free rows, and one more launch the rest (`parts`).
"""

# Arguments of kernels have no types that mypy could know; tuples of tiles grow, by addition alone.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: RUF005

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attractor.attention.kernels import parts, rows
from attractor.attention.kernels.rows import (
    PIECE,
    SIZES,
    TILE,
    by_rows,
    no_wall,
    room,
    rows_at,
    rows_from,
    strides,
    table_stride,
    wide,
    write_rows,
)
from attractor.attention.kernels.taps import (
    directly,
    either,
    make_taps,
    operator,
    parts_of,
    power_of_two,
    taps,
    taps_backward,
    taps_of_any,
    traced,
    wrap_triton,
)
from attractor.attention.precision import first_derivatives_only

__all__ = [
    "by_rows",
    "make_taps",
    "operator",
    "step",
    "step_backward",
    "step_values",
    "strides",
    "taps",
    "taps_backward",
    "taps_of_any",
]


@triton.jit
def free_taps(taps, REACH: tl.constexpr):
    """Those of a row that feels no wall."""
    found = ()
    for n in tl.static_range(2 * REACH + 1):
        found = found + (tl.load(taps + (REACH * (REACH + 1) + REACH) * (2 * REACH + 1) + n),)
    return found


@triton.jit(do_not_specialize=SIZES)
def _step(
    value, open, taps, out, tokens, heads,
    value_b, value_h, value_t, out_b, out_h, out_t,
    open_b, open_h, open_t, taps_h,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, STRANDS: tl.constexpr,
    RUN: tl.constexpr, SEEN: tl.constexpr, FACES: tl.constexpr,
):  # fmt: skip
    """The strands of one program: the sum over all offsets."""
    TYPE: tl.constexpr = taps.dtype.element_ty
    ROWS: tl.constexpr = STRANDS * RUN
    blocks = tl.cdiv(tokens, ROWS)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * ROWS
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    value += batch * value_b + head * value_h
    out += batch * out_b + head * out_h
    open += batch * open_b + head * open_h
    taps += head * taps_h
    free, tiles = True, 2
    if FACES:
        free = no_wall(open, open_t, start, tokens, REACH, ROWS, SEEN)
        tiles = tl.where(free, 2, tl.cdiv(ROWS, TILE))
    if free & (tokens > 2 * REACH):
        first = start + tl.arange(0, STRANDS) * RUN
        met = rows_from(value, value_t, first - REACH, tokens, RUN + 2 * REACH, DIM, COLUMNS)
        tap = free_taps(taps, REACH)
        for o in tl.static_range(RUN):
            sums = tap[0] * wide(met[o], TYPE)
            for n in tl.static_range(1, 2 * REACH + 1):
                sums += tap[n] * wide(met[o + n], TYPE)
            ok = (first + o >= REACH) & (first + o < tokens - REACH)
            write_rows(out, out_t, first + o, sums, ok, DIM, COLUMNS)
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    for tile in range(tiles):
        corner = start + tile * TILE
        if free:
            corner = tile * tl.maximum(tokens - REACH, TILE)
        if (corner < start + ROWS) & (corner + TILE > start):
            row = corner + tl.arange(0, TILE)
            at = tl.minimum(row, tokens - 1)
            before, after = room(open, open_t, at, tokens, REACH, FACES)
            kind = (before * (REACH + 1) + after) * (2 * REACH + 1)
            sums = tl.zeros([TILE, COLUMNS], dtype=TYPE)
            for n in tl.static_range(2 * REACH + 1):
                ok = (n - REACH >= -before) & (n - REACH <= after)
                tap = tl.load(taps + kind + n)
                there = rows_at(value, value_t, at + (n - REACH), column, ok[:, None] & inside, TYPE)
                sums += tap[:, None] * there
            ok = (row >= start) & (row < tl.minimum(start + ROWS, tokens))
            if free:
                ok = ok & (before + after < 2 * REACH)
            write_rows(out, out_t, row, sums, ok, DIM, COLUMNS)


@triton.jit
def no_products(STRANDS: tl.constexpr, COLUMNS: tl.constexpr, REACH: tl.constexpr, TYPE: tl.constexpr):
    """For every tap nothing yet, of every thread's part of a row."""
    found = ()
    for _ in tl.static_range(2 * REACH + 1):
        found = found + (tl.zeros([STRANDS, COLUMNS // PIECE], dtype=TYPE),)
    return found


@triton.jit
def give_back(
    sums, products, met, tap, held,
    o: tl.constexpr, REACH: tl.constexpr, TYPE: tl.constexpr, OF_TAPS: tl.constexpr,
):  # fmt: skip
    """The transposed sum of rows that feel no wall, and their products with the values held there.

    Args:
        met: gradients of the rows within reach, from entry o on.
        tap: as `free_taps` gives them.
    """
    after = ()
    for n in tl.static_range(2 * REACH + 1):
        there = wide(met[o + n], TYPE)
        sums += tap[2 * REACH - n] * there
        if OF_TAPS:
            by_thread = tl.reshape(held * there, [sums.shape[0], sums.shape[1] // PIECE, PIECE])
            after = after + (products[n] + tl.sum(by_thread, 2),)
    if not OF_TAPS:
        after = products
    return sums, after


@triton.jit
def give_back_at_walls(
    sums, free, grad, grad_t, count, held, taps, at, before, after, column, inside,
    REACH: tl.constexpr, TAPS: tl.constexpr, OF_TAPS: tl.constexpr,
):  # fmt: skip
    """The same for any rows, each with taps of its own; products of rows without walls only.

    Args:
        free: ``[rows, TAPS]``, to which the products are added.
        count: rows of grad from here on are zeros, and not there.
        held: values at `at`.
        before, after: with a span of twice the reach, so that they hold for all rows within reach.
    """
    TYPE: tl.constexpr = taps.dtype.element_ty
    tap_of = tl.arange(0, TAPS)[None, :]
    for n in tl.static_range(2 * REACH + 1):
        step = n - REACH
        ok = (step >= -before) & (step <= after) & (at + step < count)
        left = tl.minimum(tl.maximum(before + step, 0), REACH)
        right = tl.minimum(tl.maximum(after - step, 0), REACH)
        kind = left * (REACH + 1) + right
        tap = tl.load(taps + kind * (2 * REACH + 1) + (2 * REACH - n))
        there = rows_at(grad, grad_t, at + step, column, ok[:, None] & inside, TYPE)
        sums += tap[:, None] * there
        if OF_TAPS:
            products = tl.where(left + right == 2 * REACH, tl.sum(there * held, 1), 0.0)
            free += tl.where(tap_of == 2 * REACH - n, products[:, None], 0.0)
    return sums, free


@triton.jit
def write_products(
    parts, products, free, REACH: tl.constexpr, STRANDS: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """A program's sums ``[2 reach + 1]`` of what `give_back` and `give_back_at_walls` have found."""
    tap = tl.arange(0, TAPS)
    found = tl.zeros([STRANDS, TAPS], dtype=free.dtype)
    for n in tl.static_range(2 * REACH + 1):
        mine = tap[None, :] == 2 * REACH - n
        found += tl.where(mine, tl.sum(products[n], 1)[:, None], 0.0)
    parts += tl.program_id(0).to(tl.int64) * (2 * REACH + 1) + tap
    tl.store(parts, tl.sum(found, 0) + tl.sum(free, 0), mask=tap < 2 * REACH + 1)


@triton.jit(do_not_specialize=SIZES)
def _step_backward(
    grad, value, open, taps, of_value, parts, tokens, heads,
    grad_b, grad_h, grad_t, value_b, value_h, value_t,
    out_b, out_h, out_t, open_b, open_h, open_t, taps_h,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, STRANDS: tl.constexpr,
    RUN: tl.constexpr, SEEN: tl.constexpr, TAPS: tl.constexpr, FACES: tl.constexpr,
    OF_TAPS: tl.constexpr,
):  # fmt: skip
    """The strands of one program: the gradients of their values."""
    TYPE: tl.constexpr = taps.dtype.element_ty
    ROWS: tl.constexpr = STRANDS * RUN
    blocks = tl.cdiv(tokens, ROWS)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * ROWS
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    grad += batch * grad_b + head * grad_h
    value += batch * value_b + head * value_h
    of_value += batch * out_b + head * out_h
    open += batch * open_b + head * open_h
    taps += head * taps_h
    free, tiles = True, 2
    if FACES:
        free = no_wall(open, open_t, start, tokens, 2 * REACH, ROWS, SEEN)
        tiles = tl.where(free, 2, tl.cdiv(ROWS, TILE))
    products = no_products(STRANDS, COLUMNS, REACH, TYPE)
    if free & (tokens > 4 * REACH):
        first = start + tl.arange(0, STRANDS) * RUN
        met = rows_from(grad, grad_t, first - REACH, tokens, RUN + 2 * REACH, DIM, COLUMNS)
        if OF_TAPS:
            kept = rows_from(value, value_t, first, tokens, RUN, DIM, COLUMNS)
        tap = free_taps(taps, REACH)
        for o in tl.static_range(RUN):
            ok = (first + o >= 2 * REACH) & (first + o < tokens - 2 * REACH)
            held = tl.zeros([STRANDS, COLUMNS], dtype=TYPE)
            if OF_TAPS:
                held = tl.where(ok[:, None], wide(kept[o], TYPE), 0.0)
            sums = tl.zeros([STRANDS, COLUMNS], dtype=TYPE)
            sums, products = give_back(sums, products, met, tap, held, o, REACH, TYPE, OF_TAPS)
            write_rows(of_value, out_t, first + o, sums, ok, DIM, COLUMNS)
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    others = tl.zeros([TILE, TAPS], dtype=TYPE)
    for tile in range(tiles):
        corner = start + tile * TILE
        if free:
            corner = tile * tl.maximum(tokens - 2 * REACH, TILE)
        if (corner < start + ROWS) & (corner + TILE > start):
            row = corner + tl.arange(0, TILE)
            at = tl.minimum(row, tokens - 1)
            before, after = room(open, open_t, at, tokens, 2 * REACH, FACES)
            ok = (row >= start) & (row < tl.minimum(start + ROWS, tokens))
            if free:
                ok = ok & (before + after < 4 * REACH)
            held = tl.zeros([TILE, COLUMNS], dtype=TYPE)
            if OF_TAPS:
                held = rows_at(value, value_t, at, column, ok[:, None] & inside, TYPE)
            sums = tl.zeros([TILE, COLUMNS], dtype=TYPE)
            sums, others = give_back_at_walls(
                sums, others, grad, grad_t, tokens, held, taps, at, before, after, column, inside,
                REACH, TAPS, OF_TAPS,
            )  # fmt: skip
            write_rows(of_value, out_t, row, sums, ok, DIM, COLUMNS)
    if OF_TAPS:
        write_products(parts, products, others, REACH, STRANDS, TAPS)


def step(value: Tensor, taps: Tensor, open: Tensor | None) -> Tensor:
    """Values ``[batch, heads, keys, dim]`` after all steps.

    Args:
        taps: of heads or of one head, in float32 for half precision, else in value's type.
        open: bool ``[batch or 1, heads or 1, 1, keys - 1]``, False at walls, or None.
    """
    if traced(value):
        return step_values(value, taps, open)
    if torch.is_grad_enabled() and (value.requires_grad or taps.requires_grad):
        return _Step.apply(value, taps, open)
    return _directly_stepped(value, taps, open)


def _stepped(value: Tensor, taps: Tensor, open: Tensor | None) -> Tensor:
    value, taps = by_rows(value), taps.contiguous()
    out = torch.empty_like(value)
    batch, heads, tokens, dim = value.shape
    reach = int(taps.shape[-1]) // 2
    name = "few" if tokens <= rows.FEW else "step"
    strands, run, warps, columns = rows.shape(name, (int(dim),), value.dtype, reach)
    faces, face_strides = rows.faces_of(open, value)
    wrap_triton(_step)[batch * heads * parts_of(tokens, strands * run),](
        value, faces, taps, out, tokens, heads, *strides(value), *strides(out), *face_strides,
        table_stride(taps), reach, int(dim), columns, strands, run,
        power_of_two(strands * run + 2 * reach), open is not None, num_warps=warps,
    )  # fmt: skip
    return out


def _stepped_like(value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(by_rows(value))


def _given_back(
    grad: Tensor, value: Tensor, taps: Tensor, open: Tensor | None, of_taps: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of value and taps; the latter without entries if it is not wanted."""
    grad, value, taps = by_rows(grad), by_rows(value), taps.contiguous()
    of_value = torch.empty_like(value)
    batch, heads, tokens, dim = value.shape
    reach = int(taps.shape[-1]) // 2
    name = "few" if tokens <= rows.FEW else "step_backward"
    strands, run, warps, columns = rows.shape(name, (int(dim),), value.dtype, reach)
    blocks = parts_of(tokens, strands * run)
    free = taps.new_empty(batch * heads * blocks if of_taps else 0, 2 * reach + 1)
    faces, face_strides = rows.faces_of(open, value)
    wrap_triton(_step_backward)[batch * heads * blocks,](
        grad, value, faces, taps, of_value, free, tokens, heads, *strides(grad), *strides(value),
        *strides(of_value), *face_strides, table_stride(taps), reach, int(dim), columns, strands, run,
        power_of_two(strands * run + 4 * reach), power_of_two(2 * reach + 1),
        open is not None, of_taps, num_warps=warps,
    )  # fmt: skip
    if not of_taps:
        return of_value, free.view(0)
    return of_value, parts.taps_gradient(grad, value, open, taps, free)


def _given_back_like(
    grad: Tensor, value: Tensor, taps: Tensor, open: Tensor | None, of_taps: bool
) -> tuple[Tensor, Tensor]:
    return _stepped_like(value), taps.new_empty(taps.shape if of_taps else 0)


_directly_stepped = directly(_stepped)
step_values = operator("step_values")(_stepped)
step_values.register_fake(_stepped_like)
step_values_backward = operator("step_values_backward")(_given_back)
step_values_backward.register_fake(_given_back_like)


step_backward = either(step_values_backward, _given_back)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (value, taps, open), needed = ctx.saved_tensors, ctx.needs_input_grad[1]
    of_value, of_taps = step_backward(grad, value, taps, open, needed)
    return of_value, of_taps if needed else None, None


step_values.register_autograd(_gradients, setup_context=_context)


class _Step(torch.autograd.Function):
    """What the operator does, without it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, taps: Tensor, open: Tensor | None) -> Tensor:
        ctx.save_for_backward(value, taps, open)
        return _directly_stepped(value, taps, open)

    backward = staticmethod(first_derivatives_only(_gradients))
