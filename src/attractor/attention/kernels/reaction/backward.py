"""Backward kernel: keys are visited once, with steps and adjoint steps. Torch twin: `engines.tiled`.

As in `forward`, but with four segments, and several neighbouring keys of each per iteration. Most of
what a step needs is then in the same iteration, and little is carried to the next. Adjoint steps follow
LAG keys behind, so that the weights that they need have been computed. The columns of a tile are
segments and keys, in an order in which all keys of a segment belong to one thread: `_split` and `_join`
move no data.

The gradient of a softmax needs the inner product of the weights of a row and their gradients. The steps
are not linear, so it is not ``delta``, the inner product of the output and its gradient, but close to
it. A visit subtracts `delta` and returns the remainder, ``excess``, which is known at the end of the
visit only: `excess` times the mean key completes the gradient of the query here, and `key_gradients`
completes the gradients of keys.

Several programs add to the gradients of the same keys and values by atomic additions, in any order. If
ORDERED, the programs of one launch add to separate buffers, and launches follow one another.
"""

# Kernel arguments have no types that mypy knows; tuples of tiles grow by addition only.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: RUF005

import triton
import triton.language as tl

from attractor.attention.kernels.reaction.device import (
    NVIDIA,
    inside,
    key_interval,
    load_rows,
    logistic,
    program_rows,
    reciprocal,
    store_rows,
    to_float32,
)
from attractor.attention.kernels.reaction.forward import (
    clamp_index,
    free_segments,
    initial_weights,
    zero_tiles,
)


@triton.jit
def _halves(x):
    """Return two tiles ``[rows, 4]`` of ``[rows, 2, 4]``."""
    return tl.split(tl.permute(x, 0, 2, 1))


