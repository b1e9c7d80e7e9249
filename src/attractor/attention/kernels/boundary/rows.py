"""Backward kernel of boundary keys and global keys, for the gradients of queries.

Its twin in torch is `engines.boundary`. For each row and side, it stores ``3 reach`` entries in
`row_weights`, from which `keys` computes the gradients of keys and values: the gradients of the boundary
scores times the scale, and the patch weights. Programs also store sums over their rows: the gradients of
global keys and values, and products for the gradient of the stencil table (`BoundarySums`).
"""

# Kernel arguments have no types that mypy knows; tuples of tiles grow by addition only.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from attractor.attention.kernels.boundary.sides import (
    add_band,
    add_row,
    boundary_stencil,
    dropout_factors,
    inner,
    inner_band,
    keys_before,
    load_far,
    load_last,
    patch_weight,
    place_of,
    row_of,
    upcast_rows,
)
from attractor.attention.kernels.device import (
    NVIDIA,
    SIZES,
    TILE,
    columns_of,
    from_two,
    load_rows,
    no_wall,
    store_row,
    upcast,
)

FEW = tl.constexpr(16)  # largest number of global keys, boundary keys per side, and keys per patch


@triton.jit
def _products(left, right, sums, DOTS: tl.constexpr):
    """Add the product of ``[strands, n]`` and ``[strands, m]`` over the strands to ``[n, m]``."""
    if DOTS and NVIDIA and left.dtype != tl.float32:
        sums = tl.dot(tl.trans(left), right, sums)
    elif DOTS:  # the interpreter treats bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
        sums = tl.dot(tl.trans(left), right, sums, input_precision="tf32x3")
    else:
        sums += tl.sum(left[:, :, None].to(sums.dtype) * right[:, None, :].to(sums.dtype), 0)
    return sums


