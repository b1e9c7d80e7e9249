"""Names by which other processes import functions: ``module:name`` or ``file.py:name``."""

import importlib.util
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from attractor.storage.files import check_source


@cache
def named(name: str) -> Any:
    """Return the function ``module:function`` or ``file.py:function``; this runs the module's code."""
    place, _, inside = name.rpartition(":")
    if not place.endswith(".py"):
        return getattr(import_module(place), inside)
    return getattr(module_of_file(Path(place)), inside)


def module_of_file(path: Path, known: bool = False) -> Any:
    """Import a Python file as a module. It can import files of its folder, as with ``python FILE``.

    Args:
        path: the file.
        known: whether the module is added to `sys.modules`, unless its name is taken.
    """
    check_source(path, link=True)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if known:
        sys.modules.setdefault(path.stem, module)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        with suppress(ValueError):  # the code of the file has changed `sys.path`
            sys.path.remove(folder)
    return module


def name_of(function: Any) -> str | None:
    """Return the name by which `named` finds a function in another process.

    The result is None for lambdas, callable objects and functions inside other functions.
    """
    inside, code = getattr(function, "__qualname__", ""), getattr(function, "__code__", None)
    if code is None or getattr(function, "__globals__", {}).get(inside) is not function:
        return None
    file, module = Path(code.co_filename).resolve(), function.__module__
    top = PathFinder.find_spec(module.partition(".")[0])
    places = [] if top is None else [top.origin, *(top.submodule_search_locations or [])]
    if any(p and file.is_relative_to(Path(p).resolve()) for p in places):
        return f"{module}:{inside}"
    return f"{file}:{inside}" if file.is_file() else None
