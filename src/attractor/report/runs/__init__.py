"""Runs that other commands have made, and one page about them, alone or side by side.

A run is found by the files it has left: a fit, a training, a probe, a comparison, a benchmark, or a
table of a paper. Each kind is a file here with two functions: `read` makes a `Run` of a path, `show`
puts the pictures and tables of several on a page.

>>> from attractor.report import runs
>>> found = runs.find("out/fit")                    # doctest: +SKIP
>>> runs.page(found).write("out/report.html")       # doctest: +SKIP
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

from attractor.core.files import check_source
from attractor.core.limits import DEEPEST_JSON
from attractor.core.schema import plain
from attractor.report.page import Page
from attractor.report.runs import benchmarks, comparisons, fits, probes, reproductions, trainings
from attractor.report.runs.run import Run, read_json, side_by_side

__all__ = ["KINDS", "Run", "find", "page"]

KINDS: dict[str, tuple[str, ModuleType]] = {
    "fit": ("Fits", fits),
    "comparison": ("Comparisons", comparisons),
    "training": ("Trainings", trainings),
    "probe": ("Probes", probes),
    "benchmark": ("Benchmarks", benchmarks),
    "reproduction": ("Tables of the papers", reproductions),
}
ANY = partial(plain, depth=DEEPEST_JSON)
SCALES = ("smoke", "cpu", "gpu")
WHAT = (
    "attractor fit, probe, compare, bench --out and reproduce write runs, and so does attractor.train "
    "with out="
)


def find(path: Path | str) -> list[Run]:
    """The runs that a file or folder holds, at least one.

    Raises:
        ValueError: it holds none; says which folders in it do.
        FileTypeError: the path is a link, a pipe or a device.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there is no {path}; give a file or folder of a run: {WHAT}")
    if not path.is_dir():
        check_source(path)
    with _whole(path):
        found = _of_file(path) if path.is_file() else _of_folder(path)
    if found:
        return found
    if path.is_file():
        raise ValueError(f"{path} is no file of a run; {WHAT}")
    inside = [str(p) for p in sorted(path.iterdir()) if p.is_dir() and _safe(p)]
    there = ", ".join(p.name for p in sorted(path.iterdir())[:8]) or "nothing"
    hint = f"there are runs in {', '.join(inside)}" if inside else f"it holds {there}. {WHAT}"
    raise ValueError(f"{path} holds no run itself; {hint}")


def page(runs: Sequence[Run], title: str = "") -> Page:
    """One page about all of them, those of a kind side by side."""
    alone = f"{runs[0].kind.capitalize()}: {runs[0].name}" if len(runs) == 1 else ""
    runs = _named(runs)
    made = Page(title or alone or f"{len(runs)} runs")
    for kind, (heading, module) in KINDS.items():
        own = [run for run in runs if run.kind == kind]
        if not own:
            continue
        if len(runs) > 1:
            made.section(heading)
        made.text(module.ABOUT)
        side_by_side(made, own, "numbers")
        with _whole(" or ".join(run.name for run in own)):
            module.show(made, own)
        made.section("Configuration" if len(own) == len(runs) else f"{heading}: configuration")
        side_by_side(made, own, "settings")
        known = [run for run in own if run.versions]
        if known:
            made.section("Versions" if len(own) == len(runs) else f"{heading}: versions")
            side_by_side(made, known, "versions")
        commands = dict.fromkeys(run.command for run in own if run.command)
        made.section("Again" if len(own) == len(runs) else f"{heading}: again")
        if commands:
            made.command("\n".join(commands))
        else:
            made.text("Made by a call in Python: its settings are above.")
    made.section("This page")
    made.command(shlex.join(["attractor", "report", *dict.fromkeys(str(run.path) for run in runs)]))
    return made


@contextmanager
def _whole(what: Path | str) -> Iterator[None]:
    """Files that are not as they were written are told from mistakes of ours."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{what} is no whole run: {type(error).__name__}: {error}") from error


def _of_file(path: Path) -> list[Run]:
    name = str(path)
    if path.name in ("log.jsonl", "times.jsonl"):
        return [trainings.read(path.parent, str(path.parent))]
    if path.name == "fit.json":
        return [fits.read(path.parent, str(path.parent))]
    if path.name == "probe.json":
        return [probes.read(path.parent, str(path.parent))]
    if path.suffix != ".json":
        return []
    there = read_json(path, ANY)
    if not isinstance(there, dict):
        return []
    if {"experiment", "scale", "runs"} <= there.keys():
        return [reproductions.read(path, name)]
    if {"hybrid", "points", "m_star"} <= there.keys():
        return [comparisons.read(path, name)]
    if "rows" in there or {"versions", "machine"} <= there.keys():
        return [benchmarks.read(path, name)]
    return []


def _of_folder(path: Path) -> list[Run]:
    name = str(path)
    found = []
    kind = _saved(path)
    if (path / "fit.json").exists() or kind == "hybrid solver":
        found.append(fits.read(path, name))
    if (path / "probe.json").exists() or kind == "stiffness profile":
        found.append(probes.read(path, name))
    if kind == "training":
        found.append(trainings.read(path.parent, str(path.parent)))
    if (path / "log.jsonl").exists():
        found.append(trainings.read(path, name))
    found += [trainings.read(p.parent, str(p.parent)) for p in sorted(path.glob("seed-*/log.jsonl"))]
    if (path / "compare.json").exists():
        found.append(comparisons.read(path / "compare.json", name))
    if (path / "job.json").exists():
        found += [run for p in sorted(path.glob("*.*.json")) for run in _of_file(p)]
    results = [p for s in SCALES for p in (path / f"{s}.json", *sorted(path.glob(f"*/{s}.json")))]
    found += [run for p in results if p.exists() for run in _of_file(p)]
    return found


def _saved(folder: Path) -> str | None:
    """The kind of checkpoint in a folder, if it is one."""
    try:
        return read_json(folder / "manifest.json", ANY)["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _safe(folder: Path) -> bool:
    try:
        return bool(_of_folder(folder))
    except (ValueError, KeyError, TypeError, OSError):
        return False


def _named(runs: Sequence[Run]) -> list[Run]:
    """With the shortest ends of their names that still differ."""
    from dataclasses import replace

    parts = [Path(run.name).parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        short = ["/".join(p[-count:]) for p in parts]
        if len(set(short)) == len(set(zip(short, (run.kind for run in runs)))) == len(runs):
            return [replace(run, name=name) for run, name in zip(runs, short)]
    return list(runs)
