"""A small language for the contents of files: one schema per format, checked before anything is made.

A schema is a function ``(value, path)`` that raises a `MismatchError` if the value at the path in the
file does not match. `number`, `text`, `text_number`, `flag`, `null` and `plain` are schemas of single
values; `listing`, `mapping` and `record` of values that hold others; `variants` and `any_of` of
alternatives. Errors name the file, the field, what is there, what is allowed, and what to do.

>>> point = record({"x": number(low=0), "name": text()}, {"sizes": listing(number(whole=True), most=3)})
>>> check({"x": 1.5, "name": "a"}, point, "point.json", advice="Save it again.")
>>> check({"x": "1.5", "name": "a"}, point, "point.json", advice="Save it again.")
Traceback (most recent call last):
ValueError: point.json: x is the text '1.5'; it must be a number of at least 0. Save it again.
"""

import math
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Callable[[Any, str], None]

ADVICE = "Use another copy or write it again: it is damaged, or of another version of attractor."
LARGEST = sys.float_info.max
LONGEST = 200  # characters of a text
MOST = 100_000  # items of a list, or keys of an object
SHOWN = 8  # names in a message


class MismatchError(Exception):
    """A value that does not match its schema: `args` are its path, what it is, and what is allowed."""


def check(
    value: Any, schema: Schema, source: Any, error: type[Exception] = ValueError, advice: str = ADVICE
) -> None:
    """Raise an error of a class if a value that was read from a source does not match a schema."""
    fault = mismatch(value, schema)
    if fault is not None:
        raise error(f"{source}: {fault}. {advice}")


def mismatch(value: Any, schema: Schema) -> str | None:
    """Return how a value differs from a schema, or None if it matches."""
    try:
        schema(value, "")
    except MismatchError as error:
        path, found, allowed = error.args
        return f"{path.lstrip('.') or 'the content'} {found}; {allowed}"
    return None


def number(
    low: float = -LARGEST, high: float = LARGEST, whole: bool = False, finite: bool = True
) -> Schema:
    """Return the schema of a number from `low` to `high`; True and False are none."""
    kinds = (int,) if whole else (int, float)
    allowed = f"it must be {'a whole number' if whole else 'a number'}{_bounds(low, high)}"

    def schema(value: Any, path: str) -> None:
        good = type(value) in kinds and (low <= value <= high or not (finite or is_finite(value)))
        _require(good, value, path, allowed)

    return schema


def text(longest: int = LONGEST, choices: Collection[str] = ()) -> Schema:
    """Return the schema of a text of at most so many characters, which is one of the choices if any."""
    allowed = f"it must be a text of at most {longest:,} characters"
    if choices:
        allowed = f"it must be one of {_names(choices, len(choices))}"

    def schema(value: Any, path: str) -> None:
        good = type(value) is str and len(value) <= longest and (not choices or value in choices)
        _require(good, value, path, allowed)

    return schema


def text_number(
    low: float = -LARGEST, high: float = LARGEST, parse: Callable[[str], float] = float.fromhex
) -> Schema:
    """Return the schema of a number that is written as text, by default in hexadecimal digits."""

    def schema(value: Any, path: str) -> None:
        try:
            parsed = parse(value) if type(value) is str and len(value) <= LONGEST else math.nan
        except (ValueError, OverflowError):
            parsed = math.nan
        _require(low <= parsed <= high, value, path, f"it must be a number as text{_bounds(low, high)}")

    return schema


def flag(value: Any, path: str) -> None:
    """Match True and False."""
    _require(type(value) is bool, value, path, "it must be true or false")


def null(value: Any, path: str) -> None:
    """Match None, which JSON writes as null."""
    _require(value is None, value, path, "it must be null")


def plain(value: Any, path: str, depth: int = 8, finite: bool = True) -> None:
    """Match any JSON of at most `depth` levels of lists and objects, by default of finite numbers."""
    if isinstance(value, dict | list):
        _require(depth > 0, value, path, "no lists or objects may be nested as deeply")
        for part in value.values() if isinstance(value, dict) else value:
            plain(part, path, depth - 1, finite)
    elif isinstance(value, int | float):
        good = abs(value) <= LARGEST or not (finite or is_finite(value))
        _require(good, value, path, "its numbers must be finite")


