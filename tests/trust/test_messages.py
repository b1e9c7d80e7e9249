"""What goes wrong while training: the line that is said, and the checkpoint that is left."""

import errno
import math
import os
import signal
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from attractor.data import images
from attractor.train import CheckpointError, Classify, DivergedError, Recipe, checkpoint, train
from attractor.train.history import TerminatedError
from attractor.train.recent_checkpoints import RecentCheckpoints

pytest.importorskip("accelerate")

RECIPE = Recipe(epochs=3, batch=16, learning_rate=0.02, warmup=0, crop=1, precision="fp32")


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def run(out, model=None, data=None, recipe=RECIPE, **options):
    model = network() if model is None else model
    data = images.load("digits", "train").subset(64) if data is None else data
    train(model, data, None, recipe, device="cpu", out=out, **options)
    return model


def at_step(n, what):
    """The default loss; in its n-th call `what` is done first."""
    calls = iter(range(1, 1000))

    def loss(model, batch):
        if next(calls) == n:
            what(model, batch)
        return Classify()(model, batch)

    return loss


@contextmanager
def in_call(n, what):
    """Do something first in the n-th call of the default loss, which stays what it is for the run."""
    calls, call = iter(range(1, 1000)), Classify.__call__

    def patched(self, model, batch):
        if next(calls) == n:
            what(model, batch)
        return call(self, model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classify, "__call__", patched)
        yield


def goes_on(out):
    """The checkpoint left is whole, and leads to where a training without trouble ends."""
    found = RecentCheckpoints(out, "training").paths()
    checkpoint.load(found[0], "training")
    # `.next` is left if the disk fails after the switch to a new checkpoint; it is whole then.
    assert {p.name for p in out.rglob(".*")} <= {checkpoint.NEXT}
    resumed, whole = run(out), run(None)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters()))
    return found[0].name


# ---- numbers


def test_not_finite_data(tmp_path):
    batches = [(torch.randn(8, 1, 8, 8), torch.arange(8)) for _ in range(4)]
    run(tmp_path / "whole", data=batches, save_minutes=0)
    bad = [(x.clone(), y) for x, y in batches]
    bad[2][0][3, 0, 4, 4] = math.nan
    told = (
        r"the loss is not finite at epoch 1, step 3 of 4, where the learning rate is 0\.0\d+: the batch itself is "
        r"not finite \(its tensor 0\), so look at the data; the last good checkpoint is .*epoch-0000-step-000002"
    )
    with pytest.raises(DivergedError, match=told) as found:
        run(tmp_path / "a", data=bad, save_minutes=0)
    assert (found.value.epoch, found.value.step, found.value.layer) == (1, 3, None)
    assert "\n" not in str(found.value)
    with pytest.raises(CheckpointError, match="holds a run with another train_data"):
        run(tmp_path / "a", data=batches)  # repaired data are other data
    resumed = run(tmp_path / "a", data=batches, resume=False)
    logs = [(tmp_path / name / "log.jsonl").read_bytes() for name in ("whole", "a")]
    assert logs[0] == logs[1]
    assert all(torch.isfinite(p).all() for p in resumed.parameters())


class Fragile(nn.Module):
    """Divides by zero when told to."""

    def __init__(self):
        super().__init__()
        self.scale, self.break_it = nn.Parameter(torch.ones(16)), False

    def forward(self, x):
        return x * self.scale / (0.0 if self.break_it else 1.0)


def fragile():
    model = network()
    model.insert(2, nn.Sequential(nn.Identity(), Fragile()))
    return model


def test_the_layer_is_named(tmp_path):
    loss = at_step(7, lambda model, batch: setattr(model[2][1], "break_it", True))
    told = r"at epoch 2, step 3 of 4, .*; the first layer whose output is not finite is '2\.1' \(Fragile\); the last"
    with pytest.raises(DivergedError, match=told) as found:
        run(tmp_path, fragile(), loss=loss)
    assert (found.value.layer, found.value.step) == ("2.1", 3)
    assert RecentCheckpoints(tmp_path, "training").paths()[0].name == "epoch-0001"
    assert '"layer": "2.1"' in (tmp_path / "log.jsonl").read_text()


def test_weights_are_as_before_the_step_that_failed():
    """On a CPU: no update follows a loss that is not finite."""
    still = run(None, fragile(), recipe=replace(RECIPE, epochs=0))
    model = fragile()
    with pytest.raises(DivergedError, match="epoch 1, step 1 of 4"):
        run(None, model, loss=at_step(1, lambda m, b: setattr(m[2][1], "break_it", True)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), still.parameters()))


