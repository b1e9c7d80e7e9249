"""States at output times: the times that a step passes, and their positions inside of it."""

from typing import NamedTuple

import torch
from torch import Tensor

from attractor.core.dense import Segment
from attractor.core.interpolant import evaluate
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.rounds import as_time
from attractor.core.scheme import Scheme
from attractor.core.transforms import is_differentiated


class Pairs(NamedTuple):
    """Output times inside of the steps of a round, in pairs of a trajectory and a time.

    Attributes:
        rows: Indices of the trajectories ``[pairs]`` in the flattened batch.
        times: Indices of the times ``[pairs]``.
    """

    rows: Tensor
    times: Tensor

    def theta(self, clock: Tensor, t: Tensor, h: Tensor, u: Tensor) -> Tensor:
        """Return the times as fractions ``[pairs, 1]`` of steps of size h from t ``[*batch, 1]``."""
        own = clock.dim() > 1
        at = clock.flatten(1)[self.times, self.rows] if own else clock[self.times]
        start, size = (x.reshape(-1, 1)[self.rows] for x in (t, h))
        return as_time((at[:, None] - start) / size, u)


class Output:
    """The states at the output times, which are filled in when trajectories pass these times.

    Args:
        clock: Output times, ``[n+1]`` or ``[n+1, *batch]``.
        sign: Direction of time.
        u0: States ``[*batch, d]`` at the first time.

    Attributes:
        states: The states ``[n+1, *batch, d]``.
        upcoming: Index ``[*batch]`` of the next output time of each trajectory.
    """

    def __init__(self, clock: Tensor, sign: float, u0: Tensor) -> None:
        self.clock, self.sign, self.last = clock, sign, len(clock) - 1
        self.ordered = sign * clock.movedim(0, -1).contiguous()  # [n+1] or [*batch, n+1]
        self.upcoming = torch.ones(u0.shape[:-1], dtype=torch.long, device=u0.device)
        self.states = u0.expand(self.last + 1, *u0.shape).clone()
        self.flat = self.states.view(self.last + 1, -1, u0.shape[-1])

    @property
    def arrived(self) -> Tensor:
        """Trajectories ``[*batch]`` that have passed the last time."""
        return self.upcoming > self.last

    def next(self) -> Tensor:
        """Return the next output time of each trajectory ``[*batch, 1]``, or the last one."""
        index, clock = self.upcoming.clamp(max=self.last), self.clock
        return (clock[index] if clock.dim() == 1 else clock.gather(0, index[None])[0])[..., None]

    def passed(self, passed: Tensor, t1: Tensor) -> Pairs | None:
        """Return the output times in steps that end at t1 ``[*batch, 1]``; None if there are none.

        Args:
            passed: Trajectories ``[*batch, 1]`` whose step is accepted.
        """
        own_times = self.ordered.dim() > 1
        points = self.sign * (t1 if own_times else t1[..., 0])
        reached = torch.searchsorted(self.ordered, points.contiguous(), right=True)
        reached = reached[..., 0] if own_times else reached
        stop = torch.where(passed[..., 0], reached, self.upcoming)
        first, count = self.upcoming.reshape(-1), (stop - self.upcoming).reshape(-1)
        total = int(count.sum())
        if not total:
            return None
        rows = torch.arange(len(count), device=count.device).repeat_interleave(count, output_size=total)
        before = count.cumsum(0) - count
        index = torch.arange(total, device=count.device) - before[rows] + first[rows]
        self.upcoming = stop
        return Pairs(rows, index)

    def finish(self, u: Tensor) -> Tensor:
        """Return the states; a trajectory that did not reach a time has its last state u there."""
        if bool(self.arrived.all()):
            return self.states
        times = torch.arange(self.last + 1, device=u.device).reshape(-1, *[1] * u.dim())
        return torch.where(times < self.upcoming[..., None], self.states, u)


def states_inside(
    scheme: Scheme | Rosenbrock, u1: Tensor, segment: Segment | None, pairs: Pairs, theta: Tensor
) -> Tensor:
    """Return the states ``[pairs, d]`` at theta ``[pairs, 1]`` of steps that end at u1 ``[*batch, d]``.

    Args:
        segment: The steps; None if all of theta is 1.
    """
    flat = lambda x: x.reshape(-1, x.shape[-1])[pairs.rows]
    if segment is None:
        return flat(u1)
    value = evaluate(flat(segment.u), flat(u1), [flat(x) for x in segment.inner], theta)
    if not _skips_ends(scheme, theta):
        return value
    return torch.where(theta == 1, flat(u1), value)  # also if other times are inside of steps


def needs_interpolant(scheme: Scheme | Rosenbrock, theta: Tensor) -> bool:
    """Return whether states at theta require the interpolant, not only the ends of steps."""
    return not (_skips_ends(scheme, theta) and bool((theta == 1).all()))


def _skips_ends(scheme: Scheme | Rosenbrock, theta: Tensor) -> bool:
    """Return whether states at the ends of steps are used directly, which saves rate calls."""
    return bool(scheme.extra_stages) and not is_differentiated(theta)
