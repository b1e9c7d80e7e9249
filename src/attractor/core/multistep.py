"""Adams methods with even steps (Hairer, Norsett and Wanner I, III.1)."""

from fractions import Fraction
from functools import lru_cache

from torch import Tensor

from attractor.core.fixed import History, Moment, StepRule, beside, explicit_rule
from attractor.core.rates import Rate, add_increment, call_rate
from attractor.core.tableaus import RK4_38

LEAST_ORDER, MOST_ORDER, ITERATIONS = 4, 12, 4


@lru_cache
def adams_weights(count: int, implicit: bool) -> tuple[float, ...]:
    """Return the weights of rates at 0, -1, ... (implicit: 1, 0, -1, ...) in the integral from 0 to 1.

    They integrate the polynomial through these `count` rates, computed with exact fractions.

    >>> adams_weights(2, implicit=False)
    (1.5, -0.5)
    """
    nodes = range(int(implicit), int(implicit) - count, -1)
    weights = []
    for node in nodes:
        polynomial = [Fraction(1)]  # of the node's Lagrange polynomial, lowest power first
        for other in nodes:
            if other != node:
                shifted = [Fraction(0), *polynomial]
                scaled = [*(-other * x for x in polynomial), Fraction(0)]
                polynomial = [(a + b) / (node - other) for a, b in zip(shifted, scaled)]
        weights.append(float(sum(x / (power + 1) for power, x in enumerate(polynomial))))
    return tuple(weights)


def adams_rule(
    implicit: bool,
    rtol: float = 1e-7,
    atol: float = 1e-9,
    perturb: bool = False,
    max_order: int = MOST_ORDER,
    max_iters: int = ITERATIONS,
) -> StepRule:
    """Return the steps of Adams-Bashforth, corrected by Adams-Moulton if `implicit`.

    The order grows with the number of past rates, up to max_order. The first steps, and those after a
    change of the step size, are taken by the 3/8 rule.

    Args:
        rtol, atol: The corrector is iterated until it changes by less, at most max_iters times.
    """
    start = explicit_rule(RK4_38, perturb)

    def step(f: Rate, moment: Moment, u: Tensor, history: History) -> tuple[Tensor, Tensor, History]:
        t, t1, dt = moment
        size = dt.item() if isinstance(dt, Tensor) else dt
        rates, spacing = history
        k0 = call_rate(f, beside(t, t1) if perturb else t, u)
        even = abs(size - spacing) <= 1e-3 * abs(size)
        rates = (k0, *(rates if even else ()))[: max_order - 1]
        if len(rates) < LEAST_ORDER - 1:
            return start(f, moment, u, history)[0], k0, (rates, size)
        new = add_increment(u, dt, adams_weights(len(rates), implicit=False), rates)
        if implicit:
            own, *past = adams_weights(len(rates) + 1, implicit=True)
            base = add_increment(u, dt, past, rates)
            for _ in range(max_iters):
                before = new
                new = add_increment(
                    base, dt, (own,), (call_rate(f, beside(t1, t) if perturb else t1, new),)
                )
                allowed = atol + rtol * (new - u).detach().abs()
                if bool(((new - before).detach().abs() <= allowed).all()):
                    break
        return new, k0, (rates, size)

    return step
