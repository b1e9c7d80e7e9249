"""The fastest way to an error."""

import math
import time
from dataclasses import replace

import pytest
import torch

import attractor as at
from attractor.ode.candidates import Candidate
from attractor.ode.hybrid_search import WIDTHS, HybridSearch
from attractor.ode.tuning import TuningReport

F64 = {"dtype": torch.float64}


def spring(t, u, p):
    x, v = u.unbind(-1)
    return torch.stack((v, -p[..., 0] * x - x**3), -1)


def states(n, generator):
    return torch.rand(n, 2, generator=generator, **F64) + 0.5


def strengths(n, generator):
    return torch.rand(n, 1, generator=generator, **F64) + 0.5


@pytest.fixture(scope="module")
def tuned():
    return at.tune(
        at.systems.ElasticPendulum(), error=1e-4, horizon=4.0, batch=50, budget=120, compile=False
    )


def test_the_winner_reaches_the_error_and_is_the_fastest(tuned):
    report = tuned.report
    assert all(c.error <= 1e-4 for c in report.candidates)
    assert report.winner.seconds == min(c.seconds for c in report.candidates)
    assert {c.method for c in report.candidates} == {"fixed", "adaptive", "hybrid"}
    assert report.plain is not None
    assert report.speedup >= 1


def test_the_error_holds_on_trajectories_of_another_seed(tuned):
    system = at.systems.ElasticPendulum()
    u0 = system.sample(100, torch.Generator().manual_seed(99), torch.float64)
    truth = at.evolve(system, u0, [0.0, 4.0], "dop853", rtol=1e-10, atol=1e-13)
    scale = truth.u.square().mean((0, 1)).sqrt()
    solved = tuned.solve(u0, 4.0)
    assert ((solved.final - truth.final).square().mean(0).sqrt() / scale).max() < 3e-4
    assert solved.u.shape == (2, 100, 4)


@pytest.mark.parametrize("way", ["fixed", "adaptive", "hybrid"])
def test_every_way_ends_where_it_is_asked_to(tuned, way, tmp_path):
    """Also between two steps of a hybrid; and it does so again after it was saved."""
    system, report = at.systems.ElasticPendulum(), tuned.report
    best = next(c for c in report.candidates if c.method == way)
    first = (best, *(c for c in report.candidates if c is not best))
    solver = tuned.solver
    if way == "hybrid":
        n = round(4.0 / best.setting)
        how = {"correction": "stages", "width": best.width}
        if best.degree is not None:
            how = {"correction": "polynomial", "options": {"degree": best.degree}}
        solver = at.fit(system, dt=4.0 / n, horizon=4.0, scheme=best.scheme, trajectories=2000, **how)
    one = at.TunedSolver(
        system, TuningReport(1e-4, 4.0, 50, "cpu", first, 1.0, 1.0), solver if way == "hybrid" else None
    )
    u0 = system.sample(5, torch.Generator().manual_seed(1), torch.float64)
    for end in (1.2345, 0.01):
        truth = at.evolve(system, u0, [0.0, end], "dop853", rtol=1e-10, atol=1e-13).final
        solved = one.solve(u0, end)
        assert solved.t[-1].item() == pytest.approx(end)
        torch.testing.assert_close(solved.final, truth, rtol=1e-2, atol=1e-2)
    again = at.TunedSolver.load(one.save(tmp_path / "tuned"))
    assert torch.equal(again.solve(u0, 1.2345).u, one.solve(u0, 1.2345).u)
    assert again.report == one.report
    assert str(again.report) == str(one.report)


