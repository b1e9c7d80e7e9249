"""Attention by random features in O(T): sums over keys come first, and the map is never built.

All features are passed as logarithms, because exponentials need a scale. The usual one, the largest over
all keys, lets future keys affect the rounding of past ones. Here each feature has a scale of its own,
taken from keys that all rows with this scale may attend to. Therefore causality is exact, denominators
are at least 1, and no constant is added to them.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention import masks
from attractor.attention.engines import boundary
from attractor.attention.engines.bands import band_values
from attractor.attention.pdes.evolution import Evolution


def full_attention(log_q: Tensor, log_k: Tensor, value: Tensor, valid_keys: Tensor | None) -> Tensor:
    """Return attention ``[batch, heads, queries, value dim]`` of every query to every valid key.

    The arguments are those of `causal_attention`.
    """
    if valid_keys is not None:
        log_k = log_k.masked_fill(~valid_keys.mT, -torch.inf)
    log_scale = _finite_or_zero(log_k.detach().amax(-2, keepdim=True))
    phi_k = (log_k - log_scale).exp()
    log_q = log_q + log_scale
    phi_q = (log_q - log_q.detach().amax(-1, keepdim=True)).exp()
    total = phi_q @ phi_k.sum(-2).unsqueeze(-1)
    return (phi_q @ (phi_k.mT @ value)) / total.masked_fill(total == 0, 1.0)


def causal_attention(
    log_q: Tensor,
    log_k: Tensor,
    stepped: Tensor,
    value: Tensor,
    valid_keys: Tensor | None,
    chunk: int,
    evolution: Evolution,
) -> Tensor:
    """Return causal attention ``[batch, heads, queries, value dim]``, in blocks of `chunk` rows.

    The keys of a block are those in its slab, whose weights are computed one by one, and all earlier
    ones, which enter as sums. A slab starts `reach` keys before the first row of its block. Therefore no
    sum contains a key near the wall of a row, or a stepped value that depends on keys behind this wall.
    Near keys take the steps themselves, as in `engines.boundary`.

    Args:
        log_q, log_k: Logarithms of features, ``[batch, heads, tokens, count]``.
        stepped, value: Values after and before the steps, ``[batch, heads, keys, value dim]``.
        valid_keys: bool ``[batch, 1, 1, keys]``, or None if all keys are valid.
        chunk: Number of rows per block; at least `reach` is used.
        evolution: The steps of a linear PDE.
    """
    rows, keys = log_q.shape[-2], log_k.shape[-2]
    reach = evolution.reach
    if not rows:
        return stepped[..., :0, :]
    chunk = max(chunk, reach, 1)
    blocks = -(-rows // chunk)
    length = blocks * chunk
    if valid_keys is not None:
        log_k = log_k.masked_fill(~valid_keys.mT, -torch.inf)
    # Every row that may attend to any key may attend to the first valid one.
    first = _finite_or_zero(_first_valid(log_k.detach(), valid_keys))
    log_q = pad(log_q, (0, 0, 0, length - rows)).unflatten(-2, (blocks, chunk))
    sides = (0, 0, reach, length - keys)
    log_k = pad(log_k, sides, value=-torch.inf)
    slab = log_k.unfold(-2, chunk + reach, chunk).mT  # [..., blocks, chunk + reach, count]
    block_k = log_k[..., :length, :].unflatten(-2, (blocks, chunk))  # the first keys of each slab
    stepped = pad(stepped, sides)[..., :length, :].unflatten(-2, (blocks, chunk))

    # The largest logarithm of each feature over the keys before a slab: [..., blocks + 1, count].
    largest = torch.maximum(first, block_k.detach().amax(-2).cummax(-2).values)
    log_scale = torch.cat((first.expand_as(largest[..., :1, :]), largest), -2)
    phi_k = (block_k - log_scale[..., 1:, None, :]).exp()
    terms = torch.cat((phi_k.mT @ stepped, phi_k.sum(-2).unsqueeze(-1)), -1)
    decay = (log_scale[..., :-1, :] - log_scale[..., 1:, :]).exp().unsqueeze(-1)
    sums = _prefix_sums(terms, decay)  # [..., blocks, count, value dim + 1]

    log_q = log_q + log_scale[..., :-1, None, :]
    phi_q = (log_q - log_q.detach().amax(-1, keepdim=True)).exp()
    slab = slab - log_scale[..., :-1, None, :]
    excess = slab.detach().amax(-1, keepdim=True).clamp(min=0)  # of a key above all before the slab
    products = phi_q @ (slab - excess).exp().mT  # [..., blocks, chunk, chunk + reach]
    past = phi_q @ sums

    # The scale of a row is its largest weight in the slab, or the sum of its weights before the slab. It
    # is at least the weight of the first valid key, so that products which are negligible relative to
    # the excess of their key can be set to zero.
    limit = 0.7 * math.log(torch.finfo(products.dtype).max)
    future = torch.ones(chunk, chunk + reach, dtype=torch.bool, device=log_q.device).triu(reach + 1)
    excluded = future | (products.detach() < math.exp(-limit))
    logs = (products.detach().log() + excess.mT).masked_fill(excluded, -torch.inf)
    row_scale = torch.maximum(logs.amax(-1, keepdim=True), past[..., -1:].detach().log())
    row_scale = _finite_or_zero(row_scale)
    gain = (excess.mT - row_scale).clamp(max=limit).exp()
    weights = (products * gain).masked_fill(excluded, 0.0)
    past = past * (-row_scale).exp()
    total = past[..., -1:] + weights.sum(-1, keepdim=True)
    total = total.masked_fill(total == 0, 1.0)
    out = (past[..., :-1] + weights[..., :chunk].tril() @ stepped) / total
    out = out.flatten(-3, -2)[..., :rows, :]
    if not reach:
        return out

    # Rows that are one entry longer than a slab turn the last `reach` diagonals into columns.
    diagonals = pad((weights / total).flatten(-2), (-1, chunk + 1)).unflatten(
        -1, (chunk, chunk + reach + 1)
    )
    boundary_weights = diagonals[..., :reach].flatten(-3, -2)[..., :rows, :]
    band = boundary.before_wall(0, reach)
    open_faces = None if valid_keys is None else masks.open_faces(valid_keys)
    patch = boundary.spread(boundary_weights, band, evolution, keys=keys, open=open_faces)
    return out + band_values(patch, value, band.patch)


def _first_valid(log_k: Tensor, valid_keys: Tensor | None) -> Tensor:
    """Return the logarithms of the first valid key's features, ``[..., 1, count]``."""
    if valid_keys is None:
        return log_k[..., :1, :]
    index = valid_keys.to(torch.uint8).argmax(-1, keepdim=True)
    return log_k.gather(-2, index.expand(*log_k.shape[:-2], 1, log_k.shape[-1]))


def _prefix_sums(terms: Tensor, decay: Tensor) -> Tensor:
    """Return the sum of the terms ``[..., blocks, count, n]`` before each block, in the block's scale.

    Terms are in the scale of the following block; `decay` is a block's scale relative to that.
    """
    total = torch.zeros_like(terms[..., 0, :, :])
    totals = [total]
    for term, factor in zip(terms.unbind(-3)[:-1], decay.unbind(-3)):
        total = factor * total + term
        totals.append(total)
    return torch.stack(totals, -3)


def _finite_or_zero(log_scale: Tensor) -> Tensor:
    """Return the logarithm of a scale, 0 where it is -inf because there is no key."""
    return log_scale.masked_fill(log_scale == -torch.inf, 0.0)