@triton.jit
def _split(x, KEYS: tl.constexpr):
    """Return one tile ``[rows, 4]`` per key of ``[rows, 4 KEYS]``."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], KEYS // 2, 4, 2]))
    if KEYS == 4:
        a, c = _halves(even)
        b, d = _halves(odd)
        tiles = (a, b, c, d)
    else:
        even, even_2 = tl.split(tl.permute(tl.reshape(even, [x.shape[0], 2, 2, 4]), 0, 2, 3, 1))
        odd, odd_2 = tl.split(tl.permute(tl.reshape(odd, [x.shape[0], 2, 2, 4]), 0, 2, 3, 1))
        a, c = _halves(even)
        b, d = _halves(odd)
        e, g = _halves(even_2)
        f, h = _halves(odd_2)
        tiles = (a, b, c, d, e, f, g, h)
    return tiles


@triton.jit
def _stack(a, b):
    return tl.permute(tl.join(a, b), 0, 2, 1)


@triton.jit
def _join(tiles, FIRST: tl.constexpr, KEYS: tl.constexpr):
    """Return the inverse of `_split` for KEYS tiles of a tuple, from tile FIRST on."""
    ROWS: tl.constexpr = tiles[FIRST].shape[0]
    even = _stack(tiles[FIRST], tiles[FIRST + 2])
    odd = _stack(tiles[FIRST + 1], tiles[FIRST + 3])
    if KEYS == 8:
        even_2 = _stack(tiles[FIRST + 4], tiles[FIRST + 6])
        odd_2 = _stack(tiles[FIRST + 5], tiles[FIRST + 7])
        even = tl.reshape(tl.permute(tl.join(even, even_2), 0, 3, 1, 2), [ROWS, 4, 4])
        odd = tl.reshape(tl.permute(tl.join(odd, odd_2), 0, 3, 1, 2), [ROWS, 4, 4])
    return tl.reshape(tl.join(even, odd), [ROWS, 4 * KEYS])


@triton.jit
def _copy(x):
    """Return x as the result of an instruction of this iteration.

    The compiler does not overlap loops that carry a tile unchanged with their loads.
    """
    if NVIDIA:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=1
        )
    return x


@triton.jit
def _segment_starts(segment, begin, length, gap):
    """Return the first keys of four segments, with a gap after the second."""
    return begin + segment * length + tl.where(segment > 1, gap, 0)


@triton.jit
def _steps_and_adjoints(
    weights, grads, carry, history, adjoint_carry, dalpha, dbeta, alpha, beta, key, lo, hi,
    STEPS: tl.constexpr, LAG: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    BOUNDARY: tl.constexpr, COEFFICIENTS: tl.constexpr,
):  # fmt: skip
    """Take all steps and adjoint steps for KEYS neighbouring keys of every segment.

    An adjoint step, ``new = g (1 - 2 alpha + beta - 2 beta w) + alpha (left + right)``, needs the
    weights w before the step. LAG is the least for which none of them belongs to a later iteration.

    Args:
        weights: Initial weights of the keys from `key` on, one tile per key.
        grads: Gradients of the stepped weights of the keys LAG before those.
        carry, adjoint_carry: For every step and adjoint step, what its last two keys left.
        history: For every step s, the weights of the last LAG + STEPS - 2 s keys.

    Returns:
        Weights after 0, 1, ... steps, each of as many keys before; gradients of the initial weights of
        the keys LAG + STEPS before; the three tuples for the next iteration; dalpha and dbeta.
    """
    stay = 1 - 2 * alpha + beta
    levels, next_carry, next_history, next_adjoint_carry = weights, (), (), ()
    for s in tl.static_range(STEPS):
        partial, left_share = carry[2 * s], carry[2 * s + 1]
        for n in tl.static_range(KEYS):
            w = levels[s * KEYS + n]
            share = alpha * w
            right, left = share, left_share
            if MASKED:
                right = tl.where((key + (n - s))[None, :] > hi[:, None], left_share, share)
                left = tl.where((key + (n - s))[None, :] <= lo[:, None], share, left_share)
            levels = levels + (partial + right,)
            partial = w * (stay - beta * w) + left
            left_share = share
        next_carry = next_carry + (partial, left_share)
    for s in tl.static_range(STEPS):
        for n in tl.static_range(KEYS, KEYS + LAG + STEPS - 2 * s):
            if n < LAG + STEPS - 2 * s:
                next_history = next_history + (_copy(history[s * (LAG + STEPS + 1 - s) + n]),)
            else:
                next_history = next_history + (levels[s * KEYS + n - (LAG + STEPS - 2 * s)],)
    for s in tl.static_range(STEPS):
        own, before, after = adjoint_carry[2 * s], adjoint_carry[2 * s + 1], ()
        for n in tl.static_range(KEYS):
            place = key + (n - LAG - 1 - s)
            if n < 2 * s + 2 + LAG - STEPS:
                w = history[(STEPS - 1 - s) * (LAG + 2 + s) + n]
            else:
                w = levels[(STEPS - 1 - s) * KEYS + n - (2 * s + 2 + LAG - STEPS)]
            right, left = grads[n], before
            if MASKED:
                right = tl.where(place[None, :] >= hi[:, None], own, right)
                left = tl.where(place[None, :] <= lo[:, None], own, left)
            sides = left + right
            after = after + (own * (stay - 2 * beta * w) + alpha * sides,)
            if COEFFICIENTS:
                valid = w
                if MASKED:
                    valid = tl.where(inside(place, lo, hi), w, 0.0)
                dalpha += valid * (sides - 2 * own)
                if not BOUNDARY:
                    dbeta += own * (valid - valid * w)
            before, own = own, grads[n]
        next_adjoint_carry = next_adjoint_carry + (own, before)
        grads = after
    return levels, grads, next_carry, next_history, next_adjoint_carry, dalpha, dbeta


@triton.jit
def _atomic_add(x, row, update, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Add rows to those of x ``[rows, D]``, to which other programs add as well."""
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = x + (row[:, None] * D + column)
    if MASKED or D < BLOCK_D:
        mask = ((row >= 0) & (row < rows))[:, None] & (column < D)
        tl.atomic_add(pointers, update, mask=mask, sem="relaxed")
    else:
        tl.atomic_add(pointers, update, sem="relaxed")


