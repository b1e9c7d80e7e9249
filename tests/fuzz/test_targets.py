"""The fast profile: every target a few dozen times, the same examples in every run."""

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
    which = TARGETS[name]
    if missing_package(which):
        pytest.skip(f"needs {which.needs}")

    @st.composite
    def examples(draw):
        maker = Maker(draw)
        return maker, which.make(maker)

    @settings(
        max_examples=3 if which.slow else 16, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
    )  # fmt: skip
    @given(examples())
    def trial(example):
        try:
            judge(which, *example)
        except Finding as finding:
            if not is_known(finding):
                raise

    with torch.random.fork_rng(), watched():
        trial()
