"""Every Python block of README and docs runs, every doctest holds, every number has its result file."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import attractor

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [m.name for m in pkgutil.walk_packages(attractor.__path__, "attractor.")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, f"{page.name}:\n{block}", "exec"), names)


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module):
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # kernels are written in it, and nothing needs them
            raise
        pytest.skip("triton is not installed")
    assert doctest.testmod(found).failed == 0


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(example)])
    exec(compile(example.read_text(), str(example), "exec"), {"__name__": "__main__"})


def test_files_that_readers_look_for():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", ".ci/run"):
        assert (ROOT / name).stat().st_size > 0
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


def test_linked_files_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_constraints_pin_versions_without_addresses():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line), line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_numbers_are_those_of_the_result_files(page):
    from benchmarks.pages import filled

    assert filled(page.read_text()) == page.read_text()
