"""A scheme whose step does not change the state, for corrections that replace the rate."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.core.rates import Rate, check_state
from attractor.core.step import Step


@dataclass(frozen=True)
class Identity:
    """A scheme of order 0 with the slope 0, which never calls the rate.

    With it a correction is the whole flow map, ``u(t + dt) = u(t) + Q``.

    >>> Identity().slope(None, 0.0, torch.ones(2), 0.1)
    tensor([0., 0.])
    """

    name: str = "identity"
    order: int = 0
    rate_calls: int = 0

    def __repr__(self) -> str:
        return "Identity()"

    def slope(self, f: Rate | None, t: Any, u: Tensor, dt: Any) -> Tensor:
        """Return zeros like u ``[*batch, d]``."""
        check_state(u, t, dt)
        return torch.zeros_like(u)

    def step(self, f: Rate | None, t: Any, u: Tensor, dt: Any, parameters: Tensor | None = None) -> Step:
        """Return the step from u, which has no stages. Arguments as for `Scheme.step`."""
        return Step(u, self.slope(f, t, u, dt), dt, t, (), parameters)

    def check_rate(self, f: Rate, t: Any, u: Tensor) -> None:
        """Accept any rate."""
