import json

import pytest
import torch
from typer.testing import CliRunner

import attractor
from attractor.cli import app
from attractor.cli import equation_names as equations
from attractor.doctor import checks

runner = CliRunner()


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == f"attractor {attractor.__version__}"


@pytest.mark.parametrize(
    "command", ["demo", "doctor", "trajectories", "fit", "solve", "compare", "probe", "bench", "report"]
)
def test_help_has_an_example(command):
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: attractor {command}" in result.output


def test_doctor_computes_and_reports():
    result = runner.invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["versions"]["attractor"] == attractor.__version__
    assert [c["check"] for c in found["checks"]] == [name for name, _ in checks()]
    assert all(c["ok"] for c in found["checks"])
    plain = runner.invoke(app, ["doctor"])
    assert "All is well" in plain.output


def test_doctor_fails_when_a_check_does(monkeypatch):
    import attractor.doctor as doctor

    def broken():
        raise ArithmeticError("two and two make five")

    monkeypatch.setattr(doctor, "checks", lambda *a: [("sums", broken)])
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "two and two make five" in result.output


def test_unknown_device_is_named():
    result = runner.invoke(app, ["demo", "--device", "abacus"])
    assert result.exit_code == 2
    assert "abacus" in result.output


OWN = """
import torch

dt, horizon, period = 0.25, 2.0, 2.0


def rate(t, u):
    return torch.cos(torch.pi * t) - u**3


def sample(n, generator):
    return torch.rand(n, 1, generator=generator, dtype=torch.float64)


def of_one(u):
    return -u


not_a_rate = 3
"""


