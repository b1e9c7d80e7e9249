"""Experiments: runs are kept, resumed, merged and shared; verdicts say what the numbers say."""

import hashlib
import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
from typer.testing import CliRunner

from attractor.cli import app
from attractor.reproduce import (
    INCONCLUSIVE,
    NOT_RUN,
    SUPPORTED,
    Experiment,
    Results,
    Scale,
    Verdict,
    best,
    catalogue,
    find,
    from_file,
    gains,
    load,
    merge,
    run,
    runner,
    summary,
)  # fmt: skip
from attractor.reproduce import page as pages
from attractor.reproduce.effects import number
from attractor.reproduce.results import path_of
from attractor.reproduce.shelf import home

CALLS = []


def task(config, context):
    """Fails once where it is told to; else a number of arm and seed."""
    CALLS.append((config["value"], context.seed))
    if "lacks" in config:
        raise FileNotFoundError(f"no folder {config['lacks']}")
    mark = context.scratch / "half"
    begun = mark.exists()
    if config.get("interrupted") and not begun:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text("half way")
        raise KeyboardInterrupt
    value = config["value"] + 0.1 * context.seed
    return {
        "metrics": {
            "value": value,
            "resumed": float(begun),
            "nothing": math.nan,
            **config.get("more", {}),
        },
        "curves": {"x": [1, 2]},
    }


