"""Checks of the tokens that are appended to a cache."""

import torch
from torch import Tensor

from attractor.core.checks import check_beside, check_tensor


def check_new_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding: Tensor | None,
    cached_key: Tensor | None,
    cached_value: Tensor | None,
    length: int,
) -> None:
    """Raise unless new tokens match each other and those in the cache.

    Args:
        query: ``[batch, heads, new, dim]``.
        key: ``[batch, key heads, new, dim]``.
        value: ``[batch, key heads, new, value dim]``.
        key_padding: Bool ``[batch, new]``, or None.
        cached_key: The buffer ``[batch, key heads, capacity, dim]``, or None if the cache is empty.
        cached_value: The buffer ``[batch, key heads, capacity, value dim]``, or None.
        length: Number of tokens in the cache.

    Raises:
        TypeError: An argument is not a tensor of the required kind.
        ValueError: A shape, a dtype or a device does not match.
    """
    for name, x in (("query", query), ("key", key), ("value", value), ("key_padding", key_padding)):
        if x is not None or name != "key_padding":
            check_tensor(name, x, "[batch, heads, new tokens, dim]", floating=name != "key_padding")
            check_beside(name, x, "query", query)
    previous = query if cached_key is None else cached_key
    check_beside("query", query, "the cache", previous)
    if not query.dtype == key.dtype == value.dtype == previous.dtype:
        raise ValueError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; all must have the "
            f"dtype of the previous tokens, {previous.dtype}"
        )
    _check_shapes(query, key, value)
    for name, x, buffer in (("key", key, cached_key), ("value", value, cached_value)):
        if buffer is not None and (x.shape[:2], x.shape[3]) != (buffer.shape[:2], buffer.shape[3]):
            raise ValueError(
                f"{name} {list(x.shape)} does not match the cache's "
                f"{[*buffer.shape[:2], length, buffer.shape[3]]}; use one cache per layer"
            )
    if key_padding is not None and (
        key_padding.dtype != torch.bool or tuple(key_padding.shape) != (key.shape[0], key.shape[2])
    ):
        raise ValueError(
            f"key_padding {list(key_padding.shape)} of {key_padding.dtype} must be bool "
            f"{[key.shape[0], key.shape[2]]}, True for valid tokens"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"{shapes}: all three must be [batch, heads, new tokens, dim]")
    if not query.shape[2] == key.shape[2] == value.shape[2] >= 1:
        raise ValueError(f"{shapes}: every new token needs a query, a key and a value")
    if not query.shape[0] == key.shape[0] == value.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"{shapes}: the batch sizes must be equal, and the last dimensions of query and key"
        )
    if key.shape[1] != value.shape[1] or query.shape[1] % max(key.shape[1], 1):
        raise ValueError(
            f"{shapes}: key and value must have the same number of heads, a divisor of query's"
        )
