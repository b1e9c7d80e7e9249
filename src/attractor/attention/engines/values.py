"""Stepped values: the values of a linear PDE after all of its steps, by products of small matrices.

All steps together are a matrix with constant diagonals, except near walls. `Stencil` holds a block of it
and what differs at the ends of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.attention.engines.bands import (
    BLOCK,
    first_rows,
    in_blocks,
    products_by_band,
    sums_by_one,
)
from attractor.attention.lengths import surely
from attractor.attention.pdes import Line
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.precision import first_derivatives_only

SHORT = 96  # keys up to which one matrix for all of them is faster than blocks


@dataclass(frozen=True, eq=False)
class Stencil:
    """All steps of a linear PDE as small matrices, where at most one wall is near.

    A row of these is what a weight of 1 becomes along a row of the map. Values take the same matrices.

    Attributes:
        matrix: ``[..., block, reach + block + reach]``, away from walls.
        top: ``[..., reach, 2 reach]``, from the first keys after a wall.
        bottom: ``[..., reach, 2 reach]``, from the last keys before one.
        first: ``[..., 2 reach - 1, reach, 2 reach]``, what `bottom` is in the first rows of a causal
            map: row i has i + 1 keys, and a wall at either end.
        before_first: ``[reach, reach]``, -inf where the last keys of the first rows would lie before the
            first key, else 0.
    """

    matrix: Tensor
    top: Tensor
    bottom: Tensor
    first: Tensor
    before_first: Tensor

    @classmethod
    def of(cls, evolution: Evolution, dtype: torch.dtype, device: torch.device) -> "Stencil":
        """Return the stencil of an evolution; one that has constant coefficients computes it once."""
        if not _can_share(evolution, device):
            return cls._computed(evolution, dtype, device)
        stencil = evolution.stencils.get(dtype)
        if stencil is None:
            with torch.inference_mode(False), torch.no_grad():
                stencil = cls._computed(evolution, dtype, device)
            if type(stencil.matrix) is Tensor:  # not the fake one of a program that is being traced
                evolution.stencils[dtype] = stencil
        return stencil

    @classmethod
    def _computed(cls, evolution: Evolution, dtype: torch.dtype, device: torch.device) -> "Stencil":
        reach, width = evolution.reach, 2 * evolution.reach
        size = block_of(reach) + width
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
        """Return whether there are so many keys that no part of these matrices feels two walls."""
        return keys >= 2 * self.matrix.shape[-2]


def block_of(reach: int) -> int:
    """Return the number of rows of `Stencil.matrix`."""
    return max(BLOCK, 2 * reach)


def _can_share(evolution: Evolution, device: torch.device) -> bool:
    """Return whether matrices of an evolution are computed once."""
    return evolution.constant and device.type == "cpu" and not torch.compiler.is_compiling()


def short_matrix(
    evolution: Evolution, keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return all steps as one matrix ``[keys, keys]``, if there are few keys and it is computed once.

    Multiplying with it takes one call of torch, where products of blocks take a dozen.
    """
    if not _can_share(evolution, device) or keys > SHORT:
        return None
    size, matrix = evolution.stencils.get((dtype, "short"), (0, None))
    if size != keys:
        with torch.inference_mode(False), torch.no_grad():
            unit = torch.eye(keys, dtype=dtype, device=device)
            matrix = evolution.of_linear(unit, Line(-1))
        if type(matrix) is Tensor:
            evolution.stencils[dtype, "short"] = keys, matrix  # the last one only
    return matrix


def step_values(evolution: Evolution, value: Tensor, open: Tensor | None) -> Tensor:
    """Return values ``[batch, heads, keys, dim]`` after the transposed steps of a linear PDE.

    A map times these is the stepped map times the values.

    Args:
        open: bool ``[..., 1, keys - 1]``, False at walls. None: only the ends are walls.
    """
    enough = 2 * block_of(evolution.reach)
    if open is None and evolution.steps and surely(value.shape[-2] >= enough):
        return Stencil.of(evolution, value.dtype, value.device).step(value)
    line = Line(-2, None if open is None else open.mT).adjoint
    return evolution.of_linear(value, line)


class _Steps(torch.autograd.Function):
    """Values times one matrix ``[..., block, reach + block + reach]``, others at their ends."""

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
    stepped = sums_by_one(matrix, in_blocks(value, matrix.shape[-2]), reach)
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
    needed: Sequence[bool],
    onto: Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of the three matrices and of value, those that are needed.

    Args:
        grad: The gradient of the stepped values, which is overwritten.
        onto: A tensor to which the gradient of value is added.
    """
    reach, keys = top.shape[-2], value.shape[-2]
    of_first, of_last = grad[..., :reach, :].clone(), grad[..., keys - reach :, :].clone()
    grad[..., :reach, :], grad[..., keys - reach :, :] = 0.0, 0.0
    inner = in_blocks(grad, matrix.shape[-2])
    grads: list[Any] = [None, None, None, None]
    if any(needed[:3]):
        first, last = value[..., : 2 * reach, :], value[..., keys - 2 * reach :, :]
        products = products_by_band(inner, in_blocks(value, matrix.shape[-2]), reach, reach)
        of_row = torch.zeros_like(matrix)  # all of its rows are one, shifted: the first gets the sum
        shape = of_row[..., 0, : 2 * reach + 1].shape
        of_row[..., 0, : 2 * reach + 1] = products.sum((-3, -2)).sum_to_size(shape)
        grads[0] = of_row
        grads[1] = (of_first @ first.mT).sum_to_size(top.shape)
        grads[2] = (of_last @ last.mT).sum_to_size(bottom.shape)
    if needed[3]:  # the transpose of a matrix with constant diagonals is the same matrix, flipped
        before = None if onto is None else in_blocks(onto, matrix.shape[-2])
        of_value = sums_by_one(matrix.flip(-1, -2), inner, reach, before).flatten(-3, -2)
        of_value = first_rows(of_value, keys)
        of_value[..., : 2 * reach, :] += top.mT @ of_first
        of_value[..., keys - 2 * reach :, :] += bottom.mT @ of_last
        grads[3] = of_value
    return tuple(grads)
