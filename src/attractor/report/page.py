"""A self-contained HTML page, built from top to bottom."""

import json
from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any, Self

from attractor.storage.files import write_text

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #d8dde3; --dim: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --paper: #14171b; --line: #363d46; --dim: #9aa4af; } }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { font-size: 1.3rem; margin-top: 2.6rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .6rem; }
p { max-width: 46rem; } footer, .dim { color: var(--dim); font-size: .9rem; }
figure { margin: 1rem 0; padding: .5rem; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; display: flex; flex-wrap: wrap; }
figure div { flex: 1 1 17rem; } figure svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
@media (max-width: 34rem) { table { font-size: .82rem; } th, td { padding-right: .5rem; } }
pre { padding: .6rem .8rem; border: 1px solid var(--line); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
figure.live { background: none; padding: 0; border: 0; display: block; }
figcaption { color: var(--dim); font-size: .9rem; max-width: 46rem; }
.controls { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; align-items: center; margin: .5rem 0; }
.controls label { display: flex; gap: .5rem; align-items: center; } input[type=range] { width: 14rem; }
button, select { font: inherit; color: var(--ink); background: var(--paper); padding: .2rem .7rem;
  border: 1px solid var(--line); border-radius: 6px; } output { min-width: 2.2rem; }
canvas { display: block; width: 100%; }
.numbers { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; font-variant-numeric: tabular-nums; }
.numbers i { display: inline-block; width: .7rem; height: .7rem; margin-right: .4rem;
  border-radius: 50%; }
.bad { color: #e0533d; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem; margin: .6rem 0; align-items: center; }
.pair > * { flex: 1 1 17rem; min-width: 0; width: 17rem; }
"""

# Plotly's pictures take the page's colours, and change with them.
COLOURS = """
const attractorDark = matchMedia("(prefers-color-scheme: dark)");
function attractorColours() {
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line") };
  const scene = { xaxis: axis, yaxis: axis, zaxis: axis };
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink") },
    template: { layout: { xaxis: axis, yaxis: axis, scene: scene } } };
}
function attractorPlot(id, figure) {
  const layout = Object.assign({}, figure.layout, attractorColours());
  layout.font = Object.assign({}, (figure.layout || {}).font, layout.font);
  if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false; // a finger scrolls the page
  const how = { responsive: true, displaylogo: false, displayModeBar: false };
  Plotly.newPlot(id, figure.data, layout, how)
    .then(() => figure.frames && Plotly.addFrames(id, figure.frames));
}
attractorDark.addEventListener("change", () => document.querySelectorAll(".js-plotly-plot")
  .forEach(plot => Plotly.relayout(plot, attractorColours())));
"""


class Page:
    """A page of text, tables and pictures. Each method adds one element and returns the page."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]
        self._plots = 0
        self._scripts: list[str] = []

    def __repr__(self) -> str:
        return f"Page({self.title!r}, {len(self._parts) - 1} parts, {self._plots} plots)"

    def section(self, title: str) -> Self:
        """Add the title of a section."""
        self._parts.append(f"<h2>{escape(title)}</h2>")
        return self

    def heading(self, title: str) -> Self:
        """Add a heading within a section."""
        self._parts.append(f"<h3>{escape(title)}</h3>")
        return self

    def text(self, text: str) -> Self:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")
        return self

    def command(self, text: str) -> Self:
        """Add a command."""
        self._parts.append(f"<pre>{escape(text)}</pre>")
        return self

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Self:
        """Add a table; numbers are printed with three digits, None as a dash."""
        line = lambda tag, cells: "".join(f"<{tag}>{escape(cell_text(c))}</{tag}>" for c in cells)
        body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
        self._parts.append(
            f'<div class="scroll"><table><thead><tr>{line("th", head)}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
        return self

    def figure(self, label: str, *figures: Any) -> Self:
        """Add Matplotlib figures side by side; the label describes them to screen readers."""
        pictures = "".join(f"<div>{_svg(figure)}</div>" for figure in figures)
        self._parts.append(f'<figure role="img" aria-label="{escape(label)}">{pictures}</figure>')
        return self

    def plot(
        self,
        label: str,
        figure: Any,
        height: int = 420,
        caption: str = "",
        controls: str = "",
        script: str = "",
    ) -> Self:
        """Add an interactive Plotly figure, or its dictionary; the page includes Plotly once.

        `controls` is HTML above the figure. `script` runs after the figure is drawn, and can refer to
        its id as `plot`.
        """
        content = figure if isinstance(figure, dict) else json.loads(figure.to_json())
        content.get("layout", {}).pop("template", None)  # the page has its own colours
        self._plots += 1
        name = f"plot-{self._plots}"
        return self.live(
            label,
            f'{controls}<div id="{name}" style="height:{height}px"></div>',
            f'const plot = "{name}";\nattractorPlot(plot, {script_json(content)});\n{script}',
            caption,
        )

    def live(self, label: str, html: str, script: str = "", caption: str = "") -> Self:
        """Add HTML, such as a canvas and sliders, and a script. Both are included unchanged."""
        figcaption = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        run = f"<script>{{\n{script}\n}}</script>" if script else ""
        self._parts.append(
            f'<figure class="live" aria-label="{escape(label)}">{html}{figcaption}</figure>{run}'
        )
        return self

    def script(self, code: str) -> Self:
        """Add JavaScript that several elements use; equal code is included once."""
        if code not in self._scripts:
            self._scripts.append(code)
        return self

    def html(self) -> str:
        """Return the page as HTML."""
        scripts = [f"<script>\n{code}</script>" for code in self._scripts]
        body = "\n".join([*scripts, *self._parts])
        if self._plots:
            from plotly.offline import get_plotlyjs

            body = f"<script>{get_plotlyjs()}</script>\n<script>{COLOURS}</script>\n{body}"
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head>\n"
            f"<body>\n{body}\n</body></html>\n"
        )

    def write(self, path: Path | str) -> Path:
        """Write the page atomically."""
        return write_text(Path(path), self.html())


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _svg(figure: Any) -> str:
    stream = StringIO()
    figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    return stream.getvalue()[stream.getvalue().index("<svg") :]


def cell_text(value: Any) -> str:
    """Format a value for a table: floats with three digits, None as a dash."""
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
