"""Causal attention of a linear PDE: keys near the wall in one kernel, all others in a fused operator.

As in `engines/boundary.py`, the last keys of a row, within reach of the wall behind its own, spread
their weights over twice the reach; all others go through the operator, with stepped values. Forward is
three launches: `values.step`, the operator, and `merge_near`, which puts both under one softmax.
Backward gives the operator the merged output and log-sum-exp, and adds the near share to what it
returns: `near_rows` what a row needs, `near_keys` what a key gets back, through the steps of its value
too.

The share of a row is a few products of vectors, so its kernels (`near_kernels`) are bound by memory, and
hold the key and value rows of a strand in registers.

Packed documents (`Packed`) are walls before a row as well: kernels look for them among the keys within
reach, and the operator is given a band within documents.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.attention.engines import softmax
from attractor.attention.engines.backends import Operator, in_rows
from attractor.attention.engines.selection import choose, torn
from attractor.attention.kernels import near_kernels, rows
from attractor.attention.kernels.parts import taps_gradient
from attractor.attention.kernels.rows import by_rows, faces_of, strides, table_stride
from attractor.attention.kernels.taps import (
    either,
    in_two,
    operator,
    parts_of,
    power_of_two,
    wrap_triton,
)
from attractor.attention.kernels.values import step
from attractor.attention.masks import Scope
from attractor.attention.precision import first_derivatives_only


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed documents, each of them a run of tokens.

    Attributes:
        open: bool ``[batch, 1, 1, tokens - 1]``, False between two documents.
        scope: the keys of a row's document that are out of reach of its wall.
        operator: for these.
    """

    open: Tensor
    scope: Scope
    operator: Operator


def packed(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, reach: int) -> Packed | None:
    """For ids ``[batch, tokens]``; None if one of them is torn: not a run.

    Looks at the ids, so the device is waited for; not for compiled code, nor to be captured.
    """
    tokens = documents.shape[-1]
    scope = Scope(tokens, tokens, right=-reach, documents=documents)
    operator = choose(query, key, value, scope)
    looked_at = operator.strip is not None and operator.strip.packed is not None
    if not looked_at and torn(documents):
        return None
    open = documents[:, 1:] == documents[:, :-1]
    return Packed(open[:, None, None], scope, operator)


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    taps: Tensor,
    scale: float,
    within: Packed | None = None,
    operator: Operator | None = None,
) -> Tensor:
    """Return the output ``[batch, heads, tokens, value dim]``, for any number of tokens.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of heads and tokens.
        taps: Of the PDE and its steps, as `values.taps` returns them.
        within: Documents that do not see each other, which `packed` has returned for such tensors.
        operator: Computes the softmax over the far keys, a square causal problem, unless there are
            documents. None: it is chosen here.
    """
    return _Causal.apply(query, key, value, taps, scale, within, operator)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        taps: Tensor,
        scale: float,
        within: Packed | None,
        operator: Operator | None,
    ) -> Tensor:
        query, key, value = by_rows(query), by_rows(key), by_rows(value)
        stepped = step(value, taps, None if within is None else within.open)
        out, lse = forward(query, key, value, stepped, taps, scale, within, operator)
        ctx.scale, ctx.within, ctx.operator = scale, within, operator
        ctx.save_for_backward(query, key, value, stepped, taps, out, lse)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, stepped, taps, out, lse = ctx.saved_tensors
        given = by_rows(grad), query, key, value, stepped, taps, out, lse
        grads = backward(*given, ctx.scale, ctx.needs_input_grad[3], ctx.within, ctx.operator)
        return *grads, None, None, None


