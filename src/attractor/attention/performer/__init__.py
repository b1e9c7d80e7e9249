"""Performer attention (FAVOR+, https://arxiv.org/abs/2009.14794), with a PDE on its map, in O(T).

The softmax kernel is a mean over random directions w, ``exp(q . k) = E[f(q) f(k)]``, with positive
features ``f(x) = exp(w . x - |x|² / 2)`` (`random_features`). With a finite number of them, the map is
``f(Q) f(K)^T`` divided by the sums of its rows. `linear_time` computes its product with the values
without building it.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from attractor.attention import masks
from attractor.attention.call import Call, autocast_as_sdpa, four_dimensions
from attractor.attention.engines.dense import space
from attractor.attention.engines.values import step_values
from attractor.attention.pdes import PDE
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.pdes.pde import for_heads
from attractor.attention.performer.linear_time import causal_attention, full_attention
from attractor.attention.performer.random_features import RandomFeatures
from attractor.attention.plan import refuse_transforms
from attractor.attention.precision import accumulate_dtype
from attractor.attention.tracing import as_node, is_symbolic
from attractor.common.checks import check_beside, check_tensor, check_whole

__all__ = ["PerformerAttention", "RandomFeatures", "performer_attention", "performer_dense"]


@autocast_as_sdpa
def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: RandomFeatures | Tensor,
    is_causal: bool = False,
    key_padding: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    pde: PDE | str | None = None,
    steps: int = 4,
    dt: float = 1.0,
    chunk: int = 128,
) -> Tensor:
    """Compute Performer attention whose map evolves under a linear PDE, in O(T) time and memory.

    The output equals that of `performer_dense`, but the map is never built.

    Args:
        query: ``[*batch, heads, queries, dim]``.
        key: ``[*batch, heads, keys, dim]``.
        value: ``[*batch, heads, keys, value dim]``.
        features: A `RandomFeatures`, or its `projection`, ``[dim, count]`` or ``[heads, dim, count]``.
        is_causal, key_padding, scale, enable_gqa: As in `pde_attention`.
        pde, steps, dt: As in `pde_attention`, but the equation must be linear, or None for no PDE.
        chunk: Number of rows per block of causal attention. It affects only speed and memory.

    Returns:
        ``[*batch, heads, queries, value dim]``, in the dtype of query; sums are in at least float32. The
        output of a query that may attend to no key is zero.

    Raises:
        TypeError, ValueError: An argument is invalid, or the PDE is not linear.
    """
    check_whole("chunk", chunk, 1)
    call, evolution, log_q, log_k, values = _log_features(
        query, key, value, features, pde, steps, dt=dt, is_causal=is_causal, key_padding=key_padding,
        scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip
    if evolution.steps:
        if not evolution.linear:
            raise ValueError(
                f"{call.pde} is not linear, so its map has to be built and O(T) is not possible; use "
                "performer_dense for short sequences, or a linear PDE such as pdes.Diffusion()"
            )
        refuse_transforms("performer_attention with a PDE", "performer_dense")
    valid_keys = None if call.key_padding is None else call.key_padding[:, None, None, :]
    open_faces = None if valid_keys is None else masks.open_faces(valid_keys)
    stepped = step_values(evolution, values, open_faces)
    if is_causal:
        out = causal_attention(log_q, log_k, stepped, values, valid_keys, chunk, evolution)
    else:
        out = full_attention(log_q, log_k, stepped, valid_keys)
    return out.to(value.dtype).reshape(*call.query.shape[:-1], value.shape[-1])


class PerformerAttention(nn.Module):
    """A module that owns its random features, to be passed to models as ``attention=``.

    The map is never built, so that it has no dropout: `PDEAttention` raises if `dropout` is not 0.

    Args:
        dim: Dimension of the queries and keys of a head.
        count, heads, orthogonal, generator: As in `RandomFeatures`.
        chunk: As in `performer_attention`.

    >>> from attractor.attention.models import LanguageModel
    >>> performer = PerformerAttention(dim=16, count=64)      # 64 / 4 heads
    >>> model = LanguageModel(100, dim=64, heads=4, layers=2, attention=performer, pde="diffusion")
    """

    def __init__(
        self,
        dim: int,
        count: int = 256,
        *,
        heads: int | None = None,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
        chunk: int = 128,
    ) -> None:
        super().__init__()
        check_whole("chunk", chunk, 1)
        self.features = RandomFeatures(
            dim, count, heads=heads, orthogonal=orthogonal, generator=generator
        )
        self.chunk = chunk

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Replace the directions of the features; see `RandomFeatures.redraw`."""
        self.features.redraw(generator)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_padding: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        pde: PDE | str | None = None,
        steps: int = 4,
        dt: float = 1.0,
    ) -> Tensor:
        """Return `performer_attention` with these features; the arguments are the same."""
        options: Any = {
            "is_causal": is_causal, "key_padding": key_padding, "scale": scale, "enable_gqa": enable_gqa,
            "pde": pde, "steps": steps, "dt": dt,
        }  # fmt: skip
        if is_symbolic(query):
            return as_node(self, query, key, value, **options)
        return performer_attention(
            query, key, value, features=self.features, chunk=self.chunk, **options
        )


