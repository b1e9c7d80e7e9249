"""Programs of scalars and steps of schemes as C."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
typedef T Block[LANES];
#ifdef VECTOR_MATH
#define OF_VECTORS __attribute__((simd("notinbranch"), const))
#else
#define OF_VECTORS __attribute__((const))
#endif
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

    def __len__(self) -> int:
        return sum(len(f.program) for f in self.functions)


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
    parts.append(_function("rate", "T t, const Block *u, const Block *p, Block *out", step.rate, 0, suffix))
    if step.correction is not None:
        parts.append(
            _function(
                "correction",
                "T t, T dt, const Block *u, const Block *slope, const Block *k, const Block *p, Block *out",
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
            f"  for (int i = 0; i < {dim}; i++) EACH_LANE u[i][s] = u[i][s] + dt * slope[i][s] + added[i][s];",
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
    stores = [f"    out[{i}][s] = v{node};" for i, node in enumerate(function.outputs)]
    return "\n".join(
        [
            f"static inline void {name}({signature}, const T *const *memory) {{", *memory,
            "  EACH_LANE {", *_statements(function, suffix, dim), *stores, "  }", "}", "",
        ]
    )  # fmt: skip


def _region(function: ScalarFunction, suffix: str) -> str:
    """Return the function that tests states."""
    (output,) = function.outputs
    return "\n".join(
        [
            "static inline void region(const Block *u, const Block *p, unsigned char *out) {",
            "  T flags[LANES];", "  EACH_LANE {", *_statements(function, suffix),
            f"    flags[s] = v{output} ? 1 : 0;", "  }",
            "  for (int s = 0; s < LANES; s++) out[s] = flags[s] != 0;", "}", "",
        ]
    )  # fmt: skip


def _statements(function: ScalarFunction, suffix: str, dim: int = 0) -> list[str]:
    program = function.program
    lines = []
    for node in program.needed(function.outputs):
        operation, arguments = program.operations[node]
        kind = "int" if operation in LOGICAL else "T"
        lines.append(f"    {kind} v{node} = {_expression(operation, arguments, suffix, dim)};")
    return lines


def _expression(operation: str, arguments: Sequence[object], suffix: str, dim: int) -> str:
    if operation == "constant":
        return _literal(arguments[0])  # type: ignore[arg-type]
    if operation == "leaf":
        return _load(arguments[0], dim)  # type: ignore[arg-type]
    names = [f"v{node}" for node in arguments]
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
        return "(T)__builtin_nan(\"\")"
    if math.isinf(value):
        return f"(T){'-' if value < 0 else ''}__builtin_inf()"
    return f"(T){value!r}"
