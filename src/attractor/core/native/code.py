"""Programs of scalars and steps of schemes as C."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from attractor.core.native.scalars import FUNCTIONS, LOGICAL, Leaf
from attractor.core.native.tracing import ScalarFunction
from attractor.core.scheme import Scheme

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip

HEAD = """\
/* Steps of a scheme for blocks of trajectories. T is float or double, LANES the trajectories of a block.
   Functions of the step are written for one lane, and compilers make vectors of the loops over lanes. */
#define EACH_LANE _Pragma("omp simd") for (int s = 0; s < LANES; s++)
#define VECTOR_BYTES 64
#define VECTORS (LANES * (int)sizeof(T) / VECTOR_BYTES)
typedef T Block[LANES] __attribute__((aligned(VECTOR_BYTES)));
typedef T Vector __attribute__((vector_size(VECTOR_BYTES)));
#ifdef VECTOR_MATH
#define OF_VECTORS __attribute__((simd("notinbranch"), const))
#else
#define OF_VECTORS __attribute__((const))
#endif

/* out = weights z, where the weight of row r and column i is weights[r * row + i * column]. */
static inline void product(const T *weights, long row, long column, int rows, int columns,
                           const Block *z, Block *out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    Vector sum[4][VECTORS] = {{{0}}};
    for (int i = 0; i < columns; i++)
      for (int q = 0; q < 4; q++)
        for (int v = 0; v < VECTORS; v++)
          sum[q][v] += weights[(r + q) * row + i * column] * ((const Vector *)z[i])[v];
    for (int q = 0; q < 4; q++)
      for (int v = 0; v < VECTORS; v++) ((Vector *)out[r + q])[v] = sum[q][v];
  }
  for (; r < rows; r++) {
    Vector sum[VECTORS] = {{0}};
    for (int i = 0; i < columns; i++)
      for (int v = 0; v < VECTORS; v++)
        sum[v] += weights[r * row + i * column] * ((const Vector *)z[i])[v];
    for (int v = 0; v < VECTORS; v++) ((Vector *)out[r])[v] = sum[v];
  }
}
"""

LOOP = """
/* Take up to `count` steps of the trajectories from `first` on, and return how many were taken: with
   `stops`, only those before one of them, which is not `anywhere`, is outside. */
static long long advance(const T *u, const T *parameters, const T *t, const T *dt, T *out,
                         const unsigned char *anywhere, unsigned char *inside, unsigned char *stayed,
                         const T *const *memory, long long n, long long count, long long first,
                         int stops) {
  Block x[STATE], p[PARAMETERS + 1];
  unsigned char here[LANES];
  int lanes = n - first < LANES ? (int)(n - first) : LANES;
  for (int s = 0; s < LANES; s++) { /* the last trajectory stands in for those beyond it */
    long long from = first + (s < lanes ? s : lanes - 1);
    for (int i = 0; i < STATE; i++) x[i][s] = u[i * n + from];
    for (int i = 0; i < PARAMETERS; i++) p[i][s] = parameters[i * n + from];
    if (s < lanes) stayed[from] = inside[from] = 1;
  }
  long long taken = 0;
  for (;; taken++) {
    if (GUARDED) {
      int leaves = 0;
      region(x, p, here);
      for (int s = 0; s < lanes; s++) {
        inside[first + s] = here[s];
        leaves |= !(here[s] | anywhere[first + s]);
      }
      if (stops && leaves) break;
    }
    if (taken == count) break;
    for (int s = 0; GUARDED && s < lanes; s++) stayed[first + s] &= inside[first + s];
    step(t[taken], dt[taken], x, p, memory);
  }
  for (int i = 0; i < STATE; i++)
    for (int s = 0; s < lanes; s++) out[i * n + first + s] = x[i][s];
  return taken;
}

/* Take up to `count` steps of n trajectories, fewer if one of them leaves, and return how many.

   u and out [STATE, n], parameters [PARAMETERS, n], t and dt [count]; anywhere, inside and stayed [n].
   `inside` is of the states in out. */
