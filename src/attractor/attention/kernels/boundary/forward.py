"""Forward kernel of boundary keys and global keys, in one softmax with the far keys.

Its twin in torch is `engines.boundary`. Only rows from `begin` to `end` are computed. A row uses only
keys of its own document and window, and global keys, so no other key can affect it.
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
    patch_weights,
    row_of,
    upcast_rows,
)
from attractor.attention.kernels.device import (
    SIZES,
    TILE,
    columns_of,
    from_two,
    load_rows,
    no_wall,
    store_row,
    upcast,
)


@triton.jit
def _strands(
    q, k, v, far, far_lse, global_k, global_v, stencil, open, out, lse,
    scale, seed, dropout_p, line, tokens, begin, end, left, right, shift, far_rows, first,
    q_t, k_t, v_t, far_t, global_k_t, global_v_t, out_t, open_t,
    REACH: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr,
    WINDOW: tl.constexpr, FREE: tl.constexpr, FACES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute rows ``first`` to ``first + RUN - 1`` of every strand.

    A WINDOW also has a left side, and an infinite log-sum-exp for rows outside begin .. end. If not
    FREE, RUN and H are 1, and WINDOW is False.
    """
    TYPE: tl.constexpr = lse.dtype.element_ty
    SPAN: tl.constexpr = 2 * REACH
    LEFT: tl.constexpr = REACH if WINDOW else 0  # boundary keys of the left side
    ALL: tl.constexpr = LEFT + REACH + COUNT
    NEAR: tl.constexpr = RUN + REACH - 1 if REACH > 0 else 0
    PATCH: tl.constexpr = RUN + SPAN - 1 if REACH > 0 else 0
    before = first
    if not FREE:
        before = keys_before(open, open_t, first, tokens, SPAN - 1, FACES)
    queries = load_rows(q, q_t, first, tokens, RUN, DIM, COLUMNS, H)
    if WINDOW:
        left_keys = load_rows(k, k_t, first - left, tokens, NEAR, DIM, COLUMNS, H)
    if FREE:
        keys = load_rows(k, k_t, first + right - (REACH - 1), tokens, NEAR, DIM, COLUMNS, H)
    else:
        keys = load_last(k, k_t, first, before, tokens, REACH, DIM, COLUMNS)
    if COUNT > 0:
        global_keys = load_rows(global_k, global_k_t, first * 0, COUNT, COUNT, DIM, COLUMNS, H)
    if FREE:
        others = load_rows(far, far_t, first - shift, far_rows, RUN, DEPTH, DEEP, H)
    else:
        others = load_far(far, far_t, first, before, tokens, REACH, DEPTH, DEEP)
    if WINDOW:
        left_values = load_rows(v, v_t, first - left, tokens, PATCH, DEPTH, DEEP, H)
    if FREE:
        values = load_rows(v, v_t, first + right - (SPAN - 1), tokens, PATCH, DEPTH, DEEP, H)
    else:
        values = load_last(v, v_t, first, before, tokens, SPAN, DEPTH, DEEP)
    if COUNT > 0:
        global_values = load_rows(global_v, global_v_t, first * 0, COUNT, COUNT, DEPTH, DEEP, H)
    own = upcast_rows(queries, RUN, H, TYPE)
    if LEFT > 0:
        left_scores = inner_band(own, left_keys, REACH, RUN, H)
    if REACH > 0:
        right_scores = inner_band(own, keys, REACH, RUN, H)
    weights, sums, totals = (), (), ()
    for o in tl.static_range(RUN):
        scores = ()
        for m in tl.static_range(LEFT):
            scores = scores + (left_scores[(o + m) * RUN + o] * scale,)
        for m in tl.static_range(REACH):
            score = right_scores[(o + m) * RUN + o] * scale
            if not FREE:
                score = tl.where(before >= REACH - 1 - m, score, -float("inf"))
            scores = scores + (score,)
        for m in tl.static_range(COUNT):
            scores = scores + (inner(row_of(own, o, H), global_keys, m, H) * scale,)
        if FREE:
            far_row = tl.minimum(tl.maximum(first + o - shift, 0), far_rows - 1)
            far_total = tl.load(far_lse + far_row).to(TYPE)
        else:
            ok = (before >= REACH) & (first < tokens)
            far_total = tl.load(far_lse + (first - REACH), mask=ok, other=-float("inf")).to(TYPE)
        most = far_total
        for m in tl.static_range(ALL):
            most = tl.maximum(most, scores[m])
        far_weight = tl.exp(far_total - most)
        total = far_weight
        exps = ()
        for m in tl.static_range(ALL):
            exps = exps + (tl.exp(scores[m] - most),)
            total += exps[m]
        totals = totals + (most + tl.log(total),)
        over = 1.0 / total
        if DROPOUT:
            factors = dropout_factors(seed, line + first + o, dropout_p, REACH, TYPE)
        for m in tl.static_range(ALL):
            if DROPOUT:
                weights = weights + (exps[m] * over * factors[m],)
            else:
                weights = weights + (exps[m] * over,)
        for h in tl.static_range(H):
            sums = sums + ((far_weight * over)[:, None] * upcast(others[o * H + h], TYPE),)
    if COUNT > 0:
        more = ()
        for o in tl.static_range(RUN):
            row = row_of(sums, o, H)
            for m in tl.static_range(COUNT):
                row = add_row(row, weights[o * ALL + LEFT + REACH + m], global_values, m, H)
            more = more + row
        sums = more
    if LEFT > 0:
        table = boundary_stencil(stencil, before, REACH, True, FREE)
        patch = patch_weights(weights, 0, ALL, table, REACH, RUN, True)
        sums = add_band(sums, patch, left_values, SPAN, RUN, H)
    if REACH > 0:
        table = boundary_stencil(stencil, before, REACH, False, FREE)
        patch = patch_weights(weights, LEFT, ALL, table, REACH, RUN, False)
        sums = add_band(sums, patch, values, SPAN, RUN, H)
    row = first[:, None] + tl.arange(0, RUN)[None, :]
    total, ok = columns_of(totals, RUN, RUN), (row >= begin) & (row < end)
    if WINDOW:
        total, ok = tl.where(ok, total, float("inf")), row < tokens
    tl.store(lse + row, total, mask=ok)
    for o in tl.static_range(RUN):
        ok = (first + o >= begin) & (first + o < end)
        store_row(out, out_t, first + o, sums, o, ok, DEPTH, DEEP, H)


