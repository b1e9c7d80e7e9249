"""Views of results: pictures, pandas tables and HTML, whose packages are loaded on demand."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

_PICTURES: dict[str, Callable[[], Any]] = {}  # functions that import a module with pictures


def pandas() -> Any:
    """Import pandas.

    Raises:
        ImportError: It is not installed; the message says how to install it.
    """
    try:
        import pandas  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ImportError(
            "pandas is missing; install it with: pip install 'attractor[report]'"
        ) from None
    return pandas


def register_pictures(name: str, load: Callable[[], Any]) -> None:
    """Register a module with pictures, which imports Matplotlib and is above this one.

    Args:
        name: The name that `pictures` takes.
        load: A function that imports and returns the module.
    """
    _PICTURES[name] = load


def pictures(name: str) -> Any:
    """Import a module that was registered by `register_pictures`.

    Raises:
        ImportError: Matplotlib is not installed; the message says how to install it.
    """
    try:
        return _PICTURES[name]()
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ImportError(
            "Matplotlib is missing; install it with: pip install 'attractor[report]'"
        ) from None


def html_table(head: Sequence[Any], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """Return a table as HTML: floats have three digits, None is a dash."""
    line = lambda tag, cells: "".join(f"<{tag}>{escape(_text(c))}</{tag}>" for c in cells)
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{line('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
