"""Pictures of attention maps that move. Matplotlib is imported here, so import this only to draw.

>>> import torch
>>> from attractor.attention import pdes
>>> from attractor.attention.diagnostics import trace
>>> from attractor.report import figures, maps
>>> query, key = torch.randn(2, 1, 4, 24, 32)
>>> seen = trace(query, key, is_causal=True, pde=pdes.Diffusion(alpha=0.2), steps=8)
>>> figure = maps.through_time({"diffusion": seen})
>>> figures.write(figure, folder / "map.png")      # doctest: +SKIP
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection
from matplotlib.colors import PowerNorm
from torch import Tensor

from attractor.attention.diagnostics import PDETrace
from attractor.report import figures

INSIDE, OUTSIDE, NEGATIVE = "Blues", "Reds", "Greens"
GAMMA = 0.5  # shades go with the square root of a weight, so that small ones are seen
LINES = ("#1f5a99", "#c0392b", "#2e8b57", "#8e5ea2", "#d08a1d")
MEASURES = {
    "spread": "spread (keys)",
    "entropy": "entropy (nats)",
    "smoothness": "|L A|²",
    "variance": "variance",
    "mass": "row mass",
    "leaked": "weight beyond the mask",
}


def through_time(
    traces: Mapping[str, PDETrace], *, text: int = 0, head: int = 0, panels: int = 5, title: str = ""
) -> Any:
    """Maps through pseudo-time, a row of panels a trace; where its mask ends, a line is drawn.

    Weights on keys that a query may attend to are blue, on others red: what is red has leaked through
    the mask's edge. Negative weights, which a wave has, are green.

    Args:
        traces: name -> trace.
        text, head: which of the batch; traces may have fewer dimensions.
        panels: at most so many times, spread evenly from the first to the last.
    """
    shown = {name: one_map(found, text, head) for name, found in traces.items()}
    columns = min(panels, min(len(maps) for maps, _ in shown.values()))
    strongest = max(np.quantile(maps, 0.995) for maps, _ in shown.values())
    figure = plt.figure(figsize=(2.3 * columns + 1.2, 2.1 * len(shown) + 0.8), layout="constrained")
    axes = figure.subplots(len(shown), columns, squeeze=False, sharex=True, sharey=True)
    same = len({tuple(found.times.tolist()) for found in traces.values()}) == 1
    for i, (name, (maps, allowed)) in enumerate(shown.items()):
        stops = [round(x) for x in np.linspace(0, len(maps) - 1, columns)]
        for axis, stop in zip(axes[i], stops):
            axis.imshow(_shades(maps[stop], allowed, strongest), interpolation="nearest")
            axis.add_collection(
                LineCollection(edge(allowed), colors=figures.INK, lw=1.1, capstyle="projecting")
            )
            if i == 0 or not same:
                time = float(traces[name].times[stop])
                axis.set_title(f"t = {time:g}", fontsize=10, color=figures.INK)
            axis.tick_params(labelsize=8, color=figures.GRID)
            axis.spines[:].set_color(figures.GRID)
        axes[i, 0].set_ylabel(f"{figures.literal(name)}\nquery", color=figures.INK)
    for axis in axes[-1]:
        axis.set_xlabel("key", fontsize=9)
    figure.suptitle(title, color=figures.INK, fontsize=12)
    _legend(figure, axes, shown, strongest)
    return figure


def measures(
    traces: Mapping[str, PDETrace], *, text: int = 0, head: int | None = None, title: str = ""
) -> Any:
    """Measures along pseudo-time, a panel each, a line a trace: of one head, or the mean of all."""
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 5.2), sharex=True, layout="constrained")
    for axis, (measure, label) in zip(axes.flat, MEASURES.items()):
        for color, (name, found) in zip(LINES, traces.items()):
            numbers = (
                getattr(found, measure).flatten(2) if found.maps.ndim > 4 else getattr(found, measure)
            )
            while numbers.ndim < 3:
                numbers = numbers.unsqueeze(1)
            numbers = numbers[:, min(text, numbers.shape[1] - 1)]
            line = numbers.mean(-1) if head is None else numbers[:, head]
            axis.plot(
                found.times.cpu(), line.double().cpu(), lw=1.6, color=color, label=figures.literal(name)
            )
        low, high = axis.get_ylim()
        if high - low < 1e-6 * max(abs(high), 1e-3):  # a constant: no magnified rounding
            axis.set_ylim(low - 0.1, high + 0.1)
        figures.frame(axis, "", "pseudo-time" if axis in axes[-1] else "", label)
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.suptitle(title, color=figures.INK, fontsize=12)
    return figure


def coefficients(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Learnt coefficients layer by layer, from `diagnostics.coefficients`: means and ranges of heads."""
    names = list(dict.fromkeys(row["coefficient"] for row in rows))
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.6 * len(names), 3.2), squeeze=False, layout="constrained"
    )
    for axis, name, color in zip(axes[0], names, LINES):
        own = [row for row in rows if row["coefficient"] == name]
        layers = range(1, len(own) + 1)
        axis.vlines(
            layers, [r["min"] for r in own], [r["max"] for r in own], color=color, lw=5, alpha=0.3
        )
        axis.plot(layers, [r["mean"] for r in own], "o-", ms=5, lw=1.2, color=color)
        axis.set_xticks(list(layers))
        figures.frame(axis, "", "layer", name)
    figure.suptitle(title, color=figures.INK, fontsize=12)
    return figure


