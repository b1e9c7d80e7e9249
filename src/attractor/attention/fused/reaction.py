"""Reaction-diffusion attention in O(T) memory: the map flows through registers while it is stepped.

A row's keys are cut into strands, runs of neighbours that are walked at the same time, one key a turn:

    turn p:   weights of key p of every strand     ``[rows, strands]``, a product of matrices
              step 1 of key p - 1, step 2 of key p - 2, ..., each from what three turns left behind
              stepped weights of key p - steps, times its values: a product of matrices

So a key's neighbours are the tiles of the turns before and after, and a stencil is arithmetic of tiles
in single precision: nothing is shifted, and of every strand only a halo is done twice. Backward walks
the same way: adjoint steps follow so many turns behind that the weights of every step have been there,
and a few turns of them are kept (`_turn`). Walls are mirrors: beyond one a key sees its own weight.

Rows may attend to an interval of keys: of the sequence, up to their own (causal), or as given. Most keys
are out of reach of all walls of some rows, and take a walk without masks; those at the edges another.

Split (the exact reaction first, then diffusion alone), values are stepped instead: one product over keys
far from a causal wall (`_far`), and a walk for those near it.

Gradients are summed in a fixed order by programs that own them. A softmax's backward needs the inner
product of weights and their gradients; as the map is not linear it is not that of output and gradient,
but near it: the latter is subtracted first, and the rest times the mean key later.
"""

# Arguments of kernels have no types that mypy could know; tuples of tiles grow, by addition alone.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: RUF005

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from attractor.attention import flash
from attractor.attention.fused import INTERPRETED, stepped_values
from attractor.attention.fused.values import by_rows, operator, strides
from attractor.attention.masks import Scope
from attractor.attention.pdes import Diffusion, ReactionDiffusion

STEPS = 8  # the most that are taken: every one holds tiles in registers
DIM = 128  # the deepest head
TYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2E = tl.constexpr(1.4426950408889634)
NVIDIA = tl.constexpr(not INTERPRETED and torch.version.hip is None)

# Rows, strands (or keys), warps and stages of a program. The compiler does not overlap the loads of
# "rows" and "keys", whose turns hand tiles on; with more than one stage they read a turn ahead.
TILES = {
    "lse": (128, 64, 4, 3),
    "forward": (64, 32, 4, 2),
    "rows": (64, 16, 4, 2),
    "keys": (64, 16, 4, 1),
    "far": (128, 64, 8, 3),
    "far_rows": (128, 64, 8, 2),
    "far_keys": (64, 128, 8, 2),
}
TURNS = 64  # of a strand of keys, without its halo, that a program of "keys" owns; fewer if keys are few
PROGRAMS = 264  # about what fills a GPU
BY_OPERATOR = True  # log-sum-exp and mean key from torch's fused operator, where it has them


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    pde: ReactionDiffusion,
    steps: int,
    dt: float,
    is_causal: bool = False,
    first: Tensor | None = None,
    last: Tensor | None = None,
    open: Tensor | None = None,
) -> Tensor:
    """The output ``[batch, heads, queries, value dim]`` of reaction-diffusion on the key axis.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, as many heads each.
        pde: with numbers, or tensors of one for all heads or for each.
        is_causal: row i attends to keys up to i.
        first, last: integers ``[batch, queries]``, the interval of keys of every row; with both or none.
        open: for a split `pde` with intervals, where no wall is: bool ``[batch or 1, 1, 1, keys - 1]``.
    """
    heads, device = query.shape[1], query.device
    spread, growth = (_each(c, heads, device) for c in (pde.alpha, pde.beta))
    if first is not None and last is not None:
        first, last = (x.to(torch.int32).contiguous() for x in (first, last))
    wants = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, spread, growth))
    lse, mean = log_sum_exp(query, key, first, last, is_causal, scale, wants)
    rows = lse, mean, first, last, is_causal, scale
    if not pde.split:
        return react(query, key, value, spread * dt, growth * dt, *rows, steps)
    stepped = stepped_values(Diffusion(pde.alpha), value, open, steps, dt)
    return react_split(query, key, value, stepped, spread * dt, growth * (dt * steps), *rows, steps)


def usable(query: Tensor, value: Tensor, steps: int) -> bool:
    """Whether the kernels take these, on a device for which `fused.usable` holds."""
    dim = max(query.shape[-1], value.shape[-1])
    return 1 <= steps <= STEPS and dim <= DIM and query.dtype in TYPES


def _each(coefficient: float | Tensor, heads: int, device: torch.device) -> Tensor:
    if isinstance(coefficient, Tensor):
        return coefficient.to(device, torch.float32).reshape(-1).expand(heads)
    return torch.full((heads,), coefficient, dtype=torch.float32, device=device)


