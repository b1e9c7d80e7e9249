"""Global tokens at the start of a sequence, as rows see them whose windows are separate from them.

Between the global tokens and such a window is a gap, so that the PDE acts on the weights of the global
tokens alone, between walls of their own. Their scores are under the same softmax as those of the window.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.attention.engines.stepped import Others
from attractor.attention.engines.values import step_values
from attractor.attention.pdes import Line
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.precision import accumulate_dtype, first_derivatives_only

SUM_ROWS = 1024  # rows per partial sum of a gradient of global tokens


@dataclass(frozen=True, eq=False)
class GlobalTokens:
    """The global tokens, and the steps that their weights take.

    Attributes:
        key: ``[batch, heads, global tokens, dim]``.
        value: ``[batch, heads, global tokens, value dim]``.
        valid: bool ``[batch or 1, 1, 1, global tokens]``, or None if all of them are valid.
        evolution: The PDE and its steps.
    """

    key: Tensor
    value: Tensor
    valid: Tensor | None
    evolution: Evolution

    def others(self, query: Tensor, scale: float) -> Others | None:
        """Return the scores ``[batch, heads, rows, global tokens]`` and a function of their weights.

        The function maps weights to their share of the output; see `engines.stepped`. None if there
        are no global tokens.
        """
        if not self.key.shape[-2]:
            return None
        key, value = (x.to(accumulate_dtype(x.dtype)) for x in (self.key, self.value))
        scores = _RowProduct.apply(query, (scale * key).mT)
        open_faces = None
        if self.valid is not None:
            scores = scores.masked_fill(~self.valid, -torch.inf)
            open_faces = self.valid[..., 1:] & self.valid[..., :-1]
        if (
            self.evolution.linear
        ):  # stepping a few values is cheaper than stepping the weights of all rows
            value = step_values(self.evolution, value, open_faces)
            return scores, lambda weights: _RowProduct.apply(weights, value)

        def output(weights: Tensor) -> Tensor:
            return _RowProduct.apply(self.evolution.of_map(weights, Line(-1, open_faces)), value)

        return scores, output


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
