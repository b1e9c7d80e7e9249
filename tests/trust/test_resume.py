"""A training that was interrupted, wherever it was, ends in the same bits as one that was not."""

import hashlib
import json
import math
import os
import random
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import attractor as at
from attractor.data import images
from attractor.ode import Paper, Ridge
from attractor.ode.unfinished import Unfinished
from attractor.storage import files
from attractor.train import Classify, Recipe, checkpoint, train
from attractor.train.recent_checkpoints import RecentCheckpoints

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
RECIPE = Recipe(epochs=3, batch=16, learning_rate=0.02, warmup=0.5, crop=1, precision="fp32")
STEPS, LOOKS = 4, 2  # of an epoch's training and validation


class Interrupted(Exception):  # noqa: N818
    pass


def network():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(256, 10),
    )  # fmt: skip


class Noisy(torch.utils.data.Dataset):
    """Draws from all random numbers there are."""

    def __len__(self):
        return 26

    def __getitem__(self, i):
        return torch.randn(3) + i % 2 + random.gauss(0, 1) + np.random.randn(), i % 2


def on_images(**options):
    data, valid = (
        images.load("digits", "train").subset(4 * 16 + 3),
        images.load("digits", "test").subset(20),
    )
    recipe = replace(RECIPE, mixup=0.3 if options.get("loss") is None else 0.0, batch=16)
    model = network()
    return model, train(model, data, valid, recipe, device="cpu", **options)


def on_batches(**options):
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    loader = torch.utils.data.DataLoader(Noisy(), 7, shuffle=True)  # the last batch is smaller
    valid = [(torch.randn(7, 3), torch.arange(7) % 2) for _ in range(LOOKS)]
    recipe = replace(RECIPE, optimiser="adamw")
    return model, train(model, loader, valid, recipe, device="cpu", **options)


def digest(model, folder):
    total = hashlib.sha256((folder / "log.jsonl").read_bytes())
    for name, value in model.state_dict().items():
        total.update(name.encode() + value.contiguous().numpy().tobytes())
    total.update((folder / "epoch-0003" / "tensors.safetensors").read_bytes())
    return total.hexdigest()


@contextmanager
def broken_at(*stops):
    """Let the n-th calls of `Classify` break; the loss stays what it is, and with it the run."""
    calls, call = iter(range(1, 10_000)), Classify.__call__

    def broken(self, model, batch):
        if next(calls) in stops:
            raise Interrupted
        return call(self, model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classify, "__call__", broken)
        yield


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run", [on_images, on_batches])
def test_a_break_at_any_call_of_the_model_leaves_no_trace(tmp_path, run):
    whole, history = run(loss=Classify())
    model, _ = run(loss=Classify(), out=tmp_path / "whole", save_minutes=math.inf)
    expected = digest(model, tmp_path / "whole")
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), model.state_dict().values())
    )
    for stop in (2, 6, 10, 15):  # in training and validation, at the start and the end of an epoch
        out = tmp_path / str(stop)
        with pytest.raises(Interrupted), broken_at(stop):
            run(loss=Classify(), out=out, save_minutes=0)
        before = RecentCheckpoints(out, "training").paths()
        assert len(before) == min(2, stop - 1)
        done, within = divmod(stop - 1, STEPS + LOOKS)  # calls of the model that were finished
        step = min(within, STEPS)
        assert before[0].name == f"epoch-{done:04}" + (f"-step-{step:06}" if step else "")
        model, again = run(loss=Classify(), out=out, save_minutes=0)
        assert digest(model, out) == expected
        assert [row["train_loss"] for row in again] == [row["train_loss"] for row in history]
        assert [row["lr"] for row in again] == [row["lr"] for row in history]


def test_a_break_before_the_first_step_leaves_a_folder_that_can_be_used(tmp_path, monkeypatch):
    """Killed between run.json and log.jsonl, no training went on in the folder, nor began in it."""
    model, _ = on_batches(out=tmp_path / "whole")
    expected, sync, left = digest(model, tmp_path / "whole"), os.fsync, 0

    def breaks(handle):
        nonlocal left
        left -= 1
        if left == 0:
            raise Interrupted
        sync(handle)

    monkeypatch.setattr(os, "fsync", breaks)
    for n, names in ((3, ["run.json"]), (5, ["log.jsonl", "run.json"])):
        out, left = tmp_path / str(n), n
        with pytest.raises(Interrupted):
            on_batches(out=out)
        assert sorted(path.name for path in out.iterdir()) == names
        left = 0
        assert digest(on_batches(out=out)[0], out) == expected


