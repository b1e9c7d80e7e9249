"""Direction and size are judged separately, and alike on both sides."""

import math
from dataclasses import replace

import pytest

from attractor.reproduce import (
    CONTRADICTED,
    EXACT,
    INCONCLUSIVE,
    NOT_RUN,
    SUPPORTED,
    Deviation,
    Effect,
    Results,
    Verdict,
    all_of,
    below,
    best,
    compare,
    decide,
    gains,
    margin,
    quantile,
    within,
)
from attractor.reproduce.effects import mean_effect
from attractor.reproduce.verdict import combine


def results(numbers=None, logarithmic=False, **values):
    runs = {
        arm: {s: {"metrics": {"x": v}} for s, v in enumerate(given)} for arm, given in values.items()
    }
    return Results("e", "cpu", "x", list(values), [0, 1, 2], runs, (), numbers or {}, logarithmic)


def test_quantiles_and_margins_are_those_of_student():
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 4, 5, 8, 30):
        for probability in (0.6, 0.975, 0.9995):
            assert quantile(freedom, probability) == pytest.approx(stats.t.ppf(probability, freedom))
    for n in (2, 3, 5, 11):
        values = [math.sin(i) for i in range(n)]
        for count in (1, 5):
            wide = stats.t.ppf(1 - 0.025 / count, n - 1) * stats.sem(values)
            assert margin(values, count) == pytest.approx(wide)
    assert margin([1.0]) == margin([1.0, math.nan]) == margin([]) == math.inf
    assert margin([1.0], 1, Deviation(0.5, 8)) == pytest.approx(0.5 * stats.t.ppf(0.975, 8))
    assert margin([1.0], 1, EXACT) == 0


MIRRORED = {SUPPORTED: CONTRADICTED, CONTRADICTED: SUPPORTED, INCONCLUSIVE: INCONCLUSIVE}


@pytest.mark.parametrize(
    ("rule", "values", "word"),
    [
        (best("b"), {"a": [1, 2, 3], "b": [2, 3, 4]}, SUPPORTED),
        (best("b"), {"a": [1, 2, 3], "b": [1.1, 2.1, 2.9]}, INCONCLUSIVE),
        (best("b"), {"a": [1, 2, 3], "b": [0.9, 1.9, 3.1]}, INCONCLUSIVE),
        (best("b"), {"a": [1, 2, 3], "b": [0, 1, 2]}, CONTRADICTED),
        (best("b"), {"a": [1], "b": [2]}, INCONCLUSIVE),  # one seed shows no spread
        (best("b"), {"a": [1], "b": [0.99]}, INCONCLUSIVE),
        (best("b"), {"a": [1, 2], "b": [math.nan, 3]}, INCONCLUSIVE),
        (best("b", better="lower"), {"a": [1, 2], "b": [0, 1]}, SUPPORTED),
        (gains(["b"], "a"), {"a": [1, 2, 3], "b": [2, 3.1, 4]}, SUPPORTED),
        (gains(["b"], "a"), {"a": [1, 2, 3], "b": [5, 0, 3]}, INCONCLUSIVE),
        (gains(["b"], "a"), {"a": [1, 2, 9], "b": [2.1, 3.1]}, SUPPORTED),  # at the seeds of both
        (gains(["b"], "a"), {"a": [1, 2], "b": [2, 3.1]}, SUPPORTED),
        (gains(["b"], "a", better="lower"), {"a": [2, 3], "b": [1, 2]}, SUPPORTED),
    ],
)
def test_a_comparison_of_two_is_judged_alike_on_both_sides(rule, values, word):
    verdict = rule(results(**values))
    assert verdict.direction == word
    assert verdict.why
    mirrored = {arm: [-x for x in numbers] for arm, numbers in values.items()}
    assert rule(results(**mirrored)).direction == MIRRORED[word]


def test_best_is_tested_against_every_other_arm():
    """The rival with the best mean may be one that cannot be told apart, and another one clearly better."""
    values = {"ours": [1.0, 2.0, 3.0], "wild": [9.0, 1.0, 2.0], "close": [1.3, 2.3, 3.3]}
    verdict = best("ours")(results(**values))
    assert [effect.direction for effect in verdict.effects] == [INCONCLUSIVE, CONTRADICTED]
    assert verdict.direction == CONTRADICTED
    assert best("close", ["close", "ours"])(results(**values)).direction == SUPPORTED
    assert best("close")(results(**values)).direction == INCONCLUSIVE


def test_one_significant_lag_of_many_comparisons_is_no_contradiction():
    lag = Effect("lag", (-1.0, -1.2, -0.8))  # t is 8.7: beyond 4.3, not beyond that of ten comparisons
    assert lag.direction == CONTRADICTED
    assert decide([lag]).direction == CONTRADICTED
    level = Effect("level", (0.1, -0.1, 0.0))
    assert decide([lag, *[level] * 9]).direction == INCONCLUSIVE


