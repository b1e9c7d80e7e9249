"""Attention maps along pseudo-time, and measures of them.

Under diffusion, smoothness ``|L A|²`` and variance decrease with every step within the stable limit,
with and without walls (Theorem 2). The distance between a cheap map and the exact map after the same
steps never grows. The bound of Proposition D.5 on the distance to the initial exact map does not hold,
because a softmax map is not stationary under diffusion; `hybrid_errors` measures both distances.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from attractor.attention import masks
from attractor.attention.call import Call, autocast_as_sdpa
from attractor.attention.engines.dense import dense, space
from attractor.attention.pdes import PDE, LearnedPDE, Neighbourhood
from attractor.attention.pdes.pde import as_equation
from attractor.common.checks import check_beside, check_number, check_tensor, check_whole

LIMIT = 2**27  # Entries of all maps of a trace: half a gigabyte in float32.


@dataclass(frozen=True, eq=False)
class PDETrace:
    """An attention map along pseudo-time.

    Unless stated otherwise, measures are ``[steps + 1, *batch, heads]``, and those of rows are averages
    over the rows that may attend to a key.

    Attributes:
        maps: The maps ``[steps + 1, *batch, heads, queries, keys]``, starting with A(0).
        times: Pseudo-time of each map, ``[steps + 1]``.
        allowed: Bool mask that broadcasts against a map, True where a query may attend; None if it may
            attend everywhere.
        space: The neighbourhood in which the map evolves.
        pde: The equation.
    """

    maps: Tensor
    times: Tensor
    allowed: Tensor | None
    space: Neighbourhood
    pde: PDE

    @property
    def smoothness(self) -> Tensor:
        """Squared norm of the Laplacian, ``|L A|²``, the paper's S_h; smooth maps have small values."""
        return self.space.laplacian(self.maps).square().sum((-2, -1))

    @property
    def variance(self) -> Tensor:
        """Variance of all entries of a map, Var(A), the paper's C_h."""
        return self.maps.var((-2, -1), correction=0)

    @property
    def spread(self) -> Tensor:
        """Effective range: root mean square distance of attention from the mean key of its row."""
        rows = self._normalised_rows()
        return self._deviation(rows, rows @ self._positions(-1))

    @property
    def distance(self) -> Tensor:
        """Root mean square distance of attention from the position of its query."""
        return self._deviation(self._normalised_rows(), self._positions(-2))

    @property
    def entropy(self) -> Tensor:
        """Shannon entropy of the normalised rows, in nats; negative entries count as 0."""
        weights = self._normalised_rows().clamp(min=0)
        return self._average(-torch.special.xlogy(weights, weights).sum(-1))

    @property
    def mass(self) -> Tensor:
        """Mean row sum. On the key axis, all equations but reaction-diffusion conserve it."""
        return self._average(self.row_mass)

    @property
    def row_mass(self) -> Tensor:
        """Row sums, ``[steps + 1, *batch, heads, queries]``."""
        return self.maps.sum(-1)

    @property
    def leaked(self) -> Tensor:
        """Mean weight per row on keys outside the mask; 0 with ``walls="mask"``."""
        if self.allowed is None:
            return torch.zeros_like(self.mass)
        return self._average(self.maps.abs().masked_fill(self.allowed, 0.0).sum(-1))

    def measures(self) -> dict[str, Tensor]:
        """Return all measures per map, by name."""
        names = ("smoothness", "variance", "spread", "distance", "entropy", "mass", "leaked")
        return {name: getattr(self, name) for name in names}

    def _positions(self, dim: int) -> Tensor:
        return torch.arange(self.maps.shape[dim], device=self.maps.device, dtype=self.maps.dtype)

    def _deviation(self, rows: Tensor, centres: Tensor) -> Tensor:
        """Return the root mean square distance of rows from `centres` ``[..., queries]``."""
        squares = (self._positions(-1) - centres.unsqueeze(-1)).square()
        return self._average((rows * squares).sum(-1)).clamp(min=0).sqrt()

    def _normalised_rows(self) -> Tensor:
        mass = self.row_mass.unsqueeze(-1)
        return self.maps / mass.masked_fill(mass == 0, 1.0)

    def _average(self, rows: Tensor) -> Tensor:
        """Return the mean over rows ``[..., queries]`` that may attend to at least one key."""
        if self.allowed is None:
            return rows.mean(-1)
        nonempty = self.allowed.any(-1).expand(rows.shape[1:])
        return (rows * nonempty).sum(-1) / nonempty.sum(-1).clamp(min=1)


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
    """Return the attention map of `pde_attention` before the first step and after each step.

    The product of the last map and the values equals the result of `pde_attention` up to rounding. The
    map is materialised, so this is for short sequences. The reaction of a split equation acts within the
    first step. Options with which a causal model sees its future are not rejected.

    Arguments that are not listed below are those of `pde_attention`.

    >>> import torch
    >>> from attractor.attention import pdes
    >>> query, key = torch.randn(2, 1, 4, 16, 32)      # 1 text, 4 heads, 16 tokens
    >>> result = trace(query, key, is_causal=True, pde=pdes.Diffusion(alpha=0.2), steps=8)
    >>> result.maps.shape, result.entropy.shape
    (torch.Size([9, 1, 4, 16, 16]), torch.Size([9, 1, 4]))
    >>> bool((result.smoothness.diff(dim=0) < 0).all())
    True

    Args:
        dropout_p: Probability that an entry of A(0) is dropped. With the same seed, the same entries are
            dropped as with ``method="dense"``.
        renormalise: Whether to divide every row of the last map by its sum.
        method: Any method of `pde_attention`; all engines have the same map.
        limit: Largest number of entries of all maps together.

    Returns:
        The maps and their measures.

    Raises:
        TypeError: As in `pde_attention`.
        ValueError: As in `pde_attention`, or the maps have more than `limit` entries.
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
    call = Call(query, key, value, *arguments, **options)
    check_number("limit", limit, 0.0)
    pde, steps, dt = call.evolution.pde, call.steps, call.dt
    shape = (*call.query.shape[:-1], call.key.shape[-2])
    entries = (steps + 1) * math.prod(shape)
    if entries > limit:
        raise ValueError(
            f"a trace of {steps} steps has {steps + 1} maps of {list(shape)}, {entries:.3g} entries in "
            f"total, more than limit = {limit:.3g}; pass fewer texts, heads or tokens, for example "
            "query[:1, :1, :256]"
        )
    _, A = dense(
        call.query, call.key, call.value[..., :0], dropout_p=call.dropout_p, scale=call.scale,
        pde=pde, steps=0, dt=dt, **call.masks,
    )  # fmt: skip
    allowed = masks.allowed(shape[-2], shape[-1], call.query.device, **call.masks)
    where = space(allowed, call.axis, call.walls)
    maps = [A] * (steps + 1) if call.empty else list(_stages(pde, A, where, steps, dt))
    if call.renormalise:
        mass = maps[-1].sum(-1, keepdim=True)
        maps[-1] = maps[-1] / mass.masked_fill(mass == 0, 1.0)
    times = dt * torch.arange(steps + 1, dtype=A.dtype, device=A.device)
    return PDETrace(torch.stack(maps), times, allowed, where, pde)


def _stages(pde: Any, u: Tensor, where: Neighbourhood, steps: int, dt: float) -> Iterator[Tensor]:
    """Iterate over u before the first step and after each step of `evolve`."""
    yield u
    # Coefficients per head are [heads, 1, 1]. With one head, u may have no dimension for heads.
    shape = u.shape
    if steps and hasattr(pde, "start"):
        u = pde.start(u, steps * dt)
    velocity = None
    for _ in range(steps):
        u, velocity = pde.step(u, velocity, where, dt)
        yield u.reshape(shape) if u.numel() == shape.numel() else u


def hybrid_errors(
    exact: Tensor, cheap: Tensor, where: Neighbourhood, *, pde: PDE, steps: int, dt: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the distances between a cheap map and the exact map along pseudo-time.

    Args:
        exact: The exact map ``[..., queries, keys]``.
        cheap: The map that approximates it, of the same shape and dtype.
        where: The neighbourhood in which the maps evolve, such as ``Line()``.
        pde: The equation.
        steps: Number of steps.
        dt: Size of a step in pseudo-time.

    Returns:
        Two tensors ``[steps + 1, ...]`` of Frobenius distances from the cheap map after each step. The
        first are distances to the initial exact map, for which the bound of Proposition D.5 does not
        hold. The second are distances to the exact map after the same steps, which never grow under
        diffusion.

    Raises:
        TypeError: A map is not a tensor of floats, or `where` is not a neighbourhood.
        ValueError: The maps do not match, or `pde`, `steps` or `dt` is not valid.
    """
    check_tensor("exact", exact, "[..., queries, keys]")
    check_tensor("cheap", cheap, "[..., queries, keys]")
    check_beside("cheap", cheap, "exact", exact)
    if exact.shape != cheap.shape or exact.dim() < 2 or exact.dtype != cheap.dtype:
        raise ValueError(
            f"exact {list(exact.shape)} of {exact.dtype} and cheap {list(cheap.shape)} of {cheap.dtype} "
            "must be maps of one shape and dtype"
        )
    check_whole("steps", steps, 0)
    check_number("dt", dt, 0.0)
    pde = as_equation(pde)
    if not hasattr(where, "laplacian"):
        raise TypeError(f"where is a {type(where).__name__}; pass a Line or a Plane")
    norm = lambda u: torch.linalg.vector_norm(u, dim=(-2, -1))
    stages = zip(_stages(pde, exact, where, steps, dt), _stages(pde, cheap, where, steps, dt))
    distances = [(norm(u - exact), norm(u - exact_u)) for exact_u, u in stages]
    to_start, to_exact = zip(*distances)
    # Coefficients per head add a dimension after the first step.
    stack = lambda tensors: torch.stack(torch.broadcast_tensors(*tensors))
    return stack(to_start), stack(to_exact)


