"""In which type things are computed: half precision outside, single inside."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Attention = TypeVar("Attention", bound=Callable[..., Tensor])


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which softmax and stencils are computed: float32 for half precisions."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def autocast_as_sdpa(attention: Attention) -> Attention:
    """Under autocast: query, key and value in its type, as SDPA takes them, and no autocast inside."""

    @wraps(attention)
    def in_one_type(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        kind = query.device.type
        if not torch.is_autocast_enabled(kind):
            return attention(query, key, value, *args, **options)
        dtype = torch.get_autocast_dtype(kind)
        if query.dtype != torch.float64:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        with torch.autocast(kind, enabled=False):
            return attention(query, key, value, *args, **options)

    return cast(Attention, in_one_type)
