"""Backward kernel of stepped values. Its twin in torch is the backward of `step_values`.

The gradient of values is the transposed sum. The gradient of the stencil table is a sum over rows of
products of gradients and values. Each program sums the products of its free rows, and
`stencil_gradient` adds those of all other rows.
"""

# Kernel arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment

import triton
import triton.language as tl

from attractor.attention.kernels.device import (
    SIZES,
    TILE,
    free_stencil,
    keys_to_walls,
    load_masked,
    load_rows,
    no_wall,
    step_transposed,
    step_transposed_near_walls,
    store_piece,
    store_products,
    upcast,
    zero_products,
)


@triton.jit(do_not_specialize=SIZES)
def _step_backward(
    do, v, open, stencil, dv, free_sums, tokens, heads,
    do_b, do_h, do_t, v_b, v_h, v_t, dv_b, dv_h, dv_t, open_b, open_h, open_t, stencil_h,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, STRANDS: tl.constexpr,
    RUN: tl.constexpr, FACES_SEEN: tl.constexpr, WIDTH: tl.constexpr, FACES: tl.constexpr,
    OF_STENCIL: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the values of one program."""
    TYPE: tl.constexpr = stencil.dtype.element_ty
    ROWS: tl.constexpr = STRANDS * RUN
    blocks = tl.cdiv(tokens, ROWS)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * ROWS
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    do += batch * do_b + head * do_h
    v += batch * v_b + head * v_h
    dv += batch * dv_b + head * dv_h
    open += batch * open_b + head * open_h
    stencil += head * stencil_h
    free, tiles = True, 2
    if FACES:
        free = no_wall(open, open_t, start, tokens, 2 * REACH, 2 * REACH, ROWS, FACES_SEEN)
        tiles = tl.where(free, 2, tl.cdiv(ROWS, TILE))
    products = zero_products(STRANDS, COLUMNS, REACH, TYPE)
    if free & (tokens > 4 * REACH):
        first = start + tl.arange(0, STRANDS) * RUN
        grads = load_rows(do, do_t, first - REACH, tokens, RUN + 2 * REACH, DIM, COLUMNS, 1)
        if OF_STENCIL:
            values = load_rows(v, v_t, first, tokens, RUN, DIM, COLUMNS, 1)
        weights = free_stencil(stencil, REACH)
        for o in tl.static_range(RUN):
            ok = (first + o >= 2 * REACH) & (first + o < tokens - 2 * REACH)
            value = tl.zeros([STRANDS, COLUMNS], dtype=TYPE)
            if OF_STENCIL:
                value = tl.where(ok[:, None], upcast(values[o], TYPE), 0.0)
            sums = tl.zeros([STRANDS, COLUMNS], dtype=TYPE)
            sums, products = step_transposed(
                sums, products, grads, weights, value, o, REACH, TYPE, OF_STENCIL
            )
            store_piece(dv, dv_t, first + o, sums, ok, 0, DIM, COLUMNS, 1)
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    near = tl.zeros([TILE, WIDTH], dtype=TYPE)
    for tile in range(tiles):
        corner = start + tile * TILE
        if free:
            corner = tile * tl.maximum(tokens - 2 * REACH, TILE)
        if (corner < start + ROWS) & (corner + TILE > start):
            row = corner + tl.arange(0, TILE)
            key = tl.minimum(row, tokens - 1)
            before, after = keys_to_walls(open, open_t, key, tokens, 2 * REACH, FACES)
            ok = (row >= start) & (row < tl.minimum(start + ROWS, tokens))
            if free:
                ok = ok & (before + after < 4 * REACH)
            value = tl.zeros([TILE, COLUMNS], dtype=TYPE)
            if OF_STENCIL:
                value = load_masked(v, v_t, key, column, ok[:, None] & inside, TYPE)
            sums = tl.zeros([TILE, COLUMNS], dtype=TYPE)
            sums, near = step_transposed_near_walls(
                sums, near, do, do_t, tokens, value, stencil, key, before, after, column, inside,
                REACH, WIDTH, OF_STENCIL,
            )  # fmt: skip
            store_piece(dv, dv_t, row, sums, ok, 0, DIM, COLUMNS, 1)
    if OF_STENCIL:
        store_products(free_sums, products, near, REACH, STRANDS, WIDTH)
