"""Limits on what is read and on what is allocated.

Files of other people are read up to a size and a depth. Arrays whose size a user passes as a number are
estimated before they are allocated, so that a typing error ends in a message, not in a killed process.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

import torch

from attractor.storage.files import check_source, open_plain
from attractor.storage.objects import AnyPath, ObjectPath, path_of

LARGEST_JSON = 2**24  # bytes; Python's objects take up to 25 times as much
DEEPEST_JSON = 64  # levels of lists and objects; recursive functions fail beyond about 900
STEP_BYTES = 64  # bytes per step for its time and its size, as tensors and as numbers
UNCHECKED = 2**28  # bytes; smaller arrays are not checked, so that short calls stay fast


def parse_json(raw: bytes | str, source: AnyPath | str, *, constants: bool = False) -> Any:
    """Return the content of a JSON document.

    Args:
        source: File or argument that holds it, for the message.
        constants: Whether NaN, Infinity and -Infinity are read, which JSON does not have.

    Raises:
        ValueError: It is not JSON, an object has a key twice, or it is nested more than `DEEPEST_JSON`
            levels deep.
    """
    deep = f"{source} has more than {DEEPEST_JSON} levels of nested JSON; write it with fewer levels"
    try:
        content = json.loads(
            raw, object_pairs_hook=_without_duplicates, parse_constant=float if constants else _refused
        )
    except RecursionError:
        raise ValueError(deep) from None
    except ValueError as error:
        raise ValueError(f"{source} cannot be read as JSON: {error}") from None
    level, depth = [content], 0
    while level := [child for value in level for child in _children(value)]:
        depth += 1
        if depth > DEEPEST_JSON:
            raise ValueError(deep)
    return content


def read_json(path: AnyPath | str, limit: int = LARGEST_JSON, *, link: bool = False) -> Any:
    """Return the content of a JSON file of at most `limit` bytes.

    Args:
        link: Whether the path may be a symbolic link to a plain file.

    Raises:
        FileNotFoundError: There is no such file.
        FileTypeError: It is not a plain file.
        ValueError: It is longer, or is not JSON; see `parse_json`.
    """
    return parse_json(read_bytes(path, limit, link=link), path)


def read_json_lines(path: AnyPath | str, limit: int = LARGEST_JSON) -> list[Any]:
    """Return the content of a file with one JSON document per line; see `read_json`."""
    return [parse_json(line, path) for line in read_bytes(path, limit).splitlines() if line]


def read_bytes(path: AnyPath | str, limit: int, *, link: bool = False) -> bytes:
    """Return the bytes of a plain file, of which there are at most `limit`."""
    check_size(path, limit, link=link)
    with open_plain(path, link=link) as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:  # the file has grown since
        raise ValueError(f"{path} has more than the {limit:,} bytes that are read")
    return raw


def check_size(path: AnyPath | str, limit: int, *, link: bool = False) -> None:
    """Raise unless a path is a plain file of at most `limit` bytes; see `read_json`."""
    size = check_source(path, link=link)
    if size > limit:
        raise ValueError(
            f"{path} has {size:,} bytes, and at most {limit:,} are read; it is damaged, or not "
            "a file of attractor"
        )


def check_folder(name: str, folder: AnyPath | str) -> None:
    """Raise if a folder for results cannot be written to, before anything is computed.

    Nothing is left behind. If the folder does not exist, the nearest existing parent is tested.

    Args:
        name: Name of the argument, for the message.

    Raises:
        ValueError: It cannot be written to, or the disk is full.
    """
    folder = path_of(folder)
    if isinstance(folder, ObjectPath):
        _check_store(name, folder)
        return
    place = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    if not place.is_dir():
        kind = "a link to nothing" if place.is_symlink() and not place.exists() else "a file"
        raise ValueError(f"{name} {folder}: {place} is {kind}; give another folder")
    try:
        with TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"{name} {folder}: {place} cannot be written to ({reason}); give another folder"
        ) from None


def _check_store(name: str, folder: ObjectPath) -> None:
    """Do what `check_folder` does for a folder in an object store."""
    trial = folder / f".attractor-{uuid4().hex}"
    try:
        trial.write_bytes(b"")
        trial.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"{name} {folder} cannot be written to ({error}); give another folder"
        ) from None


def check_memory(what: str, size: float, advice: str, device: torch.device | str | None = None) -> None:
    """Raise if something does not fit into the memory that is free now.

    Args:
        what: Subject of the message, such as "states [101, 10, 3]".
        size: Number of bytes that it takes.
        advice: What to do about it.
        device: Where it is allocated; None: in the memory of this machine.

    Raises:
        ValueError: It does not fit. The message names the size, the memory and the advice.
    """
    if size <= UNCHECKED:
        return
    free = free_memory(device)
    if free is not None and size > free:
        raise ValueError(
            f"{what} take {_gibibytes(size)}, and {_gibibytes(free)} of memory are free; {advice}"
        )


def free_memory(device: torch.device | str | None = None) -> int | None:
    """Return the number of bytes that can be allocated on a device, or None if it is unknown."""
    kind = torch.device("cpu" if device is None else device)
    if kind.type == "cuda":
        kept = torch.cuda.memory_reserved(kind) - torch.cuda.memory_allocated(kind)
        return torch.cuda.mem_get_info(kind)[0] + kept
    if kind.type != "cpu":
        return None
    sizes = []
    with suppress(OSError, KeyError):
        sizes.append(1024 * _table("/proc/meminfo")["MemAvailable:"])
    if not sizes:
        with suppress(AttributeError, OSError, ValueError):
            sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit, used in (("memory.max", "anon"), ("memory/memory.limit_in_bytes", "rss")):
        with suppress(OSError, ValueError, KeyError):  # "max" where a container has no limit
            place = Path("/sys/fs/cgroup") / limit
            # Cached files count as used memory, too, but make room for allocations.
            sizes.append(int(place.read_text()) - _table(place.with_name("memory.stat"))[used])
    return max(0, min(sizes)) if sizes else None


def _table(path: Path | str) -> dict[str, int]:
    """Return the names and numbers of a file in /proc or /sys."""
    rows = [line.split() for line in Path(path).read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in content if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice[:40]!r} twice")
    return content


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _gibibytes(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