@triton.jit
def _side(
    dq, queries, grads, deltas, totals, keys, values, stencil, row_weights, line,
    scale, seed, dropout_p, number, before, begin, end, first, place,
    REACH: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr,
    ENTRIES: tl.constexpr, DOTS: tl.constexpr, OF_STENCIL: tl.constexpr,
    LEFT: tl.constexpr, WINDOW: tl.constexpr, FREE: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Add the share of one side to the gradients of queries, and store its `row_weights`.

    Args:
        deltas: Inner products of outputs and their gradients.
        row_weights: Entries of this side. `place` is the place of the first rows in a line (`place_of`),
            and `line` is the distance between two entries of a row.
        number: Number of the first row of the head, for `dropout_factors`.

    Returns:
        The gradients of queries, and products of boundary weights and gradients of patch weights. In a
        WINDOW, the products are summed over the rows, ``[FEW, FEW]``; otherwise they are a tuple of
        vectors, summed over the rows of a strand.
    """
    TYPE: tl.constexpr = stencil.dtype.element_ty
    SPAN: tl.constexpr = 2 * REACH
    table = boundary_stencil(stencil, before, REACH, LEFT, FREE)
    d_patch = inner_band(upcast_rows(grads, RUN, H, TYPE), values, SPAN, RUN, H)
    scores = inner_band(upcast_rows(queries, RUN, H, TYPE), keys, REACH, RUN, H)
    products = ()
    if WINDOW:
        products = tl.zeros([FEW, FEW], dtype=TYPE)
    d_scores, patch = (), ()
    for o in tl.static_range(RUN):
        ok = (first + o >= begin) & (first + o < end)
        weights, d_weights, more = (), (), ()
        for n in tl.static_range(SPAN):
            d_weights = d_weights + (d_patch[(o + n) * RUN + o],)
        if DROPOUT:
            factors = dropout_factors(seed, number + first + o, dropout_p, REACH, TYPE)
        for m in tl.static_range(REACH):
            score = scores[(o + m) * RUN + o] * scale
            if not FREE:
                score = tl.where(before >= REACH - 1 - m, score, -float("inf"))
            weight = tl.where(ok, tl.exp(score - totals[o]), 0.0)
            d_weight = -deltas[o]
            if DROPOUT:
                d_weight = tl.zeros_like(weight)
            for n in tl.static_range(SPAN):
                if (LEFT and n <= m + REACH) or (not LEFT and n >= m):
                    d_weight += d_weights[n] * table[m * SPAN + n]
            if DROPOUT:
                d_weight = d_weight * factors[m] - deltas[o]
            d_scores = d_scores + (tl.where(ok, weight * d_weight * scale, 0.0),)
            if DROPOUT:
                weight = weight * factors[m]
            weights = weights + (weight,)
            if OF_STENCIL and not WINDOW:
                for n in tl.static_range(SPAN):
                    if n < m:
                        product = tl.zeros_like(weight)
                    elif o == 0:
                        product = weight * d_weights[n]
                    else:
                        product = products[m * SPAN + n] + weight * d_weights[n]
                    more = more + (product,)
        for n in tl.static_range(SPAN):
            patch = patch + (patch_weight(weights, 0, table, n, REACH, LEFT),)
        if OF_STENCIL and WINDOW:
            across, along = columns_of(weights, REACH, FEW), columns_of(d_weights, SPAN, FEW)
            if (
                DOTS and queries[0].dtype != tl.float32
            ):  # few products of many rows are sums of few terms
                across, along = across.to(tl.bfloat16), along.to(tl.bfloat16)
            products = _products(across, along, products, DOTS)
        elif OF_STENCIL:
            products = more
    dq = add_band(dq, d_scores, keys, REACH, RUN, H)
    entries = ()
    for e in tl.static_range(3 * REACH):
        for o in tl.static_range(RUN):
            if e < REACH:
                entries = entries + (d_scores[o * REACH + e],)
            else:
                entries = entries + (patch[o * SPAN + e - REACH],)
    column = tl.arange(0, ENTRIES)[None, :]
    where = row_weights + place[:, None] + (column % RUN) * STRANDS + (column // RUN) * line
    mask = column < 3 * REACH * RUN
    if not WINDOW:
        row = first[:, None] + column % RUN
        mask = mask & (row >= begin) & (row < end)
    tile = columns_of(entries, 3 * REACH * RUN, ENTRIES)
    tl.store(where, tile.to(row_weights.dtype.element_ty), mask=mask)
    return dq, products


@triton.jit
def _global_keys(
    dq, queries, grads, deltas, totals, k, k_t, v, v_t, dk, dv, scale, begin, end, first,
    COUNT: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr, DOTS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Add the share of global keys to the gradients of queries, and store their gradients."""
    keys = load_rows(k, k_t, first * 0, COUNT, COUNT, DIM, COLUMNS, H)
    values = load_rows(v, v_t, first * 0, COUNT, COUNT, DEPTH, DEEP, H)
    d_keys, d_values = (), ()
    for _ in tl.static_range(H):
        d_keys = d_keys + (tl.zeros([FEW, COLUMNS // H], dtype=TYPE),)
        d_values = d_values + (tl.zeros([FEW, DEEP // H], dtype=TYPE),)
    after = ()
    for o in tl.static_range(RUN):
        ok = (first + o >= begin) & (first + o < end)
        query = upcast_rows(row_of(queries, o, H), 1, H, TYPE)
        grad = upcast_rows(row_of(grads, o, H), 1, H, TYPE)
        row = row_of(dq, o, H)
        weights, d_scores = (), ()
        for m in tl.static_range(COUNT):
            weight = tl.where(ok, tl.exp(inner(query, keys, m, H) * scale - totals[o]), 0.0)
            d_score = tl.where(ok, weight * (inner(grad, values, m, H) - deltas[o]) * scale, 0.0)
            row = add_row(row, d_score, keys, m, H)
            weights, d_scores = weights + (weight,), d_scores + (d_score,)
        after = after + row
        for_keys = columns_of(d_scores, COUNT, FEW).to(queries[0].dtype)
        for_values = columns_of(weights, COUNT, FEW).to(grads[0].dtype)
        more_keys, more_values = (), ()
        for h in tl.static_range(H):
            more_keys = more_keys + (_products(for_keys, queries[o * H + h], d_keys[h], DOTS),)
            more_values = more_values + (_products(for_values, grads[o * H + h], d_values[h], DOTS),)
        d_keys, d_values = more_keys, more_values
    row = tl.arange(0, FEW)
    store_row(dk, DIM, row, d_keys, 0, row < COUNT, DIM, COLUMNS, H)
    store_row(dv, DEPTH, row, d_values, 0, row < COUNT, DEPTH, DEEP, H)
    return after


@triton.jit
def _strands(
    do, q, k, v, out, lse, global_k, global_v, stencil, open, far,
    dq, row_weights, d_global_k, d_global_v, sums, free_sums, edge_sums,
    scale, seed, dropout_p, number, tokens, begin, end, left, right, shift, far_rows, line, first, place,
    do_t, q_t, k_t, v_t, out_t, global_k_t, global_v_t, open_t, far_t, dq_t,
    REACH: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr,
    H: tl.constexpr, ENTRIES: tl.constexpr, PLACES: tl.constexpr, DOTS: tl.constexpr,
    OF_STENCIL: tl.constexpr, WINDOW: tl.constexpr, FREE: tl.constexpr, FACES: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute rows ``first`` to ``first + RUN - 1`` of every strand.

    If not WINDOW, products are added to `free_sums` ``[PLACES]``, or, for keys with a wall within reach
    before them, to `edge_sums` ``[at least reach, PLACES]``; both are returned. If not FREE, RUN and H
    are 1, and WINDOW is False.
    """
    TYPE: tl.constexpr = lse.dtype.element_ty
    SPAN: tl.constexpr = 2 * REACH
    before = first
    if not FREE:
        before = keys_before(open, open_t, first, tokens, SPAN - 1, FACES)
        keys = load_last(k, k_t, first, before, tokens, REACH, DIM, COLUMNS)
    elif not WINDOW:
        keys = load_rows(k, k_t, first - (REACH - 1), tokens, RUN + REACH - 1, DIM, COLUMNS, H)
    queries = load_rows(q, q_t, first, tokens, RUN, DIM, COLUMNS, H)
    grads = load_rows(do, do_t, first, tokens, RUN, DEPTH, DEEP, H)
    if not FREE:
        values = load_last(v, v_t, first, before, tokens, SPAN, DEPTH, DEEP)
    elif not WINDOW:
        values = load_rows(v, v_t, first - (SPAN - 1), tokens, RUN + SPAN - 1, DEPTH, DEEP, H)
    outs = load_rows(out, out_t, first, tokens, RUN, DEPTH, DEEP, H)
    if not FREE:
        others = load_far(far, far_t, first, before, tokens, REACH, DIM, COLUMNS)
    elif not WINDOW:
        others = load_rows(far, far_t, first - shift, far_rows, RUN, DIM, COLUMNS, H)
    d_queries, deltas, totals = (), (), ()
    for o in tl.static_range(RUN):
        totals = totals + (tl.load(lse + tl.minimum(first + o, tokens - 1)),)
        deltas = deltas + (inner(upcast_rows(row_of(grads, o, H), 1, H, TYPE), outs, o, H),)
        for h in tl.static_range(H):
            if WINDOW:
                d_queries = d_queries + (tl.zeros([STRANDS, COLUMNS // H], dtype=TYPE),)
            else:
                d_queries = d_queries + (upcast(others[o * H + h], TYPE),)
    if WINDOW and REACH > 0:
        keys = load_rows(k, k_t, first - left, tokens, RUN + REACH - 1, DIM, COLUMNS, H)
        values = load_rows(v, v_t, first - left, tokens, RUN + SPAN - 1, DEPTH, DEEP, H)
        d_queries, products = _side(
            d_queries, queries, grads, deltas, totals, keys, values, stencil, row_weights, line, scale,
            seed, dropout_p, number, before, begin, end, first, place, REACH, STRANDS, RUN, H, ENTRIES,
            DOTS, OF_STENCIL, True, True, True, False,
        )  # fmt: skip
        m, n = tl.arange(0, FEW)[:, None], tl.arange(0, FEW)[None, :]
        if OF_STENCIL:
            tl.store(sums + m * SPAN + n, products, mask=(m < REACH) & (n < SPAN))
        row_weights += 3 * REACH * line
        keys = load_rows(k, k_t, first + right - (REACH - 1), tokens, RUN + REACH - 1, DIM, COLUMNS, H)
        values = load_rows(v, v_t, first + right - (SPAN - 1), tokens, RUN + SPAN - 1, DEPTH, DEEP, H)
    if REACH > 0:
        d_queries, products = _side(
            d_queries, queries, grads, deltas, totals, keys, values, stencil, row_weights, line, scale,
            seed, dropout_p, number, before, begin, end, first, place, REACH, STRANDS, RUN, H, ENTRIES,
            DOTS, OF_STENCIL, False, WINDOW, FREE, DROPOUT,
        )  # fmt: skip
        if OF_STENCIL and WINDOW:
            tl.store(sums + (m + REACH) * SPAN + n, products, mask=(m < REACH) & (n < SPAN))
        elif OF_STENCIL:
            entry = tl.arange(0, PLACES)
            products = columns_of(products, REACH * SPAN, PLACES)
            if FREE:
                free_sums += tl.sum(products, 0)
            else:
                of_key = before[:, None] - (REACH - 1 - entry // SPAN)[None, :]  # keys before it
                free_sums += tl.sum(tl.where(of_key >= REACH, products, 0.0), 0)
                own = tl.arange(0, edge_sums.shape[0])[:, None]
                for n in tl.static_range(REACH):
                    edge_sum = tl.sum(tl.where(of_key == n, products, 0.0), 0)
                    edge_sums += tl.where(own == n, edge_sum[None, :], 0.0)
    if COUNT > 0:
        d_queries = _global_keys(
            d_queries, queries, grads, deltas, totals, global_k, global_k_t, global_v, global_v_t,
            d_global_k, d_global_v, scale, begin, end, first, COUNT, DIM, DEPTH, COLUMNS, DEEP, RUN, H,
            DOTS, TYPE,
        )  # fmt: skip
    if WINDOW:
        others = load_rows(far, far_t, first - shift, far_rows, RUN, DIM, COLUMNS, H)
    for o in tl.static_range(RUN):
        row, ok = row_of(d_queries, o, H), (first + o >= begin) & (first + o < end)
        if WINDOW:  # rows that are not computed have a gradient of zero
            row = ()
            for h in tl.static_range(H):
                total = d_queries[o * H + h] + upcast(others[o * H + h], TYPE)
                row = row + (tl.where(ok[:, None], total, 0.0),)
            ok = first + o < tokens
        store_row(dq, dq_t, first + o, row, 0, ok, DIM, COLUMNS, H)
    return free_sums, edge_sums


@triton.jit(do_not_specialize=SIZES)
def backward_rows(
    do, q, k, v, out, lse, global_k, global_v, stencil, open, far,
    dq, row_weights, d_global_k, d_global_v, sums, edge_sums, seed, dropout_p,
    scale, scale_rest, tokens, heads, group, begin, end, left, right, shift, far_rows,
    do_b, do_h, do_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    global_k_b, global_k_h, global_k_t, global_v_b, global_v_h, global_v_t,
    far_b, far_h, far_t, dq_b, dq_h, dq_t, open_b, open_h, open_t, stencil_h,
    REACH: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr,
    FACES_SEEN: tl.constexpr, ENTRIES: tl.constexpr, ENTRIES_OF_ROW: tl.constexpr, PLACES: tl.constexpr,
    KINDS: tl.constexpr, DOTS: tl.constexpr, OF_STENCIL: tl.constexpr, WINDOW: tl.constexpr,
    FACES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Store the gradients of some queries of one head, and the other outputs that the module describes.

    `group` consecutive heads share a head of k and v. DROPOUT is as in `forward`.
    """
    TYPE: tl.constexpr = lse.dtype.element_ty
    SIDES: tl.constexpr = 2 if WINDOW else 1
    SIZE: tl.constexpr = 2 * REACH * REACH  # of one side's products
    scale = from_two(scale, scale_rest, TYPE)
    blocks = tl.cdiv(tokens, STRANDS * RUN)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * STRANDS * RUN
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    pair, program = pair.to(tl.int64), tl.program_id(0).to(tl.int64)
    do += batch * do_b + head * do_h
    q += batch * q_b + head * q_h
    k += batch * k_b + (head // group) * k_h
    v += batch * v_b + (head // group) * v_h
    out += batch * out_b + head * out_h
    lse += pair * tokens
    global_k += batch * global_k_b + head * global_k_h
    global_v += batch * global_v_b + head * global_v_h
    stencil += head * stencil_h
    open += batch * open_b + head * open_h
    far += batch * far_b + head * far_h
    dq += batch * dq_b + head * dq_h
    line = blocks.to(tl.int64) * (STRANDS * RUN)
    row_weights += pair * (SIDES * 3 * REACH) * line
    d_global_k += program * COUNT * DIM
    d_global_v += program * COUNT * DEPTH
    sums += program * SIDES * SIZE
    if FACES:
        edge_sums += program * REACH * SIZE
    else:
        edge_sums += pair * REACH * SIZE
    number = pair * tokens
    if DROPOUT:
        seed = tl.load(seed)
    free_total = tl.zeros([PLACES], dtype=TYPE)
    edge_total = tl.zeros([KINDS, PLACES], dtype=TYPE)
    if not WINDOW:  # constants of causal rows
        begin, end, right, shift, far_rows = 2 * REACH - 1, tokens, 0, REACH, tokens - REACH
    free = True
    if FACES:
        free = no_wall(open, open_t, start, tokens, 2 * REACH - 1, 0, STRANDS * RUN, FACES_SEEN)
        free = free & (start >= 2 * REACH - 1)
    elif not WINDOW:
        free = tokens >= 2 * REACH
    if free:
        first, place = start + tl.arange(0, STRANDS) * RUN, start + tl.arange(0, STRANDS)
        free_total, edge_total = _strands(
            do, q, k, v, out, lse, global_k, global_v, stencil, open, far, dq, row_weights, d_global_k,
            d_global_v, sums, free_total, edge_total, scale, seed, dropout_p, number, tokens, begin, end,
            left, right, shift, far_rows, line, first, place, do_t, q_t, k_t, v_t, out_t, global_k_t,
            global_v_t, open_t, far_t, dq_t, REACH, COUNT, DIM, DEPTH, COLUMNS, DEEP, STRANDS, RUN, H,
            ENTRIES, PLACES, DOTS, OF_STENCIL, WINDOW, True, FACES, DROPOUT,
        )  # fmt: skip
    if not WINDOW:
        tiles, stop = (start == 0).to(tl.int32), tl.minimum(begin, tokens)
        if FACES:
            tiles = tl.where(free, 0, tl.cdiv(STRANDS * RUN, TILE))
            stop = tl.minimum(start + STRANDS * RUN, tokens)
        for tile in range(tiles):
            first = start + tile * TILE + tl.arange(0, TILE)
            place = place_of(first, STRANDS, RUN)
            free_total, edge_total = _strands(
                do, q, k, v, out, lse, global_k, global_v, stencil, open, far, dq, row_weights,
                d_global_k, d_global_v, sums, free_total, edge_total, scale, seed, dropout_p, number,
                tokens, 0, stop, left, right, shift, far_rows, line, first, place, do_t, q_t, k_t, v_t,
                out_t, global_k_t, global_v_t, open_t, far_t, dq_t, REACH, COUNT, DIM, DEPTH, COLUMNS,
                DEEP, STRANDS, 1, 1, ENTRIES_OF_ROW, PLACES, DOTS, OF_STENCIL, False, False, FACES,
                DROPOUT,
            )  # fmt: skip
        if OF_STENCIL:
            place, kind = tl.arange(0, PLACES), tl.arange(0, KINDS)[:, None]
            tl.store(sums + place, free_total, mask=place < SIZE)
            if tiles > 0:
                where = edge_sums + kind * SIZE + place[None, :]
                tl.store(where, edge_total, mask=(kind < REACH) & (place < SIZE)[None, :])
