"""Jobs, and how one shard is computed, for all engines."""

import builtins
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from attractor import __version__
from attractor.jobs.naming import named
from attractor.storage.files import json_bytes
from attractor.storage.limits import parse_json

Shard = int | str | tuple[Any, ...]
MOST_THREADS = 1024  # OpenMP ends the process if it cannot make as many as it was asked for
# Variables by which torchrun and accelerate launch pass a process its rank.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


@dataclass(frozen=True)
class Job:
    """A pure function and its configuration.

    Attributes:
        function: ``module:function``, which is called with the configuration and a shard. The module
            must belong to attractor or be listed in `also`.
        config: values that JSON can represent. (Engine "here" accepts any value, and engine "processes"
            any that can be pickled.)
        also: modules outside attractor that may contain the function.
        threads: number of torch threads per shard; None: one, or in this process the current number.
            Sums in a matrix product may depend on it.
        gpus: number of GPUs per shard, on Ray.
        copies: whether idle machines on Ray may begin a second copy of a slow shard, of which the first
            result counts. The function must not write files.
        version: the version of attractor; a worker with another version raises.
    """

    function: str
    config: Mapping[str, Any]
    also: tuple[str, ...] = ()
    threads: int | None = None
    gpus: int = 0
    copies: bool = False
    version: str = __version__

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise if this job must not run here; the caller and the worker call this method."""
        module = self.function.partition(":")[0]
        if module.split(".")[0] != "attractor" and module not in self.also:
            raise ValueError(
                f"{self.function!r} is not a function of attractor; if it is yours, pass "
                f"also=({module!r},)"
            )
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise ValueError(f"threads = {self.threads} must be from 1 to {MOST_THREADS:,}")
        if self.version != __version__:
            raise ValueError(
                f"a job of attractor {self.version} was sent to a worker with attractor {__version__}; "
                "install one version on all machines"
            )


@dataclass(frozen=True)
class Artifact:
    """The result of a shard: bytes, or JSON as bytes, and their hash."""

    shard: Any
    content: bytes
    sha256: str
    is_json: bool

    def json(self, source: Any = "a job") -> Any:
        """Return the value of a JSON artifact, which does not depend on the engine.

        Args:
            source: where the artifact is from, for the error.

        Raises:
            ValueError: it is not JSON, or is nested too deeply.
        """
        return parse_json(self.content, f"the artifact of {label(self.shard)} in {source}")

    def checked(self) -> "Artifact":
        """Return the artifact if its hash is right.

        Raises:
            OSError: the content was damaged in transfer.
        """
        if sha256(self.content).hexdigest() != self.sha256:
            raise OSError(
                f"shard {label(self.shard)}: its artifact was damaged in transfer; run the job again"
            )
        return self


@dataclass(frozen=True)
class Failure:
    """An exception as text, because its class may not exist in the process of the caller.

    Attributes:
        shard: the shard.
        kind: the nearest built-in class of the exception.
        told: its message, after the name of its class if that is not `kind`.
        trace: its traceback.
    """

    shard: Shard
    kind: str
    message: str
    trace: str

    def error(self) -> Exception:
        """Return the exception that the caller raises."""
        try:
            error = getattr(builtins, self.kind)(f"shard {label(self.shard)}: {self.message}")
        except TypeError:  # Unicode errors take five arguments
            error = RuntimeError(f"shard {label(self.shard)}: {self.kind}: {self.message}")
        error.add_note(f"In the worker:\n{self.trace}")
        return error


def make(job: Job, shard: Shard) -> Artifact:
    """Call the function with a shard, and return the artifact."""
    job.check()
    result = named(job.function)(job.config, shard)
    is_json = not isinstance(result, bytes)
    content = json_bytes(result) if is_json else result
    return Artifact(shard, content, sha256(content).hexdigest(), is_json)


def attempt(job: Job, shard: Shard) -> Artifact | Failure:
    """Do what `make` does in a worker, with its number of threads, and return exceptions as data.

    Variables of a launcher are removed, because a worker is not a rank of the launcher of its caller.
    """
    for name in LAUNCHER:
        os.environ.pop(name, None)
    torch.set_num_threads(job.threads or 1)
    try:
        return make(job, shard)
    except Exception as error:
        kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
        own = type(error).__name__
        message = str(error) if own == kind else f"{own}: {error}"
        return Failure(shard, kind, message, traceback.format_exc())


def here(job: Job, shards: Iterable[Shard]) -> Iterator[Artifact]:
    """Compute the shards in this process; exceptions of the function get a note with the shard."""
    before = torch.get_num_threads()
    for shard in shards:
        try:
            torch.set_num_threads(job.threads or before)
            artifact = make(job, shard)
        except Exception as error:
            error.add_note(f"In shard {label(shard)}")
            raise
        finally:
            torch.set_num_threads(before)
        yield artifact


def label(shard: Shard) -> str:
    """Return the name of a shard for messages."""
    return ", ".join(map(str, shard)) if isinstance(shard, tuple) else str(shard)


def power(config: Mapping[str, Any], shard: Any) -> float:
    """Return a number to the configured power; for examples and tests."""
    return shard ** config["exponent"]
