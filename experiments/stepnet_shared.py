"""What the StepNet experiments have in common: arms, scales, rules and pictures."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attractor.reproduce import Experiment, Results, Rule, Scale, all_of, best, gains, number
from attractor.reproduce.tasks.images import (
    CIFAR10,
    CIFAR100,
    CLASSIFY,
    DIGITS,
    GATES,
    M1,
    M2,
    SIX,
    SMOKE,
    table,
)
from attractor.residual.comparison import Comparison

__all__ = ["CIFAR10", "CIFAR100", "CLASSIFY", "DIGITS", "GATES", "SIX", "SMOKE"]

SEEDS = (0, 1, 2)
SHORT = "18 %, half of the depth"  # 30 of 164 epochs, ResNet83 for ResNet164
STEPS = {"one": "step 1", "gate": "step F"}
TABLE1 = {gate: {"gate": gate} for gate in GATES}
TABLE4: dict[str, dict[str, Any]] = {
    "none": {"gate": "none"},
    "F(x_t)": {"gate": "stepnet", "gate_options": {"inputs": "x"}},
    "F(x_t+1)": {"gate": "stepnet", "gate_options": {"inputs": "next"}},
    "F(x_t+1 - x_t)": {"gate": "stepnet", "gate_options": {"inputs": "difference"}},
    "F(x_t+1, x_t)": {"gate": "stepnet"},
    **{f"adaptor {a}": {"gate": "stepnet", "gate_options": {"adaptor": a}} for a in "abcd"},
}
RECIPE = (
    "ResNet83, 30 epochs with a cosine and five of warm-up, batches of 256, a rate of 0.2, Nesterov's "
    "momentum and a weight decay of 5e-4, in bfloat16 (the paper: ResNet164, 164 epochs with steps, "
    "128, 0.1, momentum and 1e-4, five seeds), one recipe for all arms, chosen for none of them; "
    "accuracy after the last epoch."
)
SMALL = "Here the digits that come with the library, depth 47, 10 epochs: a first look."


def smoke(*arms: str, **config: Any) -> Scale:
    """A tiny network for an epoch on 192 digits."""
    return Scale({**SMOKE, **config}, arms=arms or None, judged=False, time="2 s")


def digits(*arms: str, time: str, **config: Any) -> Scale:
    """Small networks on the digits: a first look, too small for a verdict."""
    return Scale(
        {**DIGITS, **config}, seeds=SEEDS, arms=arms or None, judged=False, time=time, note=SMALL
    )


def on_cifar100(experiment: Experiment) -> Experiment:
    """An experiment of CIFAR-10 with the networks of Table 1 on CIFAR-100."""
    return replace(
        experiment,
        name=f"{experiment.name}-cifar100",
        place=experiment.place.replace("CIFAR-10", "CIFAR-100"),
        scales={
            "smoke": experiment.scales["smoke"],
            "gpu": Scale(
                CIFAR100, seeds=SEEDS, training=SHORT, time="none beside Table 1's on CIFAR-100"
            ),
        },
        data=("cifar100",),
    )


def of_seed(results: Results, arm: str, metric: str) -> dict[int, float]:
    """A metric by seed."""
    known = lambda x: math.nan if x is None else float(x)
    return {seed: known(run["metrics"][metric]) for seed, run in results.runs[arm].items()}


EVERY = "Every gate makes the network better"
MOST = "StepNet makes it better than every other gate"


def gates(others: Sequence[str]) -> Rule:
    """Return the rule of Table 1: every gate gains over none, and StepNet most."""
    return all_of(
        gains([arm for arm in others if arm != "none"], over="none", claim=EVERY),
        best("stepnet", [arm for arm in others if arm != "none"], claim=MOST),
    )


def compared(results: Results) -> dict[str, Comparison]:
    """Rank correlations of TNS with accuracy, over the arms' means and over all trained models."""
    columns = {
        f"{step}{end}": f"tns_{step}{end}" for step in STEPS for end in ("", "_initial")
    }  # column of a Comparison -> metric
    means = [
        {"name": arm, "accuracy": results.mean(arm, "accuracy")}
        | {column: results.mean(arm, metric) for column, metric in columns.items()}
        for arm in results.arms
    ]
    models = [
        {"name": f"{arm}, {seed}", "accuracy": run["metrics"]["accuracy"]}
        | {column: run["metrics"][metric] for column, metric in columns.items()}
        for arm in results.arms
        for seed, run in results.runs[arm].items()
    ]
    whole = [row for row in models if None not in row.values()]  # of others training was lost
    return {"arms": Comparison.of(means), "models": Comparison.of(whole)}


# ---- pictures


def _plot() -> Any:
    from attractor.report import stiffness

    return stiffness


