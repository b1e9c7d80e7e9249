import json

import pytest
from typer.testing import CliRunner

import attractor
from attractor.cli import app
from attractor.doctor import checks

runner = CliRunner()


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == f"attractor {attractor.__version__}"


def test_alone_it_shows_help():
    result = runner.invoke(app, [])
    assert "demo" in result.output
    assert "doctor" in result.output


@pytest.mark.parametrize("command", ["demo", "doctor"])
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


def test_demo_writes_a_page_that_stands_alone(tmp_path):
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "d"), "--trajectories", "3"])
    assert result.exit_code == 0, result.output
    assert "Report:" in result.output
    page = (tmp_path / "d" / "report.html").read_text()
    assert "<svg" in page
    for outside in ("<script", "<link", 'src="', "@import", "url(http"):
        assert outside not in page
    results = json.loads((tmp_path / "d" / "results.json").read_text())
    rows = {(r["system"], r["scheme"], r["dt"]): r for r in results["rows"]}
    rk4 = [rows["elastic pendulum", "rk4", dt]["rms_error"] for dt in (0.1, 0.05, 0.025)]
    assert rk4[0] > 10 * rk4[1] > 100 * rk4[2]
