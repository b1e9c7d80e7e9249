"""Explicit Runge-Kutta schemes: a tableau as the textbook prints it, and the slope it defines."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Rational
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attractor.core.checks import check_tensor, is_number
from attractor.core.step import Step, with_parameters
from attractor.core.trees import defect

Rate: TypeAlias = Callable[[Any, Tensor], Tensor]
Coefficient: TypeAlias = int | str | float | Fraction

LONGEST = 400  # characters of a coefficient
LARGEST_EXPONENT = 308  # of a coefficient that is written as 1e-3
MOST_STAGES = 128
COMMON_BITS = 2048  # of the common denominator of all coefficients

_OTHER_TYPE = re.compile("same dtype|scalar type|Input type")  # how torch says that types differ


@dataclass(frozen=True)
class Scheme:
    """An explicit Runge-Kutta scheme.

    Write coefficients as integers, strings such as ``"1/6"`` or fractions and the checks below are
    exact; with floats they hold to 1e-10 (for tableaus with irrational entries).

    Args:
        name: what `get_scheme` and tables call it.
        a: one row of stage weights a stage; row i needs its first i entries. The empty first row
            may be left out.
        b: weights of the stages in the slope.
        c: the stages' times, in steps.
        order: order of convergence, checked against the order conditions.
        b_low: weights of an embedded slope of lower order; with it the scheme can control its error.
        b_lower: weights of a second embedded slope, of a still lower order. The two estimates e and
            e_lower are combined as ``e^2 / sqrt(e^2 + 0.01 e_lower^2)``, which is of a higher order
            than either (Hairer, Norsett and Wanner I, II.10).
        dense: weights d of ``theta^2 (1 - theta)^2 dt sum_i d_i k_i``, which is added to the cubic
            Hermite interpolant inside a step. None: the cubic alone, and above order 3, where that is
            coarser than the steps, steps that end at the wanted times.
        dense_rows: several such rows, for an interpolant of a higher order; the row after `dense` or the
            first one is multiplied by ``theta^2 (1 - theta)^2``, and every further one by ``theta`` and
            ``1 - theta`` in turn. The rows weight the stages, the rate at the new state if it is not the
            last stage, and the extra stages of `dense_a`.
        dense_a: one row of weights per extra stage, which only the interpolant needs. Its time is the
            sum of its row.

    Raises:
        ValueError: a row does not add up to its c, the weights do not add up to 1, the scheme is
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
        rows_given = [*a, b, c, *(row for row in (b_low, dense, b_lower) if row is not None)]
        rows_given += [*dense_rows, *dense_a]
        if not all(hasattr(row, "__len__") and not isinstance(row, str) for row in rows_given):
            raise TypeError(
                f"{name}: a is a list of rows, b, c, b_low, dense and b_lower are rows of coefficients"
            )
        exact = all(isinstance(x, Rational | str) for row in rows_given for x in row)
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
        put("a", tuple(_lower_row(name, i, row, stages) for i, row in enumerate(rows)))
        put("b", as_fractions(name, b))
        put("c", as_fractions(name, c))
        put("order", order)
        put("b_low", None if b_low is None else as_fractions(name, b_low))
        put("dense", None if dense is None else as_fractions(name, dense))
        put("b_lower", None if b_lower is None else as_fractions(name, b_lower))
        put("dense_rows", tuple(as_fractions(name, row) for row in dense_rows))
        put("dense_a", tuple(as_fractions(name, row) for row in dense_a))

        _check_denominators(name, (*self.a, self.b, self.c, self.b_low or (), self.b_lower or ()))
        for i, (row, c_i) in enumerate(zip(self.a, self.c)):
            if abs(sum(row) - c_i) > tolerance:
                raise ValueError(f"{name}: row {i} of a adds up to {sum(row)}, but c[{i}] is {c_i}")
        _require_order(name, "b", self.b, self.a, order, tolerance)
        put("order_low", 0 if self.b_low is None else _order(self.b_low, self.a, order + 1, tolerance))
        if self.b_low is not None and self.order_low == 0:
            raise ValueError(f"{name}: b_low adds up to {sum(self.b_low)}, not to 1")
        if self.b_low == self.b:
            raise ValueError(f"{name}: b_low equals b, so that every error estimate would be 0")
        put("error_order", min(order, self.order_low))
        if self.b_lower is not None:
            lower = _order(self.b_lower, self.a, order, tolerance)
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
        known = stages + (not self.first_same_as_last)
        for i, row in enumerate(self.dense_a):
            if len(row) != known + i:
                raise ValueError(
                    f"{name}: row {i} of dense_a has {len(row)} entries; it needs {known + i}"
                )
        if any(len(row) != known + len(self.dense_a) for row in self.dense_rows):
            raise ValueError(f"{name}: a row of dense_rows needs {known + len(self.dense_a)} entries")
        rows = [*([] if self.dense is None else [self.dense]), *self.dense_rows]
        put("dense_weights", tuple(tuple(map(float, row)) for row in rows))
        put("extra_stages", tuple(tuple(map(float, row)) for row in self.dense_a))
        put("_hash", hash((name, self._a, self._b, self._c)))

    def __hash__(self) -> int:
        return self._hash  # fractions hash slowly, and schemes are looked up in every run

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew where it is unpickled: the hash of a name differs from process to process.
        # Coefficients that were floats are floats again, for their checks are not exact.
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
        """S, so that a plain step is ``u + dt * S``.

        Args:
            f: the rate, ``(t, u) -> du/dt`` with the shape of u.
            t: time, a number or a tensor that broadcasts against u.
            u: state ``[*batch, d]``.
            dt: step, likewise; negative steps go back in time.
        """
        return weighted_sum(self._b, self.stages(f, t, u, dt, self.rate_calls))

    def step(self, f: Rate, t: Any, u: Tensor, dt: Any, parameters: Tensor | None = None) -> Step:
        """The plain step from u, with its stages. Arguments as in `slope`; f may take `parameters`."""
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
        """The rates k_i at the first `count` stages (all by default); `first` is k_1 if known."""
        check_state(u, t, dt)
        if isinstance(dt, float) and torch.finfo(u.dtype).max < abs(dt) < math.inf:
            raise ValueError(
                f"dt = {dt:g} is more than {u.dtype} holds; use a smaller step, or u.double()"
            )
        k = [call_rate(f, t, u) if first is None else first]
        for row, c in zip(self._a[1:count], self._c[1:count]):
            k.append(call_rate(f, t + c * dt, moved(u, dt, row, k)))
            check_kept(f, t, u, k)
        return k

    def check_rate(self, f: Rate, t: Any, u: Tensor) -> None:
        """A Runge-Kutta scheme takes any rate (a `Splitting` does not)."""


