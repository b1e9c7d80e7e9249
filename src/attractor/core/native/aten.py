"""ATen operators on arrays of scalars: what a traced graph computes, number by number.

An array holds nodes of a `Program` as integers. To add an operator, write it here on such arrays.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from attractor.core.native.scalars import FUNCTIONS, Program

Nodes: TypeAlias = np.ndarray  # of integers

MOST_NODES = 400_000  # of a program, for two trajectories
_IGNORED = ("layout", "device", "pin_memory", "memory_format", "dtype")  # keywords


class UntranslatableError(RuntimeError):
    """A function does more than arithmetic that is known here."""


def interpret(
    module: GraphModule,
    inputs: Sequence[Nodes],
    program: Program,
    dtype: torch.dtype,
    with_casts: bool = False,
) -> Nodes:
    """Call a graph of ATen operators with arrays of nodes, and return its first result.

    What does not depend on the inputs is computed by torch.

    Args:
        dtype: Of the inputs, and of all numbers that depend on them.
        with_casts: Whether numbers may be of float32 as well. They are computed in `dtype`.

    Raises:
        UntranslatableError: The graph has operators that are not known here, or other dtypes.
    """
    operators = _Operators(program)
    dtypes = (dtype, torch.float32) if with_casts else (dtype,)
    values: dict[Node, Any] = {}
    arrays = iter(inputs)
    look_up = lambda argument: map_arg(argument, values.__getitem__)
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                values[node] = next(arrays)
            case "get_attr":
                values[node] = getattr(module, node.target)
            case "call_function":
                values[node] = operators.call(node, look_up(node.args), look_up(node.kwargs), dtypes)
            case "output":
                outputs = look_up(node.args[0])
                result = outputs[0] if isinstance(outputs, list | tuple) else outputs
                return operators.of_tensor(result) if isinstance(result, torch.Tensor) else result
        if len(program) > MOST_NODES:
            raise UntranslatableError(f"more than {MOST_NODES} operations on numbers")
    raise AssertionError("a graph ends with its output")


class _Operators:
    """The operators, with the program to which they add nodes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.table = {**self._arithmetic(), **self._others(), **_SHAPES}

    def call(
        self, node: Node, arguments: Any, keywords: dict[str, Any], dtypes: tuple[torch.dtype, ...]
    ) -> Any:
        """Return the result of an operator of a graph."""
        target: Any = node.target
        if target is operator.getitem:
            return arguments[0][arguments[1]]
        name = str(target).removeprefix("aten.")
        leaves = tree_leaves((arguments, keywords))
        if not any(isinstance(x, np.ndarray) for x in leaves):
            if torch.Tag.nondeterministic_seeded in target.tags:
                raise UntranslatableError(f"{name} draws random numbers")
            return target(*arguments, **keywords)
        if name not in self.table:
            raise UntranslatableError(f"{name} is not known")
        logical = (
            () if name.startswith("add") else (torch.bool,)
        )  # a sum of booleans is a boolean in torch
        for result in tree_leaves(node.meta.get("val")):
            if result.dtype not in (*dtypes, *logical):
                raise UntranslatableError(f"{name} makes numbers of {result.dtype}")
        if name != "index.Tensor":
            arguments = tree_map_only(torch.Tensor, self.of_tensor, arguments)
        keywords = {key: value for key, value in keywords.items() if key not in _IGNORED}
        result = self.table[name](*arguments, **keywords)
        return np.asarray(result) if isinstance(result, np.integer) else result

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
            return self.each(lambda *nodes: self.program.node(name, *nodes), *map(self.array, arguments))

        return call

    def total(self, x: Nodes, dim: Any = None, keepdim: bool = False) -> Nodes:
        """Return sums over dimensions."""
        rows, shape = _rows(x, dim, keepdim)
        sums = [self.program.total(row) for row in rows.tolist()]
        return np.asarray(sums, dtype=np.int64).reshape(shape)

    def reduction(self, name: str) -> Callable[..., Nodes]:
        """Return the function that joins numbers over dimensions by an operation of two."""

        def call(x: Nodes, dim: Any = None, keepdim: bool = False) -> Nodes:
            rows, shape = _rows(x, dim, keepdim)
            join = lambda nodes: reduce(lambda a, b: self.program.node(name, a, b), nodes)
            return np.asarray([join(row) for row in rows.tolist()], dtype=np.int64).reshape(shape)

        return call

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

    def full(self, shape: Sequence[int], value: float) -> Nodes:
        return np.full(shape, self.program.constant(float(value)), dtype=np.int64)

    def _arithmetic(self) -> dict[str, Callable[..., Any]]:
        of = self.elementwise
        reciprocal = lambda x: of("div")(1.0, x)
        scaled = lambda y, alpha: y if alpha == 1 else of("mul")(y, alpha)
        add = lambda x, y, alpha=1: of("add")(x, scaled(y, alpha))
        subtract = lambda x, y, alpha=1: of("sub")(x, scaled(y, alpha))
        sigmoid = lambda x: reciprocal(of("add")(of("exp")(of("neg")(x)), 1.0))
        table: dict[str, Callable[..., Any]] = {
            "add.Tensor": add, "add.Scalar": add, "sub.Tensor": subtract, "sub.Scalar": subtract,
            "rsub.Scalar": lambda x, y, alpha=1: subtract(y, x, alpha),
            "rsub.Tensor": lambda x, y, alpha=1: subtract(y, x, alpha),
            "mul.Tensor": of("mul"), "mul.Scalar": of("mul"),
            "div.Tensor": of("div"), "div.Scalar": of("div"),
            "pow.Tensor_Scalar": of("pow"), "pow.Tensor_Tensor": of("pow"), "pow.Scalar": of("pow"),
            "square.default": lambda x: of("mul")(x, x),
            "reciprocal.default": reciprocal,
            "rsqrt.default": lambda x: reciprocal(of("sqrt")(x)),
            "atan2.default": of("atan2"),
            "maximum.default": of("max"), "minimum.default": of("min"),
            "clamp.default": self.clamp, "clamp_min.default": of("max"), "clamp_max.default": of("min"),
            "relu.default": lambda x: of("max")(x, 0.0),
            "sigmoid.default": sigmoid, "silu.default": lambda x: of("mul")(x, sigmoid(x)),
            "where.self": of("where"),
            "addcmul.default": lambda x, y, z, value=1: add(x, of("mul")(y, z), value),
            "lerp.Scalar": lambda x, y, weight: add(x, subtract(y, x), weight),
            "addmm.default": lambda x, y, z: add(x, self.product(y, z)),
            "linalg_cross.default": self.cross,
        }  # fmt: skip
        unary = [name for name in FUNCTIONS if name not in ("pow", "atan2")]
        for name in ("neg", "abs", "sqrt", "sign", *unary):
            table[f"{name}.default"] = of(name)
        for name in ("lt", "le", "gt", "ge", "eq", "ne"):
            table[f"{name}.Tensor"] = table[f"{name}.Scalar"] = of(name)
        for name in ("and", "or", "not"):
            for key in (f"logical_{name}.default", f"bitwise_{name}.default", f"bitwise_{name}.Tensor"):
                table[key] = of(name)
        return table

    def _others(self) -> dict[str, Callable[..., Any]]:
        return {
            "sum.dim_IntList": self.total, "sum.default": self.total,
            "all.dim": self.reduction("and"), "all.dims": self.reduction("and"),
            "all.default": self.reduction("and"),
            "any.dim": self.reduction("or"), "any.dims": self.reduction("or"),
            "any.default": self.reduction("or"),
            "amax.default": self.reduction("max"), "amin.default": self.reduction("min"),
            "mean.dim": self.mean, "mean.default": self.mean,
            "linalg_vector_norm.default": self.norm,
            "cumsum.default": self.cumulative_sum,
            "mm.default": self.product, "bmm.default": self.product, "mv.default": self.product,
            "dot.default": self.product,
            "constant_pad_nd.default": self.pad,
            "new_zeros.default": lambda x, shape: self.full(shape, 0.0),
            "new_ones.default": lambda x, shape: self.full(shape, 1.0),
            "new_empty.default": lambda x, shape: self.full(shape, 0.0),
            "full_like.default": lambda x, value: self.full(x.shape, value),
            "zeros_like.default": lambda x: self.full(x.shape, 0.0),
            "ones_like.default": lambda x: self.full(x.shape, 1.0),
            "empty_like.default": lambda x: self.full(x.shape, 0.0),
        }  # fmt: skip

    def norm(self, x: Nodes, order: float = 2, dim: Any = None, keepdim: bool = False) -> Nodes:
        if order != 2:
            raise UntranslatableError(f"a norm of order {order}")
        return self.elementwise("sqrt")(self.total(self.elementwise("mul")(x, x), dim, keepdim))

    def cumulative_sum(self, x: Nodes, dim: int) -> Nodes:
        sums = [self.total(x.take(range(i + 1), dim), dim) for i in range(x.shape[dim])]
        return np.stack(sums, dim)

    def pad(self, x: Nodes, widths: Sequence[int], value: float = 0.0) -> Nodes:
        pairs = [(0, 0)] * (x.ndim - len(widths) // 2)
        pairs += [(widths[i], widths[i + 1]) for i in range(len(widths) - 2, -1, -2)]
        if min(widths) < 0:
            raise UntranslatableError("negative padding")
        return np.pad(x, pairs, constant_values=self.program.constant(value))


def _rows(x: Nodes, dim: Any, keepdim: bool) -> tuple[Nodes, list[int]]:
    """Return the rows of numbers that a reduction joins, and the shape of its result."""
    dims = range(x.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    dims = tuple(d % x.ndim for d in dims) if x.ndim else ()
    rest = [d for d in range(x.ndim) if d not in dims]
    count = math.prod(x.shape[d] for d in rest)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    return x.transpose(*rest, *dims).reshape(count, x.size // max(1, count)), shape


def _expand(x: Nodes, shape: Sequence[int], implicit: bool = False) -> Nodes:
    first = len(shape) - x.ndim
    return np.broadcast_to(x, [x.shape[i - first] if n == -1 else n for i, n in enumerate(shape)])


def _part(
    x: Nodes, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[Any, ...]:
    place: list[Any] = [slice(None)] * x.ndim
    place[dim] = slice(start, end, step)
    return tuple(place)


def _slice(x: Nodes, *part: Any) -> Nodes:
    return x[_part(x, *part)]


def _slice_scatter(x: Nodes, values: Nodes, *part: Any) -> Nodes:
    result = x.copy()
    result[_part(x, *part)] = values
    return result


def _select_scatter(x: Nodes, values: Nodes, dim: int, index: int) -> Nodes:
    result = x.copy()
    np.moveaxis(result, dim, 0)[index] = values
    return result


def _index(x: Nodes, indices: Sequence[Any]) -> Nodes:
    if any(isinstance(index, np.ndarray) for index in indices):
        raise UntranslatableError("an index that depends on the state")
    return x[tuple(slice(None) if index is None else index.cpu().numpy() for index in indices)]


def _split(x: Nodes, size: int, dim: int = 0) -> list[Nodes]:
    return np.split(x, range(size, x.shape[dim], size), dim)


def _split_sizes(x: Nodes, sizes: Sequence[int], dim: int = 0) -> list[Nodes]:
    return np.split(x, np.cumsum(sizes)[:-1], dim)


def _unsqueeze(x: Nodes, dim: int) -> Nodes:
    return np.expand_dims(x, dim if dim >= 0 else dim + x.ndim + 1)


def _roll(x: Nodes, shifts: Any, dims: Any = ()) -> Nodes:
    return np.roll(x, tuple(shifts), tuple(dims)) if dims else np.roll(x, shifts[0])


def _same(x: Nodes, *_: Any) -> Nodes:
    return x


_SHAPES: dict[str, Callable[..., Any]] = {
    "_to_copy.default": _same, "alias.default": _same, "clone.default": _same, "detach.default": _same,
    "lift_fresh_copy.default": _same, "contiguous.default": _same,
    "view.default": np.reshape, "reshape.default": np.reshape, "_unsafe_view.default": np.reshape,
    "permute.default": np.transpose, "t.default": np.transpose, "transpose.int": np.swapaxes,
    "expand.default": _expand, "unsqueeze.default": _unsqueeze,
    "squeeze.dim": lambda x, dim: x.squeeze(dim) if x.ndim and x.shape[dim] == 1 else x,
    "squeeze.default": np.squeeze,
    "select.int": lambda x, dim, index: x.take(index, axis=dim),
    "index.Tensor": _index,
    "copy.default": lambda x, y: np.broadcast_to(y, x.shape),
    "select_scatter.default": _select_scatter, "slice_scatter.default": _slice_scatter,
    "slice.Tensor": _slice, "split.Tensor": _split, "split_with_sizes.default": _split_sizes,
    "unbind.int": lambda x, dim=0: [np.asarray(part) for part in np.moveaxis(x, dim, 0)],
    "cat.default": lambda arrays, dim=0: np.concatenate([a for a in arrays if a.size], dim),
    "stack.default": lambda arrays, dim=0: np.stack(arrays, dim),
    "roll.default": _roll, "flip.default": np.flip, "repeat.default": np.tile,
}  # fmt: skip
