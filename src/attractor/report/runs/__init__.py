"""Runs of other commands, and pages about one or several of them.

The kind of a run is recognised by its files: a fit, a training, a probe, a comparison, a benchmark, or a
table of a paper. Each kind has a module here with two functions: `read` returns the `Run` at a path, and
`show` adds pictures and tables of several runs to a page.

>>> from attractor.report import runs
>>> results = runs.find("out/fit")                  # doctest: +SKIP
>>> runs.page(results).write("out/report.html")     # doctest: +SKIP
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

from attractor.report.page import Page
from attractor.report.runs import benchmarks, comparisons, fits, probes, reproductions, trainings
from attractor.report.runs.run import Run, read_json, side_by_side
from attractor.storage.files import check_source
from attractor.storage.limits import DEEPEST_JSON
from attractor.storage.schema import plain

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
SOURCES = (
    "attractor fit, probe, compare, bench --out and reproduce write runs, and so does attractor.train "
    "with out="
)


def find(path: Path | str) -> list[Run]:
    """Return the runs in a file or folder, at least one.

    Raises:
        ValueError: there is no run; the message lists subfolders with runs.
        FileTypeError: the path is a link, a pipe or a device.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there is no {path}; give a file or folder of a run: {SOURCES}")
    if not path.is_dir():
        check_source(path)
    with _damage_as_error(path):
        results = _of_file(path) if path.is_file() else _of_folder(path)
    if results:
        return results
    if path.is_file():
        raise ValueError(f"{path} is no file of a run; {SOURCES}")
    inside = [str(p) for p in sorted(path.iterdir()) if p.is_dir() and _safe(p)]
    files = ", ".join(p.name for p in sorted(path.iterdir())[:8]) or "nothing"
    hint = f"there are runs in {', '.join(inside)}" if inside else f"it holds {files}. {SOURCES}"
    raise ValueError(f"{path} holds no run itself; {hint}")


def page(runs: Sequence[Run], title: str = "") -> Page:
    """Return one page about all runs, with runs of one kind side by side."""
    alone = f"{runs[0].kind.capitalize()}: {runs[0].name}" if len(runs) == 1 else ""
    runs = _with_short_names(runs)
    document = Page(title or alone or f"{len(runs)} runs")
    for kind, (heading, module) in KINDS.items():
        members = [run for run in runs if run.kind == kind]
        if not members:
            continue
        if len(runs) > 1:
            document.section(heading)
        document.text(module.ABOUT)
        side_by_side(document, members, "numbers")
        with _damage_as_error(" or ".join(run.name for run in members)):
            module.show(document, members)
        prefix = "" if len(members) == len(runs) else f"{heading}: "
        document.section(f"{prefix}configuration" if prefix else "Configuration")
        side_by_side(document, members, "settings")
        with_versions = [run for run in members if run.versions]
        if with_versions:
            document.section(f"{prefix}versions" if prefix else "Versions")
            side_by_side(document, with_versions, "versions")
        commands = dict.fromkeys(run.command for run in members if run.command)
        document.section(f"{prefix}repeat" if prefix else "Repeat this run")
        if commands:
            document.command("\n".join(commands))
        else:
            document.text("This run was started from Python; its settings are above.")
    document.section("This page")
    document.command(shlex.join(["attractor", "report", *dict.fromkeys(str(run.path) for run in runs)]))
    return document


@contextmanager
def _damage_as_error(what: Path | str) -> Iterator[None]:
    """Raise errors that damaged or edited files cause as ValueError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{what} is not a complete run: {type(error).__name__}: {error}") from error


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
    content = read_json(path, ANY)
    if not isinstance(content, dict):
        return []
    if {"experiment", "scale", "runs"} <= content.keys():
        return [reproductions.read(path, name)]
    if {"hybrid", "points", "m_star"} <= content.keys():
        return [comparisons.read(path, name)]
    if "rows" in content or {"versions", "machine"} <= content.keys():
        return [benchmarks.read(path, name)]
    return []


def _of_folder(path: Path) -> list[Run]:
    name = str(path)
    results = []
    kind = _checkpoint_kind(path)
    if (path / "fit.json").exists() or kind == "hybrid solver":
        results.append(fits.read(path, name))
    if (path / "probe.json").exists() or kind == "stiffness profile":
        results.append(probes.read(path, name))
    if kind == "training":
        results.append(trainings.read(path.parent, str(path.parent)))
    if (path / "log.jsonl").exists():
        results.append(trainings.read(path, name))
    results += [trainings.read(p.parent, str(p.parent)) for p in sorted(path.glob("seed-*/log.jsonl"))]
    if (path / "compare.json").exists():
        results.append(comparisons.read(path / "compare.json", name))
    if (path / "job.json").exists():
        results += [run for p in sorted(path.glob("*.*.json")) for run in _of_file(p)]
    result_files = [p for s in SCALES for p in (path / f"{s}.json", *sorted(path.glob(f"*/{s}.json")))]
    results += [run for p in result_files if p.exists() for run in _of_file(p)]
    return results


def _checkpoint_kind(folder: Path) -> str | None:
    """Return the kind of checkpoint in a folder, or None."""
    try:
        return read_json(folder / "manifest.json", ANY)["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _safe(folder: Path) -> bool:
    try:
        return bool(_of_folder(folder))
    except (ValueError, KeyError, TypeError, OSError):
        return False


def _with_short_names(runs: Sequence[Run]) -> list[Run]:
    """Shorten names to their last parts, as far as they still differ."""
    from dataclasses import replace

    parts = [Path(run.name).parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        short = ["/".join(p[-count:]) for p in parts]
        if len(set(short)) == len(set(zip(short, (run.kind for run in runs)))) == len(runs):
            return [replace(run, name=name) for run, name in zip(runs, short)]
    return list(runs)
