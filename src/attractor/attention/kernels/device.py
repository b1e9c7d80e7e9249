"""Device functions of all kernels of linear PDEs.

A tuple of rows contains row n of every strand in its entries ``n H`` to ``n H + H - 1``, one entry
``[strands, columns / H]`` for each of the H pieces of a row. A key or row is *free* if no wall is within
reach.
"""

# Kernel arguments have no types that mypy knows; tuples of tiles grow by addition only.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005

import torch
import triton
import triton.language as tl

from attractor.attention.kernels import INTERPRETED

# Arguments for whose values Triton compiles no separate kernels.
SIZES = [
    "tokens", "heads", "stencil_h", "begin", "end", "left", "right", "shift", "far_rows", "far_line"
]  # fmt: skip
NVIDIA = tl.constexpr(not INTERPRETED and torch.version.hip is None)
PIECE = tl.constexpr(8)  # columns of a thread in half precision, whose products are summed first
TILE = tl.constexpr(16)  # rows near walls that are computed at a time, at least twice the reach


@triton.jit
def from_two(number, rest, TYPE: tl.constexpr):
    """Return a number that was passed as the sum of two."""
    return tl.full((), 0.0, TYPE) + number + rest


@triton.jit
def upcast(x, TYPE: tl.constexpr):
    """Convert x to a type that is at least as precise."""
    if NVIDIA and x.dtype == tl.bfloat16 and tl.float32 == TYPE:
        # One instruction per entry; the compiler generates three.
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = x.to(TYPE)
    return y


@triton.jit
def load_masked(x, stride, row, column, ok, TYPE: tl.constexpr):
    """Load rows of x in a type, with zeros where not `ok`; other entries are not read."""
    where = row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(x + where, mask=ok, other=0.0).to(TYPE)


