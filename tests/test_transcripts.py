"""What docs/cli.md shows is what the commands answer. `python -m tests.test_transcripts` writes it anew."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs/cli.md"
BLOCK = re.compile(r"```console\n\$ (.*)\n((?:.*\n)*?)```")
MISTAKES = {
    "out/fitt/solver does not exist": "give the folder that attractor fit has written",
    "has 2 numbers": "a state of ElasticPendulum has 4",
    "unstable for Diffusion(alpha=0.7)": "take 2 times as many steps with dt=0.5",
    "timm is missing": "pip install 'attractor[vision]'",
    "no system is called 'elastic-pendulm'": "did you mean 'elastic-pendulum'?",
}


def answer(command: str, folder: Path) -> tuple[int, str]:
    """Status and output of a command in a folder with the page's files, and without timm."""
    (folder / "net.py").write_text(
        re.search(r"```python\n# net.py\n(.*?)```", PAGE.read_text(), re.S)[1]
    )
    (folder / "without/timm").mkdir(parents=True, exist_ok=True)
    (folder / "without/timm/__init__.py").write_text("raise ImportError('as if it were not installed')")
    first, *rest = shlex.split(command)
    assert first == "attractor"
    variables = {
        **os.environ,
        "PYTHONPATH": str(folder / "without"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }
    done = subprocess.run(
        [sys.executable, "-m", "attractor", *rest], cwd=folder, env=variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def wrapped(text: str) -> str:
    lines = [
        textwrap.fill(line, 80, break_long_words=False, break_on_hyphens=False)
        if len(line) > 80
        else line
        for line in text.splitlines()
    ]
    return "".join(f"{line}\n" for line in lines)


BLOCKS = BLOCK.findall(PAGE.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_page_shows_what_the_command_answers(command, shown, tmp_path):
    status, told = answer(command, tmp_path)
    assert shown == wrapped(told)
    assert "Traceback" not in told
    assert status == (0 if command == "attractor" else 2)
    if status:
        assert any(what in told and help in told for what, help in MISTAKES.items())


def test_the_page_shows_all_five_mistakes():
    page = " ".join(PAGE.read_text().split())
    for what, help in MISTAKES.items():
        assert what in page
        assert help in page


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        shown = lambda m: f"```console\n$ {m[1]}\n{wrapped(answer(m[1], Path(place))[1])}```"
        PAGE.write_text(BLOCK.sub(shown, PAGE.read_text()))
