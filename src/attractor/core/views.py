"""How results are looked at: as pictures, as tables of pandas, in notebooks. All of it on demand."""

from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any


def pandas() -> Any:
    """The module; an error that says how to get it."""
    try:
        import pandas  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ImportError(
            "pandas is missing; install it with: pip install 'attractor[report]'"
        ) from None
    return pandas


def pictures(name: str) -> Any:
    """A module of `attractor.report`, which imports Matplotlib; an error that says how to get it."""
    try:
        return import_module(f"attractor.report.{name}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ImportError(
            "Matplotlib is missing; install it with: pip install 'attractor[report]'"
        ) from None


def html_table(head: Sequence[Any], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """A table as a notebook shows it: floats with three digits, a dash for None."""
    line = lambda tag, cells: "".join(f"<{tag}>{escape(_text(c))}</{tag}>" for c in cells)
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{told}<thead><tr>{line('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
