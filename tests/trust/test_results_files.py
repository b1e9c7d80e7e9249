"""Results files of strangers: no run breaks a folder, and no string becomes markup on the page."""

import json
import shutil
from dataclasses import replace
from hashlib import sha256

import pytest

from attractor import CheckpointError, systems
from attractor.ode.tuning_sweep import Problem, tune_all
from attractor.report.runs import reproductions
from attractor.reproduce import load, merge, run
from attractor.reproduce import page as pages
from attractor.reproduce.results import fault, path_of
from attractor.storage.files import json_bytes
from tests.reproduce.test_reproduce import EXAMPLE


@pytest.fixture
def results(tmp_path):
    """Two folders of results, and a function that changes one run in the second."""
    run(EXAMPLE, "cpu", folder=tmp_path / "here", seeds=[0])
    run(EXAMPLE, "cpu", folder=tmp_path / "there")
    other = path_of(tmp_path / "there", EXAMPLE.name, "cpu")

    def change(**entries):
        content = json.loads(other.read_text())
        content["runs"]["b"]["2"] |= entries
        other.write_text(json.dumps(content))
        return other

    return change


BAD = [
    ({"digest": 7}, "digest is 7; it must be a text"),
    ({"metrics": {}}, "its metrics lack 'value'"),
    (
        {"metrics": {"value": "1"}},
        "metrics.value is the text '1'; it must be a number, or it must be null",
    ),
    ({"metrics": {"value": True}}, "metrics.value is true; it must be a number"),
    ({"seconds": "long"}, "seconds is the text 'long'; it must be a number"),
    ({"seconds": -1}, "seconds is -1; it must be a number of at least 0"),
    ({"device": ["cpu"]}, "device is a list of 1 items; it must be a text"),
    ({"device": "x" * 201}, "of 201 characters; it must be a text of at most 200 characters"),
    ({"curves": [1]}, "curves is a list of 1 items; it must be an object"),
]


@pytest.mark.parametrize(("entries", "message"), BAD)
def test_merge_validates_before_it_writes(tmp_path, results, entries, message):
    path = path_of(tmp_path / "here", EXAMPLE.name, "cpu")
    before, bad = path.read_bytes(), results(**entries)
    run(EXAMPLE, "cpu", folder=tmp_path / "good", seeds=[1])
    good = path_of(tmp_path / "good", EXAMPLE.name, "cpu")
    with pytest.raises(ValueError, match=r"cannot be merged: .*arm 'b' and seed 2; remove") as error:
        merge(EXAMPLE, "cpu", tmp_path / "here", [good, bad])
    assert message in str(error.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("entry", ["digest", "metrics", "seconds", "device"])
def test_a_damaged_run_is_not_merged_and_does_not_break_its_folder(tmp_path, results, entry):
    bad = damaged(results(), entry)
    with pytest.raises(ValueError, match=f"the content lacks '{entry}'"):
        merge(EXAMPLE, "cpu", tmp_path / "here", [bad])
    assert load(EXAMPLE, "cpu", tmp_path / "there").missing() == [("b", 2)]
    assert not run(EXAMPLE, "cpu", folder=tmp_path / "there").missing()  # it is made again
    assert not merge(EXAMPLE, "cpu", tmp_path / "here", [bad]).missing()


@pytest.mark.parametrize("seed", ["x", "../../x", "01", "1_0", "\u0661", "9" * 400, " 1", "1.0"])
def test_a_seed_is_an_integer_in_its_usual_form(tmp_path, results, seed):
    """Another form of a seed that is there would replace its run."""
    path = results()
    content = json.loads(path.read_text())
    content["runs"]["b"][seed] = content["runs"]["b"]["2"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"has the seed .*, which is no integer of 64 bits"):
        merge(EXAMPLE, "cpu", tmp_path / "here", [path])


def damaged(path, entry):
    content = json.loads(path.read_text())
    del content["runs"]["b"]["2"][entry]
    path.write_text(json.dumps(content))
    return path


def test_runs_that_are_there_have_no_fault():
    assert fault([]).startswith("the content is a list of 0 items; it must be an object")
    run = {"digest": "x", "metrics": {"a": 1, "b": None}, "seconds": 1.0, "device": "cpu"}
    assert fault(run, "a") is None


def test_a_results_file_names_an_experiment_and_no_file(tmp_path, results):
    """Reading results imports nothing, whatever they call their experiment."""
    trap = tmp_path / "trap.py"
    trap.write_text("raise SystemExit('imported')")
    path = results()
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"experiment": str(trap)}))
    with pytest.raises(ValueError, match="no experiment is called"):
        reproductions.read(path, "results")


def tuned(folder):
    problems = {"logistic": Problem(systems.Logistic(), 2.0)}
    return dict(tune_all(problems, folder, error=1e-3, batch=10, budget=0.0, compile=False))


@pytest.fixture(scope="module")
def first_sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    tuned(folder)
    return folder


@pytest.fixture
def sweep(tmp_path, first_sweep):
    """A function that replaces the kept result of a sweep of `tune`, with a true hash, and reads it."""
    folder = shutil.copytree(first_sweep, tmp_path / "a" / "sweep")
    (path,) = folder.glob("logistic*.json")

    def read(change):
        content = json_bytes(change(json.loads(path.read_text())))
        path.unlink()
        path.with_name(f"{path.name.split('.')[0]}.{sha256(content).hexdigest()[:16]}.json").write_bytes(
            content
        )
        return tuned(folder)

    return read


@pytest.mark.parametrize("name", ["../stranger", "{folder}/stranger"])
def test_a_kept_sweep_writes_no_files_of_other_names(tmp_path, sweep, name):
    """Before, a stranger's folder of results wrote any file anywhere when the sweep went on in it."""
    name = name.format(folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"files has the key .*; it may have tensors.safetensors"):
        sweep(lambda content: {**content, "files": {**content["files"], name: "YQ=="}})
    assert not list(tmp_path.rglob("stranger"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: [], "the content is a list of 0 items; it must be an object with"),
        (lambda content: {"failure": 7}, "failure is 7; it must be a text"),
        (lambda content: {**content, "files": [1]}, "files is a list of 1 items; it must be an object"),
        (lambda content: {**content, "files": dict.fromkeys(content["files"], "%")}, "not in base64"),
        (lambda content: {**content, "files": dict.fromkeys(content["files"], "")}, "manifest.json"),
    ],
)
def test_a_kept_sweep_is_validated(sweep, change, message):
    with pytest.raises(CheckpointError, match=message):
        sweep(change)


def test_strings_of_results_files_are_text_on_the_page(tmp_path, results, monkeypatch):
    script = "<script>alert(1)</script> [x](javascript:alert(1)) {raw}`html` ![i](x)\n\n# head"
    results(device=script, made_by=f"`{script}`")
    shown = replace(EXAMPLE, scales={"cpu": EXAMPLE.scales["cpu"]})
    monkeypatch.setattr(pages, "catalogue", lambda: {shown.name: shown})
    page = tmp_path / "page.md"
    pages.write_page(page, tmp_path / "there")
    text = page.read_text()
    assert "alert" in text  # it is shown
    parser = pytest.importorskip("markdown_it").MarkdownIt()
    found = [token for block in parser.parse(text) for token in (block, *(block.children or ()))]
    kinds = {token.type for token in found}
    assert not kinds & {"html_block", "html_inline", "image"}
    links = [token.attrs["href"] for token in found if token.type == "link_open"]
    assert not [link for link in links if not link.startswith("#") and link != "claims.md"]
    assert "<script" not in parser.render(text)
    assert script.split("\n")[0].split("`")[0] in "".join(token.content for token in found)
