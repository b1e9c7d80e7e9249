"""Causal attention of a linear PDE: boundary keys in kernels, far keys in a fused operator.

Its twin in torch is `engines.boundary.causal`. The weights of the last keys of a row, within
reach of its wall, spread over twice the reach (`boundary`). The operator computes all other keys with
stepped values. Forward has three launches: `values.step`, the operator, and `boundary_forward`, which
combines both in one softmax. Backward passes the combined output and log-sum-exp to the operator, and
adds the share of the boundary keys to its result.

Packed documents also have a wall before each row: kernels test the keys within reach for it, and the
operator computes a band within documents.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from attractor.attention.engines import softmax
from attractor.attention.engines.backends import aligned_rows, padded_dim
from attractor.attention.engines.selection import (
    CONSECUTIVE,
    FLASH_DIM,
    HALF,
    check_consecutive,
    choose,
    flash_works,
    has_split_documents,
    may_sync,
)
from attractor.attention.engines.strips import Dropout, Operator
from attractor.attention.kernels.boundary import (
    CAUSAL,
    boundary_backward_keys,
    boundary_backward_rows,
    boundary_forward,
    like_output,
    reach_of,
)
from attractor.attention.kernels.launch import contiguous_rows
from attractor.attention.kernels.operators import custom_operator, is_traced
from attractor.attention.kernels.values import step
from attractor.attention.masks import Scope
from attractor.attention.precision import first_derivatives_only


@dataclass(frozen=True, eq=False)
class Documents:
    """Packed documents with consecutive tokens.

    Attributes:
        open: bool ``[batch, 1, 1, tokens - 1]``, False between two documents.
        scope: The keys of a row's document that are out of reach of its wall.
        operator: The operator for these keys.
    """

    open: Tensor
    scope: Scope
    operator: Operator

    @property
    def single(self) -> bool:
        """Whether every batch row is a single document; False if this is unknown."""
        strip = self.operator.strip
        return strip is not None and strip.packed is not None and strip.packed.single


def pack_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, reach: int
) -> Documents | None:
    """Return the documents of ids ``[batch, tokens]``; None if their tokens are not consecutive.

    The host waits for the device to read the ids, once per tensor of ids.
    """
    tokens = documents.shape[-1]
    scope = Scope(tokens, tokens, right=-reach, documents=documents)
    operator = choose(query, key, value, scope, consecutive=True)
    checked = operator.strip is not None and operator.strip.packed is not None
    if not checked and not may_sync(documents.device):
        check_consecutive(documents)
    elif not checked and has_split_documents(documents):
        return None
    open = documents[:, 1:] == documents[:, :-1]
    return Documents(open[:, None, None], scope, operator)


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stencil: Tensor,
    scale: float,
    ids: Tensor | None = None,
    documents: Documents | None = None,
    operator: Operator | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return the output ``[batch, heads, tokens, value dim]``, for any number of tokens.

    Compiled code calls the operator ``attractor::causal_attention``, and another operator in backward.
    These choose their kernels at run time, so that one compiled program is valid for all lengths.

    Args:
        query: ``[batch, heads, tokens, dim]``.
        key, value: ``[batch, heads, tokens, dim]``. If the stencil is the same for all heads, they may
            have fewer heads, each of which serves as many consecutive heads of query.
        stencil: The table of `stencils.stencil_table`.
        scale: Scale of the scores.
        ids: Ids of packed documents ``[batch, tokens]``, whose tokens are consecutive.
        documents: What `pack_documents` has returned for them. None: they are packed here.
        operator: The operator for the far keys, a square causal problem, unless there are documents;
            None to choose it here.
        dropout_p: Probability that an entry of A(0) is dropped. The operator drops far keys, and
            `boundary.sides.dropout_factors` drops boundary keys. Requires: `why_no_dropout` returns an
            empty string.
    """
    if is_traced(query):
        return cast(Tensor, attend_operator(query, key, value, stencil, scale, ids, float(dropout_p))[0])
    if ids is not None and documents is None:
        documents = _pack_or_raise(query, key, value, ids, reach_of(stencil))
    elif documents is not None and documents.single:
        documents = None
    arguments = query, key, value, stencil, scale, documents, operator, float(dropout_p)
    return cast(Tensor, _Causal.apply(*arguments))