def one_map(found: PDETrace, text: int, head: int) -> tuple[Tensor, Tensor]:
    """Maps ``[steps + 1, queries, keys]`` of one head, and what its rows may attend to."""
    maps = found.maps.double().cpu()
    allowed = torch.ones(1, 1, dtype=torch.bool) if found.allowed is None else found.allowed.cpu()
    allowed = allowed.expand(maps.shape[1:])
    if maps.ndim == 5:
        maps, allowed = maps[:, text], allowed[text]
    if maps.ndim == 4:
        maps, allowed = maps[:, head], allowed[head]
    if maps.ndim != 3:
        raise ValueError(f"a trace of maps {list(found.maps.shape)} has too many dimensions to draw")
    return maps, allowed


def edge(allowed: Tensor) -> list[list[tuple[float, float]]]:
    """Where a mask ``[queries, keys]`` ends: segments between an entry inside and one outside.

    Entry (i, j) is the square of side 1 around the point x = j, y = i.
    """
    sides = (allowed[:, 1:] != allowed[:, :-1]).nonzero().tolist()
    floors = (allowed[1:] != allowed[:-1]).nonzero().tolist()
    upright = [[(j + 0.5, i - 0.5), (j + 0.5, i + 0.5)] for i, j in sides]
    return upright + [[(j - 0.5, i + 0.5), (j + 0.5, i + 0.5)] for i, j in floors]


def _shades(A: Tensor, allowed: Tensor, strongest: float) -> Any:
    """A map as colours ``[queries, keys, 4]``."""
    depth = (A.abs() / strongest).clamp(max=1).pow(GAMMA).numpy()
    picture = plt.get_cmap(INSIDE)(depth)
    for name, where in ((NEGATIVE, A < 0), (OUTSIDE, ~allowed & (A != 0))):
        picture[where.numpy()] = plt.get_cmap(name)(depth)[where.numpy()]
    nothing = (~allowed & (A == 0)).numpy()
    picture[nothing] = (0.965, 0.97, 0.975, 1.0)
    return picture


def _legend(figure: Any, axes: Any, shown: Mapping[str, Any], strongest: float) -> None:
    """A bar of shades for each colour that occurs."""
    scale = PowerNorm(GAMMA, 0, strongest)
    kinds = {"weight": INSIDE}
    if any(bool((maps[:, ~allowed] != 0).any()) for maps, allowed in shown.values()):
        kinds["leaked"] = OUTSIDE
    if any(bool((maps[:, allowed] < 0).any()) for maps, allowed in shown.values()):
        kinds["negative"] = NEGATIVE
    for label, colors in reversed(kinds.items()):  # each new bar stands left of the others
        bar = figure.colorbar(
            plt.cm.ScalarMappable(scale, colors), ax=axes, fraction=0.02, pad=0.01, shrink=0.9
        )
        bar.set_label(label, fontsize=9, color=figures.INK)
        bar.ax.tick_params(labelsize=7)
        bar.outline.set_visible(False)
