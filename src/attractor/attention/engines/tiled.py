"""Any PDE in O(T) memory: the map is computed, stepped and discarded tile by tile.

The backward pass computes the tiles again. The log-sum-exp of the rows is computed first, so that tiles
contain weights. Dropout acts on the weights before the steps. Tiles divide the map in one of two ways:

    by destination   The steps act on a tile with a halo on either side, and the result within the tile
                     multiplies its values. For any PDE.
    by source        The steps spread the weights of a tile into its halo, and the result multiplies the
                     values of the tile and the halo. For linear steps; far from moving walls, the
                     weights multiply stepped values instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad
from torch.utils.checkpoint import checkpoint

from attractor.attention.engines import softmax
from attractor.attention.engines.stepped import Others
from attractor.attention.engines.values import step_values
from attractor.attention.lengths import row_ranges
from attractor.attention.masks import Scope, open_faces
from attractor.attention.pdes import PDE, Line, take_steps
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.precision import accumulate_dtype, first_derivatives_only
from attractor.common.versions import exporting

COLUMNS = 256  # keys per tile, without the halo
ENTRIES = 1 << 18  # entries per tile over all heads, which fit into the cache of a CPU
ENTRIES_GPU = 1 << 24  # entries per tile over all heads, enough work for a GPU


def tiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scope: Scope,
    scale: float,
    evolution: Evolution,
    dropout_p: float = 0.0,
    others: Others | None = None,
) -> Tensor:
    """Return the output ``[batch, heads, queries, value dim]`` of a PDE on the key axis.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of heads.
        scope: Which keys a query may attend to. The bias gets no gradient.
        scale: Scale of the scores.
        evolution: The PDE and its steps. Coefficients that need gradients must be fields of a dataclass.
        dropout_p: Probability that a weight of the map A(0) is dropped.
        others: As in `stepped`.
    """
    dtype, pde = value.dtype, evolution.pde
    query, key, value = (x.to(accumulate_dtype(dtype)) for x in (query, key, value))
    lse = softmax.log_sum_exp(query, key, scope, scale)
    if others is not None:
        more = others[0].logsumexp(-1)
        nothing = (lse == -torch.inf) & (more == -torch.inf)  # there the gradient of logaddexp is NaN
        lse = torch.logaddexp(lse.masked_fill(nothing, 0.0), more.masked_fill(nothing, 0.0))
        lse = lse.masked_fill(nothing, -torch.inf)
    stepped = value[..., :0, :]
    linear_steps = pde.linear or getattr(pde, "split", False)  # a split reaction precedes them
    if linear_steps and scope.mask is None and not torch.compiler.is_compiling():
        stepped = step_values(evolution, value, scope.open_faces())
    compiling = torch.compiler.is_compiling()
    seed = int(torch.randint(1 << 62, ())) if dropout_p and not compiling else 0
    names = coefficients(pde)
    job = _Job(scope, scale, pde, names, evolution.steps, evolution.dt, dropout_p, seed)
    if compiling:
        out = _compiled(query, key, value, lse, job)
    else:
        tensors = [getattr(pde, name) for name in names]
        out = _Tiled.apply(query, key, value, stepped, lse, job, *tensors)
    if others is None:
        return out.to(dtype)
    weights = (others[0] - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return (out + others[1](dropout(weights, dropout_p))).to(dtype)


def coefficients(pde: PDE) -> list[str]:
    """Return the names of a PDE's fields that are tensors."""
    if not is_dataclass(pde):
        return []
    return [field.name for field in fields(pde) if isinstance(getattr(pde, field.name), Tensor)]


