"""Judge a claim: the direction of the measurements, and their size relative to the claimed effect.

A claim consists of comparisons. Each comparison is an `Effect`: one number per seed, positive if it
agrees with the paper, and the number that the paper prints. Direction and size are separate questions.

Direction. One comparison is "supported" if the 95 % confidence interval of its mean lies above 0,
"contradicted" if it lies below 0, and else "inconclusive"; the rule is the same on both sides. A claim
is supported if all its comparisons are, each at 95 %. It is contradicted if one of them is, by an
interval widened for the number of comparisons (Bonferroni). So each of the two words is wrong with a
probability of at most 2.5 %. A claim without runs is "not run: no data".

Size. The share of the claimed effect that was measured, with its interval: "smaller" if the interval
lies below 1, "larger" if it lies above 1, "as claimed" if it contains 1 and not 0, "opposite" if it
lies below 0, "unclear" if it contains 0 and 1.

A rule is a function ``results -> Verdict``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from attractor.reproduce.effects import (
    CONTRADICTED,
    DIRECTIONS,
    EXACT,
    INCONCLUSIVE,
    NOT_RUN,
    SUPPORTED,
    Effect,
    compare,
    mean_effect,
    number,
    short,
    values_of,
)
from attractor.reproduce.results import Results


@dataclass(frozen=True)
class Verdict:
    """Direction and size of a claim, and the reasons.

    Attributes:
        direction: One of `DIRECTIONS`.
        why: The measurements in words.
        claim: The part of an experiment's claim that is judged; empty for the whole claim.
        effects: The comparisons.
        headline: The effect that represents the claim in tables; None for no effect.
        caveat: A limitation of the comparison, such as a flaw of the protocol.
        measurement: What was measured, in a few words, if the headline's number needs an explanation.
        parts: The verdicts of the parts, for a claim with several parts.
    """

    direction: str
    why: str
    claim: str = ""
    effects: tuple[Effect, ...] = ()
    headline: Effect | None = None
    caveat: str = ""
    measurement: str = ""
    parts: tuple["Verdict", ...] = ()

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction {self.direction!r} is not one of {', '.join(DIRECTIONS)}")

    @property
    def size(self) -> str:
        """The size as a word, with the share of the claimed effect; empty if the paper has no number."""
        if self.headline is None or self.headline.share is None:
            return ""
        value, low, high = (100 * x for x in self.headline.share)
        if math.isinf(low):
            return f"{self.headline.size}: {short(value)} %"
        return f"{self.headline.size}: {short(value)} % [{short(low)}, {short(high)}]"

    @property
    def claims(self) -> tuple["Verdict", ...]:
        """The parts, or the verdict itself if it has none."""
        return self.parts or (self,)

    def tally(self) -> str:
        """Return the number of comparisons with each direction, each judged alone."""
        words = [effect.direction for effect in self.effects]
        counts = {word: words.count(word) for word in DIRECTIONS if word in words}
        return ", ".join(f"{count} {word}" for word, count in counts.items())

    def __str__(self) -> str:
        size = f" (size {self.size})" if self.size else ""
        return f"{self.direction}{size}: {self.why}"


Rule = Callable[[Results], Verdict]


def decide(
    effects: Sequence[Effect],
    why: str = "",
    *,
    claim: str = "",
    headline: Effect | None = None,
    caveat: str = "",
    measurement: str = "",
    control: Sequence[Effect] = (),
    vacuous: str = "",
) -> Verdict:
    """Return the verdict on a claim that all effects are positive.

    Args:
        effects: The comparisons, at least one.
        why: The measurements in words; empty for a list of the effects.
        claim: See `Verdict`.
        headline: The effect that represents the claim; None for the mean over the effects.
        caveat: See `Verdict`.
        measurement: See `Verdict`.
        control: The same effects in a setting where the claim cannot be true, such as networks without
            training. If they support the claim as well, the check cannot fail, and the claim is
            inconclusive.
        vacuous: Why no outcome of the measurement could have contradicted the claim. A claim that would
            be supported is then inconclusive.

    Raises:
        ValueError: There are no effects.
    """
    effects = tuple(effects)
    if not effects:
        raise ValueError("effects is empty; a claim needs at least one effect")
    if all(effect.supports() for effect in effects):
        direction = SUPPORTED
    elif any(effect.contradicts(len(effects)) for effect in effects):
        direction = CONTRADICTED
    else:
        direction = INCONCLUSIVE
    if direction == SUPPORTED and control and all(effect.supports() for effect in control):
        vacuous = "the control supports the claim as well, so that this check cannot fail"
    if direction == SUPPORTED and vacuous:
        direction, caveat = INCONCLUSIVE, "; ".join(filter(None, [caveat, vacuous]))
    else:
        vacuous = ""
    limits = sorted({effect.limitation for effect in effects if effect.limitation})
    reasons = [why or "; ".join(f"{e.label}: {e}" for e in effects), *limits]
    text, headline_effect = "; ".join(filter(None, reasons)), headline or mean_effect(effects)
    return Verdict(direction, text, claim, effects, headline_effect, caveat, measurement)


def gains(
    arms: Sequence[str],
    over: str,
    better: str = "higher",
    metric: str | None = None,
    ratio: bool | None = None,
    claim: str = "",
) -> Rule:
    """Return the rule of a claim that each of `arms` is better than the arm `over`."""

    def judge(results: Results) -> Verdict:
        present = [arm for arm in arms if results.runs.get(arm)]
        effects = [compare(results, arm, over, better, metric=metric, ratio=ratio) for arm in present]
        counts = decide(effects).tally()
        each = ", ".join(f"{arm} {effect}" for arm, effect in zip(present, effects))
        return decide(effects, f"better than {over}: {each} ({counts})", claim=claim)

    return judge


def best(
    arm: str,
    among: Sequence[str] | None = None,
    better: str = "higher",
    metric: str | None = None,
    ratio: bool | None = None,
    claim: str = "",
) -> Rule:
    """Return the rule of a claim that an arm is better than each of the others.

    The comparison with the smallest lead relative to its margin represents the claim.

    Args:
        arm: The arm that is claimed to be best.
        among: The arms to compare with; None for all arms of the results.
        better: "higher" or "lower".
        metric: Name of a metric; None for the experiment's.
        ratio: See `compare`.
        claim: See `Verdict`.
    """

    def judge(results: Results) -> Verdict:
        others = [a for a in (among or results.arms) if a != arm and results.runs.get(a)]
        effects = [compare(results, arm, a, better, metric=metric, ratio=ratio) for a in others]
        least = min(effects, key=_lead)
        rivals = f"the least lead is that over {others[effects.index(least)]}: {least}"
        return decide(effects, f"{rivals} ({decide(effects).tally()})", claim=claim, headline=least)

    return judge


def below(arm: str, bound: float, metric: str | None = None, claim: str = "") -> Rule:
    """Return the rule of a claim that a metric is at most a fixed number."""

    def judge(results: Results) -> Verdict:
        values = values_of(results, arm, metric).values()
        deviation = EXACT if len(values) == 1 else None
        effect = Effect(arm, tuple(bound - x for x in values), deviation=deviation, inclusive=True)
        mean = results.mean(arm, metric)
        why = (
            f"{metric or results.metric} of {arm} is {number(mean)}, at most {number(bound)} is claimed"
        )
        return decide([effect], why, claim=claim)

    return judge


def within(
    expected: Mapping[str, float], factor: float, metric: str | None = None, claim: str = ""
) -> Rule:
    """Return the rule of a claim that every mean is within a factor of the paper's number."""

    def judge(results: Results) -> Verdict:
        effects = []
        for arm, paper in expected.items():
            values = values_of(results, arm, metric, ratio=True).values()
            samples = tuple(math.log(factor) - abs(x - math.log(paper)) for x in values)
            effects.append(Effect(arm, samples, deviation=EXACT if len(samples) == 1 else None))
        count = sum(effect.value > 0 for effect in effects)
        why = f"{count} of {len(effects)} means are within a factor of {number(factor)} of the paper's"
        return decide(effects, why, claim=claim)

    return judge


