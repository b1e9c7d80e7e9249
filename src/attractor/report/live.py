"""Interactive figures as dictionaries of Plotly for `Page.plot`, and HTML controls for `Page.live`.

Plotly itself is needed only to write the page.

>>> picture = lines({"rk4": ([0.1, 0.2], [1e-6, 2e-5])}, x="step", y="error", log="xy")
>>> picture["layout"]["xaxis"]["type"], picture["data"][0]["name"]
('log', 'rk4')
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

# Colours that are visible on white and on black.
COLORS = ("#3d85c6", "#e0533d", "#2f9e6e", "#d9932b", "#9a6fd0", "#8a949e", "#c2579a", "#3aa6b5")
MARKS = ("circle", "square", "triangle-up", "diamond", "x", "cross", "star", "pentagon")

Line = tuple[Sequence[float], Sequence[float | None]]


def lines(
    curves: Mapping[str, Line],
    *,
    x: str = "",
    y: str = "",
    log: str = "",
    looks: Mapping[str, Mapping[str, Any]] | None = None,
    marks: bool = False,
) -> dict[str, Any]:
    """Return a figure of lines of (x, y) values.

    Values that are not finite, or not positive on a logarithmic axis, become gaps.

    Args:
        curves: name -> line.
        x, y: the labels of the axes.
        log: the logarithmic axes, such as "y" or "xy".
        looks: name -> further entries of Plotly's trace.
        marks: whether points are marked.
    """
    data = []
    for i, (name, (across, up)) in enumerate(curves.items()):
        color = COLORS[i % len(COLORS)]
        trace: dict[str, Any] = {
            "type": "scatter", "name": name, "x": list(across),
            "y": [_valid_or_none(v, "y" in log) for v in up],
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
    """Return a figure of values ``[len(up)][len(across)]``, with shades from 0 to `top`.

    `of` is the label of the values.
    """
    trace = {
        "type": "heatmap", "z": z, "x": list(across), "y": list(up), "zmin": 0, "zmax": top,
        "colorscale": [[0, "rgba(61,133,198,0)"], [1, "rgba(61,133,198,1)"]],
        "colorbar": {"title": {"text": of, "side": "right"}, "thickness": 12, "outlinewidth": 0},
    }  # fmt: skip
    return {"data": [trace], "layout": layout(x, y, "")}


def work_precision(comparison: Any, work: str = "seconds") -> dict[str, Any]:
    """Return a figure of error against work, with one line per method and a star for the hybrid.

    Args:
        comparison: the result of `attractor.compare`.
        work: "seconds" or "rate_calls".
    """
    curves: dict[str, Line] = {}
    looks: dict[str, dict[str, Any]] = {}
    for method in dict.fromkeys(p.method for p in comparison.points):
        points = comparison.plain(method)
        curves[method] = [getattr(p, work) for p in points], [p.error for p in points]
        dash = "dot" if points[0].adaptive else "solid"
        looks[method] = {"line": {"dash": dash}, "text": [str(p) for p in points]}
    hybrid = comparison.hybrid
    curves["hybrid"] = [getattr(hybrid, work)], [hybrid.error]
    star = {"symbol": "star", "size": 18, "color": COLORS[1]}
    looks["hybrid"] = {"mode": "markers", "marker": star, "text": [str(hybrid)]}
    others = [c for c in COLORS if c != COLORS[1]]
    for color, method in zip(others, curves):
        looks[method].setdefault("marker", {"color": color})
        looks[method].setdefault("line", {})["color"] = color
    label = "seconds, including the network" if work == "seconds" else "rate calls, without the network"
    return lines(curves, x=label, y="mean square error", log="xy", looks=looks, marks=True)


def layout(x: str, y: str, log: str = "") -> dict[str, Any]:
    """Return a layout with labelled axes, small margins and a horizontal legend."""
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
    """Return the HTML of a slider and of an ``output``, to which the script writes its value."""
    return (
        f'<label>{escape(label)} <input type="range" id="{name}" min="{low:g}" max="{high:g}" '
        f'step="{step:g}" value="{value:g}"><output for="{name}"></output></label>'
    )


def choice(name: str, label: str, options: Mapping[str, str]) -> str:
    """Return the HTML of a drop-down list with options value -> label."""
    inside = "".join(
        f'<option value="{escape(v)}">{escape(text)}</option>' for v, text in options.items()
    )
    return f'<label>{escape(label)} <select id="{name}">{inside}</select></label>'


def tick(name: str, label: str, on: bool = False) -> str:
    """Return the HTML of a checkbox."""
    return f'<label><input type="checkbox" id="{name}"{" checked" * on}> {escape(label)}</label>'


def button(name: str, label: str) -> str:
    """Return the HTML of a button."""
    return f'<button type="button" id="{name}">{escape(label)}</button>'


def _valid_or_none(value: float | None, log: bool) -> float | None:
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return value
