"""What workers have still to do, and what came back from them."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from attractor.jobs.job import Artifact, Failure, Shard, label

LOG = logging.getLogger(__name__)


class WorkerDiedError(ChildProcessError):
    """A shard whose worker died again and again."""


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
