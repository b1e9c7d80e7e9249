"""Files that are never half written."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4


def write_bytes(path: Path | str, content: bytes) -> Path:
    """Write a file so that a reader sees the old content or the new, whatever is interrupted.

    The bytes go to a temporary file in the same folder, reach the disk, and then take the name; the
    name reaches the disk, too.
    """
    return write_parts(path, (content,))


def write_parts(path: Path | str, parts: Iterable[bytes | memoryview]) -> Path:
    """`write_bytes` for what need not be in memory at once."""
    path = Path(path)
    with _aside(path, parts) as temporary:
        temporary.replace(path)
    sync_folder(path.parent)
    return path


def write_new(path: Path | str, content: bytes) -> bool:
    """Write a file unless there is one of that name; return whether it was written.

    Of several processes that do so at the same time one succeeds.
    """
    path = Path(path)
    with _aside(path, (content,)) as temporary:
        try:
            os.link(temporary, path)
            new = True
        except FileExistsError:
            new = False
        except OSError:  # a file system without links
            new = not path.exists()
            if new:
                temporary.replace(path)
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return new


@contextmanager
def _aside(path: Path, parts: Iterable[bytes | memoryview]) -> Iterator[Path]:
    """A temporary file beside a path, whose content has reached the disk; an error removes it."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path | str, content: str) -> Path:
    """`write_bytes` for text, in UTF-8."""
    return write_bytes(path, content.encode())


def write_json(path: Path | str, content: Any) -> Path:
    """`write_bytes` for JSON; numbers that JSON does not know (NaN, infinity) become null."""
    return write_bytes(path, json_bytes(content))


def json_bytes(content: Any) -> bytes:
    """The one way `write_json` writes a content."""
    return (json.dumps(_plain(content), indent=1, allow_nan=False) + "\n").encode()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that their names reach the disk."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk; what was renamed in it stays so after a power cut."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(path: Path) -> None:
    """Remove temporary files of a file, left by a process that was killed while it wrote."""
    left = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{32}")
    for other in path.parent.iterdir() if path.parent.is_dir() else ():
        if left.fullmatch(other.name):
            other.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return _plain(value.tolist()) if hasattr(value, "tolist") else value  # numpy and torch
