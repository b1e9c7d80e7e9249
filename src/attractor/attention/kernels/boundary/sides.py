"""Device functions for the keys within reach of a wall that moves with the row.

Row i has a wall after key ``i + right`` and, in a window, another wall before key ``i - left``. A causal
row is a window whose right side is 0 and whose left side has no limit. Each wall has `reach` boundary
keys, whose weights take the steps themselves and spread over a patch of ``2 reach`` keys:

    right side: boundary key m is i + right - reach + 1 + m, patch key n is i + right - 2 reach + 1 + n
    left side:  boundary key m is i - left + m,              patch key n is i - left + n

Rows whose patches have no second wall are FREE, and have the same stencil, a tuple of numbers. The other
rows, at the start of a causal sequence or document, each have entries of the table.
"""

# Kernel arguments have no types that mypy knows; tuples of tiles grow by addition only.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from attractor.attention.kernels.device import keys_to_walls, load_masked, upcast


@triton.jit
def keys_before(open, stride, row, tokens, SPAN: tl.constexpr, FACES: tl.constexpr):
    """Return the number of keys before each row's own; with FACES, in its document and at most SPAN."""
    before = row
    if FACES:
        before, _ = keys_to_walls(open, stride, tl.minimum(row, tokens - 1), tokens, SPAN, True)
    return before


