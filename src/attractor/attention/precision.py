"""In which type things are computed (half precision outside, single inside), and how often derived."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from attractor.core.checks import autocast

Attention = TypeVar("Attention", bound=Callable[..., Any])


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which softmax and stencils are computed: float32 for half precisions."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def for_scores(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the type in which their product is to be computed.

    On a GPU half precision stays, whose products are summed in float32: all keys in float32 would take
    longer to write than the product takes.
    """
    dtype = query.dtype if query.is_cuda else wide(query.dtype)
    return query.to(dtype), key.to(dtype)


def autocast_as_sdpa(attention: Attention) -> Attention:
    """Under autocast: query, key and value in its type, as SDPA takes them, and no autocast inside."""

    @wraps(attention)
    def in_one_type(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(query, Tensor) or not autocast(query):
            return attention(query, key, value, *args, **options)
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind)
        if query.dtype != torch.float64:
            query, key, value = (_cast(x, dtype) for x in (query, key, value))
        with torch.autocast(kind, enabled=False):
            return attention(query, key, value, *args, **options)

    return cast(Attention, in_one_type)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Floats in another type; what is none is left to be refused."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def only_plain_torch() -> str:
    """Why nothing but plain operations of torch will do here; empty where anything does.

    Transforms of `torch.func` and derivatives in forward mode see through those alone: the other engines
    have gradients written by hand. `torch.compile` sees through these itself.
    """
    if torch.compiler.is_compiling():
        return ""
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func sees through plain operations only"
    if forward_ad._current_level >= 0:
        return "derivatives in forward mode go through plain operations only"
    return ""


def refuse_transforms(what: str, instead: str) -> None:
    """Raise within a transform of `torch.func`, or where derivatives are taken in forward mode."""
    why = only_plain_torch()
    if why:
        raise ValueError(f"{what} cannot do this: {why}; use {instead}")


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that raises where a graph of it is wanted, instead of leaving out what it gives."""
    once = once_differentiable(backward)

    @wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            if grads[0] is not None:
                grads[0].stride()  # torch 2.10 finds out what it is if asked here; in a loop it gives up
        elif torch.is_grad_enabled():
            raise RuntimeError(
                "this engine of pde_attention has no second derivatives, which create_graph=True asks "
                "for; use method='dense'"
            )
        return once(ctx, *grads)

    return guarded
