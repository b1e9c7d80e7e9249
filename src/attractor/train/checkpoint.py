"""One checkpoint format for all of the library: safetensors, JSON, SHA-256; no pickle.

A checkpoint is a folder of three files: `tensors.safetensors`, `config.json`, and `manifest.json`,
which holds the format's version, the kind of thing saved, size and hash of the two others and a hash of
itself. A new one is written beside the old one, in `.next`, and takes its place when it is whole and on
the disk: whatever is interrupted, the folder holds the old one or the new. Whatever is wrong with a
folder raises `CheckpointError`; its sizes are checked before memory is taken.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attractor.core.files import json_bytes, make_folder, sync_folder, write_bytes
from attractor.train.tensors import (
    CheckpointError,
    json_limit,
    plain_size,
    read_hashed,
    read_json,
    write_tensors,
)

__all__ = ["FORMAT", "CheckpointError", "check", "fill", "load", "save", "settle"]

FORMAT = 2
READ = (1, 2)  # 1 has no sizes
DEPTHS = ("depth", "depths", "layers")  # options that count modules
FILES = ("tensors.safetensors", "config.json")
MANIFEST, NEXT = "manifest.json", ".next"
LARGEST_MANIFEST = 65_536


def save(folder: Path | str, kind: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write a checkpoint; an older one in the same folder is replaced, when this one is whole.

    Raises:
        ValueError: the folder holds other things, or a checkpoint of another kind, or the configuration
            is too long to be read again.
    """
    folder = Path(folder)
    others = _names(folder) - {*FILES, MANIFEST, NEXT} if folder.is_dir() else set()
    if others:
        raise ValueError(f"{folder} holds {sorted(others)}; a checkpoint needs a folder of its own")
    settle(folder)
    known = _kind_in(folder)
    if known not in (None, kind):
        raise ValueError(
            f"{folder} holds a {known!s:.60}, which a {kind} is not to replace; give another folder"
        )
    new, text = folder / NEXT, json_bytes(config)
    existed = folder.is_dir()
    try:
        make_folder(new)
        digest, size = write_tensors(new / FILES[0], tensors)
        if len(text) > json_limit(size):
            raise ValueError(
                f"the configuration takes {len(text):,} bytes, and {json_limit(size):,} can be read; "
                "put what is long into tensors"
            )
        write_bytes(new / FILES[1], text)
        manifest = {
            "format": FORMAT, "kind": kind,
            "bytes": {FILES[0]: size, FILES[1]: len(text)},
            "sha256": {FILES[0]: digest, FILES[1]: hashlib.sha256(text).hexdigest()},
        }  # fmt: skip
        write_bytes(new / MANIFEST, json_bytes({**manifest, "own": _own_hash(manifest)}))
    except BaseException:
        shutil.rmtree(new if existed else folder, ignore_errors=True)
        raise
    settle(folder)
    return folder


def load(folder: Path | str, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration of a checkpoint of that kind, after checking every byte."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; a checkpoint is one")
    try:
        names = _names(folder)
        places = {name: _place(folder, name) for name in (*FILES, MANIFEST)}
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    if not os.path.lexists(places[MANIFEST]):
        raise CheckpointError(
            f"{folder} has no manifest.json: no checkpoint, or one whose writing was interrupted"
        )
    manifest, raw = read_json(places[MANIFEST], LARGEST_MANIFEST, link=False)
    try:
        own = manifest.pop("own")
        version, found, hashes = manifest["format"], manifest["kind"], manifest["sha256"]
        sizes = manifest["bytes"] if version == FORMAT else {}
        same = own == _own_hash(manifest) and raw == json_bytes({**manifest, "own": own})
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: it lacks what it must hold") from None
    if not same:
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: it does not match its own hash")
    if version not in READ:
        raise CheckpointError(
            f"{folder} has format {version!r:.40}; this version of attractor reads {FORMAT} and before"
        )
    if found != kind:
        raise CheckpointError(f"{folder} holds a {found!s:.60}, not a {kind}")
    names |= {name for name in FILES if places[name].parent != folder}
    names -= {MANIFEST, NEXT}
    if names != set(FILES):
        raise CheckpointError(f"{folder} holds {sorted(names)}; a checkpoint holds {sorted(FILES)}")
    if any(not isinstance(x, dict) or set(x) != set(FILES) for x in (hashes, sizes or hashes)):
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: it names other files than {FILES}")
    actual = {name: plain_size(places[name]) for name in FILES}
    for name in FILES:
        if sizes and actual[name] != sizes[name]:
            told = f"it has {actual[name]:,} bytes, not {sizes[name]!r:.20}"
            raise CheckpointError(f"{folder}/{name} is damaged: {told}")
    config, raw = read_json(places[FILES[1]], json_limit(actual[FILES[0]]), link=False)
    if hashlib.sha256(raw).hexdigest() != hashes[FILES[1]]:
        raise CheckpointError(f"{folder}/{FILES[1]} is damaged: it does not match its hash")
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder}/{FILES[1]} is no configuration: it is not a JSON object")
    tensors, digest = read_hashed(places[FILES[0]], link=False)
    if digest != hashes[FILES[0]]:
        raise CheckpointError(f"{folder}/{FILES[0]} is damaged: it does not match its hash")
    return tensors, config


