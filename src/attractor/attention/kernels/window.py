"""Sliding windows with global tokens, with or without a linear PDE.

The twin in torch is `engines.stepped`. A window has two walls, and the keys within reach of either wall
are boundary keys (`boundary`). A fused operator computes all other keys with stepped values. There are
few global keys, which lie between walls of their own. All keys have one softmax. Without a PDE, there
are no boundary keys.

Kernels compute only rows whose windows are complete. In causal attention, the rows before these are
standard causal attention (`causal`) with the same stepped values. Otherwise the caller passes the output
of the first and last rows.
"""

from typing import Any

import torch
from torch import Tensor

from attractor.attention.engines import softmax
from attractor.attention.kernels import causal as causal_rows
from attractor.attention.kernels.boundary import (
    band_of,
    boundary_backward_keys,
    boundary_backward_rows,
    boundary_forward,
    reach_of,
)
from attractor.attention.kernels.launch import contiguous_rows
from attractor.attention.kernels.values import step, step_backward
from attractor.attention.masks import Scope
from attractor.attention.precision import accumulate_dtype, first_derivatives_only

GLOBALS = 8  # largest number of global keys, with which the code of a kernel grows


def why_not(window: tuple[int, int], global_tokens: int, tokens: int, reach: int) -> str:
    """Return why these kernels cannot compute a window; empty if they can.

    Requires: `kernels.why_not` returns an empty string for the tensors.
    """
    left, right = window
    if left < 0 or right < 0:
        return "kernels require windows with limits on both sides"
    if left + right < 2 * reach:
        return f"windows of {left + right + 1} keys have no key further than {reach} from both walls"
    if global_tokens > GLOBALS:
        return f"kernels support up to {GLOBALS} global tokens"
    if tokens <= global_tokens + left + 1 + right:
        return "no window is complete"
    return ""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    global_key: Tensor,
    global_value: Tensor,
    ends: tuple[Tensor, Tensor],
    stencil: Tensor | None,
    window: tuple[int, int],
    scale: float,
) -> Tensor:
    """Return the output ``[batch, heads, tokens, value dim]``.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of heads and tokens.
        global_key: Keys of the global tokens ``[batch, heads, count, dim]``.
        global_value: Stepped values of the global tokens ``[batch, heads, count, value dim]``.
        ends: The output of the first rows, including all rows whose windows adjoin the global tokens,
            and of the last rows, whose windows extend beyond the last key.
        stencil: The table of `stencils.stencil_table`; None without a PDE.
        window: (left, right), for which `why_not` returns an empty string.
        scale: Scale of the scores.
    """
    return _Window.apply(query, key, value, global_key, global_value, *ends, stencil, *window, scale)


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    count: int,
    stencil: Tensor | None,
    left: int,
    scale: float,
) -> Tensor:
    """Return the output of causal windows (left, 0) with `count` global tokens."""
    return _CausalWindow.apply(query, key, value, stencil, left, count, scale)


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, global_key: Tensor, global_value: Tensor,
        first_rows: Tensor, last_rows: Tensor, stencil: Tensor | None, left: int, right: int,
        scale: float,
    ) -> Tensor:  # fmt: skip
        query, key, value = map(contiguous_rows, (query, key, value))
        stepped = value if stencil is None else step(value, stencil, None)
        out, lse = _forward(
            query, key, value, stepped, global_key, global_value, first_rows, last_rows, stencil,
            (left, right), scale,
        )  # fmt: skip
        ctx.window, ctx.scale = (left, right), scale
        ctx.ends = first_rows.shape[-2], query.shape[-2] - last_rows.shape[-2]
        ctx.save_for_backward(query, key, value, stepped, global_key, global_value, stencil, out, lse)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        q, k, v, stepped, global_k, global_v, stencil, out, lse = ctx.saved_tensors
        do, (begin, end) = contiguous_rows(do), ctx.ends
        *grads, d_stencil = _backward(
            do, q, k, v, stepped, global_k, global_v, stencil, out, lse, ctx.ends, ctx.window, ctx.scale,
            ctx.needs_input_grad[7],
        )  # fmt: skip
        return *grads, do[..., :begin, :], do[..., end:, :], d_stencil, None, None, None


