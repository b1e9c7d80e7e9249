"""In which dtype things are computed (half precision outside, float32 inside), and first derivatives."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
