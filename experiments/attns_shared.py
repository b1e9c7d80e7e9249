"""What the AttNS experiments have in common: scales, names of arms, rules for errors, pictures.

The paper prints no optimiser, learning rate, batch size or number of epochs. What is called its recipe
is Adam at 1e-3 with a cosine to 0, batches of 16,384 and 500 epochs, on pairs of states one step apart,
without any normalisation. A training by far shorter than that cannot tell which correction ends up
better: AttNS falls more slowly at first and is ahead at the end (attns-normalised, where both lengths
were run). So it is no ground for "does not hold".
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attractor.reproduce import DIRECTION, FAILS, HOLDS, UNTESTED, Results, Verdict
from attractor.reproduce.tasks.solvers import CEILING
from attractor.reproduce.verdict import margin, number

SOLVE = "attractor.reproduce.tasks.solvers:solve"
LABELS = {"attns": "AttNS", "neurvec": "NeurVec", "csm": "CSM", "fsnet": "FSNet", "attns_m": "AttNS-m"}
RECIPES = ("paper", "default")
SEEDS = (0, 1, 2)
LEVEL = 0.01  # powers of ten: errors that differ by less, 2 %, are level
FULL = 500  # epochs of the paper's recipe
UNPRINTED = (
    "The paper prints no optimiser, batch size or number of epochs; Adam at 1e-3 with a cosine, "
    "batches of 16,384 and 500 epochs are taken for its recipe. Nor does it say whether its error is "
    "that at T or up to T: here the mean over all states up to T, the first, which is exact, included."
)

SMOKE: dict[str, Any] = {
    "train": 20, "test": 10, "epochs": 2, "width": 16, "substeps": 4,
    "horizon": {"spring-mass": 4.0, "2-link": 2.0, "elastic": 2.0},
}  # fmt: skip
# 2,000 trajectories and 2 % of the epochs, but smaller batches: 970 updates on each system.
CPU: dict[str, Any] = {
    "train": 2000, "test": 500, "horizon": {"elastic": 10.0}, "epochs": 10, "batch": 2048,
    "compile": True,
}  # fmt: skip
GPU: dict[str, Any] = {"compile": True}  # the paper's sizes
# What an H200 trains in 10 s to a minute: 15,000, 61,000 and 61,000 updates.
LONG = {"spring-mass": 500, "2-link": 500, "elastic": 100}
LENGTHS = (
    "all 500 epochs on spring-mass (15,000 updates) and the 2-link pendulum (61,000), and 100 on the "
    "elastic one (61,000)"
)


def name(system: str, what: str, recipe: str) -> str:
    """Of an arm."""
    return f"{system}: {what}, {recipe}"


def arms(
    systems: Iterable[str],
    kinds: Mapping[str, Mapping[str, Any]],
    recipes: Sequence[str] = RECIPES,
    **common: Any,
) -> dict[str, dict[str, Any]]:
    """An arm for every system, kind and recipe; the default one has no epochs."""
    rest = {r: {"epochs": None} if r == "default" else {} for r in recipes}
    return {
        name(s, what, r): {"system": s, "recipe": r, **rest[r], **common, **kind}
        for r in recipes
        for s in systems
        for what, kind in kinds.items()
    }


def corrections(*which: str) -> dict[str, dict[str, Any]]:
    """Kinds of arms: corrections as they are."""
    return {LABELS[c]: {"correction": c} for c in which or LABELS}


def typical(results: Results, arm: str, metric: str = "mse") -> float:
    """The geometric mean over seeds; errors differ by factors. A training that diverged is lost."""
    found = logs(results, arm, metric)
    return 10 ** statistics.fmean(found.values()) if found else math.nan


def logs(results: Results, arm: str, metric: str = "mse") -> dict[int, float]:
    """Powers of ten, by seed."""
    runs = results.runs.get(arm, {})
    value = lambda run: CEILING if run["metrics"][metric] is None else run["metrics"][metric]
    return {s: math.log10(max(value(run), 1e-300)) for s, run in runs.items()}


def epochs(results: Results, arm: str) -> float:
    """How long its training was, in updates of an epoch of all data; as long as the paper's if it had
    none. Of a part of the data an epoch has fewer."""
    config = next(iter(results.runs[arm].values()))["config"]
    if config.get("recipe") not in ("paper", "normalised"):
        return FULL
    given = config.get("epochs", FULL)
    whole = given[config["system"]] if isinstance(given, dict) else given
    return whole * config.get("share", 1.0)


def cautious(results: Results, arms: Sequence[str], verdict: Verdict) -> Verdict:
    """What a verdict is worth if the training of some arm was shorter than the paper's."""
    least = min(epochs(results, arm) for arm in arms)
    if least >= FULL:
        return verdict
    word = UNTESTED if verdict.word == FAILS else DIRECTION if verdict.word == HOLDS else verdict.word
    return Verdict(word, f"{verdict.why}, after the updates of {least:g} of {FULL} epochs")


