"""Arguments and results of the solvers of `odeint`, which have one step size for the whole state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

Callback = Callable[[Tensor, Tensor, Tensor], Any]
Event = Callable[[Tensor, Tensor], Tensor]  # (t [], u [d]) -> []


@dataclass(frozen=True)
class Callbacks:
    """Functions ``(t, u, dt)`` to call at each attempt, and at each accepted or rejected one."""

    step: Callback | None = None
    accept: Callback | None = None
    reject: Callback | None = None


@dataclass(frozen=True)
class Stops:
    """Times at which a step must end; at `jumps` the rate is also discontinuous."""

    times: Sequence[float] = ()
    jumps: Sequence[float] = ()

    def __post_init__(self) -> None:
        if set(self.times) & set(self.jumps):
            raise ValueError("step_t and jump_t share times; pass each time in one of them")


NO_CALLBACKS, NO_STOPS = Callbacks(), Stops()


class Solution(NamedTuple):
    """States ``[n+1, d]`` at the output times, or at the start and at the time ``[]`` of an event."""

    u: Tensor
    event_time: Tensor | None
    steps: int
