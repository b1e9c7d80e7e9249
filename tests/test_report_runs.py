"""`attractor report`: small runs of every kind, and what their pages hold."""

import json
import re
import shutil
from html import unescape

import pytest
import torch
from typer.testing import CliRunner

from attractor.cli import app
from attractor.residual import resnet_cifar
from attractor.storage.files import write_json
from attractor.train import Recipe, train_seeds
from tests.browser import Browser, chromium

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")
from attractor.report import runs as kept

runner = CliRunner()
KINDS = {
    "fit": ["fit"], "compare/compare.json": ["comparison"], "compare": ["comparison"], "probe": ["probe"],
    "probe/profile": ["probe"], "training": ["training", "training"], "training/seed-0": ["training"],
    "bench.json": ["benchmark"], "fit/solver": ["fit"], "reproduce": ["reproduction"],
    "reproduce/attns_table6": ["reproduction"], "fit/fit.json": ["fit"],
}  # fmt: skip


def command(*arguments):
    result = runner.invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result


def printed(*arguments):
    """The one JSON document that a command prints."""
    return json.loads(command(*arguments, "--json").stdout)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A run of each kind, as its command or call writes it."""
    folder = tmp_path_factory.mktemp("out")
    small = ["--dt", "0.5", "--horizon", "4", "--width", "16", "--trajectories", "30", "--budget", "0"]
    told = printed("fit", "logistic", *small, "--out", folder / "fit")
    assert told["test"]["hybrid"]["error"] < told["test"]["plain rk4"]["error"]
    quick = ["--no-compile", "--no-peers", "--batch", "10", "--scheme", "heun", "--horizon", "4"]
    told = printed("compare", folder / "fit/solver", *quick, "--out", folder / "compare")
    assert {p["method"] for p in told["points"]} == {"rk4", "heun"}
    tiny = ["-o", "depth=29", "-o", "width=4", "--size", "8", "--inputs", "6"]
    told = printed("probe", "attractor:resnet_cifar", *tiny, "--out", folder / "probe")
    assert len(told["blocks"]) == 9
    few = ["--trajectories", "4", "--dt", "0.5", "--horizon", "1"]
    told = printed("trajectories", "logistic", *few, "--out", folder / "data")
    assert (told["trajectories"], told["missing"]) == (4, 0)
    data = [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))] * 2
    recipe = Recipe(epochs=2, batch=4, learning_rate=0.01, warmup=0.0)
    make = lambda: resnet_cifar(11, 4, width=2, in_channels=1)
    train_seeds(make, data, data, recipe, seeds=(0, 1), out=folder / "training", device="cpu")
    one = lambda ms, ratio: {"ms": ms, "peer_ms": ms / ratio, "ratio": ratio}
    rows = [
        {"kind": "causal", "tokens": t, "forward": one(2.0, 80 / t), "both": one(3.0, 1.5)}
        for t in (64, 128)
    ]
    about = {"device": "cpu", "torch": "2.13", "dtype": "float32", "ceilings": {"copy_gb_s": 5.0}}
    write_json(folder / "bench.json", {"command": "attractor bench", **about, "rows": rows})
    run = {
        "task": "t", "config": {}, "digest": "d", "metrics": {"off": 12.5}, "curves": {}, "seconds": 1.0,
        "device": "cpu", "versions": {"torch": "2.13"},
    }  # fmt: skip
    runs = {"spring-mass, states": {"0": run, "1": {**run, "metrics": {"off": 14.5}}}}
    file = {"format": 1, "experiment": "attns-table6", "scale": "smoke", "runs": runs}
    write_json(folder / "reproduce/attns_table6/smoke.json", file)
    return folder


def text(html):
    """What a reader sees of a page: no scripts, no tags."""
    bare = re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(script|style)>.*?</\1>", "", html))
    return " ".join(unescape(bare).split())


@pytest.mark.parametrize("place", KINDS)
def test_every_kind_is_found_by_its_files(out, place):
    assert [run.kind for run in kept.find(out / place)] == KINDS[place]


def test_numbers_are_those_of_the_run(out):
    (fit,) = kept.find(out / "fit")
    told = json.loads((out / "fit/fit.json").read_text())
    assert fit.numbers["new trajectories, hybrid"] == told["test"]["hybrid"]["error"]
    assert fit.numbers["new trajectories, plain"] == told["test"]["plain rk4"]["error"]
    assert (fit.settings["dt"], fit.settings["equation"]) == (0.5, "logistic")
    assert fit.settings["correction"]["width"] == 16
    assert fit.versions["torch"] == torch.__version__
    (compared,) = kept.find(out / "compare")
    assert compared.numbers["m*"] == json.loads((out / "compare/compare.json").read_text())["m_star"]
    (probe,) = kept.find(out / "probe")
    tns = json.loads((out / "probe/probe.json").read_text())["tns"]
    assert probe.numbers["TNS, step one"] == tns["one"]["trained"]
    seeds = kept.find(out / "training")
    summary = json.loads((out / "training/summary.json").read_text())
    assert [run.numbers["valid_accuracy"] for run in seeds] == summary["values"]
    assert [run.settings["seed"] for run in seeds] == [0, 1]
    (paper,) = kept.find(out / "reproduce")
    assert (paper.name, paper.numbers["runs"]) == ("attns-table6, smoke", 2)
    assert paper.command == "attractor reproduce attns-table6 --scale smoke"


@pytest.mark.parametrize(
    ("place", "shown", "plots"),
    [
        ("fit", ["mean square error of the fit", "plain rk4, half the step", "correction.width", "attractor"], 2),
        ("compare", ["the hybrid pays if m > m*", "hybrid dt 0.5", "heun", "rate.system", "Logistic"], 2),
        ("probe", ["TNS, step one", "layer2.0", "granularity"], 2),
        ("training", ["seed-0", "seed-1", "valid_accuracy", "learning_rate", "This run was started from Python", "Versions", "numpy"], 3),
        ("bench.json", ["forward.ratio", "1.25", "ceilings.copy_gb_s", "attractor bench"], 2),
        ("reproduce", ["spring-mass, states", "13.5 ± 1.4", "Verdict:", "--scale smoke"], 1),
    ],
)  # fmt: skip
def test_a_page_shows_configuration_versions_tables_pictures_and_commands(out, place, shown, plots):
    runs = kept.find(out / place)
    html = kept.page(runs).html()
    seen = text(html)
    for what in [*shown, "Configuration", "Repeat this run", "This page"]:
        assert what in seen, what
    assert html.count("attractorPlot(") - 1 == plots  # one is the function itself
    if any(run.versions for run in runs):
        assert "Versions" in seen


@pytest.mark.slow
def test_a_page_says_what_tns_is_silent_of(out, tmp_path):
    assert "TNS does not measure" not in text(kept.page(kept.find(out / "probe")).html())
    two_a_stage = ["-o", "depth=20", "-o", "width=4", "--size", "8", "--inputs", "6"]
    told = printed("probe", "attractor:resnet_cifar", *two_a_stage, "--out", tmp_path / "probe")
    assert told["tns"]["one"]["trained"] == 0 < told["tns_with_first"]["one"]["trained"]
    assert told["note"] in text(kept.page(kept.find(tmp_path / "probe")).html())


def test_runs_stand_side_by_side_and_differences_come_first(out, tmp_path):
    shutil.copytree(out / "fit", tmp_path / "narrow")
    config = tmp_path / "narrow/solver/config.json"
    config.write_text(config.read_text().replace('"width": 16', '"width": 8'))
    seen = text(kept.page([*kept.find(out / "fit"), *kept.find(tmp_path / "narrow")]).html())
    assert "2 runs" in seen
    assert "fit narrow correction.width 16 8" in seen  # below the names, before what is equal
    assert "fit: hybrid" in seen
    assert "narrow: plain rk4" in seen


def test_the_command_writes_one_page_and_json(out, tmp_path):
    page = tmp_path / "page.html"
    told = command(
        "report", out / "fit", out / "bench.json", "--out", page, "--title", "A < B", "--json"
    )
    found = json.loads(told.stdout)
    assert [run["kind"] for run in found["runs"]] == ["fit", "benchmark"]
    assert found["page"] == str(page)
    assert "<title>A &lt; B</title>" in page.read_text()
    assert page.stat().st_size < 8e6
    plain = command("report", out / "probe", "--out", page)
    assert f"Report: {page}" in plain.stdout


def test_what_is_no_run_gets_an_answer(out, tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "broken.json").write_text("{")
    for place, answer in (
        (out, f"there are runs in {out / 'compare'}, {out / 'fit'}, {out / 'probe'}"),
        (tmp_path, "it holds broken.json, notes.txt"),
        (tmp_path / "notes.txt", "is no file of a run; attractor fit, probe"),
        (tmp_path / "broken.json", "cannot be read as JSON"),
        (tmp_path / "nowhere", "give a file or folder of a run"),
    ):
        result = runner.invoke(app, ["report", str(place), "--out", str(tmp_path / "p.html")])
        assert result.exit_code == 2
        assert answer in result.stderr
        assert not (tmp_path / "p.html").exists()


def test_a_page_of_everything_opens_without_errors_and_asks_for_nothing(out, tmp_path):
    chromium()
    page = tmp_path / "page.html"
    command("report", *(out / k for k in ("fit", "compare", "probe", "training", "bench.json", "reproduce")),
            "--out", page)  # fmt: skip
    with Browser() as browser:
        for width, phone, dark in ((1280, False, False), (390, True, True)):
            browser.resize(width, 900, phone, dark)
            browser.open(page)
            browser.wait_for("document.querySelectorAll('.js-plotly-plot .main-svg').length > 20")
            assert browser.errors == []
            assert browser.requests == []
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            empty = (
                "[...document.querySelectorAll('.js-plotly-plot')].filter(p => !p.data.length).length"
            )
            assert browser.evaluate(empty) == 0
