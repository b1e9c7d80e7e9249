"""What a job is, and one shard of it: the same code for all engines."""

import builtins
import json
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from attractor import __version__
from attractor.core.files import json_bytes
from attractor.jobs.naming import named

Shard = int | str | tuple[Any, ...]
# What torchrun and accelerate launch tell a process about its rank.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


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


def power(config: Mapping[str, Any], shard: Any) -> float:
    """A number to the configured power; for examples and tests."""
    return shard ** config["exponent"]
