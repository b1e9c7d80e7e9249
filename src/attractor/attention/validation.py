"""Checks of the arguments of attention that `Call.of` makes, and the forms it brings them into."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attractor.attention.pdes import AXES
from attractor.core.checks import as_int, check_beside, check_tensor, is_number

WALLS = ("mask", "sequence", "periodic")
METHODS = ("auto", "dense", "stepped", "tiled", "fused")


def broadcast(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three with equal dimensions before their tokens, where they broadcast, as in SDPA.

    With `enable_gqa`, key and value may keep fewer heads than query. Shapes that do not fit are returned
    unchanged, and `check_tensors` rejects them.
    """
    given = query, key, value
    if not all(isinstance(x, Tensor) and x.ndim >= 2 for x in given):
        return given
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return given
    if not enable_gqa:
        shape = _common(*(x.shape[:-2] for x in given))
        return given if shape is None else _expanded(shape, *given)
    ndim = max(3, *(x.ndim for x in given))
    q, k, v = (x[(None,) * (ndim - x.ndim)] for x in given)
    heads, few = q.shape[-3], (k.shape[-3], v.shape[-3])
    shape = _common(*(x.shape[:-3] for x in (q, k, v)))
    if shape is None or any(not n or heads % n for n in few):
        return given
    if few[0] != few[1]:
        k, v = (x.repeat_interleave(heads // n, dim=-3) for x, n in zip((k, v), few))
    (q,), (k, v) = _expanded((*shape, heads), q), _expanded((*shape, k.shape[-3]), k, v)
    return q, k, v


def _common(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape that all of them broadcast to, or None."""
    ndim, common = max(map(len, shapes)), []
    for sizes in zip(*((*(1,) * (ndim - len(shape)), *shape) for shape in shapes)):
        others = [n for n in sizes if n != 1]
        if any(n != others[0] for n in others):
            return None
        common.append(others[0] if others else 1)
    return tuple(common)


def _expanded(shape: Sequence[int], *given: Tensor) -> tuple[Any, ...]:
    """Return tensors expanded to these dimensions before the last two."""
    shape = tuple(shape)
    return tuple(x if x.shape[:-2] == shape else x.expand(*shape, *x.shape[-2:]) for x in given)


def for_every_text(ids: Tensor | None, query: Tensor) -> Tensor | None:
    """Return `key_padding` or `documents` ``[batch or 1, tokens]`` with one row per text of query."""
    return ids if ids is None or ids.shape[0] == query.shape[0] else ids.expand(query.shape[0], -1)


def with_rows(attn_mask: Tensor | None) -> Tensor | None:
    """Return a mask of fewer than two dimensions as one row ``[1, keys]`` for all queries."""
    return attn_mask if attn_mask is None or attn_mask.ndim > 1 else attn_mask.reshape(1, -1)


def check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise unless shapes, dtypes and devices fit together."""
    for name, given in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, given, "[*batch, heads, tokens, dim]", floating=False)
        check_beside(name, given, "query", query)
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
                f"{shapes}: the numbers of heads differ; pass enable_gqa=True to share heads, or give "
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
    for name, given in (
        ("attn_mask", attn_mask),
        ("key_padding", key_padding),
        ("documents", documents),
    ):
        if given is not None:
            check_tensor(name, given, "", floating=False)
            check_beside(name, given, "query", query)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise ValueError(
                f"attn_mask is {attn_mask.dtype}; give bools, True = attend, or floats to add"
            )
        sizes = zip(reversed(attn_mask.shape), reversed(shape))
        if attn_mask.ndim > len(shape) or any(m not in (1, s) for m, s in sizes):
            raise ValueError(f"attn_mask {list(attn_mask.shape)} does not broadcast to {list(shape)}")
    for name, given in (("key_padding", key_padding), ("documents", documents)):
        if given is None:
            continue
        if query.ndim != 4:
            raise ValueError(
                f"{name} needs a query of [batch, heads, tokens, dim], not {list(query.shape)}; "
                "use unsqueeze for the dimensions that are missing"
            )
        texts, keys = query.shape[0], key.shape[-2]
        if given.ndim != 2 or given.shape[0] not in (1, texts) or given.shape[1] != keys:
            raise ValueError(
                f"{name} {list(given.shape)} must be {[texts, keys]}, or {[1, keys]} for all texts"
            )
    if key_padding is not None and key_padding.dtype != torch.bool:
        raise ValueError(f"key_padding is {key_padding.dtype}; give bools, True = a real token")
    if documents is not None:
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"documents needs as many queries as keys, not {query.shape[-2]} and {key.shape[-2]}"
            )
        no_ids = documents.is_floating_point() or documents.is_complex()
        if no_ids or documents.dtype == torch.bool:
            raise ValueError(f"documents is {documents.dtype}; give integer ids")
    if window is not None:
        pair = (window, window) if isinstance(window, int) else window
        sides = isinstance(pair, tuple | list) and len(pair) == 2
        if not sides or any(not isinstance(side, int) or side < -1 for side in pair):
            raise ValueError(
                f"window {window!r} must be a number of tokens or (left, right), each at least 0, "
                "or -1 for no limit"
            )


def check_flag(name: str, value: Any) -> None:
    """Raise unless value is True or False; a number is probably an argument in the wrong place."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} = {value!r} must be True or False")


def whole_window(window: Any) -> Any:
    """Return a window with Python integers instead of NumPy's."""
    if isinstance(window, tuple | list):
        return tuple(map(as_int, window))
    return as_int(window)


def check_probability(dropout_p: Any) -> None:
    """Raise unless dropout_p is a number from 0 to 1."""
    if not is_number(dropout_p) or not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p = {dropout_p} is not a probability")


def check_choices(axis: Any, walls: Any, method: Any) -> None:
    """Raise unless each of the three is one of the names that are allowed for it."""
    for name, given, known in (
        ("axis", axis, AXES),
        ("walls", walls, WALLS),
        ("method", method, METHODS),
    ):
        if given not in known:
            raise ValueError(f"{name} {given!r} is not one of {', '.join(known)}")
