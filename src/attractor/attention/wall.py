"""Causal attention of a linear PDE over whole texts, as one operator.

What `stepped` does by parts, for the case that matters most: every row's wall is right behind its own
key, and nothing else is masked. Written as one function, the far share comes out of the fused operator
into its place, and backward needs one inner product a row for both shares: that of the output with its
gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention import bands, flash
from attractor.attention.lengths import first_of, surely, whole_blocks
from attractor.attention.masks import Scope
from attractor.attention.precision import first_derivatives_only, wide


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stencil: bands.Stencil,
    scale: float,
) -> Tensor:
    """The output ``[batch, heads, tokens, value dim]``; as many tokens as `stencil` fits.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, as many heads and tokens each.
        stencil: all steps of the PDE, as matrices.

    An exported program may get any number of tokens: no row sees what is put after the last, so that it
    serves all lengths.
    """
    matrices = stencil.matrix, stencil.top, stencil.bottom, stencil.first
    if not torch.compiler.is_exporting():
        return _Causal.apply(query, key, value, *matrices, scale)
    tokens, block = query.shape[-2], stencil.matrix.shape[-2]
    if surely(tokens % block == 0) and surely(stencil.fits(tokens)):
        return _Causal.apply(query, key, value, *matrices, scale)
    missing = whole_blocks(tokens, block, least=3) - tokens  # two, but for one, is a case of its own
    query, key, value = (pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    return first_of(_Causal.apply(query, key, value, *matrices, scale), tokens)


class _Causal(torch.autograd.Function):
    """Near weights ``[batch, heads, tokens, reach]``, spread over ``2 reach`` keys by their steps."""

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
        scale: float,
    ) -> Tensor:
        dtype, tokens, (reach, width) = wide(query.dtype), query.shape[-2], bottom.shape[-2:]
        wide_value = value.to(dtype)
        stepped = bands.steps_forward(matrix, top, bottom, wide_value).to(value.dtype)
        near = bands.band(query.to(dtype), key.to(dtype), 1 - reach, reach) * scale
        beyond = torch.ones(reach, reach, dtype=torch.bool, device=near.device).tril(-1).flip(0)
        near[..., :reach, :].masked_fill_(beyond, -torch.inf)
        scope = Scope(tokens, tokens, right=-reach)
        far, far_lse = flash.attend(query, key, stepped, scope, scale)
        lse = torch.logaddexp(near.mT.contiguous().logsumexp(-2), far_lse)
        weights = (near - lse[..., None]).exp_()
        spread = weights @ bottom
        spread[..., : width - 1, :] = (weights[..., : width - 1, None, :] @ first)[..., 0, :]
        out = bands.band_sums(spread, wide_value, 1 - width)
        share = (far_lse - lse)[..., reach:, None].exp_()
        # A saved output must not have been changed in place, nor be another name for one: torch 2.11
        # compiles that to a gradient of zero.
        if torch.compiler.is_compiling():
            later = torch.addcmul(out[..., reach:, :], far.to(dtype), share)
            out = torch.cat((out[..., :reach, :], later), -2)
        else:
            out[..., reach:, :].addcmul_(far.to(dtype), share)
        if out.dtype != value.dtype:
            out = out.to(value.dtype)
        ctx.scope, ctx.scale = scope, scale
        ctx.save_for_backward(
            query, key, value, stepped, matrix, top, bottom, first, weights, spread, lse, out
        )
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, stepped, matrix, top, bottom, first, weights, spread, lse, out = (
            ctx.saved_tensors
        )
        dtype, (reach, width) = wide(query.dtype), bottom.shape[-2:]
        rows = width - 1  # those that feel the first key's wall
        grad = grad.contiguous()
        wide_query, wide_key, wide_value, wide_grad = (x.to(dtype) for x in (query, key, value, grad))
        of_value = bands.band_returns(spread, wide_grad, 1 - width)
        of_spread = bands.band(wide_grad, wide_value, 1 - width, width)
        of_weights = of_spread @ bottom.mT
        of_weights[..., :rows, :] = (of_spread[..., :rows, None, :] @ first.mT)[..., 0, :]
        inner = (wide_grad * out.to(dtype)).sum(-1, keepdim=True)
        of_near = weights * (of_weights - inner) * ctx.scale
        of_query = bands.band_sums(of_near, wide_key, 1 - reach)
        of_key = bands.band_returns(of_near, wide_query, 1 - reach)
        *_, of_stepped = flash.attend_backward(
            grad[..., reach:, :], query, key, stepped, out[..., reach:, :], lse, ctx.scope, ctx.scale,
            onto=(of_query, of_key),
        )  # fmt: skip
        of_matrix, of_top, of_bottom, of_value = bands.steps_backward(
            matrix, top, bottom, wide_value, of_stepped.to(dtype), (*ctx.needs_input_grad[3:6], True),
            onto=of_value,
        )  # fmt: skip
        of_first = None
        if ctx.needs_input_grad[5]:
            later = weights[..., rows:, :].mT @ of_spread[..., rows:, :]
            of_bottom = of_bottom + later.sum_to_size(bottom.shape)
            of_first = (weights[..., :rows, :, None] * of_spread[..., :rows, None, :]).sum_to_size(
                first.shape
            )
        grads = of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)
        return *grads, of_matrix, of_top, of_bottom, of_first, None