@triton.jit
def load_last(
    x, stride, row, before, tokens, COUNT: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Load the last COUNT rows up to each row as a tuple, with zeros for those beyond `before`."""
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    rows = ()
    for n in tl.static_range(COUNT):
        at = tl.minimum(row, tokens - 1) - (COUNT - 1 - n)
        ok = (before >= COUNT - 1 - n)[:, None] & inside
        rows = rows + (load_masked(x, stride, at, column, ok, x.dtype.element_ty),)
    return rows


@triton.jit
def load_far(
    far, stride, row, before, tokens, REACH: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Load the results for the far keys of each row, with zeros for rows without far keys."""
    column = tl.arange(0, COLUMNS)
    ok = ((before >= REACH) & (row < tokens))[:, None] & (column < DIM)[None, :]
    return (load_masked(far, stride, row - REACH, column, ok, far.dtype.element_ty),)


@triton.jit
def boundary_stencil(stencil, before, REACH: tl.constexpr, LEFT: tl.constexpr, FREE: tl.constexpr):
    """Load the weights from boundary key m to patch key n, at ``2 reach m + n``; 0 if out of reach.

    Args:
        before: Number of keys before each row's own; used if neither FREE nor LEFT.
    """
    weights = ()
    for m in tl.static_range(REACH):
        for n in tl.static_range(2 * REACH):
            if LEFT and n <= m + REACH:
                place = m * (REACH + 1) + REACH
                weight = tl.load(stencil + place * (2 * REACH + 1) + (REACH + n - m))
            elif not LEFT and n >= m and FREE:
                place = REACH * (REACH + 1) + REACH - 1 - m
                weight = tl.load(stencil + place * (2 * REACH + 1) + (n - m))
            elif not LEFT and n >= m:
                of_key = tl.minimum(tl.maximum(before - (REACH - 1 - m), 0), REACH)
                place = of_key * (REACH + 1) + (REACH - 1 - m)
                weight = tl.load(stencil + place * (2 * REACH + 1) + (n - m))
            else:
                weight = tl.zeros([], dtype=stencil.dtype.element_ty)
            weights = weights + (weight,)
    return weights


@triton.jit
def patch_weight(
    weights, first: tl.constexpr, table, n: tl.constexpr, REACH: tl.constexpr, LEFT: tl.constexpr
):  # fmt: skip
    """Return the weight of patch key n for boundary weights in a tuple, from entry `first` on."""
    SURE: tl.constexpr = REACH - 1 if LEFT else 0  # reaches every patch key
    total = weights[first + SURE] * table[SURE * 2 * REACH + n]
    for m in tl.static_range(REACH):
        if m != SURE and ((LEFT and n <= m + REACH) or (not LEFT and n >= m)):
            total += weights[first + m] * table[m * 2 * REACH + n]
    return total


@triton.jit
def patch_weights(
    weights, first: tl.constexpr, stride: tl.constexpr, table, REACH: tl.constexpr, RUN: tl.constexpr,
    LEFT: tl.constexpr,
):  # fmt: skip
    """Return `patch_weight` of row o at ``2 reach o + n``; its weights begin at ``first + o stride``."""
    patch = ()
    for o in tl.static_range(RUN):
        for n in tl.static_range(2 * REACH):
            patch = patch + (patch_weight(weights, first + o * stride, table, n, REACH, LEFT),)
    return patch


@triton.jit
def dropout_factors(seed, row, p, REACH: tl.constexpr, TYPE: tl.constexpr):
    """Return the dropout factors of the boundary weights of each row: 0, or 1 / (1 - p).

    Args:
        row: Number of each row among the rows of all heads and texts.

    Returns:
        A tuple of REACH vectors ``[rows]``, which are the same for the same seed.
    """
    CALLS: tl.constexpr = (REACH + 3) // 4  # each returns four numbers
    factors = ()
    for call in tl.static_range(CALLS):
        first, second, third, fourth = tl.rand4x(seed, row * CALLS + call)
        numbers = (first, second, third, fourth)
        for n in tl.static_range(4):
            if 4 * call + n < REACH:
                factors = factors + (tl.where(numbers[n] >= p, 1.0 / (1.0 - p), 0.0).to(TYPE),)
    return factors


@triton.jit
def row_of(rows, n: tl.constexpr, H: tl.constexpr):
    """Return entry n of a tuple of rows."""
    row = ()
    for h in tl.static_range(H):
        row = row + (rows[n * H + h],)
    return row


@triton.jit
def upcast_rows(rows, COUNT: tl.constexpr, H: tl.constexpr, TYPE: tl.constexpr):
    """Convert a tuple of rows to a more precise type."""
    more = ()
    for n in tl.static_range(COUNT * H):
        more = more + (upcast(rows[n], TYPE),)
    return more


@triton.jit
def inner(row, rows, n: tl.constexpr, H: tl.constexpr):
    """Return the inner products ``[strands]`` of a row with entry n of a tuple of rows."""
    products = row[0] * upcast(rows[n * H], row[0].dtype)
    for h in tl.static_range(1, H):
        products += row[h] * upcast(rows[n * H + h], row[0].dtype)
    return tl.sum(products, 1)


@triton.jit
def inner_band(row, rows, COUNT: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr):
    """Return the inner products of row o and ``rows[o + n]`` at ``(o + n) RUN + o``."""
    products = ()
    for x in tl.static_range(RUN + COUNT - 1):
        for o in tl.static_range(RUN):
            if x >= o and x < o + COUNT:
                products = products + (inner(row_of(row, o, H), rows, x, H),)
            else:
                products = products + (0.0,)
    return products


@triton.jit
def add_row(sums, weight, rows, n: tl.constexpr, H: tl.constexpr):
    """Return a row plus `weight` times entry n of a tuple of rows."""
    more = ()
    for h in tl.static_range(H):
        more = more + (sums[h] + weight[:, None] * upcast(rows[n * H + h], weight.dtype),)
    return more


@triton.jit
def add_band(sums, weights, rows, COUNT: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr):
    """Add ``weights[o COUNT + n] * rows[o + n]`` to row o."""
    for x in tl.static_range(RUN + COUNT - 1):
        more = ()
        for o in tl.static_range(RUN):
            row = row_of(sums, o, H)
            if x >= o and x < o + COUNT:
                row = add_row(row, weights[o * COUNT + x - o], rows, x, H)
            more = more + row
        sums = more
    return sums


@triton.jit
def add_shares(row, weights, rows, o: tl.constexpr, COUNT: tl.constexpr):
    """Do the same as `add_band` for row o, which needs fewer registers than all rows at once."""
    for n in tl.static_range(COUNT):
        row += weights[o * COUNT + n][:, None] * upcast(rows[o + n], row.dtype)
    return row


@triton.jit
def place_of(row, STRANDS: tl.constexpr, RUN: tl.constexpr):
    """Return the place of a row's entries in a line of `row_weights`.

    The rows of a program have the layout ``[run, strands]``, so that its stores are contiguous.
    """
    row = row.to(tl.uint32)  # unsigned quotients are shifts
    of_program = row % (STRANDS * RUN)
    return row - of_program + (of_program % RUN) * STRANDS + of_program // RUN
