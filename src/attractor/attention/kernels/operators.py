"""Custom operators that launch kernels, and calls that bypass the operator unless they are traced."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._library.triton import is_wrap_triton_enabled, set_wrap_triton_enabled
from torch.library import custom_op, triton_op
from torch.nn import Parameter

from attractor.attention.kernels import INTERPRETED
from attractor.attention.precision import first_derivatives_only

Function = TypeVar("Function", bound=Callable[..., Any])

# Compilers of older versions of torch assume that kernels write to tensors that they only read.
TRANSPARENT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


def custom_operator(name: str, transparent: bool = TRANSPARENT) -> Callable[..., Any]:
    """Return a decorator that registers an operator ``attractor::name``.

    Args:
        name: Name without the namespace.
        transparent: Whether compilers see the kernels inside; never in the interpreter.
    """
    if transparent and not INTERPRETED:
        return triton_op(f"attractor::{name}", mutates_args=())
    return lambda launch: custom_op(f"attractor::{name}", without_wrapper(launch), mutates_args=())


def is_traced(*inputs: Any) -> bool:
    """Return whether a call must use the operator, because of compilation or tensor subclasses."""
    return torch.compiler.is_compiling() or any(
        isinstance(x, Tensor) and type(x) not in (Tensor, Parameter) for x in inputs
    )


def operator_if_traced(op: Any, launch: Function) -> Function:
    """Return a function that calls the operator if its first argument is traced, otherwise `launch`."""
    direct = without_wrapper(launch)

    @wraps(launch)
    def call(x: Tensor, *rest: Any) -> Any:
        return (op if is_traced(x) else direct)(x, *rest)

    return cast(Function, call)


def differentiable(
    name: str,
    launch: Function,
    fake: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Any],
) -> tuple[Any, Function]:
    """Register an operator that has a gradient.

    Args:
        name: Name of the operator.
        launch: A function that computes the outputs with kernels.
        fake: A function that returns empty tensors with the shapes of the outputs.
        save: A function ``save(ctx, inputs, output)`` that stores tensors for backward.
        backward: A function ``backward(ctx, *grads)`` that returns the gradients of all inputs.

    Returns:
        The operator, and a function that bypasses the operator unless an input is traced.
    """
    op = custom_operator(name)(launch)
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=save)
    direct = without_wrapper(launch)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = direct(*inputs)
        save(ctx, inputs, output)
        return output

    methods = {
        "forward": staticmethod(forward), "backward": staticmethod(first_derivatives_only(backward))
    }  # fmt: skip
    function: Any = type(name, (torch.autograd.Function,), methods)

    @wraps(launch)
    def call(*inputs: Any) -> Any:
        if is_traced(*inputs):
            return op(*inputs)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return function.apply(*inputs)
        return direct(*inputs)

    return op, cast(Function, call)


def without_wrapper(launch: Function) -> Function:
    """Return a function that launches kernels without torch's wrapper, which takes 1 ms per launch."""

    @wraps(launch)
    def call(*args: Any) -> Any:
        with set_wrap_triton_enabled(False):
            return launch(*args)

    return cast(Function, call)


def wrap_triton(kernel: Any) -> Any:
    """Return `torch.library.wrap_triton` of a kernel, or the kernel itself within `without_wrapper`.

    torch searches the source of transparent operators for a function with this name.
    """
    return torch.library.wrap_triton(kernel) if is_wrap_triton_enabled() else kernel