def why_no_dropout(query: Tensor, value: Tensor) -> str:
    """Return why `causal` cannot drop weights of these tensors; empty if it can."""
    if query.dtype not in HALF:
        return f"operators that drop weights take half precision, not {query.dtype}"
    if padded_dim(query, value) > FLASH_DIM or not flash_works(query.device.index):
        return "FlashAttention, which drops weights, is not available for these tensors"
    return ""


@dataclass(frozen=True, eq=False)
class _Dropout:
    """Dropout of the entries of A(0).

    Attributes:
        p: Probability that an entry is dropped.
        seed: Seed for the boundary keys, int64 ``[1]``.
        far: Dropout of the far keys.
    """

    p: float
    seed: Tensor
    far: Dropout

    @classmethod
    def new(cls, p: float, device: torch.device) -> "_Dropout | None":
        """Return a dropout with a new random seed; None if p is 0."""
        if not p:
            return None
        return cls(p, torch.randint(1 << 62, (1,), device=device), Dropout(p))

    @classmethod
    def from_state(cls, p: float, state: Tensor) -> "_Dropout | None":
        """Return the dropout with a state from `_state`; None if p is 0."""
        return cls(p, state[:1], Dropout(p, state[1:])) if p else None


def _state(dropout: _Dropout | None, like: Tensor) -> Tensor:
    """Return the state for `_Dropout.from_state`, int64 ``[3]``, or ``[0]`` without dropout."""
    if dropout is None:
        return like.new_empty(0, dtype=torch.int64)
    far = dropout.seed.new_zeros(2) if dropout.far.state is None else dropout.far.state
    return torch.cat((dropout.seed, far))


def _pack_or_raise(
    query: Tensor, key: Tensor, value: Tensor, ids: Tensor, reach: int
) -> Documents | None:
    """Return the packed documents of ids, or None if every batch row is a single document."""
    documents = pack_documents(query, key, value, ids, reach)
    if documents is None:
        raise ValueError(f"in compiled code, {CONSECUTIVE}; run this batch without torch.compile")
    return None if documents.single else documents


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
        dropout_p: float,
    ) -> Tensor:
        query, key, value = map(contiguous_rows, (query, key, value))
        stepped, dropout = _step_values(value, stencil, documents), _Dropout.new(dropout_p, query.device)
        out, lse = forward(query, key, value, stepped, stencil, scale, documents, operator, dropout)
        ctx.scale, ctx.documents, ctx.operator, ctx.p = scale, documents, operator, dropout_p
        ctx.save_for_backward(query, key, value, stencil, out, lse, _state(dropout, lse))
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        q, k, v, stencil, out, lse, state = ctx.saved_tensors
        grads = backward(
            contiguous_rows(do), q, k, v, _step_values(v, stencil, ctx.documents), stencil, out, lse,
            ctx.scale, ctx.needs_input_grad[3], ctx.documents, ctx.operator,
            _Dropout.from_state(ctx.p, state),
        )  # fmt: skip
        return *grads, None, None, None, None


