"""A few diagonals (a band) of an attention map, computed by products of small matrices.

Entry m of row i of a band belongs to key ``i + first + m``. Rows are divided into blocks. The keys of a
block form a slab: the end of the previous block of keys, the block itself, and the start of the next
block. Keys beyond the ends of the sequence are zeros.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention.lengths import round_up, statically_true, take_first
from attractor.attention.masks import entries
from attractor.attention.precision import first_derivatives_only
from attractor.common.versions import exporting

BLOCK = 32


def band_scores(query: Tensor, key: Tensor, first: int, width: int) -> Tensor:
    """Return the products of row i and keys i + first + m, ``[..., queries, width]``.

    Args:
        query: ``[..., queries, dim]``.
        key: ``[..., keys, dim]``.
        first: Position of the first key of the band, relative to the row.
        width: Number of diagonals.
    """
    rows, block = query.shape[-2], max(BLOCK, width)
    key, first = _align_keys(key, first, width, block, rows)
    scores = _Scores.apply(to_blocks(query, block), key, -first, first + width - 1)
    return first_rows(scores.flatten(-3, -2), rows)


def band_values(weights: Tensor, value: Tensor, first: int, onto: Tensor | None = None) -> Tensor:
    """Return the sums of the values of keys i + first + m with weights (i, m), per row i.

    Args:
        weights: ``[..., queries, width]``.
        value: ``[..., keys, value dim]``.
        first: Position of the first key of the band, relative to the row.
        onto: A tensor ``[..., last rows, value dim]`` that is added to the sums of the last rows.

    Returns:
        ``[..., queries, value dim]``.
    """
    rows, width = weights.shape[-2:]
    block = max(BLOCK, width)
    value, first = _align_keys(value, first, width, block, rows)
    sums = _Values.apply(to_blocks(weights, block), value, onto, rows, -first, first + width - 1)
    return first_rows(sums, rows)


def causal_scores(rows: Tensor, keys: Tensor, width: int) -> Tensor:
    """Return the products of row i and keys i - width + 1 to i, without gradients."""
    count, block = rows.shape[-2], max(BLOCK, width)
    rows, keys = to_blocks(rows, block), to_blocks(keys, block)
    return first_rows(products_by_band(rows, keys, width - 1, 0).flatten(-3, -2), count)


def causal_values(weights: Tensor, keys: Tensor) -> Tensor:
    """Return the sums of keys i - width + 1 to i by weights ``[..., rows, width]``; no gradients."""
    count, width = weights.shape[-2:]
    block = max(BLOCK, width)
    weights, keys = to_blocks(weights, block), to_blocks(keys, block)
    return first_rows(sums_by_band(weights, keys, width - 1, 0).flatten(-3, -2), count)


def causal_transposed(weights: Tensor, rows: Tensor) -> Tensor:
    """Return the transpose of `causal_values`, sums over the rows for each key, without gradients."""
    count, width = weights.shape[-2:]
    block = max(BLOCK, width)
    weights, rows = to_blocks(weights, block), to_blocks(rows, block)
    sums = transposed_sums(weights, rows, rows.shape[-3], width - 1, 0)
    return first_rows(sums.flatten(-3, -2), count)


def to_blocks(x: Tensor, block: int) -> Tensor:
    """Return ``[..., rows, n]`` as ``[..., blocks, block, n]``, padded with rows of zeros."""
    rows = x.shape[-2]
    if exporting():
        whole = round_up(rows, block)
        if not statically_true(whole == rows):
            x = pad(x, (0, 0, 0, whole - rows))
        return x.unflatten(-2, (whole // block, block))
    missing = -rows % block
    if missing:
        x = pad(x, (0, 0, 0, missing))
    return x.unflatten(-2, ((rows + missing) // block, block))


def first_rows(x: Tensor, rows: int) -> Tensor:
    """Return the first rows of x ``[..., tokens, dim]``."""
    if exporting():
        return x if statically_true(x.shape[-2] == rows) else take_first(x, rows)
    return x if x.shape[-2] == rows else x[..., :rows, :]


def _align_keys(x: Tensor, first: int, width: int, block: int, rows: int) -> tuple[Tensor, int]:
    """Return keys in blocks that are aligned with those of the rows, and `first` relative to these."""
    whole = -(-rows // block) * block
    shift = 0 if first <= 0 <= first + width - 1 else first
    if shift or x.shape[-2] != whole:
        x = entries(x, shift, whole + width, -2)
    return to_blocks(x, block), first - shift


class _Scores(torch.autograd.Function):
    """Maps rows ``[..., blocks, block, dim]`` and keys to a band ``[..., blocks, block, width]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, keys: Tensor, before: int, after: int) -> Tensor:
        ctx.sides = before, after
        ctx.save_for_backward(rows, keys)
        return products_by_band(rows, keys, before, after)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, keys = ctx.saved_tensors
        grad_rows = sums_by_band(grad, keys, *ctx.sides)
        return grad_rows, transposed_sums(grad, rows, keys.shape[-3], *ctx.sides), None, None