def listing(item: Schema, least: int = 0, most: int = MOST) -> Schema:
    """Return the schema of a list of `least` to `most` items that match `item`."""
    size = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    allowed = f"it must be a list of {size} items"

    def schema(value: Any, path: str) -> None:
        _require(type(value) is list and least <= len(value) <= most, value, path, allowed)
        for i, part in enumerate(value):
            item(part, f"{path}[{i}]")

    return schema


def pair(first: Schema, second: Schema) -> Schema:
    """Return the schema of a list of two items."""

    def schema(value: Any, path: str) -> None:
        good = type(value) is list and len(value) == 2
        _require(good, value, path, "it must be a list of 2 items")
        first(value[0], f"{path}[0]")
        second(value[1], f"{path}[1]")

    return schema


def mapping(part: Schema) -> Schema:
    """Return the schema of an object whose keys are any text, and whose values match `part`."""
    return record({}, others=part)


def record(
    required: Mapping[str, Schema],
    optional: Mapping[str, Schema] | None = None,
    others: Schema | None = None,
) -> Schema:
    """Return the schema of an object with all required keys and any of the optional ones.

    Args:
        others: Schema of the values of further keys. None: there are none.
    """
    known = {**required, **(optional or {})}

    def schema(value: Any, path: str) -> None:
        good = type(value) is dict and len(value) <= MOST
        _require(good, value, path, f"it must be an object with {_names(known) or 'any keys'}")
        for key in required:
            if key not in value:
                raise MismatchError(path, f"lacks {key!r}", f"it must have {_names(required)}")
        for key, own in value.items():
            part = known.get(key, others)
            if part is None:
                allowed = f"it may have {_names(known) or 'no keys'}"
                raise MismatchError(path, f"has the key {key[:40]!r}", allowed)
            part(own, f"{path}.{key[:LONGEST]}")

    return schema


def variants(key: str, schemas: Mapping[str, Schema]) -> Schema:
    """Return the schema of an object whose value at a key says which of several schemas it has."""
    choice = record({key: text(choices=schemas)}, others=lambda value, path: None)

    def schema(value: Any, path: str) -> None:
        choice(value, path)
        schemas[value[key]](value, path)

    return schema


def any_of(*schemas: Schema) -> Schema:
    """Return the schema of what matches one of several; the error is that of the closest one."""

    def schema(value: Any, path: str) -> None:
        errors = []
        for one in schemas:
            try:
                return one(value, path)
            except MismatchError as error:
                errors.append(error)
        deepest = max(errors, key=lambda error: len(error.args[0]))
        if deepest.args[0] != path:
            raise deepest
        allowed = dict.fromkeys(error.args[2] for error in errors)
        raise MismatchError(path, errors[0].args[1], ", or ".join(allowed))

    return schema


def is_finite(value: float) -> bool:
    """Return whether a number, of any size, is neither NaN nor infinite."""
    return value == value and abs(value) != math.inf


def _require(good: bool, value: Any, path: str, allowed: str) -> None:
    if not good:
        raise MismatchError(path, _described(value), allowed)


def _bounds(low: float, high: float) -> str:
    edges = [f"of at least {low:g}"] * (low > -LARGEST) + [f"at most {high:g}"] * (high < LARGEST)
    return f" {' and '.join(edges)}" if edges else ""


def _names(names: Collection[str], shown: int = SHOWN) -> str:
    first = ", ".join(str(name)[:80] for name, _ in zip(names, range(shown)))
    return first + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _described(value: Any) -> str:
    """Return what a value is, as the end of a sentence."""
    if value is None or isinstance(value, bool):
        return f"is {'null' if value is None else str(value).lower()}"
    if isinstance(value, str):
        return f"is the text {value[:40]!r}" + f" of {len(value):,} characters" * (len(value) > 40)
    if isinstance(value, list):
        return f"is a list of {len(value):,} items"
    if isinstance(value, dict):
        return f"is an object with {_names(value) or 'no keys'}"
    huge = isinstance(value, int) and abs(value) > LARGEST
    return "is a whole number of more than 300 digits" if huge else f"is {value!r}"
