"""Arguments and options of equations and solvers, which several commands have, and their values."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from attractor.cli import equation_names as equations

EQUATION_HELP = "A built-in system, such as elastic-pendulum, or FILE.py:FUNCTION, or MODULE:FUNCTION."
Equation = Annotated[str, typer.Argument(metavar="EQUATION", help=EQUATION_HELP)]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", metavar="KEY=VALUE", help="Option of a built-in system: -o links=10."
    ),
]
SOLVER_HELP = "The folder of a saved solver, or pretrained:NAME, such as pretrained:elastic-pendulum."
SolverArgument = Annotated[str, typer.Argument(metavar="SOLVER", help=SOLVER_HELP)]
RateOption = Annotated[
    str | None,
    typer.Option(
        "--rate",
        metavar="FILE.py:FUNCTION",
        help="Equation that the solver was fitted to, if it is your own.",
    ),
]
ParametersOption = Annotated[
    str | None,
    typer.Option(
        "--parameters",
        metavar="FILE.py:FUNCTION",
        help="Sampler of the parameters of a rate(t, u, p). Default: parameters() beside the rate.",
    ),
]
Horizon = Annotated[
    float | None, typer.Option(help="Duration of a trajectory: a whole number of steps.")
]


def find_equation(
    equation: str, option: list[str] | None, parameters: str | None, values: Any = None
) -> "equations.Equation":
    """Return the equation, which has a sampler of its parameters unless their values are passed."""
    from attractor.cli import equation_names as equations

    problem = equations.find(equation, pairs_of(option), parameters)
    if problem.takes_parameters and problem.parameters is None and values is None:
        raise ValueError(
            f"{equation} has parameters: write a function parameters(n, generator) that returns them "
            "[n, k] beside it, or name one with --parameters FILE.py:FUNCTION"
        )
    return problem


def default(value: float | None, otherwise: Any) -> Any:
    """Return a value unless it is None; 0 is a value, which is rejected later if it is not allowed."""
    return otherwise if value is None else value


def pairs_of(
    texts: list[str] | None, option: str = "--option", example: str = "links=10"
) -> dict[str, str]:
    """Return the keys and values of options of the form KEY=VALUE."""
    pairs = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{option} {text!r} must be KEY=VALUE, such as {example}")
        pairs[key] = value
    return pairs


def require(equation: str, **values: float | None) -> list[float]:
    """Return values by name, or raise an error that says how to pass those that are missing."""
    missing = [name for name, value in values.items() if value is None]
    if missing:
        meaning = {"dt": "--dt 0.1, the step", "horizon": "--horizon 10, the duration of a trajectory"}
        suggestion = ", and ".join(meaning[name] for name in missing)
        module_hint = f"; or write {' and '.join(f'{name} = ...' for name in missing)} beside the rate"
        raise ValueError(
            f"{equation} suggests no {' and no '.join(missing)}; add for example {suggestion}"
            f"{module_hint if ':' in equation else ''}"
        )
    return [value for value in values.values() if value is not None]


def number_text(x: float | None) -> str:
    """Return an error as a cell of a table."""
    return "lost" if x is None or x == float("inf") else f"{x:.1e}"
