"""The common form of all kinds of runs, and shared elements of their pages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from attractor.report.live import COLORS
from attractor.report.page import Page, cell_text
from attractor.storage import limits
from attractor.storage.schema import Schema, any_of, check, mapping, null, number, text

ORIGIN = {"versions": mapping(text()), "command": text(100_000)}  # fields of every file of numbers
OPTIONAL_NUMBER = any_of(number(), null)  # null: not finite, or not known
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Run:
    """A run of a command, read from its files.

    Attributes:
        kind: a key of `attractor.report.runs.KINDS`.
        name: the name in titles and legends: the path as it was passed.
        path: the file or folder of the run.
        numbers: the main results, as numbers or short texts.
        settings: the settings of the run.
        versions: versions of the packages; empty if they were not recorded.
        command: the command that repeats the run; empty if it was started from Python.
        content: all data of the run, for pictures.
    """

    kind: str
    name: str
    path: Path
    numbers: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    content: Any = None

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the content."""
        entries = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "content"}
        return entries | {"path": str(self.path)}


def look(color: int, dash: int = 0, **more: Any) -> dict[str, Any]:
    """Return the style of a line of `live.lines`: one colour per run, one dash per kind of line."""
    name = COLORS[color % len(COLORS)]
    line = {"color": name, "dash": DASHES[dash % len(DASHES)]}
    return {"line": line, "marker": {"color": name}, **more}


def read_json(path: Path, content: Schema) -> Any:
    """Return the content of a JSON file; raise an error with its name unless it matches a schema."""
    try:
        value = limits.read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    check(value, content, path)
    return value


def side_by_side(page: Page, runs: Sequence[Run], part: str) -> None:
    """Add a table of numbers, settings or versions, with one column per run.

    Settings that differ come first. Lines without values, and lines with sentences, are left out.
    """
    columns = [flat(getattr(run, part)) for run in runs]
    keys = dict.fromkeys(key for one in columns for key in one)
    lines = [[key, *(one.get(key) for one in columns)] for key in keys]
    lines = [x for x in lines if set(x[1:]) != {None} and max(len(cell_text(c)) for c in x[1:]) < 60]
    if part != "numbers":
        lines.sort(key=lambda line: len({cell_text(cell) for cell in line[1:]}) == 1)
    if lines:
        page.table(["", *(run.name for run in runs)], lines)


def flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries, with dots in the names; lists become JSON."""
    entries: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            entries |= flat(value, f"{prefix}{key}.")
        else:
            entries[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return entries
