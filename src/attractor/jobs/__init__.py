"""Work over many processes or machines: a pure function, a shard at a time.

A job is the name of a function ``run(config, shard) -> artifact`` and a configuration that JSON can
hold; an artifact is bytes, or something that JSON can hold. An engine maps it over shards: "here" (this
process), "processes" (of this machine) or "ray" (a cluster). What comes out does not depend on the
engine, on the number of workers, on their order, or on who died meanwhile.

>>> from attractor import jobs
>>> job = jobs.Job("attractor.jobs.job:power", {"exponent": 2})
>>> [artifact.json() for artifact in jobs.each(job, [1, 2, 3])]
[1, 4, 9]

`keep` writes artifacts to a folder and does not make again what is there:

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> [artifact.json() for artifact in jobs.keep(job, [1, 2], folder)]
[1, 4]
>>> [artifact.json() for artifact in jobs.keep(job, [1, 2, 3], folder)]  # only 3 is computed
[1, 4, 9]

Artifacts come back to the caller, who alone writes files: workers need no common file system, every
artifact is checked against its hash when it arrives, and a name is taken by a whole file or by none.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from attractor.core.files import json_bytes, write_bytes
from attractor.jobs.job import Artifact, Job, Shard, WorkerDiedError, here, label

ENGINES = ("here", "processes", "ray")
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
    """The artifact of every shard, as they end.

    A shard is taken from `shards` only when somebody is free to begin it. A worker that dies (killed,
    out of memory, its machine gone) is replaced and its shard begun again; an exception that `run`
    raises is not tried again, but raised here with the shard's name. Leaving the iterator, by Ctrl-C or
    otherwise, ends what is under way.

    Args:
        engine: one of `ENGINES`; None: "here", or "processes" where there are several workers.
        workers: shards at a time; None: one a core (on Ray: what the machines there have room for).
        address: of a Ray cluster, such as "10.0.0.1:6379"; None: the one running here, or a new one.
        retries: how often a shard is begun again when its worker has died.

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
    """`each` with a folder: first the artifacts it holds, then those that are made now, written before
    they are yielded.

    The file ``job.json`` says what the folder is of: `about`, or else the function and its
    configuration. An artifact's file has its shard's name and the beginning of its hash; a damaged one
    is made again.

    Raises:
        ValueError: the folder holds another job, or two shards have one name.
    """
    folder, wanted = Path(folder), dict[str, Shard]()
    for shard in shards:
        if wanted.setdefault(_name(shard), shard) != shard:
            raise ValueError(f"shards {wanted[_name(shard)]!r} and {shard!r} have one name")
    now = json_bytes(about or {"function": job.function, "config": job.config})
    there = folder / "job.json"
    if there.exists() and not _same(there.read_bytes(), now):
        raise ValueError(f"{folder} holds another job, as its job.json says; take another folder")
    write_bytes(there, now)
    for path in sorted(folder.glob("*.*.*")):
        name, _, start = path.stem.rpartition(".")
        if name in wanted and (digest := sha256(content := path.read_bytes()).hexdigest())[:16] == start:
            yield Artifact(wanted.pop(name), content, digest, path.suffix == ".json")
    for made in each(job, wanted.values(), **options):
        ending = "json" if made.is_json else "bin"
        write_bytes(folder / f"{_name(made.shard)}.{made.sha256[:16]}.{ending}", made.content)
        yield made


def chosen(engine: str | None, workers: int | None = None, address: str | None = None) -> str:
    """The engine that is meant; an error that names those there are.

    Raises:
        ValueError: what was given does not go together.
    """
    if engine is None:
        engine = "here" if workers in (None, 1) else "processes"
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers = {workers} must be at least 1")
    if engine == "here" and workers not in (None, 1):
        raise ValueError(f"engine here is this process alone; for workers = {workers} take processes")
    if address is not None and engine != "ray":
        raise ValueError(f"address {address!r} is for engine ray, not {engine}")
    return engine


def part_of(text: str) -> tuple[int, int]:
    """ "3/16", the third of sixteen parts, as (2, 16): of a list, ``items[2::16]``.

    >>> part_of("3/16")
    (2, 16)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"part {text!r} must be such as 3/16: the third of sixteen, from 1/16 to 16/16")
    return int(found[1]) - 1, int(found[2])


def _same(one: bytes, other: bytes) -> bool:
    """Whether two files of JSON say the same, in whatever order."""
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


def _name(shard: Shard) -> str:
    """For files: nothing but letters, digits, underscores and dashes."""
    return re.sub(r"[^\w-]+", "-", label(shard))