def forward(
    query: Tensor, key: Tensor, value: Tensor, stepped: Tensor, taps: Tensor, scale: float,
    within: Packed | None = None, operator: Operator | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and their log-sum-exp ``[batch, heads, tokens]``; every row of the given in one piece.

    Args:
        stepped: value after all steps; of more tokens after these ones it may be a part.
    """
    open = None if within is None else within.open
    far, far_lse = _attend_far(query, key, stepped, taps, scale, within, operator)
    return merge_near(query, key, value, far, far_lse, taps, scale, open)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, stepped: Tensor, taps: Tensor, out: Tensor,
    lse: Tensor, scale: float, of_taps: bool, within: Packed | None = None,
    operator: Operator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of query, key, value, and of taps if they are wanted."""
    open = None if within is None else within.open
    far = _attend_far_backward(grad, query, key, stepped, out, lse, taps, scale, within, operator)
    of_query, handed, sums, firsts = near_rows(
        grad, query, key, value, out, lse, taps, far[0], scale, of_taps, open
    )
    of_key, of_value, found = near_keys(
        grad, query, value, handed, taps, far[1], far[2], sums, firsts, of_taps, open
    )
    return of_query, of_key, of_value, found if of_taps else None


def _attend_far(
    query: Tensor, key: Tensor, stepped: Tensor, taps: Tensor, scale: float, within: Packed | None,
    planned: Operator | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys up to i - reach for row i are an ordinary causal problem, of fewer rows and keys.

    Rows that have none in their document get anything: `merge_near` does not look at it.
    """
    reach = taps.shape[-1] // 2
    size = query.shape[-2] - reach
    if size <= 0:
        return stepped[..., :0, :], taps.new_empty(0)
    if within is not None:
        operator, scope = within.operator, within.scope
        if operator.strip is None:
            far, lse = softmax.attend(query, key, stepped, scope, scale)
            return far, lse[..., reach:]
        query, key, stepped = (in_rows(x) for x in (query, key, stepped))
        return operator.forward(*operator.strip.cut(query, key, stepped), operator.strip, scale)
    cut = query[..., reach:, :], key[..., :size, :], stepped[..., :size, :]
    if planned is not None and planned.strip is not None:
        return planned.forward(*(in_rows(x) for x in cut), planned.strip, scale)
    return softmax.attend(*cut, Scope(size, size, right=0), scale)


def _attend_far_backward(
    grad: Tensor, query: Tensor, key: Tensor, stepped: Tensor, out: Tensor, lse: Tensor, taps: Tensor,
    scale: float, within: Packed | None, planned: Operator | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of all but the first queries, and of all but the last keys and stepped values."""
    reach = taps.shape[-1] // 2
    size = query.shape[-2] - reach
    if size <= 0:
        return query[..., :0, :], key[..., :0, :], stepped[..., :0, :]
    if within is not None:
        operator, scope = within.operator, within.scope
        grad, out = grad[..., reach:, :], out[..., reach:, :]
        if operator.strip is None:
            found = softmax.attend_backward(grad, query, key, stepped, out, lse, scope, scale)
            return found[0][..., reach:, :], found[1][..., :size, :], found[2][..., :size, :]
        grad, out, query, key, stepped = (in_rows(x) for x in (grad, out, query, key, stepped))
        cut = operator.strip.cut(query, key, stepped)
        return operator.backward(grad, out, *cut, lse[..., reach:], operator.strip, scale)
    cut = query[..., reach:, :], key[..., :size, :], stepped[..., :size, :]
    grad, out, lse = grad[..., reach:, :], out[..., reach:, :], lse[..., reach:]
    if planned is not None and planned.strip is not None:
        rows = [in_rows(x) for x in (grad, out, *cut)]
        return planned.backward(*rows, lse, planned.strip, scale)
    return softmax.attend_backward(grad, *cut, out, lse, Scope(size, size, right=0), scale)


def _merged(
    query: Tensor, key: Tensor, value: Tensor, far: Tensor, far_lse: Tensor, taps: Tensor, scale: float,
    open: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs ``[batch, heads, tokens, value dim]`` and their log-sum-exp ``[batch, heads, tokens]``.

    Args:
        far: what the operator makes of the last rows, ``[batch, heads, tokens - reach, value dim]``.
        far_lse: its log-sum-exp ``[batch, heads, tokens - reach]``.
        open: as `values.step` takes it; rows without far keys before a wall there have anything.
    """
    query, key, value, far, taps = (*map(by_rows, (query, key, value, far)), taps.contiguous())
    out, lse = _merged_like(query, key, value, far, far_lse, taps, scale)
    grid, sizes, warps = _program("near", query, value, taps)
    faces, face_strides = faces_of(open, value)
    wrap_triton(near_kernels.forward)[grid](
        query, key, value, far, far_lse.contiguous(), taps, out, lse, *in_two(scale), query.shape[2],
        query.shape[1], *strides(query), *strides(key), *strides(value), *strides(far), *strides(out),
        table_stride(taps), faces, *face_strides, *sizes, _seen(sizes, sizes[0]), open is not None,
        num_warps=warps,
    )  # fmt: skip
    return out, lse


def _merged_like(
    query: Tensor, key: Tensor, value: Tensor, far: Tensor, far_lse: Tensor, taps: Tensor, scale: float,
    open: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(by_rows(value)), taps.new_empty(query.shape[:3])


def _rows_met(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, taps: Tensor,
    far: Tensor, scale: float, of_taps: bool, open: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of query, and what `near_keys` needs.

    Args:
        far: the far share of the gradient of query ``[batch, heads, tokens - reach, dim]``.

    Returns:
        The gradient of query; those of near scores, times the scale, and spread weights, as `place_of`
        has them; and for the gradient of the taps, without entries if it is not wanted, products of
        weights and spread weights' gradients: sums by programs, and those of the first rows, as
        `parts` wants them.
    """
    grad, query, key, value, out, far = map(by_rows, (grad, query, key, value, out, far))
    taps = taps.contiguous()
    found = _rows_met_like(grad, query, key, value, out, lse, taps, far, scale, of_taps, open)
    grid, sizes, warps = _program("near_rows", query, value, taps)
    reach, run = sizes[0], sizes[-1]
    widths = (power_of_two(n) for n in (3 * reach * run, 3 * reach, 2 * reach**2, reach))
    faces, face_strides = faces_of(open, value)
    if open is not None:
        found[3].zero_()  # programs without a wall leave it
    wrap_triton(near_kernels.backward_rows)[grid](
        grad, query, key, value, out, lse.contiguous(), taps, far, *found, *in_two(scale),
        query.shape[2], query.shape[1], *strides(grad), *strides(query), *strides(key), *strides(value),
        *strides(out), *strides(far), *strides(found[0]), table_stride(taps), faces, *face_strides,
        *sizes, *widths, _seen(sizes, reach), of_taps, open is not None, num_warps=warps,
    )  # fmt: skip
    return found


def _rows_met_like(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, taps: Tensor,
    far: Tensor, scale: float, of_taps: bool, open: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (programs,), (reach, *_, strands, run), _ = _program("near_rows", query, value, taps)
    firsts: tuple[int, ...] = len(query) * query.shape[1], 2 * reach, reach, 2 * reach
    if open is not None:
        firsts = programs, reach, reach, 2 * reach
    return (
        torch.empty_like(by_rows(query)),
        taps.new_empty(programs, 3 * reach, run, strands),
        taps.new_empty(programs if of_taps else 0, reach, 2 * reach),
        taps.new_empty(firsts if of_taps else (0, *firsts[1:])),
    )


def _keys_met(
    grad: Tensor, query: Tensor, value: Tensor, handed: Tensor, taps: Tensor, far_key: Tensor,
    far_value: Tensor, sums: Tensor, firsts: Tensor, of_taps: bool, open: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of key, value and taps; the last without entries if it is not wanted.

    Args:
        handed, sums, firsts: as `near_rows` gives them.
        far_key, far_value: the operator's gradients of keys and stepped values, which are of the first
            tokens - reach.
    """
    grad, query, value, far_key, far_value = map(by_rows, (grad, query, value, far_key, far_value))
    taps = taps.contiguous()
    of_key, of_value = torch.empty_like(query), torch.empty_like(value)
    grid, sizes, warps = _program("near_keys", query, value, taps)
    free = taps.new_empty(grid[0] if of_taps else 0, taps.shape[-1])
    faces, face_strides = faces_of(open, value)
    wrap_triton(near_kernels.backward_keys)[grid](
        grad, query, value, handed, taps, far_key, far_value, of_key, of_value, free, query.shape[2],
        query.shape[1], *strides(grad), *strides(query), *strides(value), *strides(far_key),
        *strides(far_value), *strides(of_key), *strides(of_value), table_stride(taps), faces,
        *face_strides, *sizes, int(handed.shape[3]), int(handed.shape[2]),
        power_of_two(2 * sizes[0] + 1), _seen(sizes, 2 * sizes[0]), of_taps, open is not None,
        num_warps=warps,
    )  # fmt: skip
    if not of_taps:
        return of_key, of_value, free.view(0)
    return of_key, of_value, taps_gradient(far_value, value, open, taps, free, (sums, firsts))


def _keys_met_like(
    grad: Tensor, query: Tensor, value: Tensor, handed: Tensor, taps: Tensor, far_key: Tensor,
    far_value: Tensor, sums: Tensor, firsts: Tensor, of_taps: bool, open: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_key, of_value = torch.empty_like(by_rows(query)), torch.empty_like(by_rows(value))
    return of_key, of_value, taps.new_empty(taps.shape if of_taps else 0)


def _program(
    name: str, query: Tensor, value: Tensor, taps: Tensor
) -> tuple[tuple[int], tuple[int, ...], int]:
    """The grid, (reach, dim, value dim, columns, value columns, strands, run), and warps of a kernel."""
    dim, depth, reach = int(query.shape[-1]), int(value.shape[-1]), int(taps.shape[-1]) // 2
    strands, run, warps, columns, deep = rows.shape(name, (dim, depth), query.dtype, reach)
    programs = query.shape[0] * query.shape[1] * parts_of(query.shape[2], strands * run)
    return (programs,), (reach, dim, depth, columns, deep, strands, run), warps


def _seen(sizes: tuple[int, ...], span: int) -> int:
    """So many faces are looked at by a program: those between its rows, and span on either side."""
    return power_of_two(sizes[-2] * sizes[-1] + 2 * span)


merge_near_operator = operator("merge_near")(_merged)
merge_near_operator.register_fake(_merged_like)
near_rows_operator = operator("near_rows")(_rows_met)
near_rows_operator.register_fake(_rows_met_like)
near_keys_operator = operator("near_keys")(_keys_met)
near_keys_operator.register_fake(_keys_met_like)

merge_near = either(merge_near_operator, _merged)
near_rows = either(near_rows_operator, _rows_met)
near_keys = either(near_keys_operator, _keys_met)
