"""What a PDE does to an attention map: the map itself, and measures of it, along pseudo-time.

What the paper says of diffusion, and what is so (`tests/attention/test_diagnostics.py` has each as a
test):

- *Theorem 2.* Smoothness ``|L A|²`` and variance fall with every step within the stable limit: so it is,
  walls or not. Its third claim, a range that grows linearly, is not of one map: the variance of where
  a row attends grows linearly, ``2 alpha t`` far from walls, so the range grows like ``sqrt t``, until
  the walls stop it.
- *Proposition D.4.* Depth adds pseudo-time: L layers of one step each on a map are one layer of L
  steps, exactly, and the flow of the continuous equation over L dt up to O(dt).
- *Proposition D.5* bounds the distance between a cheap map (windowed, Performer) after its steps and
  the exact softmax map by the distance at the start, plus what vanishes with dt and time. It does not
  hold: the proof takes the softmax map to be stationary under diffusion, and it is not. Started from the
  exact map itself the distance is not near 0 but grows, up to that between the exact map and a flat
  one. What does hold is that the distance to the exact map *after the same steps* never grows
  (`hybrid_errors` measures both).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attractor.attention import masks
from attractor.attention.call import Call, autocast_as_sdpa
from attractor.attention.engines.dense import dense, space
from attractor.attention.pdes import PDE, LearnedPDE, Neighbourhood
from attractor.core.checks import check_beside, check_number, check_tensor, check_whole

LIMIT = 2**27  # entries of all maps of a trace: half a gigabyte in float32


@dataclass(frozen=True, eq=False)
class PDETrace:
    """An attention map through pseudo-time. Measures are averages over the rows that have keys.

    Attributes:
        maps: ``[steps + 1, *batch, heads, queries, keys]``, the first is A(0).
        times: pseudo-time of each map, ``[steps + 1]``.
        allowed: bool, broadcasts against a map: True where a query may attend; None: everywhere.
        space: where the map flows.
        pde: the equation.
    """

    maps: Tensor
    times: Tensor
    allowed: Tensor | None
    space: Neighbourhood
    pde: PDE

    @property
    def smoothness(self) -> Tensor:
        """``|L A|²``, the paper's S_h; small is smooth. ``[steps + 1, *batch, heads]``, as all below."""
        return self.space.laplacian(self.maps).square().sum((-2, -1))

    @property
    def variance(self) -> Tensor:
        """Var(A), the paper's C_h, over all entries of a map."""
        return self.maps.var((-2, -1), correction=0)

    @property
    def spread(self) -> Tensor:
        """The effective range: root mean square distance of attention from each row's mean key."""
        return self._average(_moment(self._shares(), self._keys(), None)).clamp(min=0).sqrt()

    @property
    def distance(self) -> Tensor:
        """Root mean square distance of attention from each query's own position."""
        own = torch.arange(self.maps.shape[-2], device=self.maps.device, dtype=self.maps.dtype)
        return self._average(_moment(self._shares(), self._keys(), own)).clamp(min=0).sqrt()

    @property
    def entropy(self) -> Tensor:
        """Shannon's, of a row's shares, in nats; entries that are not positive count for nothing."""
        shares = self._shares().clamp(min=0)
        return self._average(-torch.special.xlogy(shares, shares).sum(-1))

    @property
    def mass(self) -> Tensor:
        """Mean row sum: 1, and under reaction-diffusion not."""
        return self._average(self.row_mass)

    @property
    def row_mass(self) -> Tensor:
        """Row sums, ``[steps + 1, *batch, heads, queries]``."""
        return self.maps.sum(-1)

    @property
    def leaked(self) -> Tensor:
        """Weight on keys that a query may not attend to, a row's average; 0 if walls are the mask's."""
        if self.allowed is None:
            return torch.zeros_like(self.mass)
        return self._average(self.maps.abs().masked_fill(self.allowed, 0.0).sum(-1))

    def measures(self) -> dict[str, Tensor]:
        """All measures by name."""
        names = ("smoothness", "variance", "spread", "distance", "entropy", "mass", "leaked")
        return {name: getattr(self, name) for name in names}

    def _keys(self) -> Tensor:
        return torch.arange(self.maps.shape[-1], device=self.maps.device, dtype=self.maps.dtype)

    def _shares(self) -> Tensor:
        mass = self.row_mass.unsqueeze(-1)
        return self.maps / mass.masked_fill(mass == 0, 1.0)

    def _average(self, rows: Tensor) -> Tensor:
        if self.allowed is None:
            return rows.mean(-1)
        some = self.allowed.any(-1).expand(rows.shape[1:])
        return (rows * some).sum(-1) / some.sum(-1).clamp(min=1)


