"""One checkpoint format for all of the library: safetensors, JSON, SHA-256; no pickle.

A checkpoint is a folder of three files: `tensors.safetensors`, `config.json`, and `manifest.json`,
which holds the format's version, the kind of thing saved, the hash of the two others and a hash of
itself. Files are written whole or not at all, the manifest last. Whatever is wrong with a folder
raises `CheckpointError`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from attractor.core.files import json_bytes, write_bytes, write_json

FORMAT = 1
FILES = ("tensors.safetensors", "config.json")


class CheckpointError(ValueError):
    """A checkpoint that cannot be trusted or understood, and why."""


def save(folder: Path | str, kind: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write a checkpoint; an older one in the same folder is replaced."""
    from safetensors.torch import save as to_bytes

    folder = Path(folder)
    (folder / "manifest.json").unlink(missing_ok=True)  # until the end there is no checkpoint here
    write_bytes(folder / FILES[0], to_bytes({k: v.detach().contiguous() for k, v in tensors.items()}))
    write_json(folder / FILES[1], config)
    manifest = {"format": FORMAT, "kind": kind, "sha256": {f: _hash(folder / f) for f in FILES}}
    write_json(folder / "manifest.json", {**manifest, "own": _own_hash(manifest)})
    return folder


def load(folder: Path | str, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration of a checkpoint of that kind, after checking every byte."""
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; a checkpoint is one")
    try:
        raw = (folder / "manifest.json").read_bytes()
        manifest = json.loads(raw)
        own = manifest.pop("own")
        version, found, hashes = manifest["format"], manifest["kind"], manifest["sha256"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no manifest.json: no checkpoint, or one whose writing was interrupted"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}/manifest.json is damaged ({type(error).__name__})") from None
    if own != _own_hash(manifest) or raw != json_bytes({**manifest, "own": own}):
        raise CheckpointError(f"{folder}/manifest.json is damaged: it does not match its own hash")
    if version != FORMAT:
        raise CheckpointError(f"{folder} has format {version}; this version of attractor reads {FORMAT}")
    if found != kind:
        raise CheckpointError(f"{folder} holds a {found}, not a {kind}")
    names = {path.name for path in folder.iterdir()} - {"manifest.json"}
    if names != set(hashes) or set(hashes) != set(FILES):
        raise CheckpointError(f"{folder} holds {sorted(names)}; a checkpoint holds {sorted(FILES)}")
    for name in FILES:
        if _hash(folder / name) != hashes[name]:
            raise CheckpointError(f"{folder}/{name} is damaged: it does not match its hash")
    try:
        config = json.loads((folder / FILES[1]).read_bytes())
        return from_bytes((folder / FILES[0]).read_bytes()), config
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_hash(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
