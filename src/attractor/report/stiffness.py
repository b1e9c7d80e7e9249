"""Pictures of stiffness profiles. This module imports Matplotlib.

>>> import torch
>>> import attractor as at
>>> from attractor.report import figures, stiffness
>>> images = torch.randn(8, 3, 32, 32)
>>> nets = {name: at.residual.resnet_cifar(20, gate=name) for name in ("none", "se")}
>>> profiles = {name: at.probe(net, [images]) for name, net in nets.items()}
>>> figures.write(stiffness.nsi(profiles), folder / "nsi.png")      # doctest: +SKIP
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import Tensor

from attractor.report import figures
from attractor.residual.comparison import Comparison
from attractor.residual.profile import STEPS, Step, StiffnessProfile

STAGES = ("#1f5a99", "#c0392b", "#2e8b57", "#8e5ea2", "#d08a1d", "#3a8f9e", "#7a6a55")
MARKERS = "os^Dv"  # the next one is used when all colours have been used
STEP_LABELS = {"one": "step 1", "gate": "step F"}
BEFORE = "#8a949e"  # the network before training
KINDS = ("nsi", "surface", "proportion", "gates", "all")
CELLS = 60  # cells of the grid of thresholds, per axis
Profiles = Mapping[str, StiffnessProfile]


def draw(profile: StiffnessProfile, kind: str = "all", path: Path | str | None = None) -> Any:
    """Draw one profile; see `StiffnessProfile.plot`."""
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}; it is one of {', '.join(KINDS)}")
    one, steps = {profile.model: profile}, (profile.step,)
    if kind == "all":
        figure = overview(profile)
    elif kind == "gates":
        figure = gates(profile)
    else:
        makers: dict[str, Any] = {"nsi": nsi, "surface": surfaces, "proportion": proportions}
        figure = makers[kind](one, steps)
    return _write(figure, path)


def nsi(profiles: Profiles, steps: Sequence[Step] = ("one",)) -> Any:
    """Draw NSI by block, one row per network and one column per step size (the paper's Fig. 3).

    Dots are means over the inputs, bands contain the middle 80 % of them. A hollow dot is the first
    block of a stage, which TNS omits. The dashed line is the network before training.
    """
    longest = max(len(p.names) for p in profiles.values())
    width = min(5.5 + 0.07 * longest, 11) * len(steps)
    figure = plt.figure(figsize=(width, 2.5 * len(profiles) + 0.6), layout="constrained")
    axes = figure.subplots(len(profiles), len(steps), squeeze=False, sharex=True, sharey="col")
    for row, (name, profile) in zip(axes, profiles.items()):
        for axis, step in zip(row, steps):
            _nsi(
                axis, profile.with_step(step), f"{name}, {STEP_LABELS[step]}" if len(steps) > 1 else name
            )
    for axis in axes[:-1].flat:
        axis.set_xlabel("")
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
    _stage_legend(axes[0, -1])
    return figure


def surfaces(profiles: Profiles, steps: Sequence[Step] = ("one",)) -> Any:
    """Draw the fraction of the inputs with a block above both thresholds (Fig. 2).

    Its integral is TNS. There is one row per network. The columns are the network after training and, if
    available, before training, for each step size. All have the same thresholds.
    """
    panels = [
        (row, f"{name}{', ' + step if len(steps) > 1 else ''}{', initial' * late}", p.with_step(step))
        for row, (name, profile) in enumerate(profiles.items())
        for step in steps
        for late, p in enumerate((profile, profile.initial))
        if p is not None
    ]
    columns = max(sum(r == row for r, _, _ in panels) for row in range(len(profiles)))
    limits = thresholds([p for _, _, p in panels])
    size = (3.3 * columns + 1, 2.9 * len(profiles) + 0.3)
    figure = plt.figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(profiles), columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat:
        axis.set_visible(False)
    image = None
    for row in range(len(profiles)):
        for axis, (_, title, profile) in zip(axes[row], [s for s in panels if s[0] == row]):
            axis.set_visible(True)
            image = _surface(axis, profile, limits, title)
            if axis is not axes[row, 0]:
                axis.set_ylabel("")
            if row < len(profiles) - 1:
                axis.set_xlabel("")
    _bar(figure, image, axes)
    return figure


def proportions(
    profiles: Profiles, steps: Sequence[Step] = ("one",), m1: Sequence[float] = (0.0, 0.25, 0.5)
) -> Any:
    """Draw the fraction of all blocks above both thresholds over m2 (Fig. 6).

    There is one column per m1 and one row per step size.
    """
    figure = plt.figure(figsize=(3.4 * len(m1) + 0.6, 2.7 * len(steps) + 0.5), layout="constrained")
    axes = figure.subplots(len(steps), len(m1), squeeze=False, sharex="row", sharey=True)
    for row, step in zip(axes, steps):
        profiles_of_step = {name: p.with_step(step) for name, p in profiles.items()}
        every = [q for p in profiles_of_step.values() for q in (p, p.initial) if q is not None]
        heights = torch.linspace(0, thresholds(every)[1], 200)
        for axis, first in zip(row, m1):
            for i, (name, profile) in enumerate(profiles_of_step.items()):
                for p, look in ((profile, "-"), (profile.initial, "--")):
                    if p is not None:
                        line = 100 * _grid(p.proportion, first, heights)
                        color = STAGES[i % len(STAGES)]
                        label = name if look == "-" else f"{name}, initial"
                        axis.plot(heights.numpy(), line, look, color=color, lw=1.5, label=label)
            title = f"m1 = {first:g}" + (f", {STEP_LABELS[step]}" if len(steps) > 1 else "")
            figures.frame(axis, figures.literal(title), "m2", "")
            axis.set_ylim(bottom=0)
        row[0].set_ylabel("stiff blocks (%)")
    axes[0, -1].legend(frameon=False, fontsize=8)
    return figure


def gates(profile: StiffnessProfile) -> Any:
    """Draw NSI against the mean gate value, and their correlation in all blocks (Fig. 9)."""
    correlation = profile.correlation()["pearson"]
    blocks = (~correlation.isnan()).nonzero()[:, 0].tolist()
    if not blocks:
        raise ValueError(f"{profile.model} has no gates with varying values; use another kind")
    strongest = sorted(sorted(blocks, key=lambda b: -abs(float(correlation[b])))[:3])
    figure = plt.figure(figsize=(10, 4.9), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.25, 1))  # type: ignore[misc]
    for axis, b in zip(above.subplots(1, len(strongest), squeeze=False)[0], strongest):
        color = _color(profile, b)
        pair = (profile.gates[:, b].numpy(), profile.nsi[:, b].numpy())
        axis.plot(*pair, "o", ms=3, alpha=0.5, color=color, mew=0)
        title = f"{profile.names[b]}: {correlation[b]:+.2f}"
        figures.frame(
            axis, figures.literal(title), "mean gate value", "NSI" if b == strongest[0] else ""
        )
    axis = below.subplots()
    colors = [_color(profile, b) for b in blocks]
    axis.bar([b + 1 for b in blocks], correlation[blocks].numpy(), color=colors, width=0.75)
    axis.axhline(0, color=figures.INK, lw=0.8)
    axis.set(ylim=(-1.05, 1.05), xlim=(0.4, len(profile.names) + 0.6), axisbelow=True)
    figures.frame(axis, "", "block", "correlation")
    axis.locator_params(axis="x", integer=True)
    return figure


def overview(profile: StiffnessProfile) -> Any:
    """Draw NSI by block for each step size, the surface of TNS, and the proportion of stiff blocks."""
    both = profile.gated and not bool(profile.gate.isnan().any())
    steps = STEPS if both else (profile.step,)
    figure = plt.figure(figsize=(11, 2.6 * len(steps) + 3.6), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(2.6 * len(steps), 3.3))
    for axis, step in zip(parts[0].subplots(len(steps), 1, squeeze=False)[:, 0], steps):
        _nsi(axis, profile.with_step(step), f"{profile.model}, {STEP_LABELS[step]}")
        axis.set_ylim(bottom=0)
        _stage_legend(axis)
    surface_part, proportion_part = parts[1].subfigures(1, 2, width_ratios=(1.5, 1))
    pair = [p for p in (profile, profile.initial) if p is not None]
    axes = surface_part.subplots(1, len(pair), squeeze=False, sharey=True)
    try:
        limits = thresholds(pair)
    except ValueError as error:  # one block per stage, so there are no thresholds
        surface_part.suptitle(str(error).partition(";")[0], fontsize=9, y=0.5)
        for axis in axes.flat:
            axis.set_visible(False)
        return figure
    for axis, p, title in zip(axes[0], pair, (STEP_LABELS[profile.step], "initial")):
        image = _surface(axis, p, limits, title)
    for axis in axes[0, 1:]:
        axis.set_ylabel("")
    _bar(surface_part, image, axes)
    axis = proportion_part.subplots()
    heights = torch.linspace(0, limits[1], 200)
    for i, first in enumerate((0.0, 0.25, 0.5)):
        for p, look in zip(pair, ("-", "--")):
            label = f"m1 = {first:g}" if look == "-" else None
            line = 100 * _grid(p.proportion, first, heights)
            axis.plot(heights.numpy(), line, look, color=STAGES[i], lw=1.4, label=label)
    note = ", dashed: initial" if len(pair) > 1 else ""
    figures.frame(axis, f"stiff blocks{note}", "m2", "%")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8)
    return figure


def draw_comparison(comparison: Comparison, path: Path | str | None = None) -> Any:
    """Draw TNS against accuracy, one panel per step size (the paper's Fig. 7).

    Hollow dots are the networks before training.
    """
    if not comparison.rows or comparison.rows[0]["accuracy"] is None:
        raise ValueError("the comparison has no accuracies; pass accuracy={name: value}")
    figure = plt.figure(figsize=(10, 4.2), layout="constrained")
    for axis, step in zip(figure.subplots(1, 2, sharey=True), STEPS):
        for i, row in enumerate(comparison.rows):
            color, mark = STAGES[i % len(STAGES)], MARKERS[i // len(STAGES) % len(MARKERS)]
            if row[step] is None:
                continue
            if row[f"{step}_initial"] is not None:
                pair = (row[f"{step}_initial"], row[step])
                axis.plot(pair, [row["accuracy"]] * 2, "-", color=color, lw=0.8, alpha=0.5)
                axis.plot(pair[0], row["accuracy"], mark, mfc="white", mec=color, ms=6)
            axis.plot(
                row[step], row["accuracy"], mark, color=color, ms=7, label=figures.literal(row["name"])
            )
        values = comparison.correlations.get(step)
        text = ""
        if values:
            text = f"\nKendall {values['kendall']:+.2f}, Spearman {values['spearman']:+.2f}"
        hollow = " (hollow: initial)" if comparison.rows[0][f"{step}_initial"] is not None else ""
        label = "accuracy" if step == "one" else ""
        figures.frame(axis, f"{STEP_LABELS[step]}{text}", f"TNS{hollow}", label)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _write(figure, path)


def thresholds(profiles: Sequence[StiffnessProfile]) -> tuple[float, float]:
    """Return the largest m1 and m2 that one in a hundred inputs exceeds, as limits of the axes."""
    tops = []
    for p in profiles:
        grid = torch.linspace(0, float(p.nsi.max()) * 1.01, 400, dtype=p.nsi.dtype)
        low = torch.zeros(1, dtype=p.nsi.dtype)
        counts = max(int((p.stage == s).sum()) for s in p.stage.unique())
        m1 = torch.linspace(0, max(counts, 1), 400, dtype=p.nsi.dtype)  # NSI <= blocks * mean
        reach = lambda line, values: float(values[(line >= 0.01).nonzero()[-1]]) if line.max() > 0 else 0
        tops.append((reach(p.surface(m1, low)[:, 0], m1), reach(p.surface(low, grid)[0], grid)))
    return tuple(max(max(side), 1e-6) for side in zip(*tops))


def _nsi(axis: Any, profile: StiffnessProfile, title: str) -> None:
    values = profile.nsi
    blocks = np.arange(1, len(profile.names) + 1)
    low, high = (torch.quantile(values, q, dim=0).numpy() for q in (0.1, 0.9))
    for stage in profile.stage.unique().tolist():
        members = (profile.stage == stage).numpy()
        color = STAGES[stage % len(STAGES)]
        axis.fill_between(blocks[members], low[members], high[members], color=color, alpha=0.18, lw=0)
        mean = values.mean(0).numpy()[members]
        axis.plot(blocks[members], mean, "-o", color=color, ms=4, lw=1.2, label=f"stage {stage + 1}")
        axis.plot(blocks[members][:1], mean[:1], "o", mfc="white", mec=color, ms=5, zorder=3)
        if profile.initial is not None:
            before = profile.initial.nsi.mean(0).numpy()[members]
            last = stage == int(profile.stage.max())
            look = dict(color=BEFORE, lw=1.3, zorder=1, marker="_", ms=5)
            axis.plot(blocks[members], before, "--", label="initial" if last else None, **look)
    figures.frame(axis, figures.literal(title), "block", "NSI")
    axis.locator_params(axis="x", integer=True)


def _stage_legend(axis: Any) -> None:
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def _surface(axis: Any, profile: StiffnessProfile, limits: tuple[float, float], title: str) -> Any:
    m1, m2 = (torch.linspace(0, top, CELLS, dtype=profile.nsi.dtype) for top in limits)
    image = axis.imshow(
        100 * profile.surface(m1, m2).T.numpy(), origin="lower", aspect="auto", cmap="Blues",
        extent=(0, limits[0], 0, limits[1]), interpolation="nearest", vmin=0, vmax=100,
    )  # fmt: skip
    hint = ", see .note" if profile.note else ""  # which names stages that TNS does not measure
    title = figures.literal(title)
    axis.set_title(f"{title}: TNS {profile.tns.item():.3g}{hint}", color=figures.INK, fontsize=10)
    axis.set_xlabel("m1")
    axis.set_ylabel("m2")
    axis.spines[:].set_color(figures.GRID)
    axis.tick_params(labelsize=8)
    return image


def _bar(figure: Any, image: Any, axes: Any) -> None:
    bar = figure.colorbar(
        image, ax=axes, fraction=0.08 / axes.shape[1], pad=0.02, shrink=0.9 / axes.shape[0] ** 0.5
    )
    bar.set_label("stiff inputs (%)", fontsize=9, color=figures.INK)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def _grid(measure: Any, m1: float, heights: Tensor) -> Any:
    return measure(torch.tensor([m1]), heights)[0].numpy()


def _color(profile: StiffnessProfile, block: int) -> str:
    return STAGES[int(profile.stage[block]) % len(STAGES)]


def _write(figure: Any, path: Path | str | None) -> Any:
    if path is not None:
        figures.write(figure, path)
    return figure