def check_state(u: Any, t: Any = 0.0, dt: Any = 0.0) -> None:
    """Raise unless u is a tensor that can move, and t and dt broadcast against it."""
    check_tensor("u", u, "[*batch, d]", floating=False)
    if not (u.is_floating_point() or u.is_complex()):
        raise TypeError(f"u is of {u.dtype}; states move continuously: use u.float() or .double()")
    for name, x in (("t", t), ("dt", dt)):
        if not isinstance(x, Tensor):
            if not is_number(x):
                raise TypeError(f"{name} is a {type(x).__name__}; give a number, or a tensor")
        elif x.is_complex() and not u.is_complex():
            raise TypeError(f"{name} is of {x.dtype} but u of {u.dtype}; times and steps are real")
        elif x.device != u.device and (x.dim() or x.device.type != "cpu"):
            raise ValueError(f"{name} is on {x.device} but u on {u.device}; move one with .to(...)")
        elif not broadcasts(x, u.shape) and (name == "dt" or not broadcasts(x, u.shape[:-1])):
            raise ValueError(f"{name} {list(x.shape)} does not broadcast against u {list(u.shape)}")


def broadcasts(x: Tensor, shape: Sequence[int]) -> bool:
    """Whether x can be multiplied with a tensor of that shape, which then stays of it."""
    sizes = zip(reversed(x.shape), reversed(shape))
    return x.dim() <= len(shape) and all(size in (1, own) for size, own in sizes)


