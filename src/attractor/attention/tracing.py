"""Symbolic traces of torch.fx, in which a tensor has neither a shape nor values to look at.

What checks shapes, or chooses an engine by them, becomes one node of such a graph: a call of the module,
as torch.fx does with the modules of torch.nn.
"""

from typing import Any

from torch import nn
from torch.fx import Proxy


def is_symbolic(x: Any) -> bool:
    """Whether x stands for a tensor in a symbolic trace."""
    return isinstance(x, Proxy)


def as_node(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call of the module as one node of the graph that its first argument belongs to.

    Raises:
        TypeError: the module is traced by itself, so that there would be nothing else in the graph.
    """
    tracer: Any = args[0].tracer
    path = tracer.path_of_module(module)
    if not path:
        name = type(module).__name__
        raise TypeError(
            f"{name} depends on the shapes of tensors, so torch.fx takes it as one node of a graph, and "
            "it cannot be the whole graph; trace a network that contains it"
        )
    return tracer.create_proxy("call_module", path, args, kwargs)