def all_of(*rules: Rule) -> Rule:
    """Return the rule of a claim with several parts.

    It is supported if all parts are, contradicted if a part is, and else inconclusive.
    """

    def judge(results: Results) -> Verdict:
        return combine([rule(results) for rule in rules])

    return judge


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a claim with several parts, from the verdicts on its parts."""
    parts = tuple(part for verdict in verdicts for part in verdict.claims)
    words = [part.direction for part in parts]
    direction = next((w for w in (CONTRADICTED, NOT_RUN, INCONCLUSIVE) if w in words), SUPPORTED)
    why = ". ".join(
        f"{part.claim.rstrip('.') or 'Part'}: {part.direction}"
        f"{f' (size {part.size})' * bool(part.size)}, {part.why}"
        for part in parts
    )
    effects = tuple(effect for part in parts for effect in part.effects)
    caveats = "; ".join(dict.fromkeys(part.caveat for part in parts if part.caveat))
    return Verdict(direction, why, "", effects, None, caveats, "", parts)


def _lead(effect: Effect) -> float:
    """Return an effect divided by its margin, the key that orders effects by their lead."""
    if math.isnan(effect.value):
        return -math.inf
    half = (effect.interval()[1] - effect.interval()[0]) / 2
    if half == 0 or math.isinf(half):
        return math.copysign(math.inf, effect.value) if half == 0 and effect.value else effect.value
    return effect.value / half
