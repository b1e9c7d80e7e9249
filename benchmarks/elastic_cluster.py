"""A fit, a sweep of `tune` and an experiment of `reproduce` on a Ray cluster that loses and gains nodes.

The cluster has a head and one more node, each started by `ray start` on this machine with one CPU. During
each of the three jobs the second node is killed by SIGKILL, and a new node joins. The fine data, the
weights of the fit and the metrics of the experiment must equal those of one undisturbed process. The
solver that `tune` chooses depends on measured times, so every equation must have a solver that reaches
the error. Needs Ray: pip install 'attractor[distributed]'.
"""

import argparse
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import attractor as at
from attractor import systems
from attractor.ode import make_trajectories
from attractor.ode.tuning import TunedSolver
from attractor.ode.tuning_sweep import Problem, tune_all
from attractor.reproduce import Results, find, run
from attractor.storage.fingerprint import fingerprint
from benchmarks.cluster import Node, start, two_nodes, wait_for
from benchmarks.results import save

DATA = dict(trajectories=4_000, dt=0.1, horizon=5.0, shard_size=125)
FIT = dict(dt=0.1, horizon=5.0, width=64, correction="attns", trajectories=500)
TUNING = dict(error=1e-5, batch=100, budget=8.0, compile=False)
PROBLEMS = {
    "harmonic-oscillator": Problem(systems.HarmonicOscillator(), 5.0),
    "logistic": Problem(systems.Logistic(), 4.0),
    "lorenz": Problem(systems.Lorenz(), 1.0),
    "van-der-pol": Problem(systems.VanDerPol(), 4.0),
    "henon-heiles": Problem(systems.HenonHeiles(), 10.0),
}
EXPERIMENT, SCALE, SEEDS = "attns-theorem51", "smoke", range(4)
COMPUTED = re.compile(r"shard (.*) was computed on node (\w+)")
AGAIN = re.compile(r"shard (.*) is begun again")


class Log(logging.Handler):
    """Collects the messages of the engine."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []
        self.times: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Append one message."""
        self.messages.append(record.getMessage())
        self.times.append(time.perf_counter())


class Cluster:
    """A head and one other node, which `replace` kills before it starts a new one.

    Args:
        address: Address of the head.
        second: The other node.
        folder: Folder of the logs of new nodes.
    """

    def __init__(self, address: str, second: Node, folder: Path) -> None:
        self.address, self.second, self.folder = address, second, folder
        self.replacements = 0

    def replace(self) -> None:
        """Kill the second node, and start a new one without waiting for it."""
        self.second.kill()
        self.replacements += 1
        log = self.folder / f"node-{self.replacements}.log"
        self.second = start(log, f"--address={self.address}")

    def wait_for_second(self) -> None:
        """Wait until the head and the second node are alive."""
        log = self.folder / f"node-{self.replacements}.log"
        wait_for(self.address, 2, self.second, log)

    def nodes(self) -> set[str]:
        """Return the identifiers of all nodes that have ever been in the cluster."""
        code = (
            "import ray, sys; ray.init(sys.argv[1], logging_level='error', log_to_driver=False)\n"
            "print(*(node['NodeID'] for node in ray.nodes()))"
        )
        command = [sys.executable, "-c", code, self.address]
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
        return set(finished.stdout.split())


def disturbed(cluster: Cluster, job: Callable[[Callable[..., None]], Any], after: int) -> dict[str, Any]:
    """Run a job, during which the second node is killed and a new one joins.

    Args:
        cluster: The cluster.
        job: A function that runs the job, and calls its argument whenever a shard is complete.
        after: Number of complete shards after which the node is killed.

    Returns:
        The result of the job, its duration, and what the engine said about shards and nodes.
    """
    cluster.wait_for_second()
    nodes_before = cluster.nodes()
    log, complete = Log(), [0]
    logger = logging.getLogger("attractor.jobs")
    level = logger.level
    # A shard is complete when the next one has been submitted; half a second later it has begun.
    replacement = threading.Timer(0.5, cluster.replace)

    def progress(*_: Any) -> None:
        complete[0] += 1
        if complete[0] == after:
            replacement.start()

    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    start_time = time.perf_counter()
    try:
        result = job(progress)
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)
    seconds = time.perf_counter() - start_time
    replacement.join()
    nodes = Counter(match[2] for message in log.messages if (match := COMPUTED.match(message)))
    new_nodes = cluster.nodes() - nodes_before
    pauses = [after - before for before, after in pairwise(log.times)]
    return {
        "result": result,
        "seconds": seconds,
        "shards": sum(nodes.values()),
        "killed_after": after,
        "begun_again": [match[1] for message in log.messages if (match := AGAIN.match(message))],
        "shards_per_node": sorted(nodes.values()),
        "new_node_shards": sum(nodes[node] for node in new_nodes),
        "longest_pause": max(pauses, default=0.0),  # seconds between two messages of the engine
    }


