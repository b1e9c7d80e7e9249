"""Boundary keys of linear PDEs: keys near a wall that moves with the row. Implementation in torch.

With a causal mask or a window, each row of the map ends at a different key. The weights of keys within
reach of the end take the steps themselves, in a patch twice as wide as the reach, and multiply the
original values. The weights of all other keys multiply stepped values. `scores`, `spread` and
`bands.band_values` are for any walls. `causal` computes attention with a causal mask and no other mask,
as one function with its own backward.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention.engines import bands
from attractor.attention.engines.backends import aligned_rows
from attractor.attention.engines.strips import Operator
from attractor.attention.engines.values import Stencil, steps_backward, steps_forward
from attractor.attention.lengths import round_up, statically_true, take_first
from attractor.attention.masks import Scope, sliding_entries
from attractor.attention.pdes import Line
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.precision import first_derivatives_only
from attractor.common.versions import exporting


class Band(NamedTuple):
    """The boundary keys ``i + first`` to ``i + first + width - 1`` of row i, and their patch.

    Their weights spread over the patch, the keys ``i + patch`` to ``i + patch + patch_width - 1``.
    """

    first: int
    width: int
    patch: int
    patch_width: int


def bands_of(scope: Scope, reach: int) -> list[Band]:
    """Return the bands of keys near each moving wall of a scope: none, one or two."""
    left, right = scope.left, scope.right
    if not reach:
        return []
    if left is not None and right is not None and left + right + 1 <= 2 * reach:
        return [Band(-left, left + right + 1, -left, left + right + 1)]
    result = []
    if left is not None:
        result.append(Band(-left, reach, -left, 2 * reach))
    if right is not None:
        result.append(before_wall(right, reach))
    return result


def before_wall(right: int, reach: int) -> Band:
    """Return the band of the last keys before a wall behind key ``i + right`` of row i."""
    return Band(right - reach + 1, reach, right - 2 * reach + 1, 2 * reach)


def scores(query: Tensor, key: Tensor, scope: Scope, scale: float, band: Band) -> Tensor:
    """Return the scores ``[batch, heads, queries, band.width]`` of boundary keys; -inf if masked."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    result = scale * bands.band_scores(query.to(dtype), key.to(dtype), band.first, band.width)
    bias = scope.bias_diagonals(band.first, band.width)
    if bias is not None:
        result = result + bias
    return result.masked_fill(~scope.diagonals(band.first, band.width, query.device), -torch.inf)


