"""The source distribution and the wheel work in an environment that holds nothing else of the project."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from attractor import __version__

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*command: object, folder: Path) -> str:
    """Return the output of a command that must succeed, without the variables that find this checkout."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment with a wheel that was built from the source distribution, beside our dependencies."""
    folder = tmp_path_factory.mktemp("packaging")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, folder=ROOT)
    with tarfile.open(folder / f"attractor-{__version__}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"attractor-{__version__}"
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, folder=source)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    (wheel,) = folder.glob("*.whl")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        wheel,
        folder=folder,
    )
    # Paths in a .pth file are searched for packages, and not for further .pth files, of which one is that
    # of the editable installation.
    packages = run(python, "-c", "import site; print(site.getsitepackages()[0])", folder=folder).strip()
    Path(packages, "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder


def test_the_wheel_is_what_is_imported(environment):
    python = environment / "venv/bin/python"
    path = run(python, "-c", "import attractor; print(attractor.__file__)", folder=environment).strip()
    assert Path(path).is_relative_to(environment / "venv")


def test_the_wheel_holds_all_files_of_the_package(environment):
    (package,) = environment.glob("venv/lib/*/site-packages/attractor")
    for folder, names in ((ROOT / "src/attractor", "*"), (ROOT / "experiments", "*.py")):
        inside = package / "experiments" if folder.name == "experiments" else package
        files = [
            path for path in folder.rglob(names) if path.is_file() and "__pycache__" not in path.parts
        ]
        assert files
        assert [path for path in files if not (inside / path.relative_to(folder)).exists()] == []


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (["--version"], __version__),
        (["doctor"], "torch"),
        (["reproduce", "--list"], "pde-leak"),
        (["solve", "pretrained:elastic-pendulum", "--batch", "2", "--t-end", "2"], "out"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_commands_of_the_wheel(environment, command, output):
    assert output in run(environment / "venv/bin/attractor", *command, folder=environment)


def test_the_demo_of_the_wheel(environment):
    run(environment / "venv/bin/attractor", "demo", "--out", "demo", folder=environment)
    assert (environment / "demo/report.html").stat().st_size > 10_000
