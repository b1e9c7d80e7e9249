"""Checkpoints in object stores.

The manifest is the object `manifest.json`. It names the place of the two other files, which no other
save has used: 32 digits and a slash. So writing the manifest, one object, is the atomic switch, and
whoever saves or loads at the same time has the old checkpoint or the new one. The objects of the old one
are removed afterwards; a reader that misses them reads the manifest again. Objects without a manifest,
of a process that was killed while it saved, are removed by the first save after a day.

A checkpoint that another program has copied from a folder to a store, file by file, is read as well.
"""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from torch import Tensor

from attractor.storage.files import LOCK_SECONDS
from attractor.storage.objects import ObjectPath
from attractor.train.checkpoint_files import (
    FILES,
    LARGEST_MANIFEST,
    MANIFEST,
    read_manifest,
    write_files,
)
from attractor.train.tensors import CheckpointError

OBJECTS = re.compile("[0-9a-f]{32}")  # the place of the files of one save
ABANDONED = timedelta(days=1)  # age of objects without a manifest that are removed


def save(folder: ObjectPath, kind: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a checkpoint, which replaces an older one of the same kind; see `checkpoint.save`.

    If several processes save at the same time, the last one to finish replaces the others.
    """
    foreign = {x for x in folder.names() - {*FILES, MANIFEST} if not OBJECTS.fullmatch(x)}
    if foreign:
        raise ValueError(f"{folder} holds {sorted(foreign)}; a checkpoint needs a folder of its own")
    previous = _previous(folder)
    if previous is not None and previous["kind"] != kind:
        raise ValueError(
            f"{folder} holds a {previous['kind']}, and a {kind} must not replace it; give another folder"
        )
    name = uuid4().hex
    with TemporaryDirectory() as local:
        new = Path(local)
        write_files(new, kind, tensors, config, objects=name)
        manifest = (new / MANIFEST).read_bytes()
        try:
            for file in FILES:
                (folder / name / file).upload(new / file)
            (folder / MANIFEST).write_bytes(manifest)
        except BaseException:
            with suppress(
                OSError
            ):  # the manifest may have arrived although its writer was told otherwise
                if (folder / MANIFEST).read_bytes() != manifest:
                    _remove(folder, name)
            raise
    _remove(folder, None if previous is None else previous.get("objects", ""))
    _sweep(folder, name)


@contextmanager
def open_files(folder: ObjectPath) -> Iterator[dict[str, FileIO]]:
    """Yield temporary copies of the three files of one checkpoint, open for reading."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        with ExitStack() as stack:
            try:
                raw = (folder / MANIFEST).read_bytes(LARGEST_MANIFEST)
                file = stack.enter_context((folder / MANIFEST).open())
            except FileNotFoundError:
                raise CheckpointError(
                    f"{folder} has no {MANIFEST}: it is no checkpoint, or writing it was interrupted"
                ) from None
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{folder} cannot be read: {error}") from None
            manifest = read_manifest(file, folder)
            file.seek(0)
            files = {MANIFEST: file}
            try:
                for name in FILES:
                    path = _place(folder, manifest) / name
                    size = manifest.get("bytes", {}).get(name)
                    if size is not None and path.size() != size:  # before it is transferred
                        reason = f"it has {path.size():,} bytes, not {size:,}"
                        raise CheckpointError(f"{path} is damaged: {reason}")
                    files[name] = stack.enter_context(path.open())
            except FileNotFoundError:
                if _has_changed(folder, raw) and time.monotonic() < deadline:
                    continue
                raise CheckpointError(
                    f"{folder} lacks {name}; a checkpoint has {sorted(FILES)}"
                ) from None
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be read: {error}") from None
            yield files
            return


def _has_changed(folder: ObjectPath, manifest: bytes) -> bool:
    """Return whether another process has replaced the manifest."""
    with suppress(OSError, ValueError):
        return (folder / MANIFEST).read_bytes(LARGEST_MANIFEST) != manifest
    return False


def _previous(folder: ObjectPath) -> dict[str, Any] | None:
    """Return the manifest in a folder; None if there is none, or one that cannot be read."""
    try:
        with (folder / MANIFEST).open() as file:
            return read_manifest(file, folder)
    except (FileNotFoundError, CheckpointError):
        return None


def _place(folder: ObjectPath, manifest: dict[str, Any]) -> ObjectPath:
    """Return the place of the files of a checkpoint beside its manifest."""
    name = manifest.get("objects", "")
    if name and not OBJECTS.fullmatch(name):
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: objects = {name!r} are not 32 digits")
    return folder / name if name else folder


def _remove(folder: ObjectPath, name: str | None) -> None:
    """Remove the files of one save, as far as that is possible: a checkpoint does not depend on it."""
    if name is None or (name and not OBJECTS.fullmatch(name)):
        return
    with suppress(OSError):
        if name:
            (folder / name).remove_all()
        else:
            for file in FILES:
                (folder / file).unlink(missing_ok=True)


def _sweep(folder: ObjectPath, current: str) -> None:
    """Remove the files of saves that were interrupted long ago."""
    for name in folder.names() - {current}:
        if OBJECTS.fullmatch(name):
            with suppress(OSError):
                files = [folder / name / file for file in (folder / name).names()]
                if all(datetime.now(UTC) - file.modified() > ABANDONED for file in files):
                    _remove(folder, name)
