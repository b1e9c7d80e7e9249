"""A function of small tensors as a formula: data that a kernel goes through, number by number.

>>> import torch
>>> spring = lambda t, u: torch.stack((u[1], -4.0 * u[0] + t))
>>> formula = written(spring, [(), (2,)])
>>> formula.lines
(('scale', 1, 1, -4.0), ('add', 3, 0, 0.0))
>>> formula.results
(2, 4)
>>> formula(torch.tensor(0.5), torch.tensor([1.0, 2.0]))
tensor([ 2.0000, -3.5000])
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
LONGEST = 3_000  # lines that compilers still take in their stride

OPERATIONS: dict[str, Callable[[Any, Any, float], Any]] = {  # of variables a and b and a number c
    "add": lambda a, b, c: a + b, "subtract": lambda a, b, c: a - b, "multiply": lambda a, b, c: a * b,
    "divide": lambda a, b, c: a / b, "shift": lambda a, b, c: a + c, "scale": lambda a, b, c: a * c,
    "over": lambda a, b, c: a / c, "from": lambda a, b, c: c - a, "under": lambda a, b, c: c / a,
    "fill": lambda a, b, c: torch.full_like(a, c), "sine": lambda a, b, c: a.sin(),
    "cosine": lambda a, b, c: a.cos(), "exponential": lambda a, b, c: a.exp(),
    "logarithm": lambda a, b, c: a.log(), "root": lambda a, b, c: a.sqrt(),
    "absolute": lambda a, b, c: a.abs(),
}  # fmt: skip
Line = tuple[str, int, int, float]  # an operation, the numbers of a and b (of a twice if alone), and c


class CannotWriteError(Exception):
    """A function that is more than a formula for each number."""


class Formula(NamedTuple):
    """Variables are numbered: arguments first, then the result of each line.

    Attributes:
        lines: see `OPERATIONS`.
        results: numbers of the variables that come out.
    """

    lines: tuple[Line, ...]
    results: tuple[int, ...]

    def __call__(self, *arguments: Tensor) -> Tensor:
        """What a kernel does, in torch; numbers are in the last dimension of arguments and result."""
        v = [x for a in arguments for x in (a.unbind(-1) if a.dim() else [a])]
        for operation, a, b, c in self.lines:
            v.append(OPERATIONS[operation](v[a], v[b], c))
        return torch.stack(torch.broadcast_tensors(*(v[i] for i in self.results)), -1)

    def uses(self, variable: int) -> bool:
        """Whether anything depends on a variable."""
        return variable in self.results or any(variable in line[1:3] for line in self.lines)


def written(
    call: Callable[..., Tensor], sizes: Sequence[tuple[int, ...]], like: Tensor | None = None
) -> Formula:
    """The formula of a function of tensors of these sizes, ``()`` or ``(d,)``.

    Args:
        like: dtype and device of what it is tried with.

    Raises:
        CannotWriteError: something else than arithmetic and the moving of numbers happens in it, or it
            depends on tensors that are not arguments.
    """
    like = torch.zeros(()) if like is None else like
    examples = [torch.rand(size).to(like) + 1.0 for size in sizes]
    try:
        with torch.enable_grad():  # without, sums are written into what has been computed
            traced = make_fx(call)(*examples)
    except Exception as error:  # whatever a rate may do that a trace cannot follow
        raise CannotWriteError(f"it cannot be traced: {error}") from error
    traced.graph.eliminate_dead_code()
    writer = _Writer(traced, sizes, like.dtype)
    result = writer.run(*writer.arguments)
    if not isinstance(result, Tensor):
        raise CannotWriteError("it returns more than a tensor")
    if len(writer.lines) > LONGEST:
        raise CannotWriteError(f"it has {len(writer.lines)} lines; {LONGEST} are allowed")
    return Formula(tuple(writer.lines), tuple(result.flatten().tolist()))


MOVES = (
    aten.select.int, aten.slice.Tensor, aten.unbind.int, aten.stack.default, aten.cat.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.view.default, aten._unsafe_view.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.clone.default,
    aten.alias.default, aten.detach.default, aten.flip.default, aten.roll.default, operator.getitem,
)  # fmt: skip
UNARY = {
    aten.sin.default: "sine", aten.cos.default: "cosine", aten.exp.default: "exponential",
    aten.log.default: "logarithm", aten.sqrt.default: "root", aten.abs.default: "absolute",
}  # fmt: skip
BINARY = {  # of two variables, of a variable and a number, of a number and a variable
    aten.add: ("add", "shift", "shift"),
    aten.sub: ("subtract", "shift", "from"),
    aten.mul: ("multiply", "scale", "scale"),
    aten.div: ("divide", "over", "under"),
}


class _Writer(fx.Interpreter):
    """Runs a graph with numbers of variables in place of values: moving them is done by torch itself."""

    def __init__(self, module: Any, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.dtype = dtype
        self.lines: list[Line] = []
        self._known: dict[Line, int] = {}
        self.arguments, self._count = [], 0
        for size in sizes:
            many = math.prod(size)
            self.arguments.append(torch.arange(self._count, self._count + many).view(size))
            self._count += many

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in MOVES:
            return target(*args, **{k: v for k, v in kwargs.items() if k != "memory_format"})
        if target in UNARY:
            return self._each(UNARY[target], args[0])
        packet = getattr(target, "overloadpacket", None)
        if packet in BINARY:
            return self._binary(packet, *args, **kwargs)
        if packet is aten.rsub:
            return self._binary(aten.sub, args[1], args[0], **kwargs)
        if target is aten.pow.Tensor_Scalar:
            return self._power(*args)
        if target is aten.neg.default:
            return self._each("scale", args[0], c=-1.0)
        if target is aten.reciprocal.default:
            return self._each("under", args[0], c=1.0)
        if target in (aten.zeros_like.default, aten.ones_like.default):
            return self._each("fill", args[0], c=float(target is aten.ones_like.default))
        if target is aten._to_copy.default and kwargs.get("dtype", self.dtype) == self.dtype:
            return args[0]
        raise CannotWriteError(f"{target} is more than a formula for each number")

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        raise CannotWriteError("it holds a tensor that is not an argument; use numbers")

    def _binary(self, packet: Any, a: Any, b: Any, alpha: float = 1, **others: Any) -> Tensor:
        if others:
            raise CannotWriteError(f"{packet} with {', '.join(others)} is not written")
        if alpha != 1:
            b = self._each("scale", b, c=alpha) if isinstance(b, Tensor) else b * alpha
        both, second, first = BINARY[packet]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return self._each(both, a, b)
        if isinstance(a, Tensor):
            return self._each(second, a, c=-b if packet is aten.sub else b)
        return self._each(first, b, c=a)

    def _power(self, base: Any, exponent: float) -> Tensor:
        if exponent in (0.5, -0.5):
            found = self._each("root", base)
        elif exponent == int(exponent) and 0 < abs(exponent) <= 8:
            found = base
            for _ in range(int(abs(exponent)) - 1):
                found = self._each("multiply", found, base)
        else:
            raise CannotWriteError(f"the power {exponent} is not a small whole number")
        return found if exponent > 0 else self._each("under", found, c=1.0)

    def _each(self, operation: str, a: Tensor, b: Tensor | None = None, c: float = 0.0) -> Tensor:
        """A line for each element."""
        if not math.isfinite(c):
            raise CannotWriteError(f"{c} is not a finite number")
        first, second = torch.broadcast_tensors(a, a if b is None else b)
        pairs = zip(first.flatten().tolist(), second.flatten().tolist())
        found = [self._line((operation, i, j, float(c))) for i, j in pairs]
        return torch.tensor(found).view(first.shape)

    def _line(self, line: Line) -> int:
        if line not in self._known:
            self._known[line] = self._count
            self._count += 1
            self.lines.append(line)
        return self._known[line]