def test_from_a_file_of_one_s_own_to_a_solver_a_comparison_and_states(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    fitted = runner.invoke(app, ["fit", "own.py:rate", "--width", "32", "--trajectories", "64"])
    assert fitted.exit_code == 0, fitted.output
    numbers = json.loads((tmp_path / "out/fit/fit.json").read_text())
    assert numbers["test"]["hybrid"]["error"] < 1e-2 * numbers["test"]["plain rk4"]["error"]
    page = (tmp_path / "out/fit/report.html").read_text()
    assert "A hybrid solver for own:rate" in page
    assert page.count("<svg") == 3

    solver = ["out/fit/solver", "--rate", "own.py:rate"]
    solved = runner.invoke(app, ["solve", *solver, "--u0", "0.5", "--u0", "0.25", "--t-end", "1"])
    assert solved.exit_code == 0, solved.output
    rows = (tmp_path / "out/solve/states.csv").read_text().splitlines()
    assert rows[0] == "trajectory,t,u0"
    assert rows[1] == "0,0.0,0.5"
    assert len(rows) == 1 + 2 * 5
    loaded = attractor.HybridSolver.load("out/fit/solver", equations.find("own.py:rate").rate)
    end = loaded.solve(torch.tensor([[0.5], [0.25]], dtype=torch.float64), 1.0).final
    assert float(rows[5].split(",")[-1]) == pytest.approx(end[0].item(), rel=1e-12)

    quick = ["--no-compile", "--no-peers", "--batch", "20", "--scheme", "heun"]
    compared = runner.invoke(app, ["compare", *solver, *quick])
    assert compared.exit_code == 0, compared.output
    assert "m* =" in compared.output
    found = json.loads((tmp_path / "out/compare/compare.json").read_text())
    assert found["verdict"] in " ".join(compared.output.split())
    assert {p["method"] for p in found["points"]} == {"rk4", "heun"}

    # Several solvers, or workers, are compared as far as each was fitted, too.
    many = runner.invoke(app, ["compare", *solver, *quick, "--workers", "1", "--json"])
    assert many.exit_code == 0, many.output
    assert json.loads(many.stdout)[0]["about"]["horizon"] == found["about"]["horizon"] == 2.0

    refused = runner.invoke(app, ["solve", "out/fit/solver"])
    assert refused.exit_code == 2
    assert "pass it as rate= (on the command line --rate FILE.py:NAME)" in refused.output
    (tmp_path / "other.py").write_text(OWN.replace("u**3", "u"))
    refused = runner.invoke(app, ["solve", "out/fit/solver", "--rate", "other.py:rate"])
    assert refused.exit_code == 2
    assert "was fitted to another equation: at t = 0.37 and u = [" in refused.output


SWEEP = """
import torch

dt, horizon = 0.25, 2.0


def rate(t, u, p):
    x, y = u.unbind(-1)
    a, b = p.unbind(-1)
    return torch.stack((x * (a - y), y * (x - b)), -1)


def sample(n, generator):
    return 0.5 + torch.rand(n, 2, generator=generator, dtype=torch.float64)
"""

RATES = """
import torch


def rates(n, generator):
    return 0.5 + torch.rand(n, 2, generator=generator, dtype=torch.float64)


parameters = rates
"""


@pytest.mark.slow
def test_an_equation_with_parameters_from_the_fit_to_the_states(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.py").write_text(SWEEP)
    (tmp_path / "rates.py").write_text(RATES)
    (tmp_path / "whole.py").write_text(SWEEP + RATES)
    call = lambda *arguments: runner.invoke(app, [*arguments])
    own = ["--parameters", "rates.py:rates"]
    refused = call("fit", "sweep.py:rate")
    assert refused.exit_code == 2
    assert "name one with --parameters FILE.py:FUNCTION" in " ".join(refused.output.split())
    small = ["--width", "16", "--trajectories", "40", "--correction", "stages"]
    fitted = call("fit", "sweep.py:rate", *own, *small)
    assert fitted.exit_code == 0, fitted.output
    numbers = json.loads((tmp_path / "out/fit/fit.json").read_text())
    assert numbers["test"]["hybrid"]["error"] < numbers["test"]["plain rk4"]["error"]
    assert "--rate sweep.py:rate --parameters rates.py:rates" in " ".join(fitted.output.split())

    solver = ["out/fit/solver", "--rate", "sweep.py:rate"]
    solved = call("solve", *solver, "--u0", "1,0.9", "--parameters", "0.8,1.2", "--t-end", "1", "--json")
    assert solved.exit_code == 0, solved.output
    loaded = attractor.HybridSolver.load("out/fit/solver", equations.find("sweep.py:rate").rate)
    u0, p = (torch.tensor(x, dtype=torch.float64) for x in ([[1.0, 0.9]], [0.8, 1.2]))
    end = loaded.solve(u0, 1.0, parameters=p).final
    assert json.loads(solved.stdout)["final"] == end.tolist()
    sampled = call("solve", *solver, *own, "--batch", "3", "--json")
    assert sampled.exit_code == 0, sampled.output
    drawn = torch.tensor(json.loads(sampled.stdout)["parameters"])
    assert drawn.shape == (3, 2)
    assert drawn.unique().numel() == 6
    assert call("solve", *solver).exit_code == 2

    quick = ["--no-compile", "--no-peers", "--batch", "20", "--scheme", "heun"]
    compared = call("compare", *solver, *own, *quick)
    assert compared.exit_code == 0, compared.output
    found = json.loads((tmp_path / "out/compare/compare.json").read_text())
    beside = ["out/fit/solver", "--rate", "whole.py:rate"]  # whose sampler has the usual name
    many = call("compare", *beside, *quick, "--workers", "1", "--json")
    assert many.exit_code == 0, many.output
    assert json.loads(many.stdout)[0]["hybrid"]["error"] == found["hybrid"]["error"]

    data = call("trajectories", "whole.py:rate", "--trajectories", "10", "--out", "data")
    assert data.exit_code == 0, data.output
    again = call("fit", "whole.py:rate", "--data", "data", *small, "--out", "out/again")
    assert again.exit_code == 0, again.output
    for arguments, message in (
        (["fit", "elastic-pendulum", *own], "a built-in system, which has no parameters"),
        (["solve", "out/fit/solver", *own], "pass --rate as well"),
        (["solve", *solver, "--parameters", "1;2"], "must be comma-separated numbers"),
        (["solve", *solver, "--parameters", "1"], "fitted to an equation with 2 parameters"),
        (["fit", "sweep.py:rate", "--parameters", "rates.py"], "pass FILE.py:FUNCTION"),
        (["fit", "sweep.py:sample", *own], "sample"),
    ):
        refused = call(*arguments)
        assert refused.exit_code == 2, refused.output
        assert message in " ".join(refused.output.split())


@pytest.mark.slow
def test_tuning_an_equation_with_parameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole.py").write_text(SWEEP + RATES)
    how = ["--error", "1e-3", "--batch", "20", "--budget", "2", "--no-compile"]
    tuned = runner.invoke(app, ["tune", "whole.py:rate", *how])
    assert tuned.exit_code == 0, tuned.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["elastic"], "no system is called 'elastic'; there are"),
        (["lorenz"], "add for example --dt 0.1"),
        (["pendulum-chain", "-o", "links=two"], "is no int"),
        (["pendulum-chain", "-o", "length=2"], "has no option 'length'; it has links"),
        (["pendulum-chain", "-o", "links"], "must be KEY=VALUE"),
        (["nowhere.py:rate"], "there is no file nowhere.py"),
        (["own.py"], "write own.py:rate"),
        (["own.py:speed"], "has no function 'speed'; it has rate, sample, of_one"),
        (["own.py:not_a_rate"], "has no function 'not_a_rate'"),
        (["own.py:of_one"], "a rate is called as rate(t, u), but own.py:of_one takes (u)"),
        (["own.py:rate", "--period", "3"], "does not repeat with period = 3"),
        (["own.py:rate", "--period", "0"], "period = 0"),
        (["own.py:rate", "--epochs", "3"], "--epochs 3 belongs to --recipe paper"),
        (["own.py:rate", "--dt", "0"], "dt = 0.0 must be a positive number"),
        (["own.py:rate", "--horizon", "0"], "horizon = 0"),
        (["own.py:rate", "--out", "own.py"], "own.py is a file; give another folder"),
        (["own.py:rate", "--out", "own.py/fit"], "own.py is a file; give another folder"),
        (["own.py:rate", "--horizon", "2.1"], "not a whole number of steps"),
        (["broken.py:rate"], "broken.py cannot be run: NameError"),
        (["no.such.module:rate"], "cannot be imported"),
    ],
)
def test_bad_equations_are_named_without_a_traceback(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("import torch\nrate = unknown")
    result = runner.invoke(app, ["fit", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_every_system_has_a_name_on_the_command_line():
    assert set(equations.names()) >= {"elastic-pendulum", "spring-mass", "pendulum-chain", "van-der-pol"}
    assert equations.find("pendulum-chain", {"links": "3"}).rate == attractor.systems.PendulumChain(3)
    for name in equations.names():
        assert equations.find(name).rate.dim > 0
