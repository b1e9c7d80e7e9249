"""Performer attention (FAVOR+, https://arxiv.org/abs/2009.14794), with a PDE on its map, in O(T).

The softmax kernel is a mean over random directions w, ``exp(q . k) = E[f(q) f(k)]``, with positive
features ``f(x) = exp(w . x - |x|² / 2)`` (`random_features`). With a finite number of them, the map is
``f(Q) f(K)^T`` divided by the sums of its rows. It is never built, because sums over keys come first
(`linear_time`). Under a linear PDE, the far keys of a row multiply stepped values, and the weights of
the keys near its causal wall take the steps themselves, as in `engines.stepped`.

Exponentials need a scale. The usual one, the largest over all keys, lets future keys affect the rounding
of past ones. Here each feature has a scale of its own, taken from keys that all rows with this scale may
attend to. Therefore causality is exact, denominators are at least 1, and no constant is added to them.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from attractor.attention import masks
from attractor.attention.call import autocast_as_sdpa
from attractor.attention.engines.dense import space
from attractor.attention.engines.values import step_values
from attractor.attention.pdes import PDE
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.pdes.pde import check_heads, for_maps
from attractor.attention.performer.linear_time import causal_attention, full_attention
from attractor.attention.performer.random_features import RandomFeatures
from attractor.attention.plan import refuse_transforms
from attractor.attention.precision import accumulate_dtype
from attractor.attention.tracing import as_node, is_symbolic
from attractor.attention.validation import check_flag, check_tensors
from attractor.core.checks import check_beside, check_number, check_tensor, check_whole

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
        features: A `RandomFeatures`, or the directions themselves, ``[dim, count]`` or
            ``[heads, dim, count]``.
        is_causal: Whether a query attends only to keys up to its own position, both counted from 0.
        key_padding: ``[batch, keys]`` bool, True for valid keys.
        scale: Scale of the scores; ``dim ** -0.5`` if None.
        enable_gqa: Whether query may have a multiple of the number of heads of key and value.
        pde: An equation or its name; None for Performer attention without a PDE.
        steps: Number of steps of the attention map.
        dt: Size of a step.
        chunk: Number of rows per block of causal attention. It affects only speed and memory.

    Returns:
        ``[*batch, heads, queries, value dim]``, in the dtype of query; half precisions are summed in
        float32. The output of a query that may attend to no key is zero.

    Raises:
        TypeError, ValueError: An argument is invalid, or the PDE is not linear.
    """
    check_flag("is_causal", is_causal)
    evolution = _evolution(pde, steps, dt)
    if evolution is not None and not evolution.linear:
        raise ValueError(
            f"{evolution.pde} is not linear, so its map has to be built and O(T) is not possible; use "
            "performer_dense for short sequences, or a linear PDE such as pdes.Diffusion()"
        )
    check_whole("chunk", chunk, 1)
    log_q, log_k, values = _log_features(query, key, value, features, scale, enable_gqa, key_padding)
    if evolution is not None:
        refuse_transforms("performer_attention with a PDE", "performer_dense")
        check_heads(evolution.pde, query.shape[:-2])
        evolution = evolution.with_pde(for_maps(evolution.pde, query.shape[:-2] or (1,)))
    if query.ndim == 2:  # one head
        log_q, log_k, values = log_q[None], log_k[None], values[None]
    valid_keys = None if key_padding is None else key_padding[:, None, None, :]
    open_faces = None if valid_keys is None else masks.open_faces(valid_keys)
    stepped = values if evolution is None else step_values(evolution, values, open_faces)
    if is_causal:
        out = causal_attention(log_q, log_k, stepped, values, valid_keys, chunk, evolution)
    else:
        out = full_attention(log_q, log_k, stepped, valid_keys)
    return (out[0] if query.ndim == 2 else out).to(value.dtype)


