"""Engine "ray": workers on a Ray cluster, or on a small one that is started here."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

from attractor.jobs.job import Artifact, Job, Shard, attempt
from attractor.jobs.ledger import Ledger


def cluster(
    job: Job, shards: Iterable[Shard], workers: int | None, address: str | None, retries: int
) -> Iterator[Artifact]:
    """Every artifact as it ends. Attractor is installed on all machines, in one version.

    Ray's own retries are off, so that there is one count of a shard's deaths. Only as many shards are
    under way as there is room for, so that the object store holds no more than is about to be written.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise ImportError("engine ray needs Ray: pip install 'attractor[distributed]'") from None
    try:
        json.dumps(job.config)
    except TypeError as error:
        raise TypeError(
            f"the configuration cannot be sent to a cluster ({error}); give built-in systems, or "
            "functions of a module or a file that all machines have"
        ) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    begun = not ray.is_initialized()
    if begun:
        try:
            ray.init(address, log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            raise ConnectionError(
                f"no Ray cluster answers at {address or os.environ.get('RAY_ADDRESS')} ({error}); is it "
                "up (ray status), and are RAY_AUTH_MODE and RAY_AUTH_TOKEN set here if it wants a token?"
            ) from None
    ledger, running = Ledger(shards, retries), dict[Any, Shard]()
    lost = ray.exceptions.RayError  # of the cluster: `attempt` itself raises nothing
    fatal = (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError)

    def receive(seconds: float | None = 0.0) -> None:
        count = len(running) if seconds is not None else 1
        for done in ray.wait(list(running), num_returns=count, timeout=seconds)[0] if running else ():
            shard = running.pop(done)
            try:
                ledger.ended.append(ray.get(done))
            except fatal:
                raise
            except lost as error:
                ledger.died(shard, f"{type(error).__name__}: {str(error).split('. ')[0]}")

    try:
        remote = ray.remote(attempt).options(
            num_cpus=job.threads or 1, num_gpus=job.gpus, max_retries=0, scheduling_strategy="SPREAD"
        )
        where = ray.put(job)
        while True:
            while len(running) < (workers or _room(ray, job)):
                shard = ledger.next_shard()
                if shard is None:
                    break
                running[remote.remote(where, shard)] = shard
            while ledger.ended:  # now, while everybody has something to do
                yield ledger.take(receive)
            if not running:
                return
            receive(None)
    finally:
        with suppress(Exception):  # the cluster may be what has gone
            for left in running:
                ray.cancel(left, force=True)
        if begun:
            ray.shutdown()


def _room(ray: Any, job: Job) -> int:
    """How many shards the machines can have at once."""
    wanted = {"CPU": job.threads or 1, "GPU": job.gpus}
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(has.get(k, 0) // n) for k, n in wanted.items() if n) for has in alive)
    if not room:
        has = "; ".join(", ".join(f"{has.get(k, 0):g} {k}" for k in wanted) for has in alive)
        asked = ", ".join(f"{n} {k}" for k, n in wanted.items() if n)
        raise ValueError(
            f"a shard wants {asked}, and no machine of the cluster has them (there is {has})"
        )
    return room
