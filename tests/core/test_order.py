"""Convergence on problems with known answers; `python -m benchmarks.order` prints the whole table."""

import statistics

import pytest

from attractor.core.tableaus import ALL
from benchmarks.order import measured, problems_for

STEPS = {1: 800, 2: 200, 3: 150, 4: 120, 5: 50, 8: 10}


# That the coefficients of all of them have this order is in contracts.py.
FEW = ("rk4",)


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(s, marks=() if s.name in FEW else pytest.mark.slow) for s in ALL.values()],
    ids=lambda s: s.name,
)
def test_measured_order(scheme):
    problems = problems_for(scheme)
    assert len(problems) >= 12
    slopes = {p.name: measured(p, scheme, STEPS[scheme.order])[0] for p in problems}
    if scheme.name in (
        "tsit5",
        "dop853",
        "rodas4",
        "rodas5p",
    ):  # at these steps other error terms, or rounding, are larger on some problems
        assert statistics.median(slopes.values()) > scheme.order - 0.2
        return
    low = {name: slope for name, slope in slopes.items() if slope < scheme.order - 0.2}
    assert not low
    if scheme.order <= 4:
        assert statistics.median(slopes.values()) == pytest.approx(scheme.order, abs=0.05)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("problem", problems_for(None), ids=lambda p: p.name)
def test_known_answers_are_answers(problem):
    import torch

    from attractor import evolve

    t = torch.linspace(0, problem.end, 9, dtype=torch.float64)
    truth = problem.truth(t)
    solved = evolve(problem.rate, truth[0], t, "dopri5", rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(solved.u, truth, rtol=1e-8, atol=1e-8)