def fill(module: nn.Module, tensors: Mapping[str, Tensor], source: Any, advice: str = "") -> None:
    """Load tensors into a module whose names, shapes and dtypes they must have, all of them.

    Args:
        source: where they come from, for the message; advice: what to do about it.

    Raises:
        CheckpointError: they are not this module's, which is then as it was.
    """
    check(module, tensors, source, advice)
    module.load_state_dict(dict(tensors))


def completed(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors, and the module's own of what states of older versions lack: what its parts name in
    `may_lack`."""
    found = dict(tensors)
    for name, part in module.named_modules():
        for key in getattr(part, "may_lack", ()):
            found.setdefault(f"{name}.{key}".lstrip("."), getattr(part, key).clone())
    return found


def check_sizes(
    options: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Any, allowed: int = 0
) -> None:
    """Raise if a configuration has a size that is beyond what is saved with it, and beyond `allowed`.

    Before a module is made of it, even on the meta device, where a depth of a million takes its time.
    """
    numbers = max(allowed, sum(value.numel() for value in tensors.values()))
    for name, value in options.items():
        most = len(tensors) if name in DEPTHS else numbers
        for size in value if isinstance(value, list | tuple) else (value,):
            if isinstance(size, int) and size > most:
                raise CheckpointError(f"{source}: {name} = {size!r:.20} is more than was saved with it")


def check(module: nn.Module, tensors: Mapping[str, Tensor], source: Any, advice: str = "") -> None:
    """What `fill` checks; the module may be on the meta device, where it takes no memory."""
    own = module.state_dict()
    wrong = [f"it lacks {_few(sorted(own.keys() - tensors.keys()))}"] if own.keys() - tensors else []
    if tensors.keys() - own:
        wrong.append(f"it also has {_few(sorted(tensors.keys() - own.keys()))}")
    other = [
        f"{name} is {_kind(tensors[name])}, not {_kind(value)}"
        for name, value in own.items()
        if name in tensors and _kind(tensors[name]) != _kind(value)
    ]
    if other:
        wrong.append(_few(other))
    if wrong:
        told = f"{source} is of another model than this {type(module).__name__}"
        raise CheckpointError(f"{told}; {advice + '; ' if advice else ''}{'; '.join(wrong)}")


def _kind(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name[:80] for name in names[:3]) + more


def _place(folder: Path, name: str) -> Path:
    """Where a file of the checkpoint is: in `.next` if it was interrupted on its way to its place."""
    new = folder / NEXT
    return new / name if (new / MANIFEST).exists() and (new / name).exists() else folder / name


def settle(folder: Path) -> None:
    """Let what lies whole in `.next` take its place, the manifest last; remove what is not whole."""
    new = folder / NEXT
    if not new.is_dir():
        return
    if (new / MANIFEST).exists():
        for name in FILES:
            if (new / name).exists():
                (new / name).replace(folder / name)
        sync_folder(folder)
        (new / MANIFEST).replace(folder / MANIFEST)
        sync_folder(folder)
    shutil.rmtree(new)


def _kind_in(folder: Path) -> Any:
    """The kind of checkpoint that a folder holds; None if there is none, or none that can be read."""
    try:
        return read_json(folder / MANIFEST, LARGEST_MANIFEST, link=False)[0]["kind"]
    except (CheckpointError, KeyError, TypeError):
        return None


def _names(folder: Path) -> set[str]:
    with os.scandir(folder) as entries:
        return {entry.name for _, entry in zip(range(100), entries)}


def _own_hash(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
