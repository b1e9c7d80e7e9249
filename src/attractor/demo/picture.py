"""One picture of the demo, with one panel per part. This module imports Matplotlib."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection

from attractor.demo import attention, networks
from attractor.report import figures, maps

RED, BLUE = "#e0533d", "#3d85c6"


def write(parts: dict[str, Any], path: Path | str) -> Path:
    """Draw the parts that did not fail, and write a PNG file."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.6), layout="constrained")
    panels = (("solvers", _solvers), ("networks", _networks), ("attention", _attention))
    for axis, (name, draw) in zip(axes, panels):
        if "failed" in parts[name]:
            axis.text(0.5, 0.5, f"{name} failed", ha="center", transform=axis.transAxes)
        else:
            draw(axis, parts[name])
    return figures.write(figure, path)


def _solvers(axis: Any, results: dict[str, Any]) -> None:
    """Draw the distance of the pendulum's solutions from the exact one."""
    one = results["pendulum"]
    for name, color in (("RK4", RED), ("AttNS", BLUE)):
        distance = np.array(one["drawn"]["median_off"][name])[1:]
        label = f"{name}, same step" if name == "AttNS" else f"plain RK4, dt = {one['dt']:g}"
        axis.semilogy(
            one["dt"] * np.arange(1, len(distance) + 1), distance, color=color, lw=1.8, label=label
        )
    figures.frame(
        axis, "In a solver, attention corrects a step", "time", "distance from the exact motion"
    )
    axis.set_ylim(top=axis.get_ylim()[1] * 20)
    axis.legend(frameon=False, fontsize=9, loc="upper left", title="elastic pendulum", title_fontsize=9)


def _networks(axis: Any, results: dict[str, Any]) -> None:
    """Draw stiffness block by block."""
    for gate, arm in results["gates"].items():
        stage, blocks = np.array(arm["stage"]), np.arange(1, len(arm["nsi"]) + 1)
        label = f"{networks.NAMES[gate]}, accuracy {100 * arm['accuracy']:.1f} %"
        for s in np.unique(stage):
            own = stage == s
            look = dict(
                color=networks.COLORS[gate], lw=1.6, ms=5, label=label if s == stage[0] else None
            )
            axis.plot(blocks[own], np.array(arm["nsi"])[own], "o-", **look)
    figures.frame(
        axis, "In a network, it is the step size", "block of a ResNet on digits", "stiffness (NSI)"
    )
    axis.set_ylim(0, axis.get_ylim()[1] * 1.25)
    axis.set_xticks(range(1, len(stage) + 1))
    axis.legend(frameon=False, fontsize=9, loc="upper left")


def _attention(axis: Any, results: dict[str, Any]) -> None:
    """Draw the map that leaks."""
    n = results["tokens"]
    last = torch.tensor(results["drawn"]["diffusion"]["no walls"][-1]).view(n, n) / attention.SCALE
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    axis.imshow(maps._shades(last, mask, 0.4), interpolation="nearest", aspect="auto")
    axis.add_collection(LineCollection(maps.edge(mask), colors=figures.INK, lw=1.2))
    leak = results["pdes"]["diffusion"]["no walls"]["future"][-1]
    figures.frame(axis, "In a transformer, the map takes steps", "key", "query")
    axis.grid(visible=False)
    text = (
        f"without walls {100 * leak:.0f} % of\nthe weight leaks into\nthe future (red);\nwith walls none"
    )
    axis.text(0.97, 0.96, text, transform=axis.transAxes, ha="right", va="top", fontsize=9.5)
