"""The kernel of a backward in one walk, whose programs add to the same keys' gradients.

It takes several neighbours of few strands a turn, so that most of what steps need is of the same turn,
and little is handed on. A tile's columns are strands and keys such that all keys of a strand are in one
thread: taking tiles apart and putting them together is a matter of names (`_apart`).
"""

# Arguments of kernels have no types that mypy could know; tuples of tiles grow, by addition alone.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: RUF005

import triton
import triton.language as tl

from attractor.attention.kernels.reaction.walks import first_weights, free_strands, passed, within, zeros
from attractor.attention.kernels.reaction.weights import limits, rows_of, single


@triton.jit
def _halves(x):
    """Two tiles ``[rows, 4]`` of ``[rows, 2, 4]``."""
    return tl.split(tl.permute(x, 0, 2, 1))


@triton.jit
def _apart(x, KEYS: tl.constexpr):
    """A tile ``[rows, 4]`` for each of a turn's keys, of all of them: a thread has its strand's KEYS."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], KEYS // 2, 4, 2]))
    if KEYS == 4:
        a, c = _halves(even)
        b, d = _halves(odd)
        tiles = (a, b, c, d)
    else:
        even, even_too = tl.split(tl.permute(tl.reshape(even, [x.shape[0], 2, 2, 4]), 0, 2, 3, 1))
        odd, odd_too = tl.split(tl.permute(tl.reshape(odd, [x.shape[0], 2, 2, 4]), 0, 2, 3, 1))
        a, c = _halves(even)
        b, d = _halves(odd)
        e, g = _halves(even_too)
        f, h = _halves(odd_too)
        tiles = (a, b, c, d, e, f, g, h)
    return tiles


@triton.jit
def _both(a, b):
    return tl.permute(tl.join(a, b), 0, 2, 1)


@triton.jit
def _together(tiles, FIRST: tl.constexpr, KEYS: tl.constexpr):
    """What `_apart` takes apart, of KEYS of the tiles."""
    ROWS: tl.constexpr = tiles[FIRST].shape[0]
    even = _both(tiles[FIRST], tiles[FIRST + 2])
    odd = _both(tiles[FIRST + 1], tiles[FIRST + 3])
    if KEYS == 8:
        even_too = _both(tiles[FIRST + 4], tiles[FIRST + 6])
        odd_too = _both(tiles[FIRST + 5], tiles[FIRST + 7])
        even = tl.reshape(tl.permute(tl.join(even, even_too), 0, 3, 1, 2), [ROWS, 4, 4])
        odd = tl.reshape(tl.permute(tl.join(odd, odd_too), 0, 3, 1, 2), [ROWS, 4, 4])
    return tl.reshape(tl.join(even, odd), [ROWS, 4 * KEYS])


@triton.jit
def _begins(strand, begin, length, gap):
    """First keys of four strands, with a gap after the second."""
    return begin + strand * length + tl.where(strand > 1, gap, 0)


@triton.jit
def _turn(
    xs, ys, moving, past, back, of_a, of_b, a, b, here, lo, hi,
    STEPS: tl.constexpr, LAG: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    SLOPES: tl.constexpr,
):  # fmt: skip
    """As `walks._turn`, for KEYS neighbours of every strand at once.

    Args:
        xs: first weights of the keys `here` and after, a tile each.
        ys: gradients of the stepped weights of the keys LAG before those.
        moving, back: of every step and adjoint step what its last two keys left.
        past: of every step s the weights of the last LAG + STEPS - 2 s keys.

    Returns:
        Weights after 0, 1, ... steps of as many keys before; gradients of the first weights of the keys
        LAG + STEPS before; the tuples and sums for the next turn.
    """
    free = 1 - 2 * a + b
    levels, left_over, kept, left_back = xs, (), (), ()
    for s in tl.static_range(STEPS):
        partial, given = moving[2 * s], moving[2 * s + 1]
        for k in tl.static_range(KEYS):
            x = levels[s * KEYS + k]
            share = a * x
            right, left = share, given
            if MASKED:
                right = tl.where((here + (k - s))[None, :] > hi[:, None], given, share)
                left = tl.where((here + (k - s))[None, :] <= lo[:, None], share, given)
            levels = levels + (partial + right,)
            partial = x * (free - b * x) + left
            given = share
        left_over = left_over + (partial, given)
    for s in tl.static_range(STEPS):
        for n in tl.static_range(KEYS, KEYS + LAG + STEPS - 2 * s):
            if n < LAG + STEPS - 2 * s:
                kept = kept + (passed(past[s * (LAG + STEPS + 1 - s) + n]),)
            else:
                kept = kept + (levels[s * KEYS + n - (LAG + STEPS - 2 * s)],)
    for n in tl.static_range(STEPS):
        own, before, after = back[2 * n], back[2 * n + 1], ()
        for k in tl.static_range(KEYS):
            there = here + (k - LAG - 1 - n)
            if k < 2 * n + 2 + LAG - STEPS:
                x = past[(STEPS - 1 - n) * (LAG + 2 + n) + k]
            else:
                x = levels[(STEPS - 1 - n) * KEYS + k - (2 * n + 2 + LAG - STEPS)]
            right, left = ys[k], before
            if MASKED:
                right = tl.where(there[None, :] >= hi[:, None], own, right)
                left = tl.where(there[None, :] <= lo[:, None], own, left)
            sides = left + right
            after = after + (own * (free - 2 * b * x) + a * sides,)
            if SLOPES:
                mine = x
                if MASKED:
                    ok = (there[None, :] >= lo[:, None]) & (there[None, :] <= hi[:, None])
                    mine = tl.where(ok, x, 0.0)
                of_a += mine * (sides - 2 * own)
                of_b += own * (mine - mine * x)
            before, own = own, ys[k]
        left_back = left_back + (own, before)
        ys = after
    return levels, ys, left_over, kept, left_back, of_a, of_b


@triton.jit
def _add(onto, at, found, keys, DIM: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """Adds rows to those `at` of what many programs add to."""
    column = tl.arange(0, COLUMNS)[None, :]
    where = onto + (at[:, None] * DIM + column)
    if MASKED or DIM < COLUMNS:
        ok = ((at >= 0) & (at < keys))[:, None] & (column < DIM)
        tl.atomic_add(where, found, mask=ok, sem="relaxed")
    else:
        tl.atomic_add(where, found, sem="relaxed")


@triton.jit
def _returned(tile, rows, ACROSS: tl.constexpr, PRECISION: tl.constexpr):
    """What rows ``[rows, dim]`` give back to the keys of a tile ``[rows, keys]``, as ``[keys, dim]``.

    ACROSS: as a product of dim times keys, which has fewer instructions; in another kernel ptxas 12.8
    made one with an address that it never set.
    """
    if ACROSS:
        found = tl.trans(tl.dot(tl.trans(rows), tile, input_precision=PRECISION))
    else:
        found = tl.dot(tl.trans(tile), rows, input_precision=PRECISION)
    return found


@triton.jit
def _walk(
    sums, rest, of_a, of_b, of_key, of_value, query, grad,
    key, value, key_t, value_t, begin, turns, gap, lo, hi, lse,
    inner, a, b, scale, keys,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, LAG: tl.constexpr,
    MASKED: tl.constexpr, SLOPES: tl.constexpr, ACROSS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums`, and what rows give back to keys and values is added to theirs.

    Four strands, WIDTH // 4 keys of each a turn: only what the last keys left is handed on. Strands give
    nothing until their first key has come all the way, and then something every turn: of each step for
    other keys, but for as many, and where a strand stops the next has begun.
    """
    KEYS: tl.constexpr = WIDTH // 4
    HALO: tl.constexpr = LAG + STEPS
    BEFORE: tl.constexpr = (2 * HALO + KEYS - 1) // KEYS
    column = tl.arange(0, WIDTH)
    start = _begins(tl.arange(0, 4), begin, turns * KEYS, gap)
    each = _begins(column % 8 // 2, begin, turns * KEYS, gap) + (column // 8 * 2 + column % 2)
    moving = zeros(ROWS, 4, 2 * STEPS, tl.float32)
    past = zeros(ROWS, 4, STEPS * (LAG + 1), tl.float32)
    back = zeros(ROWS, 4, 2 * STEPS, tl.float32)
    for turn in range(-BEFORE, 0):
        p = turn * KEYS + HALO
        at, met = within(each + p, keys), within(each + (p - LAG), keys)
        tile = rows_of(key, key_t, at, at >= 0, DIM, COLUMNS)
        met_tile = rows_of(value, value_t, met, met >= 0, DEPTH, DEEP)
        x = first_weights(query, tile, each + p, lo, hi, lse, scale, MASKED, 0, PRECISION)
        y = tl.dot(grad, tl.trans(met_tile), input_precision=PRECISION)
        _, _, moving, past, back, _, _ = _turn(
            _apart(x, KEYS), _apart(y, KEYS), moving, past, back, 0.0, 0.0, a, b, start + p, lo, hi,
            STEPS, LAG, KEYS, MASKED, False,
        )  # fmt: skip
    for turn in range(turns):
        p = turn * KEYS + HALO
        at, met, there = each + p, each + (p - LAG), each + (p - HALO)
        if MASKED:
            at, met, there = within(at, keys), within(met, keys), within(there, keys)
        tile = rows_of(key, key_t, at, at >= 0, DIM, COLUMNS)
        met_tile = rows_of(value, value_t, met, met >= 0, DEPTH, DEEP)
        back_tile = rows_of(key, key_t, there, there >= 0, DIM, COLUMNS)
        x = first_weights(query, tile, each + p, lo, hi, lse, scale, MASKED, 0, PRECISION)
        y = tl.dot(grad, tl.trans(met_tile), input_precision=PRECISION)
        bare = past
        levels, ys, moving, past, back, of_a, of_b = _turn(
            _apart(x, KEYS), _apart(y, KEYS), moving, past, back, of_a, of_b, a, b, start + p, lo, hi,
            STEPS, LAG, KEYS, MASKED, SLOPES,
        )  # fmt: skip
        slopes = ()
        for k in tl.static_range(KEYS):
            if k < HALO:
                slope = bare[k] * (ys[k] - inner[:, None])
            else:
                slope = levels[k - HALO] * (ys[k] - inner[:, None])
            rest += slope
            slopes = slopes + (slope,)
        stepped = _together(levels, STEPS * KEYS, KEYS)
        if MASKED:
            at = each + (p - STEPS)
            stepped = tl.where((at[None, :] >= lo[:, None]) & (at[None, :] <= hi[:, None]), stepped, 0.0)
        found = _returned(stepped.to(grad.dtype), grad, ACROSS, PRECISION)
        _add(of_value, each + (p - STEPS), found, keys, DEPTH, DEEP, MASKED)
        slope = _together(slopes, 0, KEYS).to(query.dtype)
        found = _returned(slope, query, ACROSS, PRECISION)
        _add(of_key, each + (p - HALO), found, keys, DIM, COLUMNS, MASKED)
        sums = passed(tl.dot(slope, back_tile, sums, input_precision=PRECISION))
    return sums, rest, of_a, of_b


@triton.jit
def once_kernel(
    grad, query, key, value, out, mean, lse, spread, growth,
    first, last, of_query, of_rest, of_key, of_value, parts,
    scale, queries, keys, heads,
    grad_b, grad_h, grad_t, query_b, query_h, query_t,
    key_b, key_h, key_t, value_b, value_h, value_t,
    out_b, out_h, out_t, mean_b, mean_h, mean_t,
    found_b, found_h, found_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, LAG: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, SLOPES: tl.constexpr, ACROSS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of some rows' queries, and what they add to those of keys and values, in one walk.

    A row's inner product is known when its walk is over: `rest` of it is missing in the gradients of
    keys, and these are still to be multiplied by scale.
    """
    scale = single(scale)
    blocks = tl.cdiv(queries, ROWS)
    pair, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    at, real = tl.minimum(row, queries - 1), row < queries
    grad += batch * grad_b + head * grad_h
    query += batch * query_b + head * query_h
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    out += batch * out_b + head * out_h
    of_key += pair.to(tl.int64) * keys * DIM
    of_value += pair.to(tl.int64) * keys * DEPTH
    a, b = tl.load(spread + head), tl.load(growth + head)
    lo, hi = limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    line = pair.to(tl.int64) * queries
    lse = tl.load(lse + line + at)
    own = rows_of(query, query_t, at, at >= 0, DIM, COLUMNS)
    slope = rows_of(grad, grad_t, at, real, DEPTH, DEEP)
    inner = rows_of(out, out_t, at, real, DEPTH, DEEP).to(tl.float32)
    inner = tl.sum(inner * slope.to(tl.float32), 1)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    rest = tl.zeros([ROWS, 4], dtype=tl.float32)
    of_a = tl.zeros([ROWS, 4], dtype=tl.float32)
    of_b = tl.zeros([ROWS, 4], dtype=tl.float32)
    # Strands that no wall of any row is in reach of; then two before them, and two after.
    start, turns = free_strands(lo, hi, LAG + STEPS, WIDTH)
    begin, end = tl.min(lo, 0) - LAG - STEPS, tl.max(hi, 0) + 1
    if turns == 0:
        start = (begin + end) // 2
    gap = turns * WIDTH
    few = tl.maximum(tl.cdiv(tl.maximum(start - begin, end - start - gap), WIDTH // 2), 0)
    if turns > 0:
        sums, rest, of_a, of_b = _walk(
            sums, rest, of_a, of_b, of_key, of_value, own, slope, key, value, key_t, value_t, start,
            turns, 0, lo, hi, lse, inner, a, b, scale, keys, DIM, DEPTH, ROWS, WIDTH, COLUMNS, DEEP,
            STEPS, LAG, False, SLOPES, ACROSS, PRECISION,
        )  # fmt: skip
    sums, rest, of_a, of_b = _walk(
        sums, rest, of_a, of_b, of_key, of_value, own, slope, key, value, key_t, value_t,
        start - few * (WIDTH // 2), few, gap, lo, hi, lse, inner, a, b, scale, keys, DIM, DEPTH, ROWS,
        WIDTH, COLUMNS, DEEP, STEPS, LAG, True, SLOPES, ACROSS, PRECISION,
    )  # fmt: skip
    left = tl.sum(rest, 1)
    tl.store(of_rest + line + row, left, mask=real)
    column = tl.arange(0, COLUMNS)
    mean += batch * mean_b + head * mean_h
    sums -= left[:, None] * rows_of(mean, mean_t, at, real, DIM, COLUMNS).to(tl.float32)
    where = batch * found_b + head * found_h + row.to(tl.int64)[:, None] * found_t + column[None, :]
    inside = real[:, None] & (column < DIM)[None, :]
    tl.store(of_query + where, (sums * scale).to(of_query.dtype.element_ty), mask=inside)
    if SLOPES:
        parts += tl.program_id(0).to(tl.int64) * 2
        tl.store(parts, tl.sum(tl.sum(tl.where(real[:, None], of_a, 0.0), 1), 0))
        tl.store(parts + 1, tl.sum(tl.sum(tl.where(real[:, None], of_b, 0.0), 1), 0))