def log_sum_exp(
    query: Tensor,
    key: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    is_causal: bool,
    scale: float,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    """Of every row's scores ``[batch, heads, queries]``, and if wanted the mean key, as queries."""
    square, fits = query.shape[-2] == key.shape[-2], query.shape[-1] % 8 == 0
    half = query.is_cuda and query.dtype != torch.float32
    if BY_OPERATOR and mean and first is None and half and square and fits:
        with torch.no_grad():
            scope = Scope(query.shape[-2], key.shape[-2], right=0 if is_causal else None)
            found, lse = flash.attend(query, key, key, scope, scale)
        return lse.float().contiguous(), found
    return row_sums(query.detach(), key.detach(), first, last, is_causal, scale, mean)


# What all kernels share.


@triton.jit
def _limits(first, last, at, keys, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr):
    """The first and the last key of rows; the first is after the last where there are none."""
    lo, hi = at * 0, at * 0 + (keys - 1)
    if CAUSAL:
        hi = tl.minimum(hi, at)
    if INTERVALS:
        lo = tl.maximum(lo, tl.load(first + at))
        hi = tl.minimum(hi, tl.load(last + at))
    return lo, hi


@triton.jit
def _rows(x, stride, at, ok, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of x, zeros where not ok, and beyond DIM."""
    column = tl.arange(0, COLUMNS)[None, :]
    where = x + at.to(tl.int64)[:, None] * stride + column
    return tl.load(where, mask=ok[:, None] & (column < DIM), other=0.0)


@triton.jit
def _exp2(x):
    """2 to the x, without the scaling that results below 1e-38 would need."""
    if NVIDIA:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def _inverse(x):
    """1 / x to a unit in the last place, without the scaling of sizes that an exact division has."""
    if NVIDIA:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1 / x
    return y


@triton.jit
def _within(at, count):
    return tl.minimum(tl.maximum(at, 0), count - 1)


@triton.jit
def _weights(query, key, scale, lse, PRECISION: tl.constexpr):
    """Of keys ``[n, dim]`` for rows, ``[rows, n]``."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    return _exp2(scores * (scale * LOG2E) - (lse * LOG2E)[:, None])


@triton.jit
def _first(
    query, tile, here, lo, hi, lse, scale,
    MASKED: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of keys `here`; MASKED: 0 but in a row's interval; NEAR: and but near its end."""
    x = _weights(query, tile, scale, lse, PRECISION)
    if MASKED:
        x = tl.where((here[None, :] >= lo[:, None]) & (here[None, :] <= hi[:, None]), x, 0.0)
    if NEAR:
        x = tl.where(here[None, :] > hi[:, None] - NEAR, x, 0.0)
    return x


@triton.jit
def _logistic(x, grown):
    return x * grown * _inverse(1 + x * (grown - 1))


@triton.jit
def _zeros(ROWS: tl.constexpr, STRANDS: tl.constexpr, COUNT: tl.constexpr, TYPE: tl.constexpr):
    """So many tiles of nothing."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([ROWS, STRANDS], dtype=TYPE),)
    return tiles


@triton.jit
def _inner(lo, hi, HALO: tl.constexpr, STRANDS: tl.constexpr):
    """(first key, turns) of strands that no wall of any row is in reach of."""
    start = tl.max(lo, 0) + HALO + 1
    return start, tl.maximum(tl.min(hi, 0) + 1 - HALO - start, 0) // STRANDS


@triton.jit
def _outer(lo, hi, start, turns, STRANDS: tl.constexpr, NEAR: tl.constexpr):
    """(first keys, one past the last, turns) of strands for what `_inner` leaves: half of them before.

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
    moving = _zeros(ROWS, STRANDS, 2 * STEPS, tl.float32)
    for p in range(-STEPS, turns + STEPS):
        here = start + p
        there = here - STEPS
        own = (there >= start) & (there < stop)
        tile = _rows(key, key_t, _within(here, keys), here < keys, DIM, COLUMNS)
        x = _first(query, tile, here, lo, hi, lse, scale, MASKED, NEAR, PRECISION)
        if NEAR:
            x = _logistic(x, grown)
        levels, moving = _advance(x, moving, a, b, here, lo, hi, STEPS, MASKED)
        x = levels[STEPS]
        if MASKED:
            x = tl.where((there[None, :] >= lo[:, None]) & (there[None, :] <= hi[:, None]), x, 0.0)
        met = _rows(value, value_t, there, own, DEPTH, DEEP)
        sums = tl.dot(x.to(met.dtype), met, sums, input_precision=PRECISION)
    return sums


@triton.jit
def _forward(
    query, key, value, lse, spread, growth, first, last,
    onto, out, scale, queries, keys, heads,
    query_b, query_h, query_t, key_b, key_h, key_t,
    value_b, value_h, value_t, out_b, out_h, out_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, STRANDS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr,
    INTERVALS: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one head."""
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
    lo, hi = _limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    lse = tl.load(lse + pair.to(tl.int64) * queries + at)
    own = _rows(query, query_t, at, at >= 0, DIM, COLUMNS)
    sums = tl.zeros([ROWS, DEEP], dtype=tl.float32)
    deep = tl.arange(0, DEEP)
    where = batch * out_b + head * out_h + row.to(tl.int64)[:, None] * out_t + deep[None, :]
    inside = (row < queries)[:, None] & (deep < DEPTH)[None, :]
    if NEAR:
        sums = tl.load(onto + where, mask=inside, other=0.0)
    start, turns = _inner(lo, hi, STEPS, STRANDS)
    edges, stop, rest = _outer(lo, hi, start, turns, STRANDS, NEAR)
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
    here, met, there = _within(here, keys), _within(here - LAG, keys), _within(there, keys)
    return (
        _rows(key, key_t, here, here >= 0, DIM, COLUMNS),
        _rows(key, key_t, there, there >= 0, DIM, COLUMNS),
        _rows(value, value_t, met, met >= 0, DEPTH, DEEP),
    )


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
            held = held + (past[s * (LAG + STEPS + 1 - s) - LAG - STEPS].to(tl.float32),)
            for n in tl.static_range(1, LAG + STEPS - 2 * s):
                kept = kept + (past[s * (LAG + STEPS + 1 - s) - LAG - STEPS + n],)
            kept = kept + (levels[s].to(HELD),)
    after = ()
    for n in tl.static_range(STEPS):
        there = here - (LAG + 1 + n)
        x, own, before = held[STEPS - 1 - n], back[2 * n], back[2 * n + 1]
        right, left = y, before
        if MASKED:
            right = tl.where(there[None, :] >= hi[:, None], own, y)
            left = tl.where(there[None, :] <= lo[:, None], own, before)
        sides = left + right
        after = after + (y, own)
        y = own * (free - 2 * b * x) + a * sides
        if SLOPES:
            if MASKED:
                counted = ((there >= start) & (there < stop))[None, :]
                ok = (there[None, :] >= lo[:, None]) & (there[None, :] <= hi[:, None])
                mine = tl.where(ok & counted, x, 0.0)
            else:
                mine = x * _counts(p - (LAG + 1 + n), turns)
            of_a += mine * (sides - 2 * own)
            if not NEAR:
                of_b += own * (mine - mine * x)
    return y, levels[LEVELS], moving, kept, after, of_a, of_b


@triton.jit
def _rows_walk(
    sums, rest, of_a, of_b, query, grad, key, value, key_t,
    value_t, start, stop, turns, lo, hi, lse, inner, a,
    b, grown, scale, keys,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, STRANDS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, LAG: tl.constexpr,
    MASKED: tl.constexpr, NEAR: tl.constexpr, SLOPES: tl.constexpr, AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` with the strands' keys, times gradients of their scores, and `rest` with those alone."""
    HALO: tl.constexpr = LAG + STEPS
    HELD: tl.constexpr = query.dtype
    moving = _zeros(ROWS, STRANDS, 2 * (STEPS - 1), tl.float32)
    past = _zeros(ROWS, STRANDS, STEPS * LAG - LAG, HELD)
    back = _zeros(ROWS, STRANDS, 2 * STEPS, tl.float32)
    tile, back_tile, met = _tiles(
        key, value, key_t, value_t, start - HALO, start, keys, DIM, DEPTH, COLUMNS, DEEP, LAG,
        HALO, MASKED,
    )  # fmt: skip
    for p in range(-HALO, turns + HALO):
        here, there = start + p, start + (p - HALO)
        if not AHEAD:
            tile, back_tile, met = _tiles(
                key, value, key_t, value_t, here, start, keys, DIM, DEPTH, COLUMNS, DEEP, LAG,
                HALO, MASKED,
            )  # fmt: skip
        x = _first(query, tile, here, lo, hi, lse, scale, MASKED, NEAR, PRECISION)
        bare = _first(query, back_tile, there, lo, hi, lse, scale, MASKED, NEAR, PRECISION)
        y = tl.dot(grad, tl.trans(met), input_precision=PRECISION)
        found = back_tile
        if AHEAD:
            tile, back_tile, met = _tiles(
                key, value, key_t, value_t, here + 1, start, keys, DIM, DEPTH, COLUMNS, DEEP, LAG,
                HALO, MASKED,
            )  # fmt: skip
        old = bare
        if NEAR:
            x, old = _logistic(x, grown), _logistic(bare, grown)
        y, _, moving, past, back, of_a, of_b = _turn(
            x, old, y, moving, past, back, of_a, of_b, a, b, p, turns, here, start, stop, lo, hi,
            STEPS, LAG, STEPS - 1, MASKED, NEAR, SLOPES, HELD,
        )  # fmt: skip
        own = (there >= start) & (there < stop)
        if NEAR:
            if SLOPES:
                of_b += tl.where(own[None, :], y * old * (1 - old), 0.0)
            part = _inverse(1 + bare * (grown - 1))
            y *= grown * part * part
        slope = bare * (y - inner[:, None])
        if MASKED:
            slope = tl.where(own[None, :], slope, 0.0)
        else:
            slope *= _counts(p - HALO, turns)
        rest += tl.sum(slope, 1)
        sums = tl.dot(slope.to(found.dtype), found, sums, input_precision=PRECISION)
    return sums, rest, of_a, of_b


@triton.jit
def _backward_rows(
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
    AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of some rows' queries, their inner products, and a part of those of the coefficients."""
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
    lo, hi = _limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    line = pair.to(tl.int64) * queries
    lse = tl.load(lse + line + at)
    own = _rows(query, query_t, at, at >= 0, DIM, COLUMNS)
    slope = _rows(grad, grad_t, at, real, DEPTH, DEEP)
    inner = _rows(out, out_t, at, real, DEPTH, DEEP).to(tl.float32)
    inner = tl.sum(inner * slope.to(tl.float32), 1)
    column = tl.arange(0, COLUMNS)
    inside = real[:, None] & (column < DIM)[None, :]
    where = batch * found_b + head * found_h + row.to(tl.int64)[:, None] * found_t + column[None, :]
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    rest = tl.zeros([ROWS], dtype=tl.float32)
    if NEAR:
        sums = tl.load(onto + where, mask=inside, other=0.0)
        rest = tl.load(onto_rest + line + row, mask=real, other=0.0)
    of_a = tl.zeros([ROWS, STRANDS], dtype=tl.float32)
    of_b = tl.zeros([ROWS, STRANDS], dtype=tl.float32)
    start, turns = _inner(lo, hi, LAG + STEPS, STRANDS)
    edges, stop, few = _outer(lo, hi, start, turns, STRANDS, NEAR)
    if not NEAR:  # noqa: SIM102  (known when compiled)
        if turns > 0:
            strand = start + turns * tl.arange(0, STRANDS)
            sums, rest, of_a, of_b = _rows_walk(
                sums, rest, of_a, of_b, own, slope, key, value, key_t, value_t, strand, strand + turns,
                turns, lo, hi, lse, inner, a, b, grown, scale, keys, DIM, DEPTH, ROWS, STRANDS, COLUMNS,
                DEEP, STEPS, LAG, False, NEAR, SLOPES, AHEAD, PRECISION,
            )  # fmt: skip
    sums, rest, of_a, of_b = _rows_walk(
        sums, rest, of_a, of_b, own, slope, key, value, key_t, value_t, edges, stop, few, lo, hi, lse,
        inner, a, b, grown, scale, keys, DIM, DEPTH, ROWS, STRANDS, COLUMNS, DEEP, STEPS, LAG, True,
        NEAR, SLOPES, AHEAD, PRECISION,
    )  # fmt: skip
    mean += batch * mean_b + head * mean_h
    sums -= rest[:, None] * _rows(mean, mean_t, at, real, DIM, COLUMNS).to(tl.float32)
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
    MASKED: tl.constexpr, NEAR: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what some rows give back to the strands' keys and values, which nobody else adds to."""
    HALO: tl.constexpr = LAG + STEPS
    HELD: tl.constexpr = query.dtype
    moving = _zeros(ROWS, STRANDS, 2 * STEPS, tl.float32)
    past = _zeros(ROWS, STRANDS, STEPS * LAG - LAG, HELD)
    back = _zeros(ROWS, STRANDS, 2 * STEPS, tl.float32)
    column, deep = tl.arange(0, COLUMNS)[:, None], tl.arange(0, DEEP)[:, None]
    tile, back_tile, met = _tiles(
        key, value, key_t, value_t, start - HALO, start, keys, DIM, DEPTH, COLUMNS, DEEP, LAG,
        HALO, MASKED,
    )  # fmt: skip
    for p in range(-HALO, turns + HALO):
        here, there = start + p, start + (p - HALO)
        if not AHEAD:
            tile, back_tile, met = _tiles(
                key, value, key_t, value_t, here, start, keys, DIM, DEPTH, COLUMNS, DEEP, LAG,
                HALO, MASKED,
            )  # fmt: skip
        x = _first(query, tile, here, lo, hi, lse, scale, MASKED, NEAR, PRECISION)
        bare = _first(query, back_tile, there, lo, hi, lse, scale, MASKED, NEAR, PRECISION)
        y = tl.dot(grad, tl.trans(met), input_precision=PRECISION)
        if AHEAD:
            tile, back_tile, met = _tiles(
                key, value, key_t, value_t, here + 1, start, keys, DIM, DEPTH, COLUMNS, DEEP, LAG,
                HALO, MASKED,
            )  # fmt: skip
        old = bare
        if NEAR:
            x, old = _logistic(x, grown), _logistic(bare, grown)
        y, stepped, moving, past, back, _, _ = _turn(
            x, old, y, moving, past, back, 0.0, 0.0, a, b, p, turns, here, start, stop, lo, hi, STEPS,
            LAG, STEPS, MASKED, NEAR, False, HELD,
        )  # fmt: skip
        at = here - STEPS
        own = (at >= start) & (at < stop)
        if MASKED:
            ok = (at[None, :] >= lo[:, None]) & (at[None, :] <= hi[:, None])
            stepped = tl.where(ok, stepped, 0.0)
        found = tl.dot(tl.trans(grad), stepped.to(grad.dtype), input_precision=PRECISION)
        where = of_value + (at[None, :] * DEPTH + deep)
        tl.atomic_add(where, found, mask=own[None, :] & (deep < DEPTH), sem="relaxed")
        own = (there >= start) & (there < stop)
        if NEAR:
            part = _inverse(1 + bare * (grown - 1))
            y *= grown * part * part
        slope = bare * (y - total[:, None])
        found = tl.dot(tl.trans(query), slope.to(query.dtype), input_precision=PRECISION) * scale
        where = of_key + (there[None, :] * DIM + column)
        tl.atomic_add(where, found, mask=own[None, :] & (column < DIM), sem="relaxed")


@triton.jit
def _backward_keys(
    grad, query, key, value, lse, total, spread, growth,
    first, last, of_key, of_value, scale, queries, keys, heads,
    turns, grad_b, grad_h, grad_t, query_b, query_h, query_t,
    key_b, key_h, key_t, value_b, value_h, value_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, STRANDS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, STEPS: tl.constexpr, LAG: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, NEAR: tl.constexpr, AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A run of keys of one head, for all rows, one block of them after the other."""
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
        lo, hi = _limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
        low, high = tl.min(hi, 0), tl.max(hi, 0)
        reached = (high >= begin) & (tl.min(lo, 0) < end)
        if NEAR:
            reached = reached & (low + 1 - 2 * NEAR < end)
        if reached:
            weight = tl.load(lse + line + at)
            inner = tl.load(total + line + at, mask=real, other=0.0)
            own = _rows(query, query_t, at, at >= 0, DIM, COLUMNS)
            slope = _rows(grad, grad_t, at, real, DEPTH, DEEP)
            free = (tl.max(lo, 0) < begin - HALO) & (low >= end + HALO - 1)
            if free and not NEAR:
                _keys_walk(
                    own, slope, key, value, of_key, of_value, key_t, value_t, start, stop, turns, lo,
                    hi, weight, inner, a, b, grown, scale, keys, DIM, DEPTH, ROWS, STRANDS, COLUMNS,
                    DEEP, STEPS, LAG, NEAR > 0, NEAR, AHEAD, PRECISION,
                )  # fmt: skip
            else:
                _keys_walk(
                    own, slope, key, value, of_key, of_value, key_t, value_t, start, stop, turns, lo,
                    hi, weight, inner, a, b, grown, scale, keys, DIM, DEPTH, ROWS, STRANDS, COLUMNS,
                    DEEP, STEPS, LAG, True, NEAR, AHEAD, PRECISION,
                )  # fmt: skip


@triton.jit
def _row_sums(
    query, key, first, last, lse, mean, scale, queries,
    keys, heads, query_b, query_h, query_t, key_b, key_h, key_t,
    mean_b, mean_h, mean_t,
    DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, MEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of some rows' scores, 0 where there are none, and the mean key."""
    blocks = tl.cdiv(queries, ROWS)
    pair, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    at, real = tl.minimum(row, queries - 1), row < queries
    key += batch * key_b + head * key_h
    lo, hi = _limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    own = _rows(query + batch * query_b + head * query_h, query_t, at, at >= 0, DIM, COLUMNS)
    most = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    inner, outer = tl.max(lo, 0), tl.min(hi, 0)
    for start in range(tl.min(lo, 0), tl.max(hi, 0) + 1, KEYS):
        here = start + tl.arange(0, KEYS)
        tile = _rows(key, key_t, here, here < keys, DIM, COLUMNS)
        scores = tl.dot(own, tl.trans(tile), input_precision=PRECISION) * (scale * LOG2E)
        if (start < inner) | (start + KEYS - 1 > outer):
            ok = (here[None, :] >= lo[:, None]) & (here[None, :] <= hi[:, None])
            scores = tl.where(ok, scores, -float("inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new == -float("inf"), 0.0, new)
        x = _exp2(scores - base[:, None])
        less = tl.exp2(most - base)
        total = total * less + tl.sum(x, 1)
        if MEAN:
            sums = tl.dot(x.to(tile.dtype), tile, sums * less[:, None], input_precision=PRECISION)
        most = new
    found = tl.where(total > 0, (most + tl.log2(total)) / LOG2E, 0.0)
    tl.store(lse + pair.to(tl.int64) * queries + row, found, mask=real)
    if MEAN:
        column = tl.arange(0, COLUMNS)
        sums /= tl.where(total > 0, total, 1.0)[:, None]
        mean += batch * mean_b + head * mean_h + row.to(tl.int64)[:, None] * mean_t + column[None, :]
        tl.store(mean, sums.to(mean.dtype.element_ty), mask=real[:, None] & (column < DIM)[None, :])


@triton.jit
def _full(lo, hi, KEYS: tl.constexpr):
    """Blocks of keys as (begin, first that all rows may attend to, end of these, end)."""
    begin, end = tl.min(lo, 0) // KEYS * KEYS, tl.max(hi, 0) + 1
    full = tl.cdiv(tl.max(lo, 0), KEYS) * KEYS
    stop = tl.maximum(tl.min(hi, 0) + 1, 0) // KEYS * KEYS
    full = tl.minimum(full, tl.maximum(stop, begin))
    return begin, tl.maximum(full, begin), tl.maximum(stop, tl.maximum(full, begin)), end


@triton.jit
def _far_part(
    sums, query, key, value, key_t, value_t, begin, end, lo,
    hi, lse, grown, scale, keys,
    DIM: tl.constexpr, DEPTH: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` with the values of keys begin .. end, times weights after the reaction."""
    for start in range(begin, end, KEYS):
        here = start + tl.arange(0, KEYS)
        tile = _rows(key, key_t, here, here < keys, DIM, COLUMNS)
        x = _weights(query, tile, scale, lse, PRECISION)
        if MASKED:
            x = tl.where((here[None, :] >= lo[:, None]) & (here[None, :] <= hi[:, None]), x, 0.0)
        x = _logistic(x, grown)
        met = _rows(value, value_t, here, here < keys, DEPTH, DEEP)
        sums = tl.dot(x.to(met.dtype), met, sums, input_precision=PRECISION)
    return sums


@triton.jit
def _far(
    query, key, value, lse, growth, first, last, out, scale,
    queries, keys, heads,
    query_b, query_h, query_t, key_b, key_h, key_t,
    value_b, value_h, value_t, out_b, out_h, out_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr,
    NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one head, all keys but the last NEAR."""
    blocks = tl.cdiv(queries, ROWS)
    pair, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    at = tl.minimum(row, queries - 1)
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    grown = tl.exp(tl.load(growth + head))
    lo, hi = _limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    hi -= NEAR
    lse = tl.load(lse + pair.to(tl.int64) * queries + at)
    own = _rows(query + batch * query_b + head * query_h, query_t, at, at >= 0, DIM, COLUMNS)
    sums = tl.zeros([ROWS, DEEP], dtype=tl.float32)
    begin, full, stop, end = _full(lo, hi, KEYS)
    if INTERVALS:
        sums = _far_part(
            sums, own, key, value, key_t, value_t, begin, full, lo, hi, lse, grown, scale, keys, DIM,
            DEPTH, KEYS, COLUMNS, DEEP, True, PRECISION,
        )  # fmt: skip
    sums = _far_part(
        sums, own, key, value, key_t, value_t, full, stop, lo, hi, lse, grown, scale, keys, DIM, DEPTH,
        KEYS, COLUMNS, DEEP, False, PRECISION,
    )  # fmt: skip
    sums = _far_part(
        sums, own, key, value, key_t, value_t, stop, end, lo, hi, lse, grown, scale, keys, DIM, DEPTH,
        KEYS, COLUMNS, DEEP, True, PRECISION,
    )  # fmt: skip
    deep = tl.arange(0, DEEP)
    out += batch * out_b + head * out_h + row.to(tl.int64)[:, None] * out_t + deep[None, :]
    inside = (row < queries)[:, None] & (deep < DEPTH)[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _far_rows_part(
    sums, rest, of_b, query, grad, key, value, key_t,
    value_t, begin, end, lo, hi, lse, inner, grown, scale,
    keys, DIM: tl.constexpr, DEPTH: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, MASKED: tl.constexpr, SLOPES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_rows_walk`, for keys begin .. end and stepped values."""
    for start in range(begin, end, KEYS):
        here = start + tl.arange(0, KEYS)
        tile = _rows(key, key_t, here, here < keys, DIM, COLUMNS)
        x = _weights(query, tile, scale, lse, PRECISION)
        if MASKED:
            x = tl.where((here[None, :] >= lo[:, None]) & (here[None, :] <= hi[:, None]), x, 0.0)
        met = _rows(value, value_t, here, here < keys, DEPTH, DEEP)
        y = tl.dot(grad, tl.trans(met), input_precision=PRECISION)
        part = _inverse(1 + x * (grown - 1))
        slope = grown * part
        if SLOPES:
            after = x * slope
            of_b += tl.sum(y * (after - after * after), 1)
        slope = x * (y * (slope * part) - inner[:, None])
        rest += tl.sum(slope, 1)
        sums = tl.dot(slope.to(tile.dtype), tile, sums, input_precision=PRECISION)
    return sums, rest, of_b


@triton.jit
def _far_backward_rows(
    grad, query, key, value, out, mean, lse, growth, first,
    last, of_query, total, parts, scale, queries, keys, heads,
    grad_b, grad_h, grad_t, query_b, query_h, query_t,
    key_b, key_h, key_t, value_b, value_h, value_t,
    out_b, out_h, out_t, mean_b, mean_h, mean_t,
    found_b, found_h, found_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr,
    NEAR: tl.constexpr, SLOPES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_backward_rows`; where keys near a wall are still to come, unfinished sums."""
    blocks = tl.cdiv(queries, ROWS)
    pair, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    at, real = tl.minimum(row, queries - 1), row < queries
    key += batch * key_b + head * key_h
    value += batch * value_b + head * value_h
    grown = tl.exp(tl.load(growth + head))
    lo, hi = _limits(first + batch * queries, last + batch * queries, at, keys, CAUSAL, INTERVALS)
    hi -= NEAR
    line = pair.to(tl.int64) * queries
    lse = tl.load(lse + line + at)
    own = _rows(query + batch * query_b + head * query_h, query_t, at, at >= 0, DIM, COLUMNS)
    slope = _rows(grad + batch * grad_b + head * grad_h, grad_t, at, real, DEPTH, DEEP)
    inner = _rows(out + batch * out_b + head * out_h, out_t, at, real, DEPTH, DEEP).to(tl.float32)
    inner = tl.sum(inner * slope.to(tl.float32), 1)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    rest = tl.zeros([ROWS], dtype=tl.float32)
    of_b = tl.zeros([ROWS], dtype=tl.float32)
    begin, full, stop, end = _full(lo, hi, KEYS)
    if INTERVALS:
        sums, rest, of_b = _far_rows_part(
            sums, rest, of_b, own, slope, key, value, key_t, value_t, begin, full, lo, hi, lse, inner,
            grown, scale, keys, DIM, DEPTH, KEYS, COLUMNS, DEEP, True, SLOPES, PRECISION,
        )  # fmt: skip
    sums, rest, of_b = _far_rows_part(
        sums, rest, of_b, own, slope, key, value, key_t, value_t, full, stop, lo, hi, lse, inner, grown,
        scale, keys, DIM, DEPTH, KEYS, COLUMNS, DEEP, False, SLOPES, PRECISION,
    )  # fmt: skip
    sums, rest, of_b = _far_rows_part(
        sums, rest, of_b, own, slope, key, value, key_t, value_t, stop, end, lo, hi, lse, inner, grown,
        scale, keys, DIM, DEPTH, KEYS, COLUMNS, DEEP, True, SLOPES, PRECISION,
    )  # fmt: skip
    if NEAR == 0:
        mean += batch * mean_b + head * mean_h
        sums -= rest[:, None] * _rows(mean, mean_t, at, real, DIM, COLUMNS).to(tl.float32)
        sums *= scale
        rest += inner
    column = tl.arange(0, COLUMNS)
    inside = real[:, None] & (column < DIM)[None, :]
    where = batch * found_b + head * found_h + row.to(tl.int64)[:, None] * found_t + column[None, :]
    tl.store(of_query + where, sums.to(of_query.dtype.element_ty), mask=inside)
    tl.store(total + line + row, rest, mask=real)
    if SLOPES:
        tl.store(parts + tl.program_id(0), tl.sum(tl.where(real, of_b, 0.0), 0))


@triton.jit
def _far_keys_part(
    of_key, of_value, key, value, query, grad, query_t, grad_t,
    begin, end, here, lse, total, first, last, grown, scale,
    queries, keys, DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr,
    NEAR: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both sums with what rows begin .. end give back to some keys."""
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        at, real = tl.minimum(row, queries - 1), row < queries
        own = _rows(query, query_t, at, at >= 0, DIM, COLUMNS)
        slope = _rows(grad, grad_t, at, real, DEPTH, DEEP)
        x = tl.dot(key, tl.trans(own), input_precision=PRECISION)
        x = _exp2(x * (scale * LOG2E) - (tl.load(lse + at) * LOG2E)[None, :])
        if MASKED:
            lo, hi = _limits(first, last, at, keys, CAUSAL, INTERVALS)
            ok = (here[:, None] >= lo[None, :]) & (here[:, None] <= (hi - NEAR)[None, :])
            x = tl.where(ok & real[None, :], x, 0.0)
        y = tl.dot(value, tl.trans(slope), input_precision=PRECISION)
        part = _inverse(1 + x * (grown - 1))
        after = x * (grown * part)
        of_value = tl.dot(after.to(slope.dtype), slope, of_value, input_precision=PRECISION)
        inner = tl.load(total + at, mask=real, other=0.0)
        x = x * (y * (grown * part * part) - inner[None, :])
        of_key = tl.dot(x.to(own.dtype), own, of_key, input_precision=PRECISION)
    return of_key, of_value


@triton.jit
def _far_backward_keys(
    grad, query, key, value, lse, total, growth, first,
    last, of_key, of_value, scale, queries, keys, heads,
    grad_b, grad_h, grad_t, query_b, query_h, query_t,
    key_b, key_h, key_t, value_b, value_h, value_t,
    DIM: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, DEEP: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr,
    NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys and their stepped values."""
    blocks = tl.cdiv(keys, KEYS)
    pair, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    begin = block * KEYS
    here = begin + tl.arange(0, KEYS)
    query += batch * query_b + head * query_h
    grad += batch * grad_b + head * grad_h
    grown = tl.exp(tl.load(growth + head))
    line = pair.to(tl.int64) * queries
    own = _rows(key + batch * key_b + head * key_h, key_t, here, here < keys, DIM, COLUMNS)
    met = _rows(value + batch * value_b + head * value_h, value_t, here, here < keys, DEPTH, DEEP)
    of_own = tl.zeros([KEYS, COLUMNS], dtype=tl.float32)
    of_met = tl.zeros([KEYS, DEEP], dtype=tl.float32)
    first += batch * queries
    last += batch * queries
    top, whole = 0, 0  # the first block with a row that sees one of the keys; one that sees all
    if CAUSAL:
        top = tl.minimum((begin + NEAR) // ROWS * ROWS, queries)
        whole = tl.minimum(tl.cdiv(begin + KEYS - 1 + NEAR, ROWS) * ROWS, queries)
    if INTERVALS:
        whole = queries
    of_own, of_met = _far_keys_part(
        of_own, of_met, own, met, query, grad, query_t, grad_t, top, whole, here, lse + line,
        total + line, first, last, grown, scale, queries, keys, DIM, DEPTH, ROWS, COLUMNS, DEEP, CAUSAL,
        INTERVALS, NEAR, True, PRECISION,
    )  # fmt: skip
    if not INTERVALS:
        of_own, of_met = _far_keys_part(
            of_own, of_met, own, met, query, grad, query_t, grad_t, whole, queries, here, lse + line,
            total + line, first, last, grown, scale, queries, keys, DIM, DEPTH, ROWS, COLUMNS, DEEP,
            CAUSAL, INTERVALS, NEAR, False, PRECISION,
        )  # fmt: skip
    column, deep = tl.arange(0, COLUMNS)[None, :], tl.arange(0, DEEP)[None, :]
    at, ok = here.to(tl.int64)[:, None], (here < keys)[:, None]
    of_key += pair.to(tl.int64) * keys * DIM + at * DIM + column
    tl.store(of_key, (of_own * scale).to(of_key.dtype.element_ty), mask=ok & (column < DIM))
    of_value += pair.to(tl.int64) * keys * DEPTH + at * DEPTH + deep
    tl.store(of_value, of_met.to(of_value.dtype.element_ty), mask=ok & (deep < DEPTH))


# Operators. Tensors are ``[batch, heads, tokens, dim]``; lse, mean, first, last as `attend` makes them.


@operator("reaction_row_sums")
def row_sums(
    query: Tensor, key: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool,
    scale: float, mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-sum-exp of every row's scores, and the mean key; the latter without entries if not wanted."""
    query, key = by_rows(query), by_rows(key)
    lse, found = _row_sums_like(query, key, first, last, is_causal, scale, mean)
    rows, keys, warps, stages = TILES["lse"]
    pairs, (queries, dim) = query.shape[0] * query.shape[1], query.shape[2:]
    like = found if mean else query
    wrap_triton(_row_sums)[(pairs * triton.cdiv(queries, rows),)](
        query, key, *_given(first, last, lse), lse, like, scale, queries, key.shape[2], query.shape[1],
        *strides(query), *strides(key), *strides(like), int(dim), rows, keys, _columns(dim), is_causal,
        first is not None, mean, _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return lse, found


def _row_sums_like(
    query: Tensor, key: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool,
    scale: float, mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return lse, query.new_empty(query.shape if mean else (0, 0, 0, 0))


row_sums.register_fake(_row_sums_like)


@operator("reaction")
def react(
    query: Tensor, key: Tensor, value: Tensor, spread: Tensor, growth: Tensor, lse: Tensor,
    mean: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool, scale: float, steps: int,
) -> Tensor:  # fmt: skip
    """The output.

    Args:
        spread, growth: alpha and beta times dt ``[heads]``.
        lse, mean: constants here; gradients of query and key are those through the softmax too.
    """
    query, key, value = by_rows(query), by_rows(key), by_rows(value)
    out = _out_like(query, value)
    _launch_forward(
        lse, query, key, value, lse, spread, growth, first, last, out, is_causal, scale, steps, 0
    )
    return out


def _out_like(query: Tensor, value: Tensor) -> Tensor:
    return value.new_empty(*query.shape[:-1], value.shape[-1])


def _launch_forward(
    onto: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, spread: Tensor,
    growth: Tensor, first: Tensor | None, last: Tensor | None, out: Tensor, is_causal: bool,
    scale: float, steps: int, near: int,
) -> None:  # fmt: skip
    rows, strands, warps, stages = TILES["forward"]
    queries, keys, heads, grid = _grid(query, key, rows)
    wrap_triton(_forward)[grid](
        query, key, value, lse, spread.contiguous(), growth.contiguous(), *_given(first, last, lse),
        onto, out, scale, queries, keys, heads, *strides(query), *strides(key), *strides(value),
        *strides(out), *_sizes(query, value, rows, strands), steps, is_causal, first is not None, near,
        _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip


@operator("reaction_backward_rows")
def backward_rows(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, spread: Tensor,
    growth: Tensor, lse: Tensor, mean: Tensor, first: Tensor | None, last: Tensor | None,
    onto: Tensor | None, onto_rest: Tensor | None, is_causal: bool, scale: float, steps: int,
    slopes: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query; the inner products of weights and gradients; those of spread and growth.

    Args:
        onto, onto_rest: what `far_backward_rows` found: then only keys near a causal wall are left.
    """
    grad, query, key, value, out, mean = map(by_rows, (grad, query, key, value, out, mean))
    of_query, total, parts = (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        torch.empty_like(lse),
        lse.new_empty(0),
    )
    near = 0 if onto is None else steps
    rows, strands, warps, stages = TILES["rows"]
    queries, keys, heads, grid = _grid(query, key, rows)
    if slopes:
        parts = lse.new_empty(grid[0], 2)
    wrap_triton(_backward_rows)[grid](
        grad, query, key, value, out, mean, lse, spread.contiguous(), growth.contiguous(),
        *_given(first, last, lse), *_given(onto, onto_rest, lse), of_query, total, parts, scale,
        queries, keys, heads, *strides(grad), *strides(query), *strides(key), *strides(value),
        *strides(out), *strides(mean), *strides(of_query), *_sizes(query, value, rows, strands), steps,
        max(steps - 2, 0), is_causal, first is not None, near, slopes, stages > 1, _precision(query),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_query, total, _per_head(parts, query, slopes)


def _rows_like(grad: Tensor, query: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    return of_query, lse, lse.new_empty(query.shape[1] if rest[-1] else 0, 2)


@operator("reaction_backward_keys")
def backward_keys(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, spread: Tensor, growth: Tensor,
    lse: Tensor, total: Tensor, first: Tensor | None, last: Tensor | None, onto: Tensor | None,
    is_causal: bool, scale: float, steps: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of key and value, in single precision.

    Args:
        total: the inner products.
        onto: what `far_backward_keys` found for key, to which those near a causal wall are added.
    """
    grad, query, key, value = map(by_rows, (grad, query, key, value))
    of_value = torch.zeros(value.shape, dtype=torch.float32, device=value.device)
    of_key = torch.zeros_like(key, dtype=torch.float32, memory_format=torch.contiguous_format)
    if onto is not None:
        of_key = onto.clone()
    rows, strands, warps, stages = TILES["keys"]
    queries, keys, heads, _ = _grid(query, key, rows)
    pairs = query.shape[0] * heads
    turns = max(steps, min(TURNS, triton.cdiv(keys * pairs, PROGRAMS * strands)))
    turns = min(turns, triton.cdiv(keys, strands))
    wrap_triton(_backward_keys)[(pairs * triton.cdiv(keys, turns * strands),)](
        grad, query, key, value, lse, total, spread.contiguous(), growth.contiguous(),
        *_given(first, last, lse), of_key, of_value, scale, queries, keys, heads, turns, *strides(grad),
        *strides(query), *strides(key), *strides(value), *_sizes(query, value, rows, strands), steps,
        max(steps - 2, 0), is_causal, first is not None, 0 if onto is None else steps, stages > 1,
        _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_key, of_value


def _keys_like(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (key, value))  # type: ignore[return-value]


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.is_causal, ctx.scale, ctx.steps = inputs
    ctx.save_for_backward(*tensors, output)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, key, value, spread, growth, lse, mean, first, last, out = ctx.saved_tensors
    options = ctx.is_causal, ctx.scale, ctx.steps
    of_query, total, slopes = backward_rows(
        grad, query, key, value, out, spread, growth, lse, mean, first, last, None, None, *options,
        any(ctx.needs_input_grad[3:5]),
    )  # fmt: skip
    of_key, of_value = backward_keys(
        grad, query, key, value, spread, growth, lse, total, first, last, None, *options
    )
    found = of_query, of_key.to(key.dtype), of_value.to(value.dtype)
    return *found, *_two(ctx.needs_input_grad[3:5], slopes), *(None,) * 7


def _two(needed: tuple[bool, ...], slopes: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return slopes[:, 0] if needed[0] else None, slopes[:, 1] if needed[1] else None


react.register_fake(lambda query, key, value, *_: _out_like(query, value))
react.register_autograd(_gradients, setup_context=_context)
backward_rows.register_fake(_rows_like)
backward_keys.register_fake(_keys_like)


@operator("reaction_split")
def react_split(
    query: Tensor, key: Tensor, value: Tensor, stepped: Tensor, spread: Tensor, growth: Tensor,
    lse: Tensor, mean: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool,
    scale: float, steps: int,
) -> Tensor:  # fmt: skip
    """The output where the reaction comes first, all of it.

    Args:
        value: needed near a causal wall only.
        stepped: values after all steps of diffusion.
        spread: alpha times dt ``[heads]``.
        growth: beta times the whole pseudo-time ``[heads]``.
    """
    query, key, value, stepped = map(by_rows, (query, key, value, stepped))
    near = steps if is_causal else 0
    out = _out_like(query, value)
    far = torch.empty_like(out, dtype=torch.float32) if near else out
    rows, width, warps, stages = TILES["far"]
    queries, keys, heads, grid = _grid(query, key, rows)
    wrap_triton(_far)[grid](
        query, key, stepped, lse, growth.contiguous(), *_given(first, last, lse), far, scale, queries,
        keys, heads, *strides(query), *strides(key), *strides(stepped), *strides(far),
        *_sizes(query, value, rows, width), is_causal, first is not None, near, _precision(query),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if near:
        _launch_forward(
            far, query, key, value, lse, spread, growth, first, last, out, is_causal, scale, steps, near
        )
    return out


@operator("reaction_far_backward_rows")
def far_backward_rows(
    grad: Tensor, query: Tensor, key: Tensor, stepped: Tensor, out: Tensor, growth: Tensor, lse: Tensor,
    mean: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool, scale: float, near: int,
    slopes: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `backward_rows`, for all but the last `near` keys of rows; unfinished if there are some."""
    grad, query, key, stepped, out, mean = map(by_rows, (grad, query, key, stepped, out, mean))
    of_query = torch.empty_like(
        query, dtype=torch.float32 if near else query.dtype, memory_format=torch.contiguous_format
    )
    total, parts = torch.empty_like(lse), lse.new_empty(0)
    rows, width, warps, stages = TILES["far_rows"]
    queries, keys, heads, grid = _grid(query, key, rows)
    if slopes:
        parts = lse.new_empty(grid[0], 1)
    wrap_triton(_far_backward_rows)[grid](
        grad, query, key, stepped, out, mean, lse, growth.contiguous(), *_given(first, last, lse),
        of_query, total, parts, scale, queries, keys, heads, *strides(grad), *strides(query),
        *strides(key), *strides(stepped), *strides(out), *strides(mean), *strides(of_query),
        *_sizes(query, stepped, rows, width), is_causal, first is not None, near, slopes,
        _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_query, total, _per_head(parts, query, slopes)


def _far_rows_like(grad: Tensor, query: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    near, slopes = rest[-2:]
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    dtype = torch.float32 if near else query.dtype
    of_query = torch.empty_like(query, dtype=dtype, memory_format=torch.contiguous_format)
    return of_query, lse, lse.new_empty(query.shape[1] if slopes else 0, 1)


@operator("reaction_far_backward_keys")
def far_backward_keys(
    grad: Tensor, query: Tensor, key: Tensor, stepped: Tensor, growth: Tensor, lse: Tensor,
    total: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool, scale: float, near: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of key and stepped values; that of key in single precision if some are still to come."""
    grad, query, key, stepped = map(by_rows, (grad, query, key, stepped))
    of_key, of_stepped = _far_keys_like(
        grad, query, key, stepped, growth, lse, total, first, last, is_causal, scale, near
    )
    rows, width, warps, stages = TILES["far_keys"]
    queries, keys, heads, _ = _grid(query, key, rows)
    wrap_triton(_far_backward_keys)[(query.shape[0] * heads * triton.cdiv(keys, width),)](
        grad, query, key, stepped, lse, total, growth.contiguous(), *_given(first, last, lse), of_key,
        of_stepped, scale, queries, keys, heads, *strides(grad), *strides(query), *strides(key),
        *strides(stepped), *_sizes(query, stepped, rows, width), is_causal, first is not None, near,
        _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_key, of_stepped


def _far_keys_like(
    grad: Tensor, query: Tensor, key: Tensor, stepped: Tensor, growth: Tensor, lse: Tensor,
    total: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool, scale: float, near: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_key = key.new_empty(key.shape, dtype=torch.float32 if near else key.dtype)
    return of_key, stepped.new_empty(stepped.shape)


def _split_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, key, value, stepped, spread, growth, lse, mean, first, last, out = ctx.saved_tensors
    near, wanted = ctx.steps if ctx.is_causal else 0, any(ctx.needs_input_grad[4:6])
    options = ctx.is_causal, ctx.scale
    of_query, total, slopes = far_backward_rows(
        grad, query, key, stepped, out, growth, lse, mean, first, last, *options, near, wanted
    )
    of_spread, of_growth, of_value = None, slopes[:, 0] if wanted else None, None
    if near:
        of_query, total, slopes = backward_rows(
            grad, query, key, value, out, spread, growth, lse, mean, first, last, of_query, total,
            *options, near, wanted,
        )  # fmt: skip
        if of_growth is not None:
            of_spread, of_growth = slopes[:, 0].clone(), of_growth + slopes[:, 1]
    of_key, of_stepped = far_backward_keys(
        grad, query, key, stepped, growth, lse, total, first, last, *options, near
    )
    if near:
        of_key, of_value = backward_keys(
            grad, query, key, value, spread, growth, lse, total, first, last, of_key, *options, near
        )
        of_value = of_value.to(value.dtype)
    found = of_query, of_key.to(key.dtype), of_value, of_stepped
    return *found, of_spread, of_growth, *(None,) * 7


react_split.register_fake(lambda query, key, value, *_: _out_like(query, value))
react_split.register_autograd(_split_gradients, setup_context=_context)
far_backward_rows.register_fake(_far_rows_like)
far_backward_keys.register_fake(_far_keys_like)


def _given(first: Tensor | None, last: Tensor | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors, or something to point to."""
    return other if first is None else first, other if last is None else last


def _grid(query: Tensor, key: Tensor, rows: int) -> tuple[int, int, int, tuple[int]]:
    batch, heads, queries = query.shape[:3]
    return queries, key.shape[2], heads, (batch * heads * triton.cdiv(queries, rows),)


def _columns(dim: int) -> int:
    return max(16, triton.next_power_of_2(int(dim)))


def _sizes(query: Tensor, value: Tensor, rows: int, width: int) -> tuple[int, ...]:
    dim, depth = int(query.shape[-1]), int(value.shape[-1])
    return dim, depth, rows, width, _columns(dim), _columns(depth)


def _precision(query: Tensor) -> str:
    """How products of single precision are made; halves have only one way."""
    return "tf32x3" if query.dtype == torch.float32 else "ieee"


def _per_head(parts: Tensor, query: Tensor, slopes: bool) -> Tensor:
    """Programs' parts ``[batch * heads * n, m]``, summed up ``[heads, m]``."""
    if not slopes:
        return parts.view(0, 2)
    return parts.view(query.shape[0], query.shape[1], -1, parts.shape[-1]).sum((0, 2))