def coefficients(model: nn.Module) -> list[dict[str, Any]]:
    """Return the learned coefficients of the PDEs of a model.

    Args:
        model: A module that contains `LearnedPDE` modules.

    Returns:
        One dictionary per coefficient of each `LearnedPDE`, in the order of the layers. ``name`` is the
        path of the module, ``pde`` the class of its equation, and ``coefficient`` the name of the
        coefficient. ``heads`` is the number of its values, and ``mean``, ``deviation``, ``min`` and
        ``max`` are statistics over the heads. ``share`` is the ratio of the layer's `dt` to the largest
        stable step, for the head closest to its limit.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass a module")
    rows = []
    for name, module in model.named_modules():
        if not isinstance(module, LearnedPDE):
            continue
        with torch.no_grad():
            equation: Any = module()
        for field in fields(equation):
            coefficient = getattr(equation, field.name)
            if isinstance(coefficient, bool) or not isinstance(coefficient, (float, int, Tensor)):
                continue
            values = torch.as_tensor(coefficient, dtype=torch.float64).flatten()
            rows.append(
                {
                    "name": name,
                    "pde": type(equation).__name__,
                    "coefficient": field.name,
                    "heads": values.numel(),
                    "mean": values.mean().item(),
                    "deviation": values.std(correction=0).item(),
                    "min": values.min().item(),
                    "max": values.max().item(),
                    "share": module.dt / equation.max_dt(module.axis),
                }
            )
    return rows