long long steps(const T *u, const T *parameters, const T *t, const T *dt, T *out,
                const unsigned char *anywhere, unsigned char *inside, unsigned char *stayed,
                const T *const *memory, long long n, long long count, int threads) {
  long long least = count;
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 16 * LANES) reduction(min : least)
  for (long long first = 0; first < n; first += LANES) {
    long long taken = advance(u, parameters, t, dt, out, anywhere, inside, stayed, memory, n, count,
                              first, 1);
    least = taken < least ? taken : least;
  }
  if (least < count) /* all trajectories take as many steps */
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 16 * LANES)
    for (long long first = 0; first < n; first += LANES)
      advance(u, parameters, t, dt, out, anywhere, inside, stayed, memory, n, least, first, 0);
  return least;
}
"""


@dataclass(frozen=True, eq=False)
class StepFunctions:
    """What a step consists of.

    Attributes:
        rate: ``(t, u, p) -> k``.
        correction: ``(t, dt, u, slope, k, p) -> added``, or None.
        region: ``(u, p) -> whether the state is inside``, or None.
    """

    rate: ScalarFunction
    correction: ScalarFunction | None
    region: ScalarFunction | None

    @property
    def functions(self) -> tuple[ScalarFunction, ...]:
        """All functions, in the order in which their tensors are passed to the C code."""
        return tuple(f for f in (self.rate, self.correction, self.region) if f is not None)

    @property
    def uses_vector_math(self) -> bool:
        """Whether they call functions such as sines."""
        return any(
            f.program.operations[node][0] in FUNCTIONS
            for f in self.functions
            for node in f.program.needed(f.outputs)
        )

    @property
    def statements(self) -> int:
        """The number of operations that are written one by one, which compilers take time for."""
        kinds = (
            f.program.operations[node][0] for f in self.functions for node in f.program.needed(f.outputs)
        )
        return sum(kind not in ("leaf", "constant", "dot") for kind in kinds)


def source_of(step: StepFunctions, scheme: Scheme, dim: int, single: bool) -> str:
    """Return the C code of a loop of steps.

    Args:
        dim: Number of components of a state.
        single: Whether numbers are float32.
    """
    suffix = "f" if single else ""
    prototypes = "".join(
        f"OF_VECTORS T {name}{suffix}({'T, T' if name in ('pow', 'atan2') else 'T'});\n"
        for name in FUNCTIONS
    )
    parts = [HEAD, prototypes]
    offset = len(step.rate.memory)
    parts.append(
        _function("rate", "T t, const Block *u, const Block *p, Block *out", step.rate, 0, suffix)
    )
    if step.correction is not None:
        parts.append(
            _function(
                "correction",
                "T t, T dt, const Block *u, const Block *slope, const Block *k, const Block *p, "
                "Block *out",
                step.correction, offset, suffix, dim,
            )
        )  # fmt: skip
    if step.region is not None:
        assert not step.region.memory
        parts.append(_region(step.region, suffix))
    else:
        parts.append(
            "static inline void region(const Block *u, const Block *p, unsigned char *out) {}\n"
        )
    parts += [_step(scheme, dim, step.correction is not None), LOOP]
    return "\n".join(parts)


def _step(scheme: Scheme, dim: int, corrected: bool) -> str:
    """Return the function of one step."""
    stages = scheme.rate_calls
    lines = [
        "static inline void step(T t, T dt, Block *u, const Block *p, const T *const *memory) {",
        f"  Block k[{stages * dim}], x[{dim}];",
    ]
    for i in range(stages):
        if i == 0:
            lines.append("  rate(t, u, p, k, memory);")
            continue
        row = _weighted(scheme._a[i][:i], dim)
        lines.append(f"  for (int i = 0; i < {dim}; i++) EACH_LANE x[i][s] = u[i][s] + dt * ({row});")
        time = f"t + (T){scheme._c[i]!r} * dt"
        lines.append(f"  rate({time}, x, p, k + {i * dim}, memory);")
    slope = _weighted(scheme._b[:stages], dim)
    if corrected:
        lines += [
            f"  Block slope[{dim}], added[{dim}];",
            f"  for (int i = 0; i < {dim}; i++) EACH_LANE slope[i][s] = {slope};",
            "  correction(t, dt, u, slope, k, p, added, memory);",
            f"  for (int i = 0; i < {dim}; i++)",
            "    EACH_LANE u[i][s] = u[i][s] + dt * slope[i][s] + added[i][s];",
        ]
    else:
        lines.append(f"  for (int i = 0; i < {dim}; i++) EACH_LANE u[i][s] = u[i][s] + dt * ({slope});")
    return "\n".join([*lines, "}"])


def _weighted(weights: Sequence[float], dim: int) -> str:
    """Return the weighted sum of stages."""
    terms = [f"(T){w!r} * k[{j * dim} + i][s]" for j, w in enumerate(weights) if w]
    return " + ".join(terms) or "0"


def _function(
    name: str, signature: str, function: ScalarFunction, offset: int, suffix: str, dim: int = 0
) -> str:
    """Return a function of a block of trajectories."""
    memory = [f"  const T *m{i} = memory[{offset + i}];" for i in range(len(function.memory))]
    body = _Body(function, suffix, dim)
    stores = [f"    out[{i}][s] = {body.value(node)};" for i, node in enumerate(function.outputs)]
    return "\n".join(
        [
            *body.tables, f"static inline void {name}({signature}, const T *const *memory) {{", *memory,
            *body.lines(stores), "}", "",
        ]
    )  # fmt: skip


def _region(function: ScalarFunction, suffix: str) -> str:
    """Return the function that tests states."""
    (output,) = function.outputs
    body = _Body(function, suffix, 0)
    return "\n".join(
        [
            *body.tables,
            "static inline void region(const Block *u, const Block *p, unsigned char *out) {",
            "  Block flags;", *body.lines([f"    flags[s] = {body.value(output)} ? 1 : 0;"]),
            "  for (int s = 0; s < LANES; s++) out[s] = flags[s] != 0;", "}", "",
        ]
    )  # fmt: skip


class _Body:
    """The statements of a function: loops over lanes, and matrix products between them.

    Numbers of one loop that a later loop or a product needs are kept in blocks.

    Attributes:
        tables: Constants of the function.
    """

    def __init__(self, function: ScalarFunction, suffix: str, dim: int) -> None:
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
        self.products = [_Product(i, *rows) for i, rows in enumerate(self._grouped(dots))]
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

    def __init__(self, number: int, rows: list[int], numbers: tuple[int, ...], source: Any) -> None:
        self.number, self.rows, self.numbers, self.source = number, rows, numbers, source
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
        return [f"static const T w{self.number}[] = {{\n  {body}}};"]

    def calls(self, operations: Sequence[Any]) -> list[str]:
        """Return the calls of the product: one, if the rows are at equal distances in memory."""
        n, columns = self.number, len(self.numbers)
        if self.source is None:
            # Rows of a triangle have fewer weights each, so that they are multiplied in parts.
            lengths = [len(self._weights(operations, node)) for node in self.rows]
            parts = [(r, min(r + 4, len(lengths))) for r in range(0, len(lengths), 4)]
            if len(set(lengths)) == 1:
                parts = [(0, len(lengths))]
            return [
                f"  product(w{n} + {first * columns}, {columns}, 1, {stop - first}, "
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
