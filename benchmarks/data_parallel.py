"""A model of synchronous data-parallel training on machines that fail, for `benchmarks.workers`."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Training:
    """A synchronous data-parallel training, one process per machine; all durations in seconds.

    Attributes:
        processes: Number of machines. A failure of one of them stops all.
        mtbf: Mean time between the failures of a machine.
        interval: Time of training between two checkpoints.
        save: Duration of writing a checkpoint, in which all processes wait.
        restart: Time from a failure until training goes on from the last checkpoint.
        step: Duration of the computation of a step.
        spread: Standard deviation of its logarithm, per process and step.
        gradients: Bytes of all gradients.
        link: Bytes per second between two processes.
    """

    processes: int
    mtbf: float
    interval: float = 600.0
    save: float = 1.2  # weights and two moments of Adam, 100 million parameters, at 1 GB/s
    restart: float = 360.0
    step: float = 1.0
    spread: float = 0.05
    gradients: float = 4e8
    link: float = 1e11

    @property
    def job_mtbf(self) -> float:
        """The mean time between failures of any machine."""
        return self.mtbf / self.processes

    def step_seconds(self, seed: int = 0) -> float:
        """Return the mean duration of a step: the slowest process, then the ring all-reduce."""
        normal = np.random.default_rng(seed).standard_normal((2_000, self.processes))
        slowest = self.step * float(np.exp(self.spread * normal.max(1)).mean())
        return slowest + 2 * (self.processes - 1) / self.processes * self.gradients / self.link

    def useful(self, seed: int = 0, failures: int = 20_000) -> float:
        """Return the simulated fraction of the time that is training which is not lost.

        A failure during a restart begins the restart again.
        """
        between = np.random.default_rng(seed).exponential(self.job_mtbf, failures)
        intervals = np.maximum(between - self.restart, 0) // (self.interval + self.save)
        return float(intervals.sum() * self.interval / between.sum())

    def expected_useful(self) -> float:
        """Return the expectation of the same fraction (Daly 2006, equation 20)."""
        exponent = (self.interval + self.save) / self.job_mtbf
        if exponent > 500:
            return 0.0
        period = self.job_mtbf * math.exp(self.restart / self.job_mtbf) * math.expm1(exponent)
        return self.interval / period

    def best_interval(self) -> dict[str, float]:
        """Return the intervals of Young (1974) and of Daly (2006, equation 37)."""
        young, ratio = math.sqrt(2 * self.save * self.job_mtbf), self.save / (2 * self.job_mtbf)
        daly = young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.save
        return {"young": young, "daly": daly if ratio < 1 else self.job_mtbf}


def training_row(training: Training) -> dict[str, Any]:
    """Return the useful fraction with checkpoints every 10 minutes and at Daly's interval."""
    best = training.best_interval()
    return {
        **asdict(training), "job_mtbf": training.job_mtbf, **best, "step_seconds": training.step_seconds(),
        "useful": training.useful(), "expected": training.expected_useful(),
        "useful_daly": replace(training, interval=best["daly"]).useful(),
    }  # fmt: skip
