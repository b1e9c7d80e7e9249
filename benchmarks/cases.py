"""The cases of a benchmark, each in a process of its own and with a result file of its own.

Compiled code and the number of threads belong to a process, so cases that share one would disturb each
other. An interrupted benchmark continues where it ended, because cases with a result are not repeated.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
import traceback
import unicodedata
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from attractor.storage.files import write_json
from benchmarks.results import machine

Measure = Callable[[], dict[str, Any]]


def add_options(parser: argparse.ArgumentParser, folder: str, workers: int = 1) -> None:
    """Add the options that `run` reads.

    Args:
        folder: Default folder of the result files.
        workers: Default number of processes.
    """
    add = parser.add_argument
    add("--workers", type=int, default=workers, help="processes; 0 runs all cases in this one")
    add("--threads", type=int, default=2, help="threads per process")
    add("--folder", type=Path, default=Path(folder), help="where each case has its result file")
    add("--cpu-time", action="store_true", help="measure CPU time, on a machine that others use as well")
    add("--stop", type=float, default=math.inf, help="seconds after which no case begins")
    add("--merge", action="store_true", help="only join the results in the folder")
    add("--case", help=argparse.SUPPRESS)  # of a worker process


def measure_cpu_time() -> None:
    """Let timings of this process be its CPU time, which is wall time on a quiet machine and one thread."""
    time.perf_counter = time.process_time


def containing(texts: list[str], cases: Mapping[str, Measure]) -> dict[str, Measure]:
    """Return the cases whose name contains one of the texts."""
    return {name: cases[name] for name in cases if any(text in name for text in texts)}


def name_of(*parts: Any) -> str:
    """Return a name for a case, and so for a file: letters, digits and dashes."""
    text = unicodedata.normalize("NFKD", "-".join(map(str, parts)))
    return re.sub("[^A-Za-z0-9]+", "-", text.encode("ascii", "ignore").decode())


def machine_of(rows: list[dict[str, Any]]) -> Any:
    """Return the machine that measured the cases; a list if there are several."""
    found: list[Any] = []
    for row in rows:
        if row.get("machine") not in (None, *found):
            found.append(row["machine"])
    return found[0] if len(found) == 1 else found or machine()


def number(x: float | None) -> float:
    """Return a number of a result file, in which null stands for infinity."""
    return math.inf if x is None else x


def run(
    benchmark: str, cases: Mapping[str, Measure], options: argparse.Namespace
) -> list[dict[str, Any]] | None:
    """Measure the cases that have no result yet, in their order.

    A case that fails has the text of its failure as a result. Remove the file to repeat it.

    Args:
        benchmark: Name of the module in `benchmarks`, which a worker process runs with the same options.
        cases: Measurements by name.
        options: Parsed options, those of `add_options` among them.

    Returns:
        All results in the folder, or None if this process has measured a single case.
    """
    torch.set_num_threads(options.threads)
    if options.cpu_time:
        measure_cpu_time()
    path = lambda name: options.folder / f"{name}.json"
    if options.case is not None:
        _measure(options.case, cases[options.case], path(options.case), options.cpu_time)
        return None
    began = time.monotonic()

    def one(name: str) -> None:
        if path(name).exists() or time.monotonic() - began > options.stop:
            return
        if not options.workers:
            _measure(name, cases[name], path(name), options.cpu_time)
            return
        threads = str(options.threads)
        command = [sys.executable, "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]
        finished = subprocess.run(
            [*command, "--workers", "0", "--case", name], check=False,
            env={**os.environ, "OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads},
        )  # fmt: skip
        if not path(name).exists():
            failure = f"the process exited with status {finished.returncode}"
            write_json(path(name), {"name": name, "failure": failure})

    if not options.merge:
        with ThreadPoolExecutor(max(1, options.workers)) as pool:
            list(pool.map(one, cases))
        if not options.workers and len(cases) == 1:
            return None
    return [json.loads(file.read_text()) for file in sorted(options.folder.glob("*.json"))]


def _measure(name: str, measure: Measure, path: Path, cpu_time: bool) -> None:
    began = time.monotonic()
    try:
        result = measure()
    except Exception as error:
        traceback.print_exc()
        result = {"failure": f"{type(error).__name__}: {error}"}
    seconds = time.monotonic() - began
    about = {"torch": torch.__version__, **machine(), **({"clock": "CPU time"} if cpu_time else {})}
    write_json(path, {"name": name, **result, "case_seconds": seconds, "machine": about})
    print(f"{name}: {result.get('failure', 'done')} ({seconds:.0f} s)", flush=True)
