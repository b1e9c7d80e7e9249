import json

import pytest
import torch

import attractor as at
from attractor.storage.files import write_json
from attractor.train import checkpoint, checkpoint_files

TENSORS = {"a": torch.rand(3, 2), "b": torch.arange(4)}
CONFIG = {"x": 1.5, "names": ["u", "v"]}


@pytest.fixture
def folder(tmp_path):
    return checkpoint.save(tmp_path / "c", "thing", TENSORS, CONFIG)


def test_what_is_saved_comes_back(folder):
    tensors, config = checkpoint.load(folder, "thing")
    assert config == CONFIG
    assert all(torch.equal(tensors[k], v) for k, v in TENSORS.items())


def test_saving_again_replaces(folder):
    checkpoint.save(folder, "thing", {"a": torch.zeros(1)}, {})
    tensors, config = checkpoint.load(folder, "thing")
    assert list(tensors) == ["a"]
    assert config == {}


def test_another_kind_is_not_replaced(folder):
    with pytest.raises(ValueError, match="holds a thing, and a solver must not replace it"):
        checkpoint.save(folder, "solver", {"a": torch.zeros(1)}, {})
    test_what_is_saved_comes_back(folder)
    (folder / "manifest.json").write_text("{}")  # which says nothing
    checkpoint.save(folder, "solver", {"a": torch.zeros(1)}, {})


def test_every_flipped_byte_is_caught(folder):
    for path in folder.iterdir():
        good = path.read_bytes()
        for place in range(0, len(good), 7):
            bad = bytearray(good)
            bad[place] ^= 1
            path.write_bytes(bad)
            with pytest.raises(at.CheckpointError):
                checkpoint.load(folder, "thing")
        path.write_bytes(good)
    checkpoint.load(folder, "thing")


@pytest.mark.parametrize("name", ["tensors.safetensors", "config.json", "manifest.json"])
def test_truncated_and_missing_files(folder, name):
    path = folder / name
    good = path.read_bytes()
    for size in (0, 1, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(at.CheckpointError):
            checkpoint.load(folder, "thing")
    path.unlink()
    with pytest.raises(at.CheckpointError):
        checkpoint.load(folder, "thing")


def test_files_nobody_vouches_for(folder):
    (folder / "extra.py").write_text("print('hello')")
    with pytest.raises(at.CheckpointError, match=r"extra\.py"):
        checkpoint.load(folder, "thing")


def test_kind_and_version(folder, tmp_path):
    with pytest.raises(at.CheckpointError, match="holds a thing, not a solver"):
        checkpoint.load(folder, "solver")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("own")
    manifest["format"] = 99
    write_json(folder / "manifest.json", {**manifest, "own": checkpoint_files.own_hash(manifest)})
    with pytest.raises(
        at.CheckpointError, match="has format 99; this version of attractor reads formats up to 2"
    ):
        checkpoint.load(folder, "thing")
    with pytest.raises(at.CheckpointError, match="not a folder"):
        checkpoint.load(tmp_path / "nothing", "thing")
    assert issubclass(at.CheckpointError, ValueError)
