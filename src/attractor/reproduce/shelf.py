"""Where experiments come from: files with an `EXPERIMENT`.

Those of the project are in its folder ``experiments``; what is installed has it inside the package. Any
other file can be read with `from_file`.
"""

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import attractor
from attractor.reproduce.experiment import Experiment

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
    order = [*papers(), *dict.fromkeys(e.paper for e in found)]
    return {e.name: e for e in sorted(found, key=lambda e: (order.index(e.paper), _place(e.name)))}


def papers() -> dict[str, str]:
    """Return the titles of the papers by their short names, in their order."""
    return dict(getattr(_folder(), "PAPERS", {}))


def uncovered() -> dict[str, tuple[str, ...]]:
    """Return the tables and figures with results for which there is no experiment, by paper."""
    return dict(getattr(_folder(), "UNCOVERED", {}))


def from_file(path: Path | str) -> Experiment:
    """Return the experiment that a Python file declares as `EXPERIMENT`.

    The file is imported as a module of its own name, from its folder, which is added to the end of
    ``sys.path``. So its tasks are named ``my_experiment:function`` in ``my_experiment.py``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file declares no experiment, or another module of its name has been imported.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; pass a Python file that declares EXPERIMENT")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = import_module(path.stem)
    if Path(str(module.__file__)).resolve() != path:
        raise ValueError(f"{path.stem} is already the name of {module.__file__}; rename {path.name}")
    made = getattr(module, "EXPERIMENT", None)
    if not isinstance(made, Experiment):
        raise ValueError(f"{path} declares no EXPERIMENT = Experiment(...)")
    return made


def find(name: str) -> Experiment:
    """Return the experiment of a name in the catalogue. It may be one that a results file states.

    Raises:
        ValueError: No experiment has that name; the message has similar ones.
    """
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
