"""Files that are never half written, folders that one process writes to at a time, and plain files.

`check_target` is what every writer calls, and `open_plain` (or `check_source`, where another library
opens the file) what every reader calls, so that no link, pipe or device is written to or waited for.

A path may be an `ObjectPath`, the place of an object in a store, which has none of these and no locks.
"""

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

from attractor.storage.objects import AnyPath, ObjectPath

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed
    fcntl = None  # type: ignore[assignment]

P = TypeVar("P", bound=AnyPath)
LOCK_SECONDS = 30.0  # to wait for another process before an error
LOCK = ".lock"  # the file that is locked where the file system cannot lock a folder, as NFS cannot
_HELD: set[int] = set()  # handles of the locks of this process
TEMPORARY = re.compile(r"\.attractor-[0-9a-f]{32}")  # a file that is being written
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileTypeError(OSError):
    """A path is not a plain file: it is a link, a folder, a pipe, a socket or a device."""


class FolderLockedError(OSError):
    """Another process or thread is writing to a folder."""


def check_target(path: AnyPath | str) -> None:
    """Raise unless a path can be written to: it names a plain file, or nothing yet.

    Folders above it may be symbolic links.

    Raises:
        FileTypeError: The path is a link, a folder, a pipe, a socket or a device.
    """
    if isinstance(path, ObjectPath):
        return
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):  # writing raises where a folder is missing
        return
    if not stat.S_ISREG(mode):
        is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
        raise FileTypeError(
            f"{path} is {_kind(mode)}, and only plain files are written or replaced. Pass another path"
            + ("." if is_device else ", or remove it first.")
        )


def check_source(path: AnyPath | str, *, link: bool = False) -> int:
    """Raise unless a path can be read: it names a plain file. Return the size of the file in bytes.

    Args:
        path: The file. Folders above it may be symbolic links.
        link: Whether the path itself may be a symbolic link to a plain file.

    Raises:
        FileNotFoundError: There is no such file.
        FileTypeError: The path is a link, a folder, a pipe, a socket or a device.
    """
    if isinstance(path, ObjectPath):
        return path.size()
    about = Path(path).stat(follow_symlinks=link)
    _check_regular(about.st_mode, path)
    return about.st_size


def open_plain(path: AnyPath | str, *, link: bool = False) -> FileIO:
    """Open a plain file for reading; see `check_source`. A pipe or a device is never waited for."""
    if isinstance(path, ObjectPath):
        return path.open()
    check_source(path, link=link)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = FileIO(os.open(path, flags if link else flags | getattr(os, "O_NOFOLLOW", 0)))
    try:  # once more, because the path may have been replaced since the check
        _check_regular(os.fstat(file.fileno()).st_mode, path)
    except FileTypeError:
        file.close()
        raise
    return file


def read_bytes(path: AnyPath | str, *, link: bool = False) -> bytes:
    """Return the content of a plain file; see `check_source`."""
    with open_plain(path, link=link) as file:
        return file.readall()


def read_text(path: AnyPath | str, *, link: bool = False) -> str:
    """Return the text of a plain file in UTF-8, with line feeds as line ends; see `check_source`."""
    return read_bytes(path, link=link).decode().replace("\r\n", "\n")


def _check_regular(mode: int, path: Path | str) -> None:
    if not stat.S_ISREG(mode):
        raise FileTypeError(
            f"{path} is not a plain file but {_kind(mode)}; only plain files are read. Pass the path of "
            "the file itself, or a copy of it."
        )


def _kind(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "a special file")


@contextmanager
def lock_folder(folder: AnyPath | str, *, wait: float | None = None) -> Iterator[bool]:
    """Hold the only lock of a folder, which is created if it does not exist.

    The lock ends with the process, however it ends. It is advisory: it excludes others that call
    `lock_folder`, in this process and in others, and not those that read.

    Args:
        folder: The folder.
        wait: Seconds to wait for another process or thread; None for `LOCK_SECONDS`.

    Yields:
        Whether the folder is locked. It is not on Windows, on file systems without locks, and in object
        stores.

    Raises:
        FolderLockedError: Another process or thread still has the lock after `wait` seconds.
    """
    if isinstance(folder, ObjectPath):
        yield False
        return
    folder = Path(folder)
    handle, path = _acquire(folder, LOCK_SECONDS if wait is None else wait)
    try:
        yield handle is not None
    finally:
        if handle in _HELD:  # not in a child that was forked meanwhile
            _HELD.discard(handle)
            if path != folder:
                path.unlink(missing_ok=True)
            fcntl.flock(handle, fcntl.LOCK_UN)  # also for children that have not closed it yet
            os.close(handle)


