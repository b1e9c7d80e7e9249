"""Linear PDEs applied to the values, so that the map is never built.

On the key axis, a step multiplies the map from the right. Therefore ``A(Nt) V = A(0) W``, where W are
the values after the transposed steps. Walls that all rows share (padding, ends of documents) are walls
for the values. Near walls that move with the row (causal masks, windows), the weights take the steps
instead (`boundary`), with the same softmax. No stepped value of a far key depends on keys beyond the
wall, and no patch extends beyond it, so causality is exact and not only up to rounding.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from attractor.attention.engines import boundary, softmax
from attractor.attention.engines.bands import band_values
from attractor.attention.engines.strips import Operator
from attractor.attention.engines.values import Stencil, step_values
from attractor.attention.lengths import statically_true
from attractor.attention.masks import Scope
from attractor.attention.pdes import Line
from attractor.attention.pdes.evolution import Evolution

Others = tuple[Tensor, Callable[[Tensor], Tensor]]
StepValues = Callable[[Evolution, Tensor, Tensor | None], Tensor]


def stepped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scope: Scope,
    scale: float,
    evolution: Evolution,
    others: Others | None = None,
    step: StepValues | None = None,
    operator: Operator | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return the output ``[batch, heads, queries, value dim]`` of a linear PDE on the key axis.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of heads.
        scope: Which keys a query may attend to, without a mask of its own.
        scale: Scale of the scores.
        evolution: The PDE and its steps.
        others: Additional scores ``[batch, heads, queries, n]`` in the same softmax, and a function that
            maps their weights to their share of the output.
        step: A faster function than `values.step_values` for these tensors, or None.
        operator: The result of `selection.choose` for the far keys; None to choose it later.
        dropout_p: Probability that a weight of the map A(0) is dropped. Requires: walls are the same for
            all rows, so that every weight multiplies a stepped value.
    """
    open = scope.open_faces()
    dtype = torch.promote_types(query.dtype, torch.float32)
    bands = boundary.bands_of(scope, evolution.reach)
    stencil = None
    if open is None and evolution.steps and (bands or step is None):
        stencil = Stencil.of(evolution, dtype, value.device)
    if not evolution.steps:
        far_values = value
    elif step is not None:
        far_values = step(evolution, value, open)
    elif stencil is not None and statically_true(stencil.fits(scope.keys)):
        far_values = stencil.step(value.to(dtype)).to(value.dtype)
    else:
        far_values = step_values(evolution, value.to(dtype), open).to(value.dtype)
    if not bands and others is None:
        return softmax_attention(query, key, far_values, scope, scale, operator, dropout_p)
    scores = [boundary.scores(query, key, scope, scale, band) for band in bands]
    if others is not None:
        scores.append(others[0])
    far = scope.narrowed(evolution.reach)
    empty = far.left is not None and far.right is not None and far.left + far.right < 0
    out, weights = softmax.split_softmax(
        query, key, far_values, scores, None if empty else far, scale, operator
    )
    for weight, band in zip(weights, bands):
        patch = boundary.spread(weight, band, evolution, keys=scope.keys, open=open, stencil=stencil)
        out = band_values(patch, value.to(dtype), band.patch, onto=out)
    out = _all_rows(out, scope)
    return (out if others is None else out + others[1](weights[-1])).to(value.dtype)


def without_walls(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scope: Scope,
    scale: float,
    evolution: Evolution,
    axis: str,
    walls: str,
) -> Tensor:
    """Return the output of a linear PDE on the query axis, or with walls that ignore the mask."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    periodic = walls == "periodic"
    if axis == "key":
        line = Line(-2, periodic=periodic).adjoint
        far_values = evolution.of_linear(value.to(dtype), line).to(value.dtype)
        return softmax_attention(query, key, far_values, scope, scale)
    output = softmax_attention(query, key, value, scope, scale)
    faces = None
    if walls == "mask" and scope.documents is not None:
        faces = (scope.documents[:, 1:] == scope.documents[:, :-1])[:, None, :, None]
    return evolution.of_linear(output.to(dtype), Line(-2, faces, periodic)).to(value.dtype)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scope: Scope,
    scale: float,
    operator: Operator | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return standard attention within a scope, with zeros for rows that may attend to no key.

    Requires: `dropout_p` is 0, or the scope has padding and bias only.
    """
    if scope.only_causal:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    if scope.documents is not None or scope.banded or scope.mask is not None:
        return _all_rows(softmax.attention(query, key, value, scope, scale, operator), scope)
    bias, valid = scope.bias, scope.valid_keys
    if bias is not None and bias.dtype != query.dtype:
        # Round the distance from the largest bias, which is small where weights are large.
        visible = bias if valid is None else bias.masked_fill(~valid, -torch.inf)
        largest = visible.amax(-1, keepdim=True)
        bias = (bias - largest.masked_fill(largest == -torch.inf, 0.0)).clamp(max=0.0)
    if valid is None:
        mask = None if bias is None else bias.to(query.dtype)
        return scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale)
    some = valid.any(-1, keepdim=True)
    mask = valid | ~some  # operators differ for rows without keys: let these attend to all keys
    if bias is not None:
        mask = torch.where(mask, bias.to(query.dtype), -torch.inf)
    out = scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale)
    return out.masked_fill(~some, 0.0)


def _all_rows(out: Tensor, scope: Scope) -> Tensor:
    """Return the output with rows of zeros in place of missing first rows."""
    missing = scope.queries - out.shape[-2]
    return pad(out, (0, 0, missing, 0)) if missing else out
