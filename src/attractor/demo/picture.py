"""The demo in one wide picture, a panel a wing. Matplotlib is imported here: import it only to draw."""

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
    """Draw what there is of the parts, and write it as a PNG file."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.6), layout="constrained")
    panels = (("solvers", _solvers), ("networks", _networks), ("attention", _attention))
    for axis, (name, draw) in zip(axes, panels):
        if "failed" in parts[name]:
            axis.text(0.5, 0.5, f"{name} failed", ha="center", transform=axis.transAxes)
        else:
            draw(axis, parts[name])
    return figures.write(figure, path)


def _solvers(axis: Any, found: dict[str, Any]) -> None:
    """How far the pendulum's solutions are from the exact one."""
    one = found["pendulum"]
    for name, color in (("RK4", RED), ("AttNS", BLUE)):
        off = np.array(one["drawn"]["median_off"][name])[1:]
        label = f"{name}, same step" if name == "AttNS" else f"plain RK4, dt = {one['dt']:g}"
        axis.semilogy(one["dt"] * np.arange(1, len(off) + 1), off, color=color, lw=1.8, label=label)
    figures.frame(
        axis, "In a solver, attention corrects a step", "time", "distance from the exact motion"
    )
    axis.set_ylim(top=axis.get_ylim()[1] * 20)
    axis.legend(frameon=False, fontsize=9, loc="upper left", title="elastic pendulum", title_fontsize=9)


def _networks(axis: Any, found: dict[str, Any]) -> None:
    """Stiffness block by block."""
    for gate, arm in found["gates"].items():
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


def _attention(axis: Any, found: dict[str, Any]) -> None:
    """The map that leaks."""
    n = found["tokens"]
    last = torch.tensor(found["drawn"]["diffusion"]["no walls"][-1]).view(n, n) / attention.SCALE
    allowed = torch.ones(n, n, dtype=torch.bool).tril()
    axis.imshow(maps._shades(last, allowed, 0.4), interpolation="nearest", aspect="auto")
    axis.add_collection(LineCollection(maps.edge(allowed), colors=figures.INK, lw=1.2))
    leak = found["pdes"]["diffusion"]["no walls"]["future"][-1]
    figures.frame(axis, "In a transformer, the map takes steps", "key", "query")
    axis.grid(visible=False)
    told = (
        f"without walls {100 * leak:.0f} % of\nthe weight leaks into\nthe future (red);\nwith walls none"
    )
    axis.text(0.97, 0.96, told, transform=axis.transAxes, ha="right", va="top", fontsize=9.5)
