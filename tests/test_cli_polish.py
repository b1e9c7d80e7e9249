"""The command line as a whole: widths, examples, exit codes, JSON, errors, interruptions."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attractor.cli import app, terminal
from attractor.cli.start import START

runner = CliRunner()
COMMANDS = typer.main.get_command(app).commands
EXAMPLES = [
    (name, line.strip().removeprefix("Example: "))
    for name, command in COMMANDS.items()
    for line in (command.epilog or "").split("\n\n")
]
STARTS = [
    line.split("  ")[0] for line in map(str.strip, START.splitlines()) if line.startswith("attractor ")
]
ENVIRONMENT = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def rich_help(monkeypatch):
    monkeypatch.setattr(app, "rich_markup_mode", "rich")


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(name):
    result = runner.invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert not any(sign in result.output for sign in "╭│┏┃\x1b")  # nothing of a terminal in a pipe


@pytest.mark.usefixtures("rich_help")
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_in_a_terminal_fits_80_columns(name):
    result = runner.invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "╭" in result.output
    if name:  # lines that the terminal would break again look ragged
        lines = COMMANDS[name].help.splitlines()
        assert max(map(len, lines)) <= 78 or len(lines) == 1


def test_every_command_has_examples():
    assert {name for name, _ in EXAMPLES} == set(COMMANDS)


@pytest.mark.parametrize(("name", "line"), [*EXAMPLES, *((line.split()[1], line) for line in STARTS)])
def test_examples_have_commands_and_options_that_exist(name, line):
    first, second, *rest = shlex.split(line)
    assert (first, second) == ("attractor", name)
    assert len(line) <= 70  # so that help does not break it
    with COMMANDS[name].make_context(name, rest, resilient_parsing=False) as context:
        assert not context.args


def test_files_of_examples_exist():
    root = Path(__file__).parents[1]
    for _, line in EXAMPLES:
        for word in shlex.split(line):
            assert ".py:" not in word or (root / word.split(":")[0]).exists(), line


def test_alone_it_shows_what_to_try_first():
    result = runner.invoke(app, [])
    assert result.exit_code == 0
    assert result.stdout.strip() == START
    assert [line.split()[1] for line in STARTS] == ["demo", "solve", "fit", "bench", "probe"]
    assert max(map(len, START.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name):
    assert "--json" in {option for p in COMMANDS[name].params for option in p.opts}


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["fti"], "fit"),
        (["fit", "pendulum-chain", "--trajectores", "3"], "--trajectories"),
        (["fit", "pendulum-chian"], "pendulum-chain"),
        (["fit", "pendulum-chain", "--scheme", "rk44"], "rk4"),
        (["fit", "pendulum-chain", "--correction", "atns"], "attns"),
        (["solve", "pretrained:elastic-pendulm"], "elastic-pendulum"),
        (["reproduce", "stepnet-tabel1"], "stepnet-table1"),
        (["bench", "--what", "causl"], "causal"),
        (["bench", "--dtype", "float31"], "float32"),
        (["probe", "attractor:resnet_cifra"], "resnet_cifar"),
        (["probe", "attractor:resnet_cifar", "-o", "gate=see"], "se"),
        (["probe", "attractor:resnet_cifar", "--data", "digit"], "digits"),
    ],
)
def test_typing_errors_are_answered_with_what_is_near(arguments, near):
    result = runner.invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert result.stdout == ""
    assert near in result.stderr
    assert "Traceback" not in result.stderr


def unforeseen(*_):
    raise KeyError("a fault of ours")


def test_what_nobody_foresaw_is_a_line_and_a_traceback_only_with_debug(monkeypatch):
    monkeypatch.setattr("attractor.doctor.versions", unforeseen)
    plain = runner.invoke(app, ["doctor"])
    assert (plain.exit_code, plain.stdout) == (1, "")
    assert "KeyError: 'a fault of ours'" in plain.stderr
    assert "--debug" in plain.stderr
    assert "Traceback" not in plain.stderr
    for arguments, variables in (
        (["--debug", "doctor"], {}),
        (["doctor", "--debug"], {}),
        (["doctor"], {"ATTRACTOR_DEBUG": "1"}),
    ):
        told = runner.invoke(app, arguments, env=variables)
        assert told.exit_code == 1
        assert "Traceback" in told.stderr
        assert "in unforeseen" in told.stderr
    assert "Traceback" not in runner.invoke(app, ["doctor"], env={"ATTRACTOR_DEBUG": "0"}).stderr


def test_debug_shows_where_wrong_use_was_found_and_keeps_its_status():
    result = runner.invoke(app, ["fit", "nothing", "--debug"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "no system is called 'nothing'" in result.stderr


@pytest.mark.slow
def test_json_is_one_document_and_errors_do_not_disturb_it(tmp_path):
    listed = runner.invoke(app, ["reproduce", "--list", "--json"])
    assert len(json.loads(listed.stdout)) > 30
    wrong = runner.invoke(app, ["solve", str(tmp_path), "--json"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    again = runner.invoke(app, ["reproduce", "--list"])  # the console speaks again
    assert "stepnet-table1" in again.stdout
    assert max(map(len, again.stdout.splitlines())) <= 80


def test_json_of_a_solve_is_what_the_solver_gives(tmp_path):
    pytest.importorskip("matplotlib")
    import torch

    from attractor import HybridSolver

    result = runner.invoke(
        app, ["solve", "pretrained:henon-heiles", "--u0", "0.1,0,0,0.2", "--t-end", "5", "--out", str(tmp_path), "--json"]
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    u0 = torch.tensor([[0.1, 0.0, 0.0, 0.2]], dtype=torch.float64)
    wanted = HybridSolver.from_pretrained("henon-heiles").solve(u0, 5.0, guard=True).final
    assert found["final"] == wanted.tolist()
    assert Path(found["states"]).exists()
    assert found["lost"] == []


def test_tables_in_pipes_have_no_lines(monkeypatch):
    assert terminal.make_table("a").box is None
    monkeypatch.setattr(terminal.console, "_force_terminal", True)
    assert terminal.make_table("a").box is not None


@pytest.mark.slow
def test_the_list_of_experiments_is_whole_in_a_pipe():
    found = runner.invoke(app, ["reproduce", "--list"])
    assert found.exit_code == 0
    assert "…" not in found.output
    assert "Table 1, all rows" in found.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--u0", "nan,1,0,0"], "is not finite; give a state that a trajectory can begin from"),
        (["--out", "no folder.txt"], "is a file; give another folder"),
    ],
)
def test_what_cannot_be_solved_or_written_is_told_before_anything_is_computed(
    arguments, told, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no folder.txt").write_text("kept")
    found = runner.invoke(app, ["solve", "pretrained:elastic-pendulum", *arguments])
    assert found.exit_code == 2
    assert told in found.output
    assert (tmp_path / "no folder.txt").read_text() == "kept"


def test_a_file_is_no_folder_of_a_solver(tmp_path):
    (tmp_path / "own.py").write_text("")
    found = runner.invoke(app, ["solve", str(tmp_path / "own.py")])
    assert found.exit_code == 2
    assert "own.py is a file; give the folder that attractor fit has written" in found.output


def test_completion_is_there():
    result = runner.invoke(app, ["--help"])
    assert "--install-completion" in result.output
    variables = {
        "_ATTRACTOR_COMPLETE": "complete_bash",
        "COMP_WORDS": "attractor tra",
        "COMP_CWORD": "1",
    }
    shown = runner.invoke(app, [], prog_name="attractor", env=variables)
    assert "trajectories" in shown.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_cleanly(number, status, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def sample(n, generator): ...\n"
        "def rate(t, u): ...\n"
        "pathlib.Path('begun').touch()\n"
        "time.sleep(60)\n"
    )
    # As from a shell: a process that ignores SIGINT would hand that down.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from attractor.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "fit", "slow.py:rate"], cwd=tmp_path, env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    out, told = process.communicate(timeout=60)
    code = process.returncode
    assert (code if code >= 0 else 128 - code) == status  # as a shell counts a death by signal
    assert out == ""
    assert "Traceback" not in told
    assert told.strip() == ("Interrupted." if number == signal.SIGINT else "")
