"""What a solve returns: states over time, what they cost, and which of them can be trusted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.core.views import html_table, pandas, pictures


@dataclass(frozen=True)
class Stats:
    """What a solve cost.

    Attributes:
        rate_calls: calls of the rate for steps, each for the whole batch (calls that only check
            the rate or prepare to compile it are not counted).
        correction_calls: calls of the correction, likewise.
        steps: steps taken, each for the whole batch; under error control the longest
            trajectory's accepted and rejected ones together.
        accepted: under error control, accepted steps of each trajectory ``[*batch]``.
        rejected: likewise, rejected steps.
        guarded: with a guard, steps of each trajectory in which a correction was not trusted.
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
            found = getattr(self, name)
            if found is not None and found.numel():
                low, high = int(found.min()), int(found.max())
                counts.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
        return f"Stats({', '.join(counts)})"


@dataclass(frozen=True, eq=False)
class Trajectory:
    """States over time.

    Attributes:
        t: times ``[n+1]``.
        u: states ``[n+1, *batch, d]``.
        stats: rate calls, correction calls and steps.
        ok: ``[*batch]``, False where a state became non-finite (or, under error control, where the
            step size fell to nothing or `max_steps` was reached). Such a trajectory keeps its last
            good state.
        until: ``[*batch]``, the time up to which each trajectory was followed: ``t[-1]`` where ok.
    """

    t: Tensor
    u: Tensor
    stats: Stats
    ok: Tensor
    until: Tensor

    @property
    def final(self) -> Tensor:
        """The last states ``[*batch, d]``."""
        return self.u[-1]

    def __len__(self) -> int:
        return len(self.t)

    def __repr__(self) -> str:
        lost = int((~self.ok).sum())
        state = "all ok" if lost == 0 else f"{lost} of {self.ok.numel()} lost"
        shape = " x ".join(map(str, self.u.shape[1:])) or "scalar"
        return (
            f"Trajectory({len(self)} times in [{self.t[0].item():g}, {self.t[-1].item():g}], "
            f"states {shape}, {state}, {self.stats.steps} steps, {self.stats.rate_calls} rate calls)"
        )

    def _repr_html_(self) -> str:
        lost = int((~self.ok).sum())
        rows = [
            ("times", f"{len(self)}, from {self.t[0].item():g} to {self.t[-1].item():g}"),
            ("states", f"{list(self.u.shape[1:])}, {str(self.u.dtype).removeprefix('torch.')}"),
            ("lost", f"{lost} of {self.ok.numel()}" if lost else "none"),
            ("cost", repr(self.stats).removeprefix("Stats(").removesuffix(")")),
        ]
        return html_table(("Trajectory", ""), rows)

    def to_pandas(self) -> Any:
        """A table with a row a time of every trajectory: trajectory, t, u0, u1 ... and ok.

        A batch of several dimensions is counted through, the last one first. Needs the extra `report`.
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
        return pandas().DataFrame(columns)

    def plot(self, path: Path | str | None = None, title: str = "") -> Any:
        """States over time, and the first two components against each other, as a Matplotlib figure.

        Args:
            path: where to write it as a PNG, if anywhere. Needs the extra `report`.
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
