"""Backward kernel of boundary keys, for the gradients of keys and values, with the transposed steps.

Its twin in torch is `engines.boundary`. The gradient of a key is that of the far keys, plus the boundary
scores' from the rows that have it within reach of their walls. The gradient of a value is that of the
patches that contain it, plus the far keys' after the transposed steps of all values.
"""

# Kernel arguments have no types that mypy knows; tuples of tiles grow by addition only.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from attractor.attention.kernels.boundary.sides import add_band, add_shares, place_of
from attractor.attention.kernels.device import (
    SIZES,
    TILE,
    free_stencil,
    keys_to_walls,
    load_masked,
    load_pieces,
    no_wall,
    step_transposed,
    step_transposed_near_walls,
    store_piece,
    store_products,
    upcast,
    zero_products,
)


@triton.jit
def _entries(
    row_weights, line, first, tokens,
    START: tl.constexpr, RUN: tl.constexpr, COUNT: tl.constexpr, TYPE: tl.constexpr,
    ROW_STRANDS: tl.constexpr, ROW_RUN: tl.constexpr,
):  # fmt: skip
    """Load the entry of row ``first + o + n`` for key o of a strand, at ``o COUNT + n`` of a tuple.

    Of the COUNT entries of a row from START on, the last belongs to key ``first + o`` in the first of
    these rows. ROW_STRANDS and ROW_RUN are those of the kernel that wrote the entries.
    """
    entries = ()
    for o in tl.static_range(RUN):
        for n in tl.static_range(COUNT):
            row = first + (o + n)
            ok = (row >= 0) & (row < tokens)
            place = place_of(tl.where(ok, row, 0), ROW_STRANDS, ROW_RUN)
            where = row_weights + (START + COUNT - 1 - n) * line + place
            entries = entries + (tl.load(where, mask=ok, other=0.0).to(TYPE),)
    return entries


