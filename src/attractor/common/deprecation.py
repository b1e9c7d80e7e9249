"""Deprecated keywords, which still work with a DeprecationWarning."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def moved_into(target: str, *names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function whose former keywords are now entries of another keyword.

    Args:
        target: The keyword, which takes a dictionary.
        names: The former keywords, for which None means that they are not passed.

    >>> @moved_into("options", "depth")
    ... def build(options=None):
    ...     return options
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     build(depth=3)
    {'depth': 3}
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            keywords: dict[str, Any] = dict(kwargs)
            old = {name: keywords.pop(name) for name in names if name in keywords}
            entries = {name: value for name, value in old.items() if value is not None}
            if entries:
                warnings.warn(
                    f"{', '.join(f'{name}=' for name in entries)} of {function.__name__} will be "
                    f"removed; pass {target}={entries!r}",
                    DeprecationWarning,
                    stacklevel=2,
                )
                keywords[target] = {**(keywords.get(target) or {}), **entries}
            return function(*args, **keywords)

        return wrapper

    return decorate