def _moment(shares: Tensor, keys: Tensor, around: Tensor | None) -> Tensor:
    """Second moments of rows ``[..., queries]``, around their means if not around given positions."""
    if around is None:
        around = shares @ keys
    return (shares * (keys - around.unsqueeze(-1)).square()).sum(-1)


@torch.no_grad()
def trace(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pde: PDE | str,
    steps: int = 4,
    dt: float = 1.0,
    axis: str = "key",
    walls: str = "mask",
    key_padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: masks.Window | None = None,
    dropout_p: float = 0.0,
    renormalise: bool = False,
    method: str = "auto",
    limit: float = LIMIT,
) -> PDETrace:
    """The map of ``pde_attention`` with the same arguments, before and after each step.

    The last map times the values is what `pde_attention` returns, up to rounding.

    >>> import torch
    >>> from attractor.attention import pdes
    >>> query, key = torch.randn(2, 1, 4, 16, 32)      # 1 text, 4 heads, 16 tokens
    >>> seen = trace(query, key, is_causal=True, pde=pdes.Diffusion(alpha=0.2), steps=8)
    >>> seen.maps.shape, seen.entropy.shape
    (torch.Size([9, 1, 4, 16, 16]), torch.Size([9, 1, 4]))
    >>> bool((seen.smoothness.diff(dim=0) < 0).all())
    True

    Arguments are those of `pde_attention`, without the values. The map is built, so this is for short
    sequences. A split reaction acts before the first step, as it does there. Flows that would make a
    causal model see its future are shown, and not refused.

    Args:
        dropout_p: probability that an entry of A(0) is dropped; with the same seed those that
            ``method="dense"`` drops.
        renormalise: divides every row of the last map by its sum.
        method: any of `pde_attention`'s; all engines have the same map.
        limit: the largest number of entries of all maps together.

    Raises:
        TypeError, ValueError: as in `pde_attention`, or the maps have more than `limit` entries.
    """
    return _trace(
        query, key, key, attn_mask, dropout_p, is_causal, scale, enable_gqa, limit=limit, pde=pde,
        steps=steps, dt=dt, axis=axis, walls=walls, key_padding=key_padding, documents=documents,
        window=window, renormalise=renormalise, method=method,
    )  # fmt: skip


@autocast_as_sdpa
def _trace(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, limit: float, **options: Any
) -> PDETrace:
    call = Call.of(query, key, value, *arguments, **options)
    check_number("limit", limit, 0.0)
    steps, dt = call.steps, call.dt
    shape = (*call.query.shape[:-1], call.key.shape[-2])
    entries = (steps + 1) * math.prod(shape)
    if entries > limit:
        raise ValueError(
            f"a trace of {steps} steps holds {steps + 1} maps of {list(shape)}, {entries:.3g} entries, "
            f"more than limit = {limit:.3g}; give fewer texts, heads or tokens: query[:1, :1, :256]"
        )
    _, A = dense(
        call.query, call.key, call.value[..., :0], dropout_p=call.dropout_p, scale=call.scale,
        pde=call.pde, steps=0, dt=dt, **call.masks,
    )  # fmt: skip
    allowed = masks.allowed(shape[-2], shape[-1], call.query.device, **call.masks)
    where = space(allowed, call.axis, call.walls)
    maps = [A] * (steps + 1) if call.empty else list(_stages(call.pde, A, where, steps, dt))
    if call.renormalise:
        mass = maps[-1].sum(-1, keepdim=True)
        maps[-1] = maps[-1] / mass.masked_fill(mass == 0, 1.0)
    times = dt * torch.arange(steps + 1, dtype=A.dtype, device=A.device)
    return PDETrace(torch.stack(maps), times, allowed, where, call.pde)


