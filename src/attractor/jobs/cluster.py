"""Engine "ray": workers on a Ray cluster, or on a new one on this machine."""

import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from statistics import median
from typing import Any, NoReturn

from attractor.jobs.job import Artifact, Failure, Job, Shard, attempt, label
from attractor.jobs.ledger import Ledger

LOG = logging.getLogger(__name__)
POLL_SECONDS = 2.0  # interval at which the engine looks for machines that have joined
SLOW = 2.0  # times the median duration of a shard, after which a copy of it begins
FEWEST_DURATIONS = 3  # shards that must have ended before one is called slow


def cluster(
    job: Job, shards: Iterable[Shard], workers: int | None, address: str | None, retries: int
) -> Iterator[Artifact]:
    """Yield every artifact when it is finished. Requires: one version of attractor on all machines.

    Ray's own retries are off, so that deaths of workers are counted once. The number of running
    shards is limited by the resources, so that the object store holds only artifacts that
    are about to be written. Machines may join and leave. If all of them have left, one shard waits in
    Ray until a machine joins. When no shard is left to begin, and `Job.copies` allows it, idle machines
    begin copies of slow shards. The logger of this module names the node of every shard, at level INFO.
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
    ledger, pending = Ledger(shards, retries), dict[Any, tuple[Shard, float]]()  # and its first second
    durations = deque[float](maxlen=1000)
    worker_error = ray.exceptions.RayError  # an error of the cluster, as `attempt` raises nothing
    fatal = (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError)

    def receive(seconds: float = 0.0) -> None:
        """Receive the replies that have arrived; if there is none, wait for the first one."""
        if not pending:
            return
        ray.wait(list(pending), num_returns=1, timeout=seconds)
        for reference in ray.wait(list(pending), num_returns=len(pending), timeout=0)[0]:
            if reference not in pending:  # a copy of a shard that has just arrived
                continue
            shard, began = pending.pop(reference)
            copies = [other for other, (same, _) in pending.items() if same == shard]
            try:
                node, reply = ray.get(reference)
                LOG.info("shard %s was computed on node %s", label(shard), node)
                ledger.replies.append(reply)
                durations.append(time.monotonic() - began)
                for copy in copies:
                    del pending[copy]
                    ray.cancel(copy, force=True)
            except fatal:
                raise
            except worker_error as error:
                if not copies:
                    ledger.died(shard, f"{type(error).__name__}: {str(error).split('. ')[0]}")

    def slow_shard() -> Shard | None:
        """Return the shard without a copy that has been computed longest, if it is slow."""
        if not job.copies or len(durations) < FEWEST_DURATIONS:
            return None
        attempts = Counter(shard for shard, _ in pending.values())
        single = [(shard, began) for shard, began in pending.values() if attempts[shard] == 1]
        if not single:
            return None
        shard, began = min(single, key=lambda entry: entry[1])
        if time.monotonic() - began <= SLOW * median(durations):
            return None
        LOG.info("shard %s is slow; another machine begins it as well", label(shard))
        return shard

    try:
        room = _room(ray, job)
        if not (room or workers):
            _raise_no_room(ray, job)
        # "SPREAD" puts few shards on different machines, but after the loss of a machine all shards may
        # wait for up to 30 s until Ray notices it. With "DEFAULT" the other machines stay busy.
        strategy = "SPREAD" if workers and workers < room else "DEFAULT"
        remote = ray.remote(_attempt).options(
            num_cpus=job.threads or 1, num_gpus=job.gpus, max_retries=0, scheduling_strategy=strategy
        )
        job_reference, counted = ray.put(job), time.monotonic()
        while True:
            while len(pending) < (workers or max(1, room)):
                shard = ledger.next_shard()
                if shard is None:
                    shard = slow_shard()
                if shard is None:
                    break
                pending[remote.remote(job_reference, shard)] = shard, time.monotonic()
            while ledger.replies:  # yield now, while all workers are busy
                yield ledger.take(receive)
            if not pending:
                return
            receive(POLL_SECONDS)
            if time.monotonic() - counted >= POLL_SECONDS:
                room_before, room, counted = room, _room(ray, job), time.monotonic()
                if room_before and not room:
                    LOG.warning("no machine can run a shard; the job goes on when one joins the cluster")
    finally:
        with suppress(Exception):  # the cluster itself may be lost
            for reference in pending:
                ray.cancel(reference, force=True)
        if started_here:
            ray.shutdown()


def _attempt(job: Job, shard: Shard) -> tuple[str, Artifact | Failure]:
    """Return the identifier of this worker's node, and the result of `attempt`."""
    ray: Any = import_module("ray")
    return ray.get_runtime_context().get_node_id(), attempt(job, shard)


def _room(ray: Any, job: Job) -> int:
    """Return how many shards the machines can run at once."""
    needs = {name: number for name, number in _resources(job).items() if number}
    return sum(min(int(has.get(k, 0) // n) for k, n in needs.items()) for has in _machines(ray))


def _raise_no_room(ray: Any, job: Job) -> NoReturn:
    """Raise an error that compares what a shard needs with what the machines have."""
    resources = _resources(job)
    has = "; ".join(", ".join(f"{has.get(k, 0):g} {k}" for k in resources) for has in _machines(ray))
    request = ", ".join(f"{n} {k}" for k, n in resources.items() if n)
    raise ValueError(
        f"a shard needs {request}, and no machine of the cluster has them (there is {has}); reduce "
        "threads or gpus"
    )


def _resources(job: Job) -> dict[str, int]:
    """Return the numbers of CPUs and GPUs that Ray reserves for a shard."""
    return {"CPU": job.threads or 1, "GPU": job.gpus}


def _machines(ray: Any) -> list[dict[str, float]]:
    """Return the resources of every machine that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
