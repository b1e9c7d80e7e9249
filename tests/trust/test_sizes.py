"""Small files and large numbers: an error in seconds that names the size and the limit."""

import json
import os
import time

import pytest
import torch
from typer.testing import CliRunner

import attractor as at
from attractor import jobs
from attractor.bench import attention
from attractor.cli import app
from attractor.cli.network_names import parse
from attractor.core import Scheme, Splitting
from attractor.ode import FineData, HybridSolver, make_trajectories, pretrained, serialization
from attractor.report import runs
from attractor.storage import limits
from attractor.train.tensors import read_json, read_tensors
from benchmarks.damage import sealed

DEEP = "[" * 900 + "]" * 900


@pytest.fixture(autouse=True)
def no_long_wait():
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 20


def outcome(*command):
    result = CliRunner().invoke(app, [str(word) for word in command])
    assert "not expected" not in result.output, result.output
    return result.exit_code, " ".join(result.output.split())


# ---- schemes


@pytest.fixture
def solver(tmp_path):
    loaded = HybridSolver.load(pretrained.folder("elastic-pendulum"))
    return loaded.save(tmp_path / "solver")


@pytest.mark.parametrize("coefficient", ["1e30000000", "1e-30000000", "1E3_0000000", "1" * 5000])
def test_a_coefficient_of_a_scheme_is_bounded(solver, coefficient):
    path = solver / "config.json"
    config = json.loads(path.read_text())
    config["scheme"]["a"][1][0] = coefficient
    path.write_text(json.dumps(config))
    sealed(solver)
    with pytest.raises(at.CheckpointError, match=r"the (coefficient|text) '1.* at most 400"):
        HybridSolver.load(solver)


def test_a_tableau_is_bounded():
    primes = [p for p in range(10**6, 10**6 + 4000) if all(p % q for q in range(2, 1001))]
    with pytest.raises(ValueError, match=r"common denominator .* more than 2,048 binary digits"):
        Scheme("x", [[0] * i for i in range(128)], [f"1/{p}" for p in primes[:128]], [0] * 128, 1)
    for make in (
        lambda: Scheme("x", [[]] * 100_000, [0] * 100_000, [0] * 100_000, 1),
        lambda: Splitting("x", [0] * 100_000, [0] * 100_000, 1),
    ):
        with pytest.raises(ValueError, match="at most 128 stages, and this one has 100,000"):
            make()


def test_schemes_of_the_library_and_small_coefficients_are_within_the_bounds():
    for scheme in at.core.tableaus.ALL.values():
        saved = json.loads(json.dumps(serialization.scheme_to_json(scheme)))
        assert serialization.scheme_from_json(saved) == scheme
    assert Scheme("x", [["1e-300"]], ["1", "0"], [0, "1e-300"], 1).order == 1


# ---- fine data


def test_a_manifest_that_claims_many_shards(tmp_path):
    data = make_trajectories(
        at.systems.Lorenz(), tmp_path, trajectories=2, dt=0.1, horizon=0.2, fine_dt=0.1, shard_size=1
    )
    for trajectories, told in (
        (10**7, "10,000,000 files"),
        (10**400, "of more than 300 digits"),
        (90_000, "lacks 89998"),
    ):
        manifest = {**data.manifest, "plan": {**data.manifest["plan"], "trajectories": trajectories}}
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(at.CheckpointError, match=told):
            FineData.open(tmp_path)


def test_a_manifest_that_is_too_long_is_not_gone_on_with(tmp_path):
    (tmp_path / "manifest.json").write_text("[" + " " * 2**20 + "]")
    with pytest.raises(at.CheckpointError, match="1,048,578 bytes, and at most 1,048,576 are read"):
        make_trajectories(
            at.systems.Lorenz(), tmp_path, trajectories=1, dt=0.1, horizon=0.1, fine_dt=0.1
        )


# ---- the hub