def _stages(pde: Any, u: Tensor, where: Neighbourhood, steps: int, dt: float) -> Iterator[Tensor]:
    """u and what it is after each step: what `evolve` does, looked at on the way."""
    yield u
    shape = u.shape  # coefficients of heads are [heads, 1, 1]; with one head a map may have none
    if steps and hasattr(pde, "start"):
        u = pde.start(u, steps * dt)
    velocity = None
    for _ in range(steps):
        u, velocity = pde.step(u, velocity, where, dt)
        yield u.reshape(shape) if u.numel() == shape.numel() else u


def hybrid_errors(
    exact: Tensor, cheap: Tensor, where: Neighbourhood, *, pde: PDE, steps: int, dt: float = 1.0
) -> tuple[Tensor, Tensor]:
    """How far a cheap map is from the exact one while it takes its steps, ``[steps + 1, ...]`` each.

    Returns:
        the distance (Frobenius) to the exact map as it was, which Proposition D.5 bounds wrongly; and
        to the exact map after the same steps, which diffusion never lets grow.

    Args:
        exact, cheap: maps ``[..., queries, keys]``.
        where: where they flow, such as ``Line()``.
    """
    check_tensor("exact", exact, "[..., queries, keys]")
    check_tensor("cheap", cheap, "[..., queries, keys]")
    check_beside("cheap", cheap, "exact", exact)
    if exact.shape != cheap.shape or exact.dim() < 2 or exact.dtype != cheap.dtype:
        raise ValueError(
            f"exact {list(exact.shape)} and cheap {list(cheap.shape)} must be maps of one shape and type"
        )
    check_whole("steps", steps, 0)
    check_number("dt", dt, 0.0)
    if isinstance(pde, type) or not hasattr(pde, "step"):
        raise ValueError(f"pde {pde!r} is not an equation; give one such as pdes.Diffusion(alpha=0.1)")
    if not hasattr(where, "laplacian"):
        raise TypeError(f"where is a {type(where).__name__}; give a Line or a Plane")
    norm = lambda u: torch.linalg.vector_norm(u, dim=(-2, -1))
    stages = zip(_stages(pde, exact, where, steps, dt), _stages(pde, cheap, where, steps, dt))
    errors = [(norm(moved - exact), norm(moved - truth)) for truth, moved in stages]
    to_start, to_truth = zip(*errors)
    together = lambda parts: torch.stack(torch.broadcast_tensors(*parts))  # coefficients may bring heads
    return together(to_start), together(to_truth)


def coefficients(model: nn.Module) -> list[dict[str, Any]]:
    """The PDEs a model has learnt, layer by layer: one row for each coefficient of each layer.

    A row has the ``name`` of the layer's `LearnedPDE`, its ``pde``, the ``coefficient``, over heads its
    ``heads``, ``mean``, ``deviation``, ``min`` and ``max``, and ``share``, the part of the largest
    stable step that the layer's dt is (of the head that is closest to its limit).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a module")
    rows = []
    for name, module in model.named_modules():
        if not isinstance(module, LearnedPDE):
            continue
        with torch.no_grad():
            equation: Any = module()
        for field in fields(equation) if is_dataclass(equation) else ():
            given = getattr(equation, field.name)
            if isinstance(given, bool) or not isinstance(given, (float, int, Tensor)):
                continue
            numbers = torch.as_tensor(given, dtype=torch.float64).flatten()
            rows.append(
                {
                    "name": name,
                    "pde": type(equation).__name__,
                    "coefficient": field.name,
                    "heads": numbers.numel(),
                    "mean": numbers.mean().item(),
                    "deviation": numbers.std(correction=0).item(),
                    "min": numbers.min().item(),
                    "max": numbers.max().item(),
                    "share": module.dt / equation.max_dt(module.axis),
                }
            )
    return rows
