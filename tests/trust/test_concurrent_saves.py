"""Several processes that use one folder at the same time.

Run the attack alone with `python -m tests.trust.test_concurrent_saves WRITERS SAVES`; it prints counts.
"""

import json
import multiprocessing
import queue
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import attractor as at
from attractor.ode import Ridge
from attractor.reproduce import Experiment, Scale, results, run
from attractor.storage import files
from attractor.train import Recipe, checkpoint, train
from attractor.train.recent_checkpoints import RecentCheckpoints

fork = multiprocessing.get_context("fork")


def save_repeatedly(folder, writer, saves, errors):
    for number in range(saves):
        tensors = {"w": torch.full((5_000,), float(writer)), "n": torch.tensor(number)}
        try:
            checkpoint.save(folder, "thing", tensors, {"writer": writer, "number": number})
        except Exception as error:
            errors.put(f"save: {type(error).__name__}: {error}")


def load_once(folder):
    """Load the checkpoint and check that its tensors and its configuration are of one save."""
    tensors, config = checkpoint.load(folder, "thing")
    assert bool((tensors["w"] == config["writer"]).all())
    assert int(tensors["n"]) == config["number"]


def load_until(folder, stop, errors, count):
    while not stop.is_set():
        try:
            load_once(folder)
        except Exception as error:
            errors.put(f"load: {type(error).__name__}: {error}")
        count.value += 1


def attack(folder, writers, saves):
    """Return the number of loads and the errors of saves, of loads, and of the final load."""
    folder = Path(folder) / "c"
    checkpoint.save(folder, "thing", {"w": torch.zeros(5_000), "n": torch.tensor(0)},
                    {"writer": 0, "number": 0})  # fmt: skip
    errors, stop, count = fork.Manager().Queue(), fork.Event(), fork.Value("l", 0)
    reader = fork.Process(target=load_until, args=(folder, stop, errors, count))
    processes = [
        fork.Process(target=save_repeatedly, args=(folder, w, saves, errors)) for w in range(writers)
    ]
    for process in (reader, *processes):
        process.start()
    for process in processes:
        process.join()
    stop.set()
    reader.join()
    messages = [errors.get() for _ in range(errors.qsize())]
    try:
        load_once(folder)
        final = ""
    except Exception as error:
        final = f"{type(error).__name__}: {error}"
    left = sorted(p.name for p in folder.iterdir())
    return {"loads": count.value, "errors": messages, "final": final, "left": left}


def check_attack(folder, writers, saves):
    result = attack(folder, writers, saves)
    assert result.pop("loads") > 0
    assert result == {
        "errors": [],
        "final": "",
        "left": ["config.json", "manifest.json", "tensors.safetensors"],
    }


def test_simultaneous_saves_keep_a_complete_checkpoint(tmp_path):
    check_attack(tmp_path, 2, 15)


def test_threads_take_turns(tmp_path):
    errors = queue.SimpleQueue()
    threads = [
        threading.Thread(target=save_repeatedly, args=(tmp_path / "c", n, 4, errors)) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors.empty()
    load_once(tmp_path / "c")


@pytest.mark.slow
def test_a_thousand_simultaneous_saves_keep_a_complete_checkpoint(tmp_path):
    check_attack(tmp_path, 4, 250)


def check_kills(folder, kills):
    """Two processes save, and one of them is killed at a random moment and replaced, again and again."""
    folder, errors = folder / "c", fork.Manager().Queue()
    checkpoint.save(folder, "thing", {"w": torch.zeros(5_000), "n": torch.tensor(0)},
                    {"writer": 0, "number": 0})  # fmt: skip
    start = lambda writer: fork.Process(
        target=save_repeatedly, args=(folder, writer, 10**6, errors), daemon=True
    )
    writers, chance = [start(0), start(1)], random.Random(0)
    for writer in writers:
        writer.start()
    for kill in range(kills):
        time.sleep(0.1 * chance.random())
        writers[kill % 2].kill()
        writers[kill % 2].join()
        load_once(folder)
        writers[kill % 2] = start(kill % 2)
        writers[kill % 2].start()
    for writer in writers:
        writer.kill()
        writer.join()
    load_once(folder)
    assert errors.empty()
    checkpoint.save(folder, "thing", {}, {})
    assert {p.name for p in folder.iterdir()} == {*checkpoint.FILES, checkpoint.MANIFEST}


def test_killed_writers_leave_a_complete_checkpoint_and_no_lock(tmp_path):
    check_kills(tmp_path, 8)


@pytest.mark.slow
def test_two_hundred_killed_writers_leave_a_complete_checkpoint(tmp_path):
    check_kills(tmp_path, 200)


def test_a_load_sees_one_checkpoint_whatever_happens_while_it_opens_files(tmp_path, monkeypatch):
    """Another save between any two operations of the load."""
    folder = checkpoint.save(tmp_path / "c", "thing", {}, {"number": 0})
    opened, calls = checkpoint.open_file, []

    def interrupted(path, **options):
        calls.append(path)
        if len(calls) % 3 == 2 and len(calls) < 20:  # of the manifest, the tensors and the configuration
            checkpoint.save(folder, "thing", {"x": torch.ones(len(calls))}, {"number": len(calls)})
        return opened(path, **options)

    monkeypatch.setattr(checkpoint, "open_file", interrupted)
    tensors, config = checkpoint.load(folder, "thing")
    assert len(calls) == 21
    assert config["number"] == len(tensors["x"]) == 17


def test_a_damaged_checkpoint_is_not_waited_for(tmp_path):
    folder = checkpoint.save(tmp_path / "c", "thing", {}, {})
    (folder / "config.json").unlink()
    began = time.perf_counter()
    with pytest.raises(at.CheckpointError):
        checkpoint.load(folder, "thing")
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_killed_save_left_is_settled_or_swept(tmp_path, whole):
    folder = checkpoint.save(tmp_path / "c", "thing", {}, {"number": 0})
    other = checkpoint.save(tmp_path / "other", "thing", {}, {"number": 1})
    other.rename(folder / (".next" if whole else f".next-{'0' * 32}"))
    assert checkpoint.load(folder, "thing")[1] == {"number": int(whole)}
    with files.lock_folder(folder), pytest.raises(files.FolderLockedError):
        checkpoint.settle(folder)
    checkpoint.settle(folder)
    assert sorted(p.name for p in folder.iterdir()) == sorted((*checkpoint.FILES, "manifest.json"))
    assert checkpoint.load(folder, "thing")[1] == {"number": int(whole)}


def locked_call(call, folder, monkeypatch):
    """Check that a call that writes to a folder raises while another process has it, and not after."""
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.05)
    with (
        files.lock_folder(folder),
        pytest.raises(OSError, match=r"is in use: another process or thread .*0\.05 s.* wait until"),
    ):
        call()
    return call()


