"""Causal attention of a linear PDE: boundary keys in kernels, far keys in a fused operator.

Its twin in torch is `engines.boundary.causal`. The last keys of a row, within reach of the wall after
its own, spread their weights over twice the reach (`boundary`); the operator computes all others with
stepped values. Forward takes three launches: `values.step`, the operator, and `boundary_forward`, which
puts both under one softmax. Backward gives the operator the merged output and log-sum-exp, and adds the
boundary's share to what it returns.

Packed documents are walls before a row as well: kernels look for them among the keys within reach, and
the operator gets a band within documents.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.attention.engines import softmax
from attractor.attention.engines.backends import Operator, in_rows
from attractor.attention.engines.selection import choose, torn
from attractor.attention.kernels.boundary import (
    CAUSAL,
    boundary_backward_keys,
    boundary_backward_rows,
    boundary_forward,
    reach_of,
)
from attractor.attention.kernels.launch import contiguous_rows
from attractor.attention.kernels.values import step
from attractor.attention.masks import Scope
from attractor.attention.precision import first_derivatives_only


@dataclass(frozen=True, eq=False)
class Documents:
    """Packed documents, each of which is one run of tokens.

    Attributes:
        open: bool ``[batch, 1, 1, tokens - 1]``, False between two documents.
        scope: The keys of a row's document that are out of reach of its wall.
        operator: For these keys.
    """

    open: Tensor
    scope: Scope
    operator: Operator


def packed(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, reach: int) -> Documents | None:
    """Return the documents of ids ``[batch, tokens]``; None if one of them is not a single run.

    The host waits for the device to look at the ids, which compiled or captured code cannot do.
    """
    tokens = documents.shape[-1]
    scope = Scope(tokens, tokens, right=-reach, documents=documents)
    operator = choose(query, key, value, scope)
    checked = operator.strip is not None and operator.strip.packed is not None
    if not checked and torn(documents):
        return None
    open = documents[:, 1:] == documents[:, :-1]
    return Documents(open[:, None, None], scope, operator)


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stencil: Tensor,
    scale: float,
    documents: Documents | None = None,
    operator: Operator | None = None,
) -> Tensor:
    """Return the output ``[batch, heads, tokens, value dim]``, for any number of tokens.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of heads and tokens.
        stencil: The table of `stencils.stencil_table`.
        documents: Documents that do not see each other, which `packed` has returned for such tensors.
        operator: Computes the softmax over the far keys, a square causal problem, unless there are
            documents. None: it is chosen here.
    """
    return _Causal.apply(query, key, value, stencil, scale, documents, operator)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        stencil: Tensor,
        scale: float,
        documents: Documents | None,
        operator: Operator | None,
    ) -> Tensor:
        query, key, value = map(contiguous_rows, (query, key, value))
        stepped = step(value, stencil, None if documents is None else documents.open)
        out, lse = forward(query, key, value, stepped, stencil, scale, documents, operator)
        ctx.scale, ctx.documents, ctx.operator = scale, documents, operator
        ctx.save_for_backward(query, key, value, stepped, stencil, out, lse)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        q, k, v, stepped, stencil, out, lse = ctx.saved_tensors
        grads = backward(
            contiguous_rows(do), q, k, v, stepped, stencil, out, lse, ctx.scale, ctx.needs_input_grad[3],
            ctx.documents, ctx.operator,
        )  # fmt: skip
        return *grads, None, None, None


def forward(
    q: Tensor, k: Tensor, v: Tensor, stepped: Tensor, stencil: Tensor, scale: float,
    documents: Documents | None = None, operator: Operator | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs and their log-sum-exp ``[batch, heads, tokens]``.

    Args:
        q, k, v: With contiguous rows.
        stepped: v after all steps. If v is the beginning of a longer sequence, the steps may be those of
            all of it.
    """
    open = None if documents is None else documents.open
    far, far_lse = _far_forward(q, k, stepped, reach_of(stencil), scale, documents, operator)
    return boundary_forward(
        q, k, v, far, far_lse, stencil, open, None, None, None, None, CAUSAL, 0, scale
    )


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, stepped: Tensor, stencil: Tensor, out: Tensor,
    lse: Tensor, scale: float, of_stencil: bool, documents: Documents | None = None,
    operator: Operator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k, v, and of the stencil table or None."""
    open = None if documents is None else documents.open
    far_dq, far_dk, far_dv = _far_backward(
        do, q, k, stepped, out, lse, reach_of(stencil), scale, documents, operator
    )
    dq, row_weights, _, _, sums, edge_sums = boundary_backward_rows(
        do, q, k, v, out, lse, stencil, open, None, None, far_dq, 0, 0, CAUSAL, 0, scale, of_stencil
    )
    dk, dv, d_stencil = boundary_backward_keys(
        do, q, v, row_weights, stencil, open, far_dk, far_dv, sums, edge_sums, CAUSAL, 0, of_stencil
    )
    return dq, dk, dv, d_stencil if of_stencil else None


def _far_forward(
    q: Tensor, k: Tensor, stepped: Tensor, reach: int, scale: float, documents: Documents | None,
    operator: Operator | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what the operator computes from keys up to i - reach of row i, for rows from `reach` on.

    Rows that have none in their document get anything: `boundary_forward` does not look at it.
    """
    size = q.shape[-2] - reach
    if size <= 0:
        return stepped[..., :0, :], stepped.new_empty(0)
    if documents is not None:
        operator, scope = documents.operator, documents.scope
        if operator.strip is None:
            far, lse = softmax.attend(q, k, stepped, scope, scale)
            return far, lse[..., reach:]
        q, k, stepped = (in_rows(x) for x in (q, k, stepped))
        return operator.forward(*operator.strip.cut(q, k, stepped), operator.strip, scale)
    cut = q[..., reach:, :], k[..., :size, :], stepped[..., :size, :]
    if operator is not None and operator.strip is not None:
        return operator.forward(*(in_rows(x) for x in cut), operator.strip, scale)
    return softmax.attend(*cut, Scope(size, size, right=0), scale)


def _far_backward(
    do: Tensor, q: Tensor, k: Tensor, stepped: Tensor, out: Tensor, lse: Tensor, reach: int,
    scale: float, documents: Documents | None, operator: Operator | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of all queries but the first, and of all keys and stepped values but the last."""
    size = q.shape[-2] - reach
    if size <= 0:
        return q[..., :0, :], k[..., :0, :], stepped[..., :0, :]
    do, out = do[..., reach:, :], out[..., reach:, :]
    if documents is not None:
        operator, scope = documents.operator, documents.scope
        if operator.strip is None:
            dq, dk, dv = softmax.attend_backward(do, q, k, stepped, out, lse, scope, scale)
            return dq[..., reach:, :], dk[..., :size, :], dv[..., :size, :]
        do, out, q, k, stepped = (in_rows(x) for x in (do, out, q, k, stepped))
        cut = operator.strip.cut(q, k, stepped)
        return operator.backward(do, out, *cut, lse[..., reach:], operator.strip, scale)
    cut, lse = (q[..., reach:, :], k[..., :size, :], stepped[..., :size, :]), lse[..., reach:]
    if operator is not None and operator.strip is not None:
        rows = [in_rows(x) for x in (do, out, *cut)]
        return operator.backward(*rows, lse, operator.strip, scale)
    return softmax.attend_backward(do, *cut, out, lse, Scope(size, size, right=0), scale)
