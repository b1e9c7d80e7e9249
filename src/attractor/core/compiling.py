"""`torch.compile` for runs of steps: one compiled copy a rate, laid out so that it vectorises."""

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def compiled(run: Callable[..., Any], *fixed: Any) -> Callable[..., Any]:
    """`run`, compiled; the same copy again for the same fixed arguments.

    torch counts recompilations for each code object and gives up after eight. A copy with a code
    object of its own for each rate keeps the ninth rate as fast as the first.
    """
    return _compiled(run, *(x if _hashable(x) else _Identity(x) for x in fixed))


@lru_cache(maxsize=64)
def _compiled(run: Callable[..., Any], *fixed: Any) -> Callable[..., Any]:
    def components_first(*args: Any) -> Any:
        with ComponentsFirst():
            return run(*args)

    code = components_first.__code__.replace()
    copy = FunctionType(code, components_first.__globals__, closure=components_first.__closure__)
    return torch.compile(copy)


class ComponentsFirst(TorchFunctionMode):
    """Lay out the results of ``stack(..., dim=-1)`` and ``cat(..., dim=-1)`` component by component.

    A rate such as ``stack((du_0, du_1), -1)`` would write its components d numbers apart, which
    compiled code cannot vectorise. The values and shapes are the same, only strides differ.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.stack, torch.cat) and len(args) + len(kwargs) == 2 and "out" not in kwargs:
            tensors = args[0] if args else kwargs["tensors"]
            dim = args[1] if len(args) == 2 else kwargs.get("dim")
            if dim == -1 and tensors[0].dim() > (func is torch.cat):
                if func is torch.cat:
                    tensors = [x.movedim(-1, 0) for x in tensors]
                return func(tensors, 0).movedim(0, -1)
        return func(*args, **kwargs)


class _Identity:
    """A dictionary key for things that cannot be one themselves."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def _hashable(thing: Any) -> bool:
    try:
        hash(thing)
    except TypeError:
        return False
    return True
