"""Under equal arms, verdicts favour neither side."""

import math
import random

import pytest

from attractor.reproduce import find
from attractor.reproduce.shelf import home
from attractor.reproduce.summary import largest
from benchmarks import null
from benchmarks.pages import load

WORDS = ("supported", "contradicted")


def most(share, draws):
    """Return the count that four deviations of a binomial do not exceed."""
    return draws * share + 4 * math.sqrt(draws * share * (1 - share))


def check(row, draws):
    supported, contradicted = (row[word] for word in WORDS)
    assert max(supported, contradicted) <= most(0.025, draws), row
    if row["comparisons"] == 1:
        assert abs(supported - contradicted) <= 4 * math.sqrt(supported + contradicted + 1), row


@pytest.mark.parametrize("row", null.rules(300, seed=1), ids=lambda row: row["rule"])
def test_rules(row):
    check(row, 300)


def test_an_experiment_by_its_own_code():
    for row in null.claims(100, ["pde-leak", "stepnet-table1"], seed=1, tell=lambda line: None):
        check(row, 100)


def test_equal_arms_are_equal():
    results = largest(find("pde-leak"), home())
    known = null.moments(results)
    positive, mean, spread = known["perplexity"]
    assert positive
    generator = random.Random(0)
    drawn = [null.equal(results, known, generator) for _ in range(300)]
    for arm in results.arms:
        values = [math.log(x) for d in drawn for x in d.values(arm)]
        assert abs(sum(values) / len(values) - mean) < 5 * spread / math.sqrt(len(values))


def test_the_simulation_of_the_page():
    """Of 1,000 draws each; all comparisons one by one differ by no more than draws do."""
    content = load("null")
    draws = content["draws"]
    assert draws == 1000
    for row in content["rules"] + content["claims"]:
        check(row, draws)
    for row in content["claims"]:
        supported, contradicted = (row["single"][word] for word in WORDS)
        # comparisons of one claim share an arm, so that their counts vary by up to so much more
        wide = 5 * math.sqrt((supported + contradicted + 1) * row["comparisons"])
        assert abs(supported - contradicted) <= wide, row
