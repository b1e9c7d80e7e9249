"""The kernels of `window`: keys near either wall of a row's window, and global keys.

Row i has a wall before key ``i - left`` and one after key ``i + right``. Near key m, below the reach, is
``i - left + m`` or ``i + right - reach + 1 + m``; its weight is spread over ``i - left + n`` or
``i + right - 2 reach + 1 + n``, for n below twice the reach, and never passes the wall. Only rows from
`begin` to `end` are done, whose windows are whole; for the others nothing is added anywhere. Only keys
of its window and global ones are used for a row: nothing else can change a bit of it.

A thread has 16 bytes of a row in every of its H pieces: few threads for a row, for all of them repeat
what is done with its weights. Row n of a tuple of rows is at ``n H .. n H + H - 1``.
"""

# Arguments of kernels have no types that mypy could know; tuples of tiles grow, by addition alone.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from attractor.attention.kernels.parts import _added as added
from attractor.attention.kernels.rows import NVIDIA, TILE, wide
from attractor.attention.kernels.taps import joined
from attractor.attention.kernels.values import free_taps, give_back, no_products, write_products

SIZES = ["tokens", "heads", "begin", "end", "left", "right", "shift", "far_rows", "far_line", "taps_h"]
FEW = tl.constexpr(16)  # the most global keys, near keys of a side, or keys that one of these spreads to


