"""What the jobs of these tests run, in whatever process."""

import atexit
import os
import signal
import time
from pathlib import Path


def threads(config, shard):
    import torch

    return [shard, torch.get_num_threads()]


def shown(config, shard):
    """What it was called with, to the last type."""
    return {"config": repr(sorted(config["inner"].items(), key=repr)), "shard": repr(shard)}


def launched(config, shard):
    return {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HOME")}


def noted(config, shard):
    """Bytes of a shard; every call leaves a mark, so that calls can be counted."""
    mark(config, shard)
    return f"{config['word']} {shard}".encode() * 1000


def dies(config, shard):
    """Kills its own process where it is told to, the first times."""
    begun = mark(config, shard)
    if shard == config["victim"] and begun <= config["deaths"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"shard": shard, "third": 1 / 3, "nothing": float("nan")}


class OwnError(ValueError):
    """Cannot be sent between processes: it wants two arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fails(config, shard):
    mark(config, shard)
    if shard == 2:
        raise OwnError("this", "that")
    return shard


def fails_second(config, shard):
    """After the first has ended, and before the others."""
    others = shard not in (0, 1)
    while shard != 0 and not (Path(config["marks"]) / ("1" if others else "0")).exists():
        time.sleep(0.02)
    time.sleep(0.2 * others)
    mark(config, shard)
    if shard == 1:
        raise OwnError("this", "that")
    return shard


def sleeps(config, shard):
    mark(config, shard)
    time.sleep(0 if shard == 0 else 60)
    return shard


def mark(config, shard):
    """How often this shard has been begun."""
    with (Path(config["marks"]) / str(shard)).open("a") as file:
        file.write(".")
    return (Path(config["marks"]) / str(shard)).stat().st_size


def leaves_a_note(config, shard):
    """When its process ends as it should."""
    atexit.register((Path(config["marks"]) / f"{shard}").write_text, "gone")
    return b"done"


def zero_waits_for_one(config, shard):
    """Compute shard 0 only after shard 1 has begun, or raise after two minutes."""
    mark(config, shard)
    deadline = time.monotonic() + 120
    while not (Path(config["marks"]) / "1").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("shard 1 has not begun")
        time.sleep(0.1)
    return shard


def slow_at_first(config, shard):
    """Return the number of the attempt; the first one at shard 0 takes ten minutes."""
    attempt = mark(config, shard)
    time.sleep(600 if shard == 0 and attempt == 1 else 0.2)
    return attempt
