"""Plain steps along fine trajectories and their errors: what a correction is fitted to."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attractor.core.rates import Rate
from attractor.core.step import Step
from attractor.core.tableaus import AnyScheme
from attractor.ode.trajectories import Run


@dataclass(frozen=True)
class Pairs:
    """Plain steps and their errors.

    Attributes:
        u, slope: States and slopes ``[n, d]``.
        error: The errors ``u' - u - dt S`` of the steps ``[n, d]``.
        t: Times ``[n]``.
        dt: The step size.
        stages: The stages of the steps, ``[n, d]`` each, if a correction is to see them.
        parameters: Of the trajectories ``[n, k]``; None for an equation without them.
    """

    u: Tensor
    slope: Tensor
    error: Tensor
    t: Tensor
    dt: float
    stages: tuple[Tensor, ...] = ()
    parameters: Tensor | None = None

    def rows(self, index: Tensor) -> "Pairs":
        """Return some of them."""
        return self._map(lambda x: x[index])

    def to(self, dtype: torch.dtype) -> "Pairs":
        """Return them in another type; times stay as they are."""
        return replace(self._map(lambda x: x.to(dtype)), t=self.t)

    def step(self) -> Step:
        """Return the steps, as a correction sees them."""
        return Step(self.u, self.slope, self.dt, self.t, self.stages, self.parameters)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Pairs":
        return Pairs(
            change(self.u), change(self.slope), change(self.error), change(self.t), self.dt,
            tuple(change(k) for k in self.stages),
            None if self.parameters is None else change(self.parameters),
        )  # fmt: skip

    @property
    def hash(self) -> str:
        """SHA-256 of all numbers."""
        total = hashlib.sha256(float(self.dt).hex().encode())
        for x in (self.u, self.slope, self.error, self.t, self.parameters):
            if x is None:
                continue
            total.update(x.cpu().contiguous().numpy().tobytes())
        return total.hexdigest()


def one_step(
    rate: Rate, scheme: AnyScheme, dt: float, runs: list[Run], timed: bool, stages: bool = False
) -> Pairs:
    """The pairs along fine trajectories, with the stages of the steps if they are wanted."""
    parts: list[Pairs] = []
    for run in runs:
        (count, n), device = run.u[:-1].shape[:2], run.u.device
        u, after = (x.flatten(0, 1) for x in (run.u[:-1], run.u[1:]))
        t = (run.t0 + torch.arange(count, dtype=u.dtype, device=device) * dt).repeat_interleave(n)
        p = run.parameters
        with torch.no_grad():
            if timed:  # a step of all trajectories at a time, for t is one number
                single = [
                    scheme.step(rate, t[i * n], u[i * n : (i + 1) * n], dt, p) for i in range(count)
                ]
                slope = torch.cat([step.slope for step in single])
                kept = [torch.cat(k) for k in zip(*(step.stages for step in single))]
                p = None if p is None else p.repeat(count, 1)
            else:
                p = None if p is None else p.repeat(count, 1)
                step = scheme.step(rate, t[0], u, dt, p)
                slope, kept = step.slope, list(step.stages)
        error = after - u - dt * slope
        parts.append(Pairs(u, slope, error, t, dt, tuple(kept) if stages else (), p))
    pairs = _joined(parts)
    finite = torch.isfinite(pairs.slope).all(-1)
    if not bool(finite.all()):
        raise ValueError(
            f"a plain step of {scheme.name} with dt = {dt:g} is non-finite from "
            f"{int((~finite).sum())} of {len(finite)} states; use a smaller dt"
        )
    return pairs


def _joined(parts: list[Pairs]) -> Pairs:
    """All pairs of several parts."""
    if len(parts) == 1:
        return parts[0]
    join: Any = lambda name: torch.cat([getattr(part, name) for part in parts])
    stages = tuple(torch.cat(k) for k in zip(*(part.stages for part in parts)))
    p = None if parts[0].parameters is None else join("parameters")
    return Pairs(join("u"), join("slope"), join("error"), join("t"), parts[0].dt, stages, p)
