"""Engine "ray": workers on a Ray cluster, or on a new one on this machine."""

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
    """Yield every artifact when it is finished. Requires: one version of attractor on all machines.

    Ray's own retries are off, so that deaths of workers are counted once. The number of running
    shards is limited by the resources, so that the object store holds only artifacts that
    are about to be written.
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
    started_here = not ray.is_initialized()
    if started_here:
        try:
            ray.init(address, log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            raise ConnectionError(
                f"no Ray cluster answers at {address or os.environ.get('RAY_ADDRESS')} ({error}); is it "
                "up (ray status), and are RAY_AUTH_MODE and RAY_AUTH_TOKEN set here if it wants a token?"
            ) from None
    ledger, pending = Ledger(shards, retries), dict[Any, Shard]()
    worker_error = ray.exceptions.RayError  # an error of the cluster, as `attempt` raises nothing
    fatal = (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError)

    def receive(seconds: float | None = 0.0) -> None:
        count = len(pending) if seconds is not None else 1
        for reference in (
            ray.wait(list(pending), num_returns=count, timeout=seconds)[0] if pending else ()
        ):
            shard = pending.pop(reference)
            try:
                ledger.replies.append(ray.get(reference))
            except fatal:
                raise
            except worker_error as error:
                ledger.died(shard, f"{type(error).__name__}: {str(error).split('. ')[0]}")

    try:
        remote = ray.remote(attempt).options(
            num_cpus=job.threads or 1, num_gpus=job.gpus, max_retries=0, scheduling_strategy="SPREAD"
        )
        job_reference = ray.put(job)
        while True:
            while len(pending) < (workers or _room(ray, job)):
                shard = ledger.next_shard()
                if shard is None:
                    break
                pending[remote.remote(job_reference, shard)] = shard
            while ledger.replies:  # yield now, while all workers are busy
                yield ledger.take(receive)
            if not pending:
                return
            receive(None)
    finally:
        with suppress(Exception):  # the cluster itself may be lost
            for reference in pending:
                ray.cancel(reference, force=True)
        if started_here:
            ray.shutdown()


def _room(ray: Any, job: Job) -> int:
    """Return how many shards the machines can run at once."""
    resources = {"CPU": job.threads or 1, "GPU": job.gpus}
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(has.get(k, 0) // n) for k, n in resources.items() if n) for has in alive)
    if not room:
        has = "; ".join(", ".join(f"{has.get(k, 0):g} {k}" for k in resources) for has in alive)
        request = ", ".join(f"{n} {k}" for k, n in resources.items() if n)
        raise ValueError(
            f"a shard needs {request}, and no machine of the cluster has them (there is {has}); reduce "
            "threads or gpus"
        )
    return room
