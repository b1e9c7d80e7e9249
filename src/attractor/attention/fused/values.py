"""All steps of a linear PDE on the values, in one pass over them.

A stepped value is a sum over the keys within reach. Its weights, the taps, depend only on how many keys
there are before and after its own up to the next wall: nothing passes a wall, so what is behind it does
not matter, and a wall out of reach is not felt. So one small table serves the ends of a sequence, of
documents, and padding:

    taps[head, before, after, reach + offset]      before, after = 0 .. reach, the last for "or more"

Kernels are bound by memory. A program holds the sums of some rows in registers and reads the rows at
every offset; all but the first time they come from the cache. Away from walls the taps are the same for
all rows of a program, else each row looks up its own. The gradient of values is the transposed sum; that
of the taps is added up by every program and then over programs, always in the same order.
"""

# Arguments of kernels have no types that mypy could know.
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from attractor.attention.fused import INTERPRETED
from attractor.attention.pdes import PDE, AdvectionDiffusion, Diffusion, Line, Wave, take_steps
from attractor.attention.precision import wide

PROGRAMS = 1024  # about so many share the sums of taps: enough to fill a GPU, few enough to add up


def operator(name: str) -> Callable[..., Any]:
    """A decorator: an operator that compilers see through, or, in the interpreter, an opaque one."""
    return (custom_op if INTERPRETED else triton_op)(f"attractor::{name}", mutates_args=())


def taps(pde: PDE, steps: int, dt: float, like: Tensor) -> Tensor:
    """The table ``[heads or 1, reach + 1, reach + 1, 2 reach + 1]`` for values like these."""
    dtype = wide(like.dtype)
    found = _factors(pde, dt)
    if found is None:
        return taps_of_any(pde, steps, dt, torch.empty((), dtype=dtype, device=like.device))
    *factors, wave = found
    spread, drift = (_each(factor, dtype, like.device) for factor in factors)
    spread, drift = (x.expand(max(len(spread), len(drift))) for x in (spread, drift))
    return make_taps(spread.contiguous(), drift.contiguous(), steps, wave)[0]


def taps_of_any(pde: PDE, steps: int, dt: float, like: Tensor) -> Tensor:
    """The same for any linear PDE, by steps of torch: a unit for every place between walls."""
    reach = steps * pde.reach
    side = torch.arange(reach + 1, device=like.device)
    face = torch.arange(2 * reach, device=like.device)
    open = (face >= reach - side[:, None, None]) & (face < reach + side[:, None])
    unit = (torch.arange(2 * reach + 1, device=like.device) == reach).to(like.dtype)
    units = unit.expand((reach + 1) ** 2, -1)
    moved = take_steps(pde, units, Line(-1, open.flatten(0, 1)), steps, dt)
    return moved.reshape(-1, reach + 1, reach + 1, 2 * reach + 1)


def _factors(pde: PDE, dt: float) -> tuple[float | Tensor, float | Tensor, bool] | None:
    """(a, b, wave): a step adds ``a laplacian + b gradient`` to the map, or to what is added to it."""
    if type(pde) is Diffusion:
        return dt * pde.alpha, 0.0, False
    if type(pde) is AdvectionDiffusion:
        return dt * pde.alpha, dt * pde.beta, False
    if type(pde) is Wave:
        return (dt * pde.c) ** 2, 0.0, True
    return None


