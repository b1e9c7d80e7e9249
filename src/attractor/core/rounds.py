"""One round of attempts under error control.

In a round every trajectory attempts one step of its own size. `Rules` holds the arithmetic of a round:
the step to attempt, its error, and the next step size. The Python loop of `control` and the compiled one
of `round_loop` both consist of these functions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from attractor.common.checks import is_number
from attractor.core.rates import Rate, call_rate, masked, weighted_sum
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.scheme import Scheme
from attractor.core.step import with_parameters
from attractor.core.trajectory import Status


def root_mean_square(x: Tensor) -> Tensor:
    """Return the root mean square over the last dimension, which is kept."""
    return x.abs().square().mean(-1, keepdim=True).sqrt()


@dataclass(frozen=True)
class Control:
    """Settings of error control.

    Attributes:
        rtol, atol: Allowed error of a step, ``atol + rtol * |u|`` per component: numbers, or tensors
            that broadcast to the state ``[*batch, d]``.
        safety: Factor of the next step size, relative to the largest one that would pass.
        grow, shrink: Largest and smallest ratio of the step sizes of two attempts.
        beta: Exponent of the previous error in the next step size (PI control; Hairer and Wanner II,
            IV.2). 0 is the elementary controller.
        first: Size of the first step; None estimates it (Hairer, Norsett, Wanner I, II.4).
        least, most: Bounds of the step size.
        max_steps: Number of attempts after which a trajectory that has not reached the last time ends.
        norm: Function from errors in units of the allowed error ``[*batch, d]`` to ``[*batch, 1]``.
    """

    rtol: float | Tensor = 1e-7
    atol: float | Tensor = 1e-9
    safety: float = 0.9
    grow: float = 10.0
    shrink: float = 0.2
    beta: float = 0.0
    first: float | None = None
    least: float = 0.0
    most: float = float("inf")
    max_steps: int = 100_000
    norm: Callable[[Tensor], Tensor] = field(default=root_mean_square)

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                if value.requires_grad:
                    raise ValueError(f"{name} requires a gradient; pass {name}.detach()")
            elif not is_number(value):
                raise TypeError(
                    f"{name} is a {type(value).__name__}; pass a number, or a tensor that broadcasts to "
                    "the state"
                )
            if not (bool((value >= 0).all()) if isinstance(value, Tensor) else value >= 0):
                raise ValueError(f"{name} = {value}; a tolerance is a number >= 0")
        for name in ("safety", "grow", "shrink", "beta", "first", "least", "most", "max_steps"):
            value = getattr(self, name)
            if not is_number(value) and not (name == "first" and value is None):
                raise TypeError(f"{name} is a {type(value).__name__}; pass a number")
            if value is not None and math.isnan(value):
                raise ValueError(f"{name} is not a number")
        if not (positive(self.rtol) or positive(self.atol)):
            raise ValueError("rtol and atol are both 0, so no step can pass; set at least one")

    def scale(self, u: Tensor, u1: Tensor) -> Tensor:
        """Return the allowed error ``[*batch, d]`` of a step from u to u1, in float32 or better."""
        size = torch.maximum(u.abs(), u1.abs())
        if size.dtype.itemsize < 4:
            size = size.float()
        return size * self.rtol + self.atol

    def measure(self, x: Tensor, scale: Tensor) -> float:
        """Return the norm of ``x / scale`` as one number; 0 / 0 counts as 0."""
        ratio = x.abs() / scale if x.is_complex() or x.dtype.itemsize < 4 else x / scale
        if not (isinstance(self.atol, float) and self.atol > 0):
            ratio = torch.where(x == 0, 0.0, ratio)
        if self.norm is root_mean_square:
            return torch.linalg.vector_norm(ratio).item() / math.sqrt(max(ratio.numel(), 1))
        return float(self.norm(ratio))

    def factor(self, error: float, previous: float, order: int) -> float:
        """Return the factor of the next step size after attempts with these errors."""
        if not error > 0:  # exact, or not a number
            return self.grow if error == 0 else self.shrink
        factor = self.safety * error ** -(1 / (order + 1) - 0.75 * self.beta)
        if self.beta:
            factor *= max(previous, 1e-4) ** self.beta
        return min(max(factor, self.shrink), self.grow)


def positive(tolerance: float | Tensor) -> bool:
    """Return whether a tolerance is greater than 0 in all components."""
    return bool((tolerance > 0).all()) if isinstance(tolerance, Tensor) else tolerance > 0


class Progress(NamedTuple):
    """The trajectories between two rounds.

    Attributes:
        t: Times ``[*batch, 1]``.
        h: Signed sizes of the next steps ``[*batch, 1]``.
        u: States ``[*batch, d]``.
        k: Rates ``[*batch, d]`` at the states.
        error: Errors ``[*batch, 1]`` of the last accepted steps, in units of the allowed error.
        active: Trajectories ``[*batch]`` that take part in the next round.
        status: `Status` values ``[*batch]`` (int8).
        accepted: Accepted steps ``[*batch]``.
        rejected: Rejected steps ``[*batch]``.
    """

    t: Tensor
    h: Tensor
    u: Tensor
    k: Tensor
    error: Tensor
    active: Tensor
    status: Tensor
    accepted: Tensor
    rejected: Tensor


class Proposal(NamedTuple):
    """The steps to attempt in a round, ``[*batch, 1]`` each.

    Attributes:
        size: Signed step sizes, 0 for trajectories that are not active.
        t1: Times at the ends of the steps.
        arrives: Whether the step ends at the goal of its trajectory.
        at_least: Whether no smaller step may be attempted.
    """

    size: Tensor
    t1: Tensor
    arrives: Tensor
    at_least: Tensor


class Verdict(NamedTuple):
    """The results of the attempts of a round, ``[*batch, 1]`` each.

    Attributes:
        error: Errors in units of the allowed error, NaN where an attempt is not finite.
        finite: Whether the new state and its rate are finite.
        passed: Whether the step is accepted.
    """

    error: Tensor
    finite: Tensor
    passed: Tensor


class Rules(NamedTuple):
    """The arithmetic of a round.

    Attributes:
        scheme: A scheme with an embedded pair.
        control: Settings of error control. Its tolerances are not used.
        rtol, atol: Tolerances as in `Control`; tensors in compiled code, which is then valid for all.
        exact: Whether an allowed error of 0 is possible, so that an error of 0 must count as exact.
        sign: Direction of time, 1 or -1.
        shortest: Step size ``[]`` or ``[*batch, 1]`` below which a step has vanished at time 0.
    """

    scheme: Scheme | Rosenbrock
    control: Control
    rtol: float | Tensor
    atol: float | Tensor
    exact: bool
    sign: float | Tensor
    shortest: Tensor

    def propose(self, now: Progress, goal: Tensor) -> Proposal:
        """Return the steps of the next round; none goes beyond `goal`, ``[]`` or ``[*batch, 1]``."""
        active, later = now.active[..., None], now.t + now.h
        arrives = active & ((goal - later) * self.sign <= 0)
        size = torch.where(arrives, goal - now.t, later - now.t)  # as the time represents it
        size = torch.where(active, size, 0.0)
        # The rounding of the time may increase a step.
        at_least = torch.minimum(size.abs(), now.h.abs()) <= self.control.least
        return Proposal(size, torch.where(arrives, goal, now.t + size), arrives, at_least)

    def judge(
        self, now: Progress, step: Proposal, u1: Tensor, k1: Tensor, stages: list[Tensor]
    ) -> Verdict:
        """Measure the errors of attempts that end at states u1 with rates k1 ``[*batch, d]``."""
        finite = (torch.isfinite(u1) & torch.isfinite(k1)).all(-1, keepdim=True)
        error = self._error(now, step, u1, stages)
        error = torch.where(finite, error, torch.nan).to(now.t.dtype)
        passed = now.active[..., None] & finite & ((error <= 1) | step.at_least)
        return Verdict(error, finite, passed)

    def _error(self, now: Progress, step: Proposal, u1: Tensor, stages: list[Tensor]) -> Tensor:
        """Return the norm of the error over the allowed error, in the precision of the tolerances."""
        scheme, dtype, h = self.scheme, now.t.dtype, as_time(step.size, u1)
        allowed = self.atol + self.rtol * torch.maximum(now.u.abs(), u1.abs()).to(dtype)
        divided = _over if self.exact else torch.div

        def estimate(weights: tuple[float, ...]) -> Tensor:
            error = (h * weighted_sum(weights, stages)).abs().to(dtype)
            return self.control.norm(divided(error, allowed))

        error = estimate(scheme.error_weights)
        if not scheme.lower_error_weights:
            return error
        lower = estimate(scheme.lower_error_weights)
        return error * _over(error, torch.hypot(error, 0.1 * lower))

    def advance(
        self,
        now: Progress,
        step: Proposal,
        verdict: Verdict,
        u1: Tensor,
        k1: Tensor,
        t1: Tensor,
        done: Tensor,
    ) -> Progress:
        """Return the trajectories after a round.

        Args:
            u1, k1: States and rates ``[*batch, d]`` at the ends of the steps.
            t1: Times ``[*batch, 1]`` there.
            done: Trajectories ``[*batch]`` whose accepted step was the last one.
        """
        error, finite, passed = verdict
        active, accepts, control = now.active, passed[..., 0], self.control
        t, h = torch.where(passed, t1, now.t), self._next_size(now, step, verdict)
        vanished = h.abs() <= t.abs() * (4 * torch.finfo(t.dtype).eps) + self.shortest
        stuck = vanished | (step.at_least & ~passed)
        stopped = active & stuck[..., 0] & ~done
        status = now.status.masked_fill(stopped, int(Status.STEP_UNDERFLOW))
        return Progress(
            t=t,
            h=h,
            u=torch.where(passed, u1, now.u),
            k=torch.where(passed, k1, now.k),
            error=torch.where(passed, error, now.error) if control.beta else now.error,
            active=active & ~done & ~stopped,
            status=status.masked_fill(stopped & ~finite[..., 0], int(Status.LOST)),
            accepted=now.accepted + accepts,
            rejected=now.rejected + (active & ~accepts),
        )

    def _next_size(self, now: Progress, step: Proposal, verdict: Verdict) -> Tensor:
        """Return the signed sizes ``[*batch, 1]`` of the next steps."""
        control = self.control
        factor = control.safety * verdict.error ** -(
            1 / (self.scheme.error_order + 1) - 0.75 * control.beta
        )
        if control.beta:
            factor = factor * now.error.clamp(min=1e-4) ** control.beta
        factor = factor.nan_to_num(control.shrink, posinf=control.grow)
        size = step.size * rounded(factor.clamp(control.shrink, control.grow))
        if not self.scheme.interpolates:
            # A step that was shortened at an output time does not predict the next one.
            size = torch.where(verdict.passed & step.arrives & (size.abs() < now.h.abs()), now.h, size)
        size = torch.where(now.active[..., None], size, now.h)
        return size.abs().clamp(control.least, control.most) * self.sign


def attempt(
    f: Rate,
    scheme: Scheme | Rosenbrock,
    t: Tensor,
    h: Tensor,
    u: Tensor,
    first: Tensor,
    moving: Tensor | None = None,
    parameters: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the new state of a step, the rate there, and the stages; rates are 0 unless `moving`."""
    rate = with_parameters(f, parameters)
    if moving is not None:
        rate = masked(rate, moving)
    stages = scheme.stages(rate, t, u, h, first=first)
    new = u + h * weighted_sum(scheme._b, stages)
    last = stages[-1] if scheme.first_same_as_last else call_rate(rate, t + h, new)
    return new, last, stages


