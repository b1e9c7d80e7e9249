"""Functions of a block of trajectories in C, written from programs of scalars."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attractor.core.native.scalars import FUNCTIONS, LOGICAL, Leaf
from attractor.core.native.tracing import ScalarFunction

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip

ROWS = 4  # of a product at a time, MOST_ROWS in blocks.c
_FOLDER = Path(__file__).parent


def template(name: str) -> str:
    """Return the text of a C file of this folder."""
    return (_FOLDER / name).read_text()


def blocks() -> str:
    """Return the definitions of blocks, and of products with them."""
    return template("blocks.c") + template("products.c")


def in_float(text: str) -> str:
    """Return a text whose numbers of type T are of type float, while states keep their type."""
    names = ("Block", "Vector", "some_rows", "product")
    return "\n".join(
        [
            '#pragma push_macro("T")\n#undef T\n#define T float',
            *(f"#define {name} {name}_of_float" for name in names),
            template("products.c"),
            text,
            *(f"#undef {name}" for name in names),
            '#pragma pop_macro("T")\n',
        ]
    )


def prototypes(suffix: str) -> str:
    """Return the declarations of elementary functions, which end with a suffix, "f" for float32."""
    return "".join(
        f"OF_VECTORS T {name}{suffix}({'T, T' if name in ('pow', 'atan2') else 'T'});\n"
        for name in FUNCTIONS
    )


def function_text(
    name: str, signature: str, function: ScalarFunction, suffix: str, offset: int = 0, dim: int = 0
) -> str:
    """Return a C function that stores its results in the blocks `out`.

    Args:
        signature: Its parameters, without the tensors that it reads.
        suffix: Of elementary functions.
        offset: The number of tensors in `memory` that belong to functions before this one.
        dim: The number of components of a stage, for functions of stages.
    """
    body = _Body(name, function, suffix, dim)
    stores = [f"    out[{i}][s] = {body.value(node)};" for i, node in enumerate(function.outputs)]
    return _definition(name, signature, function, offset, body, body.lines(stores))


def test_text(name: str, signature: str, function: ScalarFunction, suffix: str) -> str:
    """Return a C function whose result is a byte for each trajectory, 1 or 0."""
    (output,) = function.outputs
    body = _Body(name, function, suffix, 0)
    lines = [
        "  Block flags;",
        *body.lines([f"    flags[s] = {body.value(output)} ? 1 : 0;"]),
        "  for (int s = 0; s < LANES; s++) out[s] = flags[s] != 0;",
    ]
    return _definition(name, signature, function, 0, body, lines)


def _definition(
    name: str, signature: str, function: ScalarFunction, offset: int, body: "_Body", lines: list[str]
) -> str:
    memory = [f"  const T *m{i} = memory[{offset + i}];" for i in range(len(function.memory))]
    head = f"static inline void {name}({signature}, const T *const *memory) {{"
    return "\n".join([*body.tables, head, *memory, *lines, "}", ""])


def weighted_stages(weights: Sequence[float], dim: int) -> str:
    """Return the weighted sum of the stages k of a component i and a lane s."""
    terms = [f"(T){w!r} * k[{j * dim} + i][s]" for j, w in enumerate(weights) if w]
    return " + ".join(terms) or "0"


class _Body:
    """The statements of a function: loops over lanes, and matrix products between them.

    Numbers of one loop that a later loop or a product needs are kept in blocks.

    Attributes:
        tables: Constants of the function.
    """

    def __init__(self, name: str, function: ScalarFunction, suffix: str, dim: int) -> None:
        self.operations, self.suffix, self.dim = function.program.operations, suffix, dim
        self.outputs = function.outputs
        needed = function.program.needed(function.outputs)
        dots = [node for node in needed if self.operations[node][0] == "dot"]
        self.loop_of: dict[int, int] = {}  # the first loop in which a number is known
        for node in needed:
            before = [self.loop_of[x] for x in self._numbers(node)]
            self.loop_of[node] = max(before, default=0) + (self.operations[node][0] == "dot")
        self.last = max((self.loop_of[node] for node in function.outputs), default=0)
        wanted = {x for node in needed for x in self._numbers(node)} | set(function.outputs)
        self.computed = [node for node in needed if node in wanted and node not in dots]
        # Functions of one source have tables of their own.
        self.products = [
            _Product(f"{name}_weights{i}", i, *rows) for i, rows in enumerate(self._grouped(dots))
        ]
        self.place = {node: product.place(node) for product in self.products for node in product.rows}
        self.tables = [
            table for product in self.products for table in product.table(self.operations, suffix)
        ]

    def _numbers(self, node: int) -> Sequence[int]:
        """Return the arguments that are computed for each trajectory, without weights."""
        operation, arguments = self.operations[node]
        if operation in ("leaf", "constant"):
            return ()
        return arguments[: len(arguments) // 2] if operation == "dot" else arguments

    def _grouped(self, dots: Sequence[int]) -> "list[tuple[list[int], tuple[int, ...], Any]]":
        """Return the rows, the numbers and the tensor of each matrix product.

        A row may have fewer weights than others, for the first of their numbers.
        """
        groups: list[tuple[list[int], tuple[int, ...], Any]] = []
        for node in sorted(dots, key=lambda node: -len(self.operations[node][1])):
            arguments = self.operations[node][1]
            numbers, weights = arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]
            source = self._source(weights)
            for rows, longest, other in groups:
                same = longest[: len(numbers)] == numbers if source is None else longest == numbers
                if same and source == other:
                    rows.append(node)
                    break
            else:
                groups.append(([node], numbers, source))
        return [(sorted(rows), numbers, source) for rows, numbers, source in groups]

    def _source(self, weights: Sequence[int]) -> Any:
        """Return the tensor and the stride of weights in memory; None for constants."""
        if self.operations[weights[0]][0] == "constant":
            return None
        (tensor, first), (_, second) = (self.operations[weight][1][0].place for weight in weights[:2])
        return tensor, second - first

    def value(self, node: int) -> str:
        """Return the expression of a number in the last loop."""
        return self._name(node, self.last)

    def _name(self, node: int, loop: int) -> str:
        """Return the expression of a number in a loop."""
        if node in self.place:
            return f"{self.place[node]}[s]"
        operation, arguments = self.operations[node]
        if operation == "constant":
            return _literal(arguments[0])
        if operation == "leaf":
            return _load(arguments[0], self.dim)
        return f"v{node}" if self.loop_of[node] == loop else f"b{node}[s]"

    def lines(self, stores: Sequence[str]) -> list[str]:
        """Return the statements.

        Args:
            stores: Statements at the end of the last loop.
        """
        lines = list[str]()
        last_use: dict[int, int] = {}  # the last loop in which a number is an argument
        for node in self.computed:
            for x in self._numbers(node):
                last_use[x] = max(last_use.get(x, 0), self.loop_of[node])
        for node in self.outputs:
            last_use[node] = self.last
        for product in self.products:
            n = product.number
            lines.append(f"  Block z{n}[{len(product.numbers)}], d{n}[{len(product.rows)}];")
            product.loop = max(self.loop_of[x] for x in product.numbers)
        blocks = [
            node for node in self.computed
            if self.operations[node][0] not in ("leaf", "constant")
            and max([last_use.get(node, 0), *(p.loop for p in self.products if node in p.members)])
            > self.loop_of[node]
        ]  # fmt: skip
        lines += [f"  Block b{node};" for node in blocks]
        for loop in range(self.last + 1):
            lines.append("  EACH_LANE {")
            for node in self.computed:
                operation, arguments = self.operations[node]
                if self.loop_of[node] != loop or operation in ("leaf", "constant"):
                    continue
                kind = "int" if operation in LOGICAL else "T"
                names = [self._name(x, loop) for x in arguments]
                lines.append(f"    {kind} v{node} = {_expression(operation, names, self.suffix)};")
            lines += [f"    b{node}[s] = v{node};" for node in blocks if self.loop_of[node] == loop]
            calls = [product for product in self.products if product.loop == loop]
            for product in calls:
                for i, x in enumerate(product.numbers):
                    lines.append(f"    z{product.number}[{i}][s] = {self._name(x, loop)};")
            lines += stores if loop == self.last else []
            lines.append("  }")
            for product in calls:
                lines += product.calls(self.operations)
        return lines


class _Product:
    """Rows of a matrix product, which are "dot" operations on the same numbers."""

    def __init__(
        self, weights: str, number: int, rows: list[int], numbers: tuple[int, ...], source: Any
    ) -> None:
        self.weights, self.number = weights, number
        self.rows, self.numbers, self.source = rows, numbers, source
        self.members = frozenset(numbers)
        self.loop = 0

    def place(self, node: int) -> str:
        """Return the block of a row."""
        return f"d{self.number}[{self.rows.index(node)}]"

    def _weights(self, operations: Sequence[Any], node: int) -> Sequence[int]:
        arguments = operations[node][1]
        return arguments[len(arguments) // 2 :]

    def table(self, operations: Sequence[Any], suffix: str) -> list[str]:
        """Return the table of weights that are constants. Short rows end with zeros."""
        if self.source is not None:
            return []
        rows = []
        for node in self.rows:
            values = [_literal(operations[weight][1][0]) for weight in self._weights(operations, node)]
            rows.append(", ".join(values + ["0"] * (len(self.numbers) - len(values))))
        body = ",\n  ".join(rows)
        return [f"static const T {self.weights}[] = {{\n  {body}}};"]

    def calls(self, operations: Sequence[Any]) -> list[str]:
        """Return the calls of the product: one, if the rows are at equal distances in memory."""
        n, columns = self.number, len(self.numbers)
        if self.source is None:
            # Rows of a triangle have fewer weights each, so that they are multiplied in parts.
            lengths = [len(self._weights(operations, node)) for node in self.rows]
            parts = [(r, min(r + ROWS, len(lengths))) for r in range(0, len(lengths), ROWS)]
            if len(set(lengths)) == 1:
                parts = [(0, len(lengths))]
            return [
                f"  product({self.weights} + {first * columns}, {columns}, 1, {stop - first}, "
                f"{max(lengths[first:stop])}, (const Block *)z{n}, d{n} + {first});"
                for first, stop in parts
            ]
        tensor, stride = self.source
        starts = [operations[self._weights(operations, node)[0]][1][0].place[1] for node in self.rows]
        distances = {b - a for a, b in pairwise(starts)}
        if len(distances) <= 1:
            distance = distances.pop() if distances else 0
            return [
                f"  product(m{tensor} + {starts[0]}, {distance}, {stride}, {len(starts)}, {columns}, "
                f"(const Block *)z{n}, d{n});"
            ]
        numbers = f"(const Block *)z{n}"
        return [
            f"  product(m{tensor} + {start}, 0, {stride}, 1, {columns}, {numbers}, d{n} + {r});"
            for r, start in enumerate(starts)
        ]


def _expression(operation: str, names: Sequence[str], suffix: str) -> str:
    if operation in _INFIX:
        return f" {_INFIX[operation]} ".join(names)
    x = names[0]
    match operation:
        case "neg":
            return f"-{x}"
        case "not":
            return f"!{x}"
        case "abs":
            return f"__builtin_fabs{suffix}({x})"
        case "sqrt":
            return f"__builtin_sqrt{suffix}({x})"
        case "sign":
            return f"({x} > 0) - ({x} < 0)"
        case "max" | "min":
            sign = ">" if operation == "max" else "<"
            return f"({x} {sign} {names[1]} || {x} != {x}) ? {x} : {names[1]}"
        case "where":
            return f"{x} ? {names[1]} : {names[2]}"
        case _:
            return f"{operation}{suffix}({', '.join(names)})"


def _load(leaf: Leaf, dim: int) -> str:
    source, index, _ = leaf
    if source == "memory":
        return f"m{index[0]}[{index[1]}]"
    if not index:
        return source
    if source == "k":
        return f"k[{index[0] * dim + index[1]}][s]"
    return f"{source}[{index[0]}][s]"


def _literal(value: float) -> str:
    if math.isnan(value):
        return '(T)__builtin_nan("")'
    if math.isinf(value):
        return f"(T){'-' if value < 0 else ''}__builtin_inf()"
    return f"(T){value!r}"