def test_the_loss_function_is_blamed_when_all_layers_are_sound():
    loss = lambda model, batch: Classify()(model, batch)["loss"] * math.inf
    with pytest.raises(
        DivergedError, match=r"every layer's output is finite, so look at the loss function"
    ):
        run(None, loss=loss)


def test_a_state_with_weights_that_are_not_finite_is_not_kept(tmp_path):
    def spoil(model, batch):
        model[3].weight.register_hook(lambda gradient: gradient * math.nan)

    told = r"the weights '3\.weight' are not finite after epoch 2, step 4: .*; the last good checkpoint is .*epoch-0001"
    with pytest.raises(DivergedError, match=told):
        run(tmp_path, loss=at_step(8, spoil))
    tensors, _ = checkpoint.load(RecentCheckpoints(tmp_path, "training").paths()[0], "training")
    assert all(torch.isfinite(v).all() for v in tensors.values() if v.is_floating_point())


# ---- signals


@pytest.fixture(autouse=True)
def as_in_a_fresh_process():
    """Ray sets a handler of its own, which stays."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("number", "error", "name"),
    [(signal.SIGTERM, TerminatedError, "SIGTERM"), (signal.SIGINT, KeyboardInterrupt, "Ctrl-C")],
)
def test_signals_finish_the_step_and_write_it(tmp_path, capsys, number, error, name):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(error) as found, in_call(6, lambda model, batch: os.kill(os.getpid(), number)):
        run(tmp_path)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    line = (
        f"stopped by {name} after step 2 of 4 of epoch 2 of 3: {tmp_path}/epoch-0001-step-000002 is written, "
        "and the same call continues from it"
    )
    assert capsys.readouterr().err == line + "\n"
    assert str(found.value) == line
    if error is TerminatedError:
        assert (isinstance(found.value, SystemExit), found.value.code) == (True, 143)
    assert goes_on(tmp_path) == "epoch-0001-step-000002"


def test_signals_in_validation_and_after_the_last_epoch(tmp_path):
    data = images.load("digits", "train").subset(64)

    def stopped(n, out):
        kill = lambda model, batch: os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(TerminatedError) as found, in_call(n, kill):
            train(network(), data, data, replace(RECIPE, epochs=2), device="cpu", out=out)
        return str(found.value)

    assert "after step 4 of 4 of epoch 1 of 2" in stopped(5, tmp_path / "a")
    assert "after step 4 of 4 of epoch 2 of 2" in stopped(14, tmp_path / "b")
    for name in "ab":
        model = network()
        train(model, data, data, replace(RECIPE, epochs=2), device="cpu", out=tmp_path / name)
    assert (tmp_path / "a" / "log.jsonl").read_bytes() == (tmp_path / "b" / "log.jsonl").read_bytes()


@pytest.mark.parametrize(("batch", "last"), [(3, "epoch-0001-step-000003"), (0, "epoch-0001")])
def test_a_signal_that_takes_the_loader_s_workers_along_loses_nothing(
    tmp_path, monkeypatch, batch, last
):
    """It reaches the whole group of processes, and torch says first that a worker is gone."""
    data = images.load("digits", "train").subset(64)
    whole = [(data.normalised(slice(i, i + 16)), data.labels[i : i + 16]) for i in range(0, 64, 16)]

    class Loader(list):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            for i, made in enumerate(list.__iter__(self)):
                if (self.epoch, i) == (1, batch) and "WORKERS_DIE" in os.environ:
                    os.kill(os.getpid(), signal.SIGTERM)
                    raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
                yield made

    def trained(out):
        model, loader = network(), Loader(whole)
        train(model, loader, None, replace(RECIPE, epochs=3), device="cpu", out=out)
        return model

    monkeypatch.setenv("WORKERS_DIE", "1")
    with pytest.raises(TerminatedError, match=f"{last} is written"):
        trained(tmp_path)
    monkeypatch.delenv("WORKERS_DIE")
    assert RecentCheckpoints(tmp_path, "training").paths()[0].name == last
    ours, theirs = trained(tmp_path), trained(None)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))


def test_a_loader_that_breaks_by_itself_is_no_signal(tmp_path):
    def broken():
        yield torch.zeros(4, 1, 8, 8), torch.zeros(4).long()
        raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")

    loader = type("Loader", (), {"__len__": lambda s: 2, "__iter__": lambda s: broken()})()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        train(network(), loader, None, RECIPE, device="cpu", out=tmp_path)


def test_a_second_signal_does_not_wait(tmp_path):
    def twice(model, batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    told = "at once; steps after the last checkpoint are lost"
    with pytest.raises(KeyboardInterrupt, match=told), in_call(6, twice):
        run(tmp_path)
    assert goes_on(tmp_path) == "epoch-0001"


def test_handlers_of_the_program_are_its_own(tmp_path):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *a: came.append(1))
    try:
        run(tmp_path, loss=at_step(2, lambda m, b: os.kill(os.getpid(), signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [1]
    assert RecentCheckpoints(tmp_path, "training").paths()[0].name == "epoch-0003"


def test_without_a_folder_or_in_another_thread_signals_are_left_alone(tmp_path):
    seen, before = [], signal.getsignal(signal.SIGTERM)  # Ray sets one
    look = lambda model, batch: seen.append(signal.getsignal(signal.SIGTERM))
    run(None, loss=at_step(1, look))
    thread = threading.Thread(target=run, args=(tmp_path,), kwargs={"loss": at_step(1, look)})
    thread.start()
    thread.join()
    assert seen == [before] * 2
    assert RecentCheckpoints(tmp_path, "training").paths()[0].name == "epoch-0003"


# ---- disks


@pytest.fixture
def mounted(tmp_path):
    """Mounts; a reason to skip where that is not allowed."""
    done = []

    def mount(*options, place):
        made = subprocess.run(["mount", *options, place], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"cannot mount here: {made.stderr.strip()}")
        done.append(place)

    yield mount
    for place in reversed(done):
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk(tmp_path, mounted):
    out = tmp_path / "small"
    out.mkdir()
    mounted("-t", "tmpfs", "-o", "size=256k", "tmpfs", place=out)
    fill = lambda model, batch: (out / "other.bin").write_bytes(
        b"x" * 4096 * (os.statvfs(out).f_bavail - 2)
    )
    told = r"\[Errno 28\] epoch 2 could not be written to .* \(No space left on device\); .*epoch-0001 is whole: once"
    with pytest.raises(OSError, match=told) as found, in_call(7, fill):
        run(out)
    assert (found.value.errno, "\n" in str(found.value)) == (errno.ENOSPC, False)
    assert sorted(p.name for p in out.iterdir()) == [
        "epoch-0001",
        "log.jsonl",
        "other.bin",
        "run.json",
        "times.jsonl",
    ]
    (out / "other.bin").unlink()
    assert goes_on(out) == "epoch-0001"


def test_a_folder_that_becomes_read_only(tmp_path, mounted):
    out = tmp_path / "small"
    out.mkdir()
    mounted("-t", "tmpfs", "tmpfs", place=out)
    lock = lambda model, batch: subprocess.run(["mount", "-o", "remount,ro", out], check=True)
    told = r"the log could not be written to .* \(Read-only file system\); .*epoch-0001 is whole"
    with pytest.raises(OSError, match=told) as found, in_call(6, lock):
        run(out)
    assert found.value.errno == errno.EROFS
    again = r"definition of the run could not be written to .*Read-only file system.*epoch-0001 is whole"
    with pytest.raises(OSError, match=again):
        run(out)  # not before the folder can be written to
    subprocess.run(["mount", "-o", "remount,rw", out], check=True)
    assert goes_on(out) == "epoch-0001"


def test_a_read_only_folder_is_found_out_before_training(tmp_path, mounted):
    out = tmp_path / "locked"
    out.mkdir()
    mounted("-t", "tmpfs", "-o", "ro", "tmpfs", place=out)
    steps = []
    told = r"could not be written to .* \(Read-only file system\); there is no checkpoint yet"
    with pytest.raises(OSError, match=told):
        run(out, loss=at_step(1, lambda m, b: steps.append(1)))
    assert not steps


@pytest.mark.parametrize(("number", "first"), [(errno.ENOSPC, 24), (errno.EIO, 28), (errno.EROFS, 32)])
def test_every_write_that_fails_leaves_what_was(tmp_path, monkeypatch, number, first):
    """Where nothing can be mounted, too: the n-th time that a file should reach the disk, it does not."""
    sync, left = os.fsync, 0

    def fails(handle):
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fails)
    for n in (first, first + 9):
        out, left = tmp_path / str(n), n
        with pytest.raises(OSError, match=r"could not be written to .*; .*is whole: once") as found:
            run(out)
        assert found.value.errno == number
        left = 0
        goes_on(out)
