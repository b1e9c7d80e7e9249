"""Stepped values: the values after all steps of a linear PDE, by products of small matrices.

All steps together are a matrix with constant diagonals, except near walls. `Stencil` contains a block of
this matrix, and the blocks at the ends of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.attention.engines.bands import (
    BLOCK,
    first_rows,
    products_by_band,
    sums_by_one,
    to_blocks,
)
from attractor.attention.lengths import statically_true
from attractor.attention.pdes import Line
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.precision import first_derivatives_only

SHORT = 96  # keys up to which one matrix for all of them is faster than blocks


@dataclass(frozen=True, eq=False)
class Stencil:
    """All steps of a linear PDE as small matrices, for places with at most one wall within reach.

    A row of such a matrix contains the weights that a weight of 1 becomes. The same matrices apply to
    values.

    Attributes:
        matrix: ``[..., block, reach + block + reach]``, away from walls.
        top: ``[..., reach, 2 reach]``, for the first keys after a wall.
        bottom: ``[..., reach, 2 reach]``, for the last keys before a wall.
        first: ``[..., 2 reach - 1, reach, 2 reach]``, `bottom` for the first rows of a causal map, where
            row i has i + 1 keys between two walls.
        before_first: ``[reach, reach]``, -inf where the last keys of the first rows would lie before the
            first key, and 0 elsewhere.
    """

    matrix: Tensor
    top: Tensor
    bottom: Tensor
    first: Tensor
    before_first: Tensor

    @classmethod
    def of(cls, evolution: Evolution, dtype: torch.dtype, device: torch.device) -> "Stencil":
        """Return the stencil of an evolution, which is cached if the coefficients are constant."""
        if not _can_share(evolution, device):
            return cls._compute(evolution, dtype, device)
        stencil = evolution.stencils.get(dtype)
        if stencil is None:
            with torch.inference_mode(False), torch.no_grad():
                stencil = cls._compute(evolution, dtype, device)
            if type(stencil.matrix) is Tensor:  # not a fake tensor of a trace
                evolution.stencils[dtype] = stencil
        return stencil

    @classmethod
    def _compute(cls, evolution: Evolution, dtype: torch.dtype, device: torch.device) -> "Stencil":
        reach, width = evolution.reach, 2 * evolution.reach
        size = block_size(reach) + width
        unit = torch.eye(size, dtype=dtype, device=device)
        units = torch.cat((unit, unit[reach:width].repeat(width - 1, 1)))
        row = torch.arange(width - 1, device=device).repeat_interleave(reach)[:, None]
        face = torch.arange(size - 1, device=device)
        within = (face >= width - 1 - row) & (face < width - 1)
        open = torch.cat((torch.ones_like(within[:1]).expand(size, -1), within))
        stepped = evolution.of_linear(units, Line(-1, open))
        stepped, first = stepped[..., :size, :], stepped[..., size:, :width]
        return cls(
            stepped[..., reach : size - reach, :],
            stepped[..., :reach, :width],
            stepped[..., size - reach :, size - width :],
            first.unflatten(-2, (width - 1, reach)),
            torch.full((reach, reach), -torch.inf, dtype=dtype, device=device).tril(-1).flip(0),
        )

    def step(self, value: Tensor) -> Tensor:
        """Return values ``[..., keys, dim]`` after the transposed steps, with walls at their ends."""
        return _Steps.apply(self.matrix, self.top, self.bottom, value)

    def fits(self, keys: int) -> bool:
        """Return whether no matrix would have two walls within reach for this number of keys."""
        return keys >= 2 * self.matrix.shape[-2]


def block_size(reach: int) -> int:
    """Return the number of rows of `Stencil.matrix`."""
    return max(BLOCK, 2 * reach)


def _can_share(evolution: Evolution, device: torch.device) -> bool:
    """Return whether the matrices of an evolution are cached."""
    return evolution.constant and device.type == "cpu" and not torch.compiler.is_compiling()


def short_matrix(
    evolution: Evolution, keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return all steps as one matrix ``[keys, keys]`` if there are few keys and it is cached, else None.

    A product with this matrix takes one call of torch; products of blocks take a dozen.
    """
    if not _can_share(evolution, device) or keys > SHORT:
        return None
    size, matrix = evolution.stencils.get((dtype, "short"), (0, None))
    if size != keys:
        with torch.inference_mode(False), torch.no_grad():
            unit = torch.eye(keys, dtype=dtype, device=device)
            matrix = evolution.of_linear(unit, Line(-1))
        if type(matrix) is Tensor:
            evolution.stencils[dtype, "short"] = keys, matrix  # only the last matrix is cached
    return matrix


