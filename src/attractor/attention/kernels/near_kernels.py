"""The kernels of `near`: a row's last keys, within reach of a causal wall right behind its own.

A row's near key m is ``row - reach + 1 + m``, for m below the reach; its weight is spread over the keys
``row - 2 reach + 1 + n``, for n from m on and below twice the reach. A row is free if it is so late that
none of its near keys feels the first key of all: then it has the same taps as all others. Only keys up
to its own are used for a row: nothing later can change a bit of it.

With FACES a row's first key is that of its document: `open` is 0 where there is a wall between a key and
the next. A program none of whose rows feels a document's start does as without; another does all of them
by tiles, with taps looked up for each, and uses nothing of other documents.
"""

# Arguments of kernels have no types that mypy could know; tuples of tiles grow, by addition alone.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from attractor.attention.kernels.rows import (
    SIZES,
    TILE,
    no_wall,
    room,
    rows_at,
    rows_from,
    wide,
    write_rows,
)
from attractor.attention.kernels.taps import joined
from attractor.attention.kernels.values import (
    free_taps,
    give_back,
    give_back_at_walls,
    no_products,
    write_products,
)


@triton.jit
def _all_free(
    open, stride, start, tokens,
    SPAN: tl.constexpr, ROWS: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Whether each of these rows has SPAN keys before it, and no wall between."""
    face = start - SPAN + tl.arange(0, SEEN)
    seen = face < tl.minimum(start + ROWS, tokens) - 1
    shut = tl.load(open + face * stride, mask=seen & (face >= 0), other=0) == 0
    return tl.max((shut & seen).to(tl.int32), 0) == 0


@triton.jit
def _before(open, stride, row, tokens, SPAN: tl.constexpr, FACES: tl.constexpr):
    """How many keys there are before a row's own; with FACES in its document, and no more than SPAN."""
    if FACES:
        before, _ = room(open, stride, tl.minimum(row, tokens - 1), tokens, SPAN, True)
    else:
        before = row
    return before


@triton.jit
def _rows_up_to(
    x, stride, first, before, tokens,
    BEHIND: tl.constexpr, RUN: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    FACES: tl.constexpr,
):  # fmt: skip
    """The last BEHIND rows up to first, and RUN - 1 more, as `rows_from`.

    With FACES zeros for those further back than `before`, which are of another document.
    """
    if FACES:
        column = tl.arange(0, COLUMNS)
        inside = (column < DIM)[None, :]
        rows = ()
        for n in tl.static_range(BEHIND):
            at = tl.minimum(first, tokens - 1) - (BEHIND - 1 - n)
            ok = (before >= BEHIND - 1 - n)[:, None] & inside
            rows = rows + (rows_at(x, stride, at, column, ok, x.dtype.element_ty),)
    else:
        rows = rows_from(x, stride, first - (BEHIND - 1), tokens, RUN + BEHIND - 1, DIM, COLUMNS)
    return rows


@triton.jit
def _counted(row, tokens, stop, LATE: tl.constexpr, FREE: tl.constexpr, FACES: tl.constexpr):
    """Which rows are done here: up to `stop` with FACES, else those that are FREE, or the others."""
    if FACES:
        ok = row < stop
    else:
        ok = (row < tokens) & ((row >= LATE) == FREE)
    return ok


@triton.jit
def _near_taps(
    taps, row, m: tl.constexpr, n: tl.constexpr, REACH: tl.constexpr, FREE: tl.constexpr
):  # fmt: skip
    """What weight 1 of near key m gives to key n."""
    if FREE:
        tap = tl.load(taps + (REACH * (REACH + 1) + REACH - 1 - m) * (2 * REACH + 1) + (n - m))
    else:
        before = tl.minimum(tl.maximum(row - (REACH - 1 - m), 0), REACH)
        kind = before * (REACH + 1) + (REACH - 1 - m)
        tap = tl.load(taps + kind * (2 * REACH + 1) + (n - m))
    return tap


@triton.jit
def _scores(own, keys, row, scale, o: tl.constexpr, REACH: tl.constexpr, FREE: tl.constexpr):
    """Scores of a row's near keys, the furthest first; -inf if there is none."""
    found = ()
    for m in tl.static_range(REACH):
        score = tl.sum(own * wide(keys[o + m], own.dtype), 1) * scale
        if not FREE:
            score = tl.where(row >= REACH - 1 - m, score, -float("inf"))
        found = found + (score,)
    return found


@triton.jit
def _spread(weights, taps, row, n: tl.constexpr, REACH: tl.constexpr, FREE: tl.constexpr):
    """What near weights give to key n."""
    found = weights[0] * _near_taps(taps, row, 0, n, REACH, FREE)
    for m in tl.static_range(1, REACH):
        if m <= n:
            found += weights[m] * _near_taps(taps, row, m, n, REACH, FREE)
    return found


@triton.jit
def _far_rows(
    far, stride, first, before, tokens,
    REACH: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    FREE: tl.constexpr,
):  # fmt: skip
    """What the operator gave for rows, as `rows_from`; zeros for the first ones, if not FREE."""
    if FREE:
        found = rows_from(far, stride, first - REACH, tokens - REACH, COUNT, DIM, COLUMNS)
    else:
        column = tl.arange(0, COLUMNS)
        late = ((before >= REACH) & (first < tokens))[:, None] & (column < DIM)[None, :]
        found = (rows_at(far, stride, first - REACH, column, late, far.dtype.element_ty),)
    return found


@triton.jit
def _side_by_side(vectors, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """So many vectors ``[rows]`` as columns of ``[rows, WIDTH]``."""
    column = tl.arange(0, WIDTH)[None, :]
    found = tl.where(column == 0, vectors[0][:, None], 0.0)
    for n in tl.static_range(1, COUNT):
        found = tl.where(column == n, vectors[n][:, None], found)
    return found


@triton.jit
def _forward_strands(
    query, key, value, far, far_lse, taps, open, out, lse,
    scale, tokens, first, stop, query_t, key_t, value_t, far_t, open_t, out_t,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, RUN: tl.constexpr, FREE: tl.constexpr, FACES: tl.constexpr,
):  # fmt: skip
    """Rows ``first .. first + RUN - 1`` of every strand, as `_counted`; a RUN of 1 with FACES."""
    TYPE: tl.constexpr = taps.dtype.element_ty
    LATE: tl.constexpr = 2 * REACH - 1
    before = _before(open, open_t, first, tokens, LATE, FACES)
    keys = _rows_up_to(key, key_t, first, before, tokens, REACH, RUN, DIM, COLUMNS, FACES)
    asked = rows_from(query, query_t, first, tokens, RUN, DIM, COLUMNS)
    met = _rows_up_to(value, value_t, first, before, tokens, 2 * REACH, RUN, DEPTH, DEEP, FACES)
    others = _far_rows(far, far_t, first, before, tokens, REACH, RUN, DEPTH, DEEP, FREE)
    outs, totals = (), ()
    for o in tl.static_range(RUN):
        row, behind = first + o, before + o
        late = (behind >= REACH) & (row < tokens)
        beyond = tl.load(far_lse + (row - REACH), mask=late, other=-float("inf")).to(TYPE)
        scores = _scores(wide(asked[o], TYPE), keys, behind, scale, o, REACH, FREE)
        most = beyond
        for m in tl.static_range(REACH):
            most = tl.maximum(most, scores[m])
        total = tl.exp(beyond - most)
        for m in tl.static_range(REACH):
            total += tl.exp(scores[m] - most)
        total = most + tl.log(total)
        weights = ()
        for m in tl.static_range(REACH):
            weights = weights + (tl.exp(scores[m] - total),)
        sums = tl.exp(beyond - total)[:, None] * wide(others[o], TYPE)
        for n in tl.static_range(2 * REACH):
            sums += _spread(weights, taps, behind, n, REACH, FREE)[:, None] * wide(met[o + n], TYPE)
        outs, totals = outs + (sums,), totals + (total,)
    row = first[:, None] + tl.arange(0, RUN)[None, :]
    ok = _counted(row, tokens, stop, LATE, FREE, FACES)
    tl.store(lse + row, _side_by_side(totals, RUN, RUN), mask=ok)
    for o in tl.static_range(RUN):
        ok = _counted(first + o, tokens, stop, LATE, FREE, FACES)
        write_rows(out, out_t, first + o, outs[o], ok, DEPTH, DEEP)


@triton.jit(do_not_specialize=SIZES)
def forward(
    query, key, value, far, far_lse, taps, out, lse,
    scale, scale_rest, tokens, heads,
    query_b, query_h, query_t, key_b, key_h, key_t,
    value_b, value_h, value_t, far_b, far_h, far_t,
    out_b, out_h, out_t, taps_h, open, open_b, open_h, open_t,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, SEEN: tl.constexpr,
    FACES: tl.constexpr,
):  # fmt: skip
    """Some rows of one head: near weights, spread, times values, with the far share."""
    scale = joined(scale, scale_rest, taps.dtype.element_ty)
    blocks = tl.cdiv(tokens, STRANDS * RUN)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * STRANDS * RUN
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    query += batch * query_b + head * query_h
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    far += batch * far_b + head * far_h
    far_lse += pair.to(tl.int64) * (tokens - REACH)
    out += batch * out_b + head * out_h
    lse += pair.to(tl.int64) * tokens
    taps += head * taps_h
    free = tokens >= 2 * REACH
    if FACES:
        open += batch * open_b + head * open_h
        free = _all_free(open, open_t, start, tokens, 2 * REACH - 1, STRANDS * RUN, SEEN)
    if free:
        first = start + tl.arange(0, STRANDS) * RUN
        _forward_strands(
            query, key, value, far, far_lse, taps, open, out, lse, scale, tokens, first, tokens, query_t,
            key_t, value_t, far_t, open_t, out_t, REACH, DIM, DEPTH, COLUMNS, DEEP, RUN, True, False,
        )  # fmt: skip
    if FACES:
        stop = tl.minimum(start + STRANDS * RUN, tokens)
        for tile in range(tl.where(free, 0, tl.cdiv(STRANDS * RUN, TILE))):
            first = start + tile * TILE + tl.arange(0, TILE)
            _forward_strands(
                query, key, value, far, far_lse, taps, open, out, lse, scale, tokens, first, stop,
                query_t, key_t, value_t, far_t, open_t, out_t, REACH, DIM, DEPTH, COLUMNS, DEEP, 1,
                False, True,
            )  # fmt: skip
    elif start == 0:
        _forward_strands(
            query, key, value, far, far_lse, taps, open, out, lse, scale, tokens, tl.arange(0, TILE),
            tokens, query_t, key_t, value_t, far_t, open_t, out_t, REACH, DIM, DEPTH, COLUMNS, DEEP, 1,
            False, False,
        )  # fmt: skip


@triton.jit
def place_of(row, REACH: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr):
    """Where what `backward_rows` leaves for `backward_keys` begins, for a row.

    It is laid out as ``[blocks, 3 reach, run, strands]``, so that what is written or read at once is in
    one piece.
    """
    ROWS: tl.constexpr = STRANDS * RUN
    row = row.to(tl.uint32)  # of which quotients are shifts
    block, within = row // ROWS, row % ROWS
    return block * (3 * REACH * ROWS) + (within % RUN) * STRANDS + within // RUN


@triton.jit
def _rows_strands(
    grad, query, key, value, out, lse, taps, far, open,
    of_query, handed, part, firsts, free_sums, kind_sums,
    scale, tokens, first, stop, grad_t, query_t, key_t, value_t, out_t, far_t, open_t, found_t,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, COUNT: tl.constexpr,
    HANDED: tl.constexpr, PLACES: tl.constexpr, OF_TAPS: tl.constexpr, FREE: tl.constexpr,
    FACES: tl.constexpr,
):  # fmt: skip
    """Rows ``first .. first + COUNT - 1`` of every strand, as `_counted`; a COUNT of 1 with FACES.

    With FACES products are added to `free_sums` ``[PLACES]`` and, those of keys with less than the reach
    before them, to `kind_sums` ``[at least reach, PLACES]``, which are returned.
    """
    TYPE: tl.constexpr = taps.dtype.element_ty
    LATE: tl.constexpr = 2 * REACH - 1
    before = _before(open, open_t, first, tokens, LATE, FACES)
    keys = _rows_up_to(key, key_t, first, before, tokens, REACH, COUNT, DIM, COLUMNS, FACES)
    asked = rows_from(query, query_t, first, tokens, COUNT, DIM, COLUMNS)
    grads = rows_from(grad, grad_t, first, tokens, COUNT, DEPTH, DEEP)
    met = _rows_up_to(value, value_t, first, before, tokens, 2 * REACH, COUNT, DEPTH, DEEP, FACES)
    outs = rows_from(out, out_t, first, tokens, COUNT, DEPTH, DEEP)
    others = _far_rows(far, far_t, first, before, tokens, REACH, COUNT, DIM, COLUMNS, FREE)
    found, slopes, spreads, products = (), (), (), ()
    for o in tl.static_range(COUNT):
        row, behind = first + o, before + o
        total = tl.load(lse + tl.minimum(row, tokens - 1))
        counted = _counted(row, tokens, stop, LATE, FREE, FACES)
        slope = wide(grads[o], TYPE)
        inner = tl.sum(slope * wide(outs[o], TYPE), 1)
        of_spread = ()
        for n in tl.static_range(2 * REACH):
            of_spread = of_spread + (tl.sum(slope * wide(met[o + n], TYPE), 1),)
        scores = _scores(wide(asked[o], TYPE), keys, behind, scale, o, REACH, FREE)
        sums = wide(others[o], TYPE)
        weights, more = (), ()
        for m in tl.static_range(REACH):
            weight = tl.exp(scores[m] - total)
            of_weight = -inner
            for n in tl.static_range(m, 2 * REACH):
                of_weight += of_spread[n] * _near_taps(taps, behind, m, n, REACH, FREE)
            of_score = weight * of_weight * scale
            sums += of_score[:, None] * wide(keys[o + m], TYPE)
            weights, slopes = weights + (weight,), slopes + (of_score,)
            if OF_TAPS:
                weight = tl.where(counted, weight, 0.0)
                for n in tl.static_range(2 * REACH):
                    if n < m:
                        product = tl.zeros_like(weight)
                    elif o == 0:
                        product = weight * of_spread[n]
                    else:
                        product = products[m * 2 * REACH + n] + weight * of_spread[n]
                    more = more + (product,)
        found, products = found + (sums,), more
        for n in tl.static_range(2 * REACH):
            spreads = spreads + (_spread(weights, taps, behind, n, REACH, FREE),)
    entries = ()
    for e in tl.static_range(3 * REACH):
        for o in tl.static_range(COUNT):
            if e < REACH:
                entries = entries + (slopes[o * REACH + e],)
            else:
                entries = entries + (spreads[o * 2 * REACH + e - REACH],)
    column = tl.arange(0, HANDED)[None, :]
    row = first[:, None] + column % COUNT
    ok = _counted(row, tokens, stop, LATE, FREE, FACES) & (column < 3 * REACH * COUNT)
    where = handed + place_of(first, REACH, STRANDS, RUN)[:, None] + column * (STRANDS * RUN // COUNT)
    tl.store(where, _side_by_side(entries, 3 * REACH * COUNT, HANDED), mask=ok)
    for o in tl.static_range(COUNT):
        ok = _counted(first + o, tokens, stop, LATE, FREE, FACES)
        write_rows(of_query, found_t, first + o, found[o], ok, DIM, COLUMNS)
    if OF_TAPS:
        place = tl.arange(0, PLACES)
        products = _side_by_side(products, REACH * 2 * REACH, PLACES)
        ok = place < REACH * 2 * REACH
        if FREE:
            tl.store(part + place, tl.sum(products, 0), mask=ok)
        elif FACES:
            left = before[:, None] - (REACH - 1 - place // (2 * REACH))[None, :]  # before a near key
            free_sums += tl.sum(tl.where(left >= REACH, products, 0.0), 0)
            line = tl.arange(0, kind_sums.shape[0])[:, None]
            for n in tl.static_range(REACH):
                of_kind = tl.sum(tl.where(left == n, products, 0.0), 0)
                kind_sums += tl.where(line == n, of_kind[None, :], 0.0)
        else:
            where = firsts + first[:, None] * (REACH * 2 * REACH) + place[None, :]
            tl.store(where, products, mask=(first < 2 * REACH)[:, None] & ok[None, :])
    return free_sums, kind_sums


@triton.jit(do_not_specialize=SIZES)
def backward_rows(
    grad, query, key, value, out, lse, taps, far,
    of_query, handed, parts, firsts,
    scale, scale_rest, tokens, heads,
    grad_b, grad_h, grad_t, query_b, query_h, query_t,
    key_b, key_h, key_t, value_b, value_h, value_t,
    out_b, out_h, out_t, far_b, far_h, far_t,
    found_b, found_h, found_t, taps_h, open, open_b, open_h, open_t,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, HANDED: tl.constexpr,
    ENTRIES: tl.constexpr, PLACES: tl.constexpr, KINDS: tl.constexpr, SEEN: tl.constexpr,
    OF_TAPS: tl.constexpr, FACES: tl.constexpr,
):  # fmt: skip
    """The gradients of some queries; for `backward_keys` those of near scores, and spread weights."""
    scale = joined(scale, scale_rest, taps.dtype.element_ty)
    blocks = tl.cdiv(tokens, STRANDS * RUN)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * STRANDS * RUN
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    pair = pair.to(tl.int64)
    grad += batch * grad_b + head * grad_h
    query += batch * query_b + head * query_h
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    out += batch * out_b + head * out_h
    far += batch * far_b + head * far_h
    of_query += batch * found_b + head * found_h
    lse += pair * tokens
    handed += pair * blocks * (3 * REACH * STRANDS * RUN)
    parts += tl.program_id(0).to(tl.int64) * (REACH * 2 * REACH)
    if not FACES:
        firsts += pair * (2 * REACH * REACH * 2 * REACH)
    taps += head * taps_h
    free = tokens >= 2 * REACH
    free_sums = tl.zeros([PLACES], dtype=taps.dtype.element_ty)
    kind_sums = tl.zeros([KINDS, PLACES], dtype=taps.dtype.element_ty)
    if FACES:
        open += batch * open_b + head * open_h
        free = _all_free(open, open_t, start, tokens, 2 * REACH - 1, STRANDS * RUN, SEEN)
    if free:
        first = start + tl.arange(0, STRANDS) * RUN
        _rows_strands(
            grad, query, key, value, out, lse, taps, far, open, of_query, handed, parts, firsts,
            free_sums, kind_sums, scale, tokens, first, tokens, grad_t, query_t, key_t, value_t, out_t,
            far_t, open_t, found_t, REACH, DIM, DEPTH, COLUMNS, DEEP, STRANDS, RUN, RUN, HANDED, PLACES,
            OF_TAPS, True, False,
        )  # fmt: skip
    elif OF_TAPS and not FACES:
        place = tl.arange(0, PLACES)
        tl.store(parts + place, free_sums, mask=place < REACH * 2 * REACH)
    if FACES:
        stop = tl.minimum(start + STRANDS * RUN, tokens)
        for tile in range(tl.where(free, 0, tl.cdiv(STRANDS * RUN, TILE))):
            first = start + tile * TILE + tl.arange(0, TILE)
            free_sums, kind_sums = _rows_strands(
                grad, query, key, value, out, lse, taps, far, open, of_query, handed, parts, firsts,
                free_sums, kind_sums, scale, tokens, first, stop, grad_t, query_t, key_t, value_t, out_t,
                far_t, open_t, found_t, REACH, DIM, DEPTH, COLUMNS, DEEP, STRANDS, RUN, 1, ENTRIES,
                PLACES, OF_TAPS, False, True,
            )  # fmt: skip
        if OF_TAPS and (free == 0):
            place, kind = tl.arange(0, PLACES), tl.arange(0, KINDS)[:, None]
            inside = place < REACH * 2 * REACH
            tl.store(parts + place, free_sums, mask=inside)
            line = tl.program_id(0).to(tl.int64) * REACH + kind
            where = firsts + line * (REACH * 2 * REACH) + place[None, :]
            tl.store(where, kind_sums, mask=(kind < REACH) & inside[None, :])
    elif start == 0:
        _rows_strands(
            grad, query, key, value, out, lse, taps, far, open, of_query, handed, parts, firsts,
            free_sums, kind_sums, scale, tokens, tl.arange(0, TILE), tokens, grad_t, query_t, key_t,
            value_t, out_t, far_t, open_t, found_t, REACH, DIM, DEPTH, COLUMNS, DEEP, STRANDS, RUN, 1,
            ENTRIES, PLACES, OF_TAPS, False, False,
        )  # fmt: skip


@triton.jit
def _entries(
    handed, first, tokens,
    START: tl.constexpr, RUN: tl.constexpr, COUNT: tl.constexpr, REACH: tl.constexpr,
    THEIR_STRANDS: tl.constexpr, THEIR_RUN: tl.constexpr,
):  # fmt: skip
    """Entries from START on: what key ``first + o`` gets from row ``first + o + n``, at o COUNT + n."""
    found = ()
    for o in tl.static_range(RUN):
        for n in tl.static_range(COUNT):
            row = tl.minimum(first + o + n, tokens - 1)
            where = handed + place_of(row, REACH, THEIR_STRANDS, THEIR_RUN)
            where += (START + COUNT - 1 - n) * (THEIR_STRANDS * THEIR_RUN)
            found = found + (tl.load(where),)
    return found


@triton.jit(do_not_specialize=SIZES)
def backward_keys(
    grad, query, value, handed, taps, far_key, far_value,
    of_key, of_value, parts, tokens, heads,
    grad_b, grad_h, grad_t, query_b, query_h, query_t,
    value_b, value_h, value_t,
    far_key_b, far_key_h, far_key_t, far_value_b, far_value_h, far_value_t,
    of_key_b, of_key_h, of_key_t, of_value_b, of_value_h, of_value_t,
    taps_h, open, open_b, open_h, open_t,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, STRANDS: tl.constexpr, RUN: tl.constexpr, THEIR_STRANDS: tl.constexpr,
    THEIR_RUN: tl.constexpr, TAPS: tl.constexpr, SEEN: tl.constexpr, OF_TAPS: tl.constexpr,
    FACES: tl.constexpr,
):  # fmt: skip
    """The gradients of some keys and their values: far from both ends, then near one."""
    TYPE: tl.constexpr = taps.dtype.element_ty
    ROWS: tl.constexpr = STRANDS * RUN
    THEIRS: tl.constexpr = THEIR_STRANDS * THEIR_RUN
    blocks = tl.cdiv(tokens, ROWS)
    pair, start = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * ROWS
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    grad += batch * grad_b + head * grad_h
    query += batch * query_b + head * query_h
    value += batch * value_b + head * value_h
    far_key += batch * far_key_b + head * far_key_h
    far_value += batch * far_value_b + head * far_value_h
    of_key += batch * of_key_b + head * of_key_h
    of_value += batch * of_value_b + head * of_value_h
    handed += pair.to(tl.int64) * tl.cdiv(tokens, THEIRS) * (3 * REACH * THEIRS)
    taps += head * taps_h
    free, tiles = True, 2
    if FACES:
        open += batch * open_b + head * open_h
        free = no_wall(open, open_t, start, tokens, 2 * REACH, ROWS, SEEN)
        tiles = tl.where(free, 2, tl.cdiv(ROWS, TILE))
    products = no_products(STRANDS, DEEP, REACH, TYPE)
    if free & (tokens > 4 * REACH):
        first = start + tl.arange(0, STRANDS) * RUN
        slopes = _entries(handed, first, tokens, 0, RUN, REACH, REACH, THEIR_STRANDS, THEIR_RUN)
        asked = rows_from(query, query_t, first, tokens, RUN + REACH - 1, DIM, COLUMNS)
        others = rows_from(far_key, far_key_t, first, tokens - REACH, RUN, DIM, COLUMNS)
        for o in tl.static_range(RUN):
            sums = wide(others[o], TYPE)
            for n in tl.static_range(REACH):
                sums += slopes[o * REACH + n][:, None] * wide(asked[o + n], TYPE)
            ok = (first + o >= 2 * REACH) & (first + o < tokens - 2 * REACH)
            write_rows(of_key, of_key_t, first + o, sums, ok, DIM, COLUMNS)
        count = tokens - REACH
        spreads = _entries(handed, first, tokens, REACH, RUN, 2 * REACH, REACH, THEIR_STRANDS, THEIR_RUN)
        grads = rows_from(grad, grad_t, first, tokens, RUN + 2 * REACH - 1, DEPTH, DEEP)
        others = rows_from(far_value, far_value_t, first - REACH, count, RUN + 2 * REACH, DEPTH, DEEP)
        kept = others
        if OF_TAPS:
            kept = rows_from(value, value_t, first, tokens, RUN, DEPTH, DEEP)
        tap = free_taps(taps, REACH)
        for o in tl.static_range(RUN):
            ok = (first + o >= 2 * REACH) & (first + o < tokens - 2 * REACH)
            held = tl.where(ok[:, None], wide(kept[o], TYPE), 0.0)
            sums = tl.zeros([STRANDS, DEEP], dtype=TYPE)
            for n in tl.static_range(2 * REACH):
                sums += spreads[o * 2 * REACH + n][:, None] * wide(grads[o + n], TYPE)
            sums, products = give_back(sums, products, others, tap, held, o, REACH, TYPE, OF_TAPS)
            write_rows(of_value, of_value_t, first + o, sums, ok, DEPTH, DEEP)
    column, deep = tl.arange(0, COLUMNS), tl.arange(0, DEEP)
    inside, deep_inside = (column < DIM)[None, :], (deep < DEPTH)[None, :]
    rest = tl.zeros([TILE, TAPS], dtype=TYPE)
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
            there = at < tokens - REACH
            if FACES:
                there = after >= REACH
            sums = rows_at(far_key, far_key_t, at, column, there[:, None] & inside, TYPE)
            slopes = _entries(handed, at, tokens, 0, 1, REACH, REACH, THEIR_STRANDS, THEIR_RUN)
            for n in tl.static_range(REACH):
                there = (at + n < tokens)[:, None] & inside
                if FACES:
                    there = (after >= n)[:, None] & inside
                given = slopes[n][:, None] * rows_at(query, query_t, at + n, column, there, TYPE)
                if FACES:  # whatever another document's rows have left
                    given = tl.where(there, given, 0.0)
                sums += given
            write_rows(of_key, of_key_t, row, sums, ok, DIM, COLUMNS)
            sums = tl.zeros([TILE, DEEP], dtype=TYPE)
            spreads = _entries(handed, at, tokens, REACH, 1, 2 * REACH, REACH, THEIR_STRANDS, THEIR_RUN)
            for n in tl.static_range(2 * REACH):
                there = (at + n < tokens)[:, None] & deep_inside
                if FACES:
                    there = (after >= n)[:, None] & deep_inside
                given = spreads[n][:, None] * rows_at(grad, grad_t, at + n, deep, there, TYPE)
                if FACES:
                    given = tl.where(there, given, 0.0)
                sums += given
            held = tl.zeros([TILE, DEEP], dtype=TYPE)
            if OF_TAPS:
                held = rows_at(value, value_t, at, deep, ok[:, None] & deep_inside, TYPE)
            sums, rest = give_back_at_walls(
                sums, rest, far_value, far_value_t, tokens - REACH, held, taps, at, before, after, deep,
                deep_inside, REACH, TAPS, OF_TAPS,
            )  # fmt: skip
            write_rows(of_value, of_value_t, row, sums, ok, DEPTH, DEEP)
    if OF_TAPS:
        write_products(parts, products, rest, REACH, STRANDS, TAPS)
