"""Whether a claim holds, and rules that say so.

A rule is a function ``results -> Verdict``. Means are over seeds; "by more than seeds differ" is by more
than `margin`, half of the difference's 95 % interval, which needs two seeds at least.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attractor.reproduce.results import Results

HOLDS, DIRECTION, FAILS, UNTESTED = (
    "holds",
    "holds in direction",
    "does not hold",
    "cannot be tested here",
)


@dataclass(frozen=True)
class Verdict:
    """One of the four words, and why."""

    word: str
    why: str

    def __post_init__(self) -> None:
        words = (HOLDS, DIRECTION, FAILS, UNTESTED)
        if self.word not in words:
            raise ValueError(f"{self.word!r} is not one of {', '.join(words)}")

    def __str__(self) -> str:
        return f"{self.word}: {self.why}"


Rule = Callable[[Results], Verdict]


def number(x: float) -> str:
    """As short as it can be read."""
    if math.isnan(x):
        return "NaN"
    if 1e4 <= abs(x) < 1e6 or (x == round(x) and 1e4 <= abs(x) < 1e9):
        return f"{x:,.0f}"
    return f"{x:.3g}" if abs(x) < 1e-2 or abs(x) >= 1e4 else f"{x:.4g}"


# Student's t, 97.5 %, of 1 to 10 degrees of freedom
QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def margin(differences: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean; infinite of one, or where one is not finite."""
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return math.inf
    quantile = QUANTILES[min(len(differences) - 1, len(QUANTILES)) - 1]
    return quantile * statistics.stdev(differences) / math.sqrt(len(differences))


def lead(
    results: Results, arm: str, other: str, sign: int = 1, metric: str | None = None
) -> tuple[float, float]:
    """How far an arm is ahead of another at the seeds of both, and the margin of that.

    Args:
        sign: -1: smaller is better.
    """
    gaps = [sign * x for x in results.paired(arm, other, metric)]
    return statistics.fmean(gaps), margin(gaps)


def best(
    arm: str, among: Sequence[str] | None = None, better: str = "higher", metric: str | None = None
) -> Rule:
    """Holds if it is better than all other arms by more than seeds differ, in direction if by less;
    untested if it is worse than the best of them by no more than that, or at one seed."""

    def judge(results: Results) -> Verdict:
        sign = 1 if better == "higher" else -1
        others = [a for a in (among or results.arms) if a != arm and results.runs.get(a)]
        mine = results.mean(arm, metric)
        first = max(others, key=lambda a: _worth(sign * results.mean(a, metric)))
        theirs = results.mean(first, metric)
        gap, doubt = lead(results, arm, first, sign, metric)
        against = f"{number(mine)} against {number(theirs)} ({first})"
        if gap > doubt:
            return Verdict(HOLDS, f"{arm} is best, {against}")
        if gap > 0:
            few = "by no more than seeds differ" if math.isfinite(doubt) else "at one seed"
            return Verdict(DIRECTION, f"{arm} is best, {few}, {against}")
        if gap > -doubt:
            return Verdict(UNTESTED, f"{arm} cannot be told from the best at so few seeds, {against}")
        return Verdict(FAILS, f"{arm} is not best, {against}")

    return judge


def gains(
    arms: Sequence[str],
    over: str,
    better: str = "higher",
    metric: str | None = None,
    clearly: bool = True,
) -> Rule:
    """Holds if every arm beats `over`, by more than seeds differ; in direction if the means do; untested
    if those that do not are behind by no more than that, or at one seed.

    Args:
        clearly: False: means are enough.
    """

    def judge(results: Results) -> Verdict:
        sign = 1 if better == "higher" else -1
        means, sure, behind = [], [], []
        for arm in arms:
            gap, doubt = lead(results, arm, over, sign, metric)
            means.append(gap > 0)
            sure.append(gap > doubt)
            behind.append(not gap > -doubt)
        told = f"{sum(means)} of {len(arms)} are {'above' if sign > 0 else 'below'} {over}"
        if all(sure) or (not clearly and all(means)):
            return Verdict(HOLDS, told)
        if all(means):
            return Verdict(DIRECTION, f"{told}, {sum(sure)} by more than seeds differ")
        if any(behind):
            return Verdict(FAILS, told)
        return Verdict(UNTESTED, f"{told}, the others not clearly at so few seeds")

    return judge


def below(arm: str, bound: float, metric: str | None = None) -> Rule:
    """Holds if the mean is at most a number that is known beforehand."""

    def judge(results: Results) -> Verdict:
        mean = results.mean(arm, metric)
        told = f"{metric or results.metric} of {arm} is {number(mean)}, {number(bound)} is allowed"
        return Verdict(HOLDS if mean <= bound else FAILS, told)

    return judge


def within(expected: dict[str, float], factor: float, metric: str | None = None) -> Rule:
    """Holds if every mean is within a factor of the paper's; in direction if their order is the same."""

    def judge(results: Results) -> Verdict:
        ours = {arm: results.mean(arm, metric) for arm in expected}
        off = [
            arm
            for arm, paper in expected.items()
            if not (ours[arm] > 0 and max(ours[arm] / paper, paper / ours[arm]) <= factor)
        ]
        if not off:
            return Verdict(HOLDS, f"all {len(ours)} within a factor of {number(factor)}")
        told = f"{len(ours) - len(off)} of {len(ours)} within a factor of {number(factor)}"
        if sorted(ours, key=ours.__getitem__) == sorted(expected, key=expected.__getitem__):
            return Verdict(DIRECTION, f"{told}; the order is the paper's")
        return Verdict(FAILS, f"{told}; the order is another")

    return judge


def all_of(*rules: Rule) -> Rule:
    """The worst of several verdicts, its reasons first, then those of the others with their words; one
    that fails outweighs one that is untested."""

    def judge(results: Results) -> Verdict:
        found = [rule(results) for rule in rules]
        order = [HOLDS, DIRECTION, UNTESTED, FAILS]
        words = sorted({v.word for v in found}, key=order.index, reverse=True)
        told = ["; ".join(v.why for v in found if v.word == word) for word in words]
        rest = [f"beside it, {word}: {why}" for word, why in zip(words[1:], told[1:])]
        return Verdict(words[0], "; ".join((told[0], *rest)))

    return judge


def _worth(x: float) -> float:
    return -math.inf if math.isnan(x) else x
