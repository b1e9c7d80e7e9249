"""ATen operators on arrays of scalars: what a traced graph computes, number by number.

An array holds nodes of a `Program` as integers. To add an operator, write it here on such arrays.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from attractor.core.native.scalars import FUNCTIONS, Program

Nodes: TypeAlias = np.ndarray  # of integers

MOST_NODES = 60_000  # of a program, for two trajectories
_IGNORED = ("layout", "device", "pin_memory", "memory_format", "dtype")  # keywords


class UntranslatableError(RuntimeError):
    """A function does more than arithmetic that is known here."""


def interpret(module: GraphModule, inputs: Sequence[Nodes], program: Program) -> Any:
    """Call a graph of ATen operators with arrays of nodes."""
    operators = _Operators(program)
    values: dict[Node, Any] = {}
    arrays = iter(inputs)
    look_up = lambda argument: map_arg(argument, values.__getitem__)
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                values[node] = next(arrays)
            case "get_attr":
                values[node] = operators.of_tensor(getattr(module, node.target))
            case "call_function":
                result = operators.call(node, look_up(node.args), look_up(node.kwargs))
                values[node] = np.asarray(result) if isinstance(result, np.integer) else result
            case "output":
                return look_up(node.args[0])
        if len(program) > MOST_NODES:
            raise UntranslatableError(f"more than {MOST_NODES} operations on numbers")
    raise AssertionError("a graph ends with its output")


class _Operators:
    """The operators, with the program to which they add nodes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.table = self._table()

    def call(self, node: Node, arguments: Any, keywords: dict[str, Any]) -> Any:
        if node.target is operator.getitem:
            return arguments[0][arguments[1]]
        name = str(node.target).removeprefix("aten.")
        if name not in self.table:
            raise UntranslatableError(f"{name} is not known")
        dtype = keywords.get("dtype")
        if dtype is not None and not dtype.is_floating_point:
            raise UntranslatableError(f"{name} makes numbers of {dtype}")
        keywords = {key: value for key, value in keywords.items() if key not in _IGNORED}
        return self.table[name](*arguments, **keywords)

    def of_tensor(self, tensor: torch.Tensor) -> Nodes:
        """Return the constants in a tensor."""
        if tensor.is_complex():
            raise UntranslatableError("complex numbers")
        values = tensor.detach().cpu().double().numpy()
        return self.each(self.program.constant, values)

    def each(self, function: Callable[..., int], *arrays: Any) -> Nodes:
        """Call a function of nodes for all numbers of arrays, which are broadcast."""
        result = np.frompyfunc(function, len(arrays), 1)(*arrays)
        return np.asarray(result, dtype=np.int64)

    def array(self, x: Any) -> Nodes:
        """Return an array of nodes for an argument, which may be a number."""
        if isinstance(x, np.ndarray | np.integer):  # the second is a node that was taken from an array
            return np.asarray(x)
        return np.asarray(self.program.constant(float(x)))

    def elementwise(self, name: str) -> Callable[..., Nodes]:
        def call(*arguments: Any) -> Nodes:
            return self.each(
                lambda *nodes: self.program.node(name, *nodes), *map(self.array, arguments)
            )

        return call

    def total(self, x: Nodes, dim: Any = None, keepdim: bool = False) -> Nodes:
        """Return sums over dimensions."""
        dims = range(x.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
        dims = tuple(d % x.ndim for d in dims) if x.ndim else ()
        rest = tuple(d for d in range(x.ndim) if d not in dims)
        rows = x.transpose(*rest, *dims).reshape([x.shape[d] for d in rest] + [-1])
        sums = np.empty(rows.shape[:-1], dtype=np.int64)
        for place in np.ndindex(*sums.shape):
            sums[place] = self.program.without_zeros(rows[place].tolist())
        return sums.reshape([1 if d in dims else n for d, n in enumerate(x.shape)]) if keepdim else sums

    def mean(self, x: Nodes, dim: Any = None, keepdim: bool = False) -> Nodes:
        sums = self.total(x, dim, keepdim)
        return self.elementwise("div")(sums, x.size / max(1, sums.size))

    def product(self, x: Nodes, y: Nodes) -> Nodes:
        """Return matrix products."""
        multiply = self.elementwise("mul")
        if y.ndim == 1:
            return self.total(multiply(x, y), -1)
        return self.total(multiply(x[..., :, None, :], y.swapaxes(-1, -2)[..., None, :, :]), -1)

    def cross(self, x: Nodes, y: Nodes, dim: int = -1) -> Nodes:
        x, y = (np.moveaxis(a, dim, -1) for a in np.broadcast_arrays(x, y))
        multiply, subtract = self.elementwise("mul"), self.elementwise("sub")
        rows = [
            subtract(multiply(x[..., i], y[..., j]), multiply(x[..., j], y[..., i]))
            for i, j in ((1, 2), (2, 0), (0, 1))
        ]
        return np.moveaxis(np.stack(rows, -1), -1, dim)

    def clamp(self, x: Nodes, low: Any = None, high: Any = None) -> Nodes:
        x = x if low is None else self.elementwise("max")(x, low)
        return x if high is None else self.elementwise("min")(x, high)

    def linear_space(self, start: float, end: float, steps: int) -> Nodes:
        return self.of_tensor(torch.linspace(start, end, steps))

    def full(self, shape: Sequence[int], value: float) -> Nodes:
        return np.full(shape, self.program.constant(float(value)), dtype=np.int64)

    def _table(self) -> dict[str, Callable[..., Any]]:
        of = self.elementwise
        reciprocal = lambda x: of("div")(1.0, x)
        scaled = lambda y, alpha: y if alpha == 1 else of("mul")(y, alpha)
        add = lambda x, y, alpha=1: of("add")(x, scaled(y, alpha))
        subtract = lambda x, y, alpha=1: of("sub")(x, scaled(y, alpha))
        sigmoid = lambda x: reciprocal(of("add")(of("exp")(of("neg")(x)), 1.0))
        unary = ("neg", "abs", "sqrt", "sign", *(name for name in FUNCTIONS if name not in ("pow", "atan2")))
        comparisons = {f"{name}.{kind}": of(name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
                       for kind in ("Tensor", "Scalar")}  # fmt: skip
        logic = {
            f"{prefix}_{name}.{kind}": of(name)
            for name in ("and", "or", "not")
            for prefix, kind in (("logical", "default"), ("bitwise", "default"), ("bitwise", "Tensor"))
        }
        same = lambda x, *_, **__: x
        views = {
            name: same
            for name in ("_to_copy.default", "alias.default", "clone.default", "detach.default",
                         "lift_fresh_copy.default", "contiguous.default")
        }  # fmt: skip
        return {
            **{f"{name}.default": of(name) for name in unary}, **comparisons, **logic, **views,
            "add.Tensor": add, "add.Scalar": add, "sub.Tensor": subtract, "sub.Scalar": subtract,
            "rsub.Scalar": lambda x, y, alpha=1: subtract(y, x, alpha),
            "rsub.Tensor": lambda x, y, alpha=1: subtract(y, x, alpha),
            "mul.Tensor": of("mul"), "mul.Scalar": of("mul"),
            "div.Tensor": of("div"), "div.Scalar": of("div"),
            "pow.Tensor_Scalar": of("pow"), "pow.Tensor_Tensor": of("pow"), "pow.Scalar": of("pow"),
            "square.default": lambda x: of("mul")(x, x),
            "reciprocal.default": reciprocal, "rsqrt.default": lambda x: reciprocal(of("sqrt")(x)),
            "atan2.default": of("atan2"),
            "maximum.default": of("max"), "minimum.default": of("min"),
            "clamp.default": self.clamp, "clamp_min.default": of("max"), "clamp_max.default": of("min"),
            "relu.default": lambda x: of("max")(x, 0.0), "sigmoid.default": sigmoid,
            "silu.default": lambda x: of("mul")(x, sigmoid(x)),
            "where.self": of("where"),
            "addcmul.default": lambda x, y, z, value=1: add(x, of("mul")(y, z), value),
            "lerp.Scalar": lambda x, y, weight: add(x, subtract(y, x), weight),
            "sum.dim_IntList": self.total, "sum.default": self.total,
            "mean.dim": self.mean, "mean.default": self.mean,
            "cumsum.default": lambda x, dim: np.stack(
                [self.total(x.take(range(i + 1), dim), dim) for i in range(x.shape[dim])], dim),
            "mm.default": self.product, "bmm.default": self.product, "mv.default": self.product,
            "dot.default": self.product,
            "addmm.default": lambda x, y, z: add(x, self.product(y, z)),
            "linalg_cross.default": self.cross,
            "linalg_vector_norm.default": lambda x, ord=2, dim=None, keepdim=False: of("sqrt")(
                self.total(of("mul")(x, x), dim, keepdim)) if ord == 2 else _unknown_norm(ord),
            "linspace.default": self.linear_space,
            "arange.default": lambda end: self.of_tensor(torch.arange(end)),
            "arange.start": lambda start, end: self.of_tensor(torch.arange(start, end)),
            "full.default": self.full, "full_like.default": lambda x, value: self.full(x.shape, value),
            "zeros.default": lambda shape: self.full(shape, 0.0),
            "ones.default": lambda shape: self.full(shape, 1.0),
            "zeros_like.default": lambda x: self.full(x.shape, 0.0),
            "ones_like.default": lambda x: self.full(x.shape, 1.0),
            "scalar_tensor.default": lambda value: self.array(value),
            "view.default": np.reshape, "reshape.default": np.reshape, "_unsafe_view.default": np.reshape,
            "permute.default": np.transpose, "t.default": np.transpose, "transpose.int": np.swapaxes,
            "expand.default": _expand, "unsqueeze.default": lambda x, dim: np.expand_dims(
                x, dim if dim >= 0 else dim + x.ndim + 1),
            "squeeze.dim": lambda x, dim: x.squeeze(dim) if x.shape[dim] == 1 else x,
            "squeeze.default": np.squeeze,
            "select.int": lambda x, dim, index: x.take(index, axis=dim),
            "slice.Tensor": _slice, "split.Tensor": _split, "split_with_sizes.default": _split_sizes,
            "unbind.int": lambda x, dim=0: [np.asarray(part) for part in np.moveaxis(x, dim, 0)],
            "cat.default": lambda arrays, dim=0: np.concatenate([a for a in arrays if a.size], dim),
            "stack.default": lambda arrays, dim=0: np.stack(arrays, dim),
            "roll.default": lambda x, shifts, dims=(): np.roll(x, shifts, tuple(dims) or None)
            if dims else np.roll(x, shifts[0]),
            "flip.default": np.flip,
            "repeat.default": np.tile,
            "constant_pad_nd.default": self._pad,
        }  # fmt: skip

    def _pad(self, x: Nodes, widths: Sequence[int], value: float = 0.0) -> Nodes:
        pairs = [(0, 0)] * (x.ndim - len(widths) // 2)
        pairs += [(widths[i], widths[i + 1]) for i in range(len(widths) - 2, -1, -2)]
        if min(widths) < 0:
            raise UntranslatableError("negative padding")
        return np.pad(x, pairs, constant_values=self.program.constant(value))


def _unknown_norm(order: Any) -> Nodes:
    raise UntranslatableError(f"a norm of order {order}")


def _expand(x: Nodes, shape: Sequence[int], implicit: bool = False) -> Nodes:
    first = len(shape) - x.ndim
    return np.broadcast_to(x, [x.shape[i - first] if n == -1 else n for i, n in enumerate(shape)])


def _slice(
    x: Nodes, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Nodes:
    place: list[Any] = [slice(None)] * x.ndim
    place[dim] = slice(start, end, step)
    return x[tuple(place)]


def _split(x: Nodes, size: int, dim: int = 0) -> list[Nodes]:
    return np.split(x, range(size, x.shape[dim], size), dim)


def _split_sizes(x: Nodes, sizes: Sequence[int], dim: int = 0) -> list[Nodes]:
    return np.split(x, np.cumsum(sizes)[:-1], dim)