def step_values(evolution: Evolution, value: Tensor, open: Tensor | None) -> Tensor:
    """Return values ``[batch, heads, keys, dim]`` after the transposed steps of a linear PDE.

    The product of a map and these equals the product of the stepped map and the values.

    Args:
        evolution: The PDE and its steps.
        value: ``[batch, heads, keys, dim]``.
        open: bool ``[..., 1, keys - 1]``, False at walls; None if only the ends are walls.
    """
    min_keys = 2 * block_size(evolution.reach)
    if open is None and evolution.steps and statically_true(value.shape[-2] >= min_keys):
        return Stencil.of(evolution, value.dtype, value.device).step(value)
    line = Line(-2, None if open is None else open.mT).adjoint
    return evolution.of_linear(value, line)


class _Steps(torch.autograd.Function):
    """The product of values and a stencil's matrices, as in `steps_forward`."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, top: Tensor, bottom: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(matrix, top, bottom, value)
        return steps_forward(matrix, top, bottom, value)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        matrix, top, bottom, value = ctx.saved_tensors
        return steps_backward(matrix, top, bottom, value, grad.clone(), ctx.needs_input_grad)


def steps_forward(matrix: Tensor, top: Tensor, bottom: Tensor, value: Tensor) -> Tensor:
    """Return `Stencil.step` of value, without recording gradients."""
    reach, keys = top.shape[-2], value.shape[-2]
    stepped = sums_by_one(matrix, to_blocks(value, matrix.shape[-2]), reach)
    stepped = first_rows(stepped.flatten(-3, -2), keys)
    stepped[..., :reach, :] = top @ value[..., : 2 * reach, :]
    stepped[..., keys - reach :, :] = bottom @ value[..., keys - 2 * reach :, :]
    return stepped


def steps_backward(
    matrix: Tensor,
    top: Tensor,
    bottom: Tensor,
    value: Tensor,
    grad: Tensor,
    needs_grad: Sequence[bool],
    onto: Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of the three matrices and of value, or None for those not in `needs_grad`.

    Args:
        grad: The gradient of the stepped values, which is overwritten.
        onto: A tensor to add the gradient of value to, or None.
    """
    reach, keys = top.shape[-2], value.shape[-2]
    grad_first, grad_last = grad[..., :reach, :].clone(), grad[..., keys - reach :, :].clone()
    grad[..., :reach, :], grad[..., keys - reach :, :] = 0.0, 0.0
    inner = to_blocks(grad, matrix.shape[-2])
    grads: list[Any] = [None, None, None, None]
    if any(needs_grad[:3]):
        first, last = value[..., : 2 * reach, :], value[..., keys - 2 * reach :, :]
        products = products_by_band(inner, to_blocks(value, matrix.shape[-2]), reach, reach)
        grad_row = torch.zeros_like(matrix)  # all rows are shifts of one row: the first gets the sum
        shape = grad_row[..., 0, : 2 * reach + 1].shape
        grad_row[..., 0, : 2 * reach + 1] = products.sum((-3, -2)).sum_to_size(shape)
        grads[0] = grad_row
        grads[1] = (grad_first @ first.mT).sum_to_size(top.shape)
        grads[2] = (grad_last @ last.mT).sum_to_size(bottom.shape)
    if needs_grad[3]:  # flipping transposes a matrix with constant diagonals
        before = None if onto is None else to_blocks(onto, matrix.shape[-2])
        grad_value = sums_by_one(matrix.flip(-1, -2), inner, reach, before).flatten(-3, -2)
        grad_value = first_rows(grad_value, keys)
        grad_value[..., : 2 * reach, :] += top.mT @ grad_first
        grad_value[..., keys - 2 * reach :, :] += bottom.mT @ grad_last
        grads[3] = grad_value
    return tuple(grads)
