"""Nothing that is read from a file is ever run: no pickle, no torch.load, no eval, no exec."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "benchmarks", "experiments", "examples")
NEVER = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "allow_pickle",
}
CALLS = {"eval", "exec"}  # not as methods: model.eval() is another thing


def offences(source):
    """Line and name of all that could run what it reads; strings and comments may name it."""
    tokens = [
        t
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type in (tokenize.NAME, tokenize.OP)
    ]
    names = [t.string for t in tokens]
    for i, t in enumerate(tokens):
        before, after = names[i - 1] if i else "", names[i + 1] if i + 1 < len(names) else ""
        builtin = t.string in CALLS and before not in (".", "def") and after == "("
        loads = t.string in ("load", "save") and names[max(0, i - 2) : i] == ["torch", "."]
        if t.string in NEVER or builtin or loads:
            yield t.start[0], t.string


def test_no_file_of_ours_runs_what_it_reads():
    suspect = re.compile("|".join([*NEVER, *CALLS, r"torch\s*\.\s*(load|save)"]))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if suspect.search(path.read_text())  # few are; reading tokens takes time
        for line, name in offences(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from dill import loads", "x = torch.load(path)", "y = eval(text)", "exec (text)",
     "np.load(p, allow_pickle=True)", "torch . save(x, y)", "import joblib as j"],
)  # fmt: skip
def test_the_search_finds_them(line):
    assert list(offences(line))


@pytest.mark.parametrize(
    "line", ["model.eval()", "# no pickle", "'eval(x)'", "def exec(x): ...", "checkpoint.load(f)"]
)
def test_the_search_leaves_others_alone(line):
    assert not list(offences(line))
