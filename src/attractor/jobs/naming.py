"""Functions by the names under which other processes find them: ``module:name`` or ``file.py:name``."""

import importlib.util
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from attractor.core.files import check_source


@cache
def named(name: str) -> Any:
    """What ``module:function`` or ``file.py:function`` names; the code of the module or file is run."""
    place, _, inside = name.rpartition(":")
    if not place.endswith(".py"):
        return getattr(import_module(place), inside)
    return getattr(module_of_file(Path(place)), inside)


def module_of_file(path: Path, known: bool = False) -> Any:
    """A Python file as a module; while its code is run it finds its neighbours, as by ``python FILE``.

    Args:
        known: by its name in `sys.modules`, unless there is another of that name.
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
        with suppress(ValueError):  # the file's code has changed it
            sys.path.remove(folder)
    return module


def name_of(function: Any) -> str | None:
    """The name by which `named` finds a function in another process.

    None if there is none: of a lambda, an object that can be called, a function inside another.
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
