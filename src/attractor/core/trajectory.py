"""The result of a solve: states over time, their cost, and the status of each trajectory."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.common.views import html_table, pandas, pictures
from attractor.core.dense import SteppedOutput


class Status(IntEnum):
    """How a trajectory ended.

    After `LOST`, `STEP_UNDERFLOW` and `STEP_LIMIT` a trajectory did not reach the last time, and
    `Trajectory.ok` is False.

    Attributes:
        OK: The trajectory was followed to the last time.
        GUARDED: A hybrid solver left its trust region and replaced the corrected steps there by plain
            substeps.
        EXTRAPOLATED: A hybrid solver left its trust region and applied its correction all the same,
            since it was called with ``guard=False``. The error of later states is not known.
        LOST: A state became non-finite.
        STEP_UNDERFLOW: Error control reduced the step size to the rounding of the time.
        STEP_LIMIT: Error control reached ``max_steps``.
        EVENT: An event ended the trajectory before the last time, as asked.
    """

    OK = 0
    GUARDED = 1
    EXTRAPOLATED = 2
    LOST = 3
    STEP_UNDERFLOW = 4
    STEP_LIMIT = 5
    EVENT = 6


_REASONS = {
    Status.GUARDED: "left the trust region (guarded)",
    Status.EXTRAPOLATED: "left the trust region (not guarded)",
    Status.LOST: "lost",
    Status.STEP_UNDERFLOW: "stopped by a vanishing step size",
    Status.STEP_LIMIT: "stopped by max_steps",
    Status.EVENT: "ended by an event",
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
class Events:
    """Where events ended trajectories.

    Attributes:
        time: Times ``[*batch]``, NaN where there was no event. Gradients are those of the implicit
            function theorem; second derivatives are not those of the event.
        state: States ``[*batch, d]`` at these times, NaN where there was no event.
        index: Which of the event functions it was ``[*batch]``, -1 where there was no event.
    """

    time: Tensor
    state: Tensor
    index: Tensor


@dataclass(frozen=True, eq=False)
class Trajectory:
    """States over time.

    Attributes:
        t: Times ``[n+1]``, or ``[n+1, *batch]`` if each trajectory has its own times.
        u: States ``[n+1, *batch, d]``.
        stats: Rate calls, correction calls and steps.
        ok: ``[*batch]``, False where the trajectory was not followed to the last time: a state became
            non-finite, or error control gave up. Such a trajectory keeps its last good state.
        until: ``[*batch]``, the time up to which each trajectory was followed: ``t[-1]`` where ok, or
            the time of an event.
        status: ``[*batch]`` of `Status` values (int8), the reason per trajectory; derived from `ok` if
            it is not passed.
        events: The events that ended trajectories, if `evolve` was called with ``events=``.
        dense: Maps times to states, if `evolve` was called with ``dense=True``. Call the trajectory
            itself, which checks the times.
    """

    t: Tensor
    u: Tensor
    stats: Stats
    ok: Tensor
    until: Tensor
    status: Tensor = None  # type: ignore[assignment]  # filled below
    events: Events | None = None
    dense: Callable[[Tensor], Tensor] | None = None

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

    def __call__(self, t: float | Tensor) -> Tensor:
        """Return the states at any times inside the solved interval. Requires ``dense=True``.

        The interpolant is that of the scheme (order 4 for "dopri5" and "tsit5", 7 for "dop853"), and a
        cubic Hermite polynomial for others. Gradients flow to t, to the initial states and to the
        parameters of the rate. A trajectory that ended early keeps its last state.

        Args:
            t: A time, 1-D times ``[n]``, or one row of times per trajectory ``[n, *batch]``.

        Returns:
            States ``[*batch, d]`` for one time, ``[n, *batch, d]`` otherwise.

        Raises:
            ValueError: A time is outside of the solved interval, or there is no dense output.
        """
        if self.dense is None:
            raise ValueError(
                "this trajectory has no dense output, only the states u at the times t; solve with "
                "evolve(..., dense=True)"
            )
        times = torch.as_tensor(t, dtype=None if isinstance(t, Tensor) else torch.float64)
        times = times.to(self.t.device)
        single, batch = times.dim() == 0, self.u.shape[1:-1]
        if single:
            times = times[None]
        if times.dim() != 1 and times.shape[1:] != batch:
            raise ValueError(
                f"t has shape {list(times.shape)}; pass a number, a 1-D tensor, or [n, *{list(batch)}]"
            )
        per_trajectory, beyond = times.dim() > 1, None
        if isinstance(self.dense, SteppedOutput):
            expanded = times if per_trajectory else times.reshape(-1, *[1] * len(batch))
            bounds = torch.stack((self.t[0], self.t[-1])).detach()
            low, high = bounds.min(0).values, bounds.max(0).values
            checked = expanded.expand(len(times), *batch)
            sign = torch.sign(self.t[-1] - self.t[0]).detach()
            beyond = (checked - self.until) * sign > 0  # after an event, or where a trajectory was lost
        elif per_trajectory:
            raise ValueError("times per trajectory need error control (rtol or atol); pass 1-D times")
        else:
            checked, low, high = times, self.t.detach().min(), self.t.detach().max()
        if bool(((checked < low) | (checked > high)).any()):
            raise ValueError(
                f"t has times from {times.min().item():g} to {times.max().item():g}, but the solved "
                f"interval is [{low.min().item():g}, {high.max().item():g}]"
            )
        if beyond is not None:
            checked = torch.where(beyond, self.until.to(checked.dtype), checked)
        states = self.dense(checked)
        return states[0] if single else states

    def _summary(self) -> str:
        """Return the number of trajectories per status other than OK."""
        total = self.status.numel()
        counts = [(reason, int((self.status == status).sum())) for status, reason in _REASONS.items()]
        return ", ".join(f"{n} of {total} {reason}" for reason, n in counts if n) or "all ok"

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.u.shape[1:])) or "scalar"
        return (
            f"Trajectory({len(self)} times in [{self._first:g}, {self._last:g}], "
            f"states {shape}, {self._summary()}, {self.stats.steps} steps, "
            f"{self.stats.rate_calls} rate calls)"
        )

    @property
    def _first(self) -> float:
        """The first time; of several trajectories the least."""
        return self.t[0].min().item() if self.t.numel() else 0.0

    @property
    def _last(self) -> float:
        """The last time; of several trajectories the greatest."""
        return self.t[-1].max().item() if self.t.numel() else 0.0

    def _repr_html_(self) -> str:
        rows = [
            ("times", f"{len(self)}, from {self._first:g} to {self._last:g}"),
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
            "t": self.t.detach().cpu().reshape(len(self), -1).expand(-1, count).T.flatten().numpy(),
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
        if self.t.dim() > 1:
            raise ValueError("each trajectory has its own times; plot trajectories one by one")
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
        """Return all states, stacked along a new first dimension."""
        return torch.stack(self._list) if self._buffer is None else self._buffer