class PerformerAttention(nn.Module):
    """A module that owns its random features, to be passed to models as ``attention=``.

    >>> from attractor.attention.models import LanguageModel
    >>> performer = PerformerAttention(dim=16, count=64)      # 64 / 4 heads
    >>> model = LanguageModel(100, dim=64, heads=4, layers=2, attention=performer, pde="diffusion")

    Args:
        dim: Dimension of the queries and keys of a head.
        count, heads, orthogonal, generator: As in `RandomFeatures`.
        chunk: As in `performer_attention`.

    The map is never built, so that it has no dropout: `PDEAttention` raises if `dropout` is not 0.
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
    """Return the output of `performer_attention`, and the map ``[..., queries, keys]``, which is built.

    The arguments are those of `performer_attention`, but the PDE may be any. Scales are the largest over
    all keys, so that the output is causal up to rounding.
    """
    check_flag("is_causal", is_causal)
    evolution = _evolution(pde, steps, dt)
    log_q, log_k, values = _log_features(query, key, value, features, scale, enable_gqa, key_padding)
    if evolution is not None:
        check_heads(evolution.pde, query.shape[:-2])
        evolution = evolution.with_pde(for_maps(evolution.pde, query.shape[:-2]))
    phi_q = (log_q - log_q.detach().amax(-1, keepdim=True)).exp()
    phi_k = (log_k - log_k.detach().amax((-2, -1), keepdim=True)).exp()
    A = phi_q @ phi_k.mT
    allowed = masks.allowed(
        query.shape[-2], key.shape[-2], query.device, is_causal=is_causal, key_padding=key_padding
    )
    if allowed is not None:
        A = A.masked_fill(~allowed, 0.0)
    total = A.sum(-1, keepdim=True)
    A = A / total.masked_fill(total == 0, 1.0)
    if evolution is not None:
        A = evolution.of_map(A, space(allowed, "key", "mask"))
    return (A @ values).to(value.dtype), A


def _evolution(pde: PDE | str | None, steps: int, dt: float) -> Evolution | None:
    """Return the evolution of the map, or None if it takes no steps."""
    if pde is None:
        check_whole("steps", steps, 0)
        return None
    evolution = Evolution.of(pde, steps, dt)
    return evolution if evolution.steps else None


def _check_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    scale: float | None,
    enable_gqa: bool,
    key_padding: Tensor | None,
) -> None:
    """Raise unless the tensors fit together and the other arguments are valid."""
    check_tensor("features", projection, "[dim, count] or [heads, dim, count]")
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, "[*batch, heads, tokens, dim]", floating=False)
        check_beside(name, x, "query", query)
    check_beside("features", projection, "query", query)
    check_beside("key_padding", key_padding, "query", query)
    if scale is not None:
        check_number("scale", scale)
    dim = query.shape[-1] if query.ndim else 0
    heads = query.shape[-3] if query.ndim > 2 else 1
    fits = projection.ndim == 2 or (projection.ndim == 3 and projection.shape[0] in (1, heads))
    if not fits or projection.shape[-2] != dim:
        raise ValueError(
            f"features {list(projection.shape)} must be [{dim}, count] or [heads, {dim}, count] for "
            f"query {list(query.shape)}"
        )
    check_flag("enable_gqa", enable_gqa)
    check_tensors(query, key, value, enable_gqa)
    if not key.shape[-2]:
        raise ValueError(f"key {list(key.shape)} holds no tokens; pass at least one")
    if key_padding is not None and (
        query.ndim != 4
        or key_padding.dtype != torch.bool
        or tuple(key_padding.shape) != (query.shape[0], key.shape[-2])
    ):
        raise ValueError(
            f"key_padding {list(key_padding.shape)} of {key_padding.dtype} must be bool [batch, keys], "
            f"and query must be [batch, heads, tokens, dim]; query is {list(query.shape)} and key is "
            f"{list(key.shape)}"
        )


def _log_features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: RandomFeatures | Tensor,
    scale: float | None,
    enable_gqa: bool,
    key_padding: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logarithms of the features of query and key, ``[..., tokens, count]``, and the values.

    All of them have the heads of query and are in at least float32. Factors of a row that do not depend
    on the key are left out, because they cancel.

    Raises:
        TypeError, ValueError: An argument of `performer_attention` is invalid.
    """
    projection = features.projection if isinstance(features, RandomFeatures) else features
    _check_arguments(query, key, value, projection, scale, enable_gqa, key_padding)
    if query.ndim == 2 and projection.ndim == 3:
        projection = projection[0]
    if query.ndim > 2 and key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, dim=-3), value.repeat_interleave(repeats, dim=-3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    root = math.sqrt(abs(scale))
    dtype = accumulate_dtype(query.dtype)
    q, k, w = query.to(dtype) * math.copysign(root, scale), key.to(dtype) * root, projection.to(dtype)
    return q @ w, k @ w - 0.5 * k.square().sum(-1, keepdim=True), value.to(dtype)
