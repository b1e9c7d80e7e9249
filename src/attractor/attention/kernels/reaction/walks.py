"""Kernels that walk along strands of keys and step their weights on the way.

    turn p:   weights of key p of every strand     ``[rows, strands]``, a product of matrices
              step 1 of key p - 1, step 2 of key p - 2, ..., each from what three turns left behind
              stepped weights of key p - steps, times its values: a product of matrices

So a key's neighbours are the tiles of the turns before and after, and a stencil is arithmetic of tiles
in single precision: nothing is shifted, and of every strand only a halo is done twice. Backward walks
the same way: adjoint steps follow so many turns behind that the weights of every step have been there,
and a few turns of them are kept (`_turn`). Walls are mirrors: beyond one a key sees its own weight.

Most keys are out of reach of all walls of some rows, and take a walk without masks; those at the edges
another. Loops that hand a tile on as it is are not overlapped with their loads by the compiler, hence
`passed`.
"""

# Arguments of kernels have no types that mypy could know; tuples of tiles grow, by addition alone.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: RUF005

import triton
import triton.language as tl

from attractor.attention.kernels.reaction.weights import (
    NVIDIA,
    inverse,
    limits,
    logistic,
    rows_of,
    single,
    weights,
)


@triton.jit
def within(at, count):
    """The nearest places that there are."""
    return tl.minimum(tl.maximum(at, 0), count - 1)


