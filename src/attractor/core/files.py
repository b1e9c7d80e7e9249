"""Files that are never half written."""

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4


def write_bytes(path: Path | str, content: bytes) -> Path:
    """Write a file so that a reader sees the old content or the new, whatever is interrupted.

    The bytes go to a temporary file in the same folder, reach the disk, and then take the name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name itself must reach the disk, too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return path


def write_text(path: Path | str, content: str) -> Path:
    """`write_bytes` for text, in UTF-8."""
    return write_bytes(path, content.encode())


def write_json(path: Path | str, content: Any) -> Path:
    """`write_bytes` for JSON; numbers that JSON does not know (NaN, infinity) become null."""
    return write_bytes(path, json_bytes(content))


def json_bytes(content: Any) -> bytes:
    """The one way `write_json` writes a content."""
    return (json.dumps(_plain(content), indent=1, allow_nan=False) + "\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return _plain(value.tolist()) if hasattr(value, "tolist") else value  # numpy and torch
