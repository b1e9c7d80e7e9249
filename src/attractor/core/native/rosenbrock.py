"""Attempts of Rosenbrock schemes in C.

The stages of a step are blocks k: the rate at the start comes first, then the stages of the scheme, and
the rate at the end is the last.
"""

from attractor.core.native.code import weighted_stages
from attractor.core.rosenbrock import Rosenbrock, Row

LARGEST = 40  # components of a state, whose matrix is then in the cache of a core


def after_rate(weights: Row) -> Row:
    """Return weights of the blocks k for weights of the stages."""
    return (0.0, *weights)


def attempt_text(scheme: Rosenbrock, dim: int) -> str:
    """Return the function that attempts a step, with the rate at its start in k[0].

    It calls ``jacobian``, which stores the rows of df/du and then df/dt, and the functions of
    rosenbrock.c.
    """
    each = f"  for (int i = 0; i < {dim}; i++)\n    EACH_LANE"
    lines = [
        "static inline void attempt(const Block *t, const Block *h, const Block *u, Block *k,",
        "                           const Block *p, Block *u1, const T *const *memory) {",
        f"  Block x[{dim}], time[1], derivatives[{dim * (dim + 1)}], matrix[{dim * dim}];",
        f"  const Block *in_time = (const Block *)derivatives + {dim * dim};",
        f"  Flags exchanges[{dim * dim}];",
        "  jacobian(t, u, p, derivatives, memory);",
        f"  for (int i = 0; i < {dim}; i++)",
        f"    for (int j = 0; j < {dim}; j++)",
        f"      EACH_LANE matrix[i * {dim} + j][s] =",
        f"        (T)(i == j) - (T){scheme.gamma!r} * h[0][s] * derivatives[i * {dim} + j][s];",
        "  factorise(matrix, exchanges);",
    ]
    for i, (a, c) in enumerate(zip(scheme.a, scheme.c)):
        if i:
            lines += [
                f"{each} x[i][s] = u[i][s] + h[0][s] * ({weighted_stages(after_rate(a), dim)});",
                f"  EACH_LANE time[0][s] = t[0][s] + (T){scheme.alpha[i]!r} * h[0][s];",
                f"  rate((const Block *)time, (const Block *)x, p, k + {(i + 1) * dim}, memory);",
            ]
        stage = (i + 1) * dim
        rate = f"k[{stage if i else 0} + i][s]"
        known = f"{rate} + (T){scheme.d[i]!r} * h[0][s] * in_time[i][s]"
        lines += [
            f"{each} k[{stage} + i][s] = (T){scheme.gamma!r} *",
            f"      ({known} + ({weighted_stages(after_rate(c), dim)}));",
            f"  solve((const Block *)matrix, (const Flags *)exchanges, k + {stage});",
        ]
    last = (len(scheme.b) + 1) * dim
    lines += [
        f"{each} u1[i][s] = u[i][s] + h[0][s] * ({weighted_stages(after_rate(scheme.b), dim)});",
        "  EACH_LANE time[0][s] = t[0][s] + h[0][s];",
        f"  rate((const Block *)time, (const Block *)u1, p, k + {last}, memory);",
        "}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def interpolant_lines(scheme: Rosenbrock, dim: int) -> list[str]:
    """Return the statements that compute the coefficients of `attractor.core.interpolant`."""
    each = f"  for (int i = 0; i < {dim}; i++)\n    EACH_LANE"
    return [f"{each} out[i][s] = u1[i][s] - u[i][s];"] + [
        f"{each} out[{j * dim} + i][s] = h[0][s] * ({weighted_stages(after_rate(row), dim)});"
        for j, row in enumerate(scheme.dense_rows, 1)
    ]
