import json
import subprocess
import sys
import time

import pytest
import torch

import attractor as at
from attractor.cli import equation_names as equations
from attractor.ode import FineData, make_trajectories, shards
from attractor.ode.manifest import WITNESS
from attractor.ode.trajectories import fine_trajectories
from attractor.storage import files

LORENZ = dict(trajectories=50, dt=0.1, horizon=1.0, fine_dt=0.005, shard_size=8)


OWN = """
import torch


def rate(t, u):
    return -u**3


def sample(n, generator):
    return torch.rand(n, 1, generator=generator, dtype=torch.float64)
"""


def make(folder, **change):
    return make_trajectories(at.systems.Lorenz(), folder, **{**LORENZ, **change})


def test_shards_hold_the_fine_solution(tmp_path):
    data = make(tmp_path)
    (first, *_), system = data.runs(), at.systems.Lorenz()
    assert [run.u.shape[1] for run in data.runs()] == [8] * 6 + [2]
    torch.testing.assert_close(
        first.u, fine_trajectories(system, first.u[0], 0.1, 10, 100), atol=1e-5, rtol=1e-5
    )
    assert FineData.open(tmp_path).hash == data.hash


@pytest.mark.slow
def test_workers_and_order_do_not_matter(tmp_path):
    one, two = make(tmp_path / "one"), make(tmp_path / "two", workers=2)
    assert one.hash == two.hash
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert make(tmp_path / "three").hash == one.hash
    finally:
        torch.set_num_threads(threads)
    assert make(tmp_path / "other", seed=1).hash != one.hash
    # A shard is reproduced from (seed, shard) alone: how many others there are is irrelevant.
    longer = make(tmp_path / "longer", trajectories=80).runs()
    assert torch.equal(longer[3].u, one.runs()[3].u)


