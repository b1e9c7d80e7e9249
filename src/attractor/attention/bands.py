"""A few diagonals of an attention map, as products of small matrices.

Entry m of row i of a band belongs to key ``i + first + m``. Rows are taken in blocks; the keys that a
block meets are a slab: the end of the block of keys before, the block beside it, and the start of the
block after. So a band costs a few products of small matrices, whatever its width. Keys beyond the ends
of the sequence count as zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention.lengths import first_of, surely, whole_blocks
from attractor.attention.masks import run_of
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


def band(rows: Tensor, keys: Tensor, first: int, width: int) -> Tensor:
    """`band_scores` where as many rows as keys end their bands at themselves, without a derivative."""
    count, block = rows.shape[-2], max(BLOCK, width)
    rows, keys = _blocks(rows, block), _blocks(keys, block)
    return _head(_band(rows, keys, -first, 0).flatten(-3, -2), count)


def band_sums(weights: Tensor, keys: Tensor, first: int) -> Tensor:
    """`band_values`, likewise."""
    count, block = weights.shape[-2], max(BLOCK, weights.shape[-1])
    weights, keys = _blocks(weights, block), _blocks(keys, block)
    return _head(_sums(weights, keys, -first, 0).flatten(-3, -2), count)


def band_returns(weights: Tensor, rows: Tensor, first: int) -> Tensor:
    """What rows give back to their keys by a band of weights, likewise."""
    count, block = weights.shape[-2], max(BLOCK, weights.shape[-1])
    weights, rows = _blocks(weights, block), _blocks(rows, block)
    return _head(_returns(weights, rows, rows.shape[-3], -first, 0).flatten(-3, -2), count)


@dataclass(frozen=True, eq=False)
class Stencil:
    """All steps of a linear PDE as small matrices, where at most one wall is near.

    Rows of these are what weight 1 of a key becomes along a row; the values take the same matrices.

    Attributes:
        matrix: ``[..., block, reach + block + reach]``, away from walls.
        top: ``[..., reach, 2 reach]``, from the first keys after a wall.
        bottom: ``[..., reach, 2 reach]``, from the last keys before one.
        first: ``[..., 2 reach - 1, reach, 2 reach]``, what `bottom` is to other rows, for the first of a
            causal map: row i has i + 1 keys, and a wall at either end.
    """

    matrix: Tensor
    top: Tensor
    bottom: Tensor
    first: Tensor

    @classmethod
    def of(cls, pde: PDE, steps: int, dt: float, like: Tensor) -> "Stencil":
        """For tensors of that type and place."""
        reach, width = steps * pde.reach, 2 * steps * pde.reach
        size = max(BLOCK, width) + width
        unit = torch.eye(size, dtype=like.dtype, device=like.device)
        units = torch.cat((unit, unit[reach:width].repeat(width - 1, 1)))
        row = torch.arange(width - 1, device=like.device).repeat_interleave(reach)[:, None]
        face = torch.arange(size - 1, device=like.device)
        within = (face >= width - 1 - row) & (face < width - 1)
        open = torch.cat((torch.ones_like(within[:1]).expand(size, -1), within))
        moved = take_steps(pde, units, Line(-1, open), steps, dt)
        moved, first = moved[..., :size, :], moved[..., size:, :width]
        return cls(
            moved[..., reach : size - reach, :],
            moved[..., :reach, :width],
            moved[..., size - reach :, size - width :],
            first.unflatten(-2, (width - 1, reach)),
        )

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
    enough = 2 * max(BLOCK, 2 * steps * pde.reach)  # as `Stencil.fits` says
    if open is None and steps and surely(value.shape[-2] >= enough):
        return Stencil.of(pde, steps, dt, value).step(value)
    line = Line(-2, None if open is None else open.mT).adjoint
    return take_steps(pde, value, line, steps, dt)


def _blocks(x: Tensor, block: int) -> Tensor:
    """``[..., rows, n]`` as ``[..., blocks, block, n]``, without a copy if the rows fill them."""
    whole = whole_blocks(x.shape[-2], block)
    if not surely(whole == x.shape[-2]):
        x = pad(x, (0, 0, 0, whole - x.shape[-2]))
    return x.unflatten(-2, (whole // block, block))


def _head(x: Tensor, rows: int) -> Tensor:
    return x if surely(x.shape[-2] == rows) else first_of(x, rows)


def _beside(x: Tensor, first: int, width: int, block: int, rows: int) -> tuple[Tensor, int]:
    """Keys in the blocks that the rows meet, and the first of a band when counted from there."""
    whole = whole_blocks(rows, block)
    shift = 0 if first <= 0 <= first + width - 1 else first
    if shift or not surely(x.shape[-2] == whole):
        x = run_of(x, shift, whole + width, -2)
    return _blocks(x, block), first - shift


class _Scores(torch.autograd.Function):
    """Rows ``[..., blocks, block, dim]`` and keys to a band ``[..., blocks, block, width]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, keys: Tensor, before: int, after: int) -> Tensor:
        ctx.sides = before, after
        ctx.save_for_backward(rows, keys)
        return _band(rows, keys, before, after)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, keys = ctx.saved_tensors
        of_rows = _sums(grad, keys, *ctx.sides)
        return of_rows, _returns(grad, rows, keys.shape[-3], *ctx.sides), None, None


