"""Clocks: rounds in turn, device events, graph replay; peak memory; what the machine can do at most."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Any]

WARM = 3  # calls that do not count
LEAST = 2e-4  # seconds of work between two looks at a clock
CACHE = 256 << 20  # bytes, several times what a GPU keeps close


def milliseconds(
    calls: Mapping[str, Call], device: str | torch.device, rounds: int = 15, graphs: bool = False
) -> dict[str, list[float]]:
    """Of one call, for every round; in a round everybody has a turn.

    Args:
        calls: what is timed; each must be able to run again and again.
        graphs: on a GPU, replay calls that were captured, so that launches are not timed. A call that
            cannot be captured is not caught: it raises.
    """
    gpu = torch.device(device).type == "cuda"
    play = {name: graph_of(call) if gpu and graphs else warmed(call) for name, call in calls.items()}
    once = {name: _seconds(run, 1, gpu) for name, run in play.items()}
    many = {name: max(1, round(LEAST / max(took, 1e-7))) for name, took in once.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in play.items():
            run()  # whoever came before has left other data in the cache
            found[name].append(1e3 * _seconds(run, many[name], gpu))
    return found


def ratio(found: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(found[ours], found[theirs]))


def warmed(call: Call) -> Call:
    """The call, after a few that compile and allocate what it needs."""
    for _ in range(WARM):
        call()
    return call


def graph_of(call: Call) -> Call:
    """The call as a CUDA graph; what it returns lives as long as the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warmed(call)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.kept = call()
    return graph.replay


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
    n = 8192 if gpu else 1024
    x, y = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    found = milliseconds({"copy": lambda: b.copy_(a), "product": lambda: x @ y}, device, rounds=7)
    return {
        "copy_gb_s": 2 * a.nbytes / statistics.median(found["copy"]) / 1e6,
        "matrix_tflop_s": 2 * n**3 / statistics.median(found["product"]) / 1e9,
    }