def test_a_save_waits_for_its_turn(tmp_path, monkeypatch):
    save = lambda: checkpoint.save(tmp_path, "thing", {}, {})
    locked_call(save, tmp_path, monkeypatch)


def test_one_training_at_a_time_writes_to_a_folder(tmp_path, monkeypatch):
    def call():
        torch.manual_seed(0)
        data = [(torch.randn(4, 3), torch.arange(4) % 2)]
        recipe = Recipe(epochs=1, batch=4, precision="fp32")
        return train(nn.Linear(3, 2), data, None, recipe, out=tmp_path, device="cpu")

    pytest.importorskip("accelerate")
    assert len(locked_call(call, tmp_path, monkeypatch)) == 1
    assert len(RecentCheckpoints(tmp_path, "training").paths()) == 1


def test_one_fit_at_a_time_writes_to_a_folder(tmp_path, monkeypatch):
    call = lambda: at.fit(
        at.systems.ElasticPendulum(), dt=0.1, horizon=1.0, fine_dt=0.02, trajectories=20, width=8,
        correction="attns", recipe=Ridge(0), device="cpu", out=tmp_path,
    )  # fmt: skip
    locked_call(call, tmp_path, monkeypatch)


def test_data_of_one_plan_at_a_time_are_begun_in_a_folder(tmp_path, monkeypatch):
    call = lambda: at.make_trajectories(
        at.systems.ElasticPendulum(), tmp_path, trajectories=4, dt=0.1, horizon=0.2, fine_dt=0.05
    )
    assert not locked_call(call, tmp_path, monkeypatch).missing()


def number(config, context):
    return {"metrics": {"value": config["value"] + context.seed}, "curves": {}}


EXAMPLE = Experiment(
    name="attns-example", paper="attns", place="Table 0", claim="None.", metric="value",
    task="tests.trust.test_concurrent_saves:number", arms={"a": {"value": 1.0}, "b": {"value": 2.0}},
    scales={"smoke": Scale(judged=False)}, better="higher", numbers={}, judge=None,
)  # fmt: skip


@pytest.mark.parametrize("parts", [("1/2", "2/2"), ("1/1", "1/1")])
def test_two_reproductions_in_one_folder_lose_nothing(tmp_path, parts):
    options = {"folder": tmp_path, "seeds": range(18), "threads": 1}
    processes = [
        fork.Process(target=run, args=(EXAMPLE, "smoke"), kwargs={**options, "part": part})
        for part in parts
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    path = results.path_of(tmp_path, "attns-example", "smoke")
    runs = results.read(path, "attns-example", "smoke")
    assert {arm: list(seeds) for arm, seeds in runs.items()} == {arm: list(range(18)) for arm in "ab"}


def test_what_another_process_has_made_meanwhile_is_not_made_again(tmp_path):
    options, lines, others = {"folder": tmp_path, "seeds": range(4)}, [], []

    def tell(line):
        lines.append(line)
        run(EXAMPLE, "smoke", tell=others.append, **options)

    found = run(EXAMPLE, "smoke", tell=tell, **options)
    assert (len(lines), len(others)) == (1, 7)
    assert not found.missing()
    assert found.values("b") == [2.0, 3.0, 4.0, 5.0]


def test_a_run_of_another_process_comes_last(tmp_path, monkeypatch):
    """The other process is killed after this one has made everything else."""
    scratch = tmp_path / "attns_example" / ".smoke"
    name = results.digest(EXAMPLE.task, EXAMPLE.config("a", "smoke"))
    lock = files.lock_folder(scratch / f"{name}-0")
    lines = []

    def sleep(seconds):
        lines.append("wait")
        if len(lines) == 6:
            lock.__exit__(None, None, None)

    monkeypatch.setattr(time, "sleep", sleep)
    lock.__enter__()
    found = run(EXAMPLE, "smoke", folder=tmp_path, seeds=[0, 1], tell=lines.append)
    assert found.values("a") == [1.0, 2.0]
    assert lines[0] == "a, seed 0: another process is running it"
    assert [line[:9] for line in lines[1:4]] == ["b, seed 0", "a, seed 1", "b, seed 1"]
    assert lines[4:6] == ["wait", "wait"]
    assert lines[6].startswith("a, seed 0: value 1")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        counts = attack(place, *map(int, sys.argv[1:]))
        kinds = {kind: sum(e.startswith(kind) for e in counts["errors"]) for kind in ("save", "load")}
        print(json.dumps({**counts, "errors": kinds, "examples": counts["errors"][:4],
                          "seconds": time.perf_counter() - began}, indent=1))  # fmt: skip