@dataclass(frozen=True, eq=False)
class _Job:
    """The arguments of all tiles; `names` are those of the coefficients that are tensors."""

    scope: Scope
    scale: float
    pde: Any
    names: list[str]
    steps: int
    dt: float
    dropout_p: float
    seed: int

    @property
    def reach(self) -> int:
        return self.steps * self.pde.reach

    def tiles(self, query: Tensor, stepped: Tensor) -> Iterator["_Tile"]:
        """Yield all tiles, by source if there are stepped values."""
        scope, by_source = self.scope, stepped.shape[-2] > 0
        entries = ENTRIES if query.device.type == "cpu" else ENTRIES_GPU
        height = max(16, entries // (COLUMNS * max(1, query.shape[0] * query.shape[1])))
        for start in range(0, scope.queries, height):
            rows = slice(start, min(start + height, scope.queries))
            columns = scope.columns(rows)
            dropout_mask = self._dropout_mask(query, rows, columns)
            for first in range(columns.start, columns.stop, COLUMNS):
                inner = slice(first, min(first + COLUMNS, columns.stop))
                outer = slice(
                    max(inner.start - self.reach, columns.start),
                    min(inner.stop + self.reach, columns.stop),
                )
                keys, values = (inner, outer) if by_source else (outer, inner)
                far = by_source and self._far(rows, inner)
                keep = None
                if dropout_mask is not None:
                    keep = dropout_mask[..., keys.start - columns.start : keys.stop - columns.start]
                yield _Tile(rows, keys, inner if far else values, by_source, far, keep)

    def _far(self, rows: slice, columns: slice) -> bool:
        """Return whether all keys are out of reach of the moving walls of all rows."""
        left, right = self.scope.left, self.scope.right
        clear_left = left is None or columns.start >= rows.stop - 1 - left + self.reach
        return clear_left and (right is None or columns.stop - 1 <= rows.start + right - self.reach)

    def _dropout_mask(self, query: Tensor, rows: slice, columns: slice) -> Tensor | None:
        """Return the entries of some rows that dropout keeps, the same in each call; None for all."""
        if not self.dropout_p:
            return None
        generator = torch.Generator(query.device).manual_seed(self.seed + rows.start)
        shape = (*query.shape[:2], rows.stop - rows.start, columns.stop - columns.start)
        return torch.rand(shape, generator=generator, device=query.device) >= self.dropout_p

    def output(
        self, tile: "_Tile", q: Tensor, k: Tensor, v: Tensor, lse: Tensor, *coefficients: Tensor
    ) -> Tensor:
        """Return the share of a tile in the output of its rows."""
        pde = replace(self.pde, **dict(zip(self.names, coefficients))) if coefficients else self.pde
        scores = (q * self.scale) @ k.mT
        bias = self.scope.bias_tile(tile.rows, tile.keys)
        if bias is not None:
            scores = scores + bias
        allowed = self.scope.tile(tile.rows, tile.keys, q.device)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        A = (scores - lse[..., None]).exp()
        if tile.keep is not None:
            A = torch.where(tile.keep, A / max(1 - self.dropout_p, 1e-9), 0.0)
        elif self.dropout_p:
            A = dropout(A, self.dropout_p)
        if hasattr(pde, "start"):
            A = pde.start(A, self.steps * self.dt)
        if tile.far:
            return A @ v
        if not tile.by_source:
            faces = None if allowed is None else open_faces(allowed)
            A = take_steps(pde, A, Line(-1, faces), self.steps, self.dt)
            return A[..., tile.values.start - tile.keys.start :][..., : v.shape[-2]] @ v
        allowed = self.scope.tile(tile.rows, tile.values, q.device)
        faces = None if allowed is None else open_faces(allowed)
        A = pad(A, (tile.keys.start - tile.values.start, tile.values.stop - tile.keys.stop))
        return take_steps(pde, A, Line(-1, faces), self.steps, self.dt) @ v


@dataclass(frozen=True, eq=False)
class _Tile:
    """A tile of the map.

    Attributes:
        rows: The rows.
        keys: The keys whose weights are computed.
        values: The keys whose values the stepped weights multiply.
        by_source: Whether the tile is by source, see the module.
        far: Whether moving walls are out of reach, so that weights multiply stepped values.
        keep: The weights that dropout keeps, or None.
    """

    rows: slice
    keys: slice
    values: slice
    by_source: bool
    far: bool
    keep: Tensor | None


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        stepped: Tensor,
        lse: Tensor,
        job: _Job,
        *coefficients: Tensor,
    ) -> Tensor:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for tile in job.tiles(query, stepped):
            out[..., tile.rows, :] += job.output(
                tile, *_select(tile, query, key, value, stepped, lse), *coefficients
            )
        ctx.job = job
        ctx.save_for_backward(query, key, value, stepped, lse, *coefficients)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, stepped, lse, *coefficients = ctx.saved_tensors
        job: _Job = ctx.job
        total = [torch.zeros_like(x) for x in (query, key, value, stepped, lse)]
        grad_coefficients = [torch.zeros_like(x) for x in coefficients]
        for tile in job.tiles(query, stepped):
            parts = [
                x.detach() for x in (*_select(tile, query, key, value, stepped, lse), *coefficients)
            ]
            with torch.enable_grad():
                for part in parts:
                    part.requires_grad_()
                out = job.output(tile, *parts)
            gradients = torch.autograd.grad(out, parts, grad[..., tile.rows, :], allow_unused=True)
            dq, dk, dv, dlse = _select(tile, *total)
            for sum_, part in zip((dq, dk, dv, dlse, *grad_coefficients), gradients):
                if part is not None:
                    sum_ += part
        return *total, None, *grad_coefficients


def _compiled(query: Tensor, key: Tensor, value: Tensor, lse: Tensor, job: _Job) -> Tensor:
    """Return the output in strips of entire rows for `torch.compile`, which fuses operations itself."""
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    height = job.scope.queries
    if not exporting():
        height = max(16, 16 * ENTRIES // (query.shape[0] * query.shape[1] * job.scope.keys))
    parts = []
    for start, stop in row_ranges(0, job.scope.queries, height):
        rows = slice(start, stop)
        columns = job.scope.columns(rows)
        tile = _Tile(rows, columns, columns, False, False, None)
        inputs = _select(tile, query, key, value, value, lse)
        parts.append(checkpoint(partial(job.output, tile), *inputs, use_reentrant=False))
    return torch.cat(parts, -2)


def _select(
    tile: _Tile, query: Tensor, key: Tensor, value: Tensor, stepped: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a tile's query, key, value and log-sum-exp, as views."""
    v = stepped if tile.far else value
    return (
        query[..., tile.rows, :], key[..., tile.keys, :], v[..., tile.values, :], lse[..., tile.rows],
    )  # fmt: skip
