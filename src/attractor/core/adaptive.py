"""Error control with one step size for the whole state, as in torchdiffeq.

In `control` every trajectory of a batch has its own time. Here there is one time, so that times and step
sizes are Python numbers, and a step consists of the operations of the scheme and an error estimate. The
graph is recorded during the search for steps: rejected attempts are not connected to the result, and
step sizes are constants.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint as recompute_later
from torch.utils.checkpoint import set_checkpoint_early_stop

from attractor.common.checks import all_finite
from attractor.core.callbacks import (
    NO_CALLBACKS,
    NO_STOPS,
    Callback,
    Callbacks,
    Event,
    Solution,
    Stops,
)
from attractor.core.events import bracketed_root, differentiated_root
from attractor.core.interpolant import coefficients, evaluate
from attractor.core.rates import (
    Rate,
    add_increment,
    call_rate,
    check_distinct,
    check_not_modified,
    version,
    weighted_sum,
)
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.rounds import Control, root_mean_square
from attractor.core.scheme import Scheme
from attractor.core.stage_buffer import StageBuffer
from attractor.core.transforms import is_differentiated


class _Attempt(NamedTuple):
    t: float
    t1: float
    jump: bool  # the rate is discontinuous at t1
    passed: bool
    outputs: tuple[int, int]  # indices of the output times inside: first, stop
    event_time: float | None


@dataclass
class _Search:
    """The state of the search for steps, in numbers."""

    f: Rate
    t_out: Tensor  # [n+1], as the caller passed it
    scheme: Scheme | Rosenbrock
    control: Control
    stops: Stops
    callbacks: Callbacks
    adjoint: Callbacks  # in the backward pass
    event: Event | None
    clock: list[float] = field(init=False)
    sign: float = field(init=False)
    t: float = field(init=False)
    h: float = 0.0
    upcoming: int = 1
    attempts: int = 0
    last_error: float = 1.0
    event_value: float = 0.0
    event_time: float | None = None
    buffer: StageBuffer | None = None

    def __post_init__(self) -> None:
        self.clock = self.t_out.detach().double().tolist()
        self.t = self.clock[0]
        self.sign = -1.0 if len(self.clock) > 1 and self.clock[-1] < self.t else 1.0
        if self.event is not None:
            self.clock = [self.t, self.sign * math.inf]
        ordered = sorted({*self.stops.times, *self.stops.jumps}, key=lambda s: s * self.sign)
        self.stop_times = [s for s in ordered if s * self.sign > self.t * self.sign]
        self.jumps = frozenset(self.stops.jumps)
        # No estimate contains the error of a cubic, so steps end at the output times where the scheme
        # is more accurate than a cubic.
        self.lands = not self.scheme.interpolates
        self.differentiates_times = is_differentiated(self.t_out)

    def at(self, t: float, u: Tensor, side: float = 0.0) -> Tensor:
        """Return the time as a tensor beside u; `side` moves it to the next number up or down."""
        time = u.real.new_full((), t)
        return torch.nextafter(time, time + side) if side else time

    def first_step(self, u: Tensor, k: Tensor) -> float:
        """Estimate the size of the first step (Hairer, Norsett, Wanner I, II.4)."""
        u, k = u.detach(), k.detach()
        scale = self.control.scale(u, u)
        d0, d1 = self.control.measure(u, scale), self.control.measure(k, scale)
        h0 = 0.01 * d0 / d1 if d0 >= 1e-5 and d1 >= 1e-5 else 1e-6
        h0 = max(h0, 1e-200) if math.isfinite(h0) else 1e-6
        signed = self.sign * h0
        bend = call_rate(self.f, self.at(self.t + signed, u), u.add(k, alpha=signed)).detach() - k
        steepest = max(d1, self.control.measure(bend, scale) / h0)
        if not math.isfinite(steepest):
            steepest = 1e15
        order = self.scheme.error_order + 1
        h1 = max(1e-6, h0 * 1e-3) if steepest <= 1e-15 else (0.01 / steepest) ** (1 / order)
        return min(100 * h0, h1, abs(self.clock[-1] - self.t))

    def propose(self) -> tuple[float, float, bool]:
        """Return the start and end of the next attempt, and whether its end is an output time."""
        control, sign = self.control, self.sign
        if self.attempts >= control.max_steps:
            self.give_up()
        self.attempts += 1
        size = min(max(abs(self.h), control.least), control.most)
        t1 = self.t + sign * size
        goal = self.clock[self.upcoming if self.lands else -1]
        if (goal - t1) * sign <= 0:
            t1 = goal
        for stop in self.stop_times:
            if (stop - self.t) * sign > 0:
                t1 = stop if (t1 - stop) * sign > 0 else t1
                break
        return self.t, t1, t1 == goal

    def take(self, attempt: _Attempt, u: Tensor, k: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Take one step; return the new state, the rate there, and the stages."""
        f, scheme, t, t1, jump = self.f, self.scheme, attempt.t, attempt.t1, attempt.jump
        h = t1 - t
        if self.event is not None and abs(t1) > 1e-2 * torch.finfo(u.dtype).max:
            self.give_up()  # without an event steps grow until they overflow
        end = lambda: self.at(t1, u, -self.sign * jump)
        if self.buffer is not None:
            assert isinstance(scheme, Scheme)
            buffer, u1 = self.buffer, u
            buffer.start(k, h)
            for i, c in enumerate(scheme._c[1:], 1):
                u1 = torch.addmv(u, *buffer.sums[i])
                buffer.stages[i].copy_(call_rate(f, end() if c == 1 else self.at(t + c * h, u), u1))
            if scheme.first_same_as_last:
                return u1, buffer.stages[-1].clone(), buffer.stages
            u1 = torch.addmv(u, *buffer.slope)
            return u1, call_rate(f, end(), u1), buffer.stages
        if isinstance(scheme, Rosenbrock):
            # The rate may be called at the end of the step, but not beyond a discontinuity there.
            last, bound = end(), "max" if self.sign > 0 else "min"
            before = lambda s, x: f(s.clamp(**{bound: last}), x)
            stages = scheme.stages(before if jump else f, self.at(t, u), u, h, first=k)
            u1 = add_increment(u, h, scheme.b, stages)
            return u1, call_rate(f, last, u1), stages
        stages = [k]
        for row, c in zip(scheme._a[1:], scheme._c[1:]):
            time = end() if c == 1 else self.at(t + c * h, u)
            stages.append(call_rate(f, time, add_increment(u, h, row, stages)))
            check_distinct(f, time, u, stages)
        u1 = add_increment(u, h, scheme._b, stages)
        if scheme.first_same_as_last:
            return u1, stages[-1], stages
        return u1, call_rate(f, end(), u1), stages

    def error(self, h: float, u: Tensor, u1: Tensor, k1: Tensor, stages: list[Tensor]) -> float:
        """Return the error in units of the allowed error; NaN if the attempt is not finite."""
        control, scheme = self.control, self.scheme
        with torch.no_grad():
            u, u1 = u.detach(), u1.detach()
            stages = stages if self.buffer is not None else [k.detach() for k in stages]
            scale, buffer = control.scale(u, u1), self.buffer
            sums = (None, None) if buffer is None else (buffer.error, buffer.lower_error)

            def norm(weights: tuple[float, ...], own: tuple[Tensor, Tensor] | None) -> float:
                estimate = weighted_sum(weights, stages) * h if own is None else torch.mv(*own)
                return control.measure(estimate, scale)

            error = norm(scheme.error_weights, sums[0])
            if scheme.lower_error_weights and error:
                error *= error / math.hypot(error, 0.1 * norm(scheme.lower_error_weights, sums[1]))
            # In the default norm an error estimate is finite only if the last stage is.
            fsal = scheme.first_same_as_last and control.norm is root_mean_square
            looks = [u1] if fsal else [u1, k1]
            if math.isfinite(error) and all(all_finite(x) for x in looks):
                return error
        return math.nan

    def judge(self, attempt: _Attempt, ended: bool, error: float) -> bool:
        """Return whether the attempt passes, and set the clock and the next step size."""
        control, size = self.control, abs(attempt.t1 - attempt.t)
        at_least = size <= control.least
        passed = error <= 1 or (at_least and error == error)
        factor = control.factor(error, self.last_error, self.scheme.error_order)
        longer = size * factor
        if passed and ended and self.lands and longer < abs(self.h):
            longer = abs(
                self.h
            )  # a step that was shortened at an output time does not predict the next one
        self.h = longer
        if passed:
            self.t, self.last_error = attempt.t1, error
            while self.upcoming < len(self.clock) and (
                (self.clock[self.upcoming] - self.t) * self.sign <= 0
            ):
                self.upcoming += 1
        if not self.running:
            return passed
        tiny = math.ulp(1.0)
        stuck = longer <= 4 * tiny * abs(self.t) + tiny**2 * min(
            abs(self.clock[-1] - self.clock[0]), 1.0
        )
        if stuck or (at_least and not passed):
            self.give_up()
        return passed

    def give_up(self) -> NoReturn:
        """Raise an error that says where the search ended."""
        raise FloatingPointError(
            f"{self.scheme.name} gave up at t = {self.t:.6g} after {self.attempts} steps: the state "
            "became non-finite, the step size fell to nothing or max_num_steps was reached; is the "
            "problem stiff or singular there?" + ("" if self.event is None else " Or is there no event?")
        )

    @property
    def running(self) -> bool:
        return self.upcoming < len(self.clock) and self.event_time is None

    def run(
        self, record: list[_Attempt], u: Tensor, k: Tensor, most: int
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Take up to `most` accepted steps from u, whose rate is k.

        Args:
            record: Attempts to repeat, as in the backward pass of a checkpoint. If it is empty,
                steps are searched for and appended to it.

        Returns:
            States ``[m, d]`` at the output times inside the steps, and the last state and rate.
        """
        replay = list(record)
        callbacks = self.adjoint if replay else self.callbacks
        values, accepted, i = list[Tensor](), 0, 0
        while i < len(replay) if replay else self.running and accepted < most:
            if replay:
                attempt, ended, i = replay[i], False, i + 1
            else:
                t, t1, ended = self.propose()
                attempt = _Attempt(t, t1, t1 in self.jumps, False, (0, 0), None)
                # A rate that is a gradient itself makes a checkpoint repeat the steps so far during this
                # step, which must be in the record then.
                record.append(attempt)
            about = self.about(callbacks, attempt, u)
            _call(callbacks.step, about)
            u1, k1, stages = self.take(attempt, u, k)
            if not replay:
                error = self.error(attempt.t1 - attempt.t, u, u1, k1, stages)
                first, passed = self.upcoming, self.judge(attempt, ended, error)
                record[-1] = attempt = attempt._replace(passed=passed, outputs=(first, self.upcoming))
            _call(callbacks.accept if attempt.passed else callbacks.reject, about)
            if attempt.passed:
                if self.event is not None and not replay:
                    self.look(attempt, u, u1, k1, stages)
                    record[-1] = attempt = attempt._replace(event_time=self.event_time)
                values += self.inside(attempt, u, u1, k1, stages)
                u, k, accepted = u1, k1, accepted + 1
                if attempt.jump:
                    k = call_rate(self.f, self.at(attempt.t1, u, self.sign), u)
        return values, u, k

    def about(self, callbacks: Callbacks, attempt: _Attempt, u: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of callbacks."""
        if callbacks == NO_CALLBACKS:
            return ()
        return self.at(attempt.t, u), u.detach(), self.at(attempt.t1 - attempt.t, u)

    def coefficients(
        self, attempt: _Attempt, u: Tensor, u1: Tensor, k1: Tensor, stages: list[Tensor]
    ) -> list[Tensor]:
        rate = lambda t, u: self.f(self.at(t, u), u)
        h = attempt.t1 - attempt.t
        return coefficients(self.scheme, rate, attempt.t, h, u, u1, stages, k1)

    def inside(
        self, attempt: _Attempt, u: Tensor, u1: Tensor, k1: Tensor, stages: list[Tensor]
    ) -> list[Tensor]:
        """Return states at the output times inside a step, and at the event, ``[m, d]``."""
        first, stop = attempt.outputs
        h = attempt.t1 - attempt.t
        if self.event is None:
            if first == stop:
                return []
            if not self.differentiates_times and self.clock[first] == attempt.t1:
                return [u1[None]]
            time_dtype = torch.float32 if u.device.type == "mps" else torch.float64
            theta = ((self.t_out[first:stop].to(time_dtype) - attempt.t) / h).to(u.real.dtype)[:, None]
            if not self.differentiates_times:
                theta = theta.detach()
        else:
            if attempt.event_time is None:
                return []
            theta = u.real.new_full((1, 1), (attempt.event_time - attempt.t) / h)
        inner = self.coefficients(attempt, u, u1, k1, stages)
        return [evaluate(u, u1, inner, theta)]

    def look(self, attempt: _Attempt, u: Tensor, u1: Tensor, k1: Tensor, stages: list[Tensor]) -> None:
        """Search for an event in an accepted step, and set `event_time` if there is one."""
        assert self.event is not None
        with torch.no_grad():
            before, after = self.event_value, self.event(self.at(attempt.t1, u1), u1.detach()).item()
            self.event_value = after
            if (before > 0) == (after > 0) and after != 0:
                return
            inner = self.coefficients(attempt, u, u1, k1, stages)
            h = attempt.t1 - attempt.t

            def value(theta: Tensor) -> Tensor:
                state = evaluate(u, u1, inner, theta.to(u.real.dtype))
                assert self.event is not None
                return self.event(self.at(attempt.t + h * theta.item(), u), state).to(theta)

            ends = [torch.tensor(x, dtype=torch.float64) for x in (0.0, 1.0, before, after)]
            self.event_time = attempt.t + h * bracketed_root(value, *ends).item()


def solve_adaptive(
    f: Rate,
    u0: Tensor,
    t: Tensor,
    scheme: Scheme | Rosenbrock,
    control: Control,
    *,
    stops: Stops = NO_STOPS,
    callbacks: Callbacks = NO_CALLBACKS,
    adjoint: Callbacks = NO_CALLBACKS,
    event: Event | None = None,
    checkpoint: bool = False,
) -> Solution:
    """Solve for one state u0 ``[d]`` under error control.

    Args:
        f: The rate, called with t ``[]`` and u ``[d]``.
        t: Output times ``[n+1]``. With an event only the first one and the direction are used.
        scheme: A scheme with an embedded pair.
        event: ``(t, u) -> []``; the solution ends where it crosses zero. Its time and state have
            gradients by the implicit function theorem.
        checkpoint: Keep about the square root of the number of steps in the graph, and repeat the steps
            between in the backward pass, with the callbacks `adjoint`.

    Raises:
        FloatingPointError: The step size vanished, the state became non-finite, or `control.max_steps`
            was reached.
    """
    search = _Search(f, t, scheme, control, stops, callbacks, adjoint, event)
    u, start, version_before = u0, search.at(search.t, u0), version(u0)
    k = call_rate(f, start, u0)
    check_not_modified(u0, version_before)
    if search.differentiates_times:
        # A start that is later by s is a start from u0 - s f(t0, u0), which has the gradient of t[0].
        late = t[0].to(u0.real.dtype)
        u = u0 - k.detach() * (late - late.detach())
        k = call_rate(f, start, u)
    if not (all_finite(u) and all_finite(k)):
        search.give_up()
    if event is not None:
        search.event_value = event(start, u0.detach()).item()
        if search.event_value == 0:
            return Solution(torch.stack((u0, u0)), start, 0)
    if search.running:
        first = search.control.first
        search.h = search.first_step(u, k) if first is None else abs(first)

    traced = torch.is_grad_enabled() or forward_ad._current_level >= 0
    if isinstance(scheme, Scheme) and not traced and torch._C._functorch.maybe_current_level() is None:
        search.buffer = StageBuffer(scheme, u0)

    values, segment = [u0[None]], 1
    while search.running:
        record: list[_Attempt] = []
        if checkpoint and torch.is_grad_enabled():
            # Segments of 1, 2, 3, ... steps: about sqrt(2 n) of them, none longer than that.
            with set_checkpoint_early_stop(adjoint == NO_CALLBACKS):
                new, u, k = recompute_later(search.run, record, u, k, segment, use_reentrant=False)
            segment += 1
        else:
            new, u, k = search.run(record, u, k, search.control.max_steps)
        values += new
    states = torch.cat(values)
    if event is None:
        return Solution(states, None, search.attempts)
    assert search.event_time is not None
    when = search.at(search.event_time, u0)
    rate = call_rate(f, when, states[-1].detach()).detach()
    when, final = differentiated_root(when, states[-1], rate, event)
    return Solution(torch.stack((u0, final)), when, search.attempts)


def _call(callback: Callback | None, about: tuple[Tensor, ...]) -> None:
    if callback is not None:
        callback(*about)