def test_many_breaks_of_one_training(tmp_path):
    model, _ = on_images(out=tmp_path / "whole")  # with mixup
    expected, breaks = digest(model, tmp_path / "whole"), 0
    draw = random.Random(0)
    while True:
        looked = iter(range(1, draw.randint(2, 6)))

        def tell(progress, looked=looked):
            if next(looked, None) is None:
                raise Interrupted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("attractor.train.bookkeeping.Timer.INTERVAL", 0.0)
            try:
                model, _ = on_images(out=tmp_path / "torn", save_minutes=0, tell=tell)
                break
            except Interrupted:
                breaks += 1
    assert breaks > 2
    assert digest(model, tmp_path / "torn") == expected


def test_if_the_last_checkpoint_is_damaged_the_one_before_is_taken(tmp_path):
    model, _ = on_images(out=tmp_path / "whole")
    out = tmp_path / "torn"

    def stop(progress):
        if progress.row and progress.epoch == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        on_images(out=out, tell=stop, save_minutes=0)
    last, before = RecentCheckpoints(out, "training").paths()
    assert (last.name, before.name) == ("epoch-0002", "epoch-0001-step-000004")
    content = bytearray((last / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (last / "tensors.safetensors").write_bytes(content)
    told = r"epoch-0002/tensors.safetensors is damaged: .*; going on from epoch-0001-step-000004"
    with pytest.warns(UserWarning, match=told) as seen:
        again, _ = on_images(out=out)
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)
    assert digest(again, out) == digest(model, tmp_path / "whole")
    assert [p.name for p in RecentCheckpoints(out, "training").paths()] == ["epoch-0003", "epoch-0002"]


def test_a_training_whose_checkpoints_are_all_damaged_is_not_started_anew(tmp_path):
    on_images(out=tmp_path)
    log = (tmp_path / "log.jsonl").read_bytes()
    for folder in RecentCheckpoints(tmp_path, "training").paths():
        (folder / "config.json").write_text("{}")
    with pytest.raises(
        at.CheckpointError, match=r"no checkpoint is left in .*; give another out=, or resume=False"
    ):
        on_images(out=tmp_path)
    assert (tmp_path / "log.jsonl").read_bytes() == log
    on_images(out=tmp_path, resume=False)
    assert len(RecentCheckpoints(tmp_path, "training").paths()) == 2


def test_what_killed_processes_leave_is_swept(tmp_path):
    on_images(out=tmp_path)
    (tmp_path / f".attractor-{'0' * 32}").write_text("half")
    (tmp_path / ".log.jsonl.mine").write_text("not ours")
    (tmp_path / "epoch-0003" / ".next").mkdir()
    files._sweep.cache_clear()  # as in another process
    on_images(out=tmp_path)
    assert sorted(p.name for p in tmp_path.rglob(".*")) == [".log.jsonl.mine"]


def test_the_callers_random_numbers_are_left_alone():
    on_batches()
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    on_batches()
    assert (random.random(), np.random.rand()) == expected


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t, c: t.pop("model.0.weight"), "it lacks 0.weight"),
        (lambda t, c: t.update({"model.new": torch.zeros(1)}), "it also has new"),
        (lambda t, c: t.update({"model.0.weight": t["model.0.weight"].double()}), "is float64 .*, not float32"),
        (lambda t, c: t.update({"model.0.weight": torch.zeros(3)}), r"0.weight is float32 \[3\], not float32"),
        (lambda t, c: t.pop("optimiser.0.momentum_buffer"), None),
        (lambda t, c: t.update({"optimiser.99.momentum_buffer": torch.zeros(1)}), "that the optimiser does not"),
        (lambda t, c: t.update({"optimiser.0.momentum_buffer": torch.zeros(1)}), "that the optimiser does not"),
        (lambda t, c: t.pop("log"), "it lacks log"),
        (lambda t, c: t.update(more=torch.zeros(1)), "it also has more"),
        (lambda t, c: t["model.0.weight"].fill_(torch.nan), "0.weight has .* numbers that are NaN"),
        (lambda t, c: t["optimiser.0.momentum_buffer"].fill_(torch.nan), "has .* numbers that are NaN"),
        (lambda t, c: t.update({k: t[k].double() for k in t if "momentum" in k}), "is float64 .*, not float32"),
        (lambda t, c: t.update(log=torch.tensor([91] * 9000, dtype=torch.uint8)), "the log has more than 64 levels"),
        (lambda t, c: c["begun"].update(step=3), r"begun.sums is .*, not .* \[3, "),
        (lambda t, c: c["begun"].update(more=3), "begun has the key 'more'; it may have step, rate"),
        (lambda t, c: t.update({"random.torch": torch.zeros(1, 7, dtype=torch.uint8)}), "random numbers cannot be used"),
        (lambda t, c: c.pop("trained"), "lacks 'trained'; it must have run"),
        (lambda t, c: c.pop("run"), "by a version of attractor that did not record what defines a run"),
        (lambda t, c: c.update(run="0" * 64), "belongs to another run than run.json"),
    ],
)  # fmt: skip
def test_checkpoints_with_true_hashes_that_are_not_this_training(tmp_path, change, told):
    with pytest.raises(Interrupted), broken_at(9):
        on_images(loss=Classify(), out=tmp_path, save_minutes=0)
    last = RecentCheckpoints(tmp_path, "training").paths()[0]
    assert last.name == "epoch-0001-step-000002"
    tensors, config = checkpoint.load(last, "training")
    change(tensors, config)
    checkpoint.save(last, "training", tensors, config)
    if told is None:
        on_images(loss=Classify(), out=tmp_path)
        return
    with pytest.raises(at.CheckpointError, match=told) as found:
        on_images(loss=Classify(), out=tmp_path)
    assert "\n" not in str(found.value)


