"""Sliding windows with global tokens and a linear PDE, or none: a fused operator, and a few keys more.

As in `near`, with two walls: of a row's window, the keys within reach of either wall spread their
weights over twice the reach; all others go through the operator, with stepped values. Global keys are
few, and lie between walls of their own. All are under one softmax. Forward is three launches:
`values.step`, the operator, and `merge_window`. Backward gives the operator the merged output and
log-sum-exp; then `window_rows` does what a row needs, and `window_keys` what a key gets back, through
the steps of its value too. Without a PDE only global keys are left beside the operator, and keys need
nothing more.

Only rows whose windows are whole are done so. If causal, those before them are ordinary causal attention
(`near`), of the same stepped values; else the first rows and the last are given.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from attractor.attention.engines import softmax
from attractor.attention.kernels import near, window_kernels
from attractor.attention.kernels.rows import by_rows, strides, table_stride
from attractor.attention.kernels.taps import (
    either,
    in_two,
    operator,
    parts_of,
    power_of_two,
    wrap_triton,
)
from attractor.attention.kernels.values import step, step_backward
from attractor.attention.masks import Scope
from attractor.attention.precision import accumulate_dtype, first_derivatives_only

GLOBALS = 8  # the most global keys: a kernel's code grows with them
# Pieces of a row, the run of a strand, and warps.
TILES = {
    "merge_window": (2, 2, 4),
    "window_rows": (2, 2, 4),
    "window_keys": (2, 4, 4),
}


def why_not(window: tuple[int, int], global_tokens: int, tokens: int, reach: int) -> str:
    """Why these kernels cannot do such windows, empty if they can; the tensors are `fused.why_not`'s."""
    left, right = window
    if left < 0 or right < 0:
        return "a window without a limit is no window"
    if left + right < 2 * reach:
        return f"windows of {left + right + 1} keys have none that is further than {reach} from a wall"
    if global_tokens > GLOBALS:
        return f"kernels take up to {GLOBALS} global tokens"
    if tokens <= global_tokens + left + 1 + right:
        return "no window is whole"
    return ""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_key: Tensor,
    first_value: Tensor,
    ends: tuple[Tensor, Tensor],
    taps: Tensor | None,
    window: tuple[int, int],
    scale: float,
) -> Tensor:
    """The output ``[batch, heads, tokens, value dim]``.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, as many heads and tokens each.
        first_key: of the global tokens ``[batch, heads, count, dim]``.
        first_value: what weights of the global tokens add ``[batch, heads, count, value dim]``.
        ends: the output of the first rows, with every row whose window touches the global tokens, and
            of the last, whose windows go beyond the last key.
        taps: of the PDE and its steps, as `values.taps` makes them; None without a PDE.
        window: (left, right), if not `why_not`.
    """
    return _Window.apply(query, key, value, first_key, first_value, *ends, taps, *window, scale)


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    count: int,
    taps: Tensor | None,
    left: int,
    scale: float,
) -> Tensor:
    """The same for windows (left, 0) with so many global tokens, where no row sees a later key."""
    return _Causal.apply(query, key, value, taps, left, count, scale)


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, first_key: Tensor, first_value: Tensor,
        head: Tensor, tail: Tensor, taps: Tensor | None, left: int, right: int, scale: float,
    ) -> Tensor:  # fmt: skip
        query, key, value = by_rows(query), by_rows(key), by_rows(value)
        first_key, first_value = by_rows(first_key), by_rows(first_value)
        stepped = value if taps is None else step(value, taps, None)
        out, lse = _forward(
            query, key, value, stepped, first_key, first_value, head, tail, taps, (left, right), scale
        )
        ctx.window, ctx.scale = (left, right), scale
        ctx.ends = head.shape[-2], query.shape[-2] - tail.shape[-2]
        ctx.save_for_backward(query, key, value, stepped, first_key, first_value, taps, out, lse)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, stepped, first_key, first_value, taps, out, lse = ctx.saved_tensors
        grad, (begin, end) = by_rows(grad), ctx.ends
        *grads, of_taps = _backward(
            grad, query, key, value, stepped, first_key, first_value, taps, out, lse, ctx.ends,
            ctx.window, ctx.scale, ctx.needs_input_grad[7],
        )  # fmt: skip
        return *grads, grad[..., :begin, :], grad[..., end:, :], of_taps, None, None, None