@pytest.mark.slow
def test_interrupted_at_random_ten_times_and_resumed(tmp_path, monkeypatch):
    whole = make(tmp_path / "whole").hash
    chance = torch.Generator().manual_seed(1)
    honest = files.os.fsync

    def unreliable(handle):
        if torch.rand((), generator=chance) < 0.4:
            raise KeyboardInterrupt
        honest(handle)

    interruptions = 0
    while interruptions < 10:
        monkeypatch.setattr(files.os, "fsync", unreliable)
        try:
            make(tmp_path / "torn")
            for path in (tmp_path / "torn").iterdir():
                path.unlink()
        except KeyboardInterrupt:
            interruptions += 1
            with pytest.raises(at.CheckpointError):
                FineData.open(tmp_path / "torn")
    monkeypatch.setattr(files.os, "fsync", honest)
    assert make(tmp_path / "torn").hash == whole


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    code = (
        "import sys, attractor as at; from attractor.ode import make_trajectories\n"
        "print('ready', flush=True)\n"
        "make_trajectories(at.systems.Lorenz(), sys.argv[1], trajectories=60, dt=0.1, horizon=2.0, fine_dt=0.004,"
        " shard_size=4)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "killed"], stdout=subprocess.PIPE)
    process.stdout.readline()
    while len(list((tmp_path / "killed").glob("shard-*"))) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    how = dict(trajectories=60, dt=0.1, horizon=2.0, fine_dt=0.004, shard_size=4)
    done = len(list((tmp_path / "killed").glob("shard-*")))
    assert 3 <= done < 15
    made = []
    resumed = make_trajectories(at.systems.Lorenz(), tmp_path / "killed", **how, progress=made.append)
    assert len(made) == 15 - done
    assert resumed.hash == make_trajectories(at.systems.Lorenz(), tmp_path / "whole", **how).hash


@pytest.mark.slow
def test_parts_make_the_whole(tmp_path):
    whole = make(tmp_path / "whole").hash
    lines = []
    for part in ("2/3", "1/3"):
        data = make(tmp_path / "parts", part=part, progress=lines.append)
    assert lines == ["shard 1 of 2", "shard 2 of 2", "shard 1 of 3", "shard 2 of 3", "shard 3 of 3"]
    assert data.missing() == [2, 5]
    with pytest.raises(at.CheckpointError, match="lacks 2 of 7 shards"):
        FineData.open(tmp_path / "parts")
    assert make(tmp_path / "parts", part="3/3").hash == whole


@pytest.mark.slow
def test_functions_of_a_file_and_objects_go_to_processes(tmp_path):
    (tmp_path / "beside_own.py").write_text("POWER = 3\n")
    (tmp_path / "own.py").write_text("from beside_own import POWER\n" + OWN.replace("3", "POWER"))
    own = equations.find(f"{tmp_path}/own.py:rate")
    how = dict(trajectories=6, dt=0.1, horizon=0.2, fine_dt=0.05, shard_size=3)
    one = make_trajectories(own.rate, tmp_path / "one", sample=own.sample, **how)
    two = make_trajectories(own.rate, tmp_path / "two", sample=own.sample, workers=2, **how)
    assert one.hash == two.hash
    functions = {"rate": own.rate, "sample": own.sample, "parameters": None}
    job = shards._job(functions, one.plan, None, one.manifest["code"], "ray")
    assert json.loads(json.dumps(job.config))["rate"] == {"function": f"{tmp_path}/own.py:rate"}
    assert shards._told(at.systems.SpringMass(n=3)) == {
        "system": "SpringMass",
        "options": {"n": 3, "seed": 0},
    }
    nameless = lambda t, u: -u
    assert shards._told(nameless) is nameless  # which engine ray then refuses


def test_a_worker_with_other_code_or_arithmetic_is_refused(tmp_path):
    data = make(tmp_path)
    functions = {"rate": at.systems.Lorenz(), "sample": None, "parameters": None}
    job = shards._job(functions, data.plan, None, data.manifest["code"], "ray")
    assert shards.make_shard(job.config, 3) == (tmp_path / "shard-00003.safetensors").read_bytes()
    for key in ("code", "arithmetic"):
        with pytest.raises(ValueError, match=f"the {key} of this worker is not that of the caller"):
            shards.make_shard({**job.config, key: "another"}, 3)


@pytest.mark.slow
def test_ray_makes_the_same_files(tmp_path):
    pytest.importorskip("ray")
    assert make(tmp_path / "ray", engine="ray", address="local").hash == make(tmp_path / "one").hash


@pytest.mark.slow
def test_fractions_are_nested_and_noise_is_reproducible(tmp_path):
    data = make(tmp_path)
    half, all_ = data.runs(fraction=0.5), data.runs()
    assert sum(run.u.shape[1] for run in half) == 25
    for part, whole in zip(half, all_):
        assert torch.equal(part.u, whole.u[:, : part.u.shape[1]])
    noisy, again = data.runs(noise=1e-3), data.runs(noise=1e-3)
    assert torch.equal(noisy[2].u, again[2].u)
    spread = torch.cat([(a.u - b.u).flatten() for a, b in zip(noisy, all_)])
    assert spread.std() == pytest.approx(1e-3, rel=0.1)
    for bad in (dict(fraction=0), dict(fraction=1.5), dict(noise=-1)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            data.runs(**bad)


def test_a_period_spreads_the_starts(tmp_path):
    rate = lambda t, u: torch.cos(t) - u
    sample = lambda n, generator: torch.rand(n, 1, generator=generator, dtype=torch.float64)
    how = dict(
        trajectories=40, dt=0.1, horizon=1.0, shard_size=5, sample=sample, period=6.283185307179586
    )
    data = make_trajectories(rate, tmp_path, **how)
    starts = sorted(run.t0 for run in data.runs())
    gaps = [b - a for a, b in zip(starts, [*starts[1:], starts[0] + 6.2832])]
    assert max(gaps) < 3 * 6.2832 / 8
    run = data.runs()[3]
    assert torch.equal(run.u, fine_trajectories(rate, run.u[0], 0.1, 10, data.plan.substeps, run.t0))


def test_other_data_in_the_folder_are_refused(tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match=r"seed was 0, is 5\); take another folder"):
        make(tmp_path, seed=5)
    with pytest.raises(ValueError, match=r"rate was .*; the file of the rate .* was edited since"):
        make_trajectories(at.systems.HenonHeiles(), tmp_path, **LORENZ)


def test_what_no_source_tells_is_refused_as_well(tmp_path):
    """Weights of a module, what closures hold, another sampler of the same file."""
    decay = lambda k: lambda t, u: -k * u
    near = lambda low: (
        lambda n, generator: low + torch.rand(n, 2, generator=generator, dtype=torch.float64)
    )
    how = dict(trajectories=10, dt=0.1, horizon=1.0, fine_dt=0.01)
    data = make_trajectories(decay(1.0), tmp_path, sample=near(1.0), **how)
    with pytest.raises(ValueError, match=r"at u = \[1\..*\] the rate was \[-1\..*\], and is \[-5\."):
        make_trajectories(decay(3.0), tmp_path, sample=near(1.0), **how)
    with pytest.raises(ValueError, match=r"sample gave \[1\..*\] first, and gives \[5\."):
        make_trajectories(decay(1.0), tmp_path, sample=near(5.0), **how)
    assert make_trajectories(decay(1.0), tmp_path, sample=near(1.0), **how).hash == data.hash
    data.check_rate(lambda t, u: -(1 + 1e-9) * u)
    with pytest.raises(ValueError, match="data of another equation"):
        data.check_rate(decay(1.1))


@pytest.mark.parametrize("d", [WITNESS, WITNESS + 1])
def test_large_states_have_a_manifest_that_can_be_read(tmp_path, d):
    sample = lambda n, generator: torch.rand(n, d, generator=generator, dtype=torch.float64) - 0.5
    how = dict(trajectories=2, dt=0.1, horizon=0.2, fine_dt=0.05, sample=sample)
    data = make_trajectories(lambda t, u: -u, tmp_path, **how)
    assert FineData.open(tmp_path).hash == make_trajectories(lambda t, u: -u, tmp_path, **how).hash
    data.check_rate(lambda t, u: -u)
    assert (data.manifest["witness"] is None) == (d > WITNESS)


def test_a_rate_that_is_not_finite_somewhere_has_no_witness(tmp_path):
    sample = lambda n, generator: torch.rand(n, 1, generator=generator, dtype=torch.float64)
    gap = lambda t, u: torch.where((t - 0.37).abs() < 1e-6, torch.nan, -u)
    how = dict(trajectories=2, dt=0.1, horizon=1.0, fine_dt=0.05, sample=sample)
    data = make_trajectories(gap, tmp_path, **how)
    assert data.manifest["witness"] is None
    assert make_trajectories(gap, tmp_path, **how).hash == data.hash


@pytest.mark.slow
def test_data_of_a_version_without_a_witness_go_on(tmp_path):
    data = make(tmp_path)
    without = {k: v for k, v in data.manifest.items() if k != "witness"}
    files.write_json(tmp_path / "manifest.json", without)
    FineData.open(tmp_path).check_rate(at.systems.Lorenz(sigma=1.0))
    make(tmp_path)


def test_a_rate_s_own_mistake_is_not_taken_for_stiffness(tmp_path):
    sample = lambda n, generator: torch.rand(n, 2, generator=generator, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"returned shape \[8, 1\]"):
        make_trajectories(
            lambda t, u: u[..., :1], tmp_path, trajectories=5, dt=0.1, horizon=1.0, sample=sample
        )


def test_damage_is_found_and_mended(tmp_path):
    data = make(tmp_path)
    whole, shard = data.hash, tmp_path / "shard-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(at.CheckpointError, match="does not match its own hash"):
        FineData.open(tmp_path).runs()
    assert make(tmp_path).hash == whole
    shard.unlink()
    with pytest.raises(at.CheckpointError, match="lacks 1 of 7 shards"):
        FineData.open(tmp_path)
    manifest = tmp_path / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text("{")
    with pytest.raises(at.CheckpointError, match="damaged"):
        make(tmp_path)
    assert content["plan"]["trajectories"] == 50
