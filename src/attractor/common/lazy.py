"""Submodules that are attributes of their package before anybody has imported them."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def submodule(package: str, name: str) -> ModuleType:
    """Import a submodule at its first use as an attribute; what a package's ``__getattr__`` calls.

    Raises:
        AttributeError: the package has no public submodule of that name.
    """
    full = f"{package}.{name}"
    if name.startswith("_") or find_spec(full) is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return import_module(full)
