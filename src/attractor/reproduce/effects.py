"""Comparisons of a claim: measured effects with confidence intervals, and the paper's effects."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from attractor.reproduce.results import Results

SUPPORTED, CONTRADICTED, INCONCLUSIVE, NOT_RUN = (
    "supported",
    "contradicted",
    "inconclusive",
    "not run: no data",
)
DIRECTIONS = (SUPPORTED, CONTRADICTED, INCONCLUSIVE, NOT_RUN)
LEVEL = 0.95


@cache
def quantile(freedom: int, probability: float = 0.975) -> float:
    """Return the quantile of Student's t distribution, for a probability above one half.

    Args:
        freedom: Degrees of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2  # bounds of arctan(t / sqrt(freedom)), for bisection
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 2 * probability - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return the probability of |t| <= sqrt(freedom) tan(angle): Abramowitz and Stegun 26.7.3 and 4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if freedom % 2 else 1.0
    total = 0.0
    for k in range(freedom % 2 + 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total


def number(x: float) -> str:
    """Format a number with up to four significant digits."""
    if math.isnan(x):
        return "NaN"
    if 1e4 <= abs(x) < 1e6 or (x == round(x) and 1e4 <= abs(x) < 1e9):
        return f"{x:,.0f}"
    return f"{x:.3g}" if abs(x) < 1e-2 or abs(x) >= 1e4 else f"{x:.4g}"


def short(x: float) -> str:
    """Format a number with two or three significant digits."""
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    if 1e3 <= abs(x) < 1e6:
        return f"{x:,.0f}"
    return f"{x:.3g}" if abs(x) >= 10 else f"{x:.2g}"


@dataclass(frozen=True)
class Deviation:
    """The standard deviation of one run over seeds, estimated from other runs.

    Attributes:
        value: Standard deviation of one run, in the units of the effect.
        freedom: Degrees of freedom of the estimate; None if the value is exact.
    """

    value: float
    freedom: int | None = None


EXACT = Deviation(0.0)  # for results that do not depend on the seed


@dataclass(frozen=True)
class Effect:
    """One comparison of a claim.

    Attributes:
        label: Name of the comparison.
        samples: One number per seed, positive if it agrees with the paper.
        paper: The effect that the paper prints, positive; None if it prints none.
        unit: Unit of the samples.
        ratio: Whether the samples are natural logarithms of a ratio. The ratio is then displayed.
        deviation: Standard deviation of a sample, used if there is only one. If it is None, the interval
            of a single sample is infinite.
        limitation: Why the comparison can neither support nor contradict the claim; empty if it can.
        inclusive: Whether an effect of exactly 0 supports the claim, as equality satisfies a bound.
    """

    label: str
    samples: tuple[float, ...]
    paper: float | None = None
    unit: str = ""
    ratio: bool = False
    deviation: Deviation | None = None
    limitation: str = ""
    inclusive: bool = False

    @property
    def value(self) -> float:
        """The mean of the samples; NaN if there are none."""
        return statistics.fmean(self.samples) if self.samples else math.nan

    def interval(self, comparisons: int = 1) -> tuple[float, float]:
        """Return the 95 % confidence interval of the mean.

        Args:
            comparisons: Number of comparisons for which the interval is widened.
        """
        half = margin(self.samples, comparisons, self.deviation)
        return (-math.inf, math.inf) if math.isinf(half) else (self.value - half, self.value + half)

    def supports(self) -> bool:
        """Return whether the interval lies above 0."""
        low, _ = self.interval()
        return not self.limitation and (low > 0 or (self.inclusive and low == 0))

    def contradicts(self, comparisons: int = 1) -> bool:
        """Return whether the interval, widened for a number of comparisons, lies below 0."""
        return not self.limitation and self.interval(comparisons)[1] < 0

    @property
    def direction(self) -> str:
        """The direction of this comparison alone."""
        return SUPPORTED if self.supports() else CONTRADICTED if self.contradicts() else INCONCLUSIVE

    @property
    def share(self) -> tuple[float, float, float] | None:
        """The measured effect divided by the paper's, with its interval; None if the paper has none."""
        if not self.paper or math.isnan(self.value):
            return None
        low, high = self.interval()
        return self.value / self.paper, low / self.paper, high / self.paper

    @property
    def size(self) -> str:
        """The size as a word; empty if the paper has no number."""
        if self.share is None:
            return ""
        if self.limitation:
            return "not judged"
        _, low, high = self.share
        if high < 0:
            return "opposite"
        if high < 1:
            return "smaller"
        if low > 1:
            return "larger"
        return "as claimed" if low > 0 else "unclear"

    def format(self, x: float) -> str:
        """Format a value in the units of this effect; the logarithm of a ratio as the ratio."""
        if math.isnan(x):
            return "lost"
        if self.ratio:
            size = math.exp(min(x, 700.0)) if x > -700 else 0.0
            return "∞" if math.isinf(x) and x > 0 else short(size) if abs(x) > 0.2 else f"{size:.3f}"
        return short(x)

    def __str__(self) -> str:
        low, high = self.interval()
        unit = f" {self.unit}" if self.unit else ""
        prefix = "factor " if self.ratio else ""
        if math.isinf(low):
            return f"{prefix}{self.format(self.value)}{unit}, no interval"
        return f"{prefix}{self.format(self.value)}{unit} [{self.format(low)}, {self.format(high)}]"


def margin(samples: Sequence[float], comparisons: int = 1, deviation: Deviation | None = None) -> float:
    """Return half of the 95 % confidence interval of the mean.

    The margin is infinite if a sample is not finite, and for a single sample without `deviation`.

    Args:
        samples: One number per seed.
        comparisons: Number of comparisons for which the interval is widened (Bonferroni).
        deviation: Standard deviation of a single sample. It is ignored for several samples, from which
            the deviation is estimated.
    """
    if not samples or not all(map(math.isfinite, samples)):
        return math.inf
    probability = 1 - (1 - LEVEL) / 2 / comparisons
    if len(samples) > 1:
        standard_error = statistics.stdev(samples) / math.sqrt(len(samples))
        return quantile(len(samples) - 1, probability) * standard_error
    if deviation is None:
        return math.inf
    if deviation.freedom is None:
        return statistics.NormalDist().inv_cdf(probability) * deviation.value
    return quantile(deviation.freedom, probability) * deviation.value


def mean_effect(effects: Sequence[Effect]) -> Effect:
    """Return the mean of effects per seed, or one with the fewest seeds if the numbers of seeds differ.

    Left out are effects in other units than the first one's, effects without the paper's number if
    others have it, and effects with a limitation if others have none.
    """
    first = effects[0]
    alike = [e for e in effects if (e.unit, e.ratio) == (first.unit, first.ratio)]
    alike = [e for e in alike if not e.limitation] or alike
    paper_effects = [e for e in alike if e.paper is not None]
    subset = paper_effects or alike
    if len(subset) == 1:
        return subset[0]
    fewest = min(subset, key=lambda e: len(e.samples))
    if any(len(e.samples) != len(fewest.samples) for e in subset):
        return fewest
    samples = tuple(map(statistics.fmean, zip(*(e.samples for e in subset))))
    paper = (
        statistics.fmean(e.paper for e in paper_effects if e.paper is not None)
        if paper_effects
        else None
    )
    return replace(fewest, label=f"mean of {len(subset)} comparisons", samples=samples, paper=paper)


def values_of(
    results: Results, arm: str, metric: str | None = None, ratio: bool = False
) -> dict[int, float]:
    """Return a metric of an arm by seed; NaN for values that are not finite.

    Args:
        results: The runs.
        arm: Name of the arm.
        metric: Name of a metric; None for the experiment's.
        ratio: Whether to return natural logarithms.
    """
    name = metric or results.metric
    values = {seed: run["metrics"][name] for seed, run in sorted(results.runs.get(arm, {}).items())}
    numbers = {seed: math.nan if x is None else float(x) for seed, x in values.items()}
    return {s: (math.log(x) if x > 0 else math.nan) for s, x in numbers.items()} if ratio else numbers


def deviation_of(
    results: Results, arms: Sequence[str], metric: str | None, ratio: bool
) -> Deviation | None:
    """Return the deviation of a difference of two runs, pooled over the arms with several seeds.

    Return None if no arm has several seeds with finite values.
    """
    groups = [list(values_of(results, arm, metric, ratio).values()) for arm in arms]
    groups = [g for g in groups if len(g) > 1 and all(map(math.isfinite, g))]
    freedom = sum(len(g) - 1 for g in groups)
    if not freedom:
        return None
    squares = sum((len(g) - 1) * statistics.variance(g) for g in groups)
    return Deviation(math.sqrt(2 * squares / freedom), freedom)


def compare(
    results: Results,
    arm: str,
    over: str,
    better: str = "higher",
    *,
    metric: str | None = None,
    ratio: bool | None = None,
    paper: float | None = None,
    label: str = "",
    deviation: Deviation | None = None,
    limitation: str = "",
) -> Effect:
    """Return the effect of an arm over another, at the seeds that both have.

    Args:
        results: The runs.
        arm: The arm that is claimed to be better.
        over: The other arm.
        better: "higher" or "lower".
        metric: Name of a metric; None for the experiment's.
        ratio: Whether to compare logarithms; None for `Results.logarithmic` if the metric is the
            experiment's, else False.
        paper: The paper's effect; None for the difference of its numbers for the two arms, if the
            experiment has both.
        label: See `Effect`; empty for "`arm` over `over`".
        deviation: Standard deviation of a difference, used if there is only one seed; None for an
            estimate from the arms with several seeds.
        limitation: See `Effect`.
    """
    is_main_metric = metric in (None, results.metric)
    ratio = (results.logarithmic and is_main_metric) if ratio is None else ratio
    sign = 1 if better == "higher" else -1
    ours, theirs = (values_of(results, name, metric, ratio) for name in (arm, over))
    samples = tuple(sign * (ours[s] - theirs[s]) for s in sorted(ours.keys() & theirs.keys()))
    if paper is None and is_main_metric and arm in results.numbers and over in results.numbers:
        a, b = (math.log(results.numbers[x]) if ratio else results.numbers[x] for x in (arm, over))
        paper = sign * (a - b)
    if len(samples) == 1 and deviation is None:
        deviation = deviation_of(results, results.arms, metric, ratio)
    paper = paper if paper is not None and paper > 0 else None
    return Effect(label or f"{arm} over {over}", samples, paper, "", ratio, deviation, limitation)
