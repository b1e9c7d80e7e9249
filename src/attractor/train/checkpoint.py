"""The checkpoint format of the whole library: safetensors, JSON and SHA-256, without pickle.

A checkpoint is a folder of three files: `tensors.safetensors`, `config.json`, and `manifest.json`,
which holds the format's version, the kind of the saved object, size and hash of the two others and a
hash of itself. Any damage raises `CheckpointError`; sizes are checked before memory is allocated.

`save` writes the new files to a folder with a unique name, ``.next-`` and 32 digits. Renaming this
folder to ``.next`` is the atomic switch: from then on the new checkpoint is read. Its files then replace
the old ones, the manifest last. A lock on the folder admits one writer at a time; reading takes no lock.
If saving is interrupted at any point, the folder holds the old checkpoint or the new one. In an object
store (`attractor.train.checkpoint_objects`) that holds, too, without locks.
"""

import os
import re
import shutil
import stat
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from torch import Tensor, nn

from attractor.storage import schema
from attractor.storage.files import (
    LOCK,
    LOCK_SECONDS,
    check_target,
    lock_folder,
    make_folder,
    sync_folder,
)
from attractor.storage.objects import AnyPath, ObjectPath, path_of
from attractor.storage.schema import ADVICE
from attractor.storage.tensor_specs import ANY, check_tensors, specs_of
from attractor.train import checkpoint_objects
from attractor.train.checkpoint_files import (
    FILES,
    FORMAT,
    LARGEST_MANIFEST,
    MANIFEST,
    read_contents,
    write_files,
)
from attractor.train.tensors import CheckpointError, open_file, read_json

__all__ = ["FILES", "FORMAT", "MANIFEST", "CheckpointError", "check", "fill", "load", "save", "settle"]

DEPTHS = ("depth", "depths", "layers")  # options that are numbers of modules
NEXT = ".next"
PACKED = schema.record(dict.fromkeys((*FILES, MANIFEST), schema.text(2**32)))  # of `packed`
STAGING = re.compile(r"\.next-[0-9a-f]{32}")  # a checkpoint that is being written


def save(
    folder: AnyPath | str, kind: str, tensors: dict[str, Tensor], config: dict[str, Any]
) -> AnyPath:
    """Write a checkpoint. It replaces an older one in the same folder once it is complete.

    If several processes save to one folder, one writes at a time and the others wait.

    Args:
        folder: the folder of the checkpoint; a URL such as "s3://bucket/solver" names one in an object
            store.
        kind: the kind of the saved object, such as "hybrid solver".
        tensors: the tensors by name.
        config: everything else, in values that JSON can represent.

    Raises:
        ValueError: the folder holds other files, or a checkpoint of another kind, or the configuration
            is too long to be read again.
        FileTypeError: a file to be replaced is a link, a pipe or a device.
        FolderLockedError: another process has been writing to the folder for `LOCK_SECONDS`.
    """
    folder = path_of(folder)
    if isinstance(folder, ObjectPath):
        checkpoint_objects.save(folder, kind, tensors, config)
        return folder
    existed = folder.is_dir()
    with lock_folder(folder) as locked:
        try:
            _check_contents(folder, kind, locked)
            _write(folder, kind, tensors, config)
            _settle(folder, locked)
        except BaseException:
            if not existed:
                with suppress(OSError):  # the folder is not empty
                    folder.rmdir()
            raise
    return folder


def _check_contents(folder: Path, kind: str, locked: bool) -> None:
    """Raise unless a checkpoint of that kind may be written to a folder."""
    others = _foreign(_names(folder))
    if others:
        raise ValueError(f"{folder} holds {sorted(others)}; a checkpoint needs a folder of its own")
    for name in (*FILES, MANIFEST):
        check_target(folder / name)
    _settle(folder, locked)
    present = _kind_in(folder)
    if present not in (None, kind):
        raise ValueError(
            f"{folder} holds a {present!s:.60}, and a {kind} must not replace it; give another folder"
        )


