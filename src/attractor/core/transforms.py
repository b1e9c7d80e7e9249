"""What solvers have to know about the transforms of torch.func, and about forward mode."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad


def is_transformed(x: Tensor) -> bool:
    """Return whether a transform of torch.func, such as vmap or grad, wraps x."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_vmapped(x: Tensor) -> bool:
    """Return whether x has a dimension that torch.func.vmap hides, also under other transforms."""
    while is_transformed(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def has_tangent(x: Tensor) -> bool:
    """Return whether x carries a derivative in forward mode."""
    # Outside of all dual levels, which is the rule, the lookup would cost as much as an operation.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def is_differentiated(x: Tensor) -> bool:
    """Return whether derivatives with respect to x may be asked for, in reverse or in forward mode."""
    return x.requires_grad or has_tangent(x)


def under_vmap() -> bool:
    """Return whether torch.func.vmap is active, so that any function may return a vmapped tensor."""
    return _is_active(TransformType.Vmap)


def under_grad() -> bool:
    """Return whether torch.func.grad, vjp or jacrev is active."""
    return _is_active(TransformType.Grad)


def _is_active(kind: TransformType) -> bool:
    if torch.compiler.is_compiling():
        return False
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() == kind for level in stack)


def check_checkpoint(checkpoint: object) -> None:
    """Raise if gradients are to be recomputed under a transform that does not allow it."""
    if checkpoint and torch.is_grad_enabled() and under_grad():
        raise ValueError(
            f"checkpoint = {checkpoint!r} does not work under torch.func.grad, vjp, jacrev or hessian, "
            "which do not recompute; leave checkpoint out (and use odeint in place of odeint_adjoint), "
            "or use torch.autograd.grad"
        )


@contextmanager
def without_vmap(what: str) -> Iterator[None]:
    """Raise an error that says what to do where a solver looks at values that vmap hides.

    An error in the user's own rate stays as it is.

    Args:
        what: Subject of the message, in the singular.

    Raises:
        ValueError: torch.func.vmap has refused a decision of the solver.
    """
    try:
        yield
    except RuntimeError as error:
        refused = str(error).startswith(("vmap:", "Cannot access data pointer")) and under_vmap()
        if not refused or not _is_own(error):
            raise
        raise ValueError(
            f"{what} takes decisions that depend on the values of states or times, so it does not run "
            "under torch.func.vmap. States have batch dimensions already: pass all states [batch, d] in "
            "one call of `evolve`, with parameters [batch, k] and, with rtol, times [n+1, batch]; or "
            "use a method with fixed steps under vmap"
        ) from error


def _is_own(error: BaseException) -> bool:
    """Return whether the innermost Python code that raised an error is this library's."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    return str(name).startswith("attractor.")
