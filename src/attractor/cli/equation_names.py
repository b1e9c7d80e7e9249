"""Equations by name, for the command line: built-in systems, and rates in a user's own file.

A file holds a rate ``(t, u) -> du`` and beside it a sampler ``sample(n, generator)``. It may also hold
what a fit needs, as `dt`, `horizon` and `period`, and a rate in JAX, `jax_rate`, for comparisons. Beside
a rate ``(t, u, p) -> du`` it holds a sampler of the parameters, ``parameters(n, generator)``.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from attractor.common.checks import nearest
from attractor.jobs.naming import module_of_file
from attractor.ode import systems

# (dt, horizon) of the systems in Table 4 of the AttNS paper; other systems need --dt and --horizon.
STEPS = {"SpringMass": (0.2, 20.0), "ElasticPendulum": (0.1, 50.0), "PendulumChain": (0.1, 10.0)}


@dataclass(frozen=True)
class Equation:
    """An equation with the settings that its author suggests.

    Attributes:
        name: Name for titles and files.
        rate: ``(t, u) -> du``, or ``(t, u, p) -> du``.
        sample: ``(n, generator=...) -> [n, d]``; None for systems, which have their own sampler.
        dt, horizon, period: Suggested values, or None.
        jax_rate: The rate in JAX, or None.
        takes_parameters: Whether the rate has a third argument that must be passed.
        parameters: ``(n, generator=...) -> [n, k]``, the sampler of the parameters; None if the rate has
            none.
    """

    name: str
    rate: Any
    sample: Callable[..., Tensor] | None = None
    dt: float | None = None
    horizon: float | None = None
    period: float | None = None
    jax_rate: Callable[..., Any] | None = None
    takes_parameters: bool = False
    parameters: Callable[..., Tensor] | None = None


def names() -> dict[str, Any]:
    """Return the built-in systems by the names of the command line, such as "pendulum-chain"."""
    classes = [getattr(systems, n) for n in systems.__all__ if n != "System"]
    return {re.sub(r"(?<=[a-z])(?=[A-Z])", "-", c.__name__).lower(): c for c in classes}


def find(name: str, options: dict[str, str] | None = None, parameters: str | None = None) -> Equation:
    """Return the equation of a name: "elastic-pendulum", "file.py:rate" or "package.module:rate".

    Args:
        name: The name.
        options: Options of a built-in system, such as ``{"links": "10"}``.
        parameters: The sampler of the parameters of a rate ``(t, u, p)``, such as "file.py:sampler".
            None: the function `parameters` beside the rate.

    Raises:
        ValueError: There is no such equation; the message lists the names that exist.
    """
    if ":" in name:
        if options:
            raise ValueError(f"options {sorted(options)} are for built-in systems, not for {name!r}")
        return _user_equation(name, parameters)
    if parameters is not None:
        raise ValueError(
            f"{name} is a built-in system, which has no parameters per trajectory; write a rate "
            "(t, u, p) -> du in a file, and pass it as FILE.py:FUNCTION"
        )
    builtin = names()
    if name not in builtin:
        in_file = f"; for a rate in a file write {name}:rate"
        hint = in_file if name.endswith(".py") else nearest(name, list(builtin))
        raise ValueError(f"no system is called {name!r}; there are {', '.join(sorted(builtin))}{hint}")
    make = builtin[name]
    types: dict[str, Any] = {f.name: type(f.default) for f in fields(make) if f.init}
    kwargs = {}
    for key, text in (options or {}).items():
        if types.get(key) not in (int, float, bool):
            allowed = ", ".join(k for k, t in types.items() if t in (int, float, bool)) or "none"
            hint = nearest(key, list(types))
            raise ValueError(f"{name} has no option {key!r}; it has {allowed}{hint}")
        try:
            kwargs[key] = types[key](text)
        except ValueError:
            raise ValueError(f"{key} = {text!r} is no {types[key].__name__}") from None
    dt, horizon = STEPS.get(make.__name__, (None, None))
    return Equation(name, make(**kwargs), dt=dt, horizon=horizon)


def find_function(path: str) -> tuple[Any, Any]:
    """Return the function at "file.py:name" or "package.module:name", and its module.

    Raises:
        ValueError: There is no such file, module or function.
    """
    place, _, name = path.rpartition(":")
    module = _module_from_file(Path(place)) if place.endswith(".py") else _module_from_package(place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = nearest(name, functions)
        raise ValueError(
            f"{place} has no function {name!r}; it has {', '.join(functions) or 'none'}{hint}"
        )
    return function, module


def _accepts(function: Any, count: int) -> bool:
    """Return whether a function can be called with this number of arguments, by its signature."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # some functions that are written in C have no signature
        return count == 2
    return True


def _user_equation(name: str, parameters: str | None) -> Equation:
    place, _, function = name.rpartition(":")
    rate, module = find_function(name)
    if not _accepts(rate, 2) and not _accepts(rate, 3):
        raise ValueError(
            f"a rate is called as rate(t, u), but {name} takes {inspect.signature(rate)}; write def "
            f"{function}(t, u), or {function}(t, u, p) for an equation with parameters"
        )
    takes_parameters = not _accepts(rate, 2)
    sampler = getattr(module, "parameters", None) if takes_parameters else None
    if parameters is not None:
        if ":" not in parameters:
            raise ValueError(
                f"the sampler of parameters is {parameters!r}; pass FILE.py:FUNCTION or MODULE:FUNCTION"
            )
        sampler, _ = find_function(parameters)
        if not _accepts(rate, 3):
            raise ValueError(
                f"{name} takes {inspect.signature(rate)}, and no parameters; write def "
                f"{function}(t, u, p), or leave out the sampler of parameters"
            )
        takes_parameters = True
    number = lambda key: float(value) if (value := getattr(module, key, None)) is not None else None
    return Equation(
        name=f"{Path(place).stem}:{function}",
        rate=rate,
        sample=getattr(module, "sample", None),
        dt=number("dt"),
        horizon=number("horizon"),
        period=number("period"),
        jax_rate=getattr(module, "jax_rate", None),
        takes_parameters=takes_parameters,
        parameters=sampler,
    )


def _module_from_file(path: Path) -> Any:
    """Run a Python file, and return its module."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; pass FILE.py:FUNCTION with a path that exists")
    try:
        return module_of_file(path, known=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error


def _module_from_package(name: str) -> Any:
    """Import a module by its dotted name."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"module {name!r} cannot be imported ({error}); pass a file as FILE.py:FUNCTION"
        ) from None
