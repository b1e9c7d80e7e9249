"""Forward kernel of stepped values. Its twin in torch is `engines.values.step_values`.

All free rows have the same stencil, and a program computes their sums from registers. The few other rows
are computed tile by tile, each with its own entries of the table.
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
    store_piece,
    upcast,
)


@triton.jit(do_not_specialize=SIZES)
def _step(
    v, open, stencil, out, tokens, heads,
    v_b, v_h, v_t, out_b, out_h, out_t, open_b, open_h, open_t, stencil_h,
    REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, STRANDS: tl.constexpr,
    RUN: tl.constexpr, FACES_SEEN: tl.constexpr, FACES: tl.constexpr,
):  # fmt: skip
    """Store the rows of one program, each a sum over the keys within reach."""
    TYPE: tl.constexpr = stencil.dtype.element_ty
    ROWS: tl.constexpr = STRANDS * RUN
    blocks = tl.cdiv(tokens, ROWS)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * ROWS
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    v += batch * v_b + head * v_h
    out += batch * out_b + head * out_h
    open += batch * open_b + head * open_h
    stencil += head * stencil_h
    free, tiles = True, 2
    if FACES:
        free = no_wall(open, open_t, start, tokens, REACH, REACH, ROWS, FACES_SEEN)
        tiles = tl.where(free, 2, tl.cdiv(ROWS, TILE))
    if free & (tokens > 2 * REACH):
        first = start + tl.arange(0, STRANDS) * RUN
        values = load_rows(v, v_t, first - REACH, tokens, RUN + 2 * REACH, DIM, COLUMNS, 1)
        weights = free_stencil(stencil, REACH)
        for o in tl.static_range(RUN):
            sums = weights[0] * upcast(values[o], TYPE)
            for n in tl.static_range(1, 2 * REACH + 1):
                sums += weights[n] * upcast(values[o + n], TYPE)
            ok = (first + o >= REACH) & (first + o < tokens - REACH)
            store_piece(out, out_t, first + o, sums, ok, 0, DIM, COLUMNS, 1)
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    for tile in range(tiles):
        corner = start + tile * TILE
        if free:
            corner = tile * tl.maximum(tokens - REACH, TILE)
        if (corner < start + ROWS) & (corner + TILE > start):
            row = corner + tl.arange(0, TILE)
            key = tl.minimum(row, tokens - 1)
            before, after = keys_to_walls(open, open_t, key, tokens, REACH, FACES)
            place = (before * (REACH + 1) + after) * (2 * REACH + 1)
            sums = tl.zeros([TILE, COLUMNS], dtype=TYPE)
            for n in tl.static_range(2 * REACH + 1):
                ok = (n - REACH >= -before) & (n - REACH <= after)
                weight = tl.load(stencil + place + n)
                value = load_masked(v, v_t, key + (n - REACH), column, ok[:, None] & inside, TYPE)
                sums += weight[:, None] * value
            ok = (row >= start) & (row < tl.minimum(start + ROWS, tokens))
            if free:
                ok = ok & (before + after < 2 * REACH)
            store_piece(out, out_t, row, sums, ok, 0, DIM, COLUMNS, 1)
