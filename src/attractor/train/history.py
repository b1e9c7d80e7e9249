"""Results of training: progress, one row of numbers per epoch, and summaries over several seeds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]
# Entries of a row that differ between equal runs; times.jsonl has them, log.jsonl does not.
TIMES = ("seconds", "images_per_second", "samples_per_second")


@dataclass
class History:
    """One row of numbers per epoch.

    A row has `epoch` (from 1), `lr` (of the last step), `train_loss`, `train_accuracy` (over the epoch,
    while weights change), `valid_loss`, `valid_accuracy`, `seconds` of training and `images_per_second`.
    With a loss of your own, the names are those that the loss returns. Values that are not finite are
    None.
    """

    rows: list[Row] = field(default_factory=list)

    def __repr__(self) -> str:
        last = self.rows[-1] if self.rows else {}
        values = [
            f"{k} {v:.4g}"
            for k, v in last.items()
            if k.startswith(("train_", "valid_")) and v is not None
        ]
        return f"History({', '.join([f'{len(self)} epochs', *values])})"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def final(self) -> Row:
        """The last epoch's row."""
        if not self.rows:
            raise ValueError("the history has no finished epoch")
        return self.rows[-1]

    @property
    def accuracy(self) -> float:
        """Validation accuracy after the last epoch, not the best of all."""
        return self.last("valid_accuracy")

    def last(self, name: str) -> float:
        """Return one number of the last epoch by its name."""
        if self.final.get(name) is None:
            names = ", ".join(k for k, v in self.final.items() if v is not None)
            raise ValueError(f"no {name} in the last row, which has {names}")
        return self.final[name]

    def column(self, name: str) -> list[Any]:
        """Return one number by its name, for every epoch."""
        return [row.get(name) for row in self.rows]


@dataclass(frozen=True)
class Seeds:
    """Histories of the same training from several seeds."""

    seeds: tuple[int, ...]
    histories: tuple[History, ...]
    name: str = "valid_accuracy"

    def __repr__(self) -> str:
        return f"Seeds({self.name} {self})"

    @property
    def values(self) -> list[float]:
        """The final epoch's number for every seed."""
        return [history.last(self.name) for history in self.histories]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return mean(self.values)

    @property
    def spread(self) -> float:
        """The sample standard deviation over seeds (divided by n - 1); NaN for a single seed."""
        return stdev(self.values) if len(self.values) > 1 else math.nan

    def __str__(self) -> str:
        if len(self.seeds) == 1:
            return f"{self.mean:.4f} (one seed)"
        return f"{self.mean:.4f} ± {self.spread:.4f} ({len(self.seeds)} seeds)"


@dataclass(frozen=True)
class Progress:
    """The progress of training; `tell` receives it about once a second, and with a row per epoch.

    ``str`` formats it as one line, so that ``tell=print`` works.
    """

    seed: int
    epoch: int  # from 1
    epochs: int
    step: int  # finished steps of this epoch
    steps: int
    per_second: float  # images or samples
    unit: str
    seconds_left: float
    loss: float  # mean over the epoch so far
    row: Row | None = None

    def __str__(self) -> str:
        where = f"seed {self.seed}, epoch {self.epoch}/{self.epochs}"
        rate_and_time = f"{self.per_second:,.0f} {self.unit}/s, {_clock(self.seconds_left)} left"
        if self.row is None:
            return f"{where}, step {self.step}/{self.steps}: loss {self.loss:.4f}, {rate_and_time}"
        values = [
            f"{k} {v:.4f}"
            for k, v in self.row.items()
            if k.startswith(("train_", "valid_")) and v is not None
        ]
        return f"{where}: {', '.join(values)}, {rate_and_time}"


class DivergedError(FloatingPointError):
    """Raised if the training loss is no longer a finite number.

    Attributes:
        history: the history of the epochs before.
        epoch, step: the epoch and step of the first loss that is not finite, from 1.
        layer: the name of the first module whose output is not finite; None if all outputs are finite,
            so that the data or the loss function are the cause.
    """

    def __init__(
        self, message: str, history: History, epoch: int, step: int, layer: str | None = None
    ) -> None:
        super().__init__(message)
        self.history, self.epoch, self.step, self.layer = history, epoch, step, layer

    def __reduce__(self) -> tuple[Any, ...]:
        # Needed to send the error from one process to another.
        return type(self), (str(self), self.history, self.epoch, self.step, self.layer)


class TerminatedError(SystemExit):
    """Raised after SIGTERM, once a checkpoint is written; if not caught, it exits with status 143."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 128 + 15


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