@triton.jit
def _near_walls(
    sums, x, x_t, entries, key, after, tokens, column, inside,
    COUNT: tl.constexpr, FACES: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Add to each key the shares of COUNT rows of its document, from its own row on."""
    for n in tl.static_range(COUNT):
        ok = (key + n < tokens)[:, None] & inside
        if FACES:
            ok = (after >= n)[:, None] & inside
        share = entries[n][:, None] * load_masked(x, x_t, key + n, column, ok, TYPE)
        if FACES:  # entries of another document may be anything
            share = tl.where(ok, share, 0.0)
        sums += share
    return sums


@triton.jit
def _add_group(
    sums, x, x_h, x_t, row_weights, line, first, tokens,
    START: tl.constexpr, RUN: tl.constexpr, COUNT: tl.constexpr, ALL: tl.constexpr, TYPE: tl.constexpr,
    ROW_STRANDS: tl.constexpr, ROW_RUN: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add to the keys of every strand the shares of the rows of all heads that share them.

    Args:
        x: Queries or gradients of outputs of the first head of the group.
        row_weights: Entries of this head; each head has ALL entries per row.
    """
    for head in range(GROUP):
        entries = _entries(
            row_weights + head * (ALL * line), line, first, tokens, START, RUN, COUNT, TYPE,
            ROW_STRANDS, ROW_RUN,
        )  # fmt: skip
        rows = load_pieces(
            x + head * x_h, x_t, first, tokens, 0, False, RUN + COUNT - 1, DIM, COLUMNS, 1
        )
        more = ()
        for o in tl.static_range(RUN):
            more = more + (add_shares(sums[o], entries, rows, o, COUNT),)
        sums = more
    return sums


@triton.jit(do_not_specialize=SIZES)
def backward_keys(
    do, q, v, row_weights, stencil, open, far_dk, far_dv, dk, dv, free_sums,
    tokens, heads, left, right, shift, far_rows,
    do_b, do_h, do_t, q_b, q_h, q_t, v_b, v_h, v_t,
    far_dk_b, far_dk_h, far_dk_t, far_dv_b, far_dv_h, far_dv_t,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, open_b, open_h, open_t, stencil_h,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr,
    ROW_STRANDS: tl.constexpr, ROW_RUN: tl.constexpr, WIDTH: tl.constexpr, FACES_SEEN: tl.constexpr,
    OF_STENCIL: tl.constexpr, WINDOW: tl.constexpr, FACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store the gradients of some keys and values of one head, which GROUP heads of rows share.

    No far key of a WINDOW has a wall within reach, so all its rows are free, and GROUP is 1. Otherwise
    the free rows come first, and then those near a wall, tile by tile.
    """
    TYPE: tl.constexpr = stencil.dtype.element_ty
    SPAN: tl.constexpr = 2 * REACH
    ROWS: tl.constexpr = STRANDS * RUN
    RIGHT: tl.constexpr = 3 * REACH if WINDOW else 0  # where the right side's entries begin
    blocks = tl.cdiv(tokens, ROWS)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * ROWS
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    do += batch * do_b + head * GROUP * do_h
    q += batch * q_b + head * GROUP * q_h
    v += batch * v_b + head * v_h
    far_dk += batch * far_dk_b + head * far_dk_h
    far_dv += batch * far_dv_b + head * far_dv_h
    dk += batch * dk_b + head * dk_h
    dv += batch * dv_b + head * dv_h
    line = tl.cdiv(tokens, ROW_STRANDS * ROW_RUN).to(tl.int64) * (ROW_STRANDS * ROW_RUN)
    row_weights += pair.to(tl.int64) * GROUP * (RIGHT + 3 * REACH) * line
    open += batch * open_b + head * open_h
    stencil += head * stencil_h
    free, tiles, enough = True, 2, True
    if not WINDOW:  # constants of causal rows
        right, shift, far_rows, enough = 0, 0, tokens - REACH, tokens > 2 * SPAN
    if FACES:
        free = no_wall(open, open_t, start, tokens, SPAN, SPAN, ROWS, FACES_SEEN)
        tiles = tl.where(free, 2, tl.cdiv(ROWS, TILE))
    products = zero_products(STRANDS, DEEP // H, REACH, TYPE)
    if free & enough:
        begin, end = 0, tokens
        if not WINDOW:
            begin, end = SPAN, tokens - SPAN
        first = start + tl.arange(0, STRANDS) * RUN
        # The first rows that have these keys within reach of their right wall, of their left wall, and
        # in the patch of their left wall.
        after = first - right
        near_left, patch_left = first + left - (REACH - 1), first + left - (SPAN - 1)
        if WINDOW:
            left_scores = _entries(
                row_weights, line, near_left, tokens, 0, RUN, REACH, TYPE, ROW_STRANDS, ROW_RUN
            )
        if GROUP == 1:
            scores = _entries(
                row_weights, line, after, tokens, RIGHT, RUN, REACH, TYPE, ROW_STRANDS, ROW_RUN
            )
        for h in tl.static_range(H):
            if WINDOW:
                left_queries = load_pieces(
                    q, q_t, near_left, tokens, h, False, RUN + REACH - 1, DIM, COLUMNS, H
                )
            if GROUP == 1:
                queries = load_pieces(q, q_t, after, tokens, h, False, RUN + REACH - 1, DIM, COLUMNS, H)
            others = load_pieces(
                far_dk, far_dk_t, first - shift, far_rows, h, WINDOW, RUN, DIM, COLUMNS, H
            )
            sums = ()
            for o in tl.static_range(RUN):
                sums = sums + (upcast(others[o], TYPE),)
            if WINDOW:
                sums = add_band(sums, left_scores, left_queries, REACH, RUN, 1)
                sums = add_band(sums, scores, queries, REACH, RUN, 1)
            if GROUP > 1:
                sums = _add_group(
                    sums, q, q_h, q_t, row_weights, line, after, tokens, 0, RUN, REACH, 3 * REACH, TYPE,
                    ROW_STRANDS, ROW_RUN, GROUP, DIM, COLUMNS,
                )  # fmt: skip
            for o in tl.static_range(RUN):
                row, ok = sums[o], first + o < end
                if not WINDOW:
                    ok = ok & (first + o >= begin)
                    if GROUP == 1:
                        row = add_shares(row, scores, queries, o, REACH)
                store_piece(dk, dk_t, first + o, row, ok, h, DIM, COLUMNS, H)
        if WINDOW:
            left_patch = _entries(
                row_weights, line, patch_left, tokens, REACH, RUN, SPAN, TYPE, ROW_STRANDS, ROW_RUN
            )
        if GROUP == 1:
            patch = _entries(
                row_weights, line, after, tokens, RIGHT + REACH, RUN, SPAN, TYPE, ROW_STRANDS, ROW_RUN
            )
        weights = free_stencil(stencil, REACH)
        for h in tl.static_range(H):
            if WINDOW:
                left_grads = load_pieces(
                    do, do_t, patch_left, tokens, h, False, RUN + SPAN - 1, DEPTH, DEEP, H
                )
            if GROUP == 1:
                grads = load_pieces(do, do_t, after, tokens, h, False, RUN + SPAN - 1, DEPTH, DEEP, H)
            others = load_pieces(
                far_dv, far_dv_t, first - shift - REACH, far_rows, h, WINDOW, RUN + SPAN, DEPTH, DEEP, H
            )
            values = others
            if OF_STENCIL:
                values = load_pieces(v, v_t, first, tokens, h, WINDOW, RUN, DEPTH, DEEP, H)
            sums = ()
            for _ in tl.static_range(RUN):
                sums = sums + (tl.zeros([STRANDS, DEEP // H], dtype=TYPE),)
            if WINDOW:
                sums = add_band(sums, left_patch, left_grads, SPAN, RUN, 1)
                sums = add_band(sums, patch, grads, SPAN, RUN, 1)
            if GROUP > 1:
                sums = _add_group(
                    sums, do, do_h, do_t, row_weights, line, after, tokens, REACH, RUN, SPAN, 3 * REACH,
                    TYPE, ROW_STRANDS, ROW_RUN, GROUP, DEPTH, DEEP,
                )  # fmt: skip
            for o in tl.static_range(RUN):
                value, row, ok = upcast(values[o], TYPE), sums[o], first + o < end
                if not WINDOW:
                    ok = ok & (first + o >= begin)
                    if GROUP == 1:
                        row = add_shares(row, patch, grads, o, SPAN)
                    value = tl.where(ok[:, None], value, 0.0)
                row, products = step_transposed(
                    row, products, others, weights, value, o, REACH, TYPE, OF_STENCIL
                )
                store_piece(dv, dv_t, first + o, row, ok, h, DEPTH, DEEP, H)
    near = tl.zeros([TILE, WIDTH], dtype=TYPE)
    if not WINDOW:
        column, deep = tl.arange(0, COLUMNS), tl.arange(0, DEEP)
        inside, deep_inside = (column < DIM)[None, :], (deep < DEPTH)[None, :]
        for tile in range(tiles):
            corner = start + tile * TILE
            if free:
                corner = tile * tl.maximum(tokens - SPAN, TILE)
            if (corner < start + ROWS) & (corner + TILE > start):
                row = corner + tl.arange(0, TILE)
                key = tl.minimum(row, tokens - 1)
                before, after = keys_to_walls(open, open_t, key, tokens, SPAN, FACES)
                ok = (row >= start) & (row < tl.minimum(start + ROWS, tokens))
                if free:
                    ok = ok & (before + after < 2 * SPAN)
                far_key = (key < tokens - REACH)[:, None] & inside
                if FACES:
                    far_key = (after >= REACH)[:, None] & inside
                sums = load_masked(far_dk, far_dk_t, key, column, far_key, TYPE)
                for member in range(GROUP):
                    of_head = row_weights + member * (3 * REACH * line)
                    scores = _entries(
                        of_head, line, key, tokens, 0, 1, REACH, TYPE, ROW_STRANDS, ROW_RUN
                    )
                    sums = _near_walls(
                        sums, q + member * q_h, q_t, scores, key, after, tokens, column, inside, REACH,
                        FACES, TYPE,
                    )  # fmt: skip
                store_piece(dk, dk_t, row, sums, ok, 0, DIM, COLUMNS, 1)
                sums = tl.zeros([TILE, DEEP], dtype=TYPE)
                for member in range(GROUP):
                    of_head = row_weights + member * (3 * REACH * line)
                    patch = _entries(
                        of_head, line, key, tokens, REACH, 1, SPAN, TYPE, ROW_STRANDS, ROW_RUN
                    )
                    sums = _near_walls(
                        sums, do + member * do_h, do_t, patch, key, after, tokens, deep, deep_inside,
                        SPAN, FACES, TYPE,
                    )  # fmt: skip
                value = tl.zeros([TILE, DEEP], dtype=TYPE)
                if OF_STENCIL:
                    value = load_masked(v, v_t, key, deep, ok[:, None] & deep_inside, TYPE)
                sums, near = step_transposed_near_walls(
                    sums, near, far_dv, far_dv_t, far_rows, value, stencil, key, before, after, deep,
                    deep_inside, REACH, WIDTH, OF_STENCIL,
                )  # fmt: skip
                store_piece(dv, dv_t, row, sums, ok, 0, DEPTH, DEEP, 1)
    if OF_STENCIL:
        store_products(free_sums, products, near, REACH, STRANDS, WIDTH)