class _Values(torch.autograd.Function):
    """A band ``[..., blocks, block, width]`` and keys to sums ``[..., blocks * block, dim]``."""

    @staticmethod
    def forward(
        ctx: Any, band: Tensor, keys: Tensor, onto: Tensor | None, rows: int, before: int, after: int
    ) -> Tensor:
        ctx.sides, ctx.onto = (before, after), slice(rows, rows)
        ctx.save_for_backward(band, keys)
        sums = _sums(band, keys, before, after).flatten(-3, -2)
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
        of_band = _band(grad, keys, *ctx.sides)
        of_keys = _returns(band, grad, keys.shape[-3], *ctx.sides)
        return of_band, of_keys, of_onto, None, None, None


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
    """`Stencil.step`, without a derivative."""
    reach, keys = top.shape[-2], value.shape[-2]
    blocks = _blocks(value, matrix.shape[-2])
    stepped = _head(_sums_by_one(matrix, blocks, reach).flatten(-3, -2), keys)
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
    """Gradients of the four, those that are needed; grad is used up, that of value added to `onto`."""
    reach, keys = top.shape[-2], value.shape[-2]
    of_first, of_last = grad[..., :reach, :].clone(), grad[..., keys - reach :, :].clone()
    grad[..., :reach, :], grad[..., keys - reach :, :] = 0.0, 0.0
    inner = _blocks(grad, matrix.shape[-2])
    found: list[Any] = [None, None, None, None]
    if any(needed[:3]):
        first, last = value[..., : 2 * reach, :], value[..., keys - 2 * reach :, :]
        products = _band(inner, _blocks(value, matrix.shape[-2]), reach, reach).sum((-3, -2))
        found[0] = torch.zeros_like(matrix)  # all rows of it are one, moved along: one gets it all
        found[0][..., 0, : 2 * reach + 1] = products.sum_to_size(found[0][..., 0, : 2 * reach + 1].shape)
        found[1] = (of_first @ first.mT).sum_to_size(top.shape)
        found[2] = (of_last @ last.mT).sum_to_size(bottom.shape)
    if needed[3]:  # the transpose of a matrix with constant diagonals: the same, turned round
        blocks = None if onto is None else _blocks(onto, matrix.shape[-2])
        of_value = _sums_by_one(matrix.flip(-1, -2), inner, reach, blocks).flatten(-3, -2)
        of_value = _head(of_value, keys)
        of_value[..., : 2 * reach, :] += top.mT @ of_first
        of_value[..., keys - 2 * reach :, :] += bottom.mT @ of_last
        found[3] = of_value
    return tuple(found)


def _upright(products: Tensor, width: int) -> Tensor:
    """The band of a product with slabs: entry (i, i + m) as (i, m)."""
    return _diagonals(products, width).contiguous()


def _diagonals(matrix: Tensor, width: int) -> Tensor:
    """The entries (i, i + m) of a matrix that multiplies slabs, as a view ``[..., block, width]``."""
    strides = (*matrix.stride()[:-2], matrix.shape[-1] + 1, 1)
    return matrix.as_strided((*matrix.shape[:-1], width), strides)


def _leaning(band: Tensor) -> Tensor:
    """A band as a matrix that multiplies slabs: entry (i, m) at (i, i + m), zeros elsewhere."""
    block, width = band.shape[-2:]
    matrix = band.new_zeros(*band.shape[:-1], block + width - 1)
    _diagonals(matrix, width).copy_(band)
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


def _band(rows: Tensor, keys: Tensor, before: int, after: int) -> Tensor:
    """Products of rows ``[..., blocks, block, dim]`` and keys: ``[..., blocks, block, width]``."""
    width, inner = before + after + 1, _inner_slabs(keys, before, after)
    if inner is None or rows.shape[:-1] != keys.shape[:-1]:
        return _upright(_products(rows, keys, before, after), width)
    band = rows.new_empty(*rows.shape[:-1], width)
    flat, flat_rows = band.flatten(0, -3), rows.flatten(0, -3)
    held = rows.new_empty(_blocks_at_once(keys), rows.shape[-2], inner.shape[-2])
    for part, slabs in _parts(bool(before), len(inner), len(held)):
        products = held[: part.stop - part.start]
        torch.bmm(flat_rows[part], inner[slabs].mT, out=products)
        flat[part] = _diagonals(products, width)
    for block, slab in _outer_slabs(keys, before, after):
        band[..., block, :, :] = _diagonals(rows[..., block, :, :] @ slab.mT, width)
    return band


