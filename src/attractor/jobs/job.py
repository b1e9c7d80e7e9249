"""What a job is, and one shard of it: the same code for all engines."""

import builtins
import importlib.util
import json
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

from attractor import __version__
from attractor.core.files import json_bytes

Shard = int | str | tuple[Any, ...]
LOG = logging.getLogger(__name__)
# What torchrun and accelerate launch tell a process about its rank.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


class WorkerDiedError(ChildProcessError):
    """A shard whose worker died again and again."""


@dataclass(frozen=True)
class Job:
    """A pure function and what it is called with.

    Attributes:
        function: ``module:function``, called with the configuration and a shard. It is attractor's; a
            module of your own is named in `also`.
        config: what JSON can hold. (In this process anything; in processes what can be sent to them.)
        also: modules outside attractor that the function may be from.
        threads: of torch, for a shard; None: one, or in this process as many as there are. Sums of a
            matrix product may depend on them.
        gpus: for a shard, on Ray.
    """

    function: str
    config: Mapping[str, Any]
    also: tuple[str, ...] = ()
    threads: int | None = None
    gpus: int = 0
    version: str = __version__

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise if this is nothing to run here; a worker asks again."""
        module = self.function.partition(":")[0]
        if module.split(".")[0] != "attractor" and module not in self.also:
            raise ValueError(
                f"{self.function!r} is not of attractor; if it is yours, say so: also=({module!r},)"
            )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads = {self.threads} must be at least 1")
        if self.version != __version__:
            raise ValueError(
                f"a job of attractor {self.version} came to a worker that has {__version__}"
            )


@dataclass(frozen=True)
class Artifact:
    """What came of a shard: bytes, or JSON as bytes, and their hash."""

    shard: Any
    content: bytes
    sha256: str
    is_json: bool

    def json(self) -> Any:
        """The value, if it is JSON; the same whatever engine it went through."""
        return json.loads(self.content)

    def checked(self) -> "Artifact":
        """Itself, if the hash is right."""
        if sha256(self.content).hexdigest() != self.sha256:
            raise OSError(f"shard {label(self.shard)}: its artifact was damaged on the way; begin again")
        return self


@dataclass(frozen=True)
class Failure:
    """An exception as text, because a class need not exist where it is read.

    Attributes:
        kind: the nearest of its classes that is built in.
        told: its message, after its own class where that is another.
        trace: where it came from.
    """

    shard: Shard
    kind: str
    told: str
    trace: str

    def error(self) -> Exception:
        """As it is raised at the caller's."""
        try:
            found = getattr(builtins, self.kind)(f"shard {label(self.shard)}: {self.told}")
        except TypeError:  # those of Unicode want five arguments
            found = RuntimeError(f"shard {label(self.shard)}: {self.kind}: {self.told}")
        found.add_note(f"In the worker:\n{self.trace}")
        return found


def make(job: Job, shard: Shard) -> Artifact:
    """Call the function."""
    job.check()
    found = named(job.function)(job.config, shard)
    is_json = not isinstance(found, bytes)
    content = json_bytes(found) if is_json else found
    return Artifact(shard, content, sha256(content).hexdigest(), is_json)


def attempt(job: Job, shard: Shard) -> Artifact | Failure:
    """`make` in a worker, with the threads it is allowed; exceptions come back as data.

    A worker is no rank of the launcher that may have started its caller, whatever it has inherited.
    """
    for name in LAUNCHER:
        os.environ.pop(name, None)
    torch.set_num_threads(job.threads or 1)
    try:
        return make(job, shard)
    except Exception as error:
        kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
        own = type(error).__name__
        told = str(error) if own == kind else f"{own}: {error}"
        return Failure(shard, kind, told, traceback.format_exc())


class Ledger:
    """What workers have still to do, and what came back and is not handed on yet.

    Args:
        shards: to do.
        retries: of a shard whose worker dies.
    """

    def __init__(self, shards: Iterable[Shard], retries: int) -> None:
        self.shards, self.retries = iter(shards), retries
        self.again = list[Shard]()
        self.deaths = Counter[Shard]()
        self.ended = list[Artifact | Failure | WorkerDiedError]()

    def next_shard(self) -> Shard | None:
        """The next to begin; None if there is none."""
        return self.again.pop() if self.again else next(self.shards, None)

    def died(self, shard: Shard, why: str) -> None:
        """A shard's worker did: it is begun again, and a warning says so, or was once too often."""
        self.deaths[shard] += 1
        if self.deaths[shard] <= self.retries:
            LOG.warning("shard %s is begun again: its worker died: %s", label(shard), why)
            self.again.append(shard)
            return
        times = f"{self.deaths[shard]} times, the last time: {why}"
        self.ended.append(WorkerDiedError(f"shard {label(shard)}: its worker died {times}"))

    def take(self, receive: Callable[[], None]) -> Artifact:
        """An artifact of those that have ended; if there is none, the first failure is raised.

        Args:
            receive: takes in what others have done meanwhile, which would be lost with the failure.
        """
        if not any(isinstance(reply, Artifact) for reply in self.ended):
            receive()
        good = (i for i, reply in enumerate(self.ended) if isinstance(reply, Artifact))
        reply = self.ended.pop(next(good, 0))
        if isinstance(reply, Artifact):
            return reply.checked()
        raise reply.error() if isinstance(reply, Failure) else reply


def here(job: Job, shards: Iterable[Shard]) -> Iterator[Artifact]:
    """One shard after the other in this process; exceptions are the function's own, with a note."""
    before = torch.get_num_threads()
    for shard in shards:
        try:
            torch.set_num_threads(job.threads or before)
            made = make(job, shard)
        except Exception as error:
            error.add_note(f"In shard {label(shard)}")
            raise
        finally:
            torch.set_num_threads(before)
        yield made


def label(shard: Shard) -> str:
    """A shard's name."""
    return ", ".join(map(str, shard)) if isinstance(shard, tuple) else str(shard)


@cache
def named(name: str) -> Any:
    """What ``module:function`` or ``file.py:function`` names; the code of the module or file is run."""
    place, _, inside = name.rpartition(":")
    if not place.endswith(".py"):
        return getattr(import_module(place), inside)
    return getattr(module_of_file(Path(place)), inside)


def module_of_file(path: Path, known: bool = False) -> Any:
    """A Python file as a module; while its code is run it finds its neighbours, as by ``python FILE``.

    Args:
        known: by its name in `sys.modules`, unless there is another of that name.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if known:
        sys.modules.setdefault(path.stem, module)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        with suppress(ValueError):  # the file's code has changed it
            sys.path.remove(folder)
    return module


def name_of(function: Any) -> str | None:
    """The name by which `named` finds a function in another process.

    None if there is none: of a lambda, an object that can be called, a function inside another.
    """
    inside, code = getattr(function, "__qualname__", ""), getattr(function, "__code__", None)
    if code is None or getattr(function, "__globals__", {}).get(inside) is not function:
        return None
    file, module = Path(code.co_filename).resolve(), function.__module__
    top = PathFinder.find_spec(module.partition(".")[0])
    places = [] if top is None else [top.origin, *(top.submodule_search_locations or [])]
    if any(p and file.is_relative_to(Path(p).resolve()) for p in places):
        return f"{module}:{inside}"
    return f"{file}:{inside}" if file.is_file() else None


def power(config: Mapping[str, Any], shard: Any) -> float:
    """A number to the configured power; for examples and tests."""
    return shard ** config["exponent"]
