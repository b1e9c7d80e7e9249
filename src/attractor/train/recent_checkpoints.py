"""The last two checkpoints of a computation in progress."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from attractor.storage.files import names_in, remove_folder
from attractor.storage.objects import AnyPath, ObjectPath, path_of
from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError

ADVICE = "give another out=, or resume=False to start anew"
CheckpointContent = tuple[AnyPath, dict[str, Tensor], dict[str, Any]]


class RecentCheckpoints:
    """The last two checkpoints of a computation in progress, each in a folder of its own.

    The folders are called ``epoch-0012``, or ``epoch-0012-step-000340`` within an epoch. The earlier
    one is a reserve in case the last is damaged.
    """

    def __init__(self, folder: AnyPath | str, kind: str, unit: str = "epoch", main: bool = True) -> None:
        self.folder, self.kind, self.unit, self.main = path_of(folder), kind, unit, main
        self.name = re.compile(rf"{unit}-(\d+)(?:-step-(\d+))?")
        self.bad: list[AnyPath] = []  # damaged checkpoints, which the next save removes
        self.last: AnyPath | None = None

    def paths(self) -> list[AnyPath]:
        """Return the existing checkpoints, the latest first."""
        matches = filter(None, map(self.name.fullmatch, names_in(self.folder)))
        count = lambda match: tuple(int(x or 0) for x in match.groups())
        places = [self.folder / match[0] for match in sorted(matches, key=count, reverse=True)]
        return [p for p in places if isinstance(p, ObjectPath) or not p.is_symlink()]

    def remove_all(self) -> None:
        """Remove all checkpoints."""
        for old in self.paths():
            remove_folder(old, checkpoint.MANIFEST)

    def path(self, count: int, step: int = 0) -> AnyPath:
        """Return the path of the checkpoint after `count` epochs and `step` steps of the next one."""
        return self.folder / (f"{self.unit}-{count:04}" + (f"-step-{step:06}" if step else ""))

    def save(self, count: int, step: int, tensors: dict[str, Tensor], config: dict[str, Any]) -> AnyPath:
        """Write a checkpoint, then remove all but the previous one. A failed write leaves no files."""
        new = self.path(count, step)
        others = [p for p in self.paths() if p != new and p not in self.bad]
        remove_folder(new, checkpoint.MANIFEST)
        with self.disk_errors(f"{self.unit} {count}" + (f", step {step}," if step else "")):
            checkpoint.save(new, self.kind, tensors, config)
        for old in [p for p in self.bad if p != new] + others[1:]:
            remove_folder(old, checkpoint.MANIFEST)
        self.bad, self.last = [], new
        return new

    def load(self) -> CheckpointContent | None:
        """Load the latest intact checkpoint, or return None. Damaged ones are skipped with a warning.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        problems = []
        for path in self.paths():
            try:
                tensors, config = checkpoint.load(path, self.kind)
            except CheckpointError as error:
                self.bad.append(path)
                problems.append(str(error))
                continue
            if problems and self.main:
                warnings.warn(f"{'; '.join(problems)}; going on from {path.name}", stacklevel=4)
            if self.main:
                with suppress(OSError):  # the folder is read-only, or another process is writing to it
                    checkpoint.settle(path)
            self.last = path
            return path, tensors, config
        if any((path / checkpoint.MANIFEST).exists() for path in self.bad):
            raise CheckpointError(f"no checkpoint is left in {self.folder}: {problems[0]}; {ADVICE}")
        if problems and self.main:
            warnings.warn(f"{'; '.join(problems)}; starting from the beginning", stacklevel=4)
        return None

    @contextmanager
    def disk_errors(self, what: str) -> Iterator[None]:
        """Raise errors of the disk with the name of what could not be written and what remains."""
        try:
            yield
        except OSError as error:
            there = f"{self.last} is whole" if self.last else "there is no checkpoint yet"
            raise type(error)(
                error.errno,
                f"{what} could not be written to {self.folder} ({error.strerror or error}); {there}: "
                "once the folder can be written to, the same call continues from there",
            ) from None
