"""The DETEST problems; `python -m benchmarks.detest` prints the whole table."""

import pytest
import torch

from attractor import evolve
from benchmarks.detest import END, PROBLEMS

EASY = [p for p in PROBLEMS if p.name not in ("C4", "D4", "D5")]


def test_there_are_twenty_five():
    assert [p.name for p in PROBLEMS] == [f"{c}{i}" for c in "ABCDE" for i in range(1, 6)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "problem",
    [pytest.param(p, marks=pytest.mark.slow) if i % 2 else p for i, p in enumerate(EASY)],
    ids=lambda p: p.name,
)
def test_dopri5_and_rk4_against_dop853(problem):
    truth, u0 = problem.reference(), torch.tensor(problem.u0, dtype=torch.float64)
    controlled = evolve(problem.rate, u0, [0.0, END], "dopri5", rtol=1e-7, atol=1e-7)
    assert controlled.ok
    assert (controlled.final - truth).abs().max() < 1e-4
    t = torch.linspace(0, END, 801, dtype=torch.float64)
    assert (evolve(problem.rate, u0, t, "rk4", every=800).final - truth).abs().max() < 1e-4
