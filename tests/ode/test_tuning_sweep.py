"""`tune_all` and the command tune with several equations: one result per equation, kept in the folder."""

import json

import pytest
import torch
from typer.testing import CliRunner

from attractor import systems
from attractor.cli import app
from attractor.jobs.naming import named
from attractor.ode.tuning import TunedSolver, tune
from attractor.ode.tuning_sweep import Problem, tune_all

OPTIONS = dict(error=1e-3, batch=10, budget=0.0, compile=False)
PROBLEMS = {
    "oscillator": Problem(systems.HarmonicOscillator(omega=2.0), 2.0),
    "logistic": Problem(systems.Logistic(), 2.0),
}
ARGUMENTS = ["--error", "1e-3", "--batch", "10", "--budget", "0", "--no-compile", "--horizon", "2"]
OWN = """
import torch

horizon = 2.0

def rate(t, u, p):
    return {factor} * p * u

def sample(n, generator=None):
    return 1 + torch.rand(n, 2, generator=generator, dtype=torch.float64)

def parameters(n, generator=None):
    return -torch.rand(n, 1, generator=generator, dtype=torch.float64)
"""


@pytest.fixture
def calls(monkeypatch):
    """The arguments of all calls of `tune`, which raises an error for the Lorenz system."""
    rates = []

    def recorded(rate, **options):
        rates.append(rate)
        if isinstance(rate, systems.Lorenz):
            raise ValueError("no candidate reaches the error")
        return tune(rate, **options)

    monkeypatch.setattr("attractor.ode.tuning_sweep.tune", recorded)
    return rates


def own_problem(folder, factor):
    path = folder / "own.py"
    path.write_text(OWN.format(factor=factor))
    named.cache_clear()
    rate, sample, parameters = (named(f"{path}:{name}") for name in ("rate", "sample", "parameters"))
    return Problem(rate, 2.0, sample, parameters)


@pytest.mark.slow
def test_each_equation_has_a_solver_that_reaches_the_error(tmp_path):
    solvers = dict(tune_all(PROBLEMS, tmp_path, **OPTIONS))
    assert set(solvers) == set(PROBLEMS)
    for name, solver in solvers.items():
        assert solver.rate == PROBLEMS[name].rate
        assert solver.report.winner.error <= 1e-3
        u0 = solver.rate.sample(3, torch.Generator().manual_seed(0))
        assert solver.solve(u0, 2.0).final.shape == u0.shape


def test_results_in_the_folder_are_not_computed_again(tmp_path, calls):
    first = dict(tune_all({"logistic": PROBLEMS["logistic"]}, tmp_path, **OPTIONS))
    both = dict(tune_all(PROBLEMS, tmp_path, **OPTIONS))
    assert calls == [systems.Logistic(), systems.HarmonicOscillator(omega=2.0)]
    assert both["logistic"].report == first["logistic"].report
    with pytest.raises(ValueError, match="another job"):
        dict(tune_all(PROBLEMS, tmp_path, **{**OPTIONS, "batch": 11}))


@pytest.mark.slow
def test_an_equation_whose_code_or_horizon_has_changed_is_computed_again(tmp_path, calls):
    for factor in (1.0, 1.0, 2.0):
        dict(tune_all({"own": own_problem(tmp_path, factor)}, tmp_path / "out", **OPTIONS))
    assert len(calls) == 2
    longer = Problem(systems.Logistic(), 3.0)
    for problem in (PROBLEMS["logistic"], longer):
        dict(tune_all({"logistic": problem}, tmp_path / "out", **OPTIONS))
    assert len(calls) == 4


@pytest.mark.slow
def test_an_error_of_one_equation_does_not_stop_the_others(tmp_path, calls):
    problems = {"lorenz": Problem(systems.Lorenz(), 1.0), **PROBLEMS}
    for _ in range(2):
        results = dict(tune_all(problems, tmp_path / "sweep", **OPTIONS))
        assert str(results["lorenz"]) == "no candidate reaches the error"
        assert all(isinstance(results[name], TunedSolver) for name in PROBLEMS)
    assert len(calls) == 3
    equations = ["lorenz", "logistic", *ARGUMENTS, "--out", str(tmp_path / "command")]
    command = CliRunner().invoke(app, ["tune", *equations])
    assert command.exit_code == 1
    assert "lorenz: no candidate reaches the error" in command.output


def test_functions_without_a_name_are_refused(tmp_path):
    with pytest.raises(TypeError, match="the rate of mine must be a built-in system or a function"):
        dict(tune_all({"mine": Problem(lambda t, u: -u, 1.0)}, tmp_path, **OPTIONS))


@pytest.mark.slow
def test_the_command_saves_a_solver_and_a_report_per_equation(tmp_path):
    names = ["harmonic-oscillator", "logistic"]
    out = ["--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["tune", *names, *ARGUMENTS, *out])
    assert result.exit_code == 0, result.output
    for name in names:
        assert name in result.output
        report = json.loads((tmp_path / name / "tune.json").read_text())
        solver = TunedSolver.load(tmp_path / name / "solver")
        assert report["equation"] == name
        assert report["candidates"] == solver.report.to_json()["candidates"]
    again = CliRunner().invoke(app, ["tune", *names, *ARGUMENTS, *out, "--json"])
    rows = json.loads(again.stdout)
    assert [row["name"] for row in rows] == names
    assert rows[1]["candidates"] == report["candidates"]


@pytest.mark.slow
def test_the_command_tunes_equations_of_a_file_in_processes(tmp_path):
    (tmp_path / "own.py").write_text(OWN.format(factor=1.0))
    equations = [f"{tmp_path}/own.py:rate", "logistic"]
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["tune", *equations, *ARGUMENTS, "--workers", "2", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert len(list(out.glob("*/solver/manifest.json"))) == 2


def test_the_command_says_which_equation_has_no_horizon(tmp_path):
    arguments = [*ARGUMENTS[:-2], "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["tune", "elastic-pendulum", "lorenz", *arguments])
    assert result.exit_code == 2
    assert "lorenz suggests no horizon" in " ".join(result.output.split())
