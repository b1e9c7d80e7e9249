"""Global tokens at the start of a sequence, as rows see them whose windows are separate from them.

Between the global tokens and such a window is a gap, so that the PDE acts on the weights of the global
tokens alone, between walls of their own. Their scores are under the same softmax as those of the window.
"""

from typing import Any

import torch
from torch import Tensor

from attractor.attention.engines.stepped import Others
from attractor.attention.engines.values import step_values
from attractor.attention.pdes import Line
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.precision import accumulate_dtype, first_derivatives_only

SUM_ROWS = 1024  # rows per partial sum of a gradient of global tokens


def global_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    evolution: Evolution,
    scale: float,
) -> Others | None:
    """Return the scores of queries with global tokens, and a function of their weights.

    Args:
        query: ``[batch, heads, rows, dim]``.
        key, value: Of the global tokens, ``[batch, heads, global tokens, dim or value dim]``.
        valid: bool ``[batch or 1, 1, 1, global tokens]``, or None if all of them are valid.
        evolution: The PDE and its steps.
        scale: Scale of the scores.

    Returns:
        The scores ``[batch, heads, rows, global tokens]``, and a function that maps weights of this
        shape to their share of the output, as `engines.stepped` takes them; None if there are no global
        tokens.
    """
    if not key.shape[-2]:
        return None
    key, value = (x.to(accumulate_dtype(x.dtype)) for x in (key, value))
    scores = _RowProduct.apply(query, (scale * key).mT)
    open_faces = None
    if valid is not None:
        scores = scores.masked_fill(~valid, -torch.inf)
        open_faces = valid[..., 1:] & valid[..., :-1]
    if evolution.linear:  # stepping a few values is cheaper than stepping the weights of all rows
        stepped = step_values(evolution, value, open_faces)
        return scores, lambda weights: _RowProduct.apply(weights, stepped)
    line = Line(-1, open_faces)
    return scores, lambda weights: _RowProduct.apply(evolution.of_map(weights, line), value)


class _RowProduct(torch.autograd.Function):
    """The product of many rows ``[..., rows, n]`` and a small matrix ``[..., n, m]``, in its dtype."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        return rows.to(matrix.dtype) @ matrix

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, matrix = ctx.saved_tensors
        grad_rows = (grad @ matrix.mT).to(rows.dtype)
        # One product over a million rows would use a single multiprocessor: sum partial products.
        end = rows.shape[-2] // SUM_ROWS * SUM_ROWS
        rows = rows.to(matrix.dtype)
        grad_matrix = rows[..., end:, :].mT @ grad[..., end:, :]
        if end:  # Inductor may compile a sum over no elements to a value other than 0
            a, b = (x[..., :end, :].unflatten(-2, (-1, SUM_ROWS)) for x in (rows, grad))
            grad_matrix = grad_matrix + (a.mT @ b).sum(-3)
        return grad_rows, grad_matrix
