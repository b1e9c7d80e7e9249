"""Distribute a pure function over processes or machines, one shard at a time.

A job is the name of a function ``run(config, shard) -> artifact`` and a configuration that JSON can
represent; an artifact is bytes, or a value that JSON can represent. An engine maps the function over
shards: "here" (in this process), "processes" (on this machine) or "ray" (on a cluster). The artifacts do
not depend on the engine, on the number or order of workers, or on workers that died.

>>> from attractor import jobs
>>> job = jobs.Job("attractor.jobs.job:power", {"exponent": 2})
>>> [artifact.json() for artifact in jobs.each(job, [1, 2, 3])]
[1, 4, 9]

`keep` writes artifacts to a folder, and computes only those that are missing:

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> [artifact.json() for artifact in jobs.keep(job, [1, 2], folder)]
[1, 4]
>>> [artifact.json() for artifact in jobs.keep(job, [1, 2, 3], folder)]  # only 3 is computed
[1, 4, 9]

Artifacts are sent to the caller, which is the only process that writes files: workers need no common
file system, every artifact is checked against its hash on arrival, and files are written atomically.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from attractor.common.lazy import submodule
from attractor.jobs.job import Artifact, Job, Shard, here, label
from attractor.jobs.ledger import WorkerDiedError
from attractor.jobs.naming import named
from attractor.storage.files import check_source, json_bytes, read_bytes, write_bytes, write_new
from attractor.storage.fingerprint import fingerprint
from attractor.storage.limits import check_memory, read_json

ENGINES = ("here", "processes", "ray")
JSON_FACTOR = 25  # Python's objects take up to so many times the memory of their JSON
WORKER_BYTES = 2**27  # of memory that a process with torch takes at least
__all__ = [
    "ENGINES",
    "Artifact",
    "Job",
    "Shard",
    "WorkerDiedError",
    "chosen",
    "each",
    "keep",
    "part_of",
]


def each(
    job: Job,
    shards: Iterable[Shard],
    *,
    engine: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    retries: int = 3,
) -> Iterator[Artifact]:
    """Yield the artifact of every shard, in the order in which they are finished.

    A shard is taken from `shards` only when a worker is free. A worker that dies (killed, out of memory,
    its machine lost) is replaced and its shard started again; an exception that the function raises is
    raised here with the shard's name, without a retry. Machines may join a Ray cluster and leave it
    while shards run. Leaving the iterator, by Ctrl-C or otherwise, stops all workers.

    Args:
        job: the function and its configuration.
        shards: the shards.
        engine: one of `ENGINES`; None: "here", or "processes" if there are several workers.
        workers: number of shards at a time; None: one per core (on Ray: as many as the cluster has
            resources for).
        address: address of a Ray cluster, such as "10.0.0.1:6379"; None: the cluster that runs on this
            machine, or a new one.
        retries: how often a shard is started again after its worker has died.

    Raises:
        WorkerDiedError: a shard's worker died more than `retries` times.
    """
    engine = chosen(engine, workers, address)
    if engine == "here":
        return here(job, shards)
    if engine == "processes":
        from attractor.jobs.processes import processes

        return processes(job, shards, workers or os.cpu_count() or 1, retries)
    from attractor.jobs.cluster import cluster

    return cluster(job, shards, workers, address, retries)


def keep(
    job: Job, shards: Iterable[Shard], folder: Path | str, about: Any = None, **options: Any
) -> Iterator[Artifact]:
    """Do what `each` does with a folder: yield the artifacts in it first, then compute the others.

    New artifacts are written before they are yielded. The file ``job.json`` identifies the job of the
    folder: `about`, or else the configuration, with the function's name and, if the function is the
    user's own, its code. An artifact's file is named after its shard and the beginning of its hash;
    a damaged artifact is computed again.

    Raises:
        ValueError: the folder holds another job.
    """
    folder, missing = Path(folder), {_name(shard): shard for shard in shards}
    _claim(job, folder, about or {"config": job.config})
    for path in sorted(folder.glob("*.*.*")):
        name, _, start = path.stem.rpartition(".")
        if name not in missing:
            continue
        size = check_source(path) * (JSON_FACTOR if path.suffix == ".json" else 1)
        check_memory(f"the artifact {path}", size, "remove it, and it is computed again")
        if (digest := sha256(content := read_bytes(path)).hexdigest())[:16] == start:
            yield Artifact(missing.pop(name), content, digest, path.suffix == ".json")
    for artifact in each(job, missing.values(), **options):
        ending = "json" if artifact.is_json else "bin"
        write_bytes(
            folder / f"{_name(artifact.shard)}.{artifact.sha256[:16]}.{ending}", artifact.content
        )
        yield artifact


def chosen(engine: str | None, workers: int | None = None, address: str | None = None) -> str:
    """Return the engine for these arguments.

    Raises:
        ValueError: there is no such engine, or the arguments contradict each other.
    """
    if engine is None:
        engine = "here" if workers in (None, 1) else "processes"
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers = {workers} must be at least 1")
    if engine == "processes":
        check_memory(f"{workers or 1:,} processes", WORKER_BYTES * (workers or 1), "use fewer workers")
    if engine == "here" and workers not in (None, 1):
        raise ValueError(f"engine here has one worker; for workers = {workers} use engine processes")
    if address is not None and engine != "ray":
        raise ValueError(f"address = {address!r} is for engine ray, not {engine}")
    return engine


def part_of(text: str) -> tuple[int, int]:
    """Return "3/16", the third of sixteen parts, as (2, 16): the part ``items[2::16]`` of a list.

    >>> part_of("3/16")
    (2, 16)
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"part {text!r} must be a fraction such as 3/16, the third of sixteen parts")
    return int(match[1]) - 1, int(match[2])


def _claim(job: Job, folder: Path, about: Any) -> None:
    """Write the identity of a job to a folder; raise if the folder belongs to another job.

    It includes a fingerprint, because JSON cannot represent infinity, NaN, or keys that are numbers.
    """
    code = None
    with suppress(ImportError, AttributeError, OSError):  # the function may exist on the workers only
        code = fingerprint(named(job.function))
    own = fingerprint([job.function, code, about])
    readable = about if isinstance(about, dict) else {"about": about}
    there = folder / "job.json"
    if write_new(there, json_bytes({"function": job.function, **readable, "fingerprint": own})):
        return
    try:
        saved_fingerprint = read_json(there)["fingerprint"]
    except (ValueError, KeyError, TypeError):
        saved_fingerprint = None
    if saved_fingerprint != own:
        hint = "" if saved_fingerprint else ", or one of an earlier version of attractor"
        raise ValueError(f"{folder} holds another job{hint}, as its job.json says; take another folder")


def _name(shard: Shard) -> str:
    """Return a unique name of a shard for files: letters, digits, underscores and dashes."""
    if type(shard) is int:
        return str(shard)
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', label(shard))[:80]}-{fingerprint(shard)[:12]}"


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name)