class _Causal(torch.autograd.Function):
    """All rows, with the gradients of what is used in several places added up here."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, taps: Tensor | None, left: int, count: int,
        scale: float,
    ) -> Tensor:  # fmt: skip
        query, key, value = by_rows(query), by_rows(key), by_rows(value)
        begin = count + left + 1  # before it are rows whose windows join the global tokens
        stepped, first_value = value, value[:, :, :count].to(accumulate_dtype(value.dtype))
        if taps is not None:
            stepped = step(value, taps, None)
            first_value = step(first_value, taps, None) if count else first_value
        q, k, v, w = (x[:, :, :begin] for x in (query, key, value, stepped))
        if taps is None:
            head, head_lse = softmax.attend(q, k, v, Scope(begin, begin, right=0), scale)
        else:
            head, head_lse = near.forward(q, k, v, w, taps, scale)
        out, lse = _forward(
            query, key, value, stepped, key[:, :, :count], first_value, head, head[:, :, :0], taps,
            (left, 0), scale,
        )  # fmt: skip
        ctx.left, ctx.count, ctx.scale = left, count, scale
        ctx.save_for_backward(query, key, value, stepped, first_value, taps, out, lse, head_lse)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, stepped, first_value, taps, out, lse, head_lse = ctx.saved_tensors
        needed, count, scale = ctx.needs_input_grad[3], ctx.count, ctx.scale
        grad, begin = by_rows(grad), count + ctx.left + 1
        *grads, of_first_key, of_first_value, of_taps = _backward(
            grad, query, key, value, stepped, key[:, :, :count], first_value, taps, out, lse,
            (begin, query.shape[2]), (ctx.left, 0), scale, needed,
        )  # fmt: skip
        more: Any
        g, q, k, v, w, o = (x[:, :, :begin] for x in (grad, query, key, value, stepped, out))
        if taps is None:
            more = softmax.attend_backward(g, q, k, v, o, head_lse, Scope(begin, begin, right=0), scale)
        else:
            *more, of_more = near.backward(g, q, k, v, w, taps, o, head_lse, scale, needed)
            of_taps = of_taps + of_more if needed else None
        if taps is not None and count:
            of_first_value, of_more = step_backward(
                of_first_value, value[:, :, :count], taps, None, needed
            )
            of_taps = of_taps + of_more if needed else None
        grads = [_plus_first(x, part) for x, part in zip(grads, more)]
        if count:
            grads[1:] = _plus_first(grads[1], of_first_key), _plus_first(grads[2], of_first_value)
        return *grads, of_taps, None, None, None


def _plus_first(whole: Tensor, part: Tensor) -> Tensor:
    """The whole, which is nobody else's, with that added to its first tokens."""
    first = whole[:, :, : part.shape[2]]
    if torch.compiler.is_compiling():
        return whole.slice_scatter(first + part.to(whole.dtype), 2, 0, part.shape[2])
    first += part
    return whole


