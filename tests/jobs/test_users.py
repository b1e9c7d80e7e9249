"""What is built on jobs: comparisons, experiments and the commands."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import attractor as at
from attractor.cli import app
from attractor.jobs.naming import named
from attractor.ode.compare_saved import compare_all
from attractor.ode.comparison import Comparison
from attractor.reproduce import Experiment, Scale, best, load, merge, run
from attractor.reproduce.results import path_of

QUICK = dict(horizon=1.0, batch=10, schemes=["rk4"], compile=False, peers=False)
EXAMPLE = Experiment(
    name="attns-example", paper="attns", place="Table 0", claim="b is more than a.",
    task="tests.jobs.test_users:task", arms={"a": {"value": 1.0}, "b": {"value": 2.0}},
    scales={"smoke": Scale(judged=False), "cpu": Scale(seeds=(0, 1, 2))}, metric="value", better="higher",
    numbers={"a": 1.0}, judge=best("b"),
)  # fmt: skip


def task(config, context):
    if "lacks" in config:
        raise FileNotFoundError(f"no folder {config['lacks']}")
    return {"metrics": {"value": config["value"] + 0.1 * context.seed}}


@pytest.fixture(scope="module")
def solvers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("solvers")
    places = {}
    for name, width in (("small", 8), ("large", 16)):
        options = dict(dt=0.5, horizon=2.0, width=width, trajectories=20, correction="attns")
        places[name] = at.fit(at.systems.Logistic(growth=2.0), **options).save(folder / name)
    return places


def same(one, other):
    """But for times."""
    plain = lambda c: [(p.method, p.setting, p.error, p.rate_calls) for p in (c.hybrid, *c.points)]
    return plain(one) == plain(other)


@pytest.mark.slow
def test_comparisons_of_many_solvers_are_kept(solvers, tmp_path):
    first = dict(compare_all({"small": solvers["small"]}, tmp_path / "one", **QUICK))
    both = dict(compare_all(solvers, tmp_path / "one", **QUICK))
    assert both["small"] == first["small"]  # its times as well: it is not made again
    assert both["large"].hybrid.error != both["small"].hybrid.error
    apart = dict(compare_all(solvers, tmp_path / "two", engine="processes", workers=1, **QUICK))
    assert all(same(apart[name], both[name]) for name in solvers)
    direct = at.compare(at.HybridSolver.load(solvers["small"]), **QUICK)
    assert same(direct, both["small"])
    assert Comparison.from_json(json.loads(direct.save(tmp_path).read_text())) == direct
    with pytest.raises(ValueError, match="another job"):
        dict(compare_all(solvers, tmp_path / "one", **{**QUICK, "batch": 11}))
    with pytest.raises(TypeError, match="rate must be a function of a module or a file"):
        dict(compare_all(solvers, tmp_path / "three", rate=lambda t, u: u, **QUICK))


OWN = """
import torch

def rate(t, u):
    return {factor} * u * (1 - u)

def sample(n, generator=None):
    return 0.1 + 0.8 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