def _each(factor: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(factor, Tensor):
        return factor.to(device, dtype).reshape(-1)
    return torch.full((1,), factor, dtype=dtype, device=device)


@triton.jit
def _make_taps(
    spread, drift, taps, of_spread, of_drift,
    STEPS: tl.constexpr, WAVE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One place between walls, of one head: a unit takes all steps, and so do its derivatives."""
    head, kind = tl.program_id(0), tl.program_id(1)
    before, after = kind // (STEPS + 1), kind % (STEPS + 1)
    a, b = tl.load(spread + head), tl.load(drift + head)
    to, source = tl.arange(0, PLACES)[:, None], tl.arange(0, PLACES)[None, :]
    right = ((to >= STEPS - before) & (to < STEPS + after)).to(a.dtype)  # of the face after a place
    left = ((to > STEPS - before) & (to <= STEPS + after)).to(a.dtype)
    own = (source == to).to(a.dtype)
    higher, lower = (source == to + 1).to(a.dtype), (source == to - 1).to(a.dtype)
    laplacian = right * (higher - own) + left * (lower - own)
    gradient = 0.5 * (right * (higher + own) - left * (lower + own))
    change = a * laplacian + b * gradient
    place = tl.arange(0, PLACES)
    u = (place == STEPS).to(a.dtype)
    du, dv, w, dw, dx = u * 0, u * 0, u * 0, u * 0, u * 0
    for _ in tl.static_range(STEPS):
        more = tl.sum(change * u[None, :], 1)
        by_spread = tl.sum(change * du[None, :] + laplacian * u[None, :], 1)
        by_drift = tl.sum(change * dv[None, :] + gradient * u[None, :], 1)
        if WAVE:
            w, dw, dx = w + more, dw + by_spread, dx + by_drift
        else:
            w, dw, dx = more, by_spread, by_drift
        u, du, dv = u + w, du + dw, dv + dx
    at = (head * (STEPS + 1) * (STEPS + 1) + kind) * (2 * STEPS + 1) + place
    inside = place < 2 * STEPS + 1
    tl.store(taps + at, u, mask=inside)
    tl.store(of_spread + at, du, mask=inside)
    tl.store(of_drift + at, dv, mask=inside)


@operator("make_taps")
def make_taps(spread: Tensor, drift: Tensor, steps: int, wave: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Taps of steps that add ``spread laplacian + drift gradient``, and their derivatives by the two.

    Args:
        spread, drift: ``[heads]``.
        wave: it is added to a velocity, which starts at 0 and is added to the map.
    """
    found = _make_taps_like(spread, drift, steps, wave)
    grid = (len(spread), (steps + 1) ** 2)
    places = triton.next_power_of_2(2 * steps + 1)
    wrap_triton(_make_taps)[grid](spread, drift, *found, steps, wave, places, num_warps=1)
    return found


def _make_taps_like(
    spread: Tensor, drift: Tensor, steps: int, wave: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (len(spread), steps + 1, steps + 1, 2 * steps + 1)
    return spread.new_empty(shape), spread.new_empty(shape), spread.new_empty(shape)


def _make_taps_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _make_taps_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return *((grad * x).sum((1, 2, 3)) for x in ctx.saved_tensors), None, None


make_taps.register_fake(_make_taps_like)
make_taps.register_autograd(_make_taps_backward, setup_context=_make_taps_context)


@triton.jit
def room(open, stride, at, tokens, SPAN: tl.constexpr, FACES: tl.constexpr):
    """How many keys there are before and after each, up to the next wall or SPAN."""
    before, after = tl.minimum(at, SPAN), tl.minimum(tokens - 1 - at, SPAN)
    if FACES:
        left, right = at >= 0, at >= 0
        before, after = at * 0, at * 0
        for n in tl.static_range(SPAN):
            face = at - 1 - n
            left = left & (tl.load(open + face * stride, mask=face >= 0, other=0) != 0)
            face = at + n
            right = right & (tl.load(open + face * stride, mask=face < tokens - 1, other=0) != 0)
            before, after = before + left.to(tl.int32), after + right.to(tl.int32)
    return before, after


@triton.jit
def rows_at(x, stride, at, column, ok, DTYPE: tl.constexpr):
    """Rows of x in that type, zeros where not ok; only what is ok is read."""
    where = at.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(x + where, mask=ok, other=0.0).to(DTYPE)


@triton.jit
def _step(
    value, open, taps, out, tokens, heads,
    value_b, value_h, value_t, out_b, out_h, out_t,
    open_b, open_h, open_t, taps_h,
    REACH: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FACES: tl.constexpr,
):  # fmt: skip
    """Some rows of one head: the sum over all offsets."""
    TYPE: tl.constexpr = taps.dtype.element_ty
    blocks = tl.cdiv(tokens, ROWS)
    pair = tl.program_id(0) // blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    at = tl.minimum(row, tokens - 1)
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    before, after = room(open + batch * open_b + head * open_h, open_t, at, tokens, REACH, FACES)
    value += batch * value_b + head * value_h
    taps += head * taps_h
    sums = tl.zeros([ROWS, COLUMNS], dtype=TYPE)
    if tl.min(tl.minimum(before, after), 0) == REACH:
        taps += (REACH * (REACH + 1) + REACH) * (2 * REACH + 1)
        for n in tl.static_range(2 * REACH + 1):
            sums += tl.load(taps + n) * rows_at(value, value_t, at + (n - REACH), column, inside, TYPE)
    else:
        kind = (before * (REACH + 1) + after) * (2 * REACH + 1)
        for n in tl.static_range(2 * REACH + 1):
            ok = (n - REACH >= -before) & (n - REACH <= after)
            tap = tl.load(taps + kind + n, mask=ok, other=0.0)
            there = rows_at(value, value_t, at + (n - REACH), column, ok[:, None] & inside, TYPE)
            sums += tap[:, None] * there
    out += batch * out_b + head * out_h + row.to(tl.int64)[:, None] * out_t + column[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=(row < tokens)[:, None] & inside)


@triton.jit
def give_back(
    grad, grad_t, count, held, taps, at, before, after, column, inside, sums, free,
    REACH: tl.constexpr, TAPS: tl.constexpr, OF_TAPS: tl.constexpr,
):  # fmt: skip
    """The transposed sum, added to `sums`, and products with the values of rows that feel no wall.

    Args:
        count: rows of grad from here on are zeros, and not there.
        held: values at `at`.
        before, after: with a span of twice the reach, so that they hold for all rows within reach.
        free: ``[rows, TAPS]``, to which the products are added.
    """
    TYPE: tl.constexpr = taps.dtype.element_ty
    LAST: tl.constexpr = REACH * (REACH + 1) + REACH
    tap_of = tl.arange(0, TAPS)[None, :]
    if tl.min(tl.minimum(before, after), 0) == 2 * REACH:
        taps += LAST * (2 * REACH + 1)
        for n in tl.static_range(2 * REACH + 1):
            there = rows_at(grad, grad_t, at + (n - REACH), column, inside, TYPE)
            sums += tl.load(taps + (2 * REACH - n)) * there
            if OF_TAPS:
                products = tl.sum(there * held, 1)
                free += tl.where(tap_of == 2 * REACH - n, products[:, None], 0.0)
    else:
        for n in tl.static_range(2 * REACH + 1):
            step = n - REACH
            ok = (step >= -before) & (step <= after) & (at + step < count)
            kind = tl.minimum(before + step, REACH) * (REACH + 1) + tl.minimum(after - step, REACH)
            tap = tl.load(taps + kind * (2 * REACH + 1) + (2 * REACH - n), mask=ok, other=0.0)
            there = rows_at(grad, grad_t, at + step, column, ok[:, None] & inside, TYPE)
            sums += tap[:, None] * there
            if OF_TAPS:
                products = tl.where(kind == LAST, tl.sum(there * held, 1), 0.0)
                free += tl.where(tap_of == 2 * REACH - n, products[:, None], 0.0)
    return sums, free


@triton.jit
def _near_walls(
    grad, value, open, taps, parts, tokens, count, heads, blocks,
    grad_b, grad_h, grad_t, value_b, value_h, value_t, open_b, open_h, open_t,
    REACH: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KINDS: tl.constexpr, TAPS: tl.constexpr, FACES: tl.constexpr,
):  # fmt: skip
    """Products of gradients and values of the rows that feel a wall, added up for each of its places.

    Without faces a head has two programs, for its first rows and for its last.
    """
    TYPE: tl.constexpr = taps.dtype.element_ty
    chunk = tl.program_id(1)
    pair = tl.program_id(0)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    grad += batch * grad_b + head * grad_h
    value += batch * value_b + head * value_h
    open += batch * open_b + head * open_h
    kinds, tap_of = tl.arange(0, KINDS)[:, None], tl.arange(0, TAPS)[None, :]
    found = tl.zeros([KINDS, TAPS], dtype=TYPE)
    for n in range(blocks):
        if FACES:
            row = (chunk * blocks + n) * ROWS + tl.arange(0, ROWS)
        else:
            row = chunk * tl.maximum(tokens - ROWS, ROWS) + tl.arange(0, ROWS)
        at = tl.minimum(row, tokens - 1)
        before, after = room(open, open_t, at, tokens, REACH, FACES)
        felt = (before + after < 2 * REACH) & (row < count)
        if tl.max(felt.to(tl.int32), 0) > 0:
            own = rows_at(grad, grad_t, at, column, felt[:, None] & inside, TYPE)
            hit = (before * (REACH + 1) + after)[None, :] == kinds
            for tap in range(2 * REACH + 1):
                step = tap - REACH
                ok = (step >= -before) & (step <= after) & felt
                there = rows_at(value, value_t, at + step, column, ok[:, None] & inside, TYPE)
                products = tl.sum(own * there, 1)
                of_kind = tl.sum(tl.where(hit, products[None, :], 0.0), 1)
                found += tl.where(tap_of == tap, of_kind[:, None], 0.0)
    parts += (pair.to(tl.int64) * tl.num_programs(1) + chunk) * (
        (REACH + 1) * (REACH + 1) * (2 * REACH + 1)
    )
    ok = (kinds < (REACH + 1) * (REACH + 1)) & (tap_of < 2 * REACH + 1)
    tl.store(parts + kinds * (2 * REACH + 1) + tap_of, found, mask=ok)


@triton.jit
def _step_backward(
    grad, value, open, taps, of_value, parts,
    tokens, heads, repeat,
    grad_b, grad_h, grad_t, value_b, value_h, value_t,
    out_b, out_h, out_t, open_b, open_h, open_t, taps_h,
    REACH: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TAPS: tl.constexpr, FACES: tl.constexpr, OF_TAPS: tl.constexpr,
):  # fmt: skip
    """`repeat` blocks of rows of one head, one after the other."""
    TYPE: tl.constexpr = taps.dtype.element_ty
    chunks = tl.cdiv(tokens, ROWS * repeat)
    pair = tl.program_id(0) // chunks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (column < DIM)[None, :]
    grad += batch * grad_b + head * grad_h
    value += batch * value_b + head * value_h
    of_value += batch * out_b + head * out_h
    open += batch * open_b + head * open_h
    taps += head * taps_h
    free = tl.zeros([ROWS, TAPS], dtype=TYPE)
    for n in range(repeat):
        row = ((tl.program_id(0) % chunks) * repeat + n) * ROWS + tl.arange(0, ROWS)
        at = tl.minimum(row, tokens - 1)
        own = (row < tokens)[:, None] & inside
        before, after = room(open, open_t, at, tokens, 2 * REACH, FACES)
        held = tl.zeros([ROWS, COLUMNS], dtype=TYPE)
        if OF_TAPS:
            held = rows_at(value, value_t, at, column, own, TYPE)
        sums = tl.zeros([ROWS, COLUMNS], dtype=TYPE)
        sums, free = give_back(
            grad, grad_t, tokens, held, taps, at, before, after, column, inside, sums, free,
            REACH, TAPS, OF_TAPS,
        )  # fmt: skip
        where = of_value + row.to(tl.int64)[:, None] * out_t + column[None, :]
        tl.store(where, sums.to(of_value.dtype.element_ty), mask=own)
    if OF_TAPS:
        tap = tl.arange(0, TAPS)
        parts += tl.program_id(0).to(tl.int64) * (2 * REACH + 1) + tap
        tl.store(parts, tl.sum(free, 0), mask=tap < 2 * REACH + 1)


def tile(dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program for values of that dim; at least twice the reach of rows."""
    columns = max(16, triton.next_power_of_2(dim))
    held = 2048 if dtype.itemsize <= 4 else 1024  # a thread holds 16 sums, or 8
    rows = max(16, min(64, held // columns))
    return rows, columns, max(4, rows * columns * 4 // held)


def by_rows(x: Tensor) -> Tensor:
    """x with every row in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, heads, and tokens; 0 where there is one for all."""
    b, h, t = x.stride()[:3]
    return (b if x.shape[0] > 1 else 0), (h if x.shape[1] > 1 else 0), t


def _faces(open: Tensor | None, other: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Something to point to, and its strides along batch, heads and keys."""
    if open is None:
        return other, (0, 0, 0)
    faces = open.view(torch.uint8)[..., 0, :]
    return faces, strides(faces.unsqueeze(-1))


@operator("step_values")
def step(value: Tensor, taps: Tensor, open: Tensor | None) -> Tensor:
    """Values ``[batch, heads, keys, dim]`` after all steps.

    Args:
        taps: of heads or of one head, in float32 for half precision, else in value's type.
        open: bool ``[batch or 1, heads or 1, 1, keys - 1]``, False at walls, or None.
    """
    value, taps, out = by_rows(value), taps.contiguous(), _like(value)
    batch, heads, tokens, dim = value.shape
    rows, columns, warps = tile(int(dim), value.dtype)
    faces, face_strides = _faces(open, value)
    grid = (batch * heads * triton.cdiv(tokens, rows),)
    wrap_triton(_step)[grid](
        value, faces, taps, out, tokens, heads, *strides(value), *strides(out), *face_strides,
        taps.stride(0) if taps.shape[0] > 1 else 0, int(taps.shape[-1]) // 2, int(dim), rows, columns,
        open is not None, num_warps=warps,
    )  # fmt: skip
    return out


def _like(value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(by_rows(value))


@operator("step_values_backward")
def step_backward(
    grad: Tensor, value: Tensor, taps: Tensor, open: Tensor | None, of_taps: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of value and taps; the latter without entries if it is not wanted."""
    grad, value, taps = by_rows(grad), by_rows(value), taps.contiguous()
    batch, heads, tokens, dim = value.shape
    rows, columns, warps = tile(int(dim), value.dtype)
    of_value, reach = torch.empty_like(value), int(taps.shape[-1]) // 2
    repeat, programs = shared_out(batch * heads, triton.cdiv(tokens, rows), of_taps)
    parts = taps.new_empty(programs if of_taps else 0, 2 * reach + 1)
    faces, face_strides = _faces(open, value)
    wrap_triton(_step_backward)[(programs,)](
        grad, value, faces, taps, of_value, parts, tokens, heads, repeat,
        *strides(grad), *strides(value), *strides(of_value), *face_strides,
        taps.stride(0) if taps.shape[0] > 1 else 0, reach, int(dim), rows, columns,
        triton.next_power_of_2(2 * reach + 1), open is not None, of_taps, num_warps=warps,
    )  # fmt: skip
    if not of_taps:
        return of_value, taps.new_empty(0)
    return of_value, taps_gradient(grad, value, open, taps, parts)


def shared_out(pairs: int, blocks: int, few: bool) -> tuple[int, int]:
    """How many blocks of a head a program takes, and how many programs there are for all."""
    repeat = max(1, min(blocks, pairs * blocks // PROGRAMS)) if few else 1
    return repeat, pairs * triton.cdiv(blocks, repeat)


def taps_gradient(
    grad: Tensor, value: Tensor, open: Tensor | None, taps: Tensor, free: Tensor
) -> Tensor:
    """Of the shape of taps, from programs' sums over rows that feel no wall ``[programs, 2 reach + 1]``.

    Args:
        grad: of the first keys, at least; that of the others is zero.
    """
    (batch, heads, tokens, dim), reach = value.shape, int(taps.shape[-1]) // 2
    columns = tile(int(dim), value.dtype)[1]
    rows, chunks, blocks = 16, 2, 1
    if open is not None:
        all_blocks = triton.cdiv(tokens, rows)
        blocks, programs = shared_out(batch * heads, all_blocks, True)
        chunks = programs // (batch * heads)
    parts = taps.new_empty(batch * heads * chunks, *taps.shape[1:])
    faces, face_strides = _faces(open, value)
    wrap_triton(_near_walls)[(batch * heads, chunks)](
        grad, value, faces, taps, parts, tokens, grad.shape[2], heads, blocks,
        *strides(grad), *strides(value), *face_strides, reach, int(dim), rows, columns,
        triton.next_power_of_2((reach + 1) ** 2), triton.next_power_of_2(2 * reach + 1),
        open is not None, num_warps=4,
    )  # fmt: skip
    found = added_up(parts, taps, batch, heads)
    found[:, reach, reach] = added_up(free, taps, batch, heads)
    return found


def added_up(parts: Tensor, taps: Tensor, batch: int, heads: int) -> Tensor:
    """The sum of programs' parts ``[batch * heads * n, ...]``, of the shape of taps."""
    parts = parts.view(batch, heads, -1, *parts.shape[1:])
    return parts.sum((0, 2)) if taps.shape[0] > 1 else parts.sum((0, 1, 2)).unsqueeze(0)


def _step_backward_like(
    grad: Tensor, value: Tensor, taps: Tensor, open: Tensor | None, of_taps: bool
) -> tuple[Tensor, Tensor]:
    return _like(value), taps.new_empty(taps.shape if of_taps else 0)


def _step_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _step_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[1]
    of_value, of_taps = step_backward(grad, *ctx.saved_tensors, needed)
    return of_value, of_taps if needed else None, None


step.register_fake(_like)
step.register_autograd(_step_gradients, setup_context=_step_context)
step_backward.register_fake(_step_backward_like)
