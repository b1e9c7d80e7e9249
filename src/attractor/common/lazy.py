"""Submodules that are imported at their first use as an attribute of the package."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def submodule(package: str, name: str) -> ModuleType:
    """Import and return a submodule; the function for ``__getattr__`` of a package.

    Raises:
        AttributeError: the package has no public submodule of that name.
    """
    full = f"{package}.{name}"
    if name.startswith("_") or find_spec(full) is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return import_module(full)
