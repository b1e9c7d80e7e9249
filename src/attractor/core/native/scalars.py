"""Programs of scalars: what a function of tensors computes for one trajectory, number by number."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

LOGICAL = {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"}
FUNCTIONS = (
    "acos", "asin", "atan", "cbrt", "cos", "cosh", "erf", "exp", "expm1", "log", "log1p", "sin", "sinh",
    "tan", "tanh", "pow", "atan2",
)  # fmt: skip
SHORTEST_DOT = 8  # products in a sum that is one operation
CONSTANT = -1  # stands for the tensor of weights that are constants
MOST_FACTORS = 16  # of a power that is written as a product


class Leaf(NamedTuple):
    """Where a number comes from.

    Attributes:
        source: Name of an input, such as "u"; "memory" for tensors that the function reads.
        place: Its component, or the tensor and the place of the number in it.
        row: The trajectory of the batch for which the function was traced.
    """

    source: str
    place: tuple[int, ...]
    row: tuple[int, ...] = ()


class Program:
    """A graph of operations on numbers, each of which occurs once.

    Nodes are numbers of rows in `operations`: an operation, and its arguments, which are nodes (a float
    for a constant, and a `Leaf` for an input).
    """

    def __init__(self) -> None:
        self.operations: list[tuple[str, tuple[Any, ...]]] = []
        self._known: dict[tuple[str, tuple[Any, ...]], int] = {}

    def __len__(self) -> int:
        return len(self.operations)

    def copy(self) -> "Program":
        """Return a program with the same nodes, to which others can be added."""
        result = Program()
        result.operations, result._known = [*self.operations], {**self._known}
        return result

    def _add(self, operation: str, *arguments: Any) -> int:
        key = operation, arguments
        if key not in self._known:
            self._known[key] = len(self.operations)
            self.operations.append(key)
        return self._known[key]

    def constant(self, value: float) -> int:
        """Return the node of a number."""
        # Equal keys must be equal numbers: 0.0 == -0.0, and NaN != NaN.
        return self._add("constant", float(value), math.copysign(1.0, value))

    def leaf(self, source: str, index: tuple[int, ...], row: tuple[int, ...] = ()) -> int:
        """Return the node of an input."""
        return self._add("leaf", Leaf(source, index, row))

    def value(self, node: int) -> float | None:
        """Return the number of a constant; None for other nodes."""
        operation, arguments = self.operations[node]
        return arguments[0] if operation == "constant" else None

    def node(self, operation: str, *arguments: int) -> int:
        """Return the node of an operation. Operations on constants are constants."""
        values = [self.value(node) for node in arguments]
        if None not in values and operation in _OF_NUMBERS:
            try:
                return self.constant(_OF_NUMBERS[operation](*values))
            except (ArithmeticError, ValueError):
                pass
        match operation, values:
            case "add", [0.0, _]:
                return arguments[1]
            case (("add" | "sub"), [_, 0.0]):
                return arguments[0]
            case "mul", [1.0, _]:
                return arguments[1]
            case (("mul" | "div"), [_, 1.0]):
                return arguments[0]
            case "mul", [-1.0, _]:
                return self.node("neg", arguments[1])
            case "mul", [_, -1.0]:
                return self.node("neg", arguments[0])
            case "pow", [_, float(exponent)]:
                return self._power(arguments[0], exponent)
        return self._add(operation, *arguments)

    def _power(self, base: int, exponent: float) -> int:
        """Return a power as products, where that is as accurate."""
        if exponent < 0:
            return self.node("div", self.constant(1.0), self._power(base, -exponent))
        whole, half = divmod(exponent, 1.0)
        if half not in (0.0, 0.5) or whole > MOST_FACTORS:
            return self._add("pow", base, self.constant(exponent))
        result, factor, n = self.constant(1.0), base, int(whole)
        while n:
            result = self.node("mul", result, factor) if n % 2 else result
            n //= 2
            factor = self.node("mul", factor, factor) if n else factor
        return self.node("mul", result, self.node("sqrt", base)) if half else result

    def total(self, nodes: Sequence[int]) -> int:
        """Return the sum of nodes, without products with a constant zero.

        A long sum of products with weights, which are constants or numbers at equal distances in a
        tensor, is one operation "dot", whose arguments are the numbers and then their weights.
        """
        terms = [node for node in nodes if not self._is_zero(node)]
        factors = [self._weighted(node) for node in terms]
        weights = [weight for _, weight in factors]
        products = sum(x != node for node, (x, _) in zip(terms, factors))
        if products >= SHORTEST_DOT and self._are_row(weights):
            return self._add("dot", *(x for x, _ in factors), *weights)
        result = terms[0] if terms else self.constant(0.0)
        for node in terms[1:]:
            result = self.node("add", result, node)
        return result

    def _are_row(self, weights: Sequence[int]) -> bool:
        """Return whether all weights are constants, or in one tensor at equal distances."""
        tensors = {self._tensor(weight) for weight in weights}
        if tensors == {CONSTANT}:
            return True
        if len(tensors) > 1 or CONSTANT in tensors:
            return False
        places = [self.operations[weight][1][0].place[1] for weight in weights]
        return len({b - a for a, b in pairwise(places)}) == 1

    def _weighted(self, node: int) -> tuple[int, int]:
        """Return a number and a weight whose product is a node."""
        operation, arguments = self.operations[node]
        if operation == "neg":
            return arguments[0], self.constant(-1.0)
        if operation == "mul":
            for x, weight in (arguments, arguments[::-1]):
                if self._tensor(weight) is not None:
                    return x, weight
        return node, self.constant(1.0)

    def _tensor(self, node: int) -> int | None:
        """Return the number of the tensor in memory that holds a node; None if it is no weight."""
        operation, arguments = self.operations[node]
        if operation == "leaf" and arguments[0].source == "memory":
            return arguments[0].place[0]
        return CONSTANT if operation == "constant" else None

    def _is_zero(self, node: int) -> bool:
        operation, arguments = self.operations[node]
        if operation == "mul":
            return any(self.value(argument) == 0 for argument in arguments)
        return self.value(node) == 0

    def needed(self, outputs: Iterable[int]) -> list[int]:
        """Return the nodes that outputs need, each after its arguments."""
        seen = set[int]()
        waiting = list(outputs)
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                operation, arguments = self.operations[node]
                if operation not in ("leaf", "constant"):
                    waiting += arguments
        return sorted(seen)  # arguments are older than what is made of them

    def same(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Return whether two lists of nodes are the same functions of their trajectories."""
        equal = dict[int, int]()
        waiting = list(zip(first, second))
        while waiting:
            a, b = waiting.pop()
            if a in equal:
                if equal[a] != b:
                    return False
                continue
            equal[a] = b
            (operation, arguments), (other, others) = self.operations[a], self.operations[b]
            if operation != other or len(arguments) != len(others):
                return False
            if operation == "leaf":
                if arguments[0][:2] != others[0][:2]:
                    return False
            elif operation == "constant":
                if a != b:
                    return False
            else:
                waiting += zip(arguments, others)
        return True


_OF_NUMBERS: dict[str, Callable[..., float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "abs": abs,
    "pow": lambda x, y: float(x**y),
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
}
