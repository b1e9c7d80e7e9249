"""Rates in JAX, made from rates in torch, so that diffrax can solve the equations of users.

A rate is traced to a graph of ATen operators, and each operator is replaced by its counterpart in JAX.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from attractor.core.rates import Rate

_OF_TORCH = (
    "dtype",
    "layout",
    "device",
    "pin_memory",
    "memory_format",
)  # keywords without a meaning in JAX


def jax_rate(rate: Rate, u0: Tensor, parameters: Tensor | None = None) -> Callable[[Any, Any, Any], Any]:
    """Return ``(t, u, args) -> du`` in JAX.

    Args:
        rate: ``(t, u)`` or ``(t, u, p)`` in torch, without branches that depend on values.
        u0: A state, whose shape is that of all states the returned function takes.
        parameters: Parameters of the rate, which the returned function takes as `args`.

    Raises:
        NotImplementedError: The rate cannot be traced, calls an operator without a counterpart here, or
            has other values in JAX.
    """
    inputs = [torch.zeros((), dtype=torch.float64), u0.detach().double().cpu()]
    inputs += [] if parameters is None else [parameters.detach().double().cpu()]
    try:
        with torch.no_grad():
            expected = rate(*inputs)
            module = make_fx(lambda *arguments: rate(*arguments))(*inputs)
    except RuntimeError as error:
        raise NotImplementedError(f"the rate cannot be traced: {error}") from error
    operators = _operators()
    for node in module.graph.nodes:
        if node.op == "call_function" and _name(node) not in operators:
            raise NotImplementedError(f"{_name(node)} has no counterpart in attractor.ode.jax_rates")

    def call(t: Any, u: Any, args: Any = None) -> Any:
        return _interpret(module, (t, u) if parameters is None else (t, u, args), operators)

    value = torch.from_numpy(np.array(call(*(x.numpy() for x in inputs)), dtype=np.float64))
    if not torch.allclose(value, expected, 1e-3, 1e-3 * float(expected.abs().max())):
        raise NotImplementedError("the translated rate has other values than the rate in torch")
    return call


def _name(node: torch.fx.Node) -> str:
    return "getitem" if node.target is operator.getitem else str(node.target)


def _interpret(
    module: torch.fx.GraphModule, inputs: tuple[Any, ...], operators: Mapping[str, Callable[..., Any]]
) -> Any:
    """Call a graph with arrays of JAX."""
    import jax.numpy as jnp

    values: dict[torch.fx.Node, Any] = {}
    arrays = iter(inputs)
    look_up = lambda argument: torch.fx.node.map_arg(argument, values.__getitem__)
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                values[node] = jnp.asarray(next(arrays))
            case "get_attr":
                values[node] = jnp.asarray(getattr(module, node.target).cpu().numpy())
            case "output":
                break
            case _:
                options = {key: value for key, value in node.kwargs.items() if key not in _OF_TORCH}
                values[node] = operators[_name(node)](*look_up(node.args), **look_up(options))
    return look_up(node.args[0])


def _operators() -> dict[str, Callable[..., Any]]:
    import jax
    import jax.numpy as jnp

    def select(x: Any, dim: int, index: int) -> Any:
        return jax.lax.index_in_dim(x, index, dim, keepdims=False)

    def split(x: Any, size: int, dim: int = 0) -> list[Any]:
        return jnp.split(x, list(range(size, x.shape[dim], size)), axis=dim)

    def part(
        x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
    ) -> Any:
        index = [slice(None)] * x.ndim
        index[dim] = slice(start, end, step)
        return x[tuple(index)]

    def pad(x: Any, widths: list[int], value: float = 0.0) -> Any:
        pairs = [(0, 0)] * (x.ndim - len(widths) // 2)
        pairs += [(widths[i], widths[i + 1]) for i in range(len(widths) - 2, -1, -2)]
        return jnp.pad(x, pairs, constant_values=value)

    def expand(x: Any, shape: list[int]) -> Any:
        first = len(shape) - x.ndim
        sizes = [x.shape[i - first] if size == -1 else size for i, size in enumerate(shape)]
        return jnp.broadcast_to(x, sizes)

    elementwise = {
        name: getattr(jnp, name)
        for name in (
            "abs", "acos", "asin", "atan", "cos", "cosh", "exp", "log", "reciprocal", "sign", "sin",
            "sinh", "sqrt", "square", "tan", "tanh",
        )
    }  # fmt: skip
    binary = {
        "div": operator.truediv,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "mul": operator.mul,
    }
    return {
        "getitem": operator.getitem,
        **{f"aten.{name}.default": function for name, function in elementwise.items()},
        **{f"aten.{name}.Tensor": function for name, function in binary.items()},
        **{f"aten.{name}.default": binary[name] for name in ("maximum", "minimum")},
        "aten._to_copy.default": lambda x: x,
        "aten.add.Tensor": lambda x, y, alpha=1: x + alpha * y,
        "aten.bmm.default": jnp.matmul,
        "aten.cat.default": lambda arrays, dim=0: jnp.concatenate(arrays, dim),
        "aten.clone.default": lambda x: x,
        "aten.constant_pad_nd.default": pad,
        "aten.expand.default": expand,
        "aten.linalg_cross.default": lambda x, y, dim=-1: jnp.cross(x, y, axis=dim),
        "aten.linspace.default": lambda *args: jnp.asarray(torch.linspace(*args).numpy()),
        "aten.mean.dim": lambda x, dim, keepdim=False: x.mean(tuple(dim), keepdims=keepdim),
        "aten.mm.default": jnp.matmul,
        "aten.neg.default": operator.neg,
        "aten.ones_like.default": jnp.ones_like,
        "aten.permute.default": jnp.transpose,
        "aten.pow.Scalar": operator.pow,
        "aten.pow.Tensor_Scalar": operator.pow,
        "aten.pow.Tensor_Tensor": operator.pow,
        "aten.roll.default": lambda x, shifts, dims: jnp.roll(x, tuple(shifts), tuple(dims)),
        "aten.rsqrt.default": jax.lax.rsqrt,
        "aten.rsub.Scalar": lambda x, y, alpha=1: y - alpha * x,
        "aten.select.int": select,
        "aten.slice.Tensor": part,
        "aten.split.Tensor": split,
        "aten.squeeze.dim": jnp.squeeze,
        "aten.stack.default": lambda arrays, dim=0: jnp.stack(arrays, dim),
        "aten.sub.Tensor": lambda x, y, alpha=1: x - alpha * y,
        "aten.sum.dim_IntList": lambda x, dim, keepdim=False: x.sum(tuple(dim), keepdims=keepdim),
        "aten.t.default": jnp.transpose,
        "aten.transpose.int": jnp.swapaxes,
        "aten.unbind.int": lambda x, dim=0: [select(x, dim, i) for i in range(x.shape[dim])],
        "aten.unsqueeze.default": jnp.expand_dims,
        "aten.view.default": jnp.reshape,
        "aten.where.self": jnp.where,
        "aten.zeros_like.default": jnp.zeros_like,
    }