EXAMPLE = Experiment(
    name="attns-example", paper="attns", place="Table 0", claim="b is more than a.",
    task="tests.reproduce.test_reproduce:task",
    arms={"a": {"value": 1.0}, "b": {"value": 2.0, "more": {"own": 7.0}}},
    scales={"smoke": Scale(judged=False), "cpu": Scale(seeds=(0, 1, 2))}, metric="value", better="higher",
    numbers={"a": 1.0}, judge=best("b"), others=("nothing", "own"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_calls():
    calls().clear()


def calls():
    """Of the module that runs import by its name, which need not be this one."""
    return import_module("tests.reproduce.test_reproduce").CALLS


def results(**values):
    runs = {
        arm: {s: {"metrics": {"x": v}} for s, v in enumerate(given)} for arm, given in values.items()
    }
    return Results("e", "cpu", "x", list(values), [0, 1, 2], runs)


def test_runs_are_kept_and_not_made_again(tmp_path):
    first = run(EXAMPLE, "cpu", folder=tmp_path)
    count = len(calls())
    assert first.complete
    assert first.values("b") == [2.0, 2.1, 2.2]
    assert not first.missing()
    again = run(EXAMPLE, "cpu", folder=tmp_path)
    assert len(calls()) == count
    assert again.runs == first.runs
    run(EXAMPLE, "cpu", folder=tmp_path, arms=["a"], again=True)
    assert len(calls()) == count + 3


def test_a_run_says_how_it_was_made(tmp_path):
    made = run(EXAMPLE, "cpu", folder=tmp_path).runs["a"][0]
    assert made["config"] == {"value": 1.0}
    assert made["versions"].keys() == {"attractor", "torch", "numpy", "python"}
    assert made["seconds"] >= 0
    written = json.loads(path_of(tmp_path, "attns-example", "cpu").read_text())
    assert written["runs"]["a"]["0"]["metrics"]["nothing"] is None  # JSON has no NaN
    assert math.isnan(load(EXAMPLE, "cpu", tmp_path).mean("a", "nothing"))


def test_another_configuration_does_not_count(tmp_path):
    run(EXAMPLE, "cpu", folder=tmp_path)
    changed = replace(EXAMPLE, arms={**EXAMPLE.arms, "a": {"value": 5.0}})
    assert load(changed, "cpu", tmp_path).missing() == [("a", 0), ("a", 1), ("a", 2)]
    assert run(changed, "cpu", folder=tmp_path).mean("a") == pytest.approx(5.1)


def test_an_interrupted_run_goes_on(tmp_path):
    broken = replace(EXAMPLE, arms={"a": {"value": 1.0}, "b": {"value": 2.0, "interrupted": True}})
    with pytest.raises(KeyboardInterrupt):
        run(broken, "cpu", folder=tmp_path, seeds=[0])
    assert load(broken, "cpu", tmp_path).runs["a"].keys() == {0}  # what was done before is there
    found = run(broken, "cpu", folder=tmp_path, seeds=[0])
    assert found.mean("b", "resumed") == 1.0
    assert not list(tmp_path.rglob("half"))


def test_nothing_goes_on_from_a_run_of_another_configuration(tmp_path):
    """Nor from a run that is to be made again."""
    arms = {"b": {"value": 2.0, "interrupted": True}}
    broken = replace(EXAMPLE, arms=arms, numbers={})
    with pytest.raises(KeyboardInterrupt):
        run(broken, "cpu", folder=tmp_path, seeds=[0])
    changed = replace(broken, arms={"new": {"value": 5.0}, "b": {"value": 3.0}})
    found = run(changed, "cpu", folder=tmp_path, seeds=[0])
    assert [found.mean(arm, "resumed") for arm in found.arms] == [0.0, 0.0]
    with pytest.raises(KeyboardInterrupt):  # it is interrupted where it begins
        run(broken, "cpu", folder=tmp_path, seeds=[0], again=True)


def reader(config, context):
    return {
        "metrics": {"value": float((context.folder / "x").read_text())},
        "data": reader_data(config, context),
    }


def reader_data(config, context):
    return {"x": hashlib.sha256((context.folder / "x").read_bytes()).hexdigest()}


def test_runs_on_other_data_are_not_returned(tmp_path):
    reading = replace(
        EXAMPLE, task="tests.reproduce.test_reproduce:reader", arms={"a": {}, "b": {"c": 1}}, numbers={}
    )
    for value in (1, 2):
        (tmp_path / f"data-{value}").mkdir()
        (tmp_path / f"data-{value}" / "x").write_text(str(value))
    one, other = (
        partial(run, reading, "cpu", folder=tmp_path, data=tmp_path / f"data-{v}") for v in (1, 2)
    )
    assert one(arms=["a"]).mean("a") == 1.0
    with pytest.raises(
        ValueError, match=r"a, seed 0, is in the results of .*, but was run on other data"
    ):
        other()
    with pytest.raises(
        ValueError, match=r"give another folder for the results \(--out\), or again=True"
    ):
        other(arms=["a"])
    assert one(arms=["a"]).mean("a") == 1.0
    assert other(arms=["a"], again=True).mean("a") == 2.0
    assert other().mean("b") == 2.0
    (tmp_path / "data-2" / "x").unlink()  # results can be read where the data are not
    assert other().mean("b") == 2.0


def where(config, context):
    return {"metrics": {"value": float(context.cache.parent == context.scratch.parent)}}


def test_a_machine_without_the_folder_keeps_all_in_a_temporary_one(tmp_path):
    config = {
        "task": "tests.reproduce.test_reproduce:where", "arms": {"a": {}}, "device": "cpu",
        "scratch": {"a": str(tmp_path / "not" / "here")}, "cache": "/not/here", "data": None,
        "tell": None,
    }  # fmt: skip
    assert runner.arm(config, ("a", 0))["metrics"]["value"] == 1.0


def test_no_verdict_on_seeds_of_different_data(tmp_path):
    files = replace(EXAMPLE, data=("cifar10",))
    found = run(files, "cpu", folder=tmp_path)
    for seed, made in found.runs["a"].items():
        made["data"] = {"cifar10, train": "a part" if seed else "all"}
    assert files.verdict(found) == Verdict(INCONCLUSIVE, "seeds were run on different data: a")
    assert EXAMPLE.verdict(found).direction == SUPPORTED  # which draws its data from its seed


def test_a_file_that_is_no_result_is_named(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cpu.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"other/cpu.json is no file of results: the content lacks 'experiment'"
    ):
        load(EXAMPLE, "cpu", tmp_path)


def test_a_budget_begins_nothing_more(tmp_path):
    found = run(EXAMPLE, "cpu", folder=tmp_path, budget=-1.0)
    assert not calls()
    assert len(found.missing()) == 6
    assert EXAMPLE.verdict(found) is None


@pytest.mark.slow
def test_several_processes_give_the_same(tmp_path):
    assert run(EXAMPLE, "cpu", folder=tmp_path / "a").values("b") == run(
        EXAMPLE, "cpu", folder=tmp_path / "b", workers=2
    ).values("b")


def test_files_of_several_days_are_merged(tmp_path):
    run(EXAMPLE, "cpu", folder=tmp_path / "a", seeds=[0])
    run(EXAMPLE, "cpu", folder=tmp_path / "b", seeds=[1, 2])
    other = path_of(tmp_path / "b", EXAMPLE.name, "cpu")
    assert not merge(EXAMPLE, "cpu", tmp_path / "a", [other]).missing()
    run(EXAMPLE, "smoke", folder=tmp_path / "b")
    with pytest.raises(ValueError, match="scale smoke"):
        merge(EXAMPLE, "cpu", tmp_path / "a", [path_of(tmp_path / "b", EXAMPLE.name, "smoke")])
    other.write_text("{")
    with pytest.raises(ValueError, match="no file of results"):
        merge(EXAMPLE, "cpu", tmp_path / "a", [other])


def test_merging_takes_no_run_away(tmp_path):
    """Neither one of another configuration nor a second one of the same replaces what is there."""
    run(EXAMPLE, "cpu", folder=tmp_path / "here")
    run(EXAMPLE, "cpu", folder=tmp_path / "there")
    other = path_of(tmp_path / "there", EXAMPLE.name, "cpu")
    whole = other.read_text()
    kept = json.loads(whole)
    kept["runs"]["a"]["1"]["digest"] = "of another configuration"
    kept["runs"]["a"]["1"]["metrics"]["value"] = 9.9
    other.write_text(json.dumps(kept))
    found = merge(EXAMPLE, "cpu", tmp_path / "here", [other])
    assert not found.missing()
    assert found.values("a") == pytest.approx([1.0, 1.1, 1.2])
    # the other way round, the current one takes the place of the stale one
    current = path_of(tmp_path / "here", EXAMPLE.name, "cpu")
    assert merge(EXAMPLE, "cpu", tmp_path / "there", [current]).values("a") == pytest.approx(
        [1.0, 1.1, 1.2]
    )
    other.write_text(whole.replace('"value": 2.1,', '"value": 2.15,'))
    assert merge(EXAMPLE, "cpu", tmp_path / "here", [other]).values("b") == pytest.approx(
        [2.0, 2.1, 2.2]
    )


def test_no_verdict_on_what_is_not_a_number_or_has_no_seed_in_common():
    apart = results(a=[1, 2], b=[2, 3])
    apart.runs["b"] = {5: apart.runs["b"][0]}
    assert EXAMPLE.verdict(replace(apart, scale="cpu")) is None
    lost = replace(results(a=[1, 2], b=[2, math.nan]), scale="cpu")
    verdict = EXAMPLE.verdict(lost)
    assert verdict.direction == INCONCLUSIVE
    assert "not finite for b" in verdict.why


def test_runs_are_shared_where_the_configuration_is_the_same(tmp_path):
    run(EXAMPLE, "cpu", folder=tmp_path)
    arms = {"one": {"value": 1.0}, "other": {"value": 7.0}}
    figure = replace(EXAMPLE, name="attns-figure", arms=arms, numbers={})
    assert load(figure, "cpu", tmp_path).missing() == [("other", s) for s in (0, 1, 2)]


def test_what_cannot_be_run_says_so(tmp_path):
    absent = replace(
        EXAMPLE, arms={"a": {"value": 1.0, "lacks": "train"}, "b": {"value": 2.0}},
        missing="ImageNet is not here; give its folder with --data",
    )  # fmt: skip
    with pytest.raises(FileNotFoundError, match=r"ImageNet is not here; give .*: no folder train"):
        run(absent, "cpu", folder=tmp_path)
    assert absent.verdict(None) == Verdict(NOT_RUN, absent.missing)
    there = replace(EXAMPLE, missing=absent.missing)  # whoever has the data gets a verdict
    assert there.verdict(run(there, "cpu", folder=tmp_path)).direction == SUPPORTED


def test_mistakes_in_an_experiment():
    with pytest.raises(ValueError, match="numbers has"):
        replace(EXAMPLE, numbers={"c": 1.0})
    with pytest.raises(ValueError, match="paper 'My paper' is not a short name"):
        replace(EXAMPLE, paper="My paper")
    with pytest.raises(ValueError, match="an experiment of 'mine' must begin with 'mine-'"):
        replace(EXAMPLE, paper="mine")
    with pytest.raises(ValueError, match="no scale 'gpu'; its scales are smoke, cpu"):
        EXAMPLE.scale("gpu")
    with pytest.raises(ValueError, match="no arm 'x'; its arms are a, b"):
        run(EXAMPLE, "cpu", arms=["x"])
    with pytest.raises(ValueError, match="no experiment is called"):
        find("stepnet-tabel1")


def test_a_verdict_of_few_seeds_is_one_so_far(tmp_path):
    assert pages.worded(EXAMPLE, run(EXAMPLE, "cpu", folder=tmp_path, seeds=[0])) == INCONCLUSIVE
    assert pages.worded(EXAMPLE, load(EXAMPLE, "cpu", tmp_path)) == f"{INCONCLUSIVE} so far"
    assert pages.worded(EXAMPLE, None) == ""


def test_the_page_shows_the_largest_scale_that_can_be_judged(tmp_path):
    two = replace(EXAMPLE, scales={**EXAMPLE.scales, "gpu": Scale(seeds=(0,))})
    run(two, "gpu", folder=tmp_path, arms=["a"])
    assert pages.largest(two, tmp_path).scale == "gpu"  # there is nothing else
    run(two, "cpu", folder=tmp_path, seeds=[0])
    assert pages.largest(two, tmp_path).scale == "cpu"
    run(two, "gpu", folder=tmp_path)
    assert pages.largest(two, tmp_path).scale == "gpu"


def test_a_picture_of_runs_that_are_gone_goes_too(tmp_path, monkeypatch):
    from attractor.report.figures import plt

    def picture(results):
        return plt.figure(figsize=(1, 1))

    drawn = replace(EXAMPLE, picture=picture)
    monkeypatch.setattr(pages, "catalogue", lambda: {drawn.name: drawn})
    run(drawn, "cpu", folder=tmp_path)
    page = tmp_path / "page.md"
    made, *_ = pages.write_page(page, tmp_path)
    assert made.exists()
    assert made.name in page.read_text()
    longer = replace(drawn, arms={arm: {**c, "epochs": 9} for arm, c in drawn.arms.items()})
    monkeypatch.setattr(pages, "catalogue", lambda: {drawn.name: longer})
    pages.write_page(page, tmp_path)
    assert not made.exists()
    assert made.name not in page.read_text()


def test_no_verdict_waits_for_arms_beside_the_claim(tmp_path):
    arms = {**EXAMPLE.arms, "c": {"value": 5.0}}
    beside = replace(EXAMPLE, arms=arms, judge=gains(["b"], over="a"), extra=("c",))
    run(beside, "cpu", folder=tmp_path, arms=["a", "b"])
    found = load(beside, "cpu", tmp_path)
    assert len(found.missing()) == 3
    assert pages.worded(beside, found) == SUPPORTED  # and not "so far"
    assert pages.state(beside, tmp_path) == "cpu, 6 of 9"
    with pytest.raises(ValueError, match="extra has"):
        replace(EXAMPLE, extra=("d",))


def test_runs_of_a_larger_scale_are_told_before_they_are_complete(tmp_path):
    scales = {**EXAMPLE.scales, "cpu": Scale(seeds=(0,), note="A small one."), "gpu": Scale()}
    two = replace(EXAMPLE, scales=scales, note="A note.")
    run(two, "cpu", folder=tmp_path)
    run(two, "gpu", folder=tmp_path, arms=["a"])
    section = pages.section(two, tmp_path, tmp_path)
    assert "Of scale gpu there are so far: a 1." in section
    assert "A note. A small one." in section


def test_errors_have_geometric_means():
    errors = replace(EXAMPLE, logarithmic=True)
    found = results(a=[1e-4, 1e-2], b=[1e-3, 1e40])
    assert found.typical("a") == pytest.approx(1e-3)
    assert found.factor("a") == pytest.approx(10 ** (2 / 2**0.5))
    assert summary.cell(errors, found, "a") == "0.001 ×÷ 26"
    assert summary.cell(errors, found, "b") == "lost at 1 of 2 seeds"
    assert summary.cell(errors, results(a=[1e40], b=[2e-5]), "a") == "lost"
    assert summary.cell(errors, results(a=[1e40], b=[2e-5]), "b") == "2e-05"
    assert math.isnan(results(a=[math.nan], b=[1]).typical("a"))


def test_numbers_on_the_page():
    assert number(20748.29) == "20,748"
    assert number(1.77e7 + 0.5) == "1.77e+07"
    assert summary.mean_text(92.742, 0.131) == "92.74 ± 0.13"
    assert summary.mean_text(1.2345e-9, 1e-11) == "1.23e-09 ± 1e-11"
    assert summary.mean_text(5.0, None) == "5"


@pytest.mark.slow
def test_the_page_in_the_docs_is_that_of_the_results():
    docs = home().parents[1] / "docs"
    made = pages.page(home(), docs / "results")
    assert (docs / "results.md").read_text() == made, "attractor reproduce --page docs/results.md"
    claims = pages.claims_page(home())
    assert (docs / "claims.md").read_text() == claims, "attractor reproduce --page docs/results.md"


def test_the_catalogue_is_whole():
    for name, experiment in catalogue().items():
        assert name == experiment.name
        assert "smoke" in experiment.scales
        assert not experiment.scales["smoke"].judged
        assert experiment.claim.endswith(".")
        for scale in experiment.scales:
            for arm in experiment.arms_of(scale):
                experiment.config(arm, scale)


def test_command_line(tmp_path, monkeypatch):
    for place in ("shelf.", "", "page."):
        monkeypatch.setattr(f"attractor.reproduce.{place}catalogue", lambda: {EXAMPLE.name: EXAMPLE})
    call = lambda *words: CliRunner().invoke(app, ["reproduce", *words, "--out", str(tmp_path)])
    found = call("attns-example", "--scale", "cpu")
    assert found.exit_code == 0, found.output
    assert "supported: the least lead is that over a: 1 [1, 1]" in found.output
    assert "attns-example" in call("--list").output
    assert (
        json.loads(call("attns", "--scale", "cpu", "--json").stdout)[0]["verdict"]["direction"]
        == SUPPORTED
    )
    assert call("--page", str(tmp_path / "results.md")).exit_code == 0
    page = (tmp_path / "results.md").read_text()
    assert "| a | 1 | 1.10 ± 0.10 | 3 | – | – |" in page  # not finite, and of another arm alone
    assert "| b |  | 2.10 ± 0.10 | 3 | – | 7 |" in page
    assert "**supported**: the least lead" in page
    assert call().exit_code == 2
    assert call("attns-exampel").exit_code == 2


OWN = """
from attractor.reproduce import Experiment, Scale, best


def solve(config, context):
    return {"metrics": {"error": config["size"] + 0.1 * context.seed}}


EXPERIMENT = Experiment(
    name="mine-first", paper="mine", place="Table 1", claim="b is worse.",
    task="own_experiment_of_a_test:solve", arms={"a": {"size": 1.0}, "b": {"size": 2.0}},
    scales={"smoke": Scale(seeds=(0, 1))}, metric="error", better="higher", numbers={"a": 1, "b": 3},
    judge=best("b"),
)
"""


def test_an_experiment_from_outside_the_repository(tmp_path, monkeypatch):
    path = tmp_path / "own_experiment_of_a_test.py"
    path.write_text(OWN)
    out = tmp_path / "out"
    monkeypatch.setattr("sys.path", [*sys.path])
    found = CliRunner().invoke(app, ["reproduce", str(path), "--out", str(out), "--json"])
    assert found.exit_code == 0, found.output
    (made,) = json.loads(found.stdout)
    assert (made["experiment"], made["path"]) == ("mine-first", str(out / "mine_first" / "smoke.json"))
    assert made["verdict"]["direction"] == SUPPORTED
    assert made["verdict"]["size"] == "smaller: 50 % [50, 50]"
    assert not load(from_file(path), "smoke", out).missing()
    assert pages.titles({"mine-first": from_file(path)}) == {"mine": "mine"}


def test_files_that_declare_no_experiment(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(FileNotFoundError, match="pass a Python file that declares EXPERIMENT"):
        from_file(tmp_path / "nothing.py")
    with pytest.raises(ValueError, match="no experiment is called"):
        find(str(tmp_path / "nothing.py"))
    (tmp_path / "declares_nothing_at_all.py").write_text("x = 1")
    with pytest.raises(ValueError, match="declares no EXPERIMENT = Experiment"):
        from_file(tmp_path / "declares_nothing_at_all.py")
    (tmp_path / "json.py").write_text(OWN)
    with pytest.raises(ValueError, match="json is already the name of"):
        from_file(tmp_path / "json.py")
    missing = CliRunner().invoke(app, ["reproduce", str(tmp_path / "nothing.py")])
    assert missing.exit_code == 2


def test_experiments_use_public_names_only():
    """What a file outside the repository could not use, those of the project do not use either."""
    private = re.compile(r"(?:import|\.)\s*_[a-z]\w*")
    for path in sorted(home().parent.glob("*.py")):
        found = private.findall(path.read_text())
        assert not found, f"{path.name}: {found}"


def test_charts_of_small_data_do_not_bear_the_name_of_the_paper_s():
    leak = find("pde-leak")
    small = run(leak, "smoke", arms=["standard"])
    assert pages.chart_title(leak, small) == (
        "pde-leak at scale smoke, on generated data in place of the paper's data"
    )
    assert pages.chart_title(leak, load(leak, "gpu", home())) == leak.place
    tricks = find("stepnet-fig8")
    assert "on digits in place of" in pages.chart_title(tricks, load(tricks, "cpu", home()))
    assert pages.chart_title(EXAMPLE, load(EXAMPLE, "cpu", home())) == EXAMPLE.place


def test_every_table_and_figure_has_a_level_of_completeness():
    levels = pages.coverage(catalogue(), home())
    assert sum(len(items) for own in levels.values() for items in own.values()) == 34
    assert levels["pde"]["not at all"] == ["Fig. 6", "Fig. 11", "Fig. 14", "Fig. 15"]
    assert {"table2", "table3"} == set(levels["stepnet"]["not at all"])


def test_claims_are_short():
    """A paper's claims fit on two screens: a row each, and no cell that would make it a paragraph."""
    page = (home().parents[1] / "docs" / "claims.md").read_text()
    for part in page.split("\n## ")[1:4]:
        rows = [line for line in part.splitlines() if line.startswith("| ")][2:]
        assert 10 < len(rows) <= 40
        shown = [re.sub(r"\]\([^)]*\)", "", row) for row in rows]
        assert max(map(len, shown)) < 320