def _acquire(folder: Path, wait: float) -> tuple[int | None, Path]:
    """Lock a folder, or the file `LOCK` in it; return the handle and what is locked."""
    if fcntl is None:
        make_folder(folder)
        return None, folder
    path, flags = folder, os.O_RDONLY | os.O_DIRECTORY
    deadline, pause = time.monotonic() + wait, 0.001
    while True:
        make_folder(folder)  # a former owner may have removed it
        try:
            handle = os.open(path, flags, 0o666)
        except FileNotFoundError:
            continue
        except OSError:
            if path == folder:
                raise
            return None, path
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(handle, path):
                _HELD.add(handle)
                return handle, path
            os.close(handle)
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() >= deadline:
                raise FolderLockedError(
                    f"{folder} is in use: another process or thread has been writing to it for the "
                    f"{wait:g} s that were waited. Pass another folder, or wait until it has ended."
                ) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        except OSError:
            os.close(handle)
            if path != folder:  # a file system without locks
                path.unlink(missing_ok=True)
                return None, path
            path, flags = folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)


def _is_at(handle: int, path: Path) -> bool:
    """Whether a path still names what the handle is of."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _close_inherited() -> None:
    """Close the locks that a forked child has inherited, so that they end with their owner."""
    for handle in _HELD:
        os.close(handle)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


def write_bytes(path: P, content: bytes) -> P:
    """Write a file so that a reader sees the old content or the new, whatever is interrupted.

    The bytes go to a temporary file in the same folder, reach the disk, and then take the name; the
    name reaches the disk, too.

    Raises:
        FileTypeError: The path is a link, a folder, a pipe, a socket or a device.
    """
    return write_parts(path, (content,))


def write_parts(path: P, parts: Iterable[bytes | memoryview]) -> P:
    """`write_bytes` for what need not be in memory at once."""
    if isinstance(path, ObjectPath):
        with TemporaryDirectory() as folder:
            path.upload(write_parts(Path(folder) / "object", parts))
        return path
    with _aside(path, parts) as temporary:
        temporary.replace(path)
    sync_folder(path.parent)
    return path


def write_new(path: AnyPath | str, content: bytes) -> bool:
    """Write a file unless there is one of that name; return whether it was written.

    Of several processes that do so at the same time one succeeds.
    """
    if isinstance(path, ObjectPath):
        return path.write_new(content)
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

    The file is locked until it has its final name, so that `_sweep` in another process keeps it.
    """
    check_target(path)
    make_folder(path.parent)
    _sweep(path.parent.absolute())
    temporary, file = _open_temporary(path.parent)
    try:
        with file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:  # an open file cannot be renamed there
                file.close()
            yield temporary
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a handle: the disk is full
            error.filename = str(path)
        raise


def _open_temporary(folder: Path) -> tuple[Path, BinaryIO]:
    """Create a temporary file in a folder and lock it.

    A `_sweep` between the two removes the file, which then has no name, and another one is created.
    """
    while True:
        temporary = folder / f".attractor-{uuid4().hex}"
        file = temporary.open("xb")
        if fcntl is None:
            return temporary, file
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()


def write_text(path: P, content: str) -> P:
    """`write_bytes` for text, in UTF-8."""
    return write_bytes(path, content.encode())


def write_json(path: P, content: Any) -> P:
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


def names_in(folder: AnyPath) -> set[str]:
    """Return the names of the files and folders in a folder; none if it does not exist."""
    if isinstance(folder, ObjectPath):
        return folder.names()
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def remove_folder(folder: AnyPath, first: str) -> None:
    """Remove a folder and what is in it, a file that makes it valid first; errors are ignored.

    A link is removed, and not its target, which belongs to somebody else.
    """
    with suppress(OSError):
        if isinstance(folder, Path) and folder.is_symlink():
            folder.unlink()
            return
        (folder / first).unlink(missing_ok=True)
        if isinstance(folder, ObjectPath):
            folder.remove_all()
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)


def discard_folder(folder: Path, *, wait: float | None = None) -> None:
    """Remove a folder, if it exists, so that an interruption leaves all of it or none.

    It is renamed first. What earlier interruptions have left under such a name is removed as well.

    Raises:
        FolderLockedError: Another process is still writing to the folder after `wait` seconds.
    """
    if folder.is_dir():
        with lock_folder(folder, wait=wait), suppress(FileNotFoundError):
            folder.rename(folder.with_name(f".{folder.name}.{uuid4().hex}"))
    left = re.compile(re.escape(f".{folder.name}.") + "[0-9a-f]{32}")
    for name in names_in(folder.parent):
        if left.fullmatch(name):
            shutil.rmtree(folder.parent / name, ignore_errors=True)


@lru_cache(maxsize=256)
def _sweep(folder: Path) -> None:
    """Remove temporary files of killed processes, once per folder and process.

    A temporary file that a living process is writing is locked and stays.
    """
    for name in names_in(folder):
        if TEMPORARY.fullmatch(name):
            with suppress(FileNotFoundError, BlockingIOError, PermissionError, FileTypeError):
                _remove_unless_locked(folder / name)


def _remove_unless_locked(path: Path) -> None:
    if fcntl is None:
        path.unlink()
        return
    with open_plain(path) as file:
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
