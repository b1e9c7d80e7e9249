"""Files that are never half written."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed
    fcntl = None  # type: ignore[assignment]


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
    """A temporary file beside a path, whose content has reached the disk; an error removes it.

    The file is locked until it has its final name, so that `sweep` in another process keeps it.
    """
    make_folder(path.parent)
    temporary, file = _open_temporary(path)
    try:
        with file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:  # an open file cannot be renamed there
                file.close()
            yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _open_temporary(path: Path) -> tuple[Path, BinaryIO]:
    """Create a temporary file beside a path and lock it.

    A `sweep` between the two removes the file, which then has no name, and another one is created.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{uuid4().hex}")
        file = temporary.open("xb")
        if fcntl is None:
            return temporary, file
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()


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
    """Remove temporary files of a file, left by a process that was killed while it wrote.

    A temporary file that a living process is writing is locked and stays.
    """
    left = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{32}")
    for other in path.parent.iterdir() if path.parent.is_dir() else ():
        if left.fullmatch(other.name):
            with suppress(FileNotFoundError, BlockingIOError, PermissionError):
                _remove_unless_locked(other)


def _remove_unless_locked(path: Path) -> None:
    if fcntl is None:
        path.unlink()
        return
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return _plain(value.tolist()) if hasattr(value, "tolist") else value  # numpy and torch
