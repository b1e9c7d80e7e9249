"""One name per meaning in the arguments of the public functions of `core`, `ode` and `systems`."""

import inspect

import pytest
from typer.main import get_command

import attractor.core
import attractor.ode
from attractor.cli import app
from attractor.ode import corrections, systems, theory, trajectories

MODULES = (attractor, attractor.core, attractor.ode, systems, corrections, theory, trajectories)
# Other words for a duration, a last time, or a number of trajectories.
OTHER = {
    "count", "duration", "end", "n_trajectories", "num_trajectories", "number", "samples", "span", "t1",
    "t_bound", "t_final", "t_max", "t_stop", "time_span", "total_time",
}  # fmt: skip
ALLOWED = {
    ("Scheme.stages", "count"),  # a number of stages
    ("SpringMass", "n"),  # a number of masses, as the paper calls it
}


def public_functions():
    """Return (name, function) of every public function, class and method."""
    functions = {}
    for module in MODULES:
        for name in getattr(module, "__all__", [n for n in vars(module) if n[0] != "_"]):
            thing = getattr(module, name)
            if not getattr(thing, "__module__", "").startswith(("attractor.core", "attractor.ode")):
                continue
            if inspect.isclass(thing):
                functions[name] = thing
                for own, method in vars(thing).items():
                    method = getattr(method, "__func__", method)
                    if own[0] != "_" and inspect.isfunction(method):
                        functions[f"{name}.{own}"] = method
            elif inspect.isfunction(thing):
                functions[name] = thing
    return sorted(functions.items())


FUNCTIONS = public_functions()


def arguments(function):
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # an exception class, or another one without a signature
        return []


def test_functions_are_found():
    names = dict(FUNCTIONS)
    assert {
        "fit",
        "tune",
        "compare",
        "make_trajectories",
        "HybridSolver.solve",
        "Lorenz.sample",
    } <= names.keys()
    assert "trajectories" in arguments(names["make_trajectories"])


@pytest.mark.parametrize(("name", "function"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_arguments_have_one_name_per_meaning(name, function):
    found = arguments(function)
    other = [x for x in found if x in OTHER and (name, x) not in ALLOWED]
    assert not other, f"{name} has {other}; use horizon, t_end, trajectories or batch"
    if "n" in found:
        assert name.endswith(".sample") or (name, "n") in ALLOWED
    if "t_end" in found:
        assert name.endswith(".solve")  # a last time belongs to a first one


def test_options_of_commands_have_the_names_of_the_functions():
    commands = get_command(app).commands
    for command in ("trajectories", "fit", "solve", "compare", "tune"):
        options = {parameter.name for parameter in commands[command].params}
        assert not options & (OTHER | {"n"})
        assert ("t_end" if command == "solve" else "horizon") in options
