"""Keys near a wall that moves with the row, for linear PDEs: the only implementation in torch.

A causal mask or a window ends each row of the map at another key. The weights of keys within reach of
that end take the steps themselves, in a patch twice the reach wide, and multiply the values as they are.
All other keys multiply stepped values. `scores`, `spread` and `bands.band_values` serve any walls;
`causal` is all of attention under a causal mask alone, as one function with its own backward.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention.engines import bands
from attractor.attention.engines.backends import Operator, in_rows
from attractor.attention.engines.values import Stencil, steps_backward, steps_forward
from attractor.attention.lengths import first_of, surely, whole_blocks
from attractor.attention.masks import Scope, along
from attractor.attention.pdes import Line
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.precision import first_derivatives_only
from attractor.common.versions import exporting


class Band(NamedTuple):
    """The keys ``i + first`` and `width - 1` more near a moving wall of row i, and their patch.

    Weights spread within the keys ``i + patch`` to ``i + patch + patch_width - 1``.
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
    both = []
    if left is not None:
        both.append(Band(-left, reach, -left, 2 * reach))
    if right is not None:
        both.append(before_wall(right, reach))
    return both


def before_wall(right: int, reach: int) -> Band:
    """Return the band of the last keys before a wall behind key ``i + right`` of row i."""
    return Band(right - reach + 1, reach, right - 2 * reach + 1, 2 * reach)


def scores(query: Tensor, key: Tensor, scope: Scope, scale: float, band: Band) -> Tensor:
    """Return the scores ``[batch, heads, queries, band.width]`` of the near keys; -inf where masked."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    near = scale * bands.band_scores(query.to(dtype), key.to(dtype), band.first, band.width)
    bias = scope.bias_diagonals(band.first, band.width)
    if bias is not None:
        near = near + bias
    return near.masked_fill(~scope.diagonals(band.first, band.width, query.device), -torch.inf)


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
    """Return weights near a wall after their steps in a patch, ``[..., rows, band.patch_width]``.

    Args:
        weights: Of the near keys, ``[..., rows, band.width]``.
        keys: Number of keys. None: no patch reaches beyond the last.
        row: Position of the first of these rows.
        open: bool ``[..., 1, keys - 1]``, False at walls inside of the sequence. None: there are none,
            so that all rows away from the ends of the sequence take the same small matrix.
        stencil: Of the evolution, if it is there.
    """
    rows, first, width = weights.shape[-2], row + band.patch, band.patch_width
    offset = band.first - band.patch
    sides = offset, width - offset - band.width

    def step(start: int, stop: int) -> Tensor:
        if open is not None:
            faces = along(open, first, width - 1, rows)[..., 0, start:stop, :]
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
    """Return attention ``[batch, heads, tokens, value dim]`` under a causal mask and no other.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of heads and tokens, as
            many tokens as the stencil fits.
        stencil: All steps of the PDE.
        operator: Computes the softmax over the far keys, a square causal problem.
        matrix: All steps as `values.short_matrix`, or None.

    An exported program may get any number of tokens: tokens are appended until the stencil fits, since
    no row sees what follows it.
    """
    matrices = stencil.matrix, stencil.top, stencil.bottom, stencil.first, stencil.before_first
    if not exporting():
        return _Causal.apply(query, key, value, *matrices, matrix, operator, scale)
    tokens, block = query.shape[-2], stencil.matrix.shape[-2]
    if surely(tokens % block == 0) and surely(stencil.fits(tokens)):
        return _Causal.apply(query, key, value, *matrices, None, operator, scale)
    missing = whole_blocks(tokens, block, least=3) - tokens  # two, but for one, is a case of its own
    query, key, value = (pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    return first_of(_Causal.apply(query, key, value, *matrices, None, operator, scale), tokens)


class _Causal(torch.autograd.Function):
    """Near weights are ``[batch, heads, tokens, reach]``, spread over ``2 reach`` keys by the steps."""

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
        near = bands.causal_scores(query.to(dtype), key.to(dtype), reach) * scale
        near[..., :reach, :] += before_first
        far, far_lse = operator.forward(
            in_rows(query)[..., reach:, :], in_rows(key)[..., :size, :], stepped[..., :size, :],
            operator.strip, scale,
        )  # fmt: skip
        scores = torch.cat((near, pad(far_lse, (reach, 0), value=-torch.inf)[..., None]), -1)
        weights = scores.softmax(-1)
        weights, share = weights[..., :reach], weights[..., reach:, reach:]
        patch = weights @ bottom
        patch[..., : width - 1, :] = (weights[..., : width - 1, :, None] * first).sum(-2)
        out = bands.causal_values(patch, values)
        # A saved output must not have been changed in place, nor be another name for one: torch 2.11
        # compiles that to a gradient of zero.
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
        rows = width - 1  # those that feel the first key's wall
        grad = grad.contiguous()
        wide_query, wide_key, wide_value, wide_grad = (x.to(dtype) for x in (query, key, value, grad))
        of_value = bands.causal_transposed(patch, wide_grad)
        of_patch = bands.causal_scores(wide_grad, wide_value, width)
        of_weights = of_patch @ bottom.mT
        of_weights[..., :rows, :] = (of_patch[..., :rows, None, :] * first).sum(-1)
        inner = (wide_grad * out.to(dtype)).sum(-1, keepdim=True)
        of_near = weights * (of_weights - inner) * ctx.scale
        of_query = bands.causal_values(of_near, wide_key)
        of_key = bands.causal_transposed(of_near, wide_query)
        far = ctx.operator.backward(
            grad[..., reach:, :], out[..., reach:, :], in_rows(query)[..., reach:, :],
            in_rows(key)[..., :size, :], stepped[..., :size, :], lse[..., reach:], ctx.operator.strip,
            ctx.scale,
        )  # fmt: skip
        of_query[..., reach:, :] += far[0]
        of_key[..., :size, :] += far[1]
        of_stepped = pad(far[2].to(dtype), (0, 0, 0, reach))
        of_matrix, of_top, of_bottom, of_value = steps_backward(
            matrix, top, bottom, wide_value, of_stepped, (*ctx.needs_input_grad[3:6], True),
            onto=of_value,
        )  # fmt: skip
        of_first = None
        if ctx.needs_input_grad[5]:
            later = weights[..., rows:, :].mT @ of_patch[..., rows:, :]
            of_bottom = of_bottom + later.sum_to_size(bottom.shape)
            of_first = (weights[..., :rows, :, None] * of_patch[..., :rows, None, :]).sum_to_size(
                first.shape
            )
        grads = of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)
        return *grads, of_matrix, of_top, of_bottom, of_first, None, None, None, None
