"""Events: where a function of the state crosses zero, and how that time and state are differentiated."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attractor.core.dense import Segment
from attractor.core.rounds import as_time

Event: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (t [*batch], u [*batch, d]) -> [*batch]

ITERATIONS = 60  # bisection of a float64 interval ends before


@torch.no_grad()
def bracketed_root(
    g: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, ga: Tensor, gb: Tensor
) -> Tensor:
    """Return roots of g, one per element, between a and b, where g has different signs.

    This is Chandrupatla's method (1997), elementwise: inverse quadratic interpolation where it is safe,
    bisection elsewhere.

    Args:
        g: Elementwise function of times of the shape of a.
        a, b: Ends of the brackets.
        ga, gb: Values of g there. Where they have the same sign, the result is b.
    """
    eps = torch.finfo(a.dtype).eps
    c, gc = a, ga
    share = torch.full_like(a, 0.5)
    valid = ga.sign() != gb.sign()
    for _ in range(ITERATIONS):
        best, gbest = torch.where(ga.abs() < gb.abs(), a, b), torch.minimum(ga.abs(), gb.abs())
        tolerance = 2 * eps * best.abs() + torch.finfo(a.dtype).tiny
        width = (b - a).abs()
        done = ~valid | (width <= 2 * tolerance) | (gbest == 0)
        if bool(done.all()):
            break
        x = torch.where(done, best, a + share * (b - a))
        gx = g(x)
        same = gx.sign() == ga.sign()
        c, gc = torch.where(same, a, b), torch.where(same, ga, gb)
        b, gb = torch.where(same, b, a), torch.where(same, gb, ga)
        a, ga = x, gx
        xi, phi = (a - b) / (c - b), (ga - gb) / (gc - gb)
        quadratic = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi)
        share = ga / (gb - ga) * gc / (gb - gc) + (c - a) / (b - a) * ga / (gc - ga) * gb / (gc - gb)
        share = torch.where(quadratic, share, 0.5).nan_to_num(0.5)
        least = (tolerance / (b - a).abs()).nan_to_num(0.5).clamp(max=0.5)
        share = share.clamp(least, 1 - least)
    root = torch.where(ga.abs() < gb.abs(), a, b)
    return torch.where(valid, root, b)


def differentiated_root(
    t: Tensor,
    u: Tensor,
    rate: Tensor,
    event: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Give the time and the state of an event their derivatives, by the implicit function theorem.

    With ``g(t, u(t)) = 0`` the time moves by ``-dg / (g_t + g_u . f)``, where dg is the change of g at a
    fixed time, and the state by f times that. Second derivatives are not those of the event.

    Args:
        t: Times ``[*batch]`` of the events, constants.
        u: States ``[*batch, d]`` at these times, with a graph.
        rate: Rates ``[*batch, d]`` there, constants.
        event: Maps t ``[*batch]`` and u ``[*batch, d]`` to ``[*batch]``, elementwise.

    Returns:
        The times and the states, with the same values.
    """
    value = event(t, u)
    if not (value.requires_grad or forward_ad.unpack_dual(value).tangent is not None):
        return t, u
    with torch.enable_grad():
        time, state = t.detach().requires_grad_(), u.detach().requires_grad_()
        g = event(time, state)
        if not g.requires_grad:
            return t, u
        by_time, by_state = torch.autograd.grad(g.sum(), (time, state), allow_unused=True)
    slope = torch.zeros_like(t) if by_time is None else by_time
    if by_state is not None:
        slope = slope + (by_state.conj() * rate).sum(-1).real.to(slope)
    # Where the trajectory touches the zero set without crossing it, the time has no derivative; it is
    # treated as a constant.
    slope = torch.where(slope == 0, torch.inf, slope)
    when = t - ((value - value.detach()) / slope).to(t)
    return when, u + rate.detach() * (when - t)[..., None].to(u.real.dtype)


class EventSearch:
    """The zeros of event functions in the accepted steps of all trajectories.

    Args:
        events: The functions.
        t: Times ``[*batch, 1]`` at the start.
        u: States ``[*batch, d]`` there.
    """

    def __init__(self, events: tuple[Event, ...], t: Tensor, u: Tensor) -> None:
        self.events = events
        self.values = self._values(t, u)

    def first(
        self, passed: Tensor, t1: Tensor, u1: Tensor, segment: Callable[[], Segment]
    ) -> tuple[Tensor, Tensor] | None:
        """Look for the first event in a step.

        Args:
            passed: Trajectories ``[*batch, 1]`` whose step is accepted.
            t1, u1: Times ``[*batch, 1]`` and states ``[*batch, d]`` at the ends of the steps.
            segment: Returns the steps with their interpolants.

        Returns:
            The part of the step ``[*batch, 1]`` after which the first event comes, NaN where there is
            none, and which one it is ``[*batch]``; None if no trajectory has an event.
        """
        before, after, accepts = self.values, self._values(t1, u1), passed[..., 0]
        self.values = [torch.where(accepts, new, old) for old, new in zip(before, after)]
        crossed = [accepts & (old * new <= 0) & (old != 0) for old, new in zip(before, after)]
        if not any(bool(cross.any()) for cross in crossed):
            return None
        step, roots = segment(), []
        for event, cross, old, new in zip(self.events, crossed, before, after):

            def value(theta: Tensor, event: Event = event) -> Tensor:
                t = (step.t + theta[..., None] * step.h)[..., 0]
                return _event_value(event, t, step.at(theta[..., None]))

            zero, one = torch.zeros_like(old), torch.ones_like(old)
            ends = torch.where(cross, old, one), torch.where(cross, new, one)
            roots.append(torch.where(cross, bracketed_root(value, zero, one, *ends), torch.inf))
        theta, number = torch.stack(roots).min(0)
        return torch.where(theta.isinf(), torch.nan, theta)[..., None], number

    def _values(self, t: Tensor, u: Tensor) -> list[Tensor]:
        return [_event_value(event, t[..., 0], u) for event in self.events]


def _event_value(event: Event, t: Tensor, u: Tensor) -> Tensor:
    """Return the value of an event function ``[*batch]``, in the precision of time."""
    value = event(as_time(t, u), u)
    if not isinstance(value, Tensor) or value.shape != u.shape[:-1]:
        description = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"an event function returned {description} for states of shape {list(u.shape)}; it must "
            f"return one number per trajectory, {list(u.shape[:-1])}"
        )
    return value.detach().to(t.dtype)
