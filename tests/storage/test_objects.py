"""Folders in object stores: in memory, and in a server with the protocol of S3.

Run the attack alone with `python -m tests.storage.test_objects WRITERS SAVES`; it prints counts.
"""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

import attractor as at
from attractor.ode import FineData, make_trajectories
from attractor.storage import limits
from attractor.storage.files import names_in, open_plain, write_bytes, write_new, write_parts
from attractor.storage.objects import ObjectPath, path_of
from attractor.train import CheckpointError, Recipe, checkpoint, checkpoint_objects, train

pytest.importorskip("fsspec")
DATA = dict(trajectories=30, dt=0.1, horizon=1.0, shard_size=12)
spawn = multiprocessing.get_context("spawn")


def start_server():
    """Start a server with the protocol of S3; return its process and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server, f"http://127.0.0.1:{port}"
        if server.poll() is not None or time.monotonic() > deadline:
            raise ChildProcessError("the server does not start")
        time.sleep(0.05)


def use_server(address):
    """Set the variables by which clients of S3 find the server, and create a bucket."""
    os.environ |= {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    import s3fs

    s3fs.S3FileSystem().mkdir("bucket")


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    before, (process, address) = dict(os.environ), start_server()
    try:
        use_server(address)
        yield
    finally:
        process.kill()
        process.wait()
        os.environ.clear()
        os.environ |= before


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request):
    """The URL of a folder that nobody else uses."""
    if request.param == "s3":
        request.getfixturevalue("server")
    return f"{request.param}://bucket/{random.getrandbits(64):x}"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)
    return list(zip(x.split(8), y.split(8)))


# ---- paths


def test_text_without_a_protocol_is_a_path_of_this_machine(tmp_path):
    assert path_of("runs/first") == Path("runs/first")
    assert path_of(tmp_path) == tmp_path
    assert path_of("C:/runs") == Path("C:/runs")
    assert path_of("S3://bucket/runs/") == ObjectPath("s3://bucket") / "runs"


@pytest.mark.parametrize("place", ["s3://", "s3://bucket//runs", "s3://bucket/../other", "memory:///"])
def test_a_url_must_name_a_bucket(place):
    with pytest.raises(ValueError, match="must name a bucket"):
        path_of(place)


@pytest.mark.parametrize("place", ["sftp://host/runs", "file:///tmp/runs", "http://host/runs"])
def test_other_protocols_are_refused(place):
    with pytest.raises(ValueError, match=r"the protocols of URLs are s3.*Mount other file systems"):
        path_of(place)


def test_a_url_that_was_made_a_path_is_refused():
    with pytest.raises(ValueError, match="pass the URL as text"):
        at.HybridSolver.load(Path("s3://bucket/solver"))


def test_the_library_of_a_store_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match=r"gs:// needs fsspec and the client of its store"):
        checkpoint.load("gs://bucket/solver", "thing")


# ---- objects


def test_objects_are_written_and_read(url):
    folder = path_of(url)
    assert names_in(folder) == set()
    assert not (folder / "a").exists()
    write_bytes(folder / "a", b"one")
    write_parts(folder / "inside" / "b", (b"two", memoryview(b"three")))
    assert names_in(folder) == {"a", "inside"}
    assert (folder / "a").exists()
    with open_plain(folder / "inside" / "b") as file:
        assert file.readall() == b"twothree"
    write_bytes(folder / "a", b"four")
    assert limits.read_bytes(folder / "a", 4) == b"four"
    with pytest.raises(ValueError, match="has 4 bytes, and at most 3 are read"):
        limits.read_bytes(folder / "a", 3)
    (folder / "a").unlink()
    (folder / "a").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (folder / "a").read_bytes()
    with pytest.raises(FileNotFoundError):
        open_plain(folder / "a")
    folder.remove_all()
    assert names_in(folder) == set()


def test_of_two_that_create_an_object_the_first_succeeds(url):
    assert write_new(path_of(url) / "a", b"first")
    assert not write_new(path_of(url) / "a", b"second")
    assert (path_of(url) / "a").read_bytes() == b"first"


@pytest.mark.slow
def test_a_bucket_that_does_not_exist_is_named(server):
    with pytest.raises(ValueError, match=r"out = s3://missing/run cannot be written to"):
        at.fit(at.systems.Lorenz(), dt=0.1, horizon=1.0, out="s3://missing/run")
    with pytest.raises(CheckpointError, match=r"s3://missing/run"):
        checkpoint.load("s3://missing/run", "thing")


# ---- checkpoints


def test_a_checkpoint_is_replaced_by_a_later_one(url):
    for number in range(3):
        checkpoint.save(url, "thing", {"w": torch.full((4,), float(number))}, {"number": number})
        tensors, config = checkpoint.load(url, "thing")
        assert config == {"number": number}
        assert torch.equal(tensors["w"], torch.full((4,), float(number)))
        assert len(names_in(path_of(url))) == 2  # the manifest, and the place of two files


def test_a_checkpoint_is_not_replaced_by_another_kind(url):
    checkpoint.save(url, "thing", {}, {})
    with pytest.raises(ValueError, match="holds a thing, and a network must not replace it"):
        checkpoint.save(url, "network", {}, {})
    with pytest.raises(CheckpointError, match="holds a thing, not a network"):
        checkpoint.load(url, "network")
    write_bytes(path_of(url) / "notes.txt", b"mine")
    with pytest.raises(ValueError, match="needs a folder of its own"):
        checkpoint.save(url, "thing", {}, {})


def test_a_folder_without_a_checkpoint_is_reported(url):
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        checkpoint.load(url, "thing")


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_damage_is_found(url, name):
    checkpoint.save(url, "thing", {"w": torch.ones(4)}, {"number": 1})
    folder = path_of(url)
    (place,) = names_in(folder) - {checkpoint.MANIFEST}
    content = (folder / place / name).read_bytes()
    write_bytes(folder / place / name, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(url, "thing")
    write_bytes(folder / place / name, content[:-1])
    with pytest.raises(CheckpointError, match="damaged: it has"):
        checkpoint.load(url, "thing")
    (folder / place / name).unlink()
    with pytest.raises(CheckpointError, match="lacks"):
        checkpoint.load(url, "thing")


def test_a_failed_save_leaves_the_old_checkpoint(url, monkeypatch):
    checkpoint.save(url, "thing", {"w": torch.ones(4)}, {"number": 1})
    before, write = names_in(path_of(url)), ObjectPath.write_bytes

    def refuse(path, content):
        if path.name == checkpoint.MANIFEST:
            raise OSError("the store is full")
        write(path, content)

    monkeypatch.setattr(ObjectPath, "write_bytes", refuse)
    with pytest.raises(OSError, match="the store is full"):
        checkpoint.save(url, "thing", {"w": torch.zeros(4)}, {"number": 2})
    assert checkpoint.load(url, "thing")[1] == {"number": 1}
    assert names_in(path_of(url)) == before  # nothing is left of the new one


def test_a_manifest_that_arrives_in_spite_of_an_error_is_valid(url, monkeypatch):
    """A client may report an error after the store has accepted the object."""
    write = ObjectPath.write_bytes

    def lose_the_reply(path, content):
        write(path, content)
        raise TimeoutError("no reply")

    monkeypatch.setattr(ObjectPath, "write_bytes", lose_the_reply)
    with pytest.raises(TimeoutError):
        checkpoint.save(url, "thing", {"w": torch.zeros(4)}, {"number": 2})
    assert checkpoint.load(url, "thing")[1] == {"number": 2}


def test_remains_of_a_killed_writer_are_removed_after_a_day(url, monkeypatch):
    remains = path_of(url) / ("0" * 32)
    write_bytes(remains / checkpoint.FILES[0], b"half")
    checkpoint.save(url, "thing", {}, {})
    assert remains.name in names_in(path_of(url))  # it may belong to a process that is saving now
    monkeypatch.setattr(checkpoint_objects, "ABANDONED", timedelta(0))
    checkpoint.save(url, "thing", {}, {})
    assert remains.name not in names_in(path_of(url))


def test_a_checkpoint_that_was_copied_file_by_file_is_read(url, tmp_path):
    checkpoint.save(tmp_path, "thing", {"w": torch.ones(4)}, {"number": 1})
    for file in tmp_path.iterdir():
        (path_of(url) / file.name).upload(file)
    assert checkpoint.load(url, "thing")[1] == {"number": 1}
    checkpoint.save(url, "thing", {"w": torch.ones(4)}, {"number": 2})
    assert checkpoint.load(url, "thing")[1] == {"number": 2}
    assert len(names_in(path_of(url))) == 2


def test_a_manifest_cannot_name_another_folder(url):
    checkpoint.save(url, "thing", {}, {})
    secret = path_of(url) / "secret"
    with open_plain(path_of(url) / checkpoint.MANIFEST) as file:
        manifest = checkpoint_objects.read_manifest(file, path_of(url))
    manifest["objects"] = "../secret"
    from attractor.train.checkpoint_files import json_bytes, own_hash

    content = json_bytes({**manifest, "own": own_hash(manifest)})
    write_bytes(path_of(url) / checkpoint.MANIFEST, content)
    with pytest.raises(CheckpointError, match="are not 32 digits"):
        checkpoint.load(url, "thing")
    assert not secret.exists()


# ---- what users save


def test_a_solver_is_saved_and_loaded(url):
    options = dict(dt=0.1, horizon=1.0, trajectories=30, width=8, correction="attns")
    solver = at.fit(at.systems.Lorenz(), **options, out=url + "/unfinished")
    assert solver.save(url + "/solver") == path_of(url + "/solver")
    u0 = at.systems.Lorenz().sample(3, torch.Generator().manual_seed(0), torch.float64)
    for again in (
        at.HybridSolver.load(url + "/solver"),
        at.HybridSolver.from_pretrained(url + "/solver"),
        at.fit(at.systems.Lorenz(), **options, out=url + "/unfinished"),  # its result is kept
    ):
        assert torch.equal(again.solve(u0, 0.5).u, solver.solve(u0, 0.5).u)


def test_fine_data_are_those_of_a_folder(url, tmp_path):
    made = make_trajectories(at.systems.Lorenz(), url, **DATA)
    assert made.hash == make_trajectories(at.systems.Lorenz(), tmp_path / "data", **DATA).hash
    assert FineData.open(url).hash == made.hash
    common = dict(dt=0.1, horizon=1.0, trajectories=30, width=8, correction="attns")
    one, other = (at.fit(at.systems.Lorenz(), data=x, **common) for x in (url, tmp_path / "data"))
    assert one.fit_error == other.fit_error


def test_fine_data_go_on_where_they_were_interrupted(url):
    parts = [make_trajectories(at.systems.Lorenz(), url, part=f"{k}/3", **DATA) for k in (1, 3)]
    assert parts[-1].missing() == [1]
    with pytest.raises(CheckpointError, match="lacks 1 of 3 shards"):
        FineData.open(url)
    written = (path_of(url) / "shard-00000.safetensors").modified()
    assert make_trajectories(at.systems.Lorenz(), url, **DATA).missing() == []
    assert (path_of(url) / "shard-00000.safetensors").modified() == written
    with pytest.raises(ValueError, match="holds other data"):
        make_trajectories(at.systems.Lorenz(), url, **DATA | {"horizon": 2.0})


def test_a_training_goes_on_from_a_store(url, tmp_path):
    recipe = Recipe(epochs=3, learning_rate=0.1, precision="fp32")
    whole = network()
    expected = train(whole, batches(), batches(), recipe, out=tmp_path / "whole")

    class StopError(Exception):
        pass

    def stop(progress):
        if progress.row and progress.epoch == 2:
            raise StopError

    with pytest.raises(StopError):
        train(network(), batches(), batches(), recipe, out=url, tell=stop)
    again = network()
    history = train(again, batches(), batches(), recipe, out=url)
    assert [row["train_loss"] for row in history] == [row["train_loss"] for row in expected]
    for one, other in zip(again.parameters(), whole.parameters()):
        assert torch.equal(one, other)
    names = {"run.json", "log.jsonl", "times.jsonl", "model.safetensors", "epoch-0002", "epoch-0003"}
    assert names_in(path_of(url)) == names
    with pytest.raises(CheckpointError, match="holds a run with"):
        train(network(), batches(), batches(), Recipe(epochs=4, precision="fp32"), out=url)
    train(network(), batches(), batches(), Recipe(epochs=1, precision="fp32"), out=url, resume=False)
    assert "epoch-0003" not in names_in(path_of(url))


# ---- several processes


def save_repeatedly(url, writer, saves, errors):
    for number in range(saves):
        tensors = {"w": torch.full((5_000,), float(writer)), "n": torch.tensor(number)}
        try:
            checkpoint.save(url, "thing", tensors, {"writer": writer, "number": number})
        except Exception as error:
            errors.put(f"save: {type(error).__name__}: {error}")


def load_until(url, stop, errors, count):
    while not stop.is_set():
        try:
            tensors, config = checkpoint.load(url, "thing")
            assert bool((tensors["w"] == config["writer"]).all())
            assert int(tensors["n"]) == config["number"]
        except Exception as error:
            errors.put(f"load: {type(error).__name__}: {error}")
        count.value += 1


def attack(url, writers, saves, kills=0):
    """Save from several processes while another one loads; return the number of loads and the errors.

    Args:
        kills: Number of times that a writer is killed at a random moment and replaced by another one.
    """
    checkpoint.save(url, "thing", {"w": torch.zeros(5_000), "n": torch.tensor(0)},
                    {"writer": 0, "number": 0})  # fmt: skip
    errors, stop, count = spawn.Manager().Queue(), spawn.Event(), spawn.Value("l", 0)
    number = lambda: checkpoint.load(url, "thing")[1]
    reader = spawn.Process(target=load_until, args=(url, stop, errors, count))
    reader.start()
    start = lambda k: spawn.Process(target=save_repeatedly, args=(url, k, saves, errors))
    processes = [start(k) for k in range(1, writers + 1)]
    for process in processes:
        process.start()
    for kill in range(kills):
        before = number()
        while number() == before or not count.value:  # until a writer and the reader are at work
            time.sleep(0.05)
        time.sleep(random.uniform(0.0, 1.0))
        process = processes[kill % writers]
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        processes[kill % writers] = start(kill % writers + 1)
        processes[kill % writers].start()
    for process in processes:
        if kills:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    stop.set()
    reader.join()
    checkpoint.load(url, "thing")
    found = []
    while not errors.empty():
        found.append(errors.get())
    return count.value, found


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 4])
def test_every_load_is_of_one_save(server, kills):
    url = f"s3://bucket/{random.getrandbits(64):x}"
    loads, errors = attack(url, 3, 10_000 if kills else 30, kills)
    assert errors == []
    assert loads > 0
    places = names_in(path_of(url)) - {checkpoint.MANIFEST}
    assert all(len(name) == 32 for name in places)


def main():
    writers, saves = map(int, sys.argv[1:])
    process, address = start_server()
    try:
        use_server(address)
        loads, errors = attack("s3://bucket/c", writers, saves)
        print(f"{writers * saves} saves of {writers} processes, {loads} loads, {len(errors)} errors")
        for error in sorted(set(errors)):
            print(f"  {errors.count(error)} x {error}")
    finally:
        process.kill()


if __name__ == "__main__":
    main()