class _Values(torch.autograd.Function):
    """Maps a band ``[..., blocks, block, width]`` and keys to sums ``[..., blocks * block, dim]``."""

    @staticmethod
    def forward(
        ctx: Any, band: Tensor, keys: Tensor, onto: Tensor | None, rows: int, before: int, after: int
    ) -> Tensor:
        ctx.sides, ctx.onto = (before, after), slice(rows, rows)
        ctx.save_for_backward(band, keys)
        sums = sums_by_band(band, keys, before, after).flatten(-3, -2)
        if onto is not None:
            ctx.onto = slice(rows - onto.shape[-2], rows)
            sums[..., ctx.onto, :] += onto
        return sums

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        band, keys = ctx.saved_tensors
        grad_onto = grad[..., ctx.onto, :] if ctx.needs_input_grad[2] else None
        grad = grad.unflatten(-2, band.shape[-3:-1])
        grad_band = products_by_band(grad, keys, *ctx.sides)
        grad_keys = transposed_sums(band, grad, keys.shape[-3], *ctx.sides)
        return grad_band, grad_keys, grad_onto, None, None, None


def diagonals(matrix: Tensor, width: int) -> Tensor:
    """Return a view ``[..., block, width]`` of entries (i, i + m) of a matrix ``[..., block, slab]``."""
    row, column = matrix.stride()[-2:]
    strides = (*matrix.stride()[:-2], row + column, column)
    return matrix.as_strided((*matrix.shape[:-1], width), strides)


def from_diagonals(band: Tensor) -> Tensor:
    """Return the matrix with the entry (i, m) of a band at (i, i + m) and zeros elsewhere."""
    block, width = band.shape[-2:]
    matrix = band.new_zeros(*band.shape[:-1], block + width - 1)
    diagonals(matrix, width).copy_(band)
    return matrix


def _slabs(keys: Tensor, blocks: int, before: int, after: int) -> Tensor:
    """Return transposed slabs ``[..., blocks, dim, before + block + after]`` of the first blocks."""
    block = keys.shape[-2]
    beyond = max(blocks - keys.shape[-3], 0) * block + after
    padded = pad(keys.flatten(-3, -2), (0, 0, before, beyond))
    return padded.unfold(-2, before + block + after, block).narrow(-3, 0, blocks)


def _second_factor(transposed: Tensor) -> Tensor:
    """Return a transposed matrix as the second factor of a product: contiguous in float32 on a CPU.

    On ARM, torch 2.13 needs 0.6 ms for a product of small float32 matrices if the second one is
    transposed.
    """
    slow = transposed.device.type == "cpu" and transposed.dtype == torch.float32
    return transposed.contiguous() if slow and not torch.compiler.is_compiling() else transposed


def products_by_band(rows: Tensor, keys: Tensor, before: int, after: int) -> Tensor:
    """Return a band of products of rows ``[..., blocks, block, dim]`` and keys."""
    width, inner = before + after + 1, _inner_slabs(keys, before, after)
    if inner is None or rows.shape[:-1] != keys.shape[:-1]:
        slabs = _slabs(keys, rows.shape[-3], before, after)
        return diagonals(rows @ _second_factor(slabs), width).contiguous()
    band = rows.new_empty(*rows.shape[:-1], width)
    flat, flat_rows = band.flatten(0, -3), rows.flatten(0, -3)
    buffer = rows.new_empty(_blocks_at_once(keys), rows.shape[-2], inner.shape[-2])
    for part, inner_part in _chunks(bool(before), len(inner), len(buffer)):
        products = buffer[: part.stop - part.start]
        torch.bmm(flat_rows[part], _second_factor(inner[inner_part].mT), out=products)
        flat[part] = diagonals(products, width)
    for block, slab in _outer_slabs(keys, before, after):
        band[..., block, :, :] = diagonals(rows[..., block, :, :] @ _second_factor(slab.mT), width)
    return band


def sums_by_band(band: Tensor, keys: Tensor, before: int, after: int) -> Tensor:
    """Return the sums ``[..., blocks, block, dim]`` of keys with a band of weights."""
    inner = _inner_slabs(keys, before, after)
    if inner is None or band.shape[:-1] != keys.shape[:-1]:
        return from_diagonals(band) @ _slabs(keys, band.shape[-3], before, after).mT
    sums, flat = torch.empty_like(keys), band.flatten(0, -3)
    buffer = band.new_zeros(_blocks_at_once(keys), band.shape[-2], inner.shape[-2])
    for part, inner_part in _chunks(bool(before), len(inner), len(buffer)):
        weights = buffer[: part.stop - part.start]
        diagonals(weights, band.shape[-1]).copy_(flat[part])
        torch.bmm(weights, inner[inner_part], out=sums.flatten(0, -3)[part])
    for block, slab in _outer_slabs(keys, before, after):
        sums[..., block, :, :] = from_diagonals(band[..., block, :, :]) @ slab
    return sums


