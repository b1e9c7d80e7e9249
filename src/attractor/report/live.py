"""Pictures that a reader can touch, as Plotly's dictionaries for `Page.plot`; controls for `Page.live`.

Plotly itself is not needed to make them, only to write the page they are in.

>>> picture = lines({"rk4": ([0.1, 0.2], [1e-6, 2e-5])}, x="step", y="error", log="xy")
>>> picture["layout"]["xaxis"]["type"], picture["data"][0]["name"]
('log', 'rk4')
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

# Seen on white and on black.
COLORS = ("#3d85c6", "#e0533d", "#2f9e6e", "#d9932b", "#9a6fd0", "#8a949e", "#c2579a", "#3aa6b5")
MARKS = ("circle", "square", "triangle-up", "diamond", "x", "cross", "star", "pentagon")

Line = tuple[Sequence[float], Sequence[float | None]]


def lines(
    named: Mapping[str, Line],
    *,
    x: str = "",
    y: str = "",
    log: str = "",
    looks: Mapping[str, Mapping[str, Any]] | None = None,
    marks: bool = False,
) -> dict[str, Any]:
    """Lines, each of (x, y) values; what is no number, or not positive on a logarithmic axis, is a gap.

    Args:
        named: name -> line.
        x, y: what the axes show.
        log: axes that are logarithmic, such as "y" or "xy".
        looks: name -> further entries of Plotly's trace, for those that differ.
        marks: whether points are marked.
    """
    data = []
    for i, (name, (across, up)) in enumerate(named.items()):
        color = COLORS[i % len(COLORS)]
        trace: dict[str, Any] = {
            "type": "scatter", "name": name, "x": list(across), "y": [_shown(v, "y" in log) for v in up],
            "mode": "lines+markers" if marks else "lines", "line": {"color": color, "width": 2},
            "marker": {"color": color, "size": 7, "symbol": MARKS[i % len(MARKS)]},
        }  # fmt: skip
        for key, value in (looks or {}).get(name, {}).items():
            trace[key] = {**trace[key], **value} if isinstance(trace.get(key), dict) else value
        data.append(trace)
    return {"data": data, "layout": layout(x, y, log)}


def heatmap(
    z: Sequence[Sequence[float]],
    across: Sequence[float],
    up: Sequence[float],
    *,
    x: str = "",
    y: str = "",
    of: str = "",
    top: float | None = None,
) -> dict[str, Any]:
    """Values ``[len(up)][len(across)]`` as shades from 0 to `top`; `of` says what they are."""
    trace = {
        "type": "heatmap", "z": z, "x": list(across), "y": list(up), "zmin": 0, "zmax": top,
        "colorscale": [[0, "rgba(61,133,198,0)"], [1, "rgba(61,133,198,1)"]],
        "colorbar": {"title": {"text": of, "side": "right"}, "thickness": 12, "outlinewidth": 0},
    }  # fmt: skip
    return {"data": [trace], "layout": layout(x, y, "")}


def work_precision(found: Any, work: str = "seconds") -> dict[str, Any]:
    """A `Comparison`: error against work, a line a method, the hybrid a star.

    Args:
        found: what `attractor.compare` returned.
        work: "seconds" or "rate_calls".
    """
    named: dict[str, Line] = {}
    looks: dict[str, dict[str, Any]] = {}
    for method in dict.fromkeys(p.method for p in found.points):
        own = found.plain(method)
        named[method] = [getattr(p, work) for p in own], [p.error for p in own]
        dash = "dot" if own[0].adaptive else "solid"
        looks[method] = {"line": {"dash": dash}, "text": [str(p) for p in own]}
    hybrid = found.hybrid
    named["hybrid"] = [getattr(hybrid, work)], [hybrid.error]
    star = {"symbol": "star", "size": 18, "color": COLORS[1]}
    looks["hybrid"] = {"mode": "markers", "marker": star, "text": [str(hybrid)]}
    others = [c for c in COLORS if c != COLORS[1]]
    for color, method in zip(others, named):
        looks[method].setdefault("marker", {"color": color})
        looks[method].setdefault("line", {})["color"] = color
    label = (
        "seconds, the network counted" if work == "seconds" else "rate calls, the network not counted"
    )
    return lines(named, x=label, y="mean square error", log="xy", looks=looks, marks=True)


def layout(x: str, y: str, log: str = "") -> dict[str, Any]:
    """Axes with their names, little margin, and the legend below: for wide screens and narrow ones."""
    logarithmic: dict[str, dict[str, Any]] = {
        "x": {"type": "log", "tickformat": "~g", "dtick": "D2"},
        "y": {"type": "log", "exponentformat": "power", "dtick": 1},
    }
    axis = lambda name, letter: {
        "title": {"text": name, "standoff": 6}, "automargin": True, "zeroline": False,
        **(logarithmic[letter] if letter in log else {}),
    }  # fmt: skip
    return {
        "xaxis": axis(x, "x"), "yaxis": axis(y, "y"), "margin": {"l": 50, "r": 12, "t": 16, "b": 40},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "hovermode": "closest", "font": {"size": 13},
    }  # fmt: skip


def slider(name: str, label: str, low: float, high: float, value: float, step: float = 1) -> str:
    """A slider, as HTML; the ``output`` after it is for its value, which the script writes."""
    return (
        f'<label>{escape(label)} <input type="range" id="{name}" min="{low:g}" max="{high:g}" '
        f'step="{step:g}" value="{value:g}"><output for="{name}"></output></label>'
    )


def choice(name: str, label: str, options: Mapping[str, str]) -> str:
    """A list to choose from, as HTML: value -> what is shown."""
    inside = "".join(
        f'<option value="{escape(v)}">{escape(text)}</option>' for v, text in options.items()
    )
    return f'<label>{escape(label)} <select id="{name}">{inside}</select></label>'


def tick(name: str, label: str, on: bool = False) -> str:
    """A box to tick, as HTML."""
    return f'<label><input type="checkbox" id="{name}"{" checked" * on}> {escape(label)}</label>'


def button(name: str, label: str) -> str:
    """A button, as HTML."""
    return f'<button type="button" id="{name}">{escape(label)}</button>'


def _shown(value: float | None, log: bool) -> float | None:
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return value
