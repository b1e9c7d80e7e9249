"""Damaged, hostile and unlikely checkpoints: one exception, little memory, no code."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import attractor as at
from attractor.storage.files import json_bytes
from attractor.train import checkpoint, checkpoint_files
from attractor.train.tensors import JSON, read_tensors, write_tensors
from benchmarks.damage import sealed

ROOT = Path(__file__).parents[2]
TENSORS = {"a": torch.rand(3, 2), "b": torch.arange(4), "c": torch.tensor(True), "d": torch.zeros(0, 3)}


@pytest.fixture
def folder(tmp_path):
    return checkpoint.save(tmp_path / "c", "thing", TENSORS, {"x": 1})


@pytest.mark.slow
def test_some_damaged_checkpoints():
    """The small version of `python -m benchmarks.damage`, in a process whose audit events it may hear."""
    code = (
        "import json; from benchmarks.damage import campaign, COUNTS; "
        "print(json.dumps(campaign({k: max(20, v // 10) for k, v in COUNTS.items()}, seed=2)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["raised"] == {"CheckpointError": found["count"]}
    assert [found[k] for k in ("not_caught", "too_much", "code_ran")] == [[], [], []], found


def test_the_safetensors_library_reads_these_files_and_these_read_its(tmp_path):
    from safetensors.torch import load_file, save_file

    every = {**TENSORS, "h": torch.randn(5).bfloat16(), "e": torch.randn(3).to(torch.float8_e4m3fn),
             "w": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)}  # fmt: skip
    write_tensors(tmp_path / "ours", every)
    save_file({k: v.contiguous() for k, v in every.items()}, tmp_path / "theirs", {"about": "x"})
    for found in (load_file(tmp_path / "ours"), read_tensors(tmp_path / "theirs")):
        assert found.keys() == every.keys()
        for name, value in every.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert torch.equal(found[name].float(), value.float())


def test_equal_tensors_give_equal_files(tmp_path):
    one = write_tensors(tmp_path / "one", TENSORS)
    assert write_tensors(tmp_path / "two", dict(reversed(TENSORS.items()))) == one
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("claimed", [2**60, 2**64 - 1, 10_000, JSON + 1])
def test_a_header_that_claims_more_than_there_is(tmp_path, claimed):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", claimed) + b"{}")
    with pytest.raises(
        at.CheckpointError, match=f"of its 10 bytes it claims {claimed:,} for its header"
    ):
        read_tensors(path)


def test_what_cannot_be_kept_is_refused_before_it_is_too_late(tmp_path):
    with pytest.raises(TypeError, match="'x' is list; a checkpoint holds tensors"):
        checkpoint.save(tmp_path / "a", "thing", {"x": [1]}, {})
    with pytest.raises(ValueError, match=r"the configuration takes .* bytes, and .* can be read"):
        checkpoint.save(tmp_path / "a", "thing", {}, {"x": "y" * JSON})
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("precious")
    with pytest.raises(
        ValueError, match=r"holds \['thesis.tex'\]; a checkpoint needs a folder of its own"
    ):
        checkpoint.save(tmp_path / "b", "thing", {}, {})
    assert (tmp_path / "b" / "thesis.tex").read_text() == "precious"


def test_an_interrupted_replacement_leaves_the_old_one_or_the_new(folder, monkeypatch):
    """Stopped at any operation of the disk, as by a kill: nothing is cleaned up."""
    from attractor.storage import files

    class Killed(BaseException):
        pass

    operations = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
    left, seen = -1, []

    def heard(event, arguments):
        nonlocal left
        if left > 0 and event in operations:
            left -= 1
            if left == 0:
                raise Killed

    sys.addaudithook(heard)  # stays, and does nothing when this test is over
    remove, unlink = checkpoint.shutil.rmtree, files.Path.unlink  # what the dead cannot do
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: left and remove(*a, **k))
    monkeypatch.setattr(files.Path, "unlink", lambda *a, **k: left and unlink(*a, **k))
    for stop in range(1, 60):
        left = stop
        try:
            checkpoint.save(folder, "thing", TENSORS, {"x": stop + 1})
            break
        except Killed:
            pass
        finally:
            left = -1
        _, config = checkpoint.load(folder, "thing")
        seen.append(config["x"])
    assert stop > 8
    assert set(seen) <= set(range(1, stop + 1))
    assert seen == sorted(seen)


def test_a_folder_of_links_or_pipes_is_no_checkpoint(folder):
    for name in ("tensors.safetensors", "config.json", "manifest.json"):
        path = folder / name
        path.rename(folder.parent / name)
        path.symlink_to(folder.parent / name)
        with pytest.raises(at.CheckpointError, match="is not a plain file"):
            checkpoint.load(folder, "thing")
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(at.CheckpointError, match="is not a plain file"):
            checkpoint.load(folder, "thing")
        path.unlink()
        (folder.parent / name).rename(path)
    checkpoint.load(folder, "thing")


def test_filling_names_what_is_wrong_and_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    good = {k: v + 1 for k, v in before.items()}
    for change, told in (
        ({"0.weight": good["0.weight"].T}, r"0\.weight is float32 \[2, 3\], not float32 \[3, 2\]"),
        ({"0.weight": good["0.weight"].half()}, r"0\.weight is float16 \[3, 2\], not float32"),
        ({"0.weight": good["1.weight"], "1.weight": good["0.weight"]}, r"0\.weight is .*, 1\.weight is"),
        ({"2.weight": torch.zeros(1)}, "it also has 2.weight"),
    ):
        with pytest.raises(at.CheckpointError, match=told):
            checkpoint.fill(model, {**good, **change}, "it")
    with pytest.raises(at.CheckpointError, match=r"it lacks 0\.bias, 0\.weight, 1\.bias and 1 more"):
        checkpoint.fill(model, {}, "it")
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    checkpoint.fill(model, good, "it")
    assert all(torch.equal(model.state_dict()[k], v) for k, v in good.items())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"width": 10**12},
            "correction.width is 1000000000000; it must be a whole number of at least 0",
        ),
        ({"width": 10**9}, "width = 1000000000 is more than the saved tensors allow"),
        ({"depth": 10**6}, "depth = 1000000 is more than the saved tensors allow"),
        ({"width": 32}, "is of another model than this AttNS"),
        ({"dim": 5}, "is of another model than this AttNS"),
        ({"name": "none"}, "correction.name is the text 'none'; it must be one of attns"),
        ({"width": "64"}, "correction.width is the text '64'; it must be a whole number"),
        ({"device": "cuda"}, "correction has the key 'device'; it may have"),
        ({"parameters": 3}, "is of another model than this AttNS"),
        ({"body": "os.system"}, "it must be one of mlp, lstm, transformer"),
    ],
)
def test_a_solver_whose_description_lies(tmp_path, change, told):
    solver = at.HybridSolver(at.systems.ElasticPendulum(), "rk4", at.corrections.AttNS(4, width=16), 0.1)
    folder = solver.save(tmp_path / "s")
    config = json.loads((folder / "config.json").read_text())
    config["correction"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    sealed(folder)
    with pytest.raises(at.CheckpointError, match=told):
        at.HybridSolver.load(folder)


def test_the_format_before_is_read(folder):
    """Without sizes, as the first version of the library wrote it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for key in ("own", "bytes"):
        manifest.pop(key)
    manifest["format"] = 1
    content = json_bytes({**manifest, "own": checkpoint_files.own_hash(manifest)})
    (folder / "manifest.json").write_bytes(content)
    tensors, config = checkpoint.load(folder, "thing")
    assert config == {"x": 1}
    assert torch.equal(tensors["a"], TENSORS["a"])


@pytest.mark.slow
def test_reading_takes_the_memory_of_the_tensors_alone(tmp_path):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the most memory a process had cannot be read here")
    size = 100_000_000
    folder = checkpoint.save(tmp_path / "c", "thing", {"x": torch.ones(size // 4)}, {})
    path = folder / "tensors.safetensors"
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    # A process of its own: one that has run other tests has free memory to read into.
    code = (
        "import sys, attractor as at; from attractor.train import checkpoint\n"
        "from benchmarks.damage import clear, resident\n"
        "clear(); before = resident()[0]\n"
        "try: checkpoint.load(sys.argv[1], 'thing')\n"
        "except at.CheckpointError as error: assert 'does not match its hash' in str(error)\n"
        "else: raise SystemExit('was loaded')\n"
        "print(resident()[1] - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert size - 10_000_000 < int(done.stdout) < size + 64_000_000
