"""Linear PDEs on the values: the map is never built.

On the key axis a step multiplies the map from the right, so that ``A(Nt) V = A(0) W`` with W the values
after the transposed steps. Walls that are the same for every row (padding, the ends of documents) are
walls for the values. Those that move with the row (causal, windows) are felt only within reach, steps
times the PDE's reach. So a row's keys are shared out:

    far from its moving walls    weight times stepped value, by a fused operator
    near one                     the weights themselves take the steps, within a patch of the row that
                                 is twice the reach wide and ends at the wall, and meet the values

Both shares are under one softmax. No stepped value of a far key has seen beyond the wall, and no
patch reaches beyond it: causality is exact, not up to rounding.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from attractor.attention import flash, fused
from attractor.attention.bands import Stencil, band_scores, band_values, step_values
from attractor.attention.lengths import larger, smaller, surely
from attractor.attention.masks import Scope, along
from attractor.attention.pdes import PDE, Line, take_steps
from attractor.attention.precision import wide
from attractor.attention.wall import causal

Others = tuple[Tensor, Callable[[Tensor], Tensor]]


def stepped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scope: Scope,
    scale: float,
    *,
    pde: PDE,
    steps: int,
    dt: float,
    others: Others | None = None,
) -> Tensor:
    """The output ``[batch, heads, queries, value dim]`` of a linear PDE on the key axis.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, as many heads each.
        scope: without a mask of its own.
        others: more scores ``[batch, heads, queries, n]`` under the same softmax, and what their
            weights add to the output.
    """
    open = scope.open_faces()
    dtype, reach = wide(query.dtype), steps * pde.reach
    kernels = not fused.why_not(query, value, pde, steps)
    bands = _bands(scope, reach) if reach else []
    stencil = None
    if open is None and steps and (bands or not kernels):
        stencil = Stencil.of(pde, steps, dt, value.to(dtype))
    simple = others is None and scope.just_causal
    exported = torch.compiler.is_exporting()  # for lengths that it has to fit
    if stencil is not None and simple and (exported or stencil.fits(scope.keys)):
        return causal(query, key, value, stencil, scale)
    if not steps:
        far_values = value
    elif kernels:
        far_values = fused.stepped_values(pde, value, open, steps, dt)
    elif stencil is not None and surely(stencil.fits(scope.keys)):
        far_values = stencil.step(value.to(dtype)).to(value.dtype)
    else:
        far_values = step_values(pde, value.to(dtype), open, steps, dt).to(value.dtype)
    if not bands and others is None:
        return softmax_attention(query, key, far_values, scope, scale)
    scores = [_near_scores(query, key, scope, scale, first, width) for first, width, _, _ in bands]
    if others is not None:
        scores.append(others[0])
    far = scope.narrowed(reach)
    empty = far.left is not None and far.right is not None and far.left + far.right < 0
    out, weights = flash.split_softmax(query, key, far_values, scores, None if empty else far, scale)
    for near, (first, _, patch_first, patch_width) in zip(weights, bands):
        offset = first - patch_first
        spread = _spread(near, offset, patch_first, patch_width, scope, open, stencil, pde, steps, dt)
        out = band_values(spread, value.to(dtype), patch_first, onto=out)
    out = _all_rows(out, scope)
    return (out if others is None else out + others[1](weights[-1])).to(value.dtype)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, scope: Scope, scale: float) -> Tensor:
    """Ordinary attention within a scope; rows that may attend to nothing have zeros."""
    if scope.right == 0 and scope.left is None:
        plain = scope.real is None and scope.documents is None and scope.mask is None
        if plain and scope.bias is None:
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    if scope.documents is not None or scope.banded or scope.mask is not None:
        out, _ = flash.split_softmax(query, key, value, [], scope, scale)
        return _all_rows(out, scope).to(value.dtype)
    bias, real = scope.bias, scope.real
    if bias is not None and bias.dtype != query.dtype:
        # What is rounded is the distance from the largest, which is small where weights are large.
        seen = bias if real is None else bias.masked_fill(~real, -torch.inf)
        largest = seen.amax(-1, keepdim=True)
        bias = (bias - largest.masked_fill(largest == -torch.inf, 0.0)).clamp(max=0.0)
    if real is None:
        mask = None if bias is None else bias.to(query.dtype)
        return scaled_dot_product_attention(query, key, value, mask, scale=scale)
    some = real.any(-1, keepdim=True)  # operators differ on rows without keys: let them attend, then not
    mask = real | ~some
    if bias is not None:
        mask = torch.where(mask, bias.to(query.dtype), -torch.inf)
    return scaled_dot_product_attention(query, key, value, mask, scale=scale).masked_fill(~some, 0.0)


def _all_rows(out: Tensor, scope: Scope) -> Tensor:
    """With zeros for the first rows, if they are not there."""
    missing = scope.queries - out.shape[-2]
    return pad(out, (0, 0, missing, 0)) if missing else out


def _near_scores(
    query: Tensor, key: Tensor, scope: Scope, scale: float, first: int, width: int
) -> Tensor:
    """Scores ``[batch, heads, queries, width]`` of row i with keys i + first + m; -inf where masked."""
    dtype = wide(query.dtype)
    scores = scale * band_scores(query.to(dtype), key.to(dtype), first, width)
    bias = scope.bias_diagonals(first, width)
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(~scope.diagonals(first, width, query.device), -torch.inf)


def _bands(scope: Scope, reach: int) -> list[tuple[int, int, int, int]]:
    """(first, width) of the keys near each moving wall, and of the patch they spread within."""
    left, right = scope.left, scope.right
    if left is not None and right is not None and left + right + 1 <= 2 * reach:
        return [(-left, left + right + 1, -left, left + right + 1)]
    bands = []
    if left is not None:
        bands.append((-left, reach, -left, 2 * reach))
    if right is not None:
        bands.append((right - reach + 1, reach, right - 2 * reach + 1, 2 * reach))
    return bands


def _spread(
    near: Tensor,
    offset: int,
    first: int,
    width: int,
    scope: Scope,
    open: Tensor | None,
    stencil: Stencil | None,
    pde: PDE,
    steps: int,
    dt: float,
) -> Tensor:
    """Weights near a wall after their steps in a patch, ``[batch, heads, queries, patch width]``.

    Away from all walls but its own, every row takes the same small matrix.
    """
    rows, entries = near.shape[-2:]
    sides = (offset, width - offset - entries)

    def step(part: slice) -> Tensor:
        faces = None if open is None else along(open, first, width - 1, rows)[..., 0, part, :]
        if faces is None:
            key = torch.arange(rows, device=near.device)[part, None] + first
            key = key + torch.arange(width - 1, device=near.device)
            faces = (key >= 0) & (key < scope.keys - 1)
        patch = pad(near[..., part, :], sides)
        return take_steps(pde, patch, Line(-1, faces), steps, dt)

    top = smaller(larger(-first, 0), rows)
    bottom = larger(smaller(scope.keys - first - width + 1, rows), top)
    if stencil is None or top >= bottom:
        return step(slice(0, rows))
    if width > entries:
        matrix = stencil.bottom if offset else stencil.top
    else:
        unit = torch.eye(entries, dtype=near.dtype, device=near.device)
        matrix = take_steps(pde, unit, Line(-1), steps, dt)
    parts = [step(slice(0, top)), near[..., top:bottom, :] @ matrix, step(slice(bottom, rows))]
    return torch.cat([part for part in parts if part.shape[-2]], -2)
