"""What a solve returns: states over time, their cost, and the status of each trajectory."""

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.core.views import html_table, pandas, pictures


class Status(IntEnum):
    """How a trajectory ended.

    From `LOST` on, a trajectory did not reach the last time, and `Trajectory.ok` is False.

    Attributes:
        OK: The trajectory was followed to the last time.
        GUARDED: A hybrid solver left its trust region and replaced the corrected steps there by plain
            substeps.
        EXTRAPOLATED: A hybrid solver left its trust region and applied its correction all the same,
            since it was called with ``guard=False``. The error of later states is not known.
        LOST: A state became non-finite.
        STEP_UNDERFLOW: Error control reduced the step size to the rounding of the time.
        STEP_LIMIT: Error control reached ``max_steps``.
    """

    OK = 0
    GUARDED = 1
    EXTRAPOLATED = 2
    LOST = 3
    STEP_UNDERFLOW = 4
    STEP_LIMIT = 5


_REASONS = {
    Status.GUARDED: "left the trust region (guarded)",
    Status.EXTRAPOLATED: "left the trust region (not guarded)",
    Status.LOST: "lost",
    Status.STEP_UNDERFLOW: "stopped by a vanishing step size",
    Status.STEP_LIMIT: "stopped by max_steps",
}


@dataclass(frozen=True)
class Stats:
    """The cost of a solve.

    Attributes:
        rate_calls: Calls of the rate in steps, each for the whole batch. Calls that only check the rate
            or prepare its compilation are not counted.
        correction_calls: Calls of the correction, each for the whole batch.
        steps: Steps taken, each for the whole batch. Under error control, accepted and rejected steps of
            the trajectory that needed the most.
        accepted: Under error control, accepted steps per trajectory ``[*batch]``.
        rejected: Under error control, rejected steps per trajectory ``[*batch]``.
        guarded: With a guard, steps per trajectory ``[*batch]`` that were replaced by plain substeps.
    """

    rate_calls: int
    correction_calls: int
    steps: int
    accepted: Tensor | None = None
    rejected: Tensor | None = None
    guarded: Tensor | None = None

    def __repr__(self) -> str:
        counts = [f"{self.steps} steps", f"{self.rate_calls} rate calls"]
        if self.correction_calls:
            counts.append(f"{self.correction_calls} correction calls")
        for name in ("accepted", "rejected", "guarded"):
            steps = getattr(self, name)
            if steps is not None and steps.numel():
                low, high = int(steps.min()), int(steps.max())
                counts.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
        return f"Stats({', '.join(counts)})"


@dataclass(frozen=True, eq=False)
class Trajectory:
    """States over time.

    Attributes:
        t: Times ``[n+1]``.
        u: States ``[n+1, *batch, d]``.
        stats: Rate calls, correction calls and steps.
        ok: ``[*batch]``, False where the trajectory was not followed to the last time: a state became
            non-finite, or error control gave up. Such a trajectory keeps its last good state.
        until: ``[*batch]``, the time up to which each trajectory was followed: ``t[-1]`` where ok.
        status: ``[*batch]`` of `Status` values (int8), the reason per trajectory; derived from `ok` if
            it is not passed.
    """

    t: Tensor
    u: Tensor
    stats: Stats
    ok: Tensor
    until: Tensor
    status: Tensor = None  # type: ignore[assignment]  # filled below

    def __post_init__(self) -> None:
        if self.status is None and isinstance(self.ok, Tensor):
            status = torch.full_like(self.ok, Status.OK, dtype=torch.int8)
            object.__setattr__(self, "status", status.masked_fill(~self.ok.bool(), Status.LOST))

    @property
    def final(self) -> Tensor:
        """The last states ``[*batch, d]``."""
        return self.u[-1]

    def __len__(self) -> int:
        return len(self.t)

    def _summary(self) -> str:
        """The number of trajectories per status that is not OK."""
        total = self.status.numel()
        counts = [(reason, int((self.status == status).sum())) for status, reason in _REASONS.items()]
        return ", ".join(f"{n} of {total} {reason}" for reason, n in counts if n) or "all ok"

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.u.shape[1:])) or "scalar"
        return (
            f"Trajectory({len(self)} times in [{self.t[0].item():g}, {self.t[-1].item():g}], "
            f"states {shape}, {self._summary()}, {self.stats.steps} steps, "
            f"{self.stats.rate_calls} rate calls)"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("times", f"{len(self)}, from {self.t[0].item():g} to {self.t[-1].item():g}"),
            ("states", f"{list(self.u.shape[1:])}, {str(self.u.dtype).removeprefix('torch.')}"),
            ("status", self._summary()),
            ("cost", repr(self.stats).removeprefix("Stats(").removesuffix(")")),
        ]
        return html_table(("Trajectory", ""), rows)

    def to_pandas(self) -> Any:
        """Return a table with one row per trajectory and time.

        Its columns are trajectory, t, u0, u1, ..., ok and status. Trajectories of a batch with several
        dimensions are numbered in row-major order. Requires the extra `report`.
        """
        size = self.u.shape[-1]
        states = self.u.detach().reshape(len(self), -1, size).transpose(0, 1).cpu()  # [batch, times, d]
        count = states.shape[0]
        columns: dict[str, Any] = {
            "trajectory": torch.arange(count).repeat_interleave(len(self)).numpy(),
            "t": self.t.detach().cpu().repeat(count).numpy(),
        }
        for i in range(size):
            columns[f"u{i}"] = states[..., i].flatten().numpy()
        columns["ok"] = self.ok.flatten().cpu().repeat_interleave(len(self)).numpy()
        names = [Status(value).name.lower() for value in self.status.flatten().tolist()]
        columns["status"] = [name for name in names for _ in range(len(self))]
        return pandas().DataFrame(columns)

    def plot(self, path: Path | str | None = None, title: str = "") -> Any:
        """Draw the states over time, and the first two components against each other.

        Args:
            path: File to write the picture to, as PNG. Requires the extra `report`.

        Returns:
            A Matplotlib figure.
        """
        figures = pictures("figures")
        states = self.u.detach().reshape(len(self), -1, self.u.shape[-1]).double().cpu().numpy()
        figure = figures.trajectories(self.t.tolist(), states, title)
        if path is not None:
            figures.write(figure, path)
        return figure


class Record:
    """Collects states one by one; without gradients it writes them in place."""

    def __init__(self, like: Tensor, count: int) -> None:
        self._list: list[Tensor] = []
        self._buffer = None if torch.is_grad_enabled() else like.new_empty(count, *like.shape)
        self._next = 0

    def __len__(self) -> int:
        return self._next

    def put(self, state: Tensor) -> None:
        """Append a state."""
        if self._buffer is None:
            self._list.append(state)
        else:
            self._buffer[self._next] = state
        self._next += 1

    def finish(self) -> Tensor:
        """All states, stacked in front."""
        return torch.stack(self._list) if self._buffer is None else self._buffer