def _step_values(value: Tensor, stencil: Tensor, documents: Documents | None) -> Tensor:
    """Return the stepped values. Backward computes them again, which is cheaper than to store them."""
    return step(value, stencil, None if documents is None else documents.open)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, stencil: Tensor, scale: float, ids: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return outputs, their log-sum-exp ``[batch, heads, tokens]``, and the state of the dropout."""
    query, key, value = map(contiguous_rows, (query, key, value))
    with torch.no_grad():
        documents = None if ids is None else _pack_or_raise(query, key, value, ids, reach_of(stencil))
        stepped, dropout = _step_values(value, stencil, documents), _Dropout.new(dropout_p, query.device)
        out, lse = forward(query, key, value, stepped, stencil, scale, documents, None, dropout)
        return out, lse, _state(dropout, lse)


def _fake_attend(
    query: Tensor, key: Tensor, value: Tensor, stencil: Tensor, scale: float, ids: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse = like_output(contiguous_rows(query), contiguous_rows(value))
    return out, lse, query.new_empty(3 if dropout_p else 0, dtype=torch.int64)


def _attend_backward(
    do: Tensor, query: Tensor, key: Tensor, value: Tensor, stencil: Tensor, out: Tensor, lse: Tensor,
    state: Tensor, scale: float, ids: Tensor | None, dropout_p: float, of_stencil: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key, value and the table; the last is empty unless `of_stencil`."""
    do, query, key, value = map(contiguous_rows, (do, query, key, value))
    with torch.no_grad():
        documents = None if ids is None else _pack_or_raise(query, key, value, ids, reach_of(stencil))
        stepped = _step_values(value, stencil, documents)
        *grads, d_stencil = backward(
            do, query, key, value, stepped, stencil, out, lse, scale, of_stencil, documents, None,
            _Dropout.from_state(dropout_p, state),
        )  # fmt: skip
    return *grads, stencil.new_empty(0) if d_stencil is None else d_stencil  # type: ignore[return-value]


def _fake_attend_backward(
    do: Tensor, query: Tensor, key: Tensor, value: Tensor, stencil: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(contiguous_rows(x)) for x in (query, key, value))
    return dq, dk, dv, stencil.new_empty(stencil.shape if rest[-1] else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ids, ctx.p = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output, ids)


def _gradients(ctx: Any, do: Tensor, *_: Any) -> tuple[Any, ...]:
    *tensors, ids = ctx.saved_tensors
    of_stencil = ctx.needs_input_grad[3]
    *grads, d_stencil = attend_backward_operator(do, *tensors, ctx.scale, ids, ctx.p, of_stencil)
    return *grads, d_stencil if of_stencil else None, None, None, None


attend_operator = custom_operator("causal_attention", transparent=False)(_attend)
attend_operator.register_fake(_fake_attend)
attend_operator.register_autograd(_gradients, setup_context=_save)
attend_backward_operator = custom_operator("causal_attention_backward", transparent=False)(
    _attend_backward
)
attend_backward_operator.register_fake(_fake_attend_backward)


