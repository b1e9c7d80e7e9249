"""The types that a user's own type checker sees, with mypy's strict options (given in the files)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import attractor

ROOT = Path(__file__).parents[1]


def test_the_package_says_that_it_is_typed():
    assert (Path(attractor.__file__).parent / "py.typed").exists()


@pytest.mark.slow
def test_a_user_s_program_is_checked():
    """What is right passes; each wrong line is found, for the reason that it names."""
    pytest.importorskip("mypy")
    files = [f"tests/typing/{name}.py" for name in ("user", "wrong")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = re.findall(r"^(tests/typing/.*?):(\d+): error: .*\[(.*)\]$", done.stdout, re.MULTILINE)
    lines = (ROOT / files[1]).read_text().splitlines()
    wanted = [
        (files[1], str(i), line.split("  # ")[1]) for i, line in enumerate(lines, 1) if "  # " in line
    ]
    assert len(wanted) == 4
    assert found == wanted, done.stdout + done.stderr