def checked_order(name: str, order: int) -> int:
    """The order, if it is one."""
    if not isinstance(order, int) or isinstance(order, bool) or order < 1:
        raise ValueError(f"{name}: order {order!r} is not an order; it is a whole number from 1 on")
    return order


def weighted_sum(weights: Sequence[float], terms: Sequence[Tensor]) -> Tensor:
    """Sum of ``w * x``, leaving out zero weights; in one buffer where no graph is recorded."""
    (w, x), *rest = [(w, x) for w, x in zip(weights, terms) if w != 0] or [(0.0, terms[0])]
    total = x if w == 1 and not rest else w * x
    for w, x in rest:
        total = total.add(x, alpha=w) if torch.is_grad_enabled() else total.add_(x, alpha=w)
    return total


def moved(u: Tensor, dt: Any, weights: Sequence[float], terms: Sequence[Tensor]) -> Tensor:
    """``u + dt * weighted_sum(weights, terms)``, in fewer operations where dt is a number."""
    if not isinstance(dt, float):
        return u + dt * weighted_sum(weights, terms)
    for w, x in zip(weights, terms):
        if w != 0:
            u = u.add(x, alpha=w * dt)
    return u


def call_rate(f: Rate, t: Any, u: Tensor) -> Tensor:
    """``f(t, u)``, with a clear error when it is not a rate of u."""
    try:
        du = f(t, u)
    except RuntimeError as error:
        if not _OTHER_TYPE.search(str(error)):
            raise
        raise ValueError(
            f"the rate failed for a state in {u.dtype}: {error}. If it holds weights or constants of "
            "another type, use rate.to(u.dtype), such as network.double(), or give states of its type"
        ) from error
    if not isinstance(du, Tensor):
        raise TypeError(f"the rate returned a {type(du).__name__}; it must return a tensor like u")
    if du.shape != u.shape:
        raise ValueError(
            f"the rate returned shape {list(du.shape)} for a state of shape {list(u.shape)}; "
            "they must be equal (the last dimension is the state's, the others are the batch's)"
        )
    if du.dtype != u.dtype:
        raise ValueError(
            f"the rate returned {du.dtype} for a state in {u.dtype}; cast its constants to the "
            "state, for example with .to(u)"
        )
    return du


def check_same_rate(given: Rate, expected: Rate, t: Any, u: Tensor, message: str) -> None:
    """Raise if two rates differ at states u ``[*batch, d]``; non-finite values are not compared.

    Args:
        message: What the rates are; the difference and the remedy are added.

    Raises:
        ValueError: They differ by more than rounding.
    """
    if given is expected or not u.numel():
        return
    with torch.no_grad():
        ours, theirs = (call_rate(f, t, u.detach()) for f in (given, expected))
    difference, size = (x.abs().nan_to_num(0.0, 0.0).max().item() for x in (ours - theirs, theirs))
    if difference > max(1e-6, math.sqrt(torch.finfo(u.dtype).eps)) * size + 1e-12:
        raise ValueError(
            f"{message}: at t = {float(t):g} they differ by {difference:.2g}, where its size is "
            f"{size:.2g}. A correction belongs to one equation; fit a solver to this one, or use a "
            "plain scheme"
        )


def version(u: Tensor) -> int:
    """How often u was written to; 0 where torch does not count."""
    return 0 if u.is_inference() else u._version


def check_unwritten(u: Tensor, before: int) -> None:
    """Raise if a rate has written into the state it was given."""
    if version(u) != before:
        raise ValueError(
            "the rate writes into the state it is given (u0 has been overwritten as well), so that "
            "later stages start from another one; let it return a new tensor: -u instead of u.neg_(), "
            "or u = u.clone() first"
        )


def _owner(x: Tensor) -> Tensor:
    """The tensor that x is a view of, or x."""
    return x if x._base is None else x._base