@triton.jit
def _rows(
    x, stride, first, rows,
    COUNT: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Rows ``first .. first + COUNT - 1`` of every strand, as they are; beyond an end, the row there."""
    W: tl.constexpr = COLUMNS // H
    found = ()
    for n in tl.static_range(COUNT):
        at = tl.minimum(tl.maximum(first + n, 0), rows - 1).to(tl.int64)[:, None] * stride
        for h in tl.static_range(H):
            column = h * W + tl.arange(0, W)[None, :]
            if DIM == COLUMNS:
                found = found + (tl.load(x + at + column),)
            else:
                found = found + (tl.load(x + at + column, mask=column < DIM, other=0.0),)
    return found


@triton.jit
def _piece(
    x, stride, first, rows,
    COUNT: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr, h: tl.constexpr,
    ENDS: tl.constexpr,
):  # fmt: skip
    """One piece of the rows of every strand; if ENDS zeros beyond an end, else the row there."""
    W: tl.constexpr = COLUMNS // H
    column = h * W + tl.arange(0, W)[None, :]
    found = ()
    for n in tl.static_range(COUNT):
        at = tl.minimum(tl.maximum(first + n, 0), rows - 1)
        where = x + at.to(tl.int64)[:, None] * stride + column
        if ENDS and DIM == COLUMNS:
            found = found + (tl.load(where, mask=(at == first + n)[:, None], other=0.0),)
        elif ENDS:
            ok = (at == first + n)[:, None] & (column < DIM)
            found = found + (tl.load(where, mask=ok, other=0.0),)
        elif DIM == COLUMNS:
            found = found + (tl.load(where),)
        else:
            found = found + (tl.load(where, mask=column < DIM, other=0.0),)
    return found


@triton.jit
def _write(
    x, stride, at, rows, n: tl.constexpr, ok, DIM: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """Row n of a tuple, to `at` of every strand, where ok."""
    W: tl.constexpr = COLUMNS // H
    for h in tl.static_range(H):
        column = h * W + tl.arange(0, W)[None, :]
        mask = ok[:, None]
        if DIM != COLUMNS:
            mask = mask & (column < DIM)
        where = x + at.to(tl.int64)[:, None] * stride + column
        tl.store(where, rows[n * H + h].to(x.dtype.element_ty), mask=mask)


@triton.jit
def _widened(rows, n: tl.constexpr, H: tl.constexpr, TYPE: tl.constexpr):
    """Row n of a tuple, its pieces in that type."""
    found = ()
    for h in tl.static_range(H):
        found = found + (wide(rows[n * H + h], TYPE),)
    return found


@triton.jit
def _row(rows, n: tl.constexpr, H: tl.constexpr):
    """Row n of a tuple, as it is."""
    found = ()
    for h in tl.static_range(H):
        found = found + (rows[n * H + h],)
    return found


@triton.jit
def _inner(own, rows, n: tl.constexpr, H: tl.constexpr):
    """The product of a row with row n of a tuple ``[strands]``."""
    found = own[0] * wide(rows[n * H], own[0].dtype)
    for h in tl.static_range(1, H):
        found += own[h] * wide(rows[n * H + h], own[0].dtype)
    return tl.sum(found, 1)


@triton.jit
def _plus(sums, weight, rows, n: tl.constexpr, H: tl.constexpr):
    """A row, and so much of row n of a tuple."""
    found = ()
    for h in tl.static_range(H):
        found = found + (sums[h] + weight[:, None] * wide(rows[n * H + h], weight.dtype),)
    return found


@triton.jit
def _wall_taps(taps, REACH: tl.constexpr, LEFT: tl.constexpr):
    """What weight 1 of near key m gives to key n of its side, at ``2 reach m + n``; 0 if too far."""
    found = ()
    for m in tl.static_range(REACH):
        for n in tl.static_range(2 * REACH):
            if LEFT and n <= m + REACH:
                tap = tl.load(taps + (m * (REACH + 1) + REACH) * (2 * REACH + 1) + (REACH + n - m))
            elif not LEFT and n >= m:
                tap = tl.load(taps + (REACH * (REACH + 1) + REACH - 1 - m) * (2 * REACH + 1) + (n - m))
            else:
                tap = tl.zeros([], dtype=taps.dtype.element_ty)
            found = found + (tap,)
    return found


@triton.jit
def _spread(
    weights, first: tl.constexpr, tap, n: tl.constexpr, REACH: tl.constexpr, LEFT: tl.constexpr
):  # fmt: skip
    """What near weights, a tuple's from `first` on, give to key n."""
    SURE: tl.constexpr = REACH - 1 if LEFT else 0
    found = weights[first + SURE] * tap[SURE * 2 * REACH + n]
    for m in tl.static_range(REACH):
        if m != SURE and ((LEFT and n <= m + REACH) or (not LEFT and n >= m)):
            found += weights[first + m] * tap[m * 2 * REACH + n]
    return found


@triton.jit
def _all_spread(
    weights, first: tl.constexpr, apart: tl.constexpr, tap, REACH: tl.constexpr, RUN: tl.constexpr,
    LEFT: tl.constexpr,
):  # fmt: skip
    """`_spread` of every row o, whose weights are from ``first + o apart`` on, at ``2 reach o + n``."""
    found = ()
    for o in tl.static_range(RUN):
        for n in tl.static_range(2 * REACH):
            found = found + (_spread(weights, first + o * apart, tap, n, REACH, LEFT),)
    return found


@triton.jit
def _weighed(sums, weights, rows, COUNT: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr):
    """Rows, and to row o added ``weights[o COUNT + n] * rows[o + n]``; every one of rows is met once."""
    for x in tl.static_range(RUN + COUNT - 1):
        after = ()
        for o in tl.static_range(RUN):
            found = _row(sums, o, H)
            if x >= o and x < o + COUNT:
                found = _plus(found, weights[o * COUNT + x - o], rows, x, H)
            after = after + found
        sums = after
    return sums


@triton.jit
def _inners(own, rows, COUNT: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr):
    """The products of row o and ``rows[o + n]``, at ``(o + n) RUN + o``; each of rows is met once."""
    found = ()
    for x in tl.static_range(RUN + COUNT - 1):
        for o in tl.static_range(RUN):
            if x >= o and x < o + COUNT:
                found = found + (_inner(_row(own, o, H), rows, x, H),)
            else:
                found = found + (0.0,)
    return found


@triton.jit
def _side_by_side(vectors, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """So many vectors ``[strands]`` as the first columns of ``[strands, WIDTH]``; zeros in the rest."""
    column = tl.arange(0, WIDTH)[None, :]
    found = tl.where(column == 0, vectors[0][:, None], 0.0)
    for n in tl.static_range(1, COUNT):
        found = tl.where(column == n, vectors[n][:, None], found)
    return found


@triton.jit
def _products(left, right, sums, DOTS: tl.constexpr):
    """``[strands, n]`` and ``[strands, m]``, summed over strands ``[n, m]``, onto sums."""
    if DOTS and NVIDIA and left.dtype != tl.float32:
        sums = tl.dot(tl.trans(left), right, sums)
    elif DOTS:  # an interpreter takes bfloat16 for whole numbers
        left, right = left.to(tl.float32), right.to(tl.float32)
        sums = tl.dot(tl.trans(left), right, sums, input_precision="tf32x3")
    else:
        sums += tl.sum(left[:, :, None].to(sums.dtype) * right[:, None, :].to(sums.dtype), 0)
    return sums


@triton.jit(do_not_specialize=SIZES)
def forward(
    query, key, value, far, far_lse, first_key, first_value, taps, out, lse,
    scale, scale_rest, tokens, heads, begin, end, left, right, shift, far_rows, far_line,
    query_b, query_h, query_t, key_b, key_h, key_t, value_b, value_h, value_t, far_b, far_h, far_t,
    first_key_b, first_key_h, first_key_t, first_value_b, first_value_h, first_value_t,
    out_b, out_h, out_t, taps_h,
    REACH: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Some rows of one head: near weights, spread, and global ones, with the far share."""
    TYPE: tl.constexpr = lse.dtype.element_ty
    SPAN: tl.constexpr = 2 * REACH  # keys that one side spreads to
    ALL: tl.constexpr = 2 * REACH + COUNT
    scale = joined(scale, scale_rest, TYPE)
    blocks = tl.cdiv(tokens, STRANDS * RUN)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * STRANDS * RUN
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    query += batch * query_b + head * query_h
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    far += batch * far_b + head * far_h
    far_lse += pair.to(tl.int64) * far_line
    first_key += batch * first_key_b + head * first_key_h
    first_value += batch * first_value_b + head * first_value_h
    out += batch * out_b + head * out_h
    lse += pair.to(tl.int64) * tokens
    taps += head * taps_h
    first = start + tl.arange(0, STRANDS) * RUN
    asked = _rows(query, query_t, first, tokens, RUN, DIM, COLUMNS, H)
    NEAR: tl.constexpr = RUN + REACH - 1 if REACH > 0 else 0
    MET: tl.constexpr = RUN + SPAN - 1 if REACH > 0 else 0
    keys = _rows(key, key_t, first - left, tokens, NEAR, DIM, COLUMNS, H)
    last_keys = _rows(key, key_t, first + right - (REACH - 1), tokens, NEAR, DIM, COLUMNS, H)
    globals_ = _rows(first_key, first_key_t, first * 0, COUNT, COUNT, DIM, COLUMNS, H)
    others = _rows(far, far_t, first - shift, far_rows, RUN, DEPTH, DEEP, H)
    met = _rows(value, value_t, first - left, tokens, MET, DEPTH, DEEP, H)
    last_met = _rows(value, value_t, first + right - (SPAN - 1), tokens, MET, DEPTH, DEEP, H)
    global_values = _rows(first_value, first_value_t, first * 0, COUNT, COUNT, DEPTH, DEEP, H)
    own, near, last_near = (), (), ()
    for o in tl.static_range(RUN):
        own = own + _widened(asked, o, H, TYPE)
    if REACH > 0:
        near = _inners(own, keys, REACH, RUN, H)
        last_near = _inners(own, last_keys, REACH, RUN, H)
    weights, sums, totals = (), (), ()
    for o in tl.static_range(RUN):
        scores = ()
        for m in tl.static_range(REACH):
            scores = scores + (near[(o + m) * RUN + o] * scale,)
        for m in tl.static_range(REACH):
            scores = scores + (last_near[(o + m) * RUN + o] * scale,)
        for m in tl.static_range(COUNT):
            scores = scores + (_inner(_row(own, o, H), globals_, m, H) * scale,)
        at = tl.minimum(tl.maximum(first + o - shift, 0), far_rows - 1)
        beyond = tl.load(far_lse + at).to(TYPE)
        most = beyond
        for m in tl.static_range(ALL):
            most = tl.maximum(most, scores[m])
        share = tl.exp(beyond - most)
        total = share
        parts = ()
        for m in tl.static_range(ALL):
            part = tl.exp(scores[m] - most)
            parts = parts + (part,)
            total += part
        totals = totals + (most + tl.log(total),)
        over = 1.0 / total
        for m in tl.static_range(ALL):
            weights = weights + (parts[m] * over,)
        for h in tl.static_range(H):
            sums = sums + ((share * over)[:, None] * wide(others[o * H + h], TYPE),)
    if COUNT > 0:
        after = ()
        for o in tl.static_range(RUN):
            found = _row(sums, o, H)
            for m in tl.static_range(COUNT):
                found = _plus(found, weights[o * ALL + SPAN + m], global_values, m, H)
            after = after + found
        sums = after
    if REACH > 0:
        spread = _all_spread(weights, 0, ALL, _wall_taps(taps, REACH, True), REACH, RUN, True)
        sums = _weighed(sums, spread, met, SPAN, RUN, H)
        spread = _all_spread(weights, REACH, ALL, _wall_taps(taps, REACH, False), REACH, RUN, False)
        sums = _weighed(sums, spread, last_met, SPAN, RUN, H)
    row = first[:, None] + tl.arange(0, RUN)[None, :]
    total = _side_by_side(totals, RUN, RUN)
    total = tl.where((row >= begin) & (row < end), total, float("inf"))
    tl.store(lse + row, total, mask=row < tokens)
    for o in tl.static_range(RUN):
        ok = (first + o >= begin) & (first + o < end)
        _write(out, out_t, first + o, sums, o, ok, DEPTH, DEEP, H)


@triton.jit
def _rows_side(
    sums, asked, slopes, inners, totals, taps, key, key_t, value, value_t, handed, line, part, scale,
    tokens, begin, end, first, first_key, first_value,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr,
    HANDED: tl.constexpr, DOTS: tl.constexpr, OF_TAPS: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """One side of the window: onto the gradients of queries; for keys and taps what they need.

    Args:
        slopes: gradients of the rows' outputs, and `inners` their products with the outputs.
        first_key, first_value: the first that each strand's first row has near, and spreads to.
        handed: of this side, where these rows begin; `line` is from one entry to the next.
    """
    TYPE: tl.constexpr = taps.dtype.element_ty
    SPAN: tl.constexpr = 2 * REACH
    keys = _rows(key, key_t, first_key, tokens, RUN + REACH - 1, DIM, COLUMNS, H)
    met = _rows(value, value_t, first_value, tokens, RUN + SPAN - 1, DEPTH, DEEP, H)
    tap = _wall_taps(taps, REACH, LEFT)
    slope, own = (), ()
    for o in tl.static_range(RUN):
        slope, own = slope + _widened(slopes, o, H, TYPE), own + _widened(asked, o, H, TYPE)
    of_spread = _inners(slope, met, SPAN, RUN, H)
    scores = _inners(own, keys, REACH, RUN, H)
    products = tl.zeros([FEW, FEW], dtype=TYPE)
    of_scores, spreads, entries = (), (), ()
    for o in tl.static_range(RUN):
        ok = (first + o >= begin) & (first + o < end)
        weights, of_spreads = (), ()
        for n in tl.static_range(SPAN):
            of_spreads = of_spreads + (of_spread[(o + n) * RUN + o],)
        for m in tl.static_range(REACH):
            weight = tl.where(ok, tl.exp(scores[(o + m) * RUN + o] * scale - totals[o]), 0.0)
            weights = weights + (weight,)
            of_weight = -inners[o]
            for n in tl.static_range(SPAN):
                if (LEFT and n <= m + REACH) or (not LEFT and n >= m):
                    of_weight += of_spreads[n] * tap[m * SPAN + n]
            of_score = tl.where(ok, weight * of_weight * scale, 0.0)
            of_scores = of_scores + (of_score,)
        for n in tl.static_range(SPAN):
            spreads = spreads + (_spread(weights, 0, tap, n, REACH, LEFT),)
        if OF_TAPS:
            across = _side_by_side(weights, REACH, FEW)
            along = _side_by_side(of_spreads, SPAN, FEW)
            if DOTS and key.dtype.element_ty != tl.float32:  # of many rows only few are sums of few
                across, along = across.to(tl.bfloat16), along.to(tl.bfloat16)
            products = _products(across, along, products, DOTS)
    after = _weighed(sums, of_scores, keys, REACH, RUN, H)
    for e in tl.static_range(3 * REACH):
        for o in tl.static_range(RUN):
            if e < REACH:
                entries = entries + (of_scores[o * REACH + e],)
            else:
                entries = entries + (spreads[o * SPAN + e - REACH],)
    column, strand = tl.arange(0, HANDED)[None, :], tl.arange(0, STRANDS)[:, None]
    where = handed + strand + (column % RUN) * STRANDS + (column // RUN) * line
    entries = _side_by_side(entries, 3 * REACH * RUN, HANDED).to(handed.dtype.element_ty)
    tl.store(where, entries, mask=column < 3 * REACH * RUN)
    if OF_TAPS:
        m, n = tl.arange(0, FEW)[:, None], tl.arange(0, FEW)[None, :]
        tl.store(part + m * SPAN + n, products, mask=(m < REACH) & (n < SPAN))
    return after


@triton.jit(do_not_specialize=SIZES)
def backward_rows(
    grad, query, key, value, out, lse, first_key, first_value, taps, far,
    of_query, handed, of_first_key, of_first_value, parts,
    scale, scale_rest, tokens, heads, begin, end, left, right, shift, far_rows,
    grad_b, grad_h, grad_t, query_b, query_h, query_t, key_b, key_h, key_t, value_b, value_h, value_t,
    out_b, out_h, out_t, first_key_b, first_key_h, first_key_t,
    first_value_b, first_value_h, first_value_t, far_b, far_h, far_t, found_b, found_h, found_t, taps_h,
    REACH: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr,
    HANDED: tl.constexpr, DOTS: tl.constexpr, OF_TAPS: tl.constexpr,
):  # fmt: skip
    """The gradients of some queries; for `backward_keys` those of near scores, and spread weights.

    And sums over these rows: for global keys and values, and for the taps.
    """
    TYPE: tl.constexpr = lse.dtype.element_ty
    SPAN: tl.constexpr = 2 * REACH
    scale = joined(scale, scale_rest, TYPE)
    blocks = tl.cdiv(tokens, STRANDS * RUN)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * STRANDS * RUN
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    pair, program = pair.to(tl.int64), tl.program_id(0).to(tl.int64)
    grad += batch * grad_b + head * grad_h
    query += batch * query_b + head * query_h
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    out += batch * out_b + head * out_h
    lse += pair * tokens
    first_key += batch * first_key_b + head * first_key_h
    first_value += batch * first_value_b + head * first_value_h
    taps += head * taps_h
    far += batch * far_b + head * far_h
    of_query += batch * found_b + head * found_h
    line = blocks.to(tl.int64) * (STRANDS * RUN)
    handed += pair * (6 * REACH) * line + start
    of_first_key += program * COUNT * DIM
    of_first_value += program * COUNT * DEPTH
    parts += program * 2 * REACH * SPAN
    first = start + tl.arange(0, STRANDS) * RUN
    asked = _rows(query, query_t, first, tokens, RUN, DIM, COLUMNS, H)
    slopes = _rows(grad, grad_t, first, tokens, RUN, DEPTH, DEEP, H)
    outs = _rows(out, out_t, first, tokens, RUN, DEPTH, DEEP, H)
    sums, inners, totals = (), (), ()
    for o in tl.static_range(RUN):
        totals = totals + (tl.load(lse + tl.minimum(first + o, tokens - 1)),)
        inners = inners + (_inner(_widened(slopes, o, H, TYPE), outs, o, H),)
        for _ in tl.static_range(H):
            sums = sums + (tl.zeros([STRANDS, COLUMNS // H], dtype=TYPE),)
    if REACH > 0:
        sums = _rows_side(
            sums, asked, slopes, inners, totals, taps, key, key_t, value, value_t, handed, line, parts,
            scale, tokens, begin, end, first, first - left, first - left, REACH, DIM, DEPTH, COLUMNS,
            DEEP, STRANDS, RUN, H, HANDED, DOTS, OF_TAPS, True,
        )  # fmt: skip
        handed += 3 * REACH * line
        parts += REACH * SPAN
        sums = _rows_side(
            sums, asked, slopes, inners, totals, taps, key, key_t, value, value_t, handed, line, parts,
            scale, tokens, begin, end, first, first + right - (REACH - 1), first + right - (SPAN - 1),
            REACH, DIM, DEPTH, COLUMNS, DEEP, STRANDS, RUN, H, HANDED, DOTS, OF_TAPS, False,
        )  # fmt: skip
    if COUNT > 0:
        globals_ = _rows(first_key, first_key_t, first * 0, COUNT, COUNT, DIM, COLUMNS, H)
        global_values = _rows(first_value, first_value_t, first * 0, COUNT, COUNT, DEPTH, DEEP, H)
        of_keys, of_values = (), ()
        for _ in tl.static_range(H):
            of_keys = of_keys + (tl.zeros([FEW, COLUMNS // H], dtype=TYPE),)
            of_values = of_values + (tl.zeros([FEW, DEEP // H], dtype=TYPE),)
        after = ()
        for o in tl.static_range(RUN):
            ok = (first + o >= begin) & (first + o < end)
            slope, own = _widened(slopes, o, H, TYPE), _widened(asked, o, H, TYPE)
            found = _row(sums, o, H)
            weights, of_scores = (), ()
            for m in tl.static_range(COUNT):
                weight = tl.exp(_inner(own, globals_, m, H) * scale - totals[o])
                weight = tl.where(ok, weight, 0.0)
                of_score = weight * (_inner(slope, global_values, m, H) - inners[o]) * scale
                of_score = tl.where(ok, of_score, 0.0)
                found = _plus(found, of_score, globals_, m, H)
                weights, of_scores = weights + (weight,), of_scores + (of_score,)
            after = after + found
            across = _side_by_side(of_scores, COUNT, FEW).to(query.dtype.element_ty)
            weighed = _side_by_side(weights, COUNT, FEW).to(grad.dtype.element_ty)
            more_keys, more_values = (), ()
            for h in tl.static_range(H):
                more_keys = more_keys + (_products(across, asked[o * H + h], of_keys[h], DOTS),)
                more_values = more_values + (_products(weighed, slopes[o * H + h], of_values[h], DOTS),)
            of_keys, of_values = more_keys, more_values
        sums = after
        line = tl.arange(0, FEW)
        _write(of_first_key, DIM, line, of_keys, 0, line < COUNT, DIM, COLUMNS, H)
        _write(of_first_value, DEPTH, line, of_values, 0, line < COUNT, DEPTH, DEEP, H)
    others = _rows(far, far_t, first - shift, far_rows, RUN, DIM, COLUMNS, H)
    for o in tl.static_range(RUN):
        ok = (first + o >= begin) & (first + o < end)
        row = ()
        for h in tl.static_range(H):
            all_ = sums[o * H + h] + wide(others[o * H + h], TYPE)
            row = row + (tl.where(ok[:, None], all_, 0.0),)
        _write(of_query, found_t, first + o, row, 0, first + o < tokens, DIM, COLUMNS, H)


@triton.jit
def _entries(
    handed, line, first, tokens,
    START: tl.constexpr, RUN: tl.constexpr, COUNT: tl.constexpr, TYPE: tl.constexpr,
    THEIR_STRANDS: tl.constexpr, THEIR_RUN: tl.constexpr,
):  # fmt: skip
    """Entries from START on: what key o of a strand gets from row ``first + o + n``, at o COUNT + n.

    They lie as `backward_rows` has its rows: blocks ``[run, strands]``, so that it writes in one piece.
    """
    ROWS: tl.constexpr = THEIR_STRANDS * THEIR_RUN
    found = ()
    for o in tl.static_range(RUN):
        for n in tl.static_range(COUNT):
            row = first + (o + n)
            ok = (row >= 0) & (row < tokens)
            place = tl.where(ok, row, 0).to(tl.uint32)  # of which quotients are shifts
            within = place % ROWS
            place = place - within + (within % THEIR_RUN) * THEIR_STRANDS + within // THEIR_RUN
            entry = tl.load(handed + (START + COUNT - 1 - n) * line + place, mask=ok, other=0.0)
            found = found + (entry.to(TYPE),)
    return found


@triton.jit(do_not_specialize=SIZES)
def backward_keys(
    grad, query, value, handed, taps, far_key, far_value, of_key, of_value, parts,
    tokens, heads, left, right, shift, far_rows,
    grad_b, grad_h, grad_t, query_b, query_h, query_t, value_b, value_h, value_t,
    far_key_b, far_key_h, far_key_t, far_value_b, far_value_h, far_value_t,
    of_key_b, of_key_h, of_key_t, of_value_b, of_value_h, of_value_t, taps_h,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr,
    THEIR_STRANDS: tl.constexpr, THEIR_RUN: tl.constexpr, TAPS: tl.constexpr, OF_TAPS: tl.constexpr,
):  # fmt: skip
    """The gradients of some keys and their values.

    No far key feels a wall, so the steps that its value took are those of a row without one.
    """
    TYPE: tl.constexpr = taps.dtype.element_ty
    SPAN: tl.constexpr = 2 * REACH
    blocks = tl.cdiv(tokens, STRANDS * RUN)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * STRANDS * RUN
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    grad += batch * grad_b + head * grad_h
    query += batch * query_b + head * query_h
    value += batch * value_b + head * value_h
    far_key += batch * far_key_b + head * far_key_h
    far_value += batch * far_value_b + head * far_value_h
    of_key += batch * of_key_b + head * of_key_h
    of_value += batch * of_value_b + head * of_value_h
    line = tl.cdiv(tokens, THEIR_STRANDS * THEIR_RUN).to(tl.int64) * (THEIR_STRANDS * THEIR_RUN)
    handed += pair * (6 * REACH) * line
    taps += head * taps_h
    first = start + tl.arange(0, STRANDS) * RUN
    # Where the rows begin that have a key near, or spread to it: left of it, and right of it.
    near_left, spread_left = first + left - (REACH - 1), first + left - (SPAN - 1)
    right_of = first - right
    slopes = _entries(handed, line, near_left, tokens, 0, RUN, REACH, TYPE, THEIR_STRANDS, THEIR_RUN)
    last_slopes = _entries(
        handed, line, right_of, tokens, 3 * REACH, RUN, REACH, TYPE, THEIR_STRANDS, THEIR_RUN
    )
    for h in tl.static_range(H):
        asked = _piece(query, query_t, near_left, tokens, RUN + REACH - 1, DIM, COLUMNS, H, h, False)
        last = _piece(query, query_t, right_of, tokens, RUN + REACH - 1, DIM, COLUMNS, H, h, False)
        others = _piece(far_key, far_key_t, first - shift, far_rows, RUN, DIM, COLUMNS, H, h, True)
        sums = ()
        for o in tl.static_range(RUN):
            sums = sums + (wide(others[o], TYPE),)
        sums = _weighed(sums, slopes, asked, REACH, RUN, 1)
        sums = _weighed(sums, last_slopes, last, REACH, RUN, 1)
        for o in tl.static_range(RUN):
            ok = first + o < tokens
            _write_piece(of_key, of_key_t, first + o, sums[o], ok, DIM, COLUMNS, H, h)
    spreads = _entries(
        handed, line, spread_left, tokens, REACH, RUN, SPAN, TYPE, THEIR_STRANDS, THEIR_RUN
    )
    last_spreads = _entries(
        handed, line, right_of, tokens, 4 * REACH, RUN, SPAN, TYPE, THEIR_STRANDS, THEIR_RUN
    )
    products = no_products(STRANDS, DEEP // H, REACH, TYPE)
    tap = free_taps(taps, REACH)
    for h in tl.static_range(H):
        grads = _piece(grad, grad_t, spread_left, tokens, RUN + SPAN - 1, DEPTH, DEEP, H, h, False)
        last = _piece(grad, grad_t, right_of, tokens, RUN + SPAN - 1, DEPTH, DEEP, H, h, False)
        others = _piece(
            far_value, far_value_t, first - shift - REACH, far_rows, RUN + SPAN, DEPTH, DEEP, H, h, True
        )
        kept = others
        if OF_TAPS:
            kept = _piece(value, value_t, first, tokens, RUN, DEPTH, DEEP, H, h, True)
        sums = ()
        for _ in tl.static_range(RUN):
            sums = sums + (tl.zeros([STRANDS, DEEP // H], dtype=TYPE),)
        sums = _weighed(sums, spreads, grads, SPAN, RUN, 1)
        sums = _weighed(sums, last_spreads, last, SPAN, RUN, 1)
        for o in tl.static_range(RUN):
            held, ok = wide(kept[o], TYPE), first + o < tokens
            row, products = give_back(sums[o], products, others, tap, held, o, REACH, TYPE, OF_TAPS)
            _write_piece(of_value, of_value_t, first + o, row, ok, DEPTH, DEEP, H, h)
    if OF_TAPS:
        nothing = tl.zeros([TILE, TAPS], dtype=TYPE)
        write_products(parts, products, nothing, REACH, STRANDS, TAPS)


@triton.jit
def _write_piece(
    x, stride, at, piece, ok, DIM: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr, h: tl.constexpr
):  # fmt: skip
    """One piece of rows `at`, where ok."""
    W: tl.constexpr = COLUMNS // H
    column = h * W + tl.arange(0, W)[None, :]
    mask = ok[:, None]
    if DIM != COLUMNS:
        mask = mask & (column < DIM)
    tl.store(x + at.to(tl.int64)[:, None] * stride + column, piece.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batches", "heads", "chunks", "near_chunks"])
def gather_taps(
    free, near, found, batches, heads, chunks, near_chunks, REACH: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """The gradient of the taps of one kind of row, of one table: what programs have left for it.

    Args:
        free: of rows without walls ``[pairs, chunks, 2 reach + 1]``.
        near: of near keys ``[pairs, near chunks, 2, reach, 2 reach]``, those of the left wall first.
    """
    TYPE: tl.constexpr = found.dtype.element_ty
    table, kind = tl.program_id(0), tl.program_id(1)
    before, after = kind // (REACH + 1), kind % (REACH + 1)
    apart, pairs = heads, batches
    if tl.num_programs(0) == 1:
        apart, pairs = 1, batches * heads
    size: tl.constexpr = 4 * REACH * REACH
    tap = tl.arange(0, TAPS)
    total, start = tl.zeros([TAPS], dtype=TYPE), 0
    if (before == REACH) & (after == REACH):
        total = added(free, table, apart, pairs, chunks, 2 * REACH + 1, 0, 2 * REACH + 1, TAPS)
    elif before == REACH:
        m = REACH - 1 - after
        offset = 2 * REACH * REACH + m * 2 * REACH + m
        total = added(near, table, apart, pairs, near_chunks, size, offset, 2 * REACH - m, TAPS)
    elif after == REACH:
        start = REACH - before
        offset, count = before * 2 * REACH, before + REACH + 1
        total = added(near, table, apart, pairs, near_chunks, size, offset, count, TAPS)
    found += (table * tl.num_programs(1) + kind) * (2 * REACH + 1)
    tl.store(found + tap, tl.zeros([TAPS], dtype=TYPE), mask=tap < start)
    tl.store(found + start + tap, total, mask=start + tap < 2 * REACH + 1)
