"""Clocks: rounds in turn, device events, graph replay; peak memory; what the machine can do at most."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attractor.train.capture import WARMUP, Captured

Call = Callable[[], Any]

WARM = 3  # calls that do not count
LEAST = 2e-4  # seconds of work between two looks at a clock
CACHE = 256 << 20  # bytes, several times what a GPU keeps close


@dataclass(frozen=True)
class Rounds:
    """What a clock showed.

    Attributes:
        ms: of one call, for every round.
        graph: whether replays of graphs were timed, of everybody.
    """

    ms: dict[str, list[float]]
    graph: bool = False

    def median(self, name: str) -> float:
        """Milliseconds of a call."""
        return statistics.median(self.ms[name])

    def ratio(self, ours: str, theirs: str) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.ms[ours], self.ms[theirs]))


def measure(
    calls: Mapping[str, Call], device: str | torch.device, rounds: int = 15, graphs: bool = False
) -> Rounds:
    """Time calls, which must be able to run again and again; in a round everybody has a turn.

    Args:
        graphs: on a GPU, replay calls that were captured, so that launches are not timed. If one cannot
            be captured, which a warning tells, all run as they are.
    """
    gpu = torch.device(device).type == "cuda"
    play = {name: graph_of(call) if gpu and graphs else None for name, call in calls.items()}
    graph = None not in play.values()
    turns = {name: (graph and play[name]) or warmed(call) for name, call in calls.items()}
    many = {name: max(1, round(LEAST / max(_seconds(run, 1, gpu), 1e-7))) for name, run in turns.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in turns.items():
            run()  # whoever came before has left other data in the cache
            found[name].append(1e3 * _seconds(run, many[name], gpu))
    return Rounds(found, graph)


def warmed(call: Call) -> Call:
    """The call, after a few that compile and allocate what it needs."""
    for _ in range(WARM):
        call()
    return call


def graph_of(call: Call) -> Call | None:
    """The replay of a call as a CUDA graph; None, and a warning, if it cannot be captured."""
    captured = Captured(lambda _: call())
    given = torch.zeros(1, device="cuda")
    for _ in range(WARMUP + 1):
        captured(given)
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
    """Megabytes in use at the worst moment beyond those before, with what is returned; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def ceilings(device: str | torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The most that was seen here: GB/s of a copy, read and written, and TFLOP/s of a matrix product."""
    gpu = torch.device(device).type == "cuda"
    a = torch.randn((1 << 30 if gpu else CACHE) // 4, device=device)
    b = torch.empty_like(a)
    # Some CPUs have no fast product of half precision, and one of 1,024 takes them half a minute.
    n = 8192 if gpu else 1024 if dtype.itemsize > 2 else 128
    x, y = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    found = measure({"copy": lambda: b.copy_(a), "product": lambda: x @ y}, device, rounds=7)
    return {
        "copy_gb_s": 2 * a.nbytes / found.median("copy") / 1e6,
        "matrix_tflop_s": 2 * n**3 / found.median("product") / 1e9,
    }
