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

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from attractor.core.files import json_bytes, read_bytes, write_bytes, write_new
from attractor.core.fingerprint import fingerprint
from attractor.core.limits import read_json
from attractor.jobs.job import Artifact, Job, Shard, here, label
from attractor.jobs.ledger import WorkerDiedError
from attractor.jobs.naming import named

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

    The file ``job.json`` says what the folder is of: `about`, or else the configuration, with the
    function's name and, if the function is the user's own, its code. An artifact's file has its shard's
    name and the beginning of its hash; a damaged one is made again.

    Raises:
        ValueError: the folder holds another job.
    """
    folder, wanted = Path(folder), {_name(shard): shard for shard in shards}
    _claim(job, folder, about or {"config": job.config})
    for path in sorted(folder.glob("*.*.*")):
        name, _, start = path.stem.rpartition(".")
        if name in wanted and (digest := sha256(content := read_bytes(path)).hexdigest())[:16] == start:
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


def _claim(job: Job, folder: Path, about: Any) -> None:
    """Write what a folder is of, before anything else is in it; raise if it is another job's.

    JSON does not tell infinity from NaN, or a number that is a key from text: a fingerprint does.
    """
    code = None
    with suppress(ImportError, AttributeError, OSError):  # it may be only where the workers are
        code = fingerprint(named(job.function))
    own = fingerprint([job.function, code, about])
    readable = about if isinstance(about, dict) else {"about": about}
    there = folder / "job.json"
    if write_new(there, json_bytes({"function": job.function, **readable, "fingerprint": own})):
        return
    try:
        known = read_json(there)["fingerprint"]
    except (ValueError, KeyError, TypeError):
        known = None
    if known != own:
        told = "" if known else ", or one of an earlier version of attractor"
        raise ValueError(f"{folder} holds another job{told}, as its job.json says; take another folder")


def _name(shard: Shard) -> str:
    """For files: letters, digits, underscores and dashes; no two shards have the same."""
    if type(shard) is int:
        return str(shard)
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', label(shard))[:80]}-{fingerprint(shard)[:12]}"