def fit_weights(folder: Path) -> str:
    """Return a fingerprint of the weights of a fit from the data in a folder."""
    return fingerprint(at.fit(systems.ElasticPendulum(), data=folder, **FIT).correction.state_dict())


def fine_data(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Compute fine data and fit a solver to them, in one process and on the cluster."""

    def timed(name: str, **options: Any) -> tuple[str, float]:
        start_time = time.perf_counter()
        system = systems.ElasticPendulum()
        data = make_trajectories(system, folder / name, **{**DATA, **options})
        return data.hash, time.perf_counter() - start_time

    expected, seconds = timed("here")
    on_cluster: dict[str, Any] = dict(engine="ray", address=cluster.address)
    row = disturbed(
        cluster,
        lambda progress: timed("cluster", **on_cluster, progress=progress)[0],
        DATA["trajectories"] // DATA["shard_size"] // 4,
    )
    same_data = row.pop("result") == expected
    same_fit = fit_weights(folder / "here") == fit_weights(folder / "cluster")
    return {**row, "equal": same_data and same_fit, "one_process_seconds": seconds, "hash": expected}


def sweep(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Tune solvers of all equations on the cluster."""

    def job(progress: Callable[..., None]) -> dict[str, TunedSolver | ValueError]:
        results = {}
        for name, solver in tune_all(
            PROBLEMS, folder / "tune", **TUNING, engine="ray", address=cluster.address
        ):
            results[name] = solver
            progress()
        return results

    row = disturbed(cluster, job, 1)
    solvers = row.pop("result")
    errors = {}
    for name, solver in solvers.items():
        if isinstance(solver, TunedSolver):
            errors[name] = solver.report.winner.error
    reached = sorted(errors) == sorted(PROBLEMS) and max(errors.values()) <= TUNING["error"]
    return {**row, "equal": reached, "errors": errors}


def metrics(results: Results) -> dict[str, Any]:
    """Return the metrics of all runs, without durations."""
    return {
        f"{arm}, seed {seed}": {k: v for k, v in run["metrics"].items() if "seconds" not in k}
        for arm, runs in results.runs.items()
        for seed, run in runs.items()
    }


def experiment(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Run all arms of an experiment, in one process and on the cluster."""

    def runs(name: str, **options: Any) -> Results:
        return run(
            find(EXPERIMENT), SCALE, folder=folder / name, seeds=list(SEEDS), threads=1, **options
        )

    start_time = time.perf_counter()
    expected = metrics(runs("experiment-here", engine="here"))
    seconds = time.perf_counter() - start_time
    row = disturbed(
        cluster,
        lambda progress: runs(
            "experiment-cluster", engine="ray", address=cluster.address, tell=progress
        ),
        len(expected) // 4,
    )
    equal = fingerprint(metrics(row.pop("result"))) == fingerprint(expected)
    return {**row, "equal": equal, "one_process_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of jobs; nothing is saved")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # nodes are ended then, too
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    jobs = {"fine data and fit": fine_data, "sweep of tune": sweep, "reproduce": experiment}
    rows, start_time = {}, time.perf_counter()
    with tempfile.TemporaryDirectory() as name, two_nodes() as (address, second):
        cluster = Cluster(address, second, Path(name))
        try:
            for job, function in jobs.items():
                if not options.only or job in options.only:
                    rows[job] = function(cluster, Path(name))
                    print(job, rows[job], flush=True)
        finally:
            cluster.second.kill()
    seconds = time.perf_counter() - start_time
    if not options.only:
        content = {"data": DATA, "tuning": TUNING, "experiment": [EXPERIMENT, SCALE, len(SEEDS)]}
        save("elastic_cluster", {**content, "jobs": rows, "seconds": seconds, "load_before": load})
    if not all(row["equal"] and row["begun_again"] and row["new_node_shards"] for row in rows.values()):
        raise SystemExit("a result differs, no shard was begun again, or the new node had no shards")


if __name__ == "__main__":
    main()
