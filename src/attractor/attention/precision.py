"""The dtypes of computations, and a decorator for functions that have first derivatives only."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which softmax and stencils are computed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def for_scores(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key in the dtype in which their product is computed.

    A GPU sums products of half precision in float32, so they are not converted, which would take longer
    than the product.
    """
    dtype = query.dtype if query.is_cuda else accumulate_dtype(query.dtype)
    return query.to(dtype), key.to(dtype)


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward function that raises if second derivatives are requested."""
    once = once_differentiable(backward)

    @wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            if grads[0] is not None:
                grads[0].stride()  # torch 2.10 needs this tensor realised here; in a loop it fails
        elif torch.is_grad_enabled():
            raise RuntimeError(
                "this engine of pde_attention has no second derivatives, which create_graph=True "
                "requires; use method='dense'"
            )
        return once(ctx, *grads)

    return guarded