def test_parameters_of_each_trajectory():
    solver = at.tune(
        spring, error=1e-3, horizon=3.0, sample=states, parameters=strengths, batch=20, budget=5,
        compile=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    u0, p = states(40, generator), strengths(40, generator)
    truth = at.evolve(spring, u0, [0.0, 3.0], "dop853", rtol=1e-10, atol=1e-12, parameters=p).final
    assert (solver.solve(u0, 3.0, parameters=p).final - truth).square().mean().sqrt() < 5e-3


def test_a_rate_that_takes_long_has_wide_corrections_of_schemes_with_few_stages(monkeypatch):
    def slow(t, u):
        time.sleep(2e-3)
        x, v = u.unbind(-1)
        return torch.stack((v, -x - x**3), -1)

    fits = []
    monkeypatch.setattr(
        HybridSearch, "hybrid", lambda self, way, steps: fits.append((way.scheme, way.width))
    )
    plain = [Candidate("fixed", name, 0.1, rate_calls=n) for name, n in (("dop853", 120), ("rk4", 400))]
    order = {}
    for rate, sample in ((slow, states), (at.systems.HarmonicOscillator(), None)):
        search = HybridSearch(
            None, rate, 1e-4, 10.0, sample, None, 10, 1e3, None, None, 0, lambda message: None
        )
        assert search.stages(plain) == []
        order[rate], fits[:] = list(dict.fromkeys(fits)), []
    costly, quick = order.values()
    assert costly == [("rk4", 256), ("rk4", 64), ("dop853", 256), ("dop853", 64)]
    assert quick == [(name, width) for name in ("dop853", "rk4") for width in WIDTHS]


def test_large_errors_are_tried_in_float32():
    solver = at.tune(
        at.systems.HenonHeiles(), error=1e-3, horizon=4.0, batch=20, budget=0.0, compile=False
    )
    assert any(c.dtype == "float32" for c in solver.report.candidates)
    u0 = at.systems.HenonHeiles().sample(3, torch.Generator().manual_seed(0), torch.float64)
    assert solver.solve(u0, 4.0).u.dtype == torch.float64


def test_a_rate_that_needs_float64_is_tuned_in_float64():
    matrix = torch.tensor([[-1.0, 0.5], [0.0, -2.0]], dtype=torch.float64)
    sample = lambda n, generator: torch.rand(n, 2, generator=generator, dtype=torch.float64)
    report = at.tune(
        lambda t, u: u @ matrix,
        error=1e-3,
        horizon=2.0,
        sample=sample,
        batch=20,
        budget=0.0,
        compile=False,
    ).report
    assert all(c.dtype == "float64" for c in report.candidates)
    assert any("float32" in note for note in report.notes)


def test_without_a_budget_only_plain_schemes_are_tried():
    report = at.tune(
        at.systems.VanDerPol(), error=1e-3, horizon=1.0, batch=5, budget=0.0, compile=False
    ).report
    assert not any(c.is_hybrid for c in report.candidates)
    assert report.break_even is None
    assert report.speedup == 1


def test_a_rate_of_time_has_no_hybrids_and_says_so():
    def forced(t, u):
        return torch.cos(t) * torch.ones_like(u) - u

    solver = at.tune(forced, error=1e-3, horizon=2.0, sample=states, batch=5, budget=10, compile=False)
    assert not any(c.is_hybrid for c in solver.report.candidates)
    assert any("depends on t" in note for note in solver.report.notes)


def van_der_pol(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, 500 * (1 - x * x) * v - x), -1)


def search_of(rate, sample, horizon, error=1e-3):
    options = None, 4, 10.0, "cpu", None, 0, lambda message: None
    return HybridSearch(at.fit, rate, error, horizon, sample, *options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("rate", "horizon", "stiff"),
    [
        (van_der_pol, 400.0, True),
        (lambda t, u: torch.stack((u[..., 1], -u[..., 0]), -1), 400.0, False),  # only long
        (lambda t, u: -1e4 * (u - torch.cos(t)), 100.0, True),
    ],
)  # fmt: skip
def test_equations_are_stiff_where_explicit_schemes_need_far_more_steps(rate, horizon, stiff):
    assert search_of(rate, states, horizon).is_stiff() == stiff