def forward(
    q: Tensor, k: Tensor, v: Tensor, stepped: Tensor, stencil: Tensor, scale: float,
    documents: Documents | None = None, operator: Operator | None = None,
    dropout: _Dropout | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs and their log-sum-exp ``[batch, heads, tokens]``.

    Args:
        q, k, v: With contiguous rows; k and v may have fewer heads.
        stepped: v after all steps; these may be the steps of a longer sequence that begins with v.
    """
    open = None if documents is None else documents.open
    options = () if dropout is None else (dropout.far,)
    far, far_lse = _far_forward(q, k, stepped, reach_of(stencil), scale, documents, operator, *options)
    return boundary_forward(
        q, k, v, far, far_lse, stencil, open, None, None, None, None, CAUSAL, 0, scale,
        *_boundary_dropout(dropout),
    )  # fmt: skip


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, stepped: Tensor, stencil: Tensor, out: Tensor,
    lse: Tensor, scale: float, of_stencil: bool, documents: Documents | None = None,
    operator: Operator | None = None, dropout: _Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k, v, and of the stencil table or None."""
    open = None if documents is None else documents.open
    options = () if dropout is None else (dropout.far,)
    far_dq, far_dk, far_dv = _far_backward(
        do, q, k, stepped, out, lse, reach_of(stencil), scale, documents, operator, *options
    )
    dq, row_weights, _, _, sums, edge_sums = boundary_backward_rows(
        do, q, k, v, out, lse, stencil, open, None, None, far_dq, 0, 0, CAUSAL, 0, scale, of_stencil,
        *_boundary_dropout(dropout),
    )  # fmt: skip
    dk, dv, d_stencil = boundary_backward_keys(
        do, q, k, v, row_weights, stencil, open, far_dk, far_dv, sums, edge_sums, CAUSAL, 0, of_stencil
    )
    return dq, dk, dv, d_stencil if of_stencil else None


def _boundary_dropout(dropout: _Dropout | None) -> tuple[Any, ...]:
    """Return the last arguments of the boundary kernels."""
    return () if dropout is None else (dropout.seed, dropout.p)


def _far_forward(
    q: Tensor, k: Tensor, stepped: Tensor, reach: int, scale: float, documents: Documents | None,
    operator: Operator | None, *dropout: Dropout,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the operator's result for keys up to i - reach of row i, for rows from `reach` on.

    The result is arbitrary for rows without such keys in their document; `boundary_forward` ignores it.
    """
    size = q.shape[-2] - reach
    if size <= 0:
        return stepped[..., :0, :], stepped.new_empty(0)
    if documents is not None:
        operator, scope = documents.operator, documents.scope
        _check_dropout(operator, dropout)
        if operator.strip is None:
            far, lse = softmax.attend(q, k, stepped, scope, scale)
            return far, lse[..., reach:]
        q, k, stepped = (aligned_rows(x) for x in (q, k, stepped))
        return operator.forward(*operator.strip.select(q, k, stepped), operator.strip, scale, *dropout)
    cut = q[..., reach:, :], k[..., :size, :], stepped[..., :size, :]
    if operator is None:
        operator = choose(*cut, Scope(size, size, right=0))
    _check_dropout(operator, dropout)
    if operator.strip is not None:
        return operator.forward(*(aligned_rows(x) for x in cut), operator.strip, scale, *dropout)
    return softmax.attend(*cut, Scope(size, size, right=0), scale)


def _check_dropout(operator: Operator, dropout: tuple[Dropout, ...]) -> None:
    """Raise if an operator that cannot drop weights is called with dropout."""
    if dropout and not operator.takes_dropout:
        raise ValueError(
            "none of torch's enabled attention operators supports dropout for these tensors; use "
            "method='tiled', or enable FlashAttention"
        )


def _far_backward(
    do: Tensor, q: Tensor, k: Tensor, stepped: Tensor, out: Tensor, lse: Tensor, reach: int,
    scale: float, documents: Documents | None, operator: Operator | None, *dropout: Dropout,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of queries from `reach` on, and of keys and stepped values up to ``-reach``."""
    size = q.shape[-2] - reach
    if size <= 0:
        return q[..., :0, :], k[..., :0, :], stepped[..., :0, :]
    do, out = do[..., reach:, :], out[..., reach:, :]
    if documents is not None:
        operator, scope = documents.operator, documents.scope
        if operator.strip is None:
            dq, dk, dv = softmax.attend_backward(do, q, k, stepped, out, lse, scope, scale)
            return dq[..., reach:, :], dk[..., :size, :], dv[..., :size, :]
        do, out, q, k, stepped = (aligned_rows(x) for x in (do, out, q, k, stepped))
        cut = operator.strip.select(q, k, stepped)
        return operator.backward(do, out, *cut, lse[..., reach:], operator.strip, scale, *dropout)
    cut, lse = (q[..., reach:, :], k[..., :size, :], stepped[..., :size, :]), lse[..., reach:]
    if operator is None:
        operator = choose(*cut, Scope(size, size, right=0))
    if operator.strip is not None:
        rows = [aligned_rows(x) for x in (do, out, *cut)]
        return operator.backward(*rows, lse, operator.strip, scale, *dropout)
    return softmax.attend_backward(do, *cut, out, lse, Scope(size, size, right=0), scale)
