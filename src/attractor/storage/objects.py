"""Paths in object stores, such as ``s3://bucket/runs``, through fsspec.

A store has no folders, no links, no locks and no renaming. An object appears whole or not at all, and
can be created on the condition that there is none of its name; this is what files and checkpoints in a
store rely on. `path_of` is what every function that takes a folder calls first. The functions of
`attractor.storage.files` that read and write take an `ObjectPath` in place of a `Path`.

>>> path_of("s3://bucket/runs") / "first"
ObjectPath('s3://bucket/runs/first')
>>> path_of("runs").name
'runs'
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

# Stores in which an object appears whole: Amazon's and those with its protocol, Google's, Azure's,
# Oracle's, Alibaba's, and memory, for tests.
PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
AS_PATH = re.compile(rf"({'|'.join(PROTOCOLS)}):[/\\][^/\\]")  # what `Path` makes of a URL


class ObjectPath:
    """The place of an object, or of all objects whose names start with it and a slash.

    It has the methods of `pathlib.Path` that the library needs.

    Args:
        url: such as "s3://bucket/runs".

    Raises:
        ValueError: The protocol is none of `PROTOCOLS`, or the URL names no bucket.
    """

    def __init__(self, url: str) -> None:
        match = URL.fullmatch(url)
        protocol = match[1].lower() if match else ""
        if match is None or protocol not in PROTOCOLS:
            raise ValueError(
                f"{url!r} is not in an object store; the protocols of URLs are {', '.join(PROTOCOLS)}. "
                "Mount other file systems, and give a folder"
            )
        inside = match[2].strip("/")
        parts = inside.split("/")
        if not inside or any(part in ("", ".", "..") for part in parts):
            raise ValueError(
                f"{url!r} must name a bucket and may name folders in it, such as s3://bucket/runs"
            )
        self.url = f"{protocol}://{inside}"

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"ObjectPath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """The path without its last part."""
        return ObjectPath(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        """Return whether there is an object of this name."""
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def size(self) -> int:
        """Return the number of bytes of the object; raise a FileNotFoundError if there is none."""
        with self._store() as (store, key):
            about = store.info(key)
        if about["type"] != "file":
            raise FileNotFoundError(f"there is no object {self}")
        return int(about["size"])

    def modified(self) -> Any:
        """Return the time at which the object was written, a `datetime` with a time zone."""
        with self._store() as (store, key):
            return store.modified(key)

    def names(self) -> set[str]:
        """Return the first parts of all names of objects that start with this path."""
        with self._store() as (store, key):
            try:
                entries = store.ls(key, detail=False)
            except FileNotFoundError:
                return set()
        inside = key.strip("/")
        return {x.strip("/").rpartition("/")[2] for x in entries if x.strip("/") != inside}

    def read_bytes(self, limit: int | None = None) -> bytes:
        """Return the content of the object.

        Raises:
            FileNotFoundError: There is no such object.
            ValueError: It has more bytes than `limit`.
        """
        size = self.size()
        if limit is not None and size > limit:
            raise ValueError(f"{self} has {size:,} bytes, and at most {limit:,} are read")
        with self._store() as (store, key):
            return store.cat_file(key)

    def open(self) -> FileIO:
        """Return a temporary file without a name that holds the content of the object."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            copy = Path(folder) / "object"
            with self._store() as (store, key):
                store.get_file(key, str(copy))
            return FileIO(copy)

    def write_bytes(self, content: bytes) -> None:
        """Write the object; a reader sees the old content or the new."""
        with self._store() as (store, key):
            store.pipe_file(key, content)

    def write_new(self, content: bytes) -> bool:
        """Write the object unless there is one of that name; return whether it was written."""
        with self._store() as (store, key):
            try:
                store.pipe_file(key, content, mode="create")
            except FileExistsError:
                return False
        return True

    def upload(self, file: Path) -> None:
        """Write the object from a file, which need not fit into memory."""
        with self._store() as (store, key):
            store.put_file(str(file), key)

    def unlink(self, missing_ok: bool = True) -> None:
        """Remove the object, if there is one; some stores do not tell whether there was."""
        with self._store() as (store, key), suppress(FileNotFoundError):
            store.rm_file(key)

    def remove_all(self) -> None:
        """Remove all objects whose names start with this path and a slash."""
        with self._store() as (store, key), suppress(FileNotFoundError):
            store.rm(key, recursive=True)

    @contextmanager
    def _store(self) -> Iterator[tuple[Any, str]]:
        """Yield the store and the name of the object in it; errors of its client become `OSError`."""
        try:
            yield _store_of(self.url)
        except (OSError, ImportError):
            raise
        except Exception as error:  # each client has classes of its own, unknown here
            reason = " ".join(str(error).split())[:300]
            raise OSError(
                f"{self} cannot be used ({type(error).__name__}: {reason}); check the address, the "
                "credentials and the permissions of the store"
            ) from error


AnyPath: TypeAlias = Path | ObjectPath


def path_of(folder: Path | ObjectPath | str) -> AnyPath:
    """Return the path of a folder on this machine, or in an object store for a URL.

    Raises:
        ValueError: A URL of another kind, or one that was made a `Path`, which changes it.
    """
    if isinstance(folder, ObjectPath):
        return folder
    if isinstance(folder, str) and URL.fullmatch(folder):
        return ObjectPath(folder)
    if AS_PATH.match(str(folder)):
        raise ValueError(
            f"{folder} was a URL before it was made a path, which removes a slash; pass the URL as text"
        )
    return Path(folder)


def _store_of(url: str) -> tuple[Any, str]:
    """Return the store of a URL, and the name of the object in it."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        # A cache of listings would miss what other processes write.
        store = fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError as error:
        raise ImportError(
            f"{protocol}:// needs fsspec and the client of its store ({error}): "
            "pip install 'attractor[remote]' brings both for s3"
        ) from None
    return store, store._strip_protocol(url)
