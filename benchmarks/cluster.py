"""A Ray cluster of two nodes makes 10,000 trajectories while one of them is killed half way.

The nodes are two `ray start` on this machine, each with one CPU. The data must have the hash of those
made in one process; that is timed as well, as are two processes without Ray, and the cluster when nobody
dies. Needs Ray: pip install 'attractor[distributed]'.
"""

import argparse
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attractor import systems
from attractor.ode import make_trajectories
from benchmarks.results import save

DATA = dict(trajectories=10_000, dt=0.1, horizon=5.0, shard_size=250)
STORE = 100_000_000  # bytes of shared memory a node


@dataclass
class Node:
    """What one `ray start --block` began: raylet, agents and workers are its children."""

    process: subprocess.Popen

    def kill(self) -> int:
        """SIGKILL to all of them; how many there were."""
        import psutil

        everybody = []
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            everybody = [*top.children(recursive=True), top]
        for process in everybody:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        return len(everybody)


def start(log: Path, *options: str) -> Node:
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    sizes = ["--num-cpus=1", f"--object-store-memory={STORE}"]
    with log.open("wb") as file:
        return Node(subprocess.Popen([*ray, *sizes, *options], stdout=file, stderr=file))


@contextmanager
def two_nodes() -> Iterator[tuple[str, Node]]:
    """The address of a cluster, and the node in it that may be killed; nothing is left of it afterwards.

    A token keeps others out; it must be known before Ray is imported.
    """
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, nodes = f"127.0.0.1:{port}", []
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as name:
        folder = Path(name)  # short, because names of sockets must be
        try:
            one = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder / 'h'}"]
            for count, options in enumerate((one, [f"--address={address}"]), 1):
                log = folder / f"{count}.log"
                nodes.append(start(log, *options))
                wait_for(address, count, nodes[-1], log)
            yield address, nodes[1]
        finally:
            for node in reversed(nodes):
                node.kill()


def wait_for(address: str, count: int, node: Node, log: Path) -> None:
    """Until so many nodes are alive; what Ray said if they never are."""
    code = (
        "import ray, sys; ray.init(sys.argv[1], logging_level='error', log_to_driver=False)\n"
        "sys.exit(sum(n['Alive'] for n in ray.nodes()) < int(sys.argv[2]))"
    )
    for _ in range(10):
        time.sleep(2)
        asked = subprocess.run([sys.executable, "-c", code, address, str(count)], capture_output=True)
        if asked.returncode == 0:
            return
        if node.process.poll() is not None:
            break
    raise RuntimeError(f"the cluster has not begun:\n{log.read_text()}\n{asked.stderr.decode()}")


class Warnings(logging.Handler):
    """Keeps what is said about workers that died."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One more."""
        self.lines.append(record.getMessage())


def timed(folder: Path, **how: Any) -> tuple[str, float]:
    began = time.perf_counter()
    made = make_trajectories(systems.ElasticPendulum(), folder, **{**DATA, **how})
    return made.hash, time.perf_counter() - began


def killed(folder: Path, address: str, victim: Node) -> dict[str, Any]:
    """Kill a node when half of the shards are there."""
    told, found, log = Warnings(), {}, logging.getLogger("attractor.jobs.ledger")

    def progress(line: str) -> None:
        done, total = (int(word) for word in line.split() if word.isdigit())
        if done == total // 2:
            found.update(after_shards=done, of_shards=total, processes_killed=victim.kill())

    log.addHandler(told)
    try:
        found["hash"], found["seconds"] = timed(folder, engine="ray", address=address, progress=progress)
    finally:
        log.removeHandler(told)
    return {**found, "begun_again": told.lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few trajectories, nothing is written")
    quick = parser.parse_args().quick
    if quick:
        DATA.update(trajectories=400, horizon=2.0, shard_size=20)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # nodes are ended then, too
    torch.set_num_threads(1)
    before = os.getloadavg()[0]  # what else this machine does, which the times depend on
    with tempfile.TemporaryDirectory() as name, two_nodes() as (address, victim):
        folder = Path(name)
        alone, one = timed(folder / "one")
        print(f"one process: {one:.1f} s", flush=True)
        pair, two = timed(folder / "two", workers=2)
        print(f"two processes: {two:.1f} s", flush=True)
        whole, both = timed(folder / "cluster", engine="ray", address=address)
        print(f"two nodes: {both:.1f} s", flush=True)
        torn = killed(folder / "torn", address, victim)
        print(f"one of them killed half way: {torn['seconds']:.1f} s", *torn["begun_again"], sep="\n")
    equal = {alone, pair, whole, torn["hash"]} == {alone}
    print(f"hashes equal: {equal}")
    seconds = {
        "one process": one,
        "two processes": two,
        "two nodes": both,
        "one killed": torn["seconds"],
    }
    if not quick:
        found = {"hash": alone, "equal": equal, "seconds": seconds, "load_before": before}
        save("cluster", {"data": DATA, **found, "killed": torn})
    if not (equal and torn["begun_again"]):
        raise SystemExit("the hashes differ, or the node had nothing to do when it was killed")


if __name__ == "__main__":
    main()