def sums_by_one(matrix: Tensor, keys: Tensor, reach: int, onto: Tensor | None = None) -> Tensor:
    """Return the sums of keys with one matrix of weights ``[..., block, slab]`` for all blocks."""
    inner, blocks = _inner_slabs(keys, reach, reach), keys.shape[-3]
    if inner is None or keys.device.type != "cpu":  # avoid one launch per sequence
        sums = matrix.unsqueeze(-3) @ _slabs(keys, blocks, reach, reach).mT
        return sums if onto is None else onto.add_(sums)
    sums = torch.empty_like(keys) if onto is None else onto
    outer = [(block, matrix @ slab) for block, slab in _outer_slabs(keys, reach, reach)]
    if onto is not None:
        outer = [(block, onto[..., block, :, :] + sum) for block, sum in outer]
    out, every = sums.flatten(0, -3), matrix.expand(*keys.shape[:-3], *matrix.shape[-2:]).flatten(0, -3)
    for n, one in enumerate(every):  # one call per sequence, as a joint call would copy matrices
        part = slice(max(n * blocks, 1), min((n + 1) * blocks, len(out) - 1))
        slabs, one = inner[part.start - 1 : part.stop - 1], one.expand(part.stop - part.start, -1, -1)
        torch.baddbmm(out[part], one, slabs, beta=int(onto is not None), out=out[part])
    for block, slab in outer:
        sums[..., block, :, :] = slab
    return sums


def _blocks_at_once(keys: Tensor) -> int:
    """Return the number of blocks per product, which on a CPU limits temporary tensors to megabytes."""
    count = keys.shape[:-2].numel()
    return min(count, 512) if keys.device.type == "cpu" else count


def _chunks(first: int, count: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks of each product as slices of all blocks and of the inner slabs."""
    for start in range(0, count, size):
        stop = min(start + size, count)
        yield slice(first + start, first + stop), slice(start, stop)


def _inner_slabs(keys: Tensor, before: int, after: int) -> Tensor | None:
    """Return the slabs of all blocks of all sequences as one view, or None if that is not possible.

    The view must stay within the memory, so it excludes the very first block if slabs begin before it,
    and the very last block if slabs end after it. At the ends of a sequence, its slabs contain keys of
    neighbouring sequences; `_outer_slabs` yields the correct slabs.
    """
    block, dim = keys.shape[-2:]
    if torch.compiler.is_compiling() or not keys.is_contiguous() or keys.shape[-3] < 3:
        return None
    count = keys.shape[:-2].numel() - bool(before) - bool(after)
    start = keys.storage_offset() + (block - before) * dim * bool(before)
    return keys.as_strided((count, before + block + after, dim), (block * dim, dim, 1), start)


def _outer_slabs(keys: Tensor, before: int, after: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (block, slab) for the slabs that extend beyond the ends of a sequence."""
    if before:
        first = torch.cat((keys[..., 0, :, :], keys[..., 1, :after, :]), -2)
        yield 0, pad(first, (0, 0, before, 0))
    if after:
        last = torch.cat((keys[..., -2, keys.shape[-2] - before :, :], keys[..., -1, :, :]), -2)
        yield -1, pad(last, (0, 0, 0, after))


def transposed_sums(band: Tensor, rows: Tensor, key_blocks: int, before: int, after: int) -> Tensor:
    """Return the sums ``[..., key blocks, block, dim]`` of rows with the transpose of a band."""
    missing = key_blocks - rows.shape[-3]
    if missing:
        band, rows = (pad(x, (0, 0, 0, 0, 0, missing)) for x in (band, rows))
    return sums_by_band(_transposed_band(band, before, after), rows, after, before)


def _transposed_band(band: Tensor, before: int, after: int) -> Tensor:
    """Return the band of the transposed map; entry (i, m) of key i belongs to row i - after + m."""
    width = band.shape[-1]
    if width == 1:
        return band
    wider = pad(band.flatten(-3, -2), (0, 0, after, before))
    shape = (*band.shape[:-3], band.shape[-3] * band.shape[-2], width)
    strides = (*wider.stride()[:-2], width, width - 1)
    # A view of the entire tensor, because Inductor would copy a part first.
    transposed = wider.as_strided(shape, strides, width - 1)
    return transposed.unflatten(-2, band.shape[-3:-1])