def test_one_seed_takes_the_deviation_of_other_arms():
    values = {"a": [1.0, 1.1, 0.9], "b": [2.0], "c": [1.1]}
    assert gains(["b"], "a")(results(**values)).direction == SUPPORTED
    assert gains(["c"], "a")(results(**values)).direction == INCONCLUSIVE
    effect = compare(results(**values), "b", "a")
    assert effect.deviation == Deviation(pytest.approx(math.sqrt(2) * 0.1), 2)


@pytest.mark.parametrize(
    ("samples", "size"),
    [
        ((0.9, 1.0, 1.2), "as claimed"), ((0.1, 0.2, 0.15), "smaller"), ((-0.01, 0.02, 0.0), "smaller"),
        ((2.0, 2.1, 2.2), "larger"), ((-0.5, -0.6, -0.55), "opposite"), ((-1.0, 1.0, 2.0), "unclear"),
    ],
)  # fmt: skip
def test_sizes(samples, size):
    assert Effect("x", samples, 1.0).size == size
    assert Effect("x", samples).size == ""
    assert Effect("x", samples, 1.0, limitation="too short").size == "not judged"


def test_sizes_are_shares_of_the_paper_s_effect():
    numbers = {"a": 50.0, "b": 60.0}
    verdict = gains(["b"], "a")(results(numbers, a=[1, 2, 3], b=[2, 2.9, 4.1]))
    assert verdict.size == "smaller: 10 % [7.5, 12.5]"
    ratio = gains(["b"], "a", "lower")(results({"a": 100, "b": 1}, True, a=[10, 10.1], b=[1, 1.01]))
    assert ratio.headline.share[0] == pytest.approx(0.5)
    assert str(ratio.headline).startswith("factor 10")
    assert str(all_of(gains(["b"], "a"))(results(numbers, a=[1, 2], b=[2, 3]))).startswith(SUPPORTED)


def test_what_is_barred_speaks_for_neither_side():
    for value in (5.0, -5.0):
        effect = Effect("x", (value, value + 0.1), limitation="a short training")
        verdict = decide([effect])
        assert verdict.direction == INCONCLUSIVE
        assert verdict.why.endswith("a short training")


def test_a_check_that_the_control_passes_supports_nothing():
    good, bad = Effect("x", (1.0, 1.1)), Effect("x", (-1.0, -1.1))
    assert decide([good], control=[bad]).direction == SUPPORTED
    assert decide([good], control=[good]).direction == INCONCLUSIVE
    assert "cannot fail" in decide([good], control=[good]).caveat
    assert decide([bad], control=[good]).direction == CONTRADICTED
    assert decide([good], vacuous="no error could").direction == INCONCLUSIVE
    assert decide([bad], vacuous="no error could").direction == CONTRADICTED


def test_bounds():
    assert below("a", 2.0)(results(a=[1, 1.1])).direction == SUPPORTED
    assert below("a", 2.0)(results(a=[2, 2])).direction == SUPPORTED  # the bound itself is allowed
    assert below("a", 1.0)(results(a=[1.5, 1.51])).direction == CONTRADICTED
    assert below("a", 1.0)(results(a=[1.5])).direction == CONTRADICTED
    near = {"a": 1.0, "b": 2.0}
    assert within(near, 1.5)(results(a=[1.2], b=[2.5])).direction == SUPPORTED
    assert within(near, 1.1)(results(a=[1.2], b=[2.5])).direction == CONTRADICTED
    exact = Effect("x", (0.0,), deviation=EXACT)
    assert exact.direction == INCONCLUSIVE
    assert replace(exact, inclusive=True).direction == SUPPORTED


def test_parts():
    good, bad, none = (Verdict(w, w, claim=w) for w in (SUPPORTED, CONTRADICTED, NOT_RUN))
    unclear = Verdict(INCONCLUSIVE, "who knows")
    assert combine([good, unclear]).direction == INCONCLUSIVE
    assert combine([good, unclear, bad]).direction == CONTRADICTED
    assert combine([good, none]).direction == NOT_RUN
    assert combine([good, good]).direction == SUPPORTED
    assert combine([good, combine([bad, unclear])]).claims == (good, bad, unclear)
    assert (
        combine([good, unclear]).why == "supported: supported, supported. Part: inconclusive, who knows"
    )
    with pytest.raises(ValueError, match="'holds' is not one of supported, contradicted"):
        Verdict("holds", "")
    with pytest.raises(ValueError, match="at least one effect"):
        decide([])


def test_the_mean_of_comparisons_is_taken_seed_by_seed():
    one, two = Effect("a", (1.0, 2.0), 2.0), Effect("b", (3.0, 6.0), 4.0)
    assert mean_effect([one, two]).samples == (2.0, 4.0)
    assert mean_effect([one, two]).paper == 3.0
    assert mean_effect([one, Effect("c", (5.0,), 1.0)]).label == "c"
    assert mean_effect([one, replace(two, limitation="short")]) == one
    assert mean_effect([one, replace(two, ratio=True)]) == one