def _write(folder: Path, kind: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a complete checkpoint beside the one in a folder, and switch to it."""
    new = folder / f"{NEXT}-{uuid4().hex}"
    try:
        make_folder(new)
        write_files(new, kind, tensors, config)
        new.rename(folder / NEXT)
        try:
            sync_folder(folder)
        except BaseException:  # the old checkpoint stays
            (folder / NEXT).rename(new)
            raise
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def load(folder: AnyPath | str, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and configuration of a checkpoint after checking the hashes of all files.

    While another process saves to the folder, this is the old checkpoint or the new one.

    Raises:
        CheckpointError: the folder holds no checkpoint, one of another kind, or a damaged one.
    """
    folder = path_of(folder)
    with _open(folder) as files:
        return read_contents(folder, kind, files)


def packed(folder: AnyPath | str) -> dict[str, str]:
    """Return the three files of one checkpoint by name, unchecked, in base64; see `unpacked`."""
    with _open(path_of(folder)) as files:
        return {name: b64encode(files[name].readall()).decode() for name in sorted(files)}


@contextmanager
def unpacked(files: Any, source: Any) -> Iterator[Path]:
    """Yield a temporary folder with the files of a checkpoint that `packed` has returned.

    Args:
        files: the files by name.
        source: the origin of the files, for error messages.

    Raises:
        CheckpointError: the files are not those of a checkpoint.
    """
    schema.check(files, PACKED, source, CheckpointError)
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            try:
                (Path(folder) / name).write_bytes(b64decode(content, validate=True))
            except ValueError as error:
                raise CheckpointError(f"{source}: {name} is not in base64 ({error}). {ADVICE}") from None
        yield Path(folder)


def _open(folder: AnyPath) -> AbstractContextManager[dict[str, FileIO]]:
    """Open the three files of one checkpoint."""
    if isinstance(folder, ObjectPath):
        return checkpoint_objects.open_files(folder)
    return _open_local(folder)


@contextmanager
def _open_local(folder: Path) -> Iterator[dict[str, FileIO]]:
    """Open the three files of one checkpoint, also while another process replaces them.

    The files belong to one checkpoint if no file of the folder was replaced while they were opened;
    otherwise they are opened again.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of a checkpoint")
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        with ExitStack() as stack:
            files, problem, before = {}, None, _state(folder)
            try:
                _check_present(folder)
                for name in (MANIFEST, *FILES):
                    files[name] = stack.enter_context(open_file(_path_of(folder, name), link=False))
            except CheckpointError as error:
                problem = error
            except OSError as error:
                problem = CheckpointError(f"{folder} cannot be read: {error.strerror}")
            if _state(folder) == before:
                if problem is not None:
                    raise problem
                yield files
                return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{folder} was replaced repeatedly for {LOCK_SECONDS:g} s while it was read; load it "
                "when the processes that save to it have ended"
            )
        time.sleep(0.001)


def _state(folder: Path) -> list[tuple[int, ...] | None]:
    """Return what identifies the files of a checkpoint; it changes if any file is replaced."""
    entries: list[tuple[int, ...] | None] = []
    for path in (
        folder,
        *(folder / place / name for place in (NEXT, ".") for name in (*FILES, MANIFEST)),
    ):
        try:
            info = os.lstat(path)
        except OSError:
            entries.append(None)
        else:
            entries.append((info.st_dev, info.st_ino, *((info.st_ctime_ns,) if path != folder else ())))
    return entries


def _check_present(folder: Path) -> None:
    """Raise unless a folder holds the files of a checkpoint, and no others."""
    if not os.path.lexists(_path_of(folder, MANIFEST)):
        raise CheckpointError(
            f"{folder} has no manifest.json: it is no checkpoint, or writing it was interrupted"
        )
    names = _names(folder)
    names |= {name for name in FILES if os.path.lexists(_path_of(folder, name))}
    if _foreign(names) or not set(FILES) <= names:
        raise CheckpointError(
            f"{folder} holds {sorted(_foreign(names) | (names & set(FILES)))}; a checkpoint holds "
            f"{sorted(FILES)}"
        )


def fill(module: nn.Module, tensors: Mapping[str, Tensor], source: Any, advice: str = "") -> None:
    """Load tensors into a module. Requires: all names, shapes and dtypes are those of the module.

    Args:
        module: the module.
        tensors: the tensors by name.
        source: the origin of the tensors, for error messages.
        advice: what to do about an error, for error messages.

    Raises:
        CheckpointError: the tensors do not fit the module, which is unchanged.
    """
    check(module, tensors, source, advice)
    module.load_state_dict(dict(tensors))


def completed(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, completed by values of the module that states of older versions lack.

    Modules list the names of such values in `may_lack`.
    """
    result = dict(tensors)
    for name, part in module.named_modules():
        for key in getattr(part, "may_lack", ()):
            result.setdefault(f"{name}.{key}".lstrip("."), getattr(part, key).clone())
    return result


def check_sizes(
    options: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Any, allowed: int = 0
) -> None:
    """Raise if a size in a configuration exceeds both the saved numbers and `allowed`.

    Call this before a module is made from the configuration: a depth of a million takes long even on the
    meta device.
    """
    numbers = max(allowed, sum(value.numel() for value in tensors.values()))
    for name, value in options.items():
        limit = len(tensors) if name in DEPTHS else numbers
        for size in value if isinstance(value, list | tuple) else (value,):
            if isinstance(size, int) and size > limit:
                raise CheckpointError(
                    f"{source}: {name} = {size!r:.20} is more than the saved tensors allow"
                )


def check(module: nn.Module, tensors: Mapping[str, Tensor], source: Any, advice: str = "") -> None:
    """Run the checks of `fill`; the module may be on the meta device, where it takes no memory."""
    description = f"{source} is of another model than this {type(module).__name__}"
    advice = f"{advice[0].upper()}{advice[1:]}." if advice else ADVICE
    specs = specs_of(module)
    shapes = {name: replace(spec, values=ANY) for name, spec in specs.items()}
    check_tensors(tensors, shapes, description, CheckpointError, advice=advice)
    check_tensors(tensors, specs, source, CheckpointError, advice=advice)


def _path_of(folder: Path, name: str) -> Path:
    """Return the path of a file of the checkpoint: in `.next` if the switch was interrupted."""
    new = folder / NEXT
    there = _has_next(folder) and os.path.lexists(new / MANIFEST) and os.path.lexists(new / name)
    return new / name if there else folder / name


def _has_next(folder: Path) -> bool:
    """Return whether there is a folder `.next`.

    Raises:
        CheckpointError: `.next` is a link to a folder, or no folder.
    """
    try:
        mode = os.lstat(folder / NEXT).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise CheckpointError(
            f"{folder / NEXT} is a link or a file, which a checkpoint never contains; remove it if you "
            "trust the rest of the folder"
        )
    return True


def settle(folder: AnyPath) -> None:
    """Move a complete checkpoint from `.next` to its place, and remove incomplete ones.

    Raises:
        FolderLockedError: Another process is writing to the folder.
    """
    if isinstance(folder, ObjectPath):
        return
    if any(name.startswith(NEXT) for name in _names(folder)):
        with lock_folder(folder, wait=0.0) as locked:
            _settle(folder, locked)


def _settle(folder: Path, locked: bool) -> None:
    """Do what `settle` does; files of other writers are removed only if the folder is locked."""
    new = folder / NEXT
    if _has_next(folder):
        if os.path.lexists(new / MANIFEST):
            for name in FILES:
                if os.path.lexists(new / name):
                    (new / name).replace(folder / name)
            sync_folder(folder)
            (new / MANIFEST).replace(folder / MANIFEST)
            sync_folder(folder)
        shutil.rmtree(new)
    for name in _names(folder) if locked else ():
        if STAGING.fullmatch(name):
            shutil.rmtree(folder / name, ignore_errors=True)


def _kind_in(folder: Path) -> Any:
    """Return the kind of checkpoint in a folder; None if there is none that can be read."""
    try:
        return read_json(folder / MANIFEST, LARGEST_MANIFEST, link=False)[0]["kind"]
    except (CheckpointError, KeyError, TypeError):
        return None


def _names(folder: Path) -> set[str]:
    with os.scandir(folder) as entries:
        return {entry.name for _, entry in zip(range(100), entries)}


def _foreign(names: set[str]) -> set[str]:
    """Return the names that are not those of a checkpoint's files."""
    return {n for n in names - {*FILES, MANIFEST, NEXT, LOCK} if not STAGING.fullmatch(n)}
