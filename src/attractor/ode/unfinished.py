"""Fits that are kept while they go on, so that they can be interrupted."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from torch import Tensor

from attractor.ode.processes import Crew
from attractor.storage.files import lock_folder
from attractor.storage.objects import AnyPath
from attractor.storage.schema import Schema, check, mapping, number, plain, record
from attractor.train.checkpoint import CheckpointError
from attractor.train.recent_checkpoints import RecentCheckpoints


class Unfinished:
    """A folder in which a fit is kept while it goes on: weights, generators and what happened so far.

    Args:
        out: the folder; None: nothing is kept.
        what: is fitted, and how; another fit is not taken up.
        unit: what is counted.
        writes: whether this process keeps anything; of several only the first does.
    """

    SECONDS = 30.0  # between checkpoints
    FIELDS: ClassVar = {"what": mapping(plain), "seconds": number(0)}  # of the configuration

    def __init__(
        self, out: AnyPath | str | None, what: dict[str, Any], unit: str, writes: bool = True
    ) -> None:
        self.writes = writes
        self.what = json.loads(json.dumps(what))
        self.kept = None if out is None else RecentCheckpoints(out, "unfinished fit", unit)
        self.saved, self.began, self.before = time.monotonic(), time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        """Spent, those before a break included."""
        return time.monotonic() - self.began + self.before

    @contextmanager
    def locked(self, crew: Crew) -> Iterator[None]:
        """Hold the lock of the folder in the process that writes; the other processes of `crew` wait.

        Raises:
            FolderLockedError: another fit is writing to the folder.
            OSError: the folder cannot be created.
        """
        with ExitStack() as stack:
            problem: Exception | None = None
            try:
                if self.kept and self.writes:
                    stack.enter_context(lock_folder(self.kept.folder))
            except OSError as error:
                problem = error
            crew.raise_together(problem)
            yield

    def load(self, fields: Mapping[str, Schema]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and numbers of the latest state, if there is one.

        Args:
            fields: schemas of the numbers that were passed to `save`.

        Raises:
            CheckpointError: it is of another fit, or the numbers do not match their schemas.
        """
        found = self.kept.load() if self.kept else None
        if found is None:
            return None
        folder, tensors, config = found
        check(config, record({**self.FIELDS, **fields}), folder, CheckpointError)
        theirs = config["what"]
        if theirs != self.what:
            other = [k for k in self.what if theirs.get(k) != self.what[k]]
            raise CheckpointError(
                f"{folder} is of a fit with other {', '.join(other)}; give another out="
            )
        self.before = config["seconds"]
        return tensors, config

    def due(self, last: bool = False) -> bool:
        """Whether it is time to keep a state."""
        if self.kept is None or not self.writes:
            return False
        return last or time.monotonic() - self.saved >= self.SECONDS

    def save(
        self, count: int, tensors: dict[str, Tensor], numbers: dict[str, Any], last: bool = False
    ) -> None:
        """Keep a state, if that is due and it is not kept yet."""
        if self.kept and self.due(last) and self.kept.last != self.kept.path(count):
            config = {"what": self.what, "seconds": self.seconds, **numbers}
            self.kept.save(count, 0, tensors, config)
            self.saved = time.monotonic()
