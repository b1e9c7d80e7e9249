import json
import math
from dataclasses import replace

import pytest
import torch

import attractor as at
from attractor.ode.compare import compare
from attractor.ode.comparison import Comparison, Point, reach
from attractor.ode.race import Race


def point(setting, error, seconds, method="rk4", adaptive=False):
    return Point(method, setting, adaptive, error, seconds, 100)


def test_a_method_reaches_an_error_between_two_of_its_settings():
    """On logarithmic scales: an error that falls with the fourth power of the step."""
    points = [point(0.1, 1e-2, 1.0), point(0.05, 1e-2 / 16, 2.0), point(0.025, 1e-2 / 256, 4.0)]
    found = reach(points, 1e-2 / 16 / 4)
    assert found.setting == pytest.approx(0.05 / math.sqrt(2))
    assert found.seconds == pytest.approx(2 * math.sqrt(2))
    assert reach(points, 1e-9) is None
    assert reach(points, 1.0).setting == 0.1
    assert reach([point(0.1, math.inf, 1.0), points[1]], 1e-3).setting == 0.05


@pytest.fixture(scope="module")
def found():
    solver = at.fit(
        at.systems.HenonHeiles(), dt=0.5, horizon=5.0, width=64, trajectories=100, fine_dt=0.05
    )
    return solver, compare(solver, horizon=5.0, batch=30, compile=False)


def test_m_counts_plain_steps_that_reach_the_error(found):
    solver, result = found
    u0 = solver.rate.sample(30, torch.Generator().manual_seed(2**40 + 1), torch.float64)
    steps = math.ceil(result.m)
    fine = at.evolve(
        solver.rate,
        u0,
        torch.arange(10 * 32 * steps + 1).double() * 0.5 / 32 / steps,
        "dopri5",
        every=32 * steps,
    )
    error = lambda k: (
        (at.evolve(solver.rate, u0, torch.arange(10 * k + 1).double() * 0.5 / k, every=k).u - fine.u)
        .square()
        .mean()
    )
    assert error(2 * steps) < result.hybrid.error < error(max(1, steps // 2))
    assert result.hybrid.rate_calls == 40


def test_everybody_gets_better_with_work(found):
    _, result = found
    methods = {p.method for p in result.points}
    assert {"rk4", "dopri5", "dopri5, own steps", "torchdiffeq dopri5", "SciPy DOP853"} <= methods
    for method in methods:
        errors = [p.error for p in result.plain(method)]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] <= result.hybrid.error
        assert all(p.rate_calls > 0 and p.seconds > 0 for p in result.plain(method))


def test_plain_schemes_take_larger_steps_where_those_suffice(found):
    solver, _ = found
    u0 = solver.rate.sample(5, torch.Generator().manual_seed(3), torch.float64)
    t = torch.linspace(0, 4.0, 9, dtype=torch.float64)
    truth = at.evolve(solver.rate, u0, t, "dop853").u
    race = Race(solver, u0, None, truth, 8, False, lambda what: None)
    assert [p.setting for p in race.refine(at.get_scheme("dop853"), 1.0)] == [4.0, 2.0, 1.0, 0.5]
    assert race.refine(at.get_scheme("dop853"), 1e-14)[0].setting == 1.0  # not enough, and dt is
    assert [p.setting for p in race.refine(at.get_scheme("rk4"), 1e-8)][:2] == [0.5, 0.25]


def test_verdict_follows_the_fastest_rival(found):
    _, result = found
    assert result.rival.seconds == min(
        reach(result.plain(m), result.hybrid.error).seconds for m in {p.method for p in result.points}
    )
    assert result.pays is None  # eager code decides nothing
    assert result.verdict.startswith("not decided: ")
    assert "eager mode, 30 trajectories at once, float64, cpu" in result.verdict


def test_verdict_names_its_conditions_and_the_break_even():
    about = {"batch": 1000, "dtype": "float64", "device": "cpu", "compiled": True}
    hybrid = replace(point(0.5, 1e-9, 1.0, "hybrid"), first_seconds=31.0)
    slow = Comparison(hybrid, (), 3.0, 6.0, point(0.02, 1e-9, 0.5), about)
    assert slow.pays is False
    assert slow.break_even == math.inf
    assert slow.verdict == (
        "does not pay: rk4 with dt = 0.02 is 2x faster at its error (compiled, 1,000 trajectories at "
        "once, float64, cpu; m = 3, m* = 6)"
    )
    rival = replace(point(0.02, 1e-9, 3.0), first_seconds=13.0)
    fast = Comparison(hybrid, (), 9.0, 3.0, rival, {**about, "fit_seconds": 20.0})
    assert fast.pays is True
    assert fast.break_even == pytest.approx(1000 * (20 + 30 - 10) / (3 - 1))
    assert fast.verdict.startswith("pays from 20,000 trajectories on: 3x faster than rk4 with dt = 0.02")
    assert fast.verdict.endswith("the fit took 20 s, compilation 30 s)")
    alone = replace(fast, rival=None)
    assert (alone.pays, alone.break_even) == (True, 0.0)
    assert "no other method reaches its error" in alone.verdict
    for comparison in (fast, slow):  # infinite numbers are null in JSON
        assert Comparison.from_json(json.loads(json.dumps(comparison.to_json()))) == comparison
        assert Comparison.from_json(comparison.to_json()) == comparison


def test_a_comparison_is_written_and_drawn(found, tmp_path):
    pytest.importorskip("matplotlib")
    from attractor.report import figures

    _, result = found
    assert result.save(tmp_path).read_text().startswith("{")
    assert figures.write(figures.work_precision(result), tmp_path / "c.png").stat().st_size > 10_000


def test_a_solver_that_blows_up_is_not_compared():
    grows = at.HybridSolver(
        at.systems.Logistic(), "rk4", at.corrections.Linear(1, dtype=torch.float64), 0.1
    )
    with torch.no_grad():
        grows.correction.net.head.weight.fill_(1e200)
    with pytest.raises(ValueError, match="loses trajectories"):
        compare(grows, horizon=1.0, batch=3, compile=False, peers=False)


@pytest.mark.slow
def test_compiled_solves_agree_with_eager_ones(compiler):
    solver = at.HybridSolver(
        at.systems.Logistic(), "rk4", at.corrections.AttNS(1, width=8, dtype=torch.float64), 0.1
    )
    u0 = torch.rand(4, 1, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(solver.solve(u0, 1.0, compile=True).u, solver.solve(u0, 1.0).u)
    with pytest.raises(ValueError, match="guard=True needs a trust region"):
        solver.solve(u0, 1.0, guard=True, compile=True)