def rate_calls(scheme: Scheme | Rosenbrock) -> int:
    """Return the number of rate calls of an attempt whose first stage is passed."""
    return len(scheme.b) - scheme.first_same_as_last + isinstance(scheme, Rosenbrock)


def first_step(
    f: Rate,
    begin: Tensor,
    end: Tensor,
    sign: float,
    u: Tensor,
    k: Tensor,
    scheme: Scheme | Rosenbrock,
    control: Control,
) -> Tensor:
    """Estimate the size of the first step [*batch, 1] (Hairer, Norsett, Wanner I, II.4)."""
    size = lambda x: x.abs().to(begin.dtype)
    scale = control.atol + control.rtol * size(u)
    d0, d1 = control.norm(_over(size(u), scale)), control.norm(_over(size(k), scale))
    small = (d0 < 1e-5) | (d1 < 1e-5)
    h0 = torch.where(small, 1e-6, 0.01 * d0 / d1).nan_to_num(1e-6).clamp(min=1e-200)
    bend = call_rate(f, as_time(begin + sign * h0, u), u + sign * as_time(h0, u) * k).detach() - k
    d2 = control.norm(_over(size(bend), scale)) / h0
    order = scheme.error_order + 1
    steepest = torch.maximum(d1, d2).nan_to_num(1e15)
    h1 = torch.where(steepest <= 1e-15, (h0 * 1e-3).clamp(min=1e-6), (0.01 / steepest) ** (1 / order))
    h = torch.minimum(100 * h0, h1).to(begin.dtype)
    return rounded(torch.minimum(h, (end - begin).abs()))


def rounded(x: Tensor) -> Tensor:
    """Return x rounded to twelve bits, by Veltkamp's splitting.

    The last bit of a power depends on its position in the batch, because vector units and the remainder
    of a loop differ. After rounding a trajectory takes the same steps in every batch, almost surely.
    """
    bits = 1 - math.frexp(torch.finfo(x.dtype).eps)[1]  # of the mantissa after its first one
    large = x * float(2 ** (bits + 1 - 12) + 1)
    return large - (large - x)


def as_time(time: Tensor, u: Tensor) -> Tensor:
    """Return the time in the precision of u, as rates receive it."""
    return time.to(u.real.dtype if u.is_complex() else u.dtype)


def _over(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, where 0 / 0 counts as 0."""
    return torch.where(x == 0, 0.0, x / scale)