def test_the_configuration_of_a_network_is_bounded(tmp_path):
    pytest.importorskip("huggingface_hub")
    from attractor.integrations import hub

    hub.network("resnet_cifar", depth=11, width=4).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = path.read_text()
    hub.load(tmp_path)
    path.write_text(content + " " * 2**20)
    with pytest.raises(at.CheckpointError, match=r"config.json has .* at most 1,048,576 are read"):
        hub.load(tmp_path)
    path.write_text(content.rstrip()[:-1] + f', "deep": {DEEP}}}')
    with pytest.raises(at.CheckpointError, match="more than 64 levels"):
        hub.load(tmp_path)


# ---- JSON


@pytest.mark.parametrize("levels", [65, 900, 200_000])
def test_deep_json_is_refused_by_every_reader(tmp_path, levels):
    path = tmp_path / "deep.json"
    path.write_text('{"rows": ' + "[" * levels + "]" * levels + "}")
    told = "more than 64 levels of nested JSON"
    with pytest.raises(ValueError, match=told):
        limits.read_json(path)
    with pytest.raises(at.CheckpointError, match=told):
        read_json(path, 10**6)
    with pytest.raises(ValueError, match=told):
        runs.find(path)
    code, said = outcome("report", path, "--out", tmp_path / "page.html")
    assert (code, told in said) == (2, True)
    text = "[" * levels
    assert parse(text) == text  # an option that is not JSON is text


def test_sixty_levels_are_read(tmp_path):
    assert limits.parse_json("[" * 60 + "]" * 60, "x")
    (tmp_path / "a").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert limits.read_json_lines(tmp_path / "a") == [{"a": 1}, {"a": 2}]


def test_a_long_file_is_not_read(tmp_path):
    path = tmp_path / "cpu.json"
    with path.open("wb") as file:
        file.truncate(10**10)  # without a byte on the disk
    code, said = outcome("report", path, "--out", tmp_path / "page.html")
    assert (code, "has 10,000,000,000 bytes, and at most 16,777,216 are read" in said) == (2, True)


# ---- memory


@pytest.mark.parametrize(
    "command",
    [
        "solve pretrained:elastic-pendulum --batch 999999999999",
        "solve pretrained:elastic-pendulum --batch 1000 --t-end 90000000",
        "compare pretrained:elastic-pendulum --batch 999999999999",
        "fit lorenz --dt 0.1 --horizon 1 --trajectories 999999999999",
        "fit lorenz --dt 0.1 --horizon 1 --width 99999999",
        "tune lorenz --error 1e-6 --horizon 1 --batch 999999999999",
        "trajectories lorenz --dt 0.1 --horizon 1 --trajectories 999999999999 --shard-size 999999999999",
        "probe attractor:resnet_cifar -o depth=11 --size 99999999",
        "probe attractor:resnet_cifar -o depth=11 -o width=99999999",
        "fit spring-mass -o n=99999999999 --dt 0.1 --horizon 1",
        "trajectories lorenz --dt 0.1 --horizon 1 --workers 99999999",
    ],
)
def test_what_does_not_fit_into_memory_is_refused(tmp_path, command):
    code, said = outcome(*command.split(), "--out", tmp_path / "out")
    assert code == 2, said
    assert "GiB, and " in said
    assert "of memory are free; use " in said


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("probe attractor:resnet_cifar -o depth=900000002", "depth = 900000002 must be a whole number"),
        ("probe attractor:vit -o depth=900000002", "of at least 1 and at most 10,000"),
        ("fit pendulum-chain -o links=99999999 --dt 0.1 --horizon 1", "at least 1 and at most 10,000"),
        ("reproduce attns-theorem51 --threads 99999999", "threads = 99999999 must be from 1 to 1,024"),
        ("reproduce attns-theorem51 --budget nan", "Invalid value for '--budget'"),
        ("bench --what causal --seed 99999999999999999999", "Invalid value for '--seed'"),
        ("trajectories lorenz --dt 0.1 --horizon 1 --seed -99999999999999999999", "value for '--seed'"),
    ],
)
def test_numbers_without_a_useful_meaning_are_refused(tmp_path, command, told):
    """Before, layers were made for hours, and OpenMP ended the process because of its threads."""
    code, said = outcome(*command.split(), "--out", tmp_path / "out")
    assert (code, told in said) == (2, True), said


