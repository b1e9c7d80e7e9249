"""Several processes that use one folder at the same time.

Run the attack alone with `python -m tests.trust.test_concurrent_saves WRITERS SAVES`; it prints counts.
"""

import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import attractor as at
from attractor.train import checkpoint

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


@pytest.mark.slow
def test_a_thousand_simultaneous_saves_keep_a_complete_checkpoint(tmp_path):
    check_attack(tmp_path, 4, 250)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        result = attack(place, *map(int, sys.argv[1:]))
        kinds = {kind: sum(e.startswith(kind) for e in result["errors"]) for kind in ("save", "load")}
        print(json.dumps({**result, "errors": kinds, "examples": result["errors"][:4],
                          "seconds": time.perf_counter() - began}, indent=1))  # fmt: skip
