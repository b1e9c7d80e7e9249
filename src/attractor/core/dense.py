"""Dense output: states of a solved trajectory at any time, from the interpolants of its steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attractor.core.interpolant import coefficients, evaluate, hermite
from attractor.core.rates import Rate, call_rate
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.scheme import Scheme


class Segment(NamedTuple):
    """A step of each trajectory; its size h is 0 where a trajectory did not step."""

    t: Tensor  # [*batch, 1]
    h: Tensor  # [*batch, 1]
    u: Tensor  # [*batch, d]
    u1: Tensor  # [*batch, d]
    inner: Sequence[Tensor]  # [*batch, d] each; see `interpolant`

    def at(self, theta: Tensor) -> Tensor:
        """Return the states ``[*batch, d]`` at fractions theta ``[*batch, 1]`` of the steps."""
        return evaluate(self.u, self.u1, self.inner, theta.to(self.u.real.dtype))


@dataclass(frozen=True)
class SteppedOutput:
    """The interpolants of accepted steps, which differ between trajectories."""

    u0: Tensor  # [*batch, d]
    segments: Sequence[Segment]

    def __call__(self, t: Tensor) -> Tensor:
        """Return states at times t ``[n, *batch]``; after its last step a trajectory does not change."""
        u0 = self.u0
        if not self.segments:
            return u0.expand(len(t), *u0.shape)
        starts, sizes = (torch.stack([getattr(s, name) for s in self.segments])[..., 0] for name in "th")
        sign = -1.0 if bool((sizes < 0).any()) else 1.0
        # Where a trajectory did not step, its end is that of the step before.
        ends = torch.where(sizes != 0, sign * (starts + sizes), -torch.inf).cummax(0).values
        times = t.detach().to(ends.dtype)
        # [*batch, steps] and [*batch, n]
        last_axis = lambda x: x.movedim(0, -1).contiguous()
        index = torch.searchsorted(last_axis(ends), last_axis(sign * times)).movedim(-1, 0)
        index = index.clamp(max=len(self.segments) - 1)
        final = ends[-1]
        last_step = torch.searchsorted(last_axis(ends), last_axis(final[None])).movedim(-1, 0)
        index = torch.minimum(index, last_step)

        def pick(name: str) -> Tensor:
            return _pick(torch.stack([getattr(s, name) for s in self.segments]), index)

        h, start = pick("h")[..., 0], pick("t")[..., 0]
        theta = ((t - start) / torch.where(h == 0, 1.0, h)).to(u0.real.dtype)
        theta = torch.where(h == 0, 0.0, theta).clamp(0, 1)[..., None]
        inner = [
            _pick(torch.stack([s.inner[i] for s in self.segments]), index)
            for i in range(len(self.segments[0].inner))
        ]
        return evaluate(pick("u"), pick("u1"), inner, theta)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values[index[i, b], b]`` for values ``[steps, *batch, d]`` and index ``[n, *batch]``."""
    return values.gather(0, index[..., None].expand(*index.shape, values.shape[-1]))


@dataclass(frozen=True)
class GridOutput:
    """Interpolants between the states of a grid, computed for the steps that are evaluated.

    Attributes:
        scheme: A scheme whose own interpolant is used, or None for the cubic Hermite interpolant through
            the states and rates at both ends of a step.
    """

    f: Rate
    t: Tensor  # [n+1]
    u: Tensor  # [n+1, *batch, d]
    until: Tensor  # [*batch]
    scheme: Scheme | Rosenbrock | None

    def __call__(self, t: Tensor) -> Tensor:
        """Return the states at times t ``[n]``, each ``[*batch, d]``."""
        sign = -1.0 if len(self.t) > 1 and bool(self.t[-1] < self.t[0]) else 1.0
        grid = sign * self.t.detach()
        index = torch.searchsorted(grid, sign * t.detach().to(grid), right=True) - 1
        index = index.clamp(0, max(len(self.t) - 2, 0))
        inner: dict[int, list[Tensor]] = {}
        values = []
        for when, i in zip(t, index.tolist()):
            if len(self.t) == 1:
                values.append(self.u[0])
                continue
            if i not in inner:
                inner[i] = self._inner(i)
            theta = ((when - self.t[i]) / (self.t[i + 1] - self.t[i])).to(self.u.real.dtype)
            value = evaluate(self.u[i], self.u[i + 1], inner[i], theta)
            # A trajectory that was lost in this step, or before, keeps its last state.
            lost = ((self.t[i + 1].detach() - self.until) * sign > 0)[..., None]
            values.append(torch.where(lost, self.u[i], value))
        return torch.stack(values)

    def _inner(self, i: int) -> list[Tensor]:
        u, u1, real = self.u[i], self.u[i + 1], self.u.real.dtype
        t, t1, h = self.t[i].to(real), self.t[i + 1].to(real), (self.t[i + 1] - self.t[i]).to(real)
        if self.scheme is not None:
            stages = self.scheme.stages(self.f, t, u, h)
            k1 = stages[-1] if self.scheme.first_same_as_last else call_rate(self.f, t1, u1)
            return coefficients(self.scheme, self.f, t, h, u, u1, stages, k1)
        return hermite(u, u1, call_rate(self.f, t, u), call_rate(self.f, t1, u1), h)
