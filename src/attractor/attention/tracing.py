"""Symbolic tracing with torch.fx, where a tensor has neither a shape nor values.

A module that checks shapes, or chooses an engine according to them, becomes one node of the graph: a
call of the module, as torch.fx does for the modules of torch.nn.
"""

from typing import Any

from torch import nn
from torch.fx import Proxy


def is_symbolic(x: Any) -> bool:
    """Return whether x represents a tensor in a symbolic trace."""
    return isinstance(x, Proxy)


def as_node(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return a call of the module as one node of the graph that contains its first argument.

    Raises:
        TypeError: The module is the root of the trace, so the graph would consist of this node alone.
    """
    tracer: Any = args[0].tracer
    path = tracer.path_of_module(module)
    if not path:
        name = type(module).__name__
        raise TypeError(
            f"{name} depends on the shapes of tensors, so torch.fx records it as one node of a graph, "
            "and it cannot be the entire graph; trace a network that contains it"
        )
    return tracer.create_proxy("call_module", path, args, kwargs)