def spread(
    weights: Tensor,
    band: Band,
    evolution: Evolution,
    *,
    keys: int | None = None,
    row: int = 0,
    open: Tensor | None = None,
    stencil: Stencil | None = None,
) -> Tensor:
    """Return the weights of boundary keys after all steps, ``[..., rows, band.patch_width]``.

    Args:
        weights: Weights of the boundary keys, ``[..., rows, band.width]``.
        band: The boundary keys and their patch.
        evolution: The PDE and its steps.
        keys: Number of keys, or None if no patch extends beyond the last key.
        row: Position of the first row.
        open: bool ``[..., 1, keys - 1]``, False at walls inside the sequence. None if there are no such
            walls; then all rows away from the ends of the sequence use the same small matrix.
        stencil: The stencil of the evolution, or None.
    """
    rows, first, width = weights.shape[-2], row + band.patch, band.patch_width
    offset = band.first - band.patch
    sides = offset, width - offset - band.width

    def step(start: int, stop: int) -> Tensor:
        if open is not None:
            faces = sliding_entries(open, first, width - 1, rows)[..., 0, start:stop, :]
        else:
            face = torch.arange(start + first, stop + first, device=weights.device)[:, None]
            face = face + torch.arange(width - 1, device=weights.device)
            faces = face >= 0
            if keys is not None:
                faces = faces & (face < keys - 1)
        return evolution.of_linear(pad(weights[..., start:stop, :], sides), Line(-1, faces))

    if open is not None:
        return step(0, rows)
    top = min(max(-first, 0), rows)
    bottom = rows if keys is None else max(min(keys - first - width + 1, rows), top)
    if top >= bottom:
        return step(0, rows)
    if stencil is not None and width > band.width:
        matrix = stencil.bottom if offset else stencil.top
    else:
        unit = torch.eye(band.width, dtype=weights.dtype, device=weights.device)
        matrix = evolution.of_linear(pad(unit, sides), Line(-1))
    parts = [step(0, top), weights[..., top:bottom, :] @ matrix, step(bottom, rows)]
    return torch.cat([part for part in parts if part.shape[-2]], -2)


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stencil: Stencil,
    operator: Operator,
    scale: float,
    matrix: Tensor | None = None,
) -> Tensor:
    """Return attention ``[batch, heads, tokens, value dim]`` with a causal mask and no other mask.

    In an export, where the number of tokens is free, tokens are appended until the stencil fits. They
    have no effect, because no row attends to later tokens.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of heads and of tokens.
            Requires: `stencil.fits` the number of tokens.
        stencil: The matrices of all steps of the PDE.
        operator: The operator for the far keys, which are a square causal problem.
        scale: Scale of the scores.
        matrix: The result of `values.short_matrix`, or None.
    """
    matrices = stencil.matrix, stencil.top, stencil.bottom, stencil.first, stencil.before_first
    if not exporting():
        return _Causal.apply(query, key, value, *matrices, matrix, operator, scale)
    tokens, block = query.shape[-2], stencil.matrix.shape[-2]
    if statically_true(tokens % block == 0) and statically_true(stencil.fits(tokens)):
        return _Causal.apply(query, key, value, *matrices, None, operator, scale)
    missing = round_up(tokens, block, least=3) - tokens  # two blocks would be a special case
    query, key, value = (pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    return take_first(_Causal.apply(query, key, value, *matrices, None, operator, scale), tokens)


class _Causal(torch.autograd.Function):
    """Weights of boundary keys ``[batch, heads, tokens, reach]`` spread over ``2 reach`` keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        matrix: Tensor,
        top: Tensor,
        bottom: Tensor,
        first: Tensor,
        before_first: Tensor,
        short: Tensor | None,
        operator: Operator,
        scale: float,
    ) -> Tensor:
        dtype, (reach, width) = bottom.dtype, bottom.shape[-2:]
        size = query.shape[-2] - reach
        values = value.to(dtype)
        stepped = steps_forward(matrix, top, bottom, values) if short is None else short @ values
        stepped = stepped.to(value.dtype)
        near_scores = bands.causal_scores(query.to(dtype), key.to(dtype), reach) * scale
        near_scores[..., :reach, :] += before_first
        far, far_lse = operator.forward(
            aligned_rows(query)[..., reach:, :], aligned_rows(key)[..., :size, :],
            stepped[..., :size, :], operator.strip, scale,
        )  # fmt: skip
        scores = torch.cat((near_scores, pad(far_lse, (reach, 0), value=-torch.inf)[..., None]), -1)
        weights = scores.softmax(-1)
        weights, share = weights[..., :reach], weights[..., reach:, reach:]
        patch = weights @ bottom
        patch[..., : width - 1, :] = (weights[..., : width - 1, :, None] * first).sum(-2)
        out = bands.causal_values(patch, values)
        # An alias of an output, or an output changed in place, must not be saved: torch 2.11 compiles
        # that to a gradient of zero.
        if torch.compiler.is_compiling():
            later = torch.addcmul(out[..., reach:, :], far.to(dtype), share)
            out = torch.cat((out[..., :reach, :], later), -2)
        else:
            out[..., reach:, :].addcmul_(far.to(dtype), share)
        if out.dtype != value.dtype:
            out = out.to(value.dtype)
        if torch.compiler.is_compiling() or any(ctx.needs_input_grad):
            ctx.operator, ctx.scale = operator, scale
            ctx.save_for_backward(
                query, key, value, stepped, matrix, top, bottom, first, weights, patch,
                scores.logsumexp(-1), out,
            )  # fmt: skip
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, stepped, matrix, top, bottom, first, weights, patch, lse, out = (
            ctx.saved_tensors
        )
        dtype, (reach, width) = bottom.dtype, bottom.shape[-2:]
        size = query.shape[-2] - reach
        rows = width - 1  # rows within reach of the wall before the first key
        grad = grad.contiguous()
        q, k, v, do = (x.to(dtype) for x in (query, key, value, grad))
        dv = bands.causal_transposed(patch, do)
        dpatch = bands.causal_scores(do, v, width)
        dweights = dpatch @ bottom.mT
        dweights[..., :rows, :] = (dpatch[..., :rows, None, :] * first).sum(-1)
        inner = (do * out.to(dtype)).sum(-1, keepdim=True)
        dscores = weights * (dweights - inner) * ctx.scale
        dq = bands.causal_values(dscores, k)
        dk = bands.causal_transposed(dscores, q)
        far_dq, far_dk, dstepped = ctx.operator.backward(
            grad[..., reach:, :], out[..., reach:, :], aligned_rows(query)[..., reach:, :],
            aligned_rows(key)[..., :size, :], stepped[..., :size, :], lse[..., reach:],
            ctx.operator.strip, ctx.scale,
        )  # fmt: skip
        dq[..., reach:, :] += far_dq
        dk[..., :size, :] += far_dk
        dstepped = pad(dstepped.to(dtype), (0, 0, 0, reach))
        dmatrix, dtop, dbottom, dv = steps_backward(
            matrix, top, bottom, v, dstepped, (*ctx.needs_input_grad[3:6], True), onto=dv
        )
        dfirst = None
        if ctx.needs_input_grad[5]:
            later = weights[..., rows:, :].mT @ dpatch[..., rows:, :]
            dbottom = dbottom + later.sum_to_size(bottom.shape)
            dfirst = (weights[..., :rows, :, None] * dpatch[..., :rows, None, :]).sum_to_size(
                first.shape
            )
        grads = dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)
        return *grads, dmatrix, dtop, dbottom, dfirst, None, None, None, None
