"""Where data sets are looked for."""

import os
from pathlib import Path

Folder = Path | str | None


def folder_of(folder: Folder) -> Path | None:
    """The folder given, or the one that the environment variable ``ATTRACTOR_DATA`` names, or None."""
    named = folder if folder is not None else os.environ.get("ATTRACTOR_DATA") or None
    return None if named is None else Path(named).expanduser()
