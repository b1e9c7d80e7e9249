"""When a step is captured and when not, with a stand-in for CUDA; test_loop has the real thing (gpu)."""

import random
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attractor.train.capture import WARMUP, Captured


class Stream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def cuda(monkeypatch):
    """What `Captured` uses of torch.cuda; `refuse` makes captures of the step fail."""
    state = SimpleNamespace(
        main=Stream(), mode="default", captures=0, replays=0, refuse=False, step=None
    )
    state.current = state.main

    class Graph:
        def replay(self):
            state.replays += 1

    @contextmanager
    def graph(graph, stream, capture_error_mode="global"):
        state.captures += 1
        state.current = stream  # and there torch stays if it fails
        yield
        if state.refuse and state.captures == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        state.current = state.main

    fakes = {
        "Stream": Stream, "CUDAGraph": Graph, "graph": graph, "stream": lambda s: nullcontext(),
        "current_stream": lambda: state.current, "set_stream": lambda s: setattr(state, "current", s),
        "get_sync_debug_mode": lambda: state.mode, "set_sync_debug_mode": lambda m: setattr(state, "mode", m),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return state


def calls(captured, n):
    for _ in range(n):
        captured(torch.ones(()))


def test_a_step_runs_a_few_times_and_is_then_replayed(cuda):
    total = torch.zeros(())
    captured = Captured(total.add_)
    for _ in range(10):
        captured(torch.ones(()))
    assert total == WARMUP + 1  # the last one was the capture, which on a GPU does nothing
    assert (cuda.captures, cuda.replays) == (1, 10 - WARMUP)
    captured(torch.ones(2).sum().view(1)[0].double())  # another dtype runs as it is
    assert total == WARMUP + 3
    assert cuda.replays == 10 - WARMUP


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(()).item(), random.random, np.random.rand],
    ids=["torch", "python", "numpy"],
)
def test_random_numbers_of_the_cpu_are_not_frozen_into_a_graph(cuda, draw):
    drawn = []
    captured = Captured(lambda x: drawn.append(draw()))
    with pytest.warns(UserWarning, match=r"not captured .* \(random numbers are drawn on the CPU"):
        calls(captured, 8)
    assert len(set(drawn)) == 8
    assert cuda.captures == 0


def test_what_waits_for_the_gpu_is_put_back_and_done_again(cuda):
    total = torch.zeros(())

    def run(x):
        total.add_(x)
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def snapshot():
        before = total.clone()
        return lambda: total.copy_(before)

    captured = Captured(run, snapshot)
    with pytest.warns(UserWarning, match=r"going on without \(called a synchronizing CUDA operation\)"):
        calls(captured, 6)
    assert total == 6
    assert (cuda.mode, cuda.captures) == ("default", 0)


def test_after_a_failed_capture_all_goes_on_on_the_stream_before(cuda):
    cuda.refuse = True
    streams = []
    captured = Captured(lambda x: streams.append(cuda.current))
    with pytest.warns(UserWarning, match=r"going on without \(operation not permitted"):
        calls(captured, 6)
    assert cuda.current is cuda.main
    assert streams[-2:] == [cuda.main, cuda.main]
    assert (cuda.captures, cuda.replays) == (2, 0)  # the second frees torch's generator from the first
