"""The command line: what is not known suggests the nearest, nothing is written elsewhere, no code by itself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import attractor
from attractor.cli import app
from attractor.cli import equation_names as equations

runner = CliRunner()
COMMANDS = sorted(c.name or c.callback.__name__ for c in app.registered_commands)


def said(*arguments):
    """The exit code, and all that was printed, without boxes and line breaks."""
    result = runner.invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelt_command_suggests_the_nearest(command):
    code, text = said(command[:-1] + "_")
    assert code == 2
    assert f"'{command}'" in text


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["--vers"], "--version"),
        (["trajectories", "lorenz", "--trajectory", "3"], "--trajectories"),
        (["doctor", "--devise", "cpu"], "--device"),
        (["fit", "lorenz", "--horizn", "1"], "--horizon"),
        (["solve", "x", "--evry", "1"], "--every"),
        (["compare", "x", "--bach", "1"], "--batch"),
        (["probe", "attractor:vit", "--imges", "x"], "--images"),
        (["bench", "--token", "8"], "--tokens"),
        (["reproduce", "--scal", "smoke"], "--scale"),
    ],
)
def test_a_misspelt_option_suggests_the_nearest(arguments, nearest):
    code, text = said(*arguments)
    assert code == 2
    assert nearest in text


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["fit", "lorentz"], "did you mean 'lorenz'?"),
        (["fit", "pendulum-chain", "-o", "link=3"], "did you mean 'links'?"),
        (["fit", "lorenz", "--dt", "0.1", "--horizon", "1", "--scheme", "rk44"], "did you mean 'rk4'?"),
        (["bench", "--dtype", "float23"], "did you mean 'float32'?"),
        (["probe", "attractor:resnet_cifr"], "did you mean 'resnet_cifar'?"),
        (["probe", "attractor:resnet_cifar", "-o", "gate=step"], "did you mean 'stepnet'?"),
        (
            ["probe", "attractor:resnet_cifar", "-o", "depth=11", "--data", "digit"],
            "did you mean 'digits'?",
        ),
    ],
)
def test_a_misspelt_name_suggests_the_nearest(arguments, nearest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = said(*arguments)
    assert code == 2
    assert nearest in text


NEAR = {
    "scheme": (attractor.get_scheme, "rk44", "rk4"),
    "correction": (attractor.corrections.get_correction, "atns", "attns"),
    "gate": (attractor.gates.get_gate, "stepnt", "stepnet"),
    "pde": (attractor.attention.pdes.get_pde, "difusion", "diffusion"),
    "equation": (equations.find, "spring-mas", "spring-mass"),
}


@pytest.mark.parametrize("kind", NEAR)
def test_names_in_the_library_do_the_same(kind):
    look_up, wrong, right = NEAR[kind]
    with pytest.raises(ValueError, match=f"did you mean '{right}'"):
        look_up(wrong)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([
    "fit", "solve", "probe", "bench", "doctor", "--help", "--out", "--seed", "-1", "nan", "lorenz", "--dt", "1e400", "",
    "-o", "links=", "=", "a=b", "../..", "--u0", "1,,2", "--device", "cuda:99", "--batch", "0", "--every", "\0", "--json", "é",
    "nowhere.py:rate", "--rate", "no.such:thing", "--tokens", "-5", "--what", "nothing",
]), max_size=5))  # fmt: skip
def test_no_arguments_bring_a_traceback(tmp_path_factory, arguments):
    """Anything typed ends with a message: usage errors are 2."""
    heavy = arguments[:1] in (["doctor"], ["bench"]) and len(arguments) < 2
    if heavy or (arguments[:2] == ["fit", "lorenz"] and "--dt" not in arguments):
        return
    code, text = said(*arguments)
    assert code in (0, 1, 2), text
    assert "Traceback" not in text


# What is written


OWN = "import torch\n\ndef rate(t, u):\n    return -u\n\ndef sample(n, generator):\n    return torch.rand(n, 1, generator=generator)\n"


@pytest.mark.slow
def test_nothing_is_written_outside_the_output_folder(tmp_path):
    """fit, solve and probe in a process of their own, whose home and folder are watched."""
    work, home, out = (tmp_path / name for name in ("work", "home", "out"))
    for folder in (work, home):
        folder.mkdir()
    (work / "own.py").write_text(OWN)
    run = f"""
import sys
sys.dont_write_bytecode = True
from typer.testing import CliRunner
from attractor.cli import app
for arguments in (
    ["fit", "own.py:rate", "--dt", "0.5", "--horizon", "1", "--width", "8", "--trajectories", "8", "--correction",
     "attns", "--out", {str(out / "fit")!r}],
    ["solve", {str(out / "fit" / "solver")!r}, "--rate", "own.py:rate", "--t-end", "1", "--out", {str(out / "solve")!r}],
    ["probe", "attractor:resnet_cifar", "-o", "depth=11", "--noise", "2", "--out", {str(out / "probe")!r}],
):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (arguments, result.output, result.exception)
"""
    environment = {
        "HOME": str(home),
        "PATH": "",
        "MPLCONFIGDIR": str(tmp_path / "matplotlib"),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([sys.executable, "-c", run], cwd=work, env=environment, check=True)
    assert sorted(p.name for p in work.iterdir()) == ["own.py"]
    assert [p for p in home.rglob("*") if p.is_file()] == []
    assert sorted(p.name for p in out.iterdir()) == ["fit", "probe", "solve"]
    assert (out / "solve" / "states.csv").exists()


# Whose code is run


def test_code_is_imported_by_name_in_few_places():
    """Every place that turns a text into code; a new one has to be looked at, and put here."""
    known = {
        "__init__.py": {"module"},  # names of the library's own
        "cli/equation_names.py": {"name"},  # what the user typed as MODULE:FUNCTION
        "cli/network_names.py": {"'attractor.integrations.timm'", "name"},  # packages named in the file
        "common/lazy.py": {"full"},  # submodules of packages that list them
        "ode/solver_hub.py": {"'attractor.integrations.hub'"},
        "reproduce/tasks/__init__.py": {"module"},  # of a table in that file
        "reproduce/shelf.py": {
            "f'{folder.__name__}.{path.stem}'",
            "path.stem",  # of a file that the user passed to `attractor reproduce`
            "'experiments'",
            "'attractor.experiments'",
        },
        "jobs/cluster.py": {"'ray'"},
        "jobs/naming.py": {"place"},  # of a job that this process, or the one that sent it, has made
    }
    found: dict[str, set[str]] = {}
    home = Path(attractor.__file__).parent
    for path in home.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in ("import_module", "__import__"):
                    found.setdefault(str(path.relative_to(home)), set()).add(ast.unparse(node.args[0]))
    assert found == known


def test_a_saved_solver_names_code_but_does_not_bring_it(tmp_path):
    """The rate's name in a saved folder is for people: loading never imports it."""
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    system = attractor.systems.HarmonicOscillator()

    def rate(t, u):
        return system(t, u)

    rate.__qualname__ = "trap:rate"
    correction = attractor.corrections.Linear(2, dtype=torch.float64)
    attractor.HybridSolver(rate, "rk4", correction, 0.1).save(tmp_path / "solver")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(attractor.CheckpointError, match="pass it as rate="):
            attractor.HybridSolver.load(tmp_path / "solver")
        assert attractor.HybridSolver.load(tmp_path / "solver", rate).dt == 0.1
    finally:
        sys.path.remove(str(tmp_path))
    assert "trap" not in sys.modules
