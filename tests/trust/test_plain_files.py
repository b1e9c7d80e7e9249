"""Writers replace only plain files, and readers open only plain files: no link, pipe or device."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import attractor as at
from attractor import jobs
from attractor.cli import app
from attractor.data import imagefolder
from attractor.data.imagefolder import decoded
from attractor.ode.fine_data import FineData
from attractor.report import runs
from attractor.storage.files import FileTypeError
from attractor.train import Recipe, checkpoint, train

NAMES = (*checkpoint.FILES, checkpoint.MANIFEST)
KINDS = {"link": "a symbolic link", "pipe": "a named pipe", "device": "a device"}


@pytest.fixture(autouse=True)
def alarm():
    """End a test that waits for a pipe."""

    def stop(number, frame):
        raise TimeoutError("waits for a pipe")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def command(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(params=["link", "pipe", "device"])
def target(request, tmp_path):
    """A path that must not be written to, and how an error names it."""
    path = tmp_path / "target"
    if request.param == "device":
        path = Path(os.devnull)
    elif request.param == "pipe":
        os.mkfifo(path)
    else:
        (tmp_path / "precious").write_text("precious")
        path.symlink_to(tmp_path / "precious")
    before = path.lstat()
    yield path, KINDS[request.param]
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    if request.param == "link":
        assert path.read_text() == "precious"


@pytest.fixture
def training(tmp_path):
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / "log.jsonl").write_text('{"epoch": 1, "train_loss": 0.5}\n')
    return folder


def test_commands_do_not_write_to_links_pipes_and_devices(target, training):
    path, kind = target
    told = f"{path} is {kind}, and only plain files are written or replaced. Pass another path"
    for arguments in (
        ("report", training, "--out", path),
        ("bench", "--what", "hybrid", "--out", path),
        ("reproduce", "--page", path, "--out", training.parent),
    ):
        code, output = command(*arguments)
        assert code == 2
        assert told in output


def test_a_checkpoint_is_not_written_through_links(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in NAMES:
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to(precious)
        with pytest.raises(FileTypeError, match=rf"{name} is a symbolic link, .* or remove it first"):
            checkpoint.save(folder, "thing", {}, {})
        assert [p.name for p in folder.iterdir()] == [name]
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("whole", [True, False])
def test_a_link_to_the_next_checkpoint_is_neither_read_nor_written(tmp_path, whole):
    """Before, `load` read what it points to, and `save` moved and removed files there."""
    folder = checkpoint.save(tmp_path / "c", "thing", {}, {"whose": "ours"})
    outside = checkpoint.save(tmp_path / "outside", "thing", {}, {"whose": "theirs"})
    if not whole:
        (outside / "manifest.json").unlink()
    before = {p.name: p.read_bytes() for p in outside.iterdir()}
    (folder / ".next").symlink_to(outside)
    for call in (
        lambda: checkpoint.load(folder, "thing"),
        lambda: checkpoint.save(folder, "thing", {}, {}),
        lambda: checkpoint.settle(folder),
    ):
        with pytest.raises(at.CheckpointError, match=r"\.next is a link or a file, .* remove it"):
            call()
    assert {p.name: p.read_bytes() for p in outside.iterdir()} == before


def test_resuming_leaves_what_links_in_the_folder_point_to(tmp_path):
    def run():
        torch.manual_seed(0)
        data = [(torch.randn(4, 3), torch.arange(4) % 2)]
        recipe = Recipe(epochs=2, batch=4, precision="fp32")
        return train(nn.Linear(3, 2), data, None, recipe, out=tmp_path / "run", device="cpu")

    pytest.importorskip("accelerate")
    outside = checkpoint.save(tmp_path / "outside", "training", {}, {})
    (tmp_path / "run").mkdir()
    for name in ("epoch-0001", "epoch-0009"):
        (tmp_path / "run" / name).symlink_to(outside)
    run()
    checkpoint.load(outside, "training")
    assert not (tmp_path / "run" / "epoch-0001").is_symlink()  # ours has taken the name
    log = tmp_path / "run" / "log.jsonl"
    log.rename(tmp_path / "log.jsonl")
    log.symlink_to(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match=r"log.jsonl is a symbolic link"):
        run()


def kinds(path):
    """Replace a file by a link to it, and by a pipe; yield how an error names each."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)
    yield "a symbolic link"
    path.unlink()
    os.mkfifo(path)
    yield "a named pipe"
    path.unlink()
    aside.rename(path)


def test_reports_read_only_plain_files(training):
    for kind in kinds(training / "log.jsonl"):
        for path in (training, training / "log.jsonl"):
            with pytest.raises(
                (FileTypeError, ValueError), match=f"log.jsonl is not a plain file but {kind}"
            ):
                runs.find(path)
            assert f"is not a plain file but {kind}" in command("report", path)[1]
    assert runs.find(training)