"""


@pytest.mark.slow
def test_comparisons_of_other_solvers_and_equations_never_mix(solvers, tmp_path):
    """In one folder: solvers of one name, horizons of their own, an equation whose file has changed."""
    both = lambda **changes: dict(
        compare_all({"a": solvers["small"]}, tmp_path / "one", **{**QUICK, **changes})
    )
    first = both()["a"]
    other = dict(compare_all({"a": solvers["large"]}, tmp_path / "one", **QUICK))["a"]
    assert other.hybrid.error != first.hybrid.error
    assert both()["a"] == first
    with pytest.raises(ValueError, match="another job"):
        both(horizon=2.0)
    own = lambda t: dict(
        compare_all({"a": solvers["small"]}, tmp_path / "two", **{**QUICK, "horizon": {"a": t}})
    )["a"]
    found = {t: own(t) for t in (1.0, 2.0)}
    assert [own(t) for t in found] == list(found.values())
    assert found[1.0].about["horizon"] == 1.0 != found[2.0].about["horizon"]
    path, options = (
        tmp_path / "own.py",
        dict(dt=0.5, horizon=2.0, width=8, trajectories=20, correction="attns"),
    )

    def compared(factor, folder):
        path.write_text(OWN.format(factor=factor))
        named.cache_clear()
        rate, sample = (named(f"{path}:{name}") for name in ("rate", "sample"))
        if not folder.exists():
            at.fit(rate, sample=sample, **options).save(folder)
        return dict(compare_all({"a": folder}, tmp_path / "three", rate=rate, sample=sample, **QUICK))[
            "a"
        ]

    first = compared(2.0, tmp_path / "own")
    assert compared(2.0, tmp_path / "own") == first
    with pytest.raises(ValueError, match="holds another job"):
        compared(2.0001, tmp_path / "own")


arms = st.dictionaries(
    st.sampled_from("abc"), st.fixed_dictionaries({"value": st.integers(0, 3)}), min_size=1, max_size=2
)


@given(
    arms,
    arms,
    st.lists(st.tuples(st.booleans(), st.sampled_from(["smoke", "cpu"])), min_size=2, max_size=4),
)
def test_two_experiments_in_one_folder_never_mix(tmp_path_factory, one, other, calls):
    """Of one name, or of another; each call has the numbers of its own arms."""
    folder = tmp_path_factory.mktemp("results")
    for first, scale in calls:
        own = one if first else other
        experiment = replace(EXAMPLE, arms=own, numbers={}, judge=best(next(iter(own))))
        found = run(experiment, scale, folder=folder)
        for arm, config in own.items():
            wanted = [config["value"] + 0.1 * seed for seed in experiment.scale(scale).seeds]
            assert found.values(arm) == wanted
        assert load(experiment, scale, folder).runs == found.runs


def test_compare_command_with_several_solvers(solvers, tmp_path):
    options = ["--no-compile", "--no-peers", "--batch", "10", "--horizon", "1", "--scheme", "rk4"]
    places = [str(place) for place in solvers.values()]
    found = CliRunner().invoke(app, ["compare", *places, *options, "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert found.output.count("m* =") == 2
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_trajectories_command_and_a_fit_from_its_data(tmp_path):
    call = lambda *words: CliRunner().invoke(app, [*words, "--out", str(tmp_path / words[0])])
    make = [
        "trajectories",
        "logistic",
        "--dt",
        "0.5",
        "--horizon",
        "2",
        "--trajectories",
        "30",
        "--shard-size",
        "10",
    ]
    half = call(*make, "--part", "1/2")
    assert "1 of 3 shards, of other parts, are still missing" in half.output, half.output
    whole = call(*make)
    data = at.make_trajectories(
        at.systems.Logistic(), tmp_path / "own", trajectories=30, dt=0.5, horizon=2.0, shard_size=10
    )
    assert data.hash in whole.output
    for bad, message in ((["--part", "3/2"], "such as 3/16"), (["--engine", "rya"], "not one of here")):
        wrong = call(*make, *bad)
        assert wrong.exit_code == 2
        assert message in wrong.output


def test_arms_in_parts_are_merged(tmp_path):
    for k in (1, 2):
        run(EXAMPLE, "cpu", folder=tmp_path / f"{k}", part=f"{k}/2")
    others = [path_of(tmp_path / f"{k}", EXAMPLE.name, "cpu") for k in (1, 2)]
    assert [sum(map(len, json.loads(p.read_text())["runs"].values())) for p in others] == [3, 3]
    merged = merge(EXAMPLE, "cpu", tmp_path / "all", others)
    assert not merged.missing()
    assert merged.values("b") == run(EXAMPLE, "cpu").values("b")


@pytest.mark.slow
def test_a_budget_and_missing_data_in_processes(tmp_path):
    assert len(run(EXAMPLE, "cpu", folder=tmp_path, budget=-1.0, workers=2).missing()) == 6
    absent = Experiment(**{**vars(EXAMPLE), "arms": {"a": {"value": 1.0, "lacks": "train"}, "b": {"value": 2.0}},
                           "missing": "ImageNet is not here"})  # fmt: skip
    with pytest.raises(FileNotFoundError, match="ImageNet is not here: shard a, 0: no folder train"):
        run(absent, "cpu", folder=tmp_path, engine="processes", workers=1)


@pytest.mark.slow
def test_arms_and_comparisons_on_ray(solvers, tmp_path):
    pytest.importorskip("ray")
    on_ray = dict(engine="ray", address="local")
    found = run(EXAMPLE, "cpu", folder=tmp_path / "arms", **on_ray)
    assert found.values("b") == [2.0, 2.1, 2.2]
    apart = dict(compare_all(solvers, tmp_path / "ray", **on_ray, **QUICK))
    here = dict(compare_all(solvers, tmp_path / "here", **QUICK))
    assert all(same(apart[name], here[name]) for name in solvers)
