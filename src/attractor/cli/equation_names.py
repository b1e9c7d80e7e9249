"""Equations by name, for the command line: built-in systems, and rates in a user's own file.

A file holds a rate ``(t, u) -> du`` and beside it a sampler ``sample(n, generator)``; it may also hold
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

# What the systems of the AttNS paper are solved with in its Table 4; others need --dt and --horizon.
STEPS = {"SpringMass": (0.2, 20.0), "ElasticPendulum": (0.1, 50.0), "PendulumChain": (0.1, 10.0)}


@dataclass(frozen=True)
class Equation:
    """What the command line knows about an equation.

    Attributes:
        name: for titles and files.
        rate: ``(t, u) -> du``, or ``(t, u, p) -> du``.
        sample: ``(n, generator=...) -> [n, d]``; None for systems, which have their own.
        dt, horizon, period: as its author suggests, or None.
        jax_rate: the rate in JAX, or None.
        takes_parameters: Whether the rate has a third argument that must be passed.
        parameters: ``(n, generator=...) -> [n, k]`` parameters of such a rate, or None.
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
    """The built-in systems by the names of the command line, such as "pendulum-chain"."""
    classes = [getattr(systems, n) for n in systems.__all__ if n != "System"]
    return {re.sub(r"(?<=[a-z])(?=[A-Z])", "-", c.__name__).lower(): c for c in classes}


def find(what: str, options: dict[str, str] | None = None, parameters: str | None = None) -> Equation:
    """The equation called `what`: "elastic-pendulum", "file.py:rate" or "package.module:rate".

    Args:
        options: of a built-in system, such as ``{"links": "10"}``.
        parameters: The sampler of the parameters of a rate ``(t, u, p)``, such as "file.py:sampler".
            None: the function `parameters` beside the rate.

    Raises:
        ValueError: there is no such thing, and what there is.
    """
    if ":" in what:
        if options:
            raise ValueError(f"options {sorted(options)} are for built-in systems, not for {what!r}")
        return _of_one_s_own(what, parameters)
    if parameters is not None:
        raise ValueError(
            f"{what} is a built-in system, which has no parameters per trajectory; write a rate "
            "(t, u, p) -> du in a file and give it as FILE.py:FUNCTION"
        )
    known = names()
    if what not in known:
        in_file = f"; for a rate in a file write {what}:rate"
        hint = in_file if what.endswith(".py") else nearest(what, list(known))
        raise ValueError(f"no system is called {what!r}; there are {', '.join(sorted(known))}{hint}")
    make = known[what]
    types: dict[str, Any] = {f.name: type(f.default) for f in fields(make) if f.init}
    given = {}
    for key, text in (options or {}).items():
        if types.get(key) not in (int, float, bool):
            allowed = ", ".join(k for k, t in types.items() if t in (int, float, bool)) or "none"
            hint = nearest(key, list(types))
            raise ValueError(f"{what} has no option {key!r}; it has {allowed}{hint}")
        try:
            given[key] = types[key](text)
        except ValueError:
            raise ValueError(f"{key} = {text!r} is no {types[key].__name__}") from None
    rate = make(**given)
    dt, horizon = STEPS.get(make.__name__, (None, None))
    return Equation(what, rate, dt=dt, horizon=horizon)


def _function(what: str) -> tuple[Any, Any]:
    """Return the function called `what` and its module."""
    place, _, name = what.rpartition(":")
    module = module_from_file(Path(place)) if place.endswith(".py") else module_from_package(place)
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = nearest(name, there)
        raise ValueError(f"{place} has no function {name!r}; it has {', '.join(there) or 'none'}{hint}")
    return function, module


def _takes(function: Any, count: int) -> bool:
    """Whether a function can be called with this number of arguments, as far as its signature says."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # some that are written in C have no signature
        return count == 2
    return True


def _of_one_s_own(what: str, parameters: str | None) -> Equation:
    place, _, name = what.rpartition(":")
    rate, module = _function(what)
    if not _takes(rate, 2) and not _takes(rate, 3):
        raise ValueError(
            f"a rate is called as rate(t, u); {what} takes {inspect.signature(rate)}: write def "
            f"{name}(t, u), or {name}(t, u, p) for an equation with parameters"
        )
    takes_parameters = not _takes(rate, 2)
    sampler = getattr(module, "parameters", None) if takes_parameters else None
    if parameters is not None:
        if ":" not in parameters:
            raise ValueError(
                f"the sampler of parameters is {parameters!r}; give FILE.py:FUNCTION or MODULE:FUNCTION"
            )
        sampler, _ = _function(parameters)
        if not _takes(rate, 3):
            raise ValueError(
                f"{what} takes {inspect.signature(rate)}, and no parameters; write def {name}(t, u, p), "
                "or leave out the sampler of parameters"
            )
        takes_parameters = True
    number = lambda key: float(value) if (value := getattr(module, key, None)) is not None else None
    return Equation(
        name=f"{Path(place).stem}:{name}",
        rate=rate,
        sample=getattr(module, "sample", None),
        dt=number("dt"),
        horizon=number("horizon"),
        period=number("period"),
        jax_rate=getattr(module, "jax_rate", None),
        takes_parameters=takes_parameters,
        parameters=sampler,
    )


def module_from_file(path: Path) -> Any:
    """A module from a Python file; its code is run."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give FILE.py:FUNCTION with a path that exists")
    try:
        return module_of_file(path, known=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error


def module_from_package(place: str) -> Any:
    """A module by its dotted name."""
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise ValueError(
            f"module {place!r} cannot be imported ({error}); a file is given as FILE.py:FUNCTION"
        ) from None