def _forward(
    query: Tensor, key: Tensor, value: Tensor, stepped: Tensor, first_key: Tensor, first_value: Tensor,
    head: Tensor, tail: Tensor, taps: Tensor | None, window: tuple[int, int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and their log-sum-exp, as `merge_window` gives them."""
    far, far_lse = _attend_far(query, key, stepped, taps, window, scale)
    return merge_window(
        query, key, value, far, far_lse, first_key, first_value, head, tail, taps, *window, scale
    )


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, stepped: Tensor, first_key: Tensor,
    first_value: Tensor, taps: Tensor | None, out: Tensor, lse: Tensor, ends: tuple[int, int],
    window: tuple[int, int], scale: float, of_taps: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of query, key, value, first_key, first_value, and of taps if they are wanted."""
    of_query, of_key, of_value = _attend_far_backward(
        grad, query, key, stepped, out, lse, taps, window, scale
    )
    of_query, handed, of_first_key, of_first_value, sums = window_rows(
        grad, query, key, value, out, lse, first_key, first_value, taps, of_query, *ends, *window, scale,
        of_taps,
    )  # fmt: skip
    found = None
    if taps is None:
        of_key, of_value = of_key.view(key.shape), of_value.view(value.shape)
    else:
        of_key, of_value, found = window_keys(
            grad, query, value, handed, taps, of_key, of_value, sums, *window, of_taps
        )
    return of_query, of_key, of_value, of_first_key, of_first_value, found if of_taps else None


def _attend_far(
    query: Tensor,
    key: Tensor,
    stepped: Tensor,
    taps: Tensor | None,
    window: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What the operator makes of all keys but the near ones; see `_cut` and `_in_line`."""
    query, key, stepped = _in_line(query, key, stepped)
    rows, keys, scope = _cut(query.shape[-2], _reach(taps), window)
    return softmax.attend(query[..., rows, :], key[..., keys, :], stepped[..., keys, :], scope, scale)


def _attend_far_backward(
    grad: Tensor, query: Tensor, key: Tensor, stepped: Tensor, out: Tensor, lse: Tensor,
    taps: Tensor | None, window: tuple[int, int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and stepped value, as `_attend_far` has them."""
    grad, query, key, stepped, out = _in_line(grad, query, key, stepped, out)
    lse = lse.view(query.shape[:-1])
    rows, keys, scope = _cut(query.shape[-2], _reach(taps), window)
    return softmax.attend_backward(
        grad[..., rows, :], query[..., rows, :], key[..., keys, :], stepped[..., keys, :],
        out[..., rows, :], lse[..., rows], scope, scale,
    )  # fmt: skip


def _in_line(*given: Tensor) -> tuple[Tensor, ...]:
    """All heads as one sequence ``[1, 1, tokens, dim]``, if they lie so in memory; else as they are.

    Parts of it are in one piece then, which the operator wants, and need no copies. Rows at the joints
    see keys of two heads. But these are not done here: their output is given, and their weights are 0.
    """
    if all(x.is_contiguous() for x in given):
        return tuple(x.view(1, 1, -1, x.shape[-1]) for x in given)
    return given


def _cut(tokens: int, reach: int, window: tuple[int, int]) -> tuple[slice, slice, Scope]:
    """Which rows and keys to give the operator: as many, and so that both sides of its band are >= 0."""
    left, right = window[0] - reach, window[1] - reach
    shift, along = max(-right, 0), max(-left, 0)
    size = tokens - shift - along
    scope = Scope(size, size, left + along - shift, right + shift - along)
    return slice(shift, tokens - along), slice(along, tokens - shift), scope


def _reach(taps: Tensor | None) -> int:
    return 0 if taps is None else int(taps.shape[-1]) // 2


def _along(x: Tensor, like: Tensor) -> tuple[int, int, int]:
    """`strides` of what the operator gave for tensors like that one, in line or not."""
    if x.shape[:2] == like.shape[:2]:
        return strides(x)
    heads, tokens = like.shape[1:3]
    return heads * tokens * x.stride(2), tokens * x.stride(2), x.stride(2)


def _merged(
    query: Tensor, key: Tensor, value: Tensor, far: Tensor, far_lse: Tensor, first_key: Tensor,
    first_value: Tensor, head: Tensor, tail: Tensor, taps: Tensor | None, left: int, right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs ``[batch, heads, tokens, value dim]`` and their log-sum-exp ``[batch, heads, tokens]``.

    The log-sum-exp of rows that are given is infinite: they have no weights.

    Args:
        far, far_lse: what the operator gave.
        head, tail: the output of the first and of the last rows.
    """
    query, key, value, far = map(by_rows, (query, key, value, far))
    first_key, first_value = by_rows(first_key), by_rows(first_value)
    out, lse = _merged_like(
        query, key, value, far, far_lse, first_key, first_value, head, tail, taps, left, right, scale
    )
    tokens, reach = query.shape[2], _reach(taps)
    begin, end = head.shape[2], tokens - tail.shape[2]
    shift = max(reach - right, 0)
    cut = shift + max(reach - left, 0)
    grid, sizes, warps = _program("merge_window", query, value, reach)
    table = lse if taps is None else taps.contiguous()
    wrap_triton(window_kernels.forward)[grid](
        query, key, value, far, far_lse.contiguous(), first_key, first_value, table, out, lse,
        *in_two(scale), tokens, query.shape[1], begin, end, left, right, shift, tokens - cut,
        tokens - cut if far.shape[:2] == query.shape[:2] else tokens, *strides(query), *strides(key),
        *strides(value), *_along(far, query), *strides(first_key), *strides(first_value), *strides(out),
        0 if taps is None else table_stride(table), reach, int(first_key.shape[2]), *sizes,
        num_warps=warps,
    )  # fmt: skip
    out[:, :, :begin] = head
    if end < tokens:
        out[:, :, end:] = tail
    return out, lse


def _merged_like(
    query: Tensor, key: Tensor, value: Tensor, far: Tensor, far_lse: Tensor, first_key: Tensor,
    first_value: Tensor, head: Tensor, tail: Tensor, taps: Tensor | None, left: int, right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    lse = query.new_empty(query.shape[:3], dtype=accumulate_dtype(query.dtype))
    return torch.empty_like(by_rows(value)), lse


def _rows_met(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, first_key: Tensor,
    first_value: Tensor, taps: Tensor | None, far: Tensor, begin: int, end: int, left: int, right: int,
    scale: float, of_taps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query and of global keys and values, and what `window_keys` needs.

    Args:
        far: the operator's gradient of query.
        begin, end: which rows are done.

    Returns:
        The gradient of query; those of near scores, times the scale, and spread weights ``[batch *
        heads, 6 reach, tokens]``, in blocks as the kernels have them; the gradients of global keys and
        values; and for the gradient of the taps, without entries if it is not wanted, products of
        weights and spread weights' gradients, summed by programs.
    """
    grad, query, key, value, out, far = map(by_rows, (grad, query, key, value, out, far))
    first_key, first_value = by_rows(first_key), by_rows(first_value)
    tokens, count, reach = query.shape[2], int(first_key.shape[2]), _reach(taps)
    grid, sizes, warps = _program("window_rows", query, value, reach)
    of_query, handed, *_, sums = _rows_met_like(
        grad, query, key, value, out, lse, first_key, first_value, taps, far, begin, end, left, right,
        scale, of_taps,
    )  # fmt: skip
    of_keys = lse.new_empty(grid[0], count, first_key.shape[3])
    of_values = lse.new_empty(grid[0], count, first_value.shape[3])
    shift = max(reach - right, 0)
    table = lse if taps is None else taps.contiguous()
    strands = sizes[4]
    dots = lse.dtype == torch.float32 and strands >= 16 and min(sizes[2:4]) // sizes[6] >= 16
    wrap_triton(window_kernels.backward_rows)[grid](
        grad, query, key, value, out, lse.contiguous(), first_key, first_value, table, far, of_query,
        handed, of_keys, of_values, sums, *in_two(scale), tokens, query.shape[1], begin, end, left,
        right, shift, tokens - shift - max(reach - left, 0), *strides(grad), *strides(query),
        *strides(key), *strides(value), *strides(out), *strides(first_key), *strides(first_value),
        *_along(far, query), *strides(of_query), 0 if taps is None else table_stride(table), reach,
        count, *sizes, power_of_two(3 * reach * sizes[5]), dots, of_taps,
        num_warps=warps,
    )  # fmt: skip
    pairs = query.shape[0] * query.shape[1]
    of_first_key, of_first_value = (
        x.view(pairs, grid[0] // pairs, *x.shape[1:]).sum(1).view(like.shape).to(like.dtype)
        for x, like in ((of_keys, first_key), (of_values, first_value))
    )
    return of_query, handed, of_first_key, of_first_value, sums


def _rows_met_like(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, first_key: Tensor,
    first_value: Tensor, taps: Tensor | None, far: Tensor, begin: int, end: int, left: int, right: int,
    scale: float, of_taps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    reach, (batch, heads, tokens) = _reach(taps), query.shape[:3]
    (programs,), sizes, _ = _program("window_rows", query, value, reach)
    block = sizes[4] * sizes[5]
    return (
        torch.empty_like(by_rows(query)),
        query.new_empty(batch * heads, 6 * reach, parts_of(tokens, block) * block),
        first_key.new_empty(first_key.shape),
        first_value.new_empty(first_value.shape),
        lse.new_empty(programs if of_taps else 0, 2, reach, 2 * reach),
    )


def _keys_met(
    grad: Tensor, query: Tensor, value: Tensor, handed: Tensor, taps: Tensor, far_key: Tensor,
    far_value: Tensor, sums: Tensor, left: int, right: int, of_taps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of key, value and taps; the last without entries if it is not wanted.

    Args:
        handed, sums: as `window_rows` gives them.
        far_key, far_value: the operator's gradients of keys and stepped values.
    """
    grad, query, value, far_key, far_value = map(by_rows, (grad, query, value, far_key, far_value))
    taps = taps.contiguous()
    of_key, of_value, of_taps_found = _keys_met_like(
        grad, query, value, handed, taps, far_key, far_value, sums, left, right, of_taps
    )
    (batch, heads, tokens), reach = query.shape[:3], _reach(taps)
    grid, sizes, warps = _program("window_keys", query, value, reach)
    free = taps.new_empty(grid[0] if of_taps else 0, taps.shape[-1])
    along = max(reach - left, 0)
    width, theirs = power_of_two(2 * reach + 1), _program("window_rows", query, value, reach)[1]
    wrap_triton(window_kernels.backward_keys)[grid](
        grad, query, value, handed, taps, far_key, far_value, of_key, of_value, free, tokens, heads,
        left, right, along, tokens - along - max(reach - right, 0), *strides(grad), *strides(query),
        *strides(value), *_along(far_key, query), *_along(far_value, query), *strides(of_key),
        *strides(of_value), table_stride(taps), reach, *sizes, theirs[4], theirs[5], width, of_taps,
        num_warps=warps,
    )  # fmt: skip
    if of_taps:
        pairs = batch * heads
        wrap_triton(window_kernels.gather_taps)[taps.shape[0], (reach + 1) ** 2](
            free, sums, of_taps_found, batch, heads, free.shape[0] // pairs, sums.shape[0] // pairs,
            reach, width, num_warps=4,
        )  # fmt: skip
    return of_key, of_value, of_taps_found


def _keys_met_like(
    grad: Tensor, query: Tensor, value: Tensor, handed: Tensor, taps: Tensor, far_key: Tensor,
    far_value: Tensor, sums: Tensor, left: int, right: int, of_taps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_key, of_value = torch.empty_like(by_rows(query)), torch.empty_like(by_rows(value))
    return of_key, of_value, taps.new_empty(taps.shape if of_taps else 0)


def _program(
    name: str, query: Tensor, value: Tensor, reach: int
) -> tuple[tuple[int], tuple[int, ...], int]:
    """The grid, (dim, value dim, columns and value columns, strands, run, pieces), and warps."""
    batch, heads, tokens, dim = query.shape
    sizes, warps = _shape(TILES[name], int(dim), int(value.shape[-1]), query.dtype, reach)
    return (batch * heads * parts_of(tokens, sizes[4] * sizes[5]),), sizes, warps


@cache
def _shape(
    tile: tuple[int, int, int], dim: int, depth: int, dtype: torch.dtype, reach: int
) -> tuple[tuple[int, ...], int]:
    pieces, run, warps = tile
    columns, deep = (max(16, power_of_two(n)) for n in (dim, depth))
    pieces = max(1, min(pieces, min(columns, deep) * dtype.itemsize // 64))  # of 64 bytes at least
    run //= (2 if reach > 4 else 1) * (2 if dtype == torch.float64 else 1)  # registers are few
    run = max(1, run)
    strands = max(1, 32 * warps * 16 * pieces // (max(columns, deep) * dtype.itemsize))
    return (dim, depth, columns, deep, strands, run, pieces), warps


merge_window_operator = operator("merge_window")(_merged)
merge_window_operator.register_fake(_merged_like)
window_rows_operator = operator("window_rows")(_rows_met)
window_rows_operator.register_fake(_rows_met_like)
window_keys_operator = operator("window_keys")(_keys_met)
window_keys_operator.register_fake(_keys_met_like)

merge_window = either(merge_window_operator, _merged)
window_rows = either(window_rows_operator, _rows_met)
window_keys = either(window_keys_operator, _keys_met)