def gains_picture(numbers: Mapping[str, float], over: str = "none") -> Callable[[Results], Any]:
    """Gains over an arm: a dot a seed, a line at their mean, and the paper's as a hollow diamond."""

    def picture(results: Results) -> Any:
        draw = _plot()
        arms = [a for a in results.arms if a != over and results.paired(a, over)]
        figure, axis = draw.plt.subplots(figsize=(1.6 + 0.85 * len(arms), 3.6), layout="constrained")
        for i, arm in enumerate(arms):
            gaps = results.paired(arm, over)
            axis.plot([i] * len(gaps), gaps, "o", color=draw.STAGES[0], alpha=0.7, ms=6)
            mean = statistics.fmean(gaps)
            axis.plot([i - 0.25, i + 0.25], [mean, mean], color=draw.STAGES[0], lw=2)
            if arm in numbers and over in numbers:
                paper = numbers[arm] - numbers[over]
                axis.plot([i], [paper], "D", mfc="white", mec=draw.STAGES[1], ms=7)
        axis.axhline(0, color=draw.figures.INK, lw=0.8)
        axis.plot([], [], "o", color=draw.STAGES[0], label="ours, a seed each")
        axis.plot([], [], "D", mfc="white", mec=draw.STAGES[1], label="paper")
        draw.figures.frame(axis, "", "", f"gain over {over} (points of accuracy)")
        axis.set_xticks(range(len(arms)), arms, rotation=25, ha="right")
        axis.legend(frameon=False, fontsize=8)
        return figure

    return picture