@triton.jit(do_not_specialize=SIZES)
def forward(
    q, k, v, far, far_lse, global_k, global_v, stencil, open, out, lse, seed, dropout_p,
    scale, scale_rest, tokens, heads, group, begin, end, left, right, shift, far_rows, far_line,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, far_b, far_h, far_t,
    global_k_b, global_k_h, global_k_t, global_v_b, global_v_h, global_v_t,
    out_b, out_h, out_t, open_b, open_h, open_t, stencil_h,
    REACH: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr,
    FACES_SEEN: tl.constexpr, WINDOW: tl.constexpr, FACES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Store the output of some rows of one head, for boundary keys, global keys and far keys.

    `group` consecutive heads share a head of k and v. DROPOUT applies to boundary weights; it requires
    that WINDOW is False.
    """
    scale = from_two(scale, scale_rest, lse.dtype.element_ty)
    blocks = tl.cdiv(tokens, STRANDS * RUN)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * STRANDS * RUN
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    q += batch * q_b + head * q_h
    k += batch * k_b + (head // group) * k_h
    v += batch * v_b + (head // group) * v_h
    far += batch * far_b + head * far_h
    far_lse += pair.to(tl.int64) * far_line
    global_k += batch * global_k_b + head * global_k_h
    global_v += batch * global_v_b + head * global_v_h
    out += batch * out_b + head * out_h
    lse += pair.to(tl.int64) * tokens
    open += batch * open_b + head * open_h
    stencil += head * stencil_h
    if not WINDOW:  # constants of causal rows
        begin, end, right, shift, far_rows = 2 * REACH - 1, tokens, 0, REACH, tokens - REACH
    line = pair.to(tl.int64) * tokens
    if DROPOUT:
        seed = tl.load(seed)
    free = True
    if FACES:
        free = no_wall(open, open_t, start, tokens, 2 * REACH - 1, 0, STRANDS * RUN, FACES_SEEN)
        free = free & (start >= 2 * REACH - 1)
    elif not WINDOW:
        free = tokens >= 2 * REACH
    if free:
        first = start + tl.arange(0, STRANDS) * RUN
        _strands(
            q, k, v, far, far_lse, global_k, global_v, stencil, open, out, lse, scale, seed, dropout_p,
            line, tokens, begin, end, left, right, shift, far_rows, first, q_t, k_t, v_t, far_t,
            global_k_t, global_v_t, out_t, open_t, REACH, COUNT, DIM, DEPTH, COLUMNS, DEEP, RUN, H,
            WINDOW, True, FACES, DROPOUT,
        )  # fmt: skip
    if not WINDOW:
        tiles, stop = (start == 0).to(tl.int32), tl.minimum(begin, tokens)
        if FACES:
            tiles = tl.where(free, 0, tl.cdiv(STRANDS * RUN, TILE))
            stop = tl.minimum(start + STRANDS * RUN, tokens)
        for tile in range(tiles):
            first = start + tile * TILE + tl.arange(0, TILE)
            _strands(
                q, k, v, far, far_lse, global_k, global_v, stencil, open, out, lse, scale, seed,
                dropout_p, line, tokens, 0, stop, left, right, shift, far_rows, first, q_t, k_t, v_t,
                far_t, global_k_t, global_v_t, out_t, open_t, REACH, COUNT, DIM, DEPTH, COLUMNS, DEEP,
                1, 1, False, False, FACES, DROPOUT,
            )  # fmt: skip