def test_files_with_holes_are_not_read_into_memory(tmp_path, monkeypatch):
    """They take no space on the disk, and any in memory."""
    job = jobs.Job("attractor.jobs.job:power", {"exponent": 2})
    list(jobs.keep(job, [1], tmp_path / "job"))
    (artifact,) = (tmp_path / "job").glob("1.*.json")
    tensors = tmp_path / "x.safetensors"
    header = b'{"x":{"dtype":"U8","shape":[1000000000000],"data_offsets":[0,1000000000000]}}'
    tensors.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(artifact, 10**12)
    os.truncate(tensors, 8 + len(header) + 10**12)
    with pytest.raises(ValueError, match=r"artifact .* GiB of memory are free; remove it"):
        list(jobs.keep(job, [1], tmp_path / "job"))
    with pytest.raises(at.CheckpointError, match=r"tensors of .* GiB of memory are free; use a machine"):
        read_tensors(tensors)


@pytest.mark.parametrize(
    "error",
    [MemoryError("an array"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")],
)
def test_a_full_memory_is_no_unexpected_error(monkeypatch, error):
    def full(path):
        raise error

    monkeypatch.setattr(runs, "find", full)
    code, said = outcome("report", "x", "--out", "y.html")
    assert (code, "The memory is full; use smaller sizes" in said) == (2, True)


def test_lengths_of_bench_that_do_not_fit_into_memory():
    with pytest.raises(ValueError, match=r"GiB of memory are free; use fewer tokens"):
        attention.measure("causal", 10**11, 1)


def test_more_files_than_a_folder_holds(tmp_path):
    many = "trajectories lorenz --dt 0.1 --horizon 1 --trajectories 999999999999 --shard-size 1"
    code, said = outcome(*many.split(), "--out", tmp_path / "out")
    assert (code, "at most 100,000; use a larger shard_size" in said) == (2, True)


def test_memory_is_looked_at_only_where_it_matters(monkeypatch):
    monkeypatch.setattr(limits, "free_memory", lambda device=None: 2**30)
    limits.check_memory("Zeros", 2**28, "use fewer")
    limits.check_memory("Zeros", 2**30, "use fewer")
    with pytest.raises(ValueError, match=r"Zeros take 2.0 GiB, and 1.0 GiB of memory are free; use f"):
        limits.check_memory("Zeros", 2**31, "use fewer")
    monkeypatch.setattr(limits, "free_memory", lambda device=None: None)
    limits.check_memory("Zeros", 2**80, "use fewer")


def test_free_memory_is_known_here():
    free = limits.free_memory()
    assert free is None or free > 2**20
    assert limits.free_memory("meta") is None


def test_the_table_of_solve_is_as_it_was(tmp_path):
    code, said = outcome(
        "solve", "pretrained:elastic-pendulum", "--batch", 2, "--t-end", 0.2, "--out", tmp_path
    )
    assert code == 0, said
    head, *lines = (tmp_path / "states.csv").read_text().splitlines()
    assert head == "trajectory,t,u0,u1,u2,u3"
    rows = [[float(x) for x in line.split(",")] for line in lines]
    solver = HybridSolver.load(pretrained.folder("elastic-pendulum"))
    states = solver.rate.sample(2, torch.Generator().manual_seed(1), torch.float64)
    solved = solver.solve(states, 0.2)
    order = [(k, i) for k in range(2) for i in range(3)]
    assert rows == [[k, solved.t[i].item(), *solved.u[i, k].tolist()] for k, i in order]


def test_tune_estimates_its_reference():
    with pytest.raises(
        ValueError, match=r"horizon = 300000: the reference .* would take about .* use a"
    ):
        at.tune(
            at.systems.HarmonicOscillator(), error=1e-4, horizon=3e5, batch=10, compile=False, budget=1.0
        )
