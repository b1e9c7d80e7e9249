"""Derivatives of programs of scalars: a program for the Jacobian of a rate, number by number."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

from attractor.core.native.aten import UntranslatableError
from attractor.core.native.scalars import LOGICAL, Program
from attractor.core.native.tracing import ScalarFunction

Tangents: TypeAlias = dict[int, int]  # the nodes of the derivatives that are not zero, by direction


def jacobian(rate: ScalarFunction, dim: int) -> ScalarFunction:
    """Return the derivatives of a rate as a function of the same inputs.

    Its outputs are the rows of the matrix df_i/du_j, and then the derivatives in time.

    Raises:
        UntranslatableError: The rate has an operation whose derivative is not known here.
    """
    program, outputs = _differentiated(rate.program, rate.outputs, dim)
    return ScalarFunction(program, outputs, rate.memory, rate.differentiable)


@lru_cache(maxsize=64)
def _differentiated(
    program: Program, outputs: tuple[int, ...], dim: int
) -> tuple[Program, tuple[int, ...]]:
    """Return the same program again for the same rate, so that its library is found again."""
    result = program.copy()
    tangents: dict[int, Tangents] = {}
    for node in program.needed(outputs):
        tangents[node] = _tangents(result, node, tangents, dim)
    zero = result.constant(0.0)
    in_state = [tangents[i].get(j, zero) for i in outputs for j in range(dim)]
    return result, (*in_state, *(tangents[i].get(dim, zero) for i in outputs))


def _tangents(program: Program, node: int, known: dict[int, Tangents], dim: int) -> Tangents:
    """Return the derivatives of a node in the components of the state, and in time (direction dim)."""
    operation, arguments = program.operations[node]
    if operation == "leaf":
        source, place, _ = arguments[0]
        one = program.constant(1.0)
        return {place[0]: one} if source == "u" else {dim: one} if source == "t" else {}
    if operation in ("constant", "sign", *LOGICAL):
        return {}
    of_arguments = [known[x] for x in arguments]
    directions = sorted(set().union(*of_arguments))
    if not directions:
        return {}
    if operation == "dot":
        return {j: _dot(program, arguments, of_arguments, j) for j in directions}
    if operation == "where":
        zero = program.constant(0.0)
        _, first, second = of_arguments
        return {
            j: program.node("where", arguments[0], first.get(j, zero), second.get(j, zero))
            for j in directions
        }
    if operation not in _PARTIALS:
        raise UntranslatableError(f"the derivative of {operation} is not known")
    partials = _PARTIALS[operation](program, node, arguments, of_arguments)
    return {
        j: program.total(
            [program.node("mul", partial, x[j]) for partial, x in zip(partials, of_arguments) if j in x]
        )
        for j in directions
    }


def _dot(program: Program, arguments: Sequence[int], of_arguments: Sequence[Tangents], j: int) -> int:
    """Return the derivative of a sum of products of numbers and weights."""
    half = len(arguments) // 2
    return program.total(
        [
            program.node("mul", weight, tangents[j])
            for weight, tangents in zip(arguments[half:], of_arguments[:half])
            if j in tangents
        ]
    )


class _Expressions:
    """Short names for nodes of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, operation: str, *arguments: int | float) -> int:
        nodes = [self.program.constant(x) if isinstance(x, float) else x for x in arguments]
        return self.program.node(operation, *nodes)


def _of_power(program: Program, node: int, x: Sequence[int], tangents: Sequence[Tangents]) -> list[int]:
    """Return the partial derivatives of ``x[0] ** x[1]``; the second only if it is needed."""
    of = _Expressions(program)
    base = of("mul", x[1], of("pow", x[0], of("sub", x[1], 1.0)))
    if not tangents[1]:
        return [base, node]
    # A power of zero does not depend on its exponent.
    return [base, of("where", of("eq", x[0], 0.0), 0.0, of("mul", node, of("log", x[0])))]


def _of_extreme(operation: str) -> Callable[..., list[int]]:
    """Return the rule of the larger or the smaller number, with half for each if they are equal."""

    def partials(
        program: Program, node: int, x: Sequence[int], tangents: Sequence[Tangents]
    ) -> list[int]:
        of = _Expressions(program)
        equal = of("eq", x[0], x[1])
        first = of("where", equal, 0.5, of("where", of(operation, x[0], x[1]), 1.0, 0.0))
        return [first, of("sub", 1.0, first)]

    return partials


def _elementary(partials: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Return a rule of `_PARTIALS` from a function (expressions, result, *arguments)."""
    return lambda program, node, x, tangents: partials(_Expressions(program), node, *x)


# The partial derivatives of operations, from the result y and the arguments.
_PARTIALS: dict[str, Callable[..., list[int]]] = {
    "add": _elementary(lambda of, y, a, b: [of.program.constant(1.0), of.program.constant(1.0)]),
    "sub": _elementary(lambda of, y, a, b: [of.program.constant(1.0), of.program.constant(-1.0)]),
    "mul": _elementary(lambda of, y, a, b: [b, a]),
    "div": _elementary(lambda of, y, a, b: [of("div", 1.0, b), of("neg", of("div", y, b))]),
    "neg": _elementary(lambda of, y, x: [of.program.constant(-1.0)]),
    "abs": _elementary(lambda of, y, x: [of("sign", x)]),
    "sqrt": _elementary(lambda of, y, x: [of("div", 0.5, y)]),
    "cbrt": _elementary(lambda of, y, x: [of("div", 1.0, of("mul", 3.0, of("mul", y, y)))]),
    "exp": _elementary(lambda of, y, x: [y]),
    "expm1": _elementary(lambda of, y, x: [of("exp", x)]),
    "log": _elementary(lambda of, y, x: [of("div", 1.0, x)]),
    "log1p": _elementary(lambda of, y, x: [of("div", 1.0, of("add", 1.0, x))]),
    "sin": _elementary(lambda of, y, x: [of("cos", x)]),
    "cos": _elementary(lambda of, y, x: [of("neg", of("sin", x))]),
    "tan": _elementary(lambda of, y, x: [of("add", 1.0, of("mul", y, y))]),
    "sinh": _elementary(lambda of, y, x: [of("cosh", x)]),
    "cosh": _elementary(lambda of, y, x: [of("sinh", x)]),
    "tanh": _elementary(lambda of, y, x: [of("sub", 1.0, of("mul", y, y))]),
    "asin": _elementary(lambda of, y, x: [_inverse_sine(of, 1.0, x)]),
    "acos": _elementary(lambda of, y, x: [_inverse_sine(of, -1.0, x)]),
    "atan": _elementary(lambda of, y, x: [of("div", 1.0, of("add", 1.0, of("mul", x, x)))]),
    "erf": _elementary(
        lambda of, y, x: [of("mul", 2 / math.sqrt(math.pi), of("exp", of("neg", of("mul", x, x))))]
    ),
    "atan2": _elementary(
        lambda of, y, a, b: [
            of("div", b, of("add", of("mul", a, a), of("mul", b, b))),
            of("neg", of("div", a, of("add", of("mul", a, a), of("mul", b, b)))),
        ]
    ),
    "pow": _of_power,
    "max": _of_extreme("gt"),
    "min": _of_extreme("lt"),
}


def _inverse_sine(of: _Expressions, sign: float, x: int) -> int:
    """Return ``sign / sqrt(1 - x^2)``."""
    return of("div", sign, of("sqrt", of("sub", 1.0, of("mul", x, x))))