class _CausalWindow(torch.autograd.Function):
    """The output of all rows. Its backward adds the gradients of tensors with several uses."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, stencil: Tensor | None, left: int,
        count: int, scale: float,
    ) -> Tensor:  # fmt: skip
        query, key, value = map(contiguous_rows, (query, key, value))
        begin = count + left + 1  # the windows of earlier rows adjoin the global tokens
        stepped, global_value = value, value[:, :, :count].to(accumulate_dtype(value.dtype))
        if stencil is not None:
            stepped = step(value, stencil, None)
            global_value = step(global_value, stencil, None) if count else global_value
        q, k, v, w = (x[:, :, :begin] for x in (query, key, value, stepped))
        if stencil is None:
            first_rows, first_lse = softmax.attend(q, k, v, Scope(begin, begin, right=0), scale)
        else:
            first_rows, first_lse = causal_rows.forward(q, k, v, w, stencil, scale)
        out, lse = _forward(
            query, key, value, stepped, key[:, :, :count], global_value, first_rows,
            first_rows[:, :, :0], stencil, (left, 0), scale,
        )  # fmt: skip
        ctx.left, ctx.count, ctx.scale = left, count, scale
        ctx.save_for_backward(query, key, value, stepped, global_value, stencil, out, lse, first_lse)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        query, key, value, stepped, global_value, stencil, out, lse, first_lse = ctx.saved_tensors
        of_stencil, count, scale = ctx.needs_input_grad[3], ctx.count, ctx.scale
        do, begin = contiguous_rows(do), count + ctx.left + 1
        *grads, d_global_key, d_global_value, d_stencil = _backward(
            do, query, key, value, stepped, key[:, :, :count], global_value, stencil, out, lse,
            (begin, query.shape[2]), (ctx.left, 0), scale, of_stencil,
        )  # fmt: skip
        first_grads: Any
        g, q, k, v, w, o = (x[:, :, :begin] for x in (do, query, key, value, stepped, out))
        if stencil is None:
            scope = Scope(begin, begin, right=0)
            first_grads = softmax.attend_backward(g, q, k, v, o, first_lse, scope, scale)
        else:
            *first_grads, share = causal_rows.backward(
                g, q, k, v, w, stencil, o, first_lse, scale, of_stencil
            )
            d_stencil = d_stencil + share if of_stencil else None
        if stencil is not None and count:
            d_global_value, share = step_backward(
                d_global_value, value[:, :, :count], stencil, None, of_stencil
            )
            d_stencil = d_stencil + share if of_stencil else None
        grads = [_add_to_first(x, part) for x, part in zip(grads, first_grads)]
        if count:
            grads[1:] = _add_to_first(grads[1], d_global_key), _add_to_first(grads[2], d_global_value)
        return *grads, d_stencil, None, None, None


def _add_to_first(x: Tensor, part: Tensor) -> Tensor:
    """Add `part` to the first tokens of x in place, and return x."""
    first = x[:, :, : part.shape[2]]
    if torch.compiler.is_compiling():
        return x.slice_scatter(first + part.to(x.dtype), 2, 0, part.shape[2])
    first += part
    return x


def _forward(
    q: Tensor, k: Tensor, v: Tensor, stepped: Tensor, global_k: Tensor, global_v: Tensor,
    first_rows: Tensor, last_rows: Tensor, stencil: Tensor | None, window: tuple[int, int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs and their log-sum-exp, as `boundary_forward`."""
    far, far_lse = _far_forward(q, k, stepped, stencil, window, scale)
    return boundary_forward(
        q, k, v, far, far_lse, stencil, None, global_k, global_v, first_rows, last_rows, *window, scale
    )


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, stepped: Tensor, global_k: Tensor, global_v: Tensor,
    stencil: Tensor | None, out: Tensor, lse: Tensor, ends: tuple[int, int], window: tuple[int, int],
    scale: float, of_stencil: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of q, k, v, global_k, global_v, and of the stencil table or None."""
    dq, dk, dv = _far_backward(do, q, k, stepped, out, lse, stencil, window, scale)
    dq, row_weights, d_global_k, d_global_v, sums, edge_sums = boundary_backward_rows(
        do, q, k, v, out, lse, stencil, None, global_k, global_v, dq, *ends, *window, scale, of_stencil
    )
    if stencil is None:
        return dq, dk.view(k.shape), dv.view(v.shape), d_global_k, d_global_v, None
    dk, dv, d_stencil = boundary_backward_keys(
        do, q, k, v, row_weights, stencil, None, dk, dv, sums, edge_sums, *window, of_stencil
    )
    return dq, dk, dv, d_global_k, d_global_v, d_stencil if of_stencil else None


def _far_forward(
    q: Tensor, k: Tensor, stepped: Tensor, stencil: Tensor | None, window: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor]:
    """Return the operator's output and log-sum-exp for the far keys and the rows of the band."""
    q, k, stepped = _as_one_sequence(q, k, stepped)
    rows, keys, scope = _far(q.shape[-2], reach_of(stencil), window)
    return softmax.attend(q[..., rows, :], k[..., keys, :], stepped[..., keys, :], scope, scale)


def _far_backward(
    do: Tensor, q: Tensor, k: Tensor, stepped: Tensor, out: Tensor, lse: Tensor,
    stencil: Tensor | None, window: tuple[int, int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and stepped for the rows and keys of the band."""
    do, q, k, stepped, out = _as_one_sequence(do, q, k, stepped, out)
    lse = lse.view(q.shape[:-1])
    rows, keys, scope = _far(q.shape[-2], reach_of(stencil), window)
    return softmax.attend_backward(
        do[..., rows, :], q[..., rows, :], k[..., keys, :], stepped[..., keys, :], out[..., rows, :],
        lse[..., rows], scope, scale,
    )  # fmt: skip


def _as_one_sequence(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return all heads as one sequence ``[1, 1, tokens, dim]`` if all tensors are contiguous.

    Slices of this sequence are contiguous, as the operator requires, without copies. Rows where two
    heads adjoin attend to keys of both, but these rows are not computed here, and their weights are 0.
    """
    if all(x.is_contiguous() for x in tensors):
        return tuple(x.view(1, 1, -1, x.shape[-1]) for x in tensors)
    return tensors


def _far(tokens: int, reach: int, window: tuple[int, int]) -> tuple[slice, slice, Scope]:
    """Return equal numbers of rows and keys for the operator, so that its band has no negative side."""
    band = band_of(tokens, reach, *window)
    left, right = (side - reach for side in window)
    scope = Scope(
        band.size, band.size, left + band.keys - band.rows, right + band.rows - band.keys
    )  # fmt: skip
    return slice(band.rows, tokens - band.keys), slice(band.keys, tokens - band.rows), scope
