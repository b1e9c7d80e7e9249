"""The numbers of the steps of an epoch, and its time."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from attractor.train.feeds import Feed
from attractor.train.history import Progress, Row
from attractor.train.place import Place
from attractor.train.recipe import Recipe
from attractor.train.run_folder import EpochState

StepSums = tuple[Tensor, dict[str, int]]  # sums [names], and the number of items by name
Tell = Callable[[Progress], None]


class Sums:
    """The numbers of the steps of an epoch, on the device."""

    def __init__(self, steps: int, place: Place) -> None:
        self.steps, self.place, self.count = steps, place, 0
        self.rows = torch.zeros(0)
        self.counts: dict[str, int] = {}

    def add(self, step_sums: StepSums) -> None:
        """Add the numbers of one step."""
        sums, counts = step_sums
        if not self.count:
            self.rows = sums.new_zeros(self.steps, len(sums))
            self.counts = dict.fromkeys(counts, 0)
        if counts.keys() != self.counts.keys():
            raise ValueError(
                f"the loss named {', '.join(self.counts)} and later {', '.join(counts)}; it must "
                "return the same names in every step"
            )
        if self.count == len(self.rows):  # an evaluation may have more batches than its length says
            self.rows = torch.cat((self.rows, torch.zeros_like(self.rows)))
        self.rows[self.count].copy_(sums)
        for name, count in counts.items():
            self.counts[name] += count
        self.count += 1

    def totals(self) -> tuple[Tensor, dict[str, int]]:
        """Return the sums of the finished steps ``[steps, names]`` over all processes, and counts."""
        counts = self.place.total(torch.tensor(list(self.counts.values())))
        rows = self.place.total(self.rows[: self.count])
        return rows.clone(), dict(zip(self.counts, counts.tolist()))

    def restore(self, state: EpochState) -> None:
        """Restore totals from a checkpoint, in the first of several processes."""
        self.count = state.step
        first = self.place.is_main
        self.rows = torch.zeros(self.steps, state.sums.shape[1], dtype=state.sums.dtype)
        self.rows[: self.count] = state.sums if first else 0
        self.rows = self.rows.to(self.place.device)
        self.counts = {name: count if first else 0 for name, count in state.counts.items()}

    def last_is_finite(self) -> bool:
        """Return whether the loss of the last step is finite."""
        return math.isfinite(self.rows[self.count - 1, list(self.counts).index("loss")])

    def means(self) -> dict[str, float]:
        """Return means over all items of all finished steps and processes."""
        own = torch.tensor(list(self.counts.values()), dtype=self.rows.dtype)
        sums, counts = self.place.total(torch.stack((self.rows.sum(0).cpu(), own)))
        return dict(zip(self.counts, (sums / counts).tolist()))

    def first_bad(self) -> int | None:
        """Return the first step, from 1, with a loss that is not finite in some process."""
        place = list(self.counts).index("loss")
        bad = self.place.total((~self.rows[:, place].isfinite()).cpu().double())
        return int(bad.nonzero()[0]) + 1 if bad.any() else None


class Timer:
    """Time and throughput of an epoch, and when to report progress."""

    INTERVAL = 1.0  # seconds between two reports

    def __init__(self, recipe: Recipe, epoch: int, feed: Feed, tell: Tell | None) -> None:
        self.recipe, self.epoch, self.feed, self.tell = recipe, epoch, feed, tell
        self.began = self.last_report = time.perf_counter()
        self.samples = 0

    @property
    def seconds(self) -> float:
        """Seconds since the epoch began."""
        return time.perf_counter() - self.began

    def is_due(self, samples: int) -> bool:
        """Count further samples, and return whether a report is due."""
        self.samples += samples
        return time.perf_counter() - self.last_report > self.INTERVAL

    def report(self, step: int, loss: float) -> None:
        """Report progress."""
        self.last_report = time.perf_counter()
        if self.tell:
            self.tell(self.progress(step, loss))

    def progress(self, step: int, loss: float, row: Row | None = None) -> Progress:
        """Return the progress, with the row of the epoch if it is finished."""
        elapsed, steps = self.seconds, self.feed.steps
        steps_left = (self.recipe.epochs - self.epoch) * steps - step
        name = f"{self.feed.unit}_per_second"
        per_second = row[name] if row else self.samples / max(elapsed, 1e-9)
        return Progress(
            self.recipe.seed, self.epoch + 1, self.recipe.epochs, step, steps, per_second,
            self.feed.unit, elapsed / step * steps_left, loss, row,
        )  # fmt: skip
