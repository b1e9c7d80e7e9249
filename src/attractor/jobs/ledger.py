"""Bookkeeping of shards that wait for a worker and of the workers' replies."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from attractor.jobs.job import Artifact, Failure, Shard, label

LOG = logging.getLogger(__name__)


class WorkerDiedError(ChildProcessError):
    """Raised if the worker of a shard died more often than allowed."""


class Ledger:
    """The shards that wait for a worker, and the replies that the caller has not received yet.

    Args:
        shards: the shards to compute.
        retries: how often a shard is started again after its worker has died.
    """

    def __init__(self, shards: Iterable[Shard], retries: int) -> None:
        self.shards, self.retries = iter(shards), retries
        self.again = list[Shard]()
        self.deaths = Counter[Shard]()
        self.replies = list[Artifact | Failure | WorkerDiedError]()

    def next_shard(self) -> Shard | None:
        """Return the next shard to start; None if there is none."""
        return self.again.pop() if self.again else next(self.shards, None)

    def died(self, shard: Shard, why: str) -> None:
        """Start a shard again after its worker has died, with a warning, or record an error."""
        self.deaths[shard] += 1
        if self.deaths[shard] <= self.retries:
            LOG.warning("shard %s is begun again: its worker died: %s", label(shard), why)
            self.again.append(shard)
            return
        times = f"{self.deaths[shard]} times, the last time: {why}"
        self.replies.append(WorkerDiedError(f"shard {label(shard)}: its worker died {times}"))

    def take(self, receive: Callable[[], None]) -> Artifact:
        """Return an artifact that has arrived; if there is none, raise the first failure.

        Args:
            receive: a function that receives further replies, which would be lost by raising.
        """
        if not any(isinstance(reply, Artifact) for reply in self.replies):
            receive()
        good = (i for i, reply in enumerate(self.replies) if isinstance(reply, Artifact))
        reply = self.replies.pop(next(good, 0))
        if isinstance(reply, Artifact):
            return reply.checked()
        raise reply.error() if isinstance(reply, Failure) else reply
