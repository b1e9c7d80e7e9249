"""Pictures of solves. Matplotlib is imported here, so import this module only to draw."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INK, GRID = "#1b1f24", "#d8dde3"


def convergence(errors: Mapping[str, Sequence[tuple[float, float]]], title: str = "") -> Any:
    """Error against step size: a line a scheme.

    Args:
        errors: scheme -> (step, error) pairs; errors that are no longer numbers are left out.
    """
    figure, axis = plt.subplots(figsize=(4.4, 4.2))
    steps = sorted({dt for pairs in errors.values() for dt, _ in pairs})
    for i, (name, pairs) in enumerate(errors.items()):
        kept = [(dt, e) for dt, e in pairs if e is not None and math.isfinite(e) and e < 1e6]
        if kept:
            look = dict(color=plt.get_cmap("tab10")(i % 10), marker="os^vDPX<>*"[i % 10])
            axis.loglog(*zip(*kept), ms=5, lw=1.4, label=name, **look)
    _frame(axis, title, "step dt", "root mean square error")
    axis.set_xticks(steps, [f"{dt:g}" for dt in steps])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
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