def smaller(
    arm: str, others: Sequence[str], what: str = "", metric: str = "mse"
) -> Callable[[Results], Verdict]:
    """Holds if the arm's error is below that of all others by more than seeds differ, compared as powers
    of ten; in direction if its mean is, or is level; untested if it is above by no more than seeds
    differ, or there is one. See also `cautious`."""

    def judge(results: Results) -> Verdict:
        rivals = [a for a in others if a != arm and results.runs.get(a)]
        first = min(rivals, key=lambda a: typical(results, a, metric))
        mine, theirs = logs(results, arm, metric), logs(results, first, metric)
        gaps = [theirs[s] - mine[s] for s in sorted(mine.keys() & theirs.keys())]
        gap, doubt = statistics.fmean(gaps), margin(gaps)
        short = first.split(": ")[-1]
        ours, best = (number(typical(results, a, metric)) for a in (arm, first))
        told = f"{what or arm}: {ours} against {best} ({short})"
        if typical(results, arm, metric) >= CEILING / 10:
            word, told = FAILS, f"{told}, lost"
        elif abs(gap) < LEVEL:
            word, told = DIRECTION, f"{told}, level"
        elif gap > 0:
            word = HOLDS if gap > doubt else DIRECTION
        else:
            word = UNTESTED if -gap < doubt else FAILS
            told = f"{told}, which so few seeds cannot tell apart" if -gap < doubt else told
        return cautious(results, [arm, first], Verdict(word, told))

    return judge


def also(judge: Callable[[Results], Verdict], *beside: Callable[[Results], Verdict]) -> Any:
    """The verdict of a judge, with what others say told behind it."""

    def both(results: Results) -> Verdict:
        found = judge(results)
        more = "; ".join(str(other(results)) for other in beside)
        return Verdict(found.word, f"{found.why}. Default recipe: {more}")

    return both


def frame(axis: Any, title: str, x: str, y: str) -> None:
    """Titles and grid as in the library's figures."""
    from attractor.report.figures import GRID, INK

    axis.set_title(title, color=INK, fontsize=11)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(color=GRID, lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def dots(
    results: Results,
    panels: Mapping[str, Mapping[str, Sequence[str]]],
    lines: Mapping[str, Mapping[str, float]] | None = None,
    metric: str = "mse",
    y: str = "mean square error of test trajectories",
    top: float = 1e12,
) -> Any:
    """Errors on a logarithmic scale: a panel each, in it groups of arms side by side, a dot a seed.

    Args:
        panels: title -> group -> arms. An arm is named in the legend by what stands between ": " and
            " at " or "," in it; arms of one name have one colour, and one place if groups are alike.
        lines: title -> name -> a level to draw.
        top: larger errors are drawn there, as open triangles.
    """
    from attractor.report.figures import plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.1 * len(panels), 3.9), squeeze=False)
    colors: dict[str, Any] = {}
    for axis, (title, groups) in zip(axes[0], panels.items()):
        for g, members in enumerate(groups.values()):
            for k, arm in enumerate(members):
                label = arm.split(": ")[-1].split(", ")[0].split(" at ")[0]
                at = g + 0.7 * ((k + 0.5) / len(members) - 0.5)
                values = results.values(arm, metric)
                if not values:
                    continue
                color = colors.setdefault(label, plt.get_cmap("tab10")(len(colors)))
                for v in values:
                    lost = v > top
                    look = {"color": color, "marker": "^" if lost else "o", "alpha": 0.8}
                    axis.semilogy([at], [min(v, top)], mfc="none" if lost else color, **look)
        for text, level in (lines or {}).get(title, {}).items():
            axis.axhline(level, color="#1b1f24", ls=":", lw=1.2, label=text)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.set_xlim(-0.5, len(groups) - 0.5)
        frame(axis, title, "", y if axis is axes[0][0] else "")
    for label, color in colors.items():
        axes[0][-1].plot([], [], "o", color=color, label=label)
    axes[0][-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure
