"""A few diagonals of an attention map, as products of small matrices.

Entry m of row i of a band belongs to key ``i + first + m``. Rows are taken in blocks; the keys that a
block meets are a slab: the end of the block of keys before, the block beside it, and the start of the
block after. So a band costs a few products of small matrices, whatever its width. Keys beyond the ends
of the sequence count as zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention.pdes import PDE, Line, take_steps
from attractor.attention.precision import first_derivatives_only

BLOCK = 32


def band_scores(query: Tensor, key: Tensor, first: int, width: int) -> Tensor:
    """Products of row i with keys i + first + m, ``[..., queries, width]``.

    Args:
        query: ``[..., queries, dim]``.
        key: ``[..., keys, dim]``.
    """
    rows, block = query.shape[-2], max(BLOCK, width)
    key, first = _beside(key, first, width, block, rows)
    scores = _Scores.apply(_blocks(query, block), key, -first, first + width - 1)
    return _head(scores.flatten(-3, -2), rows)


def band_values(weights: Tensor, value: Tensor, first: int, onto: Tensor | None = None) -> Tensor:
    """Sums over m of weight (i, m) times the value of key i + first + m, ``[..., queries, value dim]``.

    Args:
        weights: ``[..., queries, width]``.
        value: ``[..., keys, value dim]``.
        onto: what the sums of the last rows are added to, ``[..., last rows, value dim]``.
    """
    rows, width = weights.shape[-2:]
    block = max(BLOCK, width)
    value, first = _beside(value, first, width, block, rows)
    sums = _Values.apply(_blocks(weights, block), value, onto, rows, -first, first + width - 1)
    return _head(sums, rows)


@dataclass(frozen=True, eq=False)
class Stencil:
    """All steps of a linear PDE as small matrices, where at most one wall is near.

    Rows of these are what weight 1 of a key becomes along a row; the values take the same matrices.

    Attributes:
        matrix: ``[..., block, reach + block + reach]``, away from walls.
        top: ``[..., reach, 2 reach]``, from the first keys after a wall.
        bottom: ``[..., reach, 2 reach]``, from the last keys before one.
    """

    matrix: Tensor
    top: Tensor
    bottom: Tensor

    @classmethod
    def of(cls, pde: PDE, steps: int, dt: float, like: Tensor) -> "Stencil":
        """For tensors of that type and place."""
        reach = steps * pde.reach
        size = max(BLOCK, 2 * reach) + 2 * reach
        unit = torch.eye(size, dtype=like.dtype, device=like.device)
        moved = take_steps(pde, unit, Line(-2).adjoint, steps, dt)
        top, bottom = moved[..., :reach, : 2 * reach], moved[..., size - reach :, size - 2 * reach :]
        return cls(moved[..., reach : size - reach, :], top, bottom)

    def step(self, value: Tensor) -> Tensor:
        """Values ``[..., keys, dim]`` after the transposed steps, between walls at their ends."""
        return _Steps.apply(self.matrix, self.top, self.bottom, value)

    def fits(self, keys: int) -> bool:
        """Whether there are so many keys that no part of these matrices feels two walls."""
        return keys >= 2 * self.matrix.shape[-2]


def step_values(pde: PDE, value: Tensor, open: Tensor | None, steps: int, dt: float) -> Tensor:
    """Values ``[batch, heads, keys, dim]`` after the transposed steps of a linear PDE.

    A map times these is the stepped map times the values.

    Args:
        open: bool ``[..., 1, keys - 1]``, False at walls; None: only the ends are walls.
    """
    if open is None and steps:
        stencil = Stencil.of(pde, steps, dt, value)
        if stencil.fits(value.shape[-2]):
            return stencil.step(value)
    line = Line(-2, None if open is None else open.mT).adjoint
    return take_steps(pde, value, line, steps, dt)


def _blocks(x: Tensor, block: int) -> Tensor:
    """``[..., rows, n]`` as ``[..., blocks, block, n]``, without a copy if the rows fill them."""
    missing = -x.shape[-2] % block
    return (pad(x, (0, 0, 0, missing)) if missing else x).unflatten(-2, (-1, block))


def _head(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[-2] == rows else x[..., :rows, :]


def _beside(x: Tensor, first: int, width: int, block: int, rows: int) -> tuple[Tensor, int]:
    """Keys in the blocks that the rows meet, and the first of a band when counted from there."""
    blocks = -(-rows // block)
    shift = 0 if first <= 0 <= first + width - 1 else first
    if shift or x.shape[-2] != blocks * block:
        x = pad(x, (0, 0, -shift, blocks * block + width + shift - x.shape[-2]))
    return _blocks(x, block), first - shift


class _Scores(torch.autograd.Function):
    """Rows ``[..., blocks, block, dim]`` and keys to a band ``[..., blocks, block, width]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, keys: Tensor, before: int, after: int) -> Tensor:
        ctx.sides = before, after
        ctx.save_for_backward(rows, keys)
        return _upright(_products(rows, keys, before, after), before + after + 1)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, keys = ctx.saved_tensors
        grad = _leaning(grad)
        of_rows = grad @ _slabs(keys, rows.shape[-3], *ctx.sides)
        return of_rows, _folded(grad, rows, keys.shape[-3], *ctx.sides), None, None


