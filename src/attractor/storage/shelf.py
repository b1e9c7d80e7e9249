"""Things that come with the library by name: a folder each, and a card about it beside the folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attractor.common.checks import nearest


@dataclass(frozen=True)
class Shelf:
    """A folder of such things; `what` is what one of them is called in errors."""

    home: Path
    what: str

    def names(self) -> list[str]:
        """All there are."""
        return sorted(path.stem for path in self.home.glob("*.json"))

    def folder(self, name: str) -> Path:
        """Where the one of that name is; an error that names those there are."""
        known = self.names()
        if name not in known:
            raise ValueError(
                f"no {self.what} is called {name!r}; there are {', '.join(known)}{nearest(name, known)}"
            )
        return self.home / name

    def card(self, name: str) -> dict[str, Any]:
        """What is known about it."""
        return json.loads(self.folder(name).with_suffix(".json").read_text())
