"""Read and write safetensors files. Sizes in a header are checked before memory is allocated.

The format (8 bytes for the header's length, a JSON header, the numbers) is that of the safetensors
library: each can read the files of the other. Equal tensors are written as equal bytes. Reading takes
the memory of the tensors and no more.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from typing import Any

import torch
from torch import Tensor

from attractor.storage import schema
from attractor.storage.files import FileTypeError, open_plain, write_parts
from attractor.storage.limits import check_memory, parse_json
from attractor.storage.objects import AnyPath, path_of
from attractor.storage.schema import ADVICE

# Bytes. Parsed JSON may take twenty-five times as much memory; this limit keeps it below 64 MB.
JSON = 2_000_000
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIZE = schema.number(0, 2**63 - 1, whole=True)
TENSOR = schema.record(
    {
        "dtype": schema.text(choices=DTYPES),
        "shape": schema.listing(SIZE, most=64),
        "data_offsets": schema.pair(SIZE, SIZE),
    }
)
HEADER = schema.record({}, {"__metadata__": schema.mapping(schema.text(JSON))}, others=TENSOR)


class CheckpointError(ValueError):
    """Raised if a checkpoint is damaged, of another kind, or does not match its description."""


@contextmanager
def described(source: Any, what: str) -> Iterator[None]:
    """Raise a `CheckpointError` where values that match their schema do not describe what was saved.

    A schema says what each field may be. How fields depend on each other, such as the coefficients of a
    scheme, is checked by the objects that are made of them, with errors of their own.

    Args:
        source: The file or folder, for the message.
        what: What it should describe, such as "a hybrid solver".
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:400]
        raise CheckpointError(f"{source} does not describe {what}: {reason}. {ADVICE}") from None


def json_limit(size: int) -> int:
    """Return how many bytes of JSON are accepted beside tensors of `size` bytes."""
    return JSON + size // 32


def write_tensors(path: AnyPath | str, tensors: dict[str, Tensor]) -> tuple[str, int]:
    """Write a safetensors file, and return its SHA-256 and its size in bytes."""
    check_dtypes(tensors)
    # The widest dtypes come first, so that every tensor is aligned to its item size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, offset = {}, 0
    for name in order:
        end = offset + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        header[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > json_limit(8 + len(text) + offset):
        raise ValueError(
            f"the names of {len(order)} tensors take {len(text):,} bytes, more than can be read "
            "again; save fewer tensors, or give them shorter names"
        )
    digest = hashlib.sha256()

    def parts() -> Iterator[bytes | memoryview]:
        for part in (struct.pack("<Q", len(text)), text):
            digest.update(part)
            yield part
        for name in order:
            view = _bytes(tensors[name].detach().cpu().contiguous())
            digest.update(view)
            yield view

    write_parts(path_of(path), parts())
    return digest.hexdigest(), 8 + len(text) + offset


def check_dtypes(tensors: Mapping[str, Any]) -> None:
    """Raise a TypeError unless all values are tensors of a dtype that safetensors files can hold."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.dtype not in NAMES:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name!r} is {kind}; a checkpoint holds tensors of {', '.join(DTYPES)}")


def read_tensors(path: AnyPath | str, *, link: bool = True) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file.

    Args:
        path: the file.
        link: whether the path may be a symbolic link.

    Raises:
        CheckpointError: the file is not a safetensors file, is damaged, or has a wrong header.
    """
    return read_annotated(path, link=link)[0]


def tensors_of(file: FileIO, path: AnyPath | str) -> tuple[dict[str, Tensor], str]:
    """Return the tensors in an open safetensors file, and the SHA-256 of its bytes.

    `path` names the file in errors.
    """
    tensors, digest, _ = _all_of(file, path)
    return tensors, digest


def read_annotated(
    path: AnyPath | str, *, link: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors of a safetensors file, and its metadata; see `read_tensors`."""
    with open_file(path, link=link) as file:
        tensors, _, metadata = _all_of(file, path)
        return tensors, metadata


def _all_of(file: FileIO, path: AnyPath | str) -> tuple[dict[str, Tensor], str, dict[str, str]]:
    """Return tensors, the SHA-256 of the bytes that were read, and metadata."""
    digest = hashlib.sha256()
    size = os.fstat(file.fileno()).st_size
    start = _read(file, min(8, size), path)
    length = int.from_bytes(start, "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: of its {size:,} bytes it claims {length:,} for "
            "its header"
        )
    if length > json_limit(size):
        raise CheckpointError(f"{path} has a header of {length:,} bytes, which is too long to read")
    try:  # a file with holes takes no space on the disk
        check_memory(f"the tensors of {path}", size, "use a machine with more memory")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    text = _read(file, length, path)
    digest.update(start + text)
    tensors = {}
    layout, metadata = _layout(text, size - 8 - length, path)
    for name, dtype, shape in layout:
        try:
            tensors[name] = torch.empty(shape, dtype=dtype)
        except (RuntimeError, OverflowError, TypeError):
            raise CheckpointError(f"{path} has a tensor {name!r} of shape {shape}: too large") from None
        view = _bytes(tensors[name])
        _fill(file, view, path)
        digest.update(view)
    return tensors, digest.hexdigest(), metadata


def read_json(path: AnyPath | str, limit: int, *, link: bool = True) -> tuple[Any, bytes]:
    """Return the value in a JSON file, and its bytes; raise if it has more bytes than `limit`."""
    with open_file(path, link=link) as file:
        return json_of(file, limit, path)


def json_of(file: FileIO, limit: int, path: AnyPath | str) -> tuple[Any, bytes]:
    """Do what `read_json` does for an open file; `path` names it in errors."""
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise CheckpointError(f"{path} has {size:,} bytes, more than the {limit:,} it may have")
    raw = _read(file, size, path)
    return parse(raw, path), raw


def parse(raw: bytes, path: AnyPath | str) -> Any:
    """Return the value that bytes of JSON describe."""
    try:
        return parse_json(raw, path)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def open_file(path: AnyPath | str, *, link: bool) -> FileIO:
    """Open a file by `attractor.storage.files.open_plain`; its errors become `CheckpointError`."""
    try:
        return open_plain(path, link=link)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except FileTypeError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def _layout(
    text: bytes, size: int, path: AnyPath | str
) -> tuple[list[tuple[str, torch.dtype, list[int]]], dict[str, str]]:
    """Return name, dtype and shape of all tensors in the order of the file, and metadata.

    The tensors must fill the `size` bytes after the header without a gap.
    """
    header = parse(text, path)
    schema.check(header, HEADER, f"{path}: the header", CheckpointError)
    metadata = header.pop("__metadata__", {})
    entries, offset = [], 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if begin != offset or end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{path} has a header with a wrong size or offset of {name[:80]!r}")
        entries.append((name, dtype, shape))
        offset = end
    if offset != size:
        raise CheckpointError(
            f"{path} is not complete: its header describes {offset:,} bytes, and there are {size:,}"
        )
    return entries, metadata


def _bytes(value: Tensor) -> memoryview:
    array: Any = value.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _read(file: FileIO, size: int, path: AnyPath | str) -> bytes:
    raw = bytearray(size)
    _fill(file, memoryview(raw), path)
    return bytes(raw)


def _fill(file: FileIO, view: memoryview, path: AnyPath | str) -> None:
    position = 0
    while position < len(view):
        try:
            count = file.readinto(view[position : position + 2**30])
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read")
        position += count
