"""Hybrid solvers by name: those that come with the library, folders, and repositories of a hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from attractor.ode import pretrained
from attractor.storage.objects import AnyPath, ObjectPath, path_of
from attractor.train import checkpoint

FOLDER = "solver"  # in a repository of the hub, beside the card
CARD = """---
library_name: attractor
tags: [ode, hybrid-solver]
---
# A hybrid solver for {title}

| | |
|---|---|
{table}

```python
import attractor as at

solver = at.HybridSolver.from_pretrained("{repo}")
```
"""


@contextmanager
def located(
    name: AnyPath | str, *, revision: str | None = None, token: str | bool | None = None
) -> Iterator[AnyPath]:
    """Give the folder of a saved solver, which is downloaded if it is in a repository.

    Args:
        name, revision, token: See `HybridSolver.from_pretrained`.
    """
    if not isinstance(name, str | Path | ObjectPath):
        raise TypeError(f"name is a {type(name).__name__}; give a name, a folder or a repository")
    place = path_of(name)
    if isinstance(place, ObjectPath):
        yield place
        return
    if str(name) in pretrained.names():
        yield pretrained.folder(str(name))
        return
    if place.is_dir():
        inner = place / FOLDER
        yield inner if (inner / checkpoint.MANIFEST).exists() else place
        return
    if str(name).count("/") != 1 or str(name).startswith((".", "/", "~")):
        pretrained.folder(str(name))  # raises, and names the solvers there are
    with import_module("attractor.integrations.hub").download(
        str(name), FOLDER, revision=revision, token=token
    ) as folder:
        yield folder


def push(solver: Any, repo: str, *, private: bool | None = None, token: str | bool | None = None) -> str:
    """Upload a `HybridSolver` and a card about it, and return the address."""
    lines = [f"| {key} | {value} |" for key, value in solver.about().items()]
    card = CARD.format(title=solver.rate_name, repo=repo, table="\n".join(lines))
    return import_module("attractor.integrations.hub").push(
        repo, {FOLDER: solver.save}, card, private=private, token=token
    )
