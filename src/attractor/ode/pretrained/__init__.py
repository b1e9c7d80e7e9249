"""Solvers that come with the library, each a folder here; `benchmarks/pretrained.py` has made them.

>>> from attractor.ode import pretrained
>>> pretrained.names()
['elastic-pendulum', 'henon-heiles', 'pendulum-chain']
>>> pretrained.card("elastic-pendulum")["dt"]
0.1
"""

from pathlib import Path
from typing import Any

from attractor.storage.shelf import Shelf

__all__ = ["card", "folder", "names"]

HOME = Path(__file__).parent
_SHELF = Shelf(HOME, "pretrained solver")


def names() -> list[str]:
    """What `HybridSolver.from_pretrained` knows by name."""
    return _SHELF.names()


def folder(name: str) -> Path:
    """Where the solver of that name is; an error that names those there are."""
    return _SHELF.folder(name)


def card(name: str) -> dict[str, Any]:
    """What is known about a solver: its equation, dt, and its errors on trajectories that are new."""
    return _SHELF.card(name)