# ---- several processes


def _two(folder):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attractor.train.checkpointer.Checkpointer.AGREE", 2)
        whole, history = on_images(loss=Classify())
        with pytest.raises(Interrupted), broken_at(8):
            on_images(loss=Classify(), out=folder, save_minutes=0)
        torch.distributed.barrier()
        assert RecentCheckpoints(folder, "training").paths()[0].name == "epoch-0001-step-000002"
        resumed, again = on_images(loss=Classify(), out=folder)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    assert [row["train_loss"] for row in again] == pytest.approx([row["train_loss"] for row in history])


@pytest.mark.slow
def test_two_processes_go_on_within_an_epoch(tmp_path, monkeypatch):
    from accelerate import debug_launcher

    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    try:
        debug_launcher(_two, (tmp_path,), num_processes=2)
    finally:
        torch.set_num_threads(threads)


# ---- fits


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:the correction makes held-out trajectories worse")
@pytest.mark.parametrize(
    "how", [{"width": 16, "recipe": Ridge(10)}, {"width": 16, "recipe": Paper(5), "seed": 2}]
)
def test_a_fit_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, how):
    monkeypatch.setattr(Unfinished, "SECONDS", 0.0)
    how = {"dt": 0.1, "horizon": 1.0, "trajectories": 40, "fine_dt": 0.02, **how}
    system = at.systems.ElasticPendulum()
    lines = iter(range(1, 6))

    def stop(line):
        if next(lines, None) is None:
            raise Interrupted

    timeless = lambda solver: [
        {k: v for k, v in row.items() if k != "seconds"} for row in solver.history
    ]
    whole = at.fit(system, **how)
    with pytest.raises(Interrupted):
        at.fit(system, out=tmp_path, progress=stop, **how)
    assert len(list(tmp_path.iterdir())) == 2
    for _ in range(2):  # the second time nothing is left to do
        again = at.fit(system, out=tmp_path, **how)
        ours, theirs = again.correction.state_dict(), whole.correction.state_dict()
        assert all(torch.equal(ours[k], v) for k, v in theirs.items())
        assert timeless(again) == timeless(whole)
    with pytest.raises(at.CheckpointError, match="is of a fit with other seed, data; give another out="):
        at.fit(system, out=tmp_path, **{**how, "seed": 1})


# ---- kills


@pytest.mark.slow
def test_a_few_kills():
    """The small version of `python -m benchmarks.interrupted`, in a process without threads."""
    code = "import json; from benchmarks.interrupted import TRAINED, campaign; print(json.dumps(campaign(TRAINED, 6, 4)))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wrong = found["not_resumed"], found["not_equal"]
    assert (found["kills"], found["at_writes"], *wrong) == (6, 4, 0, 0), found