def performer_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: RandomFeatures | Tensor,
    is_causal: bool = False,
    key_padding: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    pde: PDE | str | None = None,
    steps: int = 4,
    dt: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the output of `performer_attention`, and its map ``[*batch, heads, queries, keys]``.

    The arguments are those of `performer_attention`, but the PDE need not be linear. The map is built,
    and all of its rows share a scale, so the output is causal only up to rounding.
    """
    call, evolution, log_q, log_k, values = _log_features(
        query, key, value, features, pde, steps, dt=dt, is_causal=is_causal, key_padding=key_padding,
        scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip
    phi_q = (log_q - log_q.detach().amax(-1, keepdim=True)).exp()
    phi_k = (log_k - log_k.detach().amax((-2, -1), keepdim=True)).exp()
    A = phi_q @ phi_k.mT
    allowed = masks.allowed(query.shape[-2], key.shape[-2], query.device, **call.masks)
    if allowed is not None:
        A = A.masked_fill(~allowed, 0.0)
    total = A.sum(-1, keepdim=True)
    A = A / total.masked_fill(total == 0, 1.0)
    A = evolution.of_map(A, space(allowed, "key", "mask"))
    shape = call.query.shape[:-1]
    return (A @ values).to(value.dtype).reshape(*shape, value.shape[-1]), A.reshape(*shape, -1)


def _log_features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: RandomFeatures | Tensor,
    pde: PDE | str | None,
    steps: int,
    **options: Any,
) -> tuple[Call, Evolution, Tensor, Tensor, Tensor]:
    """Return the call, its evolution, the logarithms of the features of query and key, and the values.

    Tensors are ``[batch, heads, tokens, count or value dim]``, in at least float32. The features lack
    factors that are equal for all keys of a row, because these cancel.
    """
    steps, pde = (0, "diffusion") if pde is None else (steps, pde)
    call = Call(query, key, value, pde=pde, steps=steps, **options)
    projection = features.projection if isinstance(features, RandomFeatures) else features
    check_tensor("features", projection, "[dim, count] or [heads, dim, count]")
    check_beside("features", projection, "query", query)
    dim, lead = query.shape[-1], call.query.shape[:-2]
    per_head = projection.ndim == 3 and projection.shape[0] in (1, *lead[-1:])
    if not (projection.ndim == 2 or per_head) or projection.shape[-2] != dim:
        raise ValueError(
            f"features {list(projection.shape)} must be [{dim}, count] or [heads, {dim}, count] for "
            f"query {list(query.shape)}"
        )
    if not key.shape[-2]:
        raise ValueError(f"key {list(key.shape)} holds no tokens; pass at least one")
    query, key, value = four_dimensions(call.query, call.key, call.value)
    scale = dim**-0.5 if call.scale is None else call.scale
    root = math.sqrt(abs(scale))
    dtype = accumulate_dtype(query.dtype)
    q, k, w = query.to(dtype) * math.copysign(root, scale), key.to(dtype) * root, projection.to(dtype)
    evolution = call.evolution.with_pde(for_heads(call.pde, lead))
    return call, evolution, q @ w, k @ w - 0.5 * k.square().sum(-1, keepdim=True), value.to(dtype)
