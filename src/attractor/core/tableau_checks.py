"""Checks of the coefficients of a tableau."""

import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from numbers import Integral
from typing import TypeAlias

from attractor.core.trees import defect

Coefficient: TypeAlias = int | str | float | Fraction

LONGEST = 400  # characters of a coefficient
LARGEST_EXPONENT = 308  # of a coefficient that is written as 1e-3
MOST_STAGES = 128
COMMON_BITS = 2048  # of the common denominator of all coefficients


def checked_order(name: str, order: int) -> int:
    """Return the order of a scheme if it is a whole number of at least 1; raise otherwise."""
    if not isinstance(order, int) or isinstance(order, bool) or order < 1:
        raise ValueError(f"{name}: order {order!r} must be a whole number of at least 1")
    return order


def as_fractions(name: str, values: Sequence[Coefficient]) -> tuple[Fraction, ...]:
    """Return coefficients as exact numbers."""
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


def check_denominators(name: str, rows: Iterable[Sequence[Fraction]]) -> None:
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


def lower_row(name: str, i: int, row: Sequence[Coefficient], stages: int) -> tuple[Fraction, ...]:
    """Return row i of a tableau as exact numbers, without what is on and above the diagonal."""
    values = as_fractions(name, row)
    if any(values[i:]):
        raise ValueError(
            f"{name}: stage {i} uses stages from {i} on, so the scheme is implicit; "
            "only explicit schemes (a strictly lower triangular) are supported here"
        )
    if len(values) < i or len(values) > stages:
        raise ValueError(f"{name}: row {i} of a has {len(values)} entries; it needs {i}")
    return values[:i]


def order_of(
    b: tuple[Fraction, ...], a: tuple[tuple[Fraction, ...], ...], most: int, tolerance: float
) -> int:
    """Return the order of the weights b with the stages a, at most `most`."""
    order = 0
    if tolerance:
        b, a = ([float(x) for x in b], [[float(x) for x in row] for row in a])  # type: ignore[assignment]
    while order < most and defect(order + 1, b, a) <= tolerance:
        order += 1
    return order


def require_order(
    name: str,
    what: str,
    b: tuple[Fraction, ...],
    a: tuple[tuple[Fraction, ...], ...],
    order: int,
    tolerance: float,
) -> None:
    """Raise unless the weights b with the stages a have the order."""
    reached = order_of(b, a, order, tolerance)
    if reached == 0:
        raise ValueError(f"{name}: {what} adds up to {sum(b)}, not to 1")
    if reached < order:
        miss = float(defect(reached + 1, b, a))
        raise ValueError(
            f"{name}: claims order {order}, but the conditions of order {reached + 1} have a residual "
            f"of {miss:.3g}; with these coefficients pass order={reached}"
        )
