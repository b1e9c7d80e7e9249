"""The folder of data sets."""

import os
from pathlib import Path

Folder = Path | str | None


def folder_of(folder: Folder) -> Path | None:
    """Return `folder`, or else the folder in the variable ``ATTRACTOR_DATA``, or None."""
    path = folder if folder is not None else os.environ.get("ATTRACTOR_DATA") or None
    return None if path is None else Path(path).expanduser()
