"""What an epoch is accounted for by: the numbers of its steps, and its time."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from attractor.train.feeds import Feed
from attractor.train.history import Progress, Row
from attractor.train.place import Place
from attractor.train.recipe import Recipe
from attractor.train.runs import Begun

Counted = tuple[Tensor, dict[str, int]]  # sums [names], and of how many items
Tell = Callable[[Progress], None]


class Sums:
    """Numbers of the steps of an epoch, kept on the device."""

    def __init__(self, steps: int, place: Place) -> None:
        self.steps, self.place, self.done = steps, place, 0
        self.rows = torch.zeros(0)
        self.counts: dict[str, int] = {}

    def add(self, counted: Counted) -> None:
        """One more step."""
        sums, counts = counted
        if not self.done:
            self.rows = sums.new_zeros(self.steps, len(sums))
            self.counts = dict.fromkeys(counts, 0)
        if counts.keys() != self.counts.keys():
            raise ValueError(f"the loss named {', '.join(self.counts)} and later {', '.join(counts)}")
        if self.done == len(self.rows):  # of more batches than there should be, in evaluation
            self.rows = torch.cat((self.rows, torch.zeros_like(self.rows)))
        self.rows[self.done].copy_(sums)
        for name, count in counts.items():
            self.counts[name] += count
        self.done += 1

    def totals(self) -> tuple[Tensor, dict[str, int]]:
        """The steps so far ``[done, names]``, over all processes, and counts."""
        counts = self.place.total(torch.tensor(list(self.counts.values())))
        rows = self.place.total(self.rows[: self.done])
        return rows.clone(), dict(zip(self.counts, counts.tolist()))

    def restore(self, begun: Begun) -> None:
        """Put totals back; of several processes the first has them."""
        self.done = begun.step
        first = self.place.is_main
        self.rows = torch.zeros(self.steps, begun.sums.shape[1], dtype=begun.sums.dtype)
        self.rows[: self.done] = begun.sums if first else 0
        self.rows = self.rows.to(self.place.device)
        self.counts = {name: count if first else 0 for name, count in begun.counts.items()}

    def last_is_finite(self) -> bool:
        """Whether the last step's loss is."""
        return math.isfinite(self.rows[self.done - 1, list(self.counts).index("loss")])

    def means(self) -> dict[str, float]:
        """Over all items of all steps and processes so far."""
        own = torch.tensor(list(self.counts.values()), dtype=self.rows.dtype)
        sums, counts = self.place.total(torch.stack((self.rows.sum(0).cpu(), own)))
        return dict(zip(self.counts, (sums / counts).tolist()))

    def first_bad(self) -> int | None:
        """The first step, from 1, whose loss is not finite in any process."""
        place = list(self.counts).index("loss")
        bad = self.place.total((~self.rows[:, place].isfinite()).cpu().double())
        return int(bad.nonzero()[0]) + 1 if bad.any() else None


class Watch:
    """Time and throughput of an epoch, and when to look up from it."""

    EVERY = 1.0  # seconds

    def __init__(self, recipe: Recipe, epoch: int, feed: Feed, tell: Tell | None) -> None:
        self.recipe, self.epoch, self.feed, self.tell = recipe, epoch, feed, tell
        self.began = self.looked = time.perf_counter()
        self.samples = 0

    @property
    def seconds(self) -> float:
        """Since the epoch began."""
        return time.perf_counter() - self.began

    def wants_to_look(self, samples: int) -> bool:
        """Whether it is time to, after so many samples more."""
        self.samples += samples
        return time.perf_counter() - self.looked > self.EVERY

    def look(self, step: int, loss: float) -> None:
        """Tell how far it is."""
        self.looked = time.perf_counter()
        if self.tell:
            self.tell(self.progress(step, loss))

    def progress(self, step: int, loss: float, row: Row | None = None) -> Progress:
        """How far it is, with the epoch's row if it is over."""
        spent, steps = self.seconds, self.feed.steps
        left = (self.recipe.epochs - self.epoch) * steps - step
        name = f"{self.feed.unit}_per_second"
        per_second = row[name] if row else self.samples / max(spent, 1e-9)
        return Progress(
            self.recipe.seed, self.epoch + 1, self.recipe.epochs, step, steps, per_second,
            self.feed.unit, spent / step * left, loss, row,
        )  # fmt: skip
