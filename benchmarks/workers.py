"""Simulate jobs and trainings on up to 1,000 workers with slow machines and failures.

``python -m benchmarks.workers`` measures what a shard costs on this machine, simulates (some minutes) and
writes results/workers.json. `simulated_ray` and `data_parallel` have the models.
"""

import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from attractor import systems
from attractor.ode import make_trajectories
from attractor.storage.files import write_bytes
from benchmarks.cluster import DATA
from benchmarks.data_parallel import Training, training_row
from benchmarks.results import save
from benchmarks.simulated_ray import Case, simulate

HOUR = 3600.0
WORK = 500 * HOUR  # of one worker, in the jobs
LINK, DISK = 10e9 / 8, 1e9  # bytes per second of the command's machine
MTBF = 1_000 * HOUR, 10 * HOUR  # mean times between failures of a machine
RESULT = 100_000  # bytes per artifact that is not data, such as the results of an arm
SEEDS = 3
WITHOUT = {
    "stragglers": {"spread": 0.0, "slow": 0.0},
    "failures": {"mtbf": math.inf},
    "command": {"size": 0.0, "handling": 0.0},
}


def row_of(case: Case) -> dict[str, Any]:
    """Return means over seeds: duration, speed-up, and the share of the time that each cause takes.

    The share of a cause is the part of the duration that vanishes in a simulation without the cause.
    """
    runs = [simulate(case, seed) for seed in range(SEEDS)]
    wall = fmean(run.wall for run in runs if not run.died)
    speedup = case.shards * case.seconds / wall
    lost = {
        cause: 1 - simulate(replace(case, **change)).wall / runs[0].wall
        for cause, change in WITHOUT.items()
    }
    print(f"{case.workers} workers, {case.seconds:g} s: {wall / HOUR:.2f} h", flush=True)
    return {
        **asdict(case), "hours": wall / HOUR, "speedup": speedup, "efficiency": speedup / case.workers,
        "lost": lost, "bytes": case.shards * case.size, "died": sum(run.died for run in runs),
        "begun_again": fmean(run.begun_again for run in runs),
        "death_probability": case.job_failure_probability,
    }  # fmt: skip


RAY_OVERHEAD = """
import os, time, ray
from attractor import jobs
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
         object_store_memory=100_000_000, _temp_dir=os.environ["RAY_FOLDER"])
job = jobs.Job("attractor.jobs.job:power", {"exponent": 2})
times = []
for _ in range(8):
    began = time.perf_counter()
    list(jobs.each(job, range(200), engine="ray"))
    times.append(time.perf_counter() - began)
print(min(times) / 200)
"""


def printed_seconds(code: str, **variables: str) -> float:
    """Run Python code in a process of its own and return the number that it prints last."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **variables}
    )
    return float(done.stdout.split()[-1])


def measure() -> dict[str, float]:
    """Return what a shard of 1,000 trajectories takes and weighs, and what it costs the command.

    Computing and hashing are processor time of the quickest round, because others may use this machine.
    """
    times, plan = list[float](), {**DATA, "trajectories": 6_000, "shard_size": 1_000}
    progress = lambda _: times.append(time.process_time())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        make_trajectories(systems.ElasticPendulum(), folder, **plan, progress=progress)
        content = next(folder.glob("*.safetensors")).read_bytes()
        hashing = quickest(lambda: sha256(content).hexdigest(), time.process_time)
        write = quickest(lambda: write_bytes(folder / "small", b"x"), time.perf_counter)
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        overhead = printed_seconds(RAY_OVERHEAD, **variables, RAY_FOLDER=name)
    code = "import time, attractor.ode.shards; print(time.process_time())"
    return {
        "shard_seconds": min(after - before for before, after in pairwise(times)),
        "shard_bytes": len(content), "startup": printed_seconds(code),
        "overhead": overhead + write, "hash_seconds_per_byte": hashing / len(content),
    }  # fmt: skip


def quickest(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return the time of the quickest of 20 rounds."""
    times = []
    for _ in range(20):
        began = clock()
        run()
        times.append(clock() - began)
    return min(times)


def job_of(costs: dict[str, float], workers: int, seconds: float, data: bool, **options: Any) -> Case:
    """Return the job of `WORK`, cut into shards of a duration, with measured costs.

    Args:
        costs: The result of `measure`.
        workers: Number of machines.
        seconds: Duration of a shard.
        data: Whether shards return trajectories, or `RESULT` bytes each.
        options: Other attributes of the case.
    """
    size = seconds * costs["shard_bytes"] / costs["shard_seconds"] if data else RESULT
    handling = costs["overhead"] + size * (costs["hash_seconds_per_byte"] + 1 / DISK)
    case = Case(workers, round(WORK / seconds), seconds, size, handling, LINK, costs["startup"])
    return replace(case, **{"copies": data, **options})  # as the engine does for fine data


def limit_row(costs: dict[str, float], seconds: float, data: bool) -> dict[str, Any]:
    """Return how many workers occupy the link, and the command, and the efficiency around that number.

    The efficiency of more than 2,000 workers is left out, because the simulation takes minutes.
    """
    case = job_of(costs, 1, seconds, data, startup=0.0)
    link, command = seconds * case.link / case.size, seconds / case.handling
    efficiency = {}
    for factor in (0.5, 1.0, 2.0):
        workers = max(1, round(factor * min(link, command)))
        if workers <= 2_000:
            wall = simulate(replace(case, workers=workers, shards=10 * workers)).wall
            efficiency[str(factor)] = 10 * seconds / wall
    row = {"seconds": seconds, "data": data, "size": case.size, "link": link, "command": command}
    return {**row, "efficiency": efficiency}


def main() -> None:
    torch.set_num_threads(1)
    costs = measure()
    print(costs, flush=True)
    machines = {"spread": 0.1, "slow": 0.01}
    cases = [(True, MTBF[0]), (False, MTBF[0]), (False, MTBF[1])]
    save("workers", {
        "costs": costs, "work_hours": WORK / HOUR, "seeds": SEEDS, "link": LINK, "disk": DISK,
        "workers": [
            {"data": data, **row_of(job_of(costs, workers, 60.0, data, mtbf=mtbf, **machines))}
            for data, mtbf in cases for workers in (1, 10, 100, 1_000)
        ],
        "durations": [
            row_of(job_of(costs, 1_000, seconds, False, mtbf=mtbf, **machines))
            for mtbf in MTBF for seconds in (10.0, 600.0)  # 60 s is in the rows above
        ],
        "copies": [
            row_of(job_of(costs, 1_000, seconds, False, mtbf=mtbf, copies=True, **machines))
            for mtbf in MTBF for seconds in (60.0, 600.0)
        ],
        "long_shards": [
            {"seconds": seconds, "mtbf": mtbf, "death_probability":
                job_of(costs, 1_000, seconds, False, mtbf=mtbf, **machines).job_failure_probability}
            for mtbf in MTBF for seconds in (HOUR, 4 * HOUR)
        ],
        "limits": [
            limit_row(costs, seconds, data) for data in (True, False) for seconds in (10.0, 60.0)
        ],
        "training": [
            training_row(Training(processes, mtbf)) for mtbf in MTBF for processes in (8, 64, 1_000)
        ],
    })  # fmt: skip


if __name__ == "__main__":
    main()