def surfaces(results: Results) -> Any:
    """Stiff inputs over both thresholds: a row an arm; for each step before training and after."""
    draw = _plot()
    columns = [(step, end) for step in STEPS for end in ("_initial", "")]
    arms = results.arms
    figure = draw.plt.figure(figsize=(11, 1.75 * len(arms) + 0.6), layout="constrained")
    axes = figure.subplots(len(arms), len(columns), squeeze=False, sharex=True, sharey=True)
    image = None
    for row, arm in zip(axes, arms):
        for axis, (step, end) in zip(row, columns):
            extent = (0, float(M1[-1]), 0, float(M2[-1]))
            image = axis.imshow(
                table(results.curve(arm, f"surface_{step}{end}")).T, origin="lower", aspect="auto",
                cmap="Blues", extent=extent, interpolation="nearest", vmin=0, vmax=100,
            )  # fmt: skip
            when = "before" if end else "after"
            tns = number(results.mean(arm, f"tns_{step}{end}"))
            axis.set_title(f"{arm}, {STEPS[step]}, {when}: TNS {tns}", fontsize=8)
            axis.tick_params(labelsize=7)
        row[0].set_ylabel("m2", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("m1", fontsize=8)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    bar.set_label("stiff inputs (%), one seed; TNS: mean over seeds", fontsize=8)
    return figure


def nsi(results: Results) -> Any:
    """NSI block by block: a row an arm, a column a step; the dashed line is before training."""
    draw = _plot()
    figure = draw.plt.figure(figsize=(11, 2.5 * len(results.arms) + 0.4), layout="constrained")
    axes = figure.subplots(len(results.arms), 2, squeeze=False, sharey="col", sharex=True)
    for row, arm in zip(axes, results.arms):
        stage = results.curve(arm, "stage")
        for axis, (step, told) in zip(row, STEPS.items()):
            for s in sorted(set(stage)):
                own = [b for b, other in enumerate(stage) if other == s]
                take = lambda name, own=own: [results.curve(arm, name)[b] for b in own]  # noqa: B023
                blocks = [b + 1 for b in own]
                color = draw.STAGES[s % len(draw.STAGES)]
                band = take(f"nsi_{step}_low"), take(f"nsi_{step}_high")
                axis.fill_between(blocks, *band, color=color, alpha=0.18, lw=0)
                axis.plot(blocks, take(f"nsi_{step}"), "-o", color=color, ms=4, lw=1.2)
                axis.plot(blocks, take(f"nsi_{step}_initial"), "--", color=draw.BEFORE, lw=1.2)
            mark = results.mean(arm, f"oscillation_{step}")
            title = f"{arm}, {told}: oscillation {number(mark)}"
            last, left = arm == results.arms[-1], step == "one"
            draw.figures.frame(axis, title, "block" if last else "", "NSI" if left else "")
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
    return figure


def shares(results: Results) -> Any:
    """Stiff blocks over m2, a column an m1, a row a step; dashed: before training."""
    draw = _plot()
    figure = draw.plt.figure(figsize=(10, 5.2), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    for row, (step, told) in zip(axes, STEPS.items()):
        for axis, i in zip(row, (0, 1, 3)):
            for k, arm in enumerate(results.arms):
                for end, look in (("", "-"), ("_initial", "--")):
                    line = table(results.curve(arm, f"share_{step}{end}"))[i] / 10
                    color = draw.STAGES[k % len(draw.STAGES)]
                    axis.plot(M2, line, look, color=color, lw=1.3, label=None if end else arm)
            axis.axhline(10, color=draw.figures.INK, lw=0.8, ls=":")
            x = "m2" if step == "gate" else ""
            draw.figures.frame(axis, f"m1 = {float(M1[i]):g}, {told}", x, "")
        row[0].set_ylabel("stiff blocks (%)")
    axes[0, -1].legend(frameon=False, fontsize=8)
    return figure


def against_accuracy(results: Results) -> Any:
    """TNS against accuracy, a panel a step, hollow before training."""
    return compared(results)["arms"].plot()


def gate_correlations(results: Results) -> Any:
    """NSI (step F) and the gate's mean value: correlation over inputs in every block, and over the
    first stage's blocks for every input."""
    draw = _plot()
    figure = draw.plt.figure(figsize=(11, 2.5 * len(results.arms) + 0.3), layout="constrained")
    axes = figure.subplots(len(results.arms), 2, squeeze=False, sharex="col", width_ratios=(1.6, 1))
    for (left, right), arm in zip(axes, results.arms):
        found, stage = results.curve(arm, "correlation_gate"), results.curve(arm, "stage")
        known = [b for b, x in enumerate(found) if x is not None and not math.isnan(x)]
        colors = [draw.STAGES[stage[b] % len(draw.STAGES)] for b in known]
        left.bar([b + 1 for b in known], [found[b] for b in known], color=colors, width=0.75)
        left.set_ylim(-1.05, 1.05)
        left.axhline(0, color=draw.figures.INK, lw=0.8)
        counts = results.curve(arm, "paths_gate_count")
        edges = [-1 + 2 * (i + 0.5) / len(counts) for i in range(len(counts))]
        right.bar(edges, counts, width=1.8 / len(counts), color=draw.STAGES[0])
        right.axvline(0, color=draw.figures.INK, lw=0.8)
        last = arm == results.arms[-1]
        draw.figures.frame(left, f"{arm}, block by block", "block" if last else "", "correlation")
        x = "correlation" if last else ""
        draw.figures.frame(right, f"{arm}, input by input, first stage", x, "inputs (%)")
        for axis in (left, right):
            axis.set_axisbelow(True)
    return figure


def seeds_side_by_side(arm: str) -> Callable[[Results], Any]:
    """NSI of the first stage's blocks, a line a seed, dashed before training."""

    def picture(results: Results) -> Any:
        draw = _plot()
        figure = draw.plt.figure(figsize=(9.5, 3.4), layout="constrained")
        for axis, (step, told) in zip(figure.subplots(1, 2), STEPS.items()):
            for i, seed in enumerate(results.runs[arm]):
                stage = results.curve(arm, "stage", seed)
                count = sum(s == stage[0] for s in stage)
                blocks = range(2, count + 1)
                for end, look in (("", "-o"), ("_initial", "--")):
                    line = results.curve(arm, f"nsi_{step}{end}", seed)[1:count]
                    label = None if end else f"seed {seed}"
                    axis.plot(blocks, line, look, color=draw.STAGES[i], ms=4, lw=1.2, label=label)
            y = "NSI" if step == "one" else ""
            draw.figures.frame(axis, f"{arm}, first stage, {told}", "block", y)
            axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
        return figure

    return picture


def before_and_after(results: Results) -> Any:
    """TNS before training and after, a panel a step, a line a seed."""
    draw = _plot()
    figure = draw.plt.figure(figsize=(10.5, 3.9), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (step, told) in zip(axes, STEPS.items()):
        for i, arm in enumerate(results.arms):
            before, after = (of_seed(results, arm, f"tns_{step}{end}") for end in ("_initial", ""))
            color = draw.STAGES[i % len(draw.STAGES)]
            for seed, start in before.items():
                axis.plot([i - 0.2, i + 0.2], [start, after[seed]], "-", color=color, lw=1.2)
                axis.plot(i - 0.2, start, "o", mfc="white", mec=color, ms=6)
                axis.plot(i + 0.2, after[seed], "o", color=color, ms=6)
        axis.set_xticks(range(len(results.arms)), results.arms)
        draw.figures.frame(axis, told, "", "TNS" if step == "one" else "")
    axes[0].set_ylim(bottom=0)
    axes[1].plot([], [], "o", mfc="white", mec=draw.figures.INK, label="before training")
    axes[1].plot([], [], "o", color=draw.figures.INK, label="after")
    axes[1].legend(frameon=False, fontsize=8)
    return figure
