"""What every kind of run is read into, and what their pages have in common."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attractor.core import limits
from attractor.core.schema import Schema, any_of, check, mapping, null, number, text
from attractor.report.live import COLORS
from attractor.report.page import Page, cell_text

ORIGIN = {"versions": mapping(text()), "command": text(100_000)}  # of every file of numbers
UNKNOWN = any_of(number(), null)  # null is what is not finite, or not known
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Run:
    """Something that was run and has left files.

    Attributes:
        kind: a key of `attractor.report.runs.KINDS`.
        name: for titles and legends: the path as it was given.
        path: the file or folder that was read.
        numbers: what it found, in a few numbers or words.
        settings: what it was run with.
        versions: of the packages that made it; empty where nobody wrote them down.
        command: that repeats it; empty if it was a call in Python.
        content: all that was read, for the pictures.
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
        """All but the content."""
        return {
            "kind": self.kind,
            "name": self.name,
            "path": str(self.path),
            "numbers": self.numbers,
            "settings": self.settings,
            "versions": self.versions,
            "command": self.command,
        }


def look(color: int, dash: int = 0, **more: Any) -> dict[str, Any]:
    """Of a line of `live.lines`, where several runs share a picture: a colour a run, a dash a kind."""
    own = COLORS[color % len(COLORS)]
    line = {"color": own, "dash": DASHES[dash % len(DASHES)]}
    return {"line": line, "marker": {"color": own}, **more}


def read_json(path: Path, content: Schema) -> Any:
    """A JSON file's content if it matches a schema; an error that names the file."""
    try:
        found = limits.read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    check(found, content, path)
    return found


def side_by_side(page: Page, runs: Sequence[Run], part: str) -> None:
    """A table of the runs' numbers, settings or versions, a column a run.

    Settings that differ come first. Lines without a value are left out, and sentences: they are text.
    """
    found = [flat(getattr(run, part)) for run in runs]
    keys = dict.fromkeys(key for one in found for key in one)
    lines = [[key, *(one.get(key) for one in found)] for key in keys]
    lines = [x for x in lines if set(x[1:]) != {None} and max(len(cell_text(c)) for c in x[1:]) < 60]
    if part != "numbers":
        lines.sort(key=lambda line: len({cell_text(cell) for cell in line[1:]}) == 1)
    if lines:
        page.table(["", *(run.name for run in runs)], lines)


def flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dots in the names; lists as they are written."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return found
