"""What cannot end well is refused before the work, and a disk or a name is no unforeseen error."""

import errno
import json
import os
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import attractor as at
from attractor.cli import app
from attractor.ode import HybridSolver, compare, pretrained
from attractor.ode.compare_saved import compare_all
from attractor.report import figures
from attractor.storage import files, limits
from benchmarks.damage import sealed

SOLVE = ("solve", "pretrained:elastic-pendulum", "--batch", 2, "--t-end", 0.2)
PROBE = ("probe", "attractor:resnet_cifar", "-o", "depth=11", "--inputs", 2)


def outcome(*command):
    result = CliRunner().invoke(app, [str(word) for word in command])
    assert "not expected" not in result.output, result.output
    return result.exit_code, " ".join(result.output.split())


def test_compare_knows_its_schemes_before_it_computes(tmp_path):
    solver, lines = HybridSolver.load(pretrained.folder("elastic-pendulum")), []
    with pytest.raises(ValueError, match="no scheme is called 'nosuch'"):
        compare.compare(solver, horizon=1.0, schemes=("rk4", "nosuch"), progress=lines.append)
    assert not lines
    with pytest.raises(ValueError, match="no scheme is called 'nosuch'"):
        next(compare_all({}, tmp_path, schemes=("nosuch",)))


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no files, even of root")


@needs_proc
def test_fit_looks_at_its_folder_before_it_computes():
    lines = []
    with pytest.raises(ValueError, match=r"out = /proc/fit: /proc cannot be written to \(.*\); give"):
        at.fit(at.systems.Lorenz(), dt=0.1, horizon=1.0, out="/proc/fit", progress=lines.append)
    assert not lines


@needs_proc
@pytest.mark.parametrize(
    "command",
    [
        ("fit", "lorenz", "--dt", 0.1, "--horizon", 1),
        SOLVE,
        PROBE,
        ("reproduce", "attns-theorem51"),
        ("compare", "pretrained:elastic-pendulum"),
    ],
)
def test_every_command_looks_at_its_folder_before_it_computes(command):
    code, said = outcome(*command, "--out", "/proc/x")
    assert (code, "--out /proc/x: /proc cannot be written to" in said) == (2, True)


def test_looking_at_a_folder_leaves_nothing(tmp_path):
    limits.check_folder("out =", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is a file; give another folder"):
        limits.check_folder("out =", tmp_path / "file" / "b")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="link is a link to nothing; give another folder"):
        limits.check_folder("out =", tmp_path / "link" / "b")


def test_a_full_disk_is_found_out_before_the_work(tmp_path, monkeypatch):
    class Full:
        def __init__(self, dir):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(limits, "TemporaryFile", Full)
    with pytest.raises(ValueError, match=r"cannot be written to \(No space left on device\)"):
        limits.check_folder("out =", tmp_path)


@pytest.mark.parametrize("command", [SOLVE, PROBE])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_when_results_are_written(tmp_path, monkeypatch, command, number):
    def fails(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    code, said = outcome(*command, "--out", tmp_path / "out")
    assert code == 2
    assert os.strerror(number) in said
    assert "Results could not be written; free space, or give another folder with --out." in said


def test_a_result_that_is_a_link_is_no_unexpected_error(tmp_path):
    (tmp_path / "states.csv").symlink_to(tmp_path / "precious")
    code, said = outcome(*SOLVE, "--out", tmp_path)
    assert (code, "states.csv is a symbolic link, and only plain files are written" in said) == (2, True)


def test_commands_write_their_results_one_after_the_other(tmp_path, monkeypatch):
    """The files in a folder are those of one command."""
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.05)
    for command in (SOLVE, PROBE):
        with files.lock_folder(tmp_path):
            code, said = outcome(*command, "--out", tmp_path)
        assert (code, f"{tmp_path} is in use: another process or thread" in said) == (2, True)
        assert not list(tmp_path.iterdir())


def test_files_of_others_do_not_control_the_terminal(tmp_path):
    config = (
        HybridSolver.load(pretrained.folder("elastic-pendulum")).save(tmp_path / "s") / "config.json"
    )
    config.write_text(json.dumps({**json.loads(config.read_text()), "dt": {"\x1b[2J\x9b": 1}}))
    sealed(tmp_path / "s")
    code, said = outcome("solve", tmp_path / "s", "--out", tmp_path / "out")
    assert (code, "dt is an object with \\x1b[2J\\x9b" in said, "\x1b" in said) == (2, True, False)


def test_a_state_that_no_picture_can_hold(tmp_path):
    code, said = outcome(*SOLVE, "--u0", "1e308,0,0,0", "--out", tmp_path)
    assert code in (0, 1), said
    assert (tmp_path / "states.png").stat().st_size > 1000


OWN = """
import torch

horizon, dt = 0.4, 0.1

def rate(t, u):
    return -u

def sample(n, generator):
    return torch.rand(n, 1, generator=generator, dtype=torch.float64)
"""


@pytest.mark.parametrize("text", ["$\\frac$", "a$b", "$", "\\$\\frac$", "50 $ and $x^2$"])
def test_a_dollar_sign_in_a_name_is_no_mathematics(tmp_path, text):
    figure = figures.trajectories([0.0, 1.0], np.zeros((2, 1, 2)), figures.literal(text))
    figures.write(figure, tmp_path / "a.png")


@pytest.mark.slow
def test_a_file_with_dollar_signs_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$\\frac$.py").write_text(OWN)
    fit = ("fit", "$\\frac$.py:rate", "--trajectories", 20, "--width", 8, "--correction", "neurvec")
    code, said = outcome(*fit, "--out", "out")
    assert code == 0, said
    code, said = outcome("solve", "out/solver", "--rate", "$\\frac$.py:rate", "--out", "solved")
    assert code == 0, said