@triton.jit
def _transposed_product(tile, rows, DIM_BY_KEYS: tl.constexpr, PRECISION: tl.constexpr):
    """Return tile ``[rows, keys]``, transposed, times rows ``[rows, D]``: ``[keys, D]``.

    DIM_BY_KEYS: Compute ``[D, keys]``, which takes fewer instructions. Not for a split equation, for
    which ptxas 12.8 compiles such a product with an address that it never sets.
    """
    if DIM_BY_KEYS:
        product = tl.trans(tl.dot(tl.trans(rows), tile, input_precision=PRECISION))
    else:
        product = tl.dot(tl.trans(tile), rows, input_precision=PRECISION)
    return product


@triton.jit
def _visit(
    acc, excess, dalpha, dbeta, dk, dv, q, do, k, v, stride_kn, stride_vn, begin, turns, gap, lo, hi,
    lse, delta, alpha, beta, gain, scale, keys,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STEPS: tl.constexpr, LAG: tl.constexpr,
    MASKED: tl.constexpr, BOUNDARY: tl.constexpr, COEFFICIENTS: tl.constexpr,
    DIM_BY_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Visit four segments of ``BLOCK_N // 4 * turns`` keys each, and add to all gradients.

    The first iterations only fill the carry, until the first key has taken all steps. Afterwards every
    iteration completes equally many keys of every step; where a segment ends, the next one begins.
    """
    KEYS: tl.constexpr = BLOCK_N // 4
    HALO: tl.constexpr = LAG + STEPS
    WARM_UP: tl.constexpr = (2 * HALO + KEYS - 1) // KEYS
    column = tl.arange(0, BLOCK_N)
    start = _segment_starts(tl.arange(0, 4), begin, turns * KEYS, gap)
    each = _segment_starts(column % 8 // 2, begin, turns * KEYS, gap) + (column // 8 * 2 + column % 2)
    carry = zero_tiles(BLOCK_M, 4, 2 * STEPS)
    history = zero_tiles(BLOCK_M, 4, STEPS * (LAG + 1))
    adjoint_carry = zero_tiles(BLOCK_M, 4, 2 * STEPS)
    for turn in range(-WARM_UP, 0):
        p = turn * KEYS + HALO
        key, lagging = clamp_index(each + p, keys), clamp_index(each + (p - LAG), keys)
        k_tile = load_rows(k, stride_kn, key, key >= 0, D, BLOCK_D)
        v_tile = load_rows(v, stride_vn, lagging, lagging >= 0, DV, BLOCK_DV)
        w = initial_weights(q, k_tile, each + p, lo, hi, lse, scale, MASKED, BOUNDARY, PRECISION)
        if BOUNDARY:
            w = logistic(w, gain)
        dw = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        _, _, carry, history, adjoint_carry, _, _ = _steps_and_adjoints(
            _split(w, KEYS), _split(dw, KEYS), carry, history, adjoint_carry, 0.0, 0.0, alpha, beta,
            start + p, lo, hi, STEPS, LAG, KEYS, MASKED, BOUNDARY, False,
        )  # fmt: skip
    for turn in range(turns):
        p = turn * KEYS + HALO
        key, lagging, done = each + p, each + (p - LAG), each + (p - HALO)
        if MASKED:
            key, lagging = clamp_index(key, keys), clamp_index(lagging, keys)
            done = clamp_index(done, keys)
        k_tile = load_rows(k, stride_kn, key, key >= 0, D, BLOCK_D)
        v_tile = load_rows(v, stride_vn, lagging, lagging >= 0, DV, BLOCK_DV)
        done_tile = load_rows(k, stride_kn, done, done >= 0, D, BLOCK_D)
        w = initial_weights(q, k_tile, each + p, lo, hi, lse, scale, MASKED, BOUNDARY, PRECISION)
        if BOUNDARY:
            w = logistic(w, gain)
        dw = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        earlier = history
        levels, grads, carry, history, adjoint_carry, dalpha, dbeta = _steps_and_adjoints(
            _split(w, KEYS), _split(dw, KEYS), carry, history, adjoint_carry, dalpha, dbeta, alpha, beta,
            start + p, lo, hi, STEPS, LAG, KEYS, MASKED, BOUNDARY, COEFFICIENTS,
        )  # fmt: skip
        before, dscores = (), ()
        if BOUNDARY:  # softmax weights, before the reaction
            place = each + (p - HALO)
            w = initial_weights(q, done_tile, place, lo, hi, lse, scale, MASKED, BOUNDARY, PRECISION)
            before = _split(w, KEYS)
        for n in tl.static_range(KEYS):
            if n < HALO:
                w = earlier[n]
            else:
                w = levels[n - HALO]
            dw = grads[n]
            if BOUNDARY:
                if COEFFICIENTS:
                    dbeta += dw * w * (1 - w)
                w = before[n]
                ratio = reciprocal(1 + w * (gain - 1))
                dw *= gain * ratio * ratio
            dscore = w * (dw - delta[:, None])
            excess += dscore
            dscores = dscores + (dscore,)
        stepped = _join(levels, STEPS * KEYS, KEYS)
        if MASKED:
            stepped = tl.where(inside(each + (p - STEPS), lo, hi), stepped, 0.0)
        update = _transposed_product(stepped.to(do.dtype), do, DIM_BY_KEYS, PRECISION)
        _atomic_add(dv, each + (p - STEPS), update, keys, DV, BLOCK_DV, MASKED)
        dscores = _join(dscores, 0, KEYS).to(q.dtype)
        update = _transposed_product(dscores, q, DIM_BY_KEYS, PRECISION)
        _atomic_add(dk, each + (p - HALO), update, keys, D, BLOCK_D, MASKED)
        acc = _copy(tl.dot(dscores, done_tile, acc, input_precision=PRECISION))
    return acc, excess, dalpha, dbeta


@triton.jit(do_not_specialize=["first_block", "launch_blocks", "blocks"])
def backward_kernel(
    do, q, k, v, o, k_mean, lse, alpha, beta, dq_interior, excess_interior, dq, excess, dk, dv,
    dcoefficients, scale, queries, keys, heads, first_block, launch_blocks, blocks,
    stride_gb, stride_gh, stride_gm, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_mb, stride_mh, stride_mm, stride_db, stride_dh, stride_dm,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STEPS: tl.constexpr, LAG: tl.constexpr,
    CAUSAL: tl.constexpr, BOUNDARY: tl.constexpr, ORDERED: tl.constexpr,
    COEFFICIENTS: tl.constexpr, DIM_BY_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a block of queries, and add to those of keys and values.

    The gradients of keys lack the factor `scale` and the correction by `excess`.

    BOUNDARY: Unless 0, the reaction acts first, exactly, and only the BOUNDARY last keys of every row
    are visited. `dq_interior`, with the strides of `dq`, and `excess_interior` have the sums over the
    other keys.
    ORDERED: The launch has `launch_blocks` of the `blocks` of rows, from `first_block`, and every
    program has its own buffer for gradients of keys and values. Otherwise the launch has all blocks.
    """
    scale = to_float32(scale)
    pair, batch, head, row = program_rows(first_block, launch_blocks, heads, BLOCK_M)
    at, valid = tl.minimum(row, queries - 1), row < queries
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    buffer = pair
    if ORDERED:
        buffer = tl.program_id(0).to(tl.int64)
    dk += buffer * keys * D
    dv += buffer * keys * DV
    a, b, gain = tl.load(alpha + head), tl.load(beta + head), 1.0
    if BOUNDARY:
        b, gain = 0.0, tl.exp(b)
    lo, hi = key_interval(at, keys, CAUSAL)
    lse = tl.load(lse + pair * queries + at)
    q = load_rows(q + batch * stride_qb + head * stride_qh, stride_qm, at, at >= 0, D, BLOCK_D)
    do = load_rows(do + batch * stride_gb + head * stride_gh, stride_gm, at, valid, DV, BLOCK_DV)
    o = load_rows(o + batch * stride_ob + head * stride_oh, stride_om, at, valid, DV, BLOCK_DV)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if BOUNDARY:
        dq_interior += batch * stride_db + head * stride_dh
        acc = load_rows(dq_interior, stride_dm, row, valid, D, BLOCK_D)
    remainder = tl.zeros([BLOCK_M, 4], dtype=tl.float32)
    dalpha = tl.zeros([BLOCK_M, 4], dtype=tl.float32)
    dbeta = tl.zeros([BLOCK_M, 4], dtype=tl.float32)
    # The segments that no wall of any row reaches come first, then two segments on either side of them.
    start, turns = free_segments(lo, hi, LAG + STEPS, BLOCK_N)
    begin, end = tl.min(lo, 0), tl.max(hi, 0) + 1
    if BOUNDARY:
        begin, turns = tl.maximum(begin, tl.min(hi, 0) + 1 - 2 * BOUNDARY), 0
    begin -= LAG + STEPS
    if turns == 0:
        start = (begin + end) // 2
    gap = turns * BLOCK_N
    edge_turns = tl.cdiv(tl.maximum(start - begin, end - start - gap), BLOCK_N // 2)
    edge_turns = tl.maximum(edge_turns, 0)
    if not BOUNDARY:  # noqa: SIM102  (known at compile time)
        if turns > 0:
            acc, remainder, dalpha, dbeta = _visit(
                acc, remainder, dalpha, dbeta, dk, dv, q, do, k, v, stride_kn, stride_vn, start, turns,
                0, lo, hi, lse, delta, a, b, gain, scale, keys, D, DV, BLOCK_M, BLOCK_N, BLOCK_D,
                BLOCK_DV, STEPS, LAG, False, BOUNDARY, COEFFICIENTS, DIM_BY_KEYS, PRECISION,
            )  # fmt: skip
    acc, remainder, dalpha, dbeta = _visit(
        acc, remainder, dalpha, dbeta, dk, dv, q, do, k, v, stride_kn, stride_vn,
        start - edge_turns * (BLOCK_N // 2), edge_turns, gap, lo, hi, lse, delta, a, b, gain, scale,
        keys, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, STEPS, LAG, True, BOUNDARY, COEFFICIENTS,
        DIM_BY_KEYS, PRECISION,
    )  # fmt: skip
    row_excess = tl.sum(remainder, 1)
    if BOUNDARY:
        row_excess += tl.load(excess_interior + pair * queries + row, mask=valid, other=0.0)
    tl.store(excess + pair * queries + row, row_excess, mask=valid)
    k_mean += batch * stride_mb + head * stride_mh
    acc -= row_excess[:, None] * load_rows(k_mean, stride_mm, at, valid, D, BLOCK_D).to(tl.float32)
    dq += batch * stride_db + head * stride_dh
    store_rows(dq, stride_dm, row, acc * scale, valid, D, BLOCK_D)
    if COEFFICIENTS:
        block = first_block + launch_blocks - 1 - tl.program_id(0) % launch_blocks
        dcoefficients += (pair * blocks + block) * 2
        tl.store(dcoefficients, tl.sum(tl.sum(tl.where(valid[:, None], dalpha, 0.0), 1), 0))
        tl.store(dcoefficients + 1, tl.sum(tl.sum(tl.where(valid[:, None], dbeta, 0.0), 1), 0))
