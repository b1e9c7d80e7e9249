"""Timing in rounds with device events and graph replay, peak memory, and ceilings of the machine."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attractor.train.capture import WARMUP, Captured

Call = Callable[[], Any]

WARM = 3  # warm-up calls
LEAST = 2e-4  # smallest duration of a measurement in seconds
CACHE = 256 << 20  # bytes, several times the cache of a GPU


@dataclass(frozen=True)
class Rounds:
    """Times of several calls.

    Attributes:
        ms: milliseconds of one call by name, for every round.
        graph: whether replays of graphs were timed, for all calls.
    """

    ms: dict[str, list[float]]
    graph: bool = False

    def median(self, name: str) -> float:
        """Return the median milliseconds of a call."""
        return statistics.median(self.ms[name])

    def ratio(self, ours: str, theirs: str) -> float:
        """Return the median of the ratios of the rounds."""
        return statistics.median(a / b for a, b in zip(self.ms[ours], self.ms[theirs]))


def measure(
    calls: Mapping[str, Call], device: str | torch.device, rounds: int = 15, graphs: bool = False
) -> Rounds:
    """Time calls in rounds, each of which runs all calls in turn. Requires: calls can be repeated.

    Args:
        calls: name -> call.
        device: the device that the calls use.
        rounds: number of rounds.
        graphs: on a GPU, time replays of captured graphs, so that launches are not included. If a call
            cannot be captured, there is a warning, and all calls run eagerly.
    """
    gpu = torch.device(device).type == "cuda"
    replays = {name: graph_of(call) if gpu and graphs else None for name, call in calls.items()}
    graph = None not in replays.values()
    functions = {name: (graph and replays[name]) or warm_up(call) for name, call in calls.items()}
    repeats = {
        name: max(1, round(LEAST / max(_seconds(run, 1, gpu), 1e-7))) for name, run in functions.items()
    }
    ms: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in functions.items():
            run()  # fills the cache with the data of this call
            ms[name].append(1e3 * _seconds(run, repeats[name], gpu))
    return Rounds(ms, graph)


def warm_up(call: Call) -> Call:
    """Run a call a few times, so that it is compiled and its memory allocated; return it."""
    for _ in range(WARM):
        call()
    return call


def graph_of(call: Call) -> Call | None:
    """Return a replay of a call as a CUDA graph; warn and return None if it cannot be captured."""
    captured = Captured(lambda _: call())
    dummy = torch.zeros(1, device="cuda")
    for _ in range(WARMUP + 1):
        captured(dummy)
    if captured.graph is None:
        return None
    return lambda: captured.replay()


def _seconds(run: Call, times: int, gpu: bool) -> float:
    if not gpu:
        start = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - start) / times
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / times


def peak_mb(call: Call, device: str | torch.device) -> float | None:
    """Return the peak memory of a call in megabytes, including its result; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def ceilings(device: str | torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure the GB/s of a copy, counting reads and writes, and the TFLOP/s of a matrix product."""
    gpu = torch.device(device).type == "cuda"
    a = torch.randn((1 << 30 if gpu else CACHE) // 4, device=device)
    b = torch.empty_like(a)
    # Without a fast product in half precision, a product of size 1,024 takes a CPU half a minute.
    n = 8192 if gpu else 1024 if dtype.itemsize > 2 else 128
    x, y = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    timings = measure({"copy": lambda: b.copy_(a), "product": lambda: x @ y}, device, rounds=7)
    return {
        "copy_gb_s": 2 * a.nbytes / timings.median("copy") / 1e6,
        "matrix_tflop_s": 2 * n**3 / timings.median("product") / 1e9,
    }