def test_stiff_equations_are_solved_by_rosenbrock_schemes(tmp_path):
    sample = lambda n, generator: torch.tensor([2.0, 0.0], **F64) + 0.1 * states(n, generator)
    tuned = at.tune(van_der_pol, error=1e-3, horizon=400.0, sample=sample, batch=20, budget=30)
    report = tuned.report
    assert {c.scheme for c in report.candidates} == {"rodas4", "rodas5p"}
    assert report.winner.error <= 1e-3
    assert report.winner.compiled
    assert "explicit schemes and hybrids: the equation is stiff" in report.notes
    u0 = sample(10, torch.Generator().manual_seed(5))
    truth = at.evolve(van_der_pol, u0, [0.0, 400.0], "rodas5p", rtol=1e-9, atol=1e-12, compile=True)
    errors = (tuned.solve(u0, 400.0).final - truth.final).abs() / torch.tensor(report.scale, **F64)
    assert errors.max() < 3e-3


def test_what_cannot_be_reached_is_named():
    grow = lambda t, u: u**2
    with pytest.raises(ValueError, match="cannot be followed to horizon = 5"):
        at.tune(grow, error=1e-3, horizon=5.0, sample=states, batch=5, budget=1)
    for wrong in ({"error": 0.0}, {"error": 2.0}, {"horizon": -1.0}, {"batch": 0}, {"budget": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            at.tune(at.systems.VanDerPol(), **{"error": 1e-3, "horizon": 1.0, **wrong})


def test_break_even_counts_the_search_of_hybrids():
    plain = Candidate("fixed", "rk4", 0.1, seconds=3.0, error=1e-4)
    hybrid = Candidate("hybrid", "rk4", 0.2, 0, seconds=1.0, error=1e-4)
    report = TuningReport(1e-3, 1.0, 100, "cpu", (hybrid, plain), 60.0, 10.0)
    assert report.speedup == 3
    assert report.break_even == pytest.approx(500)
    assert "after 500 trajectories" in str(report)
    assert math.isinf(Candidate("fixed", "rk4", 0.1).seconds)


@pytest.mark.slow
def test_a_fit_by_time_takes_the_fastest_hybrid_that_reaches_the_error(monkeypatch):
    times = lambda self, way: replace(way, seconds=way.setting if way.width else 10.0)
    monkeypatch.setattr(HybridSearch, "timing", times)
    monkeypatch.setattr("attractor.ode.hybrid_search.WIDTHS", (0, 8))
    monkeypatch.setattr("attractor.ode.hybrid_search.FITS", 2)
    pendulum = at.systems.ElasticPendulum()
    options = dict(error=1e-3, horizon=2.0, scheme="rk4", trajectories=30)
    solver = at.fit(pendulum, objective="time", **options)
    assert solver.correction.config["width"] > 0  # the linear map is said to be slow
    u0 = pendulum.sample(100, torch.Generator().manual_seed(7), torch.float64)
    truth = at.evolve(pendulum, u0, [0.0, 2.0], "dop853", rtol=1e-8, atol=1e-10)
    off = (solver.solve(u0, 2.0).final - truth.final).square().mean(0).sqrt()
    assert (off / truth.u.square().mean((0, 1)).sqrt()).max() < 2e-3


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "takes dt="), ({"dt": 0.1, "error": 1e-3}, "no error="), ({"objective": "time"}, "takes error="),
     ({"objective": "time", "error": 1e-3, "dt": 0.1}, "chooses dt itself"),
     ({"objective": "time", "error": 2.0}, "between 0 and 1"),
     ({"objective": "speed", "dt": 0.1}, "'speed' is neither"),
     ({"objective": "time", "error": 1e-3, "options": {"depth": 3}}, "leave out options")],
)  # fmt: skip
def test_an_objective_and_its_arguments_fit_together(given, message):
    with pytest.raises(ValueError, match=message):
        at.fit(at.systems.ElasticPendulum(), horizon=4.0, **given)
