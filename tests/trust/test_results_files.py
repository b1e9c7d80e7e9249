"""Results files of strangers: no run breaks a folder, and no string becomes markup on the page."""

import json
from dataclasses import replace

import pytest

from attractor.report.runs import reproductions
from attractor.reproduce import load, merge, run
from attractor.reproduce import page as pages
from attractor.reproduce.results import fault, path_of
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
