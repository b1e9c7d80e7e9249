"""Pictures of solutions and errors. This module imports Matplotlib."""

import math
import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from attractor.storage.files import write_bytes

# If these modules are loaded, the caller has chosen a backend.
if not {"IPython", "matplotlib.pyplot"} & sys.modules.keys():
    matplotlib.use("Agg")
from matplotlib import pyplot as plt

LARGEST = 1e100  # Matplotlib cannot place much larger numbers on an axis
INK, GRID = "#1b1f24", "#d8dde3"


def convergence(errors: Mapping[str, Sequence[tuple[float, float]]], title: str = "") -> Any:
    """Draw error against step size, one line per scheme.

    Args:
        errors: scheme -> (step, error) pairs; errors that are not finite are left out.
        title: the title.
    """
    figure, axis = plt.subplots(figsize=(4.4, 4.2))
    steps = sorted({dt for pairs in errors.values() for dt, _ in pairs})
    for i, (name, pairs) in enumerate(errors.items()):
        finite = [(dt, e) for dt, e in pairs if e is not None and math.isfinite(e) and e < 1e6]
        if finite:
            style = dict(color=plt.get_cmap("tab10")(i % 10), marker="os^vDPX<>*"[i % 10])
            axis.loglog(*zip(*finite), ms=5, lw=1.4, label=literal(name), **style)
    frame(axis, title, "step dt", "root mean square error")
    axis.set_xticks(steps, [f"{dt:g}" for dt in steps])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def drift(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str = "") -> Any:
    """Draw energy error over time, one line per scheme, from (times, errors)."""
    figure, axis = plt.subplots(figsize=(8, 3.6))
    for i, (name, (times, errors)) in enumerate(lines.items()):
        axis.semilogy(times, errors, lw=1.1, label=literal(name), color=plt.get_cmap("tab10")(i))
    frame(axis, title, "time", "relative energy error")
    axis.legend(frameon=False)
    figure.tight_layout()
    return figure


def history(rows: Sequence[Mapping[str, Any]], plain: float | None, title: str = "") -> Any:
    """Draw the history of a fit: the held-out error of each candidate, or the loss of each epoch."""
    figure, axis = plt.subplots(figsize=(9, 3.4))
    if "loss" in rows[0]:
        axis.semilogy([r["epoch"] + 1 for r in rows], [r["loss"] for r in rows], color="C0", lw=1.3)
        frame(axis, title, "epoch", "training loss")
        figure.tight_layout()
        return figure
    kinds: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        name = r["correction"] + (", state too" if r.get("state") else "")
        if r["rollout"] is not None and math.isfinite(r["rollout"]):
            kinds.setdefault(name, []).append((r["scale"], r["rollout"]))
    for i, (name, pairs) in enumerate(kinds.items()):
        axis.loglog(*zip(*sorted(pairs)), "os^vDP"[i % 6], ms=7, ls="-", lw=0.8, label=literal(name))
    if plain is not None and math.isfinite(plain):
        axis.axhline(plain, color=INK, ls=":", lw=1.2, label="without a correction")
    frame(axis, title, "scale of the random weights", "held-out mean square error")
    scales = sorted({r["scale"] for r in rows})
    axis.set_xticks(scales, [f"{s:g}" for s in scales])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    return figure


def errors_over_time(
    times: Sequence[float], lines: Mapping[str, Sequence[float]], title: str = ""
) -> Any:
    """Draw root mean square error over time, one line per method; every second line is dashed."""
    figure, axis = plt.subplots(figsize=(9, 3.4))
    for i, (name, errors) in enumerate(lines.items()):
        style = dict(color=plt.get_cmap("tab10")(i), ls="--" if i % 2 else "-", lw=1.4)
        axis.semilogy(times[1:], errors[1:], label=literal(name), **style)
    frame(axis, title, "time", "root mean square error")
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


def trajectories(times: Sequence[float], states: Any, title: str = "", limit: int = 6) -> Any:
    """Draw states ``[times, n, d]`` over time, one panel per component, and the phase plane.

    At most `limit` components and trajectories are drawn. The phase plane shows the first two components
    if there are two or more. Numbers beyond `LARGEST` are left out.
    """
    states = np.where(np.abs(states) <= LARGEST, states, np.nan)
    count = min(states.shape[-1], limit)
    figure = plt.figure(figsize=(11, max(3.6, 1.25 * count)), layout="constrained")
    time_part, phase_part = figure, None
    if count > 1:
        time_part, phase_part = figure.subfigures(1, 2, width_ratios=(1.7, 1))  # type: ignore[misc]
    axes = time_part.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    for i, axis in enumerate(axes):
        for k in range(min(states.shape[1], limit)):
            axis.plot(times, states[:, k, i], lw=1.0, color=plt.get_cmap("tab10")(k))
        frame(axis, title if i == 0 else "", "time" if i == count - 1 else "", f"u{i}")
    if phase_part is not None:
        axis = phase_part.subplots()
        for k in range(min(states.shape[1], limit)):
            axis.plot(states[:, k, 0], states[:, k, 1], lw=0.9, color=plt.get_cmap("tab10")(k))
            axis.plot(*states[0, k, :2], "o", ms=4, color=plt.get_cmap("tab10")(k))
        frame(axis, "", "u0", "u1")
    return figure


def work_precision(comparison: Any, title: str = "") -> Any:
    """Draw a `Comparison`: error against wall time and rate calls, with a star for the hybrid."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    methods = list(dict.fromkeys(p.method for p in comparison.points))
    for axis, work in zip(axes, ("seconds", "rate_calls")):
        for i, method in enumerate(methods):
            points = [p for p in comparison.plain(method) if math.isfinite(p.error) and p.error]
            if points:
                line = [(getattr(p, work), p.error) for p in points]
                style = dict(ls="--" if points[0].adaptive else "-", marker="os^vDPX"[i % 7])
                axis.loglog(*zip(*line), ms=5, lw=1.2, label=literal(method), **style)
        star = dict(marker="*", ms=17, color="#c0392b", ls="", label="hybrid", zorder=5)
        axis.loglog([getattr(comparison.hybrid, work)], [comparison.hybrid.error], **star)
        axis.axhline(comparison.hybrid.error, color="#c0392b", lw=0.8, ls=":")
    frame(axes[0], title, "seconds (including the network)", "mean square error")
    title = f"m = {comparison.m:.3g}, m* = {comparison.m_star:.3g}"
    frame(axes[1], title, "rate calls (without the network)", "")
    axes[1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    return figure


def literal(text: str) -> str:
    """Escape text, such as the name of a file, so that Matplotlib reads no mathematics in it."""
    return text.replace("$", r"\$")


def write(figure: Any, path: Path | str) -> Path:
    """Write the picture as a PNG file, atomically."""
    buffer = BytesIO()
    figure.savefig(buffer, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return write_bytes(Path(path), buffer.getvalue())


def frame(axis: Any, title: str, x: str, y: str) -> None:
    """Set title, labels and grid of an axis in the style of the library."""
    axis.set_title(title, color=INK, fontsize=11)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(color=GRID, lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