@triton.jit
def load_piece(
    x, stride, first, rows, n: tl.constexpr, h: tl.constexpr, ENDS: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Load piece h of row ``first + n`` of every strand.

    Beyond the ends of x, this is zero if ENDS, and the first or last row otherwise.
    """
    column = h * (COLUMNS // H) + tl.arange(0, COLUMNS // H)[None, :]
    row = tl.minimum(tl.maximum(first + n, 0), rows - 1)
    where = x + row.to(tl.int64)[:, None] * stride + column
    if ENDS and DIM == COLUMNS:
        piece = tl.load(where, mask=(row == first + n)[:, None], other=0.0)
    elif ENDS:
        piece = tl.load(where, mask=(row == first + n)[:, None] & (column < DIM), other=0.0)
    elif DIM == COLUMNS:
        piece = tl.load(where)
    else:
        piece = tl.load(where, mask=column < DIM, other=0.0)
    return piece


@triton.jit
def load_rows(
    x, stride, first, rows,
    COUNT: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Load rows ``first`` to ``first + COUNT - 1`` of every strand; beyond the ends, the last row."""
    tiles = ()
    for n in tl.static_range(COUNT):
        for h in tl.static_range(H):
            tiles = tiles + (load_piece(x, stride, first, rows, n, h, False, DIM, COLUMNS, H),)
    return tiles


@triton.jit
def load_pieces(
    x, stride, first, rows, h: tl.constexpr, ENDS: tl.constexpr,
    COUNT: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Load piece h of rows ``first`` to ``first + COUNT - 1`` of every strand, see `load_piece`."""
    tiles = ()
    for n in tl.static_range(COUNT):
        tiles = tiles + (load_piece(x, stride, first, rows, n, h, ENDS, DIM, COLUMNS, H),)
    return tiles


@triton.jit
def store_piece(
    x, stride, row, tile, ok, h: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """Store piece h of one row of x per strand, where `ok`."""
    column = h * (COLUMNS // H) + tl.arange(0, COLUMNS // H)[None, :]
    mask = ok[:, None]
    if DIM != COLUMNS:
        mask = mask & (column < DIM)
    where = x + row.to(tl.int64)[:, None] * stride + column
    tl.store(where, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def store_row(
    x, stride, row, tiles, n: tl.constexpr, ok, DIM: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """Store entry n of a tuple of rows to `row` of every strand, where `ok`."""
    for h in tl.static_range(H):
        store_piece(x, stride, row, tiles[n * H + h], ok, h, DIM, COLUMNS, H)


@triton.jit
def columns_of(vectors, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return ``[strands, WIDTH]`` with COUNT vectors ``[strands]`` as the first columns, then zeros."""
    column = tl.arange(0, WIDTH)[None, :]
    tile = tl.where(column == 0, vectors[0][:, None], 0.0)
    for n in tl.static_range(1, COUNT):
        tile = tl.where(column == n, vectors[n][:, None], tile)
    return tile


@triton.jit
def keys_to_walls(open, stride, key, tokens, SPAN: tl.constexpr, FACES: tl.constexpr):
    """Return the numbers of keys before and after each key up to the next wall, at most SPAN."""
    before, after = tl.minimum(key, SPAN), tl.minimum(tokens - 1 - key, SPAN)
    if FACES:
        left, right = (key >= 0).to(tl.int32), (key >= 0).to(tl.int32)
        before, after = key * 0, key * 0
        for n in tl.static_range(SPAN):
            face = key - 1 - n
            left *= tl.load(open + face * stride, mask=face >= 0, other=0).to(tl.int32)
            face = key + n
            right *= tl.load(open + face * stride, mask=face < tokens - 1, other=0).to(tl.int32)
            before, after = before + left, after + right
    return before, after


@triton.jit
def no_wall(
    open, stride, start, tokens,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, ROWS: tl.constexpr, FACES_SEEN: tl.constexpr,
):  # fmt: skip
    """Return whether there is no wall inside the sequence among ROWS rows and the keys around them.

    BEFORE, AFTER: Numbers of further keys before and after these rows.
    """
    face = start - BEFORE + tl.arange(0, FACES_SEEN)
    exists = (face >= 0) & (face < tl.minimum(start + ROWS + AFTER, tokens) - 1)
    closed = tl.load(open + face * stride, mask=exists, other=1) == 0
    return tl.max(closed.to(tl.int32), 0) == 0


@triton.jit
def free_stencil(stencil, REACH: tl.constexpr):
    """Load the stencil of a free key as a tuple of numbers."""
    weights = ()
    for n in tl.static_range(2 * REACH + 1):
        weights = weights + (tl.load(stencil + (REACH * (REACH + 1) + REACH) * (2 * REACH + 1) + n),)
    return weights


@triton.jit
def zero_products(STRANDS: tl.constexpr, COLUMNS: tl.constexpr, REACH: tl.constexpr, TYPE: tl.constexpr):
    """Return zero sums for `step_transposed`, one per stencil entry and columns of a thread."""
    products = ()
    for _ in tl.static_range(2 * REACH + 1):
        products = products + (tl.zeros([STRANDS, COLUMNS // PIECE], dtype=TYPE),)
    return products


@triton.jit
def step_transposed(
    sums, products, grads, weights, value,
    o: tl.constexpr, REACH: tl.constexpr, TYPE: tl.constexpr, OF_STENCIL: tl.constexpr,
):  # fmt: skip
    """Add the transposed steps of free rows to gradients, and the stencil's gradient to products.

    Args:
        sums: Gradients of values.
        products: Sums of products of gradients and `value`, see `zero_products`.
        grads: Gradients of the stepped values, a tuple of the rows within reach, from entry o on.
        weights: The stencil, see `free_stencil`.
        value: The values of these rows.
    """
    more = ()
    for n in tl.static_range(2 * REACH + 1):
        grad = upcast(grads[o + n], TYPE)
        sums += weights[2 * REACH - n] * grad
        if OF_STENCIL:
            by_thread = tl.reshape(value * grad, [sums.shape[0], sums.shape[1] // PIECE, PIECE])
            more = more + (products[n] + tl.sum(by_thread, 2),)
    if not OF_STENCIL:
        more = products
    return sums, more


@triton.jit
def step_transposed_near_walls(
    sums, free, do, do_t, count, value, stencil, row, before, after, column, inside,
    REACH: tl.constexpr, WIDTH: tl.constexpr, OF_STENCIL: tl.constexpr,
):  # fmt: skip
    """Add the transposed steps of any rows to gradients, and products of free rows to `free`.

    Args:
        sums: Gradients of values.
        free: Sums of products of gradients and `value`, ``[rows, WIDTH]``.
        count: Number of rows of `do`; later rows are zero and not in memory.
        before, after: Results of `keys_to_walls` with a span of twice the reach.
    """
    TYPE: tl.constexpr = stencil.dtype.element_ty
    entry = tl.arange(0, WIDTH)[None, :]
    for n in tl.static_range(2 * REACH + 1):
        offset = n - REACH
        ok = (offset >= -before) & (offset <= after) & (row + offset < count)
        left = tl.minimum(tl.maximum(before + offset, 0), REACH)
        right = tl.minimum(tl.maximum(after - offset, 0), REACH)
        place = left * (REACH + 1) + right
        weight = tl.load(stencil + place * (2 * REACH + 1) + (2 * REACH - n))
        grad = load_masked(do, do_t, row + offset, column, ok[:, None] & inside, TYPE)
        sums += weight[:, None] * grad
        if OF_STENCIL:
            product = tl.where(left + right == 2 * REACH, tl.sum(grad * value, 1), 0.0)
            free += tl.where(entry == 2 * REACH - n, product[:, None], 0.0)
    return sums, free


@triton.jit
def store_products(
    free_sums, products, near, REACH: tl.constexpr, STRANDS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store a program's sums ``[2 reach + 1]`` of the products of both functions above."""
    entry = tl.arange(0, WIDTH)
    sums = tl.zeros([STRANDS, WIDTH], dtype=near.dtype)
    for n in tl.static_range(2 * REACH + 1):
        own = entry[None, :] == 2 * REACH - n
        sums += tl.where(own, tl.sum(products[n], 1)[:, None], 0.0)
    free_sums += tl.program_id(0).to(tl.int64) * (2 * REACH + 1) + entry
    tl.store(free_sums, tl.sum(sums, 0) + tl.sum(near, 0), mask=entry < 2 * REACH + 1)