@triton.jit
def first_weights(
    query, tile, here, lo, hi, lse, scale,
    MASKED: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of keys `here`; MASKED: 0 but in a row's interval; NEAR: and but near its end."""
    x = weights(query, tile, scale, lse, PRECISION)
    if MASKED:
        x = tl.where((here[None, :] >= lo[:, None]) & (here[None, :] <= hi[:, None]), x, 0.0)
    if NEAR:
        x = tl.where(here[None, :] > hi[:, None] - NEAR, x, 0.0)
    return x


@triton.jit
def zeros(ROWS: tl.constexpr, STRANDS: tl.constexpr, COUNT: tl.constexpr, TYPE: tl.constexpr):
    """So many tiles of nothing."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([ROWS, STRANDS], dtype=TYPE),)
    return tiles


@triton.jit
def free_strands(lo, hi, HALO: tl.constexpr, STRANDS: tl.constexpr):
    """(first key, turns) of strands that no wall of any row is in reach of."""
    start = tl.max(lo, 0) + HALO + 1
    return start, tl.maximum(tl.min(hi, 0) + 1 - HALO - start, 0) // STRANDS


@triton.jit
def _other_strands(lo, hi, start, turns, STRANDS: tl.constexpr, NEAR: tl.constexpr):
    """(first keys, one past the last, turns) of strands for what those leave, half of them before.

    NEAR: only the keys that weight of the last NEAR keys of a row can come to.
    """
    HALF: tl.constexpr = STRANDS // 2
    strand = tl.arange(0, STRANDS)
    begin, end = tl.min(lo, 0), tl.max(hi, 0) + 1
    if NEAR:
        begin = tl.maximum(begin, tl.min(hi, 0) + 1 - 2 * NEAR)
        start, turns = begin, 0
    elif turns == 0:
        start = (begin + end) // 2
    left, right = tl.cdiv(start - begin, HALF), tl.cdiv(end - start - turns * STRANDS, HALF)
    left, right = tl.maximum(left, 0), tl.maximum(right, 0)
    before = strand < HALF
    first = tl.where(before, begin + strand * left, start + turns * STRANDS + (strand - HALF) * right)
    stop = tl.where(before, tl.minimum(first + left, start), tl.minimum(first + right, end))
    return first, stop, tl.maximum(left, right)


@triton.jit
def _advance(
    x, moving, a, b, here, lo, hi,
    STEPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Weights after 0, 1, ... steps, each of one key before, and what the next turn needs of them.

    ``new = x (1 - 2 a + b - b x) + a (left + right)``: `moving` has, for every step, all but the right
    neighbour's part for the key before, and its own weight times a.
    """
    free = 1 - 2 * a + b
    levels, after = (x,), ()
    for s in tl.static_range(STEPS):
        share, given = a * x, moving[2 * s + 1]
        right, left = share, given
        if MASKED:
            right = tl.where((here - s)[None, :] > hi[:, None], given, share)
            left = tl.where((here - s)[None, :] <= lo[:, None], share, given)
        new = moving[2 * s] + right
        after = after + (x * (free - b * x) + left, share)
        levels = levels + (new,)
        x = new
    return levels, after


@triton.jit
def _forward_walk(
    sums, query, key, value, key_t, value_t, start, stop,
    turns, lo, hi, lse, a, b, grown, scale, keys,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, STRANDS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, MASKED: tl.constexpr,
    NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` ``[rows, value dim]`` with the values of the strands' keys, times stepped weights."""
    moving = zeros(ROWS, STRANDS, 2 * STEPS, tl.float32)
    for p in tl.range(-STEPS, turns + STEPS, loop_unroll_factor=1 if MASKED else 2):
        here = start + p
        there = here - STEPS
        own = (there >= start) & (there < stop)
        tile = rows_of(key, key_t, within(here, keys), here < keys, DIM, COLUMNS)
        x = first_weights(query, tile, here, lo, hi, lse, scale, MASKED, NEAR, PRECISION)
        if NEAR:
            x = logistic(x, grown)
        levels, moving = _advance(x, moving, a, b, here, lo, hi, STEPS, MASKED)
        x = levels[STEPS]
        if MASKED:
            x = tl.where((there[None, :] >= lo[:, None]) & (there[None, :] <= hi[:, None]), x, 0.0)
        met = rows_of(value, value_t, there, own, DEPTH, DEEP)
        sums = tl.dot(x.to(met.dtype), met, sums, input_precision=PRECISION)
    return sums


@triton.jit
def forward_kernel(
    query, key, value, lse, spread, growth, first, last,
    onto, out, scale, queries, keys, heads,
    query_b, query_h, query_t, key_b, key_h, key_t,
    value_b, value_h, value_t, out_b, out_h, out_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, STRANDS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr,
    INTERVALS: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one head."""
    scale = single(scale)
    blocks = tl.cdiv(queries, ROWS)
    pair, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    at = tl.minimum(row, queries - 1)
    query += batch * query_b + head * query_h
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    a, b, grown = tl.load(spread + head), tl.load(growth + head), 1.0
    if NEAR:
        b, grown = 0.0, tl.exp(b)
    lo, hi = limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    lse = tl.load(lse + pair.to(tl.int64) * queries + at)
    own = rows_of(query, query_t, at, at >= 0, DIM, COLUMNS)
    sums = tl.zeros([ROWS, DEEP], dtype=tl.float32)
    deep = tl.arange(0, DEEP)
    where = batch * out_b + head * out_h + row.to(tl.int64)[:, None] * out_t + deep[None, :]
    inside = (row < queries)[:, None] & (deep < DEPTH)[None, :]
    if NEAR:
        sums = tl.load(onto + where, mask=inside, other=0.0)
    start, turns = free_strands(lo, hi, STEPS, STRANDS)
    edges, stop, rest = _other_strands(lo, hi, start, turns, STRANDS, NEAR)
    if not NEAR:  # noqa: SIM102  (known when compiled)
        if turns > 0:
            strand = start + turns * tl.arange(0, STRANDS)
            sums = _forward_walk(
                sums, own, key, value, key_t, value_t, strand, strand + turns, turns, lo, hi, lse, a, b,
                grown, scale, keys, DIM, DEPTH, ROWS, STRANDS, COLUMNS, DEEP, STEPS, False, NEAR,
                PRECISION,
            )  # fmt: skip
    sums = _forward_walk(
        sums, own, key, value, key_t, value_t, edges, stop, rest, lo, hi, lse, a, b, grown, scale, keys,
        DIM, DEPTH, ROWS, STRANDS, COLUMNS, DEEP, STEPS, True, NEAR, PRECISION,
    )  # fmt: skip
    tl.store(out + where, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tiles(
    key, value, key_t, value_t, here, start, keys,
    DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
    LAG: tl.constexpr, HALO: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What a turn reads: the keys `here`, those HALO before, and the values of those LAG before."""
    there = here - HALO
    if not MASKED:  # earlier ones do not count, and need not be keys of all rows
        there = tl.maximum(there, start)
    here, met, there = within(here, keys), within(here - LAG, keys), within(there, keys)
    return (
        rows_of(key, key_t, here, here >= 0, DIM, COLUMNS),
        rows_of(key, key_t, there, there >= 0, DIM, COLUMNS),
        rows_of(value, value_t, met, met >= 0, DEPTH, DEEP),
    )


@triton.jit
def _empty(ROWS: tl.constexpr, STRANDS: tl.constexpr, COUNT: tl.constexpr, TYPE: tl.constexpr):
    """So many tiles of nothing, as `_hold` leaves them."""
    if NVIDIA and TYPE != tl.float32:  # noqa: SIM300
        tiles = zeros(ROWS, STRANDS // 2, COUNT, tl.int32)
    else:
        tiles = zeros(ROWS, STRANDS, COUNT, TYPE)
    return tiles


@triton.jit
def _hold(x, TYPE: tl.constexpr):
    """A tile for later turns, with two halves in a register: left alone, the compiler takes one each."""
    if NVIDIA and TYPE != tl.float32:  # noqa: SIM300
        left, right = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        if TYPE == tl.bfloat16:  # noqa: SIM300
            tile = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [left, right], dtype=tl.int32, is_pure=True,
                pack=1,
            )  # fmt: skip
        else:
            tile = tl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [left, right], dtype=tl.int32, is_pure=True,
                pack=1,
            )  # fmt: skip
    else:
        tile = x.to(TYPE)
    return tile


@triton.jit
def _held(tile, TYPE: tl.constexpr):
    """What `_hold` was given, to the precision of TYPE."""
    if NVIDIA and TYPE != tl.float32:  # noqa: SIM300
        if TYPE == tl.bfloat16:  # noqa: SIM300
            left, right = tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [tile],
                dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            left, right = tl.inline_asm_elementwise(
                "{ .reg .b16 l, r; mov.b32 {l, r}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, r; }",
                "=&f,=f,r", [tile], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        x = tl.reshape(tl.join(left, right), [tile.shape[0], tile.shape[1] * 2])
    else:
        x = tile.to(tl.float32)
    return x


@triton.jit
def _fold(x):
    """Sums over some of the strands: those that a thread has, so that its sums take fewer registers."""
    x = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
    return tl.sum(tl.sum(x, 3), 1)


@triton.jit
def passed(x):
    """x itself, as something that this turn has made; sums of products are then waited for in it."""
    if NVIDIA:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=1
        )
    return x


@triton.jit
def _counts(turn, turns):
    """1 if the keys that strands have come to are their own, 0 if of a halo."""
    return tl.where((turn >= 0) & (turn < turns), 1.0, 0.0)


@triton.jit
def _turn(
    x, old, y, moving, past, back, of_a, of_b, a, b, p, turns, here, start, stop, lo, hi,
    STEPS: tl.constexpr, LAG: tl.constexpr, LEVELS: tl.constexpr, MASKED: tl.constexpr,
    NEAR: tl.constexpr, SLOPES: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """One turn of a backward walk.

    Adjoint steps, ``new = y (1 - 2 a + b - 2 b x) + a (left + right)``, need the weights x that the step
    had: `past` has, for every step but the first, those of the last LAG + STEPS - 2 s turns. LAG is just
    so long that none would have to come from a turn to come.

    Args:
        x: first weights of the keys `here`.
        old: first weights of the keys LAG + STEPS before: made again, for keeping them takes more room.
        y: gradients of the stepped weights of the keys LAG before.
        moving, past, back: what earlier turns left for steps, and for adjoint steps.
        of_a, of_b: sums of gradients of the coefficients, over strands' own keys.

    Returns:
        Gradients of the first weights of the keys LAG + STEPS before; weights after LEVELS steps of the
        keys LEVELS before; the tuples and sums for the next turn.
    """
    free = 1 - 2 * a + b
    levels, moving = _advance(x, moving, a, b, here, lo, hi, LEVELS, MASKED)
    kept, held = (), (old,)
    for s in tl.static_range(1, STEPS):
        if LAG + STEPS - 2 * s == 0:
            held = held + (levels[s],)
        else:
            held = held + (_held(past[s * (LAG + STEPS + 1 - s) - LAG - STEPS], HELD),)
            for n in tl.static_range(1, LAG + STEPS - 2 * s):
                kept = kept + (passed(past[s * (LAG + STEPS + 1 - s) - LAG - STEPS + n]),)
            kept = kept + (_hold(levels[s], HELD),)
    after = ()
    for n in tl.static_range(STEPS):
        there = here - (LAG + 1 + n)
        x, own, before = held[STEPS - 1 - n], back[2 * n], back[2 * n + 1]
        right, left = y, before
        if MASKED:
            right = tl.where(there[None, :] >= hi[:, None], own, y)
            left = tl.where(there[None, :] <= lo[:, None], own, before)
        sides = left + right
        after = after + (y, passed(own))
        y = own * (free - 2 * b * x) + a * sides
        if SLOPES:
            if MASKED:
                counted = ((there >= start) & (there < stop))[None, :]
                ok = (there[None, :] >= lo[:, None]) & (there[None, :] <= hi[:, None])
                mine = tl.where(ok & counted, x, 0.0)
            else:
                mine = x * _counts(p - (LAG + 1 + n), turns)
            of_a += _fold(mine * (sides - 2 * own))
            if not NEAR:
                of_b += _fold(own * (mine - mine * x))
    return y, levels[LEVELS], moving, kept, after, of_a, of_b


@triton.jit
def _rows_walk(
    sums, rest, of_a, of_b, query, grad, key, value, key_t,
    value_t, start, stop, turns, lo, hi, lse, inner, a,
    b, grown, scale, keys,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, STRANDS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, LAG: tl.constexpr,
    MASKED: tl.constexpr, NEAR: tl.constexpr, SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` with the strands' keys, times gradients of their scores, and `rest` with those alone."""
    HALO: tl.constexpr = LAG + STEPS
    HELD: tl.constexpr = query.dtype
    moving = zeros(ROWS, STRANDS, 2 * (STEPS - 1), tl.float32)
    past = _empty(ROWS, STRANDS, STEPS * LAG - LAG, HELD)
    back = zeros(ROWS, STRANDS, 2 * STEPS, tl.float32)
    for p in range(-HALO, turns + HALO):
        here, there = start + p, start + (p - HALO)
        tile, back_tile, met = _tiles(
            key, value, key_t, value_t, here, start, keys, DIM, DEPTH, COLUMNS, DEEP, LAG, HALO, MASKED
        )
        x = first_weights(query, tile, here, lo, hi, lse, scale, MASKED, NEAR, PRECISION)
        bare = first_weights(query, back_tile, there, lo, hi, lse, scale, MASKED, NEAR, PRECISION)
        y = tl.dot(grad, tl.trans(met), input_precision=PRECISION)
        old = bare
        if NEAR:
            x, old = logistic(x, grown), logistic(bare, grown)
        y, _, moving, past, back, of_a, of_b = _turn(
            x, old, y, moving, past, back, of_a, of_b, a, b, p, turns, here, start, stop, lo, hi,
            STEPS, LAG, STEPS - 1, MASKED, NEAR, SLOPES, HELD,
        )  # fmt: skip
        own = (there >= start) & (there < stop)
        if NEAR:
            if SLOPES:
                of_b += _fold(tl.where(own[None, :], y * old * (1 - old), 0.0))
            part = inverse(1 + bare * (grown - 1))
            y *= grown * part * part
        slope = bare * (y - inner[:, None])
        if MASKED:
            slope = tl.where(own[None, :], slope, 0.0)
        else:
            slope *= _counts(p - HALO, turns)
        rest += tl.sum(slope, 1)
        sums = passed(tl.dot(slope.to(back_tile.dtype), back_tile, sums, input_precision=PRECISION))
    return sums, rest, of_a, of_b


@triton.jit
def rows_kernel(
    grad, query, key, value, out, mean, lse, spread,
    growth, first, last, onto, onto_rest, of_query, total,
    parts, scale, queries, keys, heads,
    grad_b, grad_h, grad_t, query_b, query_h, query_t,
    key_b, key_h, key_t, value_b, value_h, value_t,
    out_b, out_h, out_t, mean_b, mean_h, mean_t,
    found_b, found_h, found_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, STRANDS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, LAG: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, NEAR: tl.constexpr, SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of some rows' queries, their inner products, and a part of those of the coefficients."""
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
    a, b, grown = tl.load(spread + head), tl.load(growth + head), 1.0
    if NEAR:
        b, grown = 0.0, tl.exp(b)
    lo, hi = limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    line = pair.to(tl.int64) * queries
    lse = tl.load(lse + line + at)
    own = rows_of(query, query_t, at, at >= 0, DIM, COLUMNS)
    slope = rows_of(grad, grad_t, at, real, DEPTH, DEEP)
    inner = rows_of(out, out_t, at, real, DEPTH, DEEP).to(tl.float32)
    inner = tl.sum(inner * slope.to(tl.float32), 1)
    column = tl.arange(0, COLUMNS)
    inside = real[:, None] & (column < DIM)[None, :]
    where = batch * found_b + head * found_h + row.to(tl.int64)[:, None] * found_t + column[None, :]
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    rest = tl.zeros([ROWS], dtype=tl.float32)
    if NEAR:
        sums = tl.load(onto + where, mask=inside, other=0.0)
        rest = tl.load(onto_rest + line + row, mask=real, other=0.0)
    of_a = tl.zeros([ROWS, 4], dtype=tl.float32)
    of_b = tl.zeros([ROWS, 4], dtype=tl.float32)
    start, turns = free_strands(lo, hi, LAG + STEPS, STRANDS)
    edges, stop, few = _other_strands(lo, hi, start, turns, STRANDS, NEAR)
    if not NEAR:  # noqa: SIM102  (known when compiled)
        if turns > 0:
            strand = start + turns * tl.arange(0, STRANDS)
            sums, rest, of_a, of_b = _rows_walk(
                sums, rest, of_a, of_b, own, slope, key, value, key_t, value_t, strand, strand + turns,
                turns, lo, hi, lse, inner, a, b, grown, scale, keys, DIM, DEPTH, ROWS, STRANDS, COLUMNS,
                DEEP, STEPS, LAG, False, NEAR, SLOPES, PRECISION,
            )  # fmt: skip
    sums, rest, of_a, of_b = _rows_walk(
        sums, rest, of_a, of_b, own, slope, key, value, key_t, value_t, edges, stop, few, lo, hi, lse,
        inner, a, b, grown, scale, keys, DIM, DEPTH, ROWS, STRANDS, COLUMNS, DEEP, STEPS, LAG, True,
        NEAR, SLOPES, PRECISION,
    )  # fmt: skip
    mean += batch * mean_b + head * mean_h
    sums -= rest[:, None] * rows_of(mean, mean_t, at, real, DIM, COLUMNS).to(tl.float32)
    tl.store(of_query + where, (sums * scale).to(of_query.dtype.element_ty), mask=inside)
    tl.store(total + line + row, rest + inner, mask=real)
    if SLOPES:
        parts += tl.program_id(0).to(tl.int64) * 2
        tl.store(parts, tl.sum(tl.sum(tl.where(real[:, None], of_a, 0.0), 1), 0))
        tl.store(parts + 1, tl.sum(tl.sum(tl.where(real[:, None], of_b, 0.0), 1), 0))


@triton.jit
def _keys_walk(
    query, grad, key, value, of_key, of_value, key_t, value_t,
    start, stop, turns, lo, hi, lse, total, a, b,
    grown, scale, keys,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, STRANDS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, LAG: tl.constexpr,
    MASKED: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what some rows give back to the strands' keys and values, which nobody else adds to."""
    HALO: tl.constexpr = LAG + STEPS
    HELD: tl.constexpr = query.dtype
    moving = zeros(ROWS, STRANDS, 2 * STEPS, tl.float32)
    past = _empty(ROWS, STRANDS, STEPS * LAG - LAG, HELD)
    back = zeros(ROWS, STRANDS, 2 * STEPS, tl.float32)
    column, deep = tl.arange(0, COLUMNS)[None, :], tl.arange(0, DEEP)[None, :]
    for p in range(-HALO, turns + HALO):
        here, there = start + p, start + (p - HALO)
        tile, back_tile, met = _tiles(
            key, value, key_t, value_t, here, start, keys, DIM, DEPTH, COLUMNS, DEEP, LAG, HALO, MASKED
        )
        x = first_weights(query, tile, here, lo, hi, lse, scale, MASKED, NEAR, PRECISION)
        bare = first_weights(query, back_tile, there, lo, hi, lse, scale, MASKED, NEAR, PRECISION)
        y = tl.dot(grad, tl.trans(met), input_precision=PRECISION)
        old = bare
        if NEAR:
            x, old = logistic(x, grown), logistic(bare, grown)
        y, stepped, moving, past, back, _, _ = _turn(
            x, old, y, moving, past, back, 0.0, 0.0, a, b, p, turns, here, start, stop, lo, hi, STEPS,
            LAG, STEPS, MASKED, NEAR, False, HELD,
        )  # fmt: skip
        at = here - STEPS
        own = (at >= start) & (at < stop)
        if MASKED:
            ok = (at[None, :] >= lo[:, None]) & (at[None, :] <= hi[:, None])
            stepped = tl.where(ok, stepped, 0.0)
        # Strands times dim: of dim times strands ptxas 12.8 makes products with an address it never set.
        found = tl.dot(tl.trans(stepped).to(grad.dtype), grad, input_precision=PRECISION)
        where = of_value + (at[:, None] * DEPTH + deep)
        tl.atomic_add(where, found, mask=own[:, None] & (deep < DEPTH), sem="relaxed")
        own = (there >= start) & (there < stop)
        if NEAR:
            part = inverse(1 + bare * (grown - 1))
            y *= grown * part * part
        slope = bare * (y - total[:, None])
        found = tl.dot(tl.trans(slope).to(query.dtype), query, input_precision=PRECISION) * scale
        where = of_key + (there[:, None] * DIM + column)
        tl.atomic_add(where, found, mask=own[:, None] & (column < DIM), sem="relaxed")


@triton.jit
def keys_kernel(
    grad, query, key, value, lse, total, spread, growth,
    first, last, of_key, of_value, scale, queries, keys, heads,
    turns, grad_b, grad_h, grad_t, query_b, query_h, query_t,
    key_b, key_h, key_t, value_b, value_h, value_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, STRANDS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, LAG: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, NEAR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A run of keys of one head, for all rows, one block of them after the other."""
    scale = single(scale)
    HALO: tl.constexpr = LAG + STEPS
    size = turns * STRANDS
    runs = tl.cdiv(keys, size)
    pair, run = tl.program_id(0) // runs, tl.program_id(0) % runs
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    grad += batch * grad_b + head * grad_h
    query += batch * query_b + head * query_h
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    of_key += pair.to(tl.int64) * keys * DIM
    of_value += pair.to(tl.int64) * keys * DEPTH
    a, b, grown = tl.load(spread + head), tl.load(growth + head), 1.0
    if NEAR:
        b, grown = 0.0, tl.exp(b)
    line = pair.to(tl.int64) * queries
    begin = run * size
    end = begin + size
    start = begin + turns * tl.arange(0, STRANDS)
    stop = tl.minimum(start + turns, keys)
    top, bottom = 0, tl.cdiv(queries, ROWS)
    if CAUSAL:
        top = begin // ROWS
        if NEAR and not INTERVALS:
            bottom = tl.minimum(bottom, tl.cdiv(end + 2 * NEAR, ROWS))
    for block in range(top, bottom):
        row = block * ROWS + tl.arange(0, ROWS)
        at, real = tl.minimum(row, queries - 1), row < queries
        lo, hi = limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
        low, high = tl.min(hi, 0), tl.max(hi, 0)
        reached = (high >= begin) & (tl.min(lo, 0) < end)
        if NEAR:
            reached = reached & (low + 1 - 2 * NEAR < end)
        if reached:
            weight = tl.load(lse + line + at)
            inner = tl.load(total + line + at, mask=real, other=0.0)
            own = rows_of(query, query_t, at, at >= 0, DIM, COLUMNS)
            slope = rows_of(grad, grad_t, at, real, DEPTH, DEEP)
            free = (tl.max(lo, 0) < begin - HALO) & (low >= end + HALO - 1)
            if free and not NEAR:
                _keys_walk(
                    own, slope, key, value, of_key, of_value, key_t, value_t, start, stop, turns, lo,
                    hi, weight, inner, a, b, grown, scale, keys, DIM, DEPTH, ROWS, STRANDS, COLUMNS,
                    DEEP, STEPS, LAG, NEAR > 0, NEAR, PRECISION,
                )  # fmt: skip
            else:
                _keys_walk(
                    own, slope, key, value, of_key, of_value, key_t, value_t, start, stop, turns, lo,
                    hi, weight, inner, a, b, grown, scale, keys, DIM, DEPTH, ROWS, STRANDS, COLUMNS,
                    DEEP, STEPS, LAG, True, NEAR, PRECISION,
                )  # fmt: skip