def test_results_are_read_from_plain_files_only(tmp_path):
    path = tmp_path / "other.json"
    name, scale = "attns-theorem51", "smoke"
    path.write_text(json.dumps({"format": 1, "experiment": name, "scale": scale, "runs": {}}))
    arguments = ("reproduce", name, "--scale", scale, "--out", tmp_path / "out", "--merge", path)
    for kind in kinds(path):
        code, output = command(*arguments)
        assert code == 2
        assert f"{path} is not a plain file but {kind}" in output
    assert command(*arguments)[0] == 0


def test_fine_data_are_plain_files(tmp_path):
    make = lambda: at.make_trajectories(
        at.systems.ElasticPendulum(), tmp_path, trajectories=4, dt=0.1, horizon=0.2, fine_dt=0.05
    )
    data = make()
    for kind in kinds(tmp_path / "manifest.json"):
        for call in (make, lambda: FineData.open(tmp_path), lambda: data.hash):
            with pytest.raises(
                (FileTypeError, at.CheckpointError),
                match=f"manifest.json is not a plain file but {kind}",
            ):
                call()
    for kind in kinds(tmp_path / "shard-00000.safetensors"):
        for call in (data.runs, lambda: data.hash):
            with pytest.raises(
                (FileTypeError, at.CheckpointError), match=f"not a plain file but {kind}"
            ):
                call()
        with pytest.raises(FileTypeError, match=f"is {kind}, and only plain files are written"):
            make()
    assert data.runs()


def test_artifacts_are_plain_files(tmp_path):
    keep = lambda: list(jobs.keep(jobs.Job("attractor.jobs.job:power", {"exponent": 2}), [1], tmp_path))
    keep()
    for path in list(tmp_path.iterdir()):
        for kind in kinds(path):
            with pytest.raises(FileTypeError, match=f"{path.name} is (not a plain file but )?{kind}"):
                keep()
    assert keep()[0].json() == 1


def test_files_of_the_user_may_be_links_but_no_pipes(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "x.png")
    assert decoded(tmp_path / "link.png").size == (4, 4)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(OSError, match=r"pipe.png is not a plain file but a named pipe"):
        decoded(tmp_path / "pipe.png")
    with monkeypatch.context() as patch:
        patch.setattr(imagefolder, "LARGEST_PICTURE", 15)
        with pytest.raises(OSError, match=r"x.png cannot .* it has 16 pixels, and 15 are read"):
            decoded(tmp_path / "x.png")
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(OSError, match=r"pipe.py is not a plain file but a named pipe"):
        jobs.naming.module_of_file(tmp_path / "pipe.py")
    code, output = command(
        "probe", "attractor:resnet_cifar", "--option", "depth=11", "--images", tmp_path
    )
    assert code == 2
    assert "pipe.png is not a plain file but a named pipe" in output


def test_an_export_is_not_begun_if_its_path_is_a_link(tmp_path, monkeypatch):
    from attractor.integrations import onnx, onnx_networks

    solver = at.HybridSolver.from_pretrained("elastic-pendulum")
    for name in ("x.pt2", "x.onnx"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
        with pytest.raises(FileTypeError, match=f"{name} is a symbolic link"):
            onnx.export(solver, tmp_path / name)
    with pytest.raises(FileTypeError, match=r"x.onnx is a symbolic link"):
        onnx_networks.export_network(nn.Linear(2, 2), tmp_path / "x.onnx", {"input": torch.zeros(1, 2)})


def test_a_folder_of_links_as_in_the_cache_of_the_hub_is_loaded(tmp_path):
    pytest.importorskip("huggingface_hub")
    from attractor.integrations import hub

    hub.network("resnet_cifar", depth=11, width=4).save_pretrained(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert hub.load(tmp_path / "snapshot").net
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "snapshot" / name).unlink()
        os.mkfifo(tmp_path / "snapshot" / name)
        with pytest.raises(
            at.CheckpointError, match=rf"{name} is not a plain file but a named pipe|has no {name}"
        ):
            hub.load(tmp_path / "snapshot")
        (tmp_path / "snapshot" / name).unlink()
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)


def test_checkpoints_may_lie_behind_a_linked_folder(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    folder = checkpoint.save(tmp_path / "data" / "c", "thing", {}, {"x": 1})
    (tmp_path / "latest").symlink_to(folder)
    checkpoint.save(tmp_path / "latest", "thing", {}, {"x": 2})
    assert checkpoint.load(folder, "thing")[1] == {"x": 2}
    assert (tmp_path / "latest").is_symlink()
