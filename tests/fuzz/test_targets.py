"""The fast profile: every target a few times, the same examples in every run."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tests.fuzz.targets  # noqa: F401
from tests.fuzz.judging import TARGETS, Finding, is_known, judge, watched
from tests.fuzz.strategies import Maker
from tests.fuzz.surface import WITHOUT, missing_package, public, without_target


def test_every_public_function_has_a_target():
    assert without_target(TARGETS) == []
    assert set(WITHOUT) <= set(public())


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_a_result_or_a_clear_refusal(name):
    fuzz(TARGETS[name], 10, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_a_result_or_a_clear_refusal_for_many_inputs(name):
    fuzz(TARGETS[name], 128, 8)


def fuzz(which, examples, slow_examples):
    """Judge a target with so many inputs; the same ones in every run."""
    if missing_package(which):
        pytest.skip(f"needs {which.needs}")

    @st.composite
    def inputs(draw):
        maker = Maker(draw)
        return maker, which.make(maker)

    @settings(
        max_examples=slow_examples if which.slow else examples, deadline=None, derandomize=True,
        database=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
    )  # fmt: skip
    @given(inputs())
    def trial(example):
        try:
            judge(which, *example)
        except Finding as finding:
            if not is_known(finding):
                raise

    with torch.random.fork_rng(), watched():
        trial()
