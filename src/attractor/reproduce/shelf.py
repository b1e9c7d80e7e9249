"""Find experiments: Python files that declare an `EXPERIMENT`.

The experiments of the project are in its folder ``experiments``; an installed package contains this
folder. Experiments in other files are loaded by `from_file`.
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
    """Return all experiments of the project by name, ordered by paper and place in the paper.

    Raises:
        ValueError: A file declares an experiment of another name than its own.
    """
    folder = _folder()
    experiments: list[Experiment] = []
    for path in sorted(Path(next(iter(folder.__path__))).glob("*_*.py")):
        experiment = getattr(import_module(f"{folder.__name__}.{path.stem}"), "EXPERIMENT", None)
        if experiment is None:
            continue
        if experiment.name.replace("-", "_") != path.stem:
            raise ValueError(
                f"{path.name} declares the experiment {experiment.name}; rename the file to "
                f"{experiment.name.replace('-', '_')}.py"
            )
        experiments.append(experiment)
    order = [*papers(), *dict.fromkeys(e.paper for e in experiments)]
    return {e.name: e for e in sorted(experiments, key=lambda e: (order.index(e.paper), _place(e.name)))}


def papers() -> dict[str, str]:
    """Return the titles of the papers by short name, in the order of the pages of results."""
    return dict(getattr(_folder(), "PAPERS", {}))


def uncovered() -> dict[str, tuple[str, ...]]:
    """Return the tables and figures with results that have no experiment, by paper."""
    return dict(getattr(_folder(), "UNCOVERED", {}))


def from_file(path: Path | str) -> Experiment:
    """Return the experiment that a Python file declares as `EXPERIMENT`.

    The file is imported as a top-level module, and its folder is appended to ``sys.path``. So the task
    of an experiment in ``my_experiment.py`` is named ``my_experiment:function``.

    Raises:
        FileNotFoundError: The file does not exist.
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
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise ValueError(f"{path} declares no EXPERIMENT = Experiment(...)")
    return experiment


def find(name: str) -> Experiment:
    """Return the experiment of a name in the catalogue.

    The name may come from a file of results; no module is imported by that name.

    Raises:
        ValueError: No experiment has that name. The message suggests similar names.
    """
    from difflib import get_close_matches

    experiments = catalogue()
    if name not in experiments:
        matches = get_close_matches(name, experiments, 3) or [
            n for n in experiments if n.startswith(name.split("-")[0])
        ]
        advice = f"did you mean {', '.join(matches)}?" if matches else "see --list"
        raise ValueError(f"no experiment is called {name!r}; {advice}")
    return experiments[name]


def home() -> Path:
    """Return the folder with the results that are distributed with the project."""
    return Path(next(iter(_folder().__path__))) / "results"


def _folder() -> ModuleType:
    root = PACKAGE.parents[1]
    if (root / "experiments" / "__init__.py").exists():
        if str(root) not in sys.path:
            sys.path.append(str(root))
        return import_module("experiments")
    return import_module("attractor.experiments")


def _place(name: str) -> tuple[str, int, str]:
    """Return a sort key: tables, then figures, then other places, each in numerical order."""
    kind = name.split("-", 1)[1]
    digits = "".join(c for c in kind if c.isdigit())
    word = kind.rstrip("0123456789")
    rank = {"table": "0", "fig": "1"}.get(word.split("-")[0], "2" + word)
    return rank, int(digits or 0), kind
