"""Where experiments are found: files with an `EXPERIMENT` in the folder ``experiments``.

In a checkout that is the folder of the project; what is installed has it inside the package.
"""

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import attractor
from attractor.reproduce.experiment import PAPERS, Experiment

PACKAGE = Path(attractor.__file__).parent


@cache
def catalogue() -> dict[str, Experiment]:
    """All experiments by name, in the order of the papers and of the places in them."""
    folder = _folder()
    found: list[Experiment] = []
    for path in sorted(Path(next(iter(folder.__path__))).glob("*_*.py")):
        made = getattr(import_module(f"{folder.__name__}.{path.stem}"), "EXPERIMENT", None)
        if made is None:
            continue
        if made.name.replace("-", "_") != path.stem:
            raise ValueError(f"{path.name} holds {made.name}; file and experiment share their name")
        found.append(made)
    order = list(PAPERS)
    return {e.name: e for e in sorted(found, key=lambda e: (order.index(e.paper), _place(e.name)))}


def find(name: str) -> Experiment:
    """The experiment of that name; an error that names similar ones."""
    from difflib import get_close_matches

    known = catalogue()
    if name not in known:
        near = get_close_matches(name, known, 3) or [
            n for n in known if n.startswith(name.split("-")[0])
        ]
        raise ValueError(
            f"no experiment is called {name!r}; {'perhaps ' + ', '.join(near) if near else 'see --list'}"
        )
    return known[name]


def home() -> Path:
    """The folder with results that come with the project."""
    return Path(next(iter(_folder().__path__))) / "results"


def _folder() -> ModuleType:
    root = PACKAGE.parents[1]
    if (root / "experiments" / "__init__.py").exists():
        if str(root) not in sys.path:
            sys.path.append(str(root))
        return import_module("experiments")
    return import_module("attractor.experiments")


def _place(name: str) -> tuple[str, int, str]:
    """``paper-table10`` after ``paper-table2``; tables, figures, then the rest."""
    kind = name.split("-", 1)[1]
    digits = "".join(c for c in kind if c.isdigit())
    word = kind.rstrip("0123456789")
    rank = {"table": "0", "fig": "1"}.get(word.split("-")[0], "2" + word)
    return rank, int(digits or 0), kind