def check_kept(f: Rate, t: Any, u: Tensor, stages: Sequence[Tensor]) -> None:
    """Raise if the last two stages are one tensor that every call of the rate fills."""
    du = stages[-1]
    if torch.compiler.is_compiling() or _owner(du) is not _owner(stages[-2]):
        return
    before = version(du)
    f(t, u)
    if version(du) != before:
        raise ValueError(
            "the rate returns the same tensor every time and writes into it, so that a step's rates are "
            "all the last one; return a new tensor, or .clone() of the buffer"
        )


def as_fractions(name: str, values: Sequence[Coefficient]) -> tuple[Fraction, ...]:
    """Coefficients as exact numbers."""
    for x in values:
        if isinstance(x, str) and (len(x) > LONGEST or _exponent(x) > LARGEST_EXPONENT):
            raise ValueError(
                f"{name}: the coefficient {x[:40]!r} is too long; at most {LONGEST} characters and a "
                f"power of ten up to {LARGEST_EXPONENT} are read"
            )
    try:
        return tuple(_fraction(x) for x in values)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{name}: {list(values)!r} is not a list of coefficients; write 1, '1/6' or Fraction(1, 6)"
        ) from error


def _exponent(text: str) -> int:
    """Return the absolute power of ten of a number such as ``1e-3``, and 0 without one."""
    _, _, power = text.replace("_", "").lower().rpartition("e")
    return abs(int(power)) if re.fullmatch(r"\s*[+-]?\d+\s*", power) and "e" in text.lower() else 0


def check_stages(name: str, count: int) -> None:
    """Raise a ValueError if a scheme has more than `MOST_STAGES` stages."""
    if count > MOST_STAGES:
        raise ValueError(
            f"{name}: a scheme has at most {MOST_STAGES} stages, and this one has {count:,}"
        )


def _check_denominators(name: str, rows: Iterable[Sequence[Fraction]]) -> None:
    """Raise a ValueError if exact checks of the order conditions of a tableau would take too long."""
    common = 1
    for x in (x for row in rows for x in row):
        common = math.lcm(common, x.denominator)
        if common.bit_length() > COMMON_BITS:
            raise ValueError(
                f"{name}: the common denominator of the coefficients has more than {COMMON_BITS:,} "
                "binary digits, so the order conditions cannot be checked exactly; write floats"
            )


def _fraction(x: Coefficient) -> Fraction:
    if isinstance(x, Fraction | str):
        return Fraction(x)
    return Fraction(int(x)) if isinstance(x, Integral) else Fraction(float(x))


def _lower_row(name: str, i: int, row: Sequence[Coefficient], stages: int) -> tuple[Fraction, ...]:
    values = as_fractions(name, row)
    if any(values[i:]):
        raise ValueError(
            f"{name}: stage {i} uses stages from {i} on, so the scheme is implicit; "
            "only explicit schemes (a strictly lower triangular) can be stepped here"
        )
    if len(values) < i or len(values) > stages:
        raise ValueError(f"{name}: row {i} of a has {len(values)} entries; it needs {i}")
    return values[:i]


def _order(
    b: tuple[Fraction, ...], a: tuple[tuple[Fraction, ...], ...], most: int, tolerance: float
) -> int:
    order = 0
    if tolerance:
        b, a = ([float(x) for x in b], [[float(x) for x in row] for row in a])  # type: ignore[assignment]
    while order < most and defect(order + 1, b, a) <= tolerance:
        order += 1
    return order


def _require_order(
    name: str,
    what: str,
    b: tuple[Fraction, ...],
    a: tuple[tuple[Fraction, ...], ...],
    order: int,
    tolerance: float,
) -> None:
    reached = _order(b, a, order, tolerance)
    if reached == 0:
        raise ValueError(f"{name}: {what} adds up to {sum(b)}, not to 1")
    if reached < order:
        miss = float(defect(reached + 1, b, a))
        raise ValueError(
            f"{name}: claims order {order}, but the conditions of order {reached + 1} are missed by "
            f"{miss:.3g}; with these coefficients say order={reached}"
        )
