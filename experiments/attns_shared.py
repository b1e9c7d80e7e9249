"""What the AttNS experiments have in common: scales, names of arms, rules for errors, pictures.

The paper prints no optimiser, learning rate, batch size or number of epochs. What is called its recipe
is Adam at 1e-3 with a cosine to 0, batches of 16,384 and 500 epochs, on pairs of states one step apart,
without any normalisation. A training by far shorter than that cannot tell which correction ends up
better: AttNS falls more slowly at first and is ahead at the end (attns-normalised, where both lengths
were run). So a shorter training neither supports nor contradicts a claim.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attractor.reproduce import Effect, Results, Rule, Verdict, decide, mean_effect, number
from attractor.reproduce.tasks.solver_settings import CEILING

SOLVE = "attractor.reproduce.tasks.solvers:solve"
LABELS = {"attns": "AttNS", "neurvec": "NeurVec", "csm": "CSM", "fsnet": "FSNet", "attns_m": "AttNS-m"}
RECIPES = ("paper", "default")
SEEDS = (0, 1, 2)
LOST = 60.0  # logarithm of a factor between errors of which one is `CEILING`
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
LENGTH = "100 %; elastic 20 %"
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
    """Return the epochs of an arm's training, each over all of its data; `FULL` if it has none."""
    config = next(iter(results.runs[arm].values()))["config"]
    if config.get("recipe") not in ("paper", "normalised"):
        return FULL
    epochs = config.get("epochs", FULL)
    return epochs[config["system"]] if isinstance(epochs, dict) else epochs


def too_short(results: Results, arms: Sequence[str]) -> str:
    """Return why trainings of arms that end before `FULL` epochs decide nothing; empty if none does.

    Early in training AttNS is behind and at the end ahead, so a short training speaks for neither side.
    """
    least = min((epochs(results, arm) for arm in arms if results.runs.get(arm)), default=FULL)
    return f"a training of {least:g} of {FULL} epochs decides nothing either way" if least < FULL else ""


def against(
    results: Results,
    arm: str,
    other: str,
    label: str = "",
    metric: str = "mse",
    paper: float | None = None,
) -> Effect:
    """Return the logarithm of the factor by which an arm's error is smaller than another's.

    Args:
        paper: The factor in the paper; None for that of its numbers.
    """
    mine, theirs = logs(results, arm, metric), logs(results, other, metric)
    seeds = sorted(mine.keys() & theirs.keys())
    samples = tuple((theirs[s] - mine[s]) * math.log(10) for s in seeds)
    if paper is None and metric == results.metric and {arm, other} <= results.numbers.keys():
        paper = results.numbers[other] / results.numbers[arm]
    claimed = math.log(paper) if paper is not None and paper > 1 else None
    limit = too_short(results, [arm, other])
    return Effect(label or f"{arm} against {other}", samples, claimed, "", True, None, limit)


def smaller(
    arm: str, others: Sequence[str], what: str = "", metric: str = "mse", claim: str = ""
) -> Rule:
    """Return the rule of a claim that an arm's error is smaller than that of each of the others."""

    def judge(results: Results) -> Verdict:
        effects = effects_of(results, arm, others, metric)
        return decide(effects, in_words(results, arm, others, what, metric), claim=claim)

    return judge


def all_smaller(
    groups: Mapping[str, tuple[str, Sequence[str]]], claim: str, metric: str = "mse", caveat: str = ""
) -> Rule:
    """Return the rule of a claim that an arm of each group has a smaller error than the group's others.

    Args:
        groups: A word on the group -> the arm, and the others.
    """

    def judge(results: Results) -> Verdict:
        groups_run = {
            what: (arm, [a for a in others if results.runs.get(a)])
            for what, (arm, others) in groups.items()
            if results.runs.get(arm)
        }
        effects = [
            effect
            for arm, others in groups_run.values()
            for effect in effects_of(results, arm, others, metric)
        ]
        texts = [
            in_words(results, arm, others, what, metric) for what, (arm, others) in groups_run.items()
        ]
        why = f"{'; '.join(texts)} ({decide(effects).tally()})"
        return decide(effects, why, claim=claim, headline=mean_of_finite(effects), caveat=caveat)

    return judge


def mean_of_finite(effects: Sequence[Effect]) -> Effect:
    """Return the mean of the effects in which no solver lost a trajectory, which has no size."""
    return mean_effect([e for e in effects if max(map(abs, e.samples)) < LOST] or effects)


def effects_of(results: Results, arm: str, others: Sequence[str], metric: str) -> list[Effect]:
    """Return the comparisons of an arm with those of the others that were run."""
    return [against(results, arm, a, metric=metric) for a in others if a != arm and results.runs.get(a)]


def in_words(results: Results, arm: str, others: Sequence[str], what: str, metric: str = "mse") -> str:
    """Return an arm's error and those of the others, in words."""
    ours = number(typical(results, arm, metric))
    rest = [f"{number(typical(results, a, metric))} ({a.split(': ')[-1]})" for a in others if a != arm]
    return f"{what or arm}: {ours} against {', '.join(rest)}"


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
