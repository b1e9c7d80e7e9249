"""A self-contained HTML page, built from top to bottom."""

from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any, Self

from attractor.core.files import write_text

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #d8dde3; --dim: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --paper: #14171b; --line: #363d46; --dim: #9aa4af; } }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
p { max-width: 46rem; } footer, .dim { color: var(--dim); font-size: .9rem; }
figure { margin: 1rem 0; padding: .5rem; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; display: flex; flex-wrap: wrap; }
figure div { flex: 1 1 17rem; } figure svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
@media (max-width: 34rem) { table { font-size: .82rem; } th, td { padding-right: .5rem; } }
pre { padding: .6rem .8rem; border: 1px solid var(--line); border-radius: 6px; overflow-x: auto; }
"""


class Page:
    """Sections of text, tables and pictures. Each call adds one and returns the page."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]

    def section(self, title: str) -> Self:
        """A heading."""
        self._parts.append(f"<h2>{escape(title)}</h2>")
        return self

    def text(self, text: str) -> Self:
        """A paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")
        return self

    def command(self, text: str) -> Self:
        """Something to type."""
        self._parts.append(f"<pre>{escape(text)}</pre>")
        return self

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Self:
        """A table; numbers are printed with three digits, None as a dash."""
        line = lambda tag, cells: "".join(f"<{tag}>{escape(cell_text(c))}</{tag}>" for c in cells)
        body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
        self._parts.append(
            f'<div class="scroll"><table><thead><tr>{line("th", head)}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
        return self

    def figure(self, label: str, *figures: Any) -> Self:
        """Matplotlib figures side by side where there is room; label says what a reader sees."""
        pictures = "".join(f"<div>{_svg(figure)}</div>" for figure in figures)
        self._parts.append(f'<figure role="img" aria-label="{escape(label)}">{pictures}</figure>')
        return self

    def html(self) -> str:
        """The whole page."""
        body = "\n".join(self._parts)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head>\n"
            f"<body>\n{body}\n</body></html>\n"
        )

    def write(self, path: Path | str) -> Path:
        """Write the page, whole or not at all."""
        return write_text(path, self.html())


def _svg(figure: Any) -> str:
    stream = StringIO()
    figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    return stream.getvalue()[stream.getvalue().index("<svg") :]


def cell_text(value: Any) -> str:
    """How a value reads in a table: three digits for floats, a dash for nothing."""
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
