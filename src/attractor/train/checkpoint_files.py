"""The three files of a checkpoint: safetensors, JSON and a manifest with their hashes.

`attractor.train.checkpoint` puts them into a folder, or into an object store.
"""

import hashlib
import json
import os
from io import FileIO
from pathlib import Path
from typing import Any

from torch import Tensor

from attractor.storage import schema
from attractor.storage.files import json_bytes, write_bytes
from attractor.storage.objects import AnyPath
from attractor.storage.schema import Schema
from attractor.train.tensors import CheckpointError, json_limit, json_of, tensors_of, write_tensors

FORMAT = 2
READ = (1, 2)  # format 1 has no sizes
FILES = ("tensors.safetensors", "config.json")
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 65_536
HASHED: dict[str, Schema] = {
    "format": schema.number(1, FORMAT, whole=True),
    "kind": schema.text(60),
    "sha256": schema.record(dict.fromkeys(FILES, schema.text(64))),
    "own": schema.text(64),
}
SIZED = HASHED | {"bytes": schema.record(dict.fromkeys(FILES, schema.number(0, whole=True)))}
# Schemas of a manifest by its format. In an object store it names the place of the other files.
SCHEMAS = {1: schema.record(HASHED), FORMAT: schema.record(SIZED, {"objects": schema.text(32)})}


def write_files(
    folder: Path, kind: str, tensors: dict[str, Tensor], config: dict[str, Any], **further: str
) -> None:
    """Write the three files to a folder, the manifest last.

    Args:
        further: Further entries of the manifest.

    Raises:
        ValueError: The configuration is too long to be read again.
    """
    text = json_bytes(config)
    digest, size = write_tensors(folder / FILES[0], tensors)
    if len(text) > json_limit(size):
        raise ValueError(
            f"the configuration takes {len(text):,} bytes, and {json_limit(size):,} can be read; "
            "store long values as tensors"
        )
    write_bytes(folder / FILES[1], text)
    manifest = {
        "format": FORMAT, "kind": kind,
        "bytes": {FILES[0]: size, FILES[1]: len(text)},
        "sha256": {FILES[0]: digest, FILES[1]: hashlib.sha256(text).hexdigest()}, **further,
    }  # fmt: skip
    write_bytes(folder / MANIFEST, json_bytes({**manifest, "own": own_hash(manifest)}))


def read_manifest(file: FileIO, folder: AnyPath) -> dict[str, Any]:
    """Check and return the manifest in an open file.

    Args:
        folder: The folder of the checkpoint, for error messages.
    """
    manifest, raw = json_of(file, LARGEST_MANIFEST, folder / MANIFEST)
    version = manifest.get("format") if isinstance(manifest, dict) else FORMAT
    if version not in READ:
        raise CheckpointError(
            f"{folder} has format {version!r:.40}; this version of attractor reads formats up to "
            f"{FORMAT}"
        )
    schema.check(manifest, SCHEMAS[version], folder / MANIFEST, CheckpointError)
    own = manifest.pop("own")
    if own != own_hash(manifest) or raw != json_bytes({**manifest, "own": own}):
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: it does not match its own hash")
    return manifest


def read_contents(
    folder: AnyPath, kind: str, files: dict[str, FileIO]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Check and return the tensors and the configuration in three open files."""
    manifest = read_manifest(files[MANIFEST], folder)
    if manifest["kind"] != kind:
        raise CheckpointError(f"{folder} holds a {manifest['kind']}, not a {kind}; give another folder")
    hashes, sizes = manifest["sha256"], manifest.get("bytes", {})
    actual = {name: os.fstat(files[name].fileno()).st_size for name in FILES}
    for name in FILES:
        if sizes and actual[name] != sizes[name]:
            reason = f"it has {actual[name]:,} bytes, not {sizes[name]:,}"
            raise CheckpointError(f"{folder}/{name} is damaged: {reason}")
    config, raw = json_of(files[FILES[1]], json_limit(actual[FILES[0]]), folder / FILES[1])
    if hashlib.sha256(raw).hexdigest() != hashes[FILES[1]]:
        raise CheckpointError(f"{folder}/{FILES[1]} is damaged: it does not match its hash")
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder}/{FILES[1]} is no configuration: it is not a JSON object")
    tensors, digest = tensors_of(files[FILES[0]], folder / FILES[0])
    if digest != hashes[FILES[0]]:
        raise CheckpointError(f"{folder}/{FILES[0]} is damaged: it does not match its hash")
    return tensors, config


def own_hash(manifest: dict[str, Any]) -> str:
    """Return the hash of a manifest, which is stored in it."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
