"""What a solve returns: states over time, what they cost, and which of them can be trusted."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
