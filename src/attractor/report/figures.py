"""Pictures of solves. Matplotlib is imported here, so import this module only to draw."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INK, GRID = "#1b1f24", "#d8dde3"


def convergence(
    errors: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], title: str = ""
) -> Any:
    """Error against step size: a panel a system, a line a scheme.

    Args:
        errors: system -> scheme -> (step, error) pairs; non-finite errors are left out.
    """
    names = sorted({scheme for panel in errors.values() for scheme in panel})
    colour = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    markers = {name: "os^vDPX<>*hdp8"[i % 14] for i, name in enumerate(names)}
    figure, axes = plt.subplots(1, len(errors), figsize=(4.2 * len(errors), 4.4), squeeze=False)
    for axis, (system, panel) in zip(axes[0], errors.items()):
        for name, pairs in panel.items():
            kept = [(dt, e) for dt, e in pairs if e is not None and math.isfinite(e) and e < 1e6]
            if kept:
                axis.loglog(
                    *zip(*kept), color=colour[name], marker=markers[name], ms=5, lw=1.3, label=name
                )
        _frame(axis, system, "step dt", "root mean square error")
    handles = {h.get_label(): h for axis in axes[0] for h in axis.get_lines()}
    figure.legend(
        [handles[n] for n in names if n in handles],
        [n for n in names if n in handles],
        loc="lower center",
        ncols=7,
        frameon=False,
        bbox_to_anchor=(0.5, -0.14),
    )
    figure.suptitle(title)
    figure.tight_layout()
    return figure


def drift(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str = "") -> Any:
    """Energy error over time: a line a scheme, from (times, errors)."""
    figure, axis = plt.subplots(figsize=(8, 3.6))
    for i, (name, (times, errors)) in enumerate(lines.items()):
        axis.semilogy(times, errors, lw=1.1, label=name, color=plt.get_cmap("tab10")(i))
    _frame(axis, title, "time", "relative energy error")
    axis.legend(frameon=False)
    figure.tight_layout()
    return figure


def _frame(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, color=INK, fontsize=11)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(color=GRID, lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