def _sums(band: Tensor, keys: Tensor, before: int, after: int) -> Tensor:
    """Sums of keys by a band ``[..., blocks, block, width]``: ``[..., blocks, block, dim]``."""
    inner = _inner_slabs(keys, before, after)
    if inner is None or band.shape[:-1] != keys.shape[:-1]:
        return _leaning(band) @ _slabs(keys, band.shape[-3], before, after)
    sums, flat = torch.empty_like(keys), band.flatten(0, -3)
    held = band.new_zeros(_blocks_at_once(keys), band.shape[-2], inner.shape[-2])
    for part, slabs in _parts(bool(before), len(inner), len(held)):
        weights = held[: part.stop - part.start]
        _diagonals(weights, band.shape[-1]).copy_(flat[part])
        torch.bmm(weights, inner[slabs], out=sums.flatten(0, -3)[part])
    for block, slab in _outer_slabs(keys, before, after):
        sums[..., block, :, :] = _leaning(band[..., block, :, :]) @ slab
    return sums


def _sums_by_one(matrix: Tensor, keys: Tensor, reach: int, onto: Tensor | None = None) -> Tensor:
    """Sums of keys, for all blocks of a sequence by the same matrix ``[..., block, slab]``."""
    inner, blocks = _inner_slabs(keys, reach, reach), keys.shape[-3]
    if inner is None or keys.device.type != "cpu":  # a launch a sequence is too many
        sums = matrix.unsqueeze(-3) @ _slabs(keys, blocks, reach, reach)
        return sums if onto is None else onto.add_(sums)
    sums = torch.empty_like(keys) if onto is None else onto
    outer = [(block, matrix @ slab) for block, slab in _outer_slabs(keys, reach, reach)]
    if onto is not None:
        outer = [(block, onto[..., block, :, :] + sum) for block, sum in outer]
    out, every = sums.flatten(0, -3), matrix.expand(*keys.shape[:-3], *matrix.shape[-2:]).flatten(0, -3)
    for n, one in enumerate(every):  # a call a sequence: to bring them together would copy matrices
        part = slice(max(n * blocks, 1), min((n + 1) * blocks, len(out) - 1))
        slabs, one = inner[part.start - 1 : part.stop - 1], one.expand(part.stop - part.start, -1, -1)
        torch.baddbmm(out[part], one, slabs, beta=int(onto is not None), out=out[part])
    for block, slab in outer:
        sums[..., block, :, :] = slab
    return sums


def _blocks_at_once(keys: Tensor) -> int:
    """On a CPU so many that what is needed beside the result is of a few megabytes."""
    count = keys.shape[:-2].numel()
    return min(count, 512) if keys.device.type == "cpu" else count


def _parts(first: int, count: int, size: int) -> Iterator[tuple[slice, slice]]:
    """So many blocks at a time: which of all, and which of the inner slabs."""
    for start in range(0, count, size):
        stop = min(start + size, count)
        yield slice(first + start, first + stop), slice(start, stop)


def _inner_slabs(keys: Tensor, before: int, after: int) -> Tensor | None:
    """The slabs of all blocks of all sequences, as one view; None where there is none.

    It must not leave the memory: the very first block is not among them if slabs look before it, the
    very last one if they look after it. At the ends of a sequence slabs look into its neighbours:
    `_outer_slabs` has the true ones.
    """
    block, dim = keys.shape[-2:]
    if torch.compiler.is_compiling() or not keys.is_contiguous() or keys.shape[-3] < 3:
        return None
    count = keys.shape[:-2].numel() - bool(before) - bool(after)
    start = keys.storage_offset() + (block - before) * dim * bool(before)
    return keys.as_strided((count, before + block + after, dim), (block * dim, dim, 1), start)


def _outer_slabs(keys: Tensor, before: int, after: int) -> Iterator[tuple[int, Tensor]]:
    """The slabs that look beyond the ends of a sequence: the first block's, the last one's."""
    if before:
        first = torch.cat((keys[..., 0, :, :], keys[..., 1, :after, :]), -2)
        yield 0, pad(first, (0, 0, before, 0))
    if after:
        last = torch.cat((keys[..., -2, keys.shape[-2] - before :, :], keys[..., -1, :, :]), -2)
        yield -1, pad(last, (0, 0, 0, after))


def _returns(band: Tensor, rows: Tensor, key_blocks: int, before: int, after: int) -> Tensor:
    """What rows give back to their keys by a band of weights, ``[..., key blocks, block, dim]``."""
    missing = key_blocks - rows.shape[-3]
    if missing:
        band, rows = (pad(x, (0, 0, 0, 0, 0, missing)) for x in (band, rows))
    return _sums(_turned(band, before, after), rows, after, before)


def _turned(band: Tensor, before: int, after: int) -> Tensor:
    """The band of the transposed map: entry (i, m) of a key is what row i - after + m gives it."""
    width = band.shape[-1]
    if width == 1:
        return band
    wider = pad(band.flatten(-3, -2), (0, 0, after, before))
    shape = (*band.shape[:-3], band.shape[-3] * band.shape[-2], width)
    strides = (*wider.stride()[:-2], width, width - 1)
    turned = wider.as_strided(shape, strides, width - 1)  # not of a part: Inductor would copy that first
    return turned.unflatten(-2, band.shape[-3:-1])
