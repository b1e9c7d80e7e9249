"""Pictures of attention maps through pseudo-time. This module imports Matplotlib.

>>> import torch
>>> from attractor.attention import pdes
>>> from attractor.attention.diagnostics import trace
>>> from attractor.report import figures, maps
>>> query, key = torch.randn(2, 1, 4, 24, 32)
>>> history = trace(query, key, is_causal=True, pde=pdes.Diffusion(alpha=0.2), steps=8)
>>> figure = maps.through_time({"diffusion": history})
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
GAMMA = 0.5  # shades grow with the square root of a weight, so that small weights are visible
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
    """Draw maps through pseudo-time, one row of panels per trace, with a line at the edge of the mask.

    Weights on allowed keys are blue. Red weights have leaked through the edge of the mask. Negative
    weights, which occur with a wave, are green.

    Args:
        traces: name -> trace.
        text, head: indices in the batch; traces may have fewer dimensions.
        panels: largest number of times, spread evenly from the first to the last.
        title: the title.
    """
    selection = {name: one_map(record, text, head) for name, record in traces.items()}
    columns = min(panels, min(len(maps) for maps, _ in selection.values()))
    strongest = max(np.quantile(maps, 0.995) for maps, _ in selection.values())
    figure = plt.figure(figsize=(2.3 * columns + 1.2, 2.1 * len(selection) + 0.8), layout="constrained")
    axes = figure.subplots(len(selection), columns, squeeze=False, sharex=True, sharey=True)
    same = len({tuple(record.times.tolist()) for record in traces.values()}) == 1
    for i, (name, (maps, mask)) in enumerate(selection.items()):
        stops = [round(x) for x in np.linspace(0, len(maps) - 1, columns)]
        for axis, stop in zip(axes[i], stops):
            axis.imshow(_shades(maps[stop], mask, strongest), interpolation="nearest")
            axis.add_collection(
                LineCollection(edge(mask), colors=figures.INK, lw=1.1, capstyle="projecting")
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
    _legend(figure, axes, selection, strongest)
    return figure


def measures(
    traces: Mapping[str, PDETrace], *, text: int = 0, head: int | None = None, title: str = ""
) -> Any:
    """Draw measures along pseudo-time, one panel per measure and one line per trace.

    The lines are those of one head, or means over all heads if `head` is None.
    """
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 5.2), sharex=True, layout="constrained")
    for axis, (measure, label) in zip(axes.flat, MEASURES.items()):
        for color, (name, record) in zip(LINES, traces.items()):
            numbers = getattr(record, measure)
            numbers = numbers.flatten(2) if record.maps.ndim > 4 else numbers
            while numbers.ndim < 3:
                numbers = numbers.unsqueeze(1)
            numbers = numbers[:, min(text, numbers.shape[1] - 1)]
            line = numbers.mean(-1) if head is None else numbers[:, head]
            style = dict(lw=1.6, color=color, label=figures.literal(name))
            axis.plot(record.times.cpu(), line.double().cpu(), **style)
        low, high = axis.get_ylim()
        if high - low < 1e-6 * max(abs(high), 1e-3):  # a constant: do not magnify rounding
            axis.set_ylim(low - 0.1, high + 0.1)

        figures.frame(axis, "", "pseudo-time" if axis in axes[-1] else "", label)
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.suptitle(title, color=figures.INK, fontsize=12)
    return figure


def coefficients(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Draw means and ranges over heads of learnt coefficients, from `diagnostics.coefficients`."""
    names = list(dict.fromkeys(row["coefficient"] for row in rows))
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.6 * len(names), 3.2), squeeze=False, layout="constrained"
    )
    for axis, name, color in zip(axes[0], names, LINES):
        of_name = [row for row in rows if row["coefficient"] == name]
        layers = range(1, len(of_name) + 1)
        low, mean, high = ([row[key] for row in of_name] for key in ("min", "mean", "max"))
        axis.vlines(layers, low, high, color=color, lw=5, alpha=0.3)
        axis.plot(layers, mean, "o-", ms=5, lw=1.2, color=color)
        axis.set_xticks(list(layers))
        figures.frame(axis, "", "layer", name)
    figure.suptitle(title, color=figures.INK, fontsize=12)
    return figure


def one_map(record: PDETrace, text: int, head: int) -> tuple[Tensor, Tensor]:
    """Return maps ``[steps + 1, queries, keys]`` of one head, and its mask ``[queries, keys]``."""
    maps = record.maps.double().cpu()
    mask = torch.ones(1, 1, dtype=torch.bool) if record.allowed is None else record.allowed.cpu()
    mask = mask.expand(maps.shape[1:])
    if maps.ndim == 5:
        maps, mask = maps[:, text], mask[text]
    if maps.ndim == 4:
        maps, mask = maps[:, head], mask[head]
    if maps.ndim != 3:
        raise ValueError(f"a trace of maps {list(record.maps.shape)} has too many dimensions to draw")
    return maps, mask


def edge(mask: Tensor) -> list[list[tuple[float, float]]]:
    """Return the edge of a mask ``[queries, keys]``: segments between allowed and other entries.

    Entry (i, j) is the square of side 1 around the point x = j, y = i.
    """
    sides = (mask[:, 1:] != mask[:, :-1]).nonzero().tolist()
    floors = (mask[1:] != mask[:-1]).nonzero().tolist()
    upright = [[(j + 0.5, i - 0.5), (j + 0.5, i + 0.5)] for i, j in sides]
    return upright + [[(j - 0.5, i + 0.5), (j + 0.5, i + 0.5)] for i, j in floors]


def _shades(A: Tensor, mask: Tensor, strongest: float) -> Any:
    """Return a map as colours ``[queries, keys, 4]``."""
    shade = (A.abs() / strongest).clamp(max=1).pow(GAMMA).numpy()
    picture = plt.get_cmap(INSIDE)(shade)
    for name, where in ((NEGATIVE, A < 0), (OUTSIDE, ~mask & (A != 0))):
        picture[where.numpy()] = plt.get_cmap(name)(shade)[where.numpy()]
    nothing = (~mask & (A == 0)).numpy()
    picture[nothing] = (0.965, 0.97, 0.975, 1.0)
    return picture


def _legend(figure: Any, axes: Any, selection: Mapping[str, Any], strongest: float) -> None:
    """Draw a colour bar for each colour in the picture."""
    scale = PowerNorm(GAMMA, 0, strongest)
    kinds = {"weight": INSIDE}
    if any(bool((maps[:, ~mask] != 0).any()) for maps, mask in selection.values()):
        kinds["leaked"] = OUTSIDE
    if any(bool((maps[:, mask] < 0).any()) for maps, mask in selection.values()):
        kinds["negative"] = NEGATIVE
    for label, colors in reversed(kinds.items()):  # each new bar is drawn to the left of the others
        bar = figure.colorbar(
            plt.cm.ScalarMappable(scale, colors), ax=axes, fraction=0.02, pad=0.01, shrink=0.9
        )
        bar.set_label(label, fontsize=9, color=figures.INK)
        bar.ax.tick_params(labelsize=7)
        bar.outline.set_visible(False)
