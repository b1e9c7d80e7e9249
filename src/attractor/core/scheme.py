"""Explicit Runge-Kutta schemes: a tableau as the textbook prints it, and the slope it defines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Rational
from typing import Any

import torch
from torch import Tensor

from attractor.core.rates import (
    Rate,
    add_increment,
    call_rate,
    check_distinct,
    check_state,
    weighted_sum,
)
from attractor.core.step import Step, with_parameters
from attractor.core.tableau_checks import (
    Coefficient,
    as_fractions,
    check_denominators,
    check_stages,
    checked_order,
    lower_row,
    order_of,
    require_order,
)


@dataclass(frozen=True)
class Scheme:
    """An explicit Runge-Kutta scheme.

    Write coefficients as integers, strings such as ``"1/6"`` or fractions and the checks below are
    exact; with floats they hold to 1e-10 (for tableaus with irrational entries).

    Args:
        name: Name for `get_scheme` and tables.
        a: One row of weights per stage; row i needs its first i entries. The empty first row
            may be left out.
        b: Weights of the stages in the slope.
        c: Times of the stages, as fractions of a step.
        order: Order of convergence, checked against the order conditions.
        b_low: Weights of an embedded slope of lower order; with it the scheme can control its error.
        b_lower: Weights of a second embedded slope, of a still lower order. The two estimates e and
            e_lower are combined as ``e^2 / sqrt(e^2 + 0.01 e_lower^2)``, which is of a higher order
            than either (Hairer, Norsett and Wanner I, II.10).
        dense: Weights d of ``theta^2 (1 - theta)^2 dt sum_i d_i k_i``, which is added to the cubic
            Hermite interpolant inside a step. None: the cubic alone, and above order 3, where that is
            coarser than the steps, steps that end at the wanted times.
        dense_rows: Several such rows, for an interpolant of a higher order; the row after `dense` or the
            first one is multiplied by ``theta^2 (1 - theta)^2``, and every further one by ``theta`` and
            ``1 - theta`` in turn. The rows weight the stages, the rate at the new state if it is not the
            last stage, and the extra stages of `dense_a`.
        dense_a: One row of weights per extra stage, which only the interpolant needs. Its time is the
            sum of its row.

    Raises:
        ValueError: A row does not add up to its c, the weights do not add up to 1, the scheme is
            implicit, or the order conditions of `order` do not hold.

    >>> Scheme("heun", a=[[], [1]], b=["1/2", "1/2"], c=[0, 1], order=2)
    Scheme('heun', order 2, 2 stages)
    """

    name: str
    a: tuple[tuple[Fraction, ...], ...]
    b: tuple[Fraction, ...]
    c: tuple[Fraction, ...]
    order: int
    b_low: tuple[Fraction, ...] | None = None
    dense: tuple[Fraction, ...] | None = None
    b_lower: tuple[Fraction, ...] | None = None
    dense_rows: tuple[tuple[Fraction, ...], ...] = ()
    dense_a: tuple[tuple[Fraction, ...], ...] = ()
    exact: bool = field(init=False, default=True, repr=False, compare=False)
    order_low: int = field(init=False, default=0, repr=False, compare=False)
    rate_calls: int = field(init=False, default=0, repr=False, compare=False)
    error_order: int = field(init=False, default=0, repr=False, compare=False)
    error_weights: tuple[float, ...] = field(init=False, default=(), repr=False, compare=False)
    lower_error_weights: tuple[float, ...] = field(init=False, default=(), repr=False, compare=False)
    dense_weights: tuple[tuple[float, ...], ...] = field(
        init=False, default=(), repr=False, compare=False
    )
    extra_stages: tuple[tuple[float, ...], ...] = field(
        init=False, default=(), repr=False, compare=False
    )
    _hash: int = field(init=False, default=0, repr=False, compare=False)
    _a: tuple[tuple[float, ...], ...] = field(init=False, default=(), repr=False, compare=False)
    _b: tuple[float, ...] = field(init=False, default=(), repr=False, compare=False)
    _c: tuple[float, ...] = field(init=False, default=(), repr=False, compare=False)

    def __init__(
        self,
        name: str,
        a: Sequence[Sequence[Coefficient]],
        b: Sequence[Coefficient],
        c: Sequence[Coefficient],
        order: int,
        b_low: Sequence[Coefficient] | None = None,
        dense: Sequence[Coefficient] | None = None,
        b_lower: Sequence[Coefficient] | None = None,
        dense_rows: Sequence[Sequence[Coefficient]] = (),
        dense_a: Sequence[Sequence[Coefficient]] = (),
    ) -> None:
        every_row = [*a, b, c, *(row for row in (b_low, dense, b_lower) if row is not None)]
        every_row += [*dense_rows, *dense_a]
        if not all(hasattr(row, "__len__") and not isinstance(row, str) for row in every_row):
            raise TypeError(
                f"{name}: a is a list of rows, b, c, b_low, dense and b_lower are rows of coefficients"
            )
        exact = all(isinstance(x, Rational | str) for row in every_row for x in row)
        tolerance = 0 if exact else 1e-10
        stages = len(b)
        rows = [*([[]] if len(a) == stages - 1 else []), *a]
        others = {"a": rows, "c": c, "b_low": b_low, "dense": dense, "b_lower": b_lower}
        for what, values in others.items():
            if values is not None and len(values) != stages:
                raise ValueError(
                    f"{name}: {what} has {len(values)} entries but b has {stages}; every stage needs one"
                )
        order = checked_order(name, order)
        check_stages(name, stages)

        put = lambda key, value: object.__setattr__(self, key, value)
        put("name", name)
        put("exact", exact)
        put("a", tuple(lower_row(name, i, row, stages) for i, row in enumerate(rows)))
        put("b", as_fractions(name, b))
        put("c", as_fractions(name, c))
        put("order", order)
        put("b_low", None if b_low is None else as_fractions(name, b_low))
        put("dense", None if dense is None else as_fractions(name, dense))
        put("b_lower", None if b_lower is None else as_fractions(name, b_lower))
        put("dense_rows", tuple(as_fractions(name, row) for row in dense_rows))
        put("dense_a", tuple(as_fractions(name, row) for row in dense_a))

        check_denominators(name, (*self.a, self.b, self.c, self.b_low or (), self.b_lower or ()))
        for i, (row, c_i) in enumerate(zip(self.a, self.c)):
            if abs(sum(row) - c_i) > tolerance:
                raise ValueError(f"{name}: row {i} of a adds up to {sum(row)}, but c[{i}] is {c_i}")
        require_order(name, "b", self.b, self.a, order, tolerance)
        put("order_low", 0 if self.b_low is None else order_of(self.b_low, self.a, order + 1, tolerance))
        if self.b_low is not None and self.order_low == 0:
            raise ValueError(f"{name}: b_low adds up to {sum(self.b_low)}, not to 1")
        if self.b_low == self.b:
            raise ValueError(f"{name}: b_low equals b, so that every error estimate would be 0")
        put("error_order", min(order, self.order_low))
        if self.b_lower is not None:
            lower = order_of(self.b_lower, self.a, order, tolerance)
            if not 0 < lower < self.error_order:
                raise ValueError(
                    f"{name}: b_lower is of order {lower}; it must be at least 1 and less than that of "
                    f"b_low, {self.order_low}"
                )
            put("error_order", min(order, 2 * self.error_order - lower))

        # Trailing stages that only serve the error estimate (dopri5's seventh) are not called.
        put("rate_calls", max(i for i, b_i in enumerate(self.b) if b_i) + 1)
        put("_a", tuple(tuple(map(float, row)) for row in self.a))
        put("_b", tuple(map(float, self.b)))
        put("_c", tuple(map(float, self.c)))
        put("error_weights", tuple(float(b - low) for b, low in zip(self.b, self.b_low or ())))
        put("lower_error_weights", tuple(float(b - low) for b, low in zip(self.b, self.b_lower or ())))
        rate_count = stages + (not self.first_same_as_last)
        for i, row in enumerate(self.dense_a):
            if len(row) != rate_count + i:
                raise ValueError(
                    f"{name}: row {i} of dense_a has {len(row)} entries; it needs {rate_count + i}"
                )
        if any(len(row) != rate_count + len(self.dense_a) for row in self.dense_rows):
            raise ValueError(
                f"{name}: a row of dense_rows needs {rate_count + len(self.dense_a)} entries"
            )
        rows = [*([] if self.dense is None else [self.dense]), *self.dense_rows]
        put("dense_weights", tuple(tuple(map(float, row)) for row in rows))
        put("extra_stages", tuple(tuple(map(float, row)) for row in self.dense_a))
        put("_hash", hash((name, self._a, self._b, self._c)))

    def __hash__(self) -> int:
        return self._hash  # fractions hash slowly, and schemes are looked up in every run

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling makes a new scheme, because the hash of a name differs between processes. Inexact
        # coefficients are passed as floats, so that their checks have a tolerance.
        own = lambda row: row if self.exact or row is None else tuple(map(float, row))
        rows = lambda rows: tuple(map(own, rows))
        pair = own(self.b_low), own(self.dense), own(self.b_lower)
        dense = rows(self.dense_rows), rows(self.dense_a)
        return Scheme, (self.name, rows(self.a), own(self.b), own(self.c), self.order, *pair, *dense)

    def __repr__(self) -> str:
        pair = f" (error from order {self.error_order})" if self.b_low else ""
        return f"Scheme({self.name!r}, order {self.order}{pair}, {len(self.b)} stages)"

    @property
    def interpolates(self) -> bool:
        """Whether the interpolant of a step is as exact as error control needs it."""
        return bool(self.dense_weights) or self.order <= 3

    @property
    def first_same_as_last(self) -> bool:
        """Whether the last stage is the rate at the new state, and so the next step's first."""
        return self.c[-1] == 1 and (*self.a[-1], Fraction(0)) == self.b

    def slope(self, f: Rate, t: Any, u: Tensor, dt: Any) -> Tensor:
        """Return S, so that a plain step is ``u + dt * S``.

        Args:
            f: The rate, ``(t, u) -> du/dt`` with the shape of u.
            t: Time, a number or a tensor that broadcasts against u.
            u: State ``[*batch, d]``.
            dt: Step size, likewise; negative for steps back in time.
        """
        return weighted_sum(self._b, self.stages(f, t, u, dt, self.rate_calls))

    def step(self, f: Rate, t: Any, u: Tensor, dt: Any, parameters: Tensor | None = None) -> Step:
        """Return the plain step from u. Arguments as for `slope`; f may take `parameters`."""
        stages = self.stages(with_parameters(f, parameters), t, u, dt, self.rate_calls)
        return Step(u, weighted_sum(self._b, stages), dt, t, tuple(stages), parameters)

    def stages(
        self,
        f: Rate,
        t: Any,
        u: Tensor,
        dt: Any,
        count: int | None = None,
        first: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the rates k_i at the first `count` stages, by default all; `first` may pass k_1."""
        check_state(u, t, dt)
        if isinstance(dt, float) and torch.finfo(u.dtype).max < abs(dt) < math.inf:
            raise ValueError(
                f"dt = {dt:g} is more than {u.dtype} can represent; use a smaller step, or u.double()"
            )
        k = [call_rate(f, t, u) if first is None else first]
        for row, c in zip(self._a[1:count], self._c[1:count]):
            k.append(call_rate(f, t + c * dt, add_increment(u, dt, row, k)))
            check_distinct(f, t, u, k)
        return k

    def check_rate(self, f: Rate, t: Any, u: Tensor) -> None:
        """Accept any rate; a `Splitting` does not."""
