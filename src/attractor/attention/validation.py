"""Checks of the tensors and masks of attention, and their normalisation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attractor.common.checks import check_beside, check_tensor

WALLS = ("mask", "sequence", "periodic")
METHODS = ("auto", "dense", "stepped", "tiled", "fused")


def broadcast(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast the dimensions before the tokens, as SDPA does.

    With `enable_gqa`, key and value may keep fewer heads than query. Tensors that do not broadcast are
    returned unchanged, and `check_tensors` rejects them.
    """
    unchanged = query, key, value
    if not all(isinstance(x, Tensor) and x.ndim >= 2 for x in unchanged):
        return unchanged
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return unchanged
    if not enable_gqa:
        shape = _common(*(x.shape[:-2] for x in unchanged))
        return unchanged if shape is None else _expanded(shape, *unchanged)
    ndim = max(3, *(x.ndim for x in unchanged))
    q, k, v = (x[(None,) * (ndim - x.ndim)] for x in unchanged)
    heads, key_heads = q.shape[-3], (k.shape[-3], v.shape[-3])
    shape = _common(*(x.shape[:-3] for x in (q, k, v)))
    if shape is None or any(not n or heads % n for n in key_heads):
        return unchanged
    if key_heads[0] != key_heads[1]:
        k, v = (x.repeat_interleave(heads // n, dim=-3) for x, n in zip((k, v), key_heads))
    (q,), (k, v) = _expanded((*shape, heads), q), _expanded((*shape, k.shape[-3]), k, v)
    return q, k, v


def _common(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape that all shapes broadcast to, or None."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


def _expanded(shape: tuple[int, ...], *tensors: Tensor) -> tuple[Any, ...]:
    """Return tensors expanded to these dimensions before the last two."""
    return tuple(x if x.shape[:-2] == shape else x.expand(*shape, *x.shape[-2:]) for x in tensors)


def for_every_text(ids: Tensor | None, query: Tensor) -> Tensor | None:
    """Return `key_padding` or `documents` ``[batch or 1, tokens]`` with one row per text of query."""
    return ids if ids is None or ids.shape[0] == query.shape[0] else ids.expand(query.shape[0], -1)


def check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise unless shapes, dtypes and devices fit together."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, "[*batch, heads, tokens, dim]", floating=False)
        check_beside(name, x, "query", query)
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.ndim == key.ndim == value.ndim >= 2:
        raise ValueError(f"{shapes}: all three must be [*batch, heads, tokens, dim], or [tokens, dim]")
    if query.shape[-1] != key.shape[-1] or not query.shape[-1]:
        raise ValueError(f"{shapes}: the last dimension of query and key must be the same")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"{shapes}: key and value must have the same number of tokens")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"{shapes}: the dimensions before the heads must be the same, or 1 where they broadcast"
        )
    if query.ndim > 2:
        heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
        if not enable_gqa and not heads == key_heads == value_heads:
            raise ValueError(
                f"{shapes}: the numbers of heads differ; pass enable_gqa=True to share heads, or pass "
                "one head to broadcast"
            )
        if heads % max(key_heads, 1) or heads % max(value_heads, 1):
            raise ValueError(f"{shapes}: the numbers of heads of key and value must divide query's")
        if key_heads != value_heads:
            raise ValueError(f"{shapes}: key and value must have the same number of heads")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; "
            "they must be of one floating-point type"
        )


def check_masks(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_padding: Tensor | None,
    documents: Tensor | None,
    window: Any,
) -> None:
    """Raise unless every mask fits the shape of the map."""
    shape = (*query.shape[:-1], key.shape[-2])
    for name, mask in (
        ("attn_mask", attn_mask),
        ("key_padding", key_padding),
        ("documents", documents),
    ):
        if mask is not None:
            check_tensor(name, mask, "", floating=False)
            check_beside(name, mask, "query", query)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise ValueError(
                f"attn_mask is {attn_mask.dtype}; pass bools, True = attend, or floats to add"
            )
        sizes = zip(reversed(attn_mask.shape), reversed(shape))
        if attn_mask.ndim > len(shape) or any(m not in (1, s) for m, s in sizes):
            raise ValueError(f"attn_mask {list(attn_mask.shape)} does not broadcast to {list(shape)}")
    for name, ids in (("key_padding", key_padding), ("documents", documents)):
        if ids is None:
            continue
        if query.ndim != 4:
            raise ValueError(
                f"{name} needs a query of [batch, heads, tokens, dim], not {list(query.shape)}; "
                "use unsqueeze for the dimensions that are missing"
            )
        texts, keys = query.shape[0], key.shape[-2]
        if ids.ndim != 2 or ids.shape[0] not in (1, texts) or ids.shape[1] != keys:
            raise ValueError(
                f"{name} {list(ids.shape)} must be {[texts, keys]}, or {[1, keys]} for all texts"
            )
    if key_padding is not None and key_padding.dtype != torch.bool:
        raise ValueError(f"key_padding is {key_padding.dtype}; pass bools, True = a valid token")
    if documents is not None:
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"documents needs as many queries as keys, not {query.shape[-2]} and {key.shape[-2]}"
            )
        no_ids = documents.is_floating_point() or documents.is_complex()
        if no_ids or documents.dtype == torch.bool:
            raise ValueError(f"documents is {documents.dtype}; pass integer ids")
    if window is not None:
        pair = (window, window) if isinstance(window, int) else window
        sides = isinstance(pair, tuple | list) and len(pair) == 2
        if not sides or any(not isinstance(side, int) or side < -1 for side in pair):
            raise ValueError(
                f"window {window!r} must be a number of tokens or (left, right), each at least 0, "
                "or -1 for no limit"
            )