class _Values(torch.autograd.Function):
    """A band ``[..., blocks, block, width]`` and keys to sums ``[..., blocks * block, dim]``."""

    @staticmethod
    def forward(
        ctx: Any, band: Tensor, keys: Tensor, onto: Tensor | None, rows: int, before: int, after: int
    ) -> Tensor:
        ctx.sides, ctx.onto = (before, after), slice(rows, rows)
        ctx.save_for_backward(band, keys)
        sums = (_leaning(band) @ _slabs(keys, band.shape[-3], before, after)).flatten(-3, -2)
        if onto is not None:
            ctx.onto = slice(rows - onto.shape[-2], rows)
            sums[..., ctx.onto, :] += onto
        return sums

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        band, keys = ctx.saved_tensors
        of_onto = grad[..., ctx.onto, :] if ctx.needs_input_grad[2] else None
        grad = grad.unflatten(-2, band.shape[-3:-1])
        of_band = _upright(_products(grad, keys, *ctx.sides), band.shape[-1])
        of_keys = _folded(_leaning(band), grad, keys.shape[-3], *ctx.sides)
        return of_band, of_keys, of_onto, None, None, None


class _Steps(torch.autograd.Function):
    """Values times one matrix ``[..., block, reach + block + reach]``, others at their ends."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, top: Tensor, bottom: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(matrix, top, bottom, value)
        reach, keys = top.shape[-2], value.shape[-2]
        blocks = _blocks(value, matrix.shape[-2])
        stepped = matrix.unsqueeze(-3) @ _slabs(blocks, blocks.shape[-3], reach, reach)
        stepped = _head(stepped.flatten(-3, -2), keys)
        stepped[..., :reach, :] = top @ value[..., : 2 * reach, :]
        stepped[..., keys - reach :, :] = bottom @ value[..., keys - 2 * reach :, :]
        return stepped

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        matrix, top, bottom, value = ctx.saved_tensors
        reach, keys = top.shape[-2], value.shape[-2]
        first, last = value[..., : 2 * reach, :], value[..., keys - 2 * reach :, :]
        of_first, of_last = grad[..., :reach, :], grad[..., keys - reach :, :]
        inner = grad.clone()
        inner[..., :reach, :], inner[..., keys - reach :, :] = 0.0, 0.0
        inner, blocks = _blocks(inner, matrix.shape[-2]), _blocks(value, matrix.shape[-2])
        found: list[Any] = [None, None, None, None]
        if any(ctx.needs_input_grad[:3]):
            shape = matrix.unsqueeze(-3).shape
            found[0] = _products(inner, blocks, reach, reach).sum_to_size(shape).squeeze(-3)
            found[1] = (of_first @ first.mT).sum_to_size(top.shape)
            found[2] = (of_last @ last.mT).sum_to_size(bottom.shape)
        if ctx.needs_input_grad[3]:
            of_value = _folded(matrix.unsqueeze(-3), inner, blocks.shape[-3], reach, reach)
            of_value = _head(of_value.flatten(-3, -2), keys)
            of_value[..., : 2 * reach, :] += top.mT @ of_first
            of_value[..., keys - 2 * reach :, :] += bottom.mT @ of_last
            found[3] = of_value
        return tuple(found)


def _upright(products: Tensor, width: int) -> Tensor:
    """The band of a product with slabs: entry (i, i + m) as (i, m)."""
    strides = (*products.stride()[:-2], products.shape[-1] + 1, 1)
    return products.as_strided((*products.shape[:-1], width), strides).contiguous()


def _leaning(band: Tensor) -> Tensor:
    """A band as a matrix that multiplies slabs: entry (i, m) at (i, i + m), zeros elsewhere."""
    block, width = band.shape[-2:]
    matrix = band.new_zeros(*band.shape[:-1], block + width - 1)
    strides = (*matrix.stride()[:-2], block + width, 1)
    matrix.as_strided(band.shape, strides).copy_(band)
    return matrix


def _slabs(keys: Tensor, blocks: int, before: int, after: int) -> Tensor:
    """What each of the first blocks meets: the end of the one before, itself, the start of the next."""
    end = pad(keys[..., : blocks - 1, keys.shape[-2] - before :, :], (0, 0, 0, 0, 1, 0))
    start = keys[..., 1 : blocks + 1, :after, :]
    start = pad(start, (0, 0, 0, 0, 0, blocks - start.shape[-3]))
    return torch.cat((end, keys[..., :blocks, :, :], start), -2)


def _products(rows: Tensor, keys: Tensor, before: int, after: int) -> Tensor:
    """Rows ``[..., blocks, block, dim]`` times slabs of keys: ``[..., blocks, block, slab]``."""
    return rows @ _slabs(keys, rows.shape[-3], before, after).mT


def _folded(weights: Tensor, rows: Tensor, key_blocks: int, before: int, after: int) -> Tensor:
    """What rows give back to the keys of their slabs, ``[..., key blocks, block, dim]``."""
    blocks, block = rows.shape[-3:-1]
    of_keys = weights[..., before : before + block].mT @ rows
    if key_blocks > blocks:
        of_keys = pad(of_keys, (0, 0, 0, 0, 0, key_blocks - blocks))
    if before:
        end = weights[..., :before].mT @ rows
        of_keys[..., : blocks - 1, block - before :, :] += end[..., 1:, :, :]
    if after:
        start = weights[..., before + block :].mT @ rows
        reached = min(key_blocks - 1, blocks)
        of_keys[..., 1 : reached + 1, :after, :] += start[..., :reached, :, :]
    return of_keys
