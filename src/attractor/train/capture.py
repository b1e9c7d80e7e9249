"""Steps that cost the host one launch: CUDA graphs, and compiled blocks."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WARMUP = 3  # calls before the capture: libraries choose their algorithms, optimisers make their state
Blocks = Callable[[nn.Module], Iterable[nn.Module]]


class Captured:
    """A function of tensors, recorded as a CUDA graph and then replayed.

    The first calls run as they are, on a side stream; they count like any other. The last of them also
    looks for what no graph can hold: operations that wait for the GPU, and random numbers of the CPU,
    which a replay would not draw again. What cannot be captured, and inputs of another shape than the
    first, run as they are.

    Args:
        run: whatever it does to tensors, parameters included, it must do in place; what it returns is
            overwritten by the next call.
        snapshot: takes down all that `run` changes, and returns what puts it back.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        snapshot: Callable[[], Callable[[], None]] = lambda: lambda: None,
    ) -> None:
        self.run, self.snapshot = run, snapshot
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls, self.failed = 0, False
        self.inputs: list[Tensor] = []
        self.result: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        """What `run` returns for these inputs."""
        if not self.calls:
            self.inputs = [x.clone() for x in inputs]  # what the graph reads, and the shapes it is for
        if self.failed or not _alike(inputs, self.inputs):
            return self.run(*inputs)
        self.calls += 1
        if self.calls < WARMUP:
            return self._aside(inputs)
        if self.calls == WARMUP:
            return self._watched(inputs)
        if self.graph is None and not self._capture():
            return self.run(*inputs)
        for own, given in zip(self.inputs, inputs):
            own.copy_(given, non_blocking=True)
        return self.replay()

    def replay(self) -> Any:
        """What the graph did last, once more: the same inputs."""
        assert self.graph is not None
        self.graph.replay()
        return self.result

    def _aside(self, inputs: tuple[Tensor, ...]) -> Any:
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            result = self.run(*inputs)
        main.wait_stream(self.stream)
        return result

    def _watched(self, inputs: tuple[Tensor, ...]) -> Any:
        """A call in which an operation that waits for the GPU is an error; then it is done again."""
        drawn = _host_random()
        restore, mode = self.snapshot(), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():  # torch says that it does not find all of them
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            result = self._aside(inputs)
        except RuntimeError as error:
            self._give_up(error)
        else:
            if _host_random() != drawn:
                self._give_up(RuntimeError("random numbers are drawn on the CPU; draw them on the GPU"))
            return result
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        restore()
        return self.run(*inputs)

    def _capture(self) -> bool:
        """Record a call, without its being done; whether that was possible."""
        graph, main = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:  # other threads may go on allocating, such as those that load data
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.result = self.run(*self.inputs)
        except RuntimeError as error:
            # Torch stays on the capture's stream, and its generator takes itself to be captured and will
            # not draw, until another capture succeeds.
            again, mode = torch.cuda.CUDAGraph(), "thread_local"
            with (
                suppress(RuntimeError),
                torch.cuda.graph(again, stream=self.stream, capture_error_mode=mode),
            ):
                self.inputs[0].clone()
            torch.cuda.set_stream(main)
            self._give_up(error)
            return False
        self.graph = graph
        return True

    def _give_up(self, error: RuntimeError) -> None:
        self.failed, self.result = True, None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"not captured in a CUDA graph, going on without ({reason})", stacklevel=4)


def _host_random() -> list[Any]:
    """The state of torch's, Python's and NumPy's random numbers on the CPU."""
    numpys = np.random.get_state(legacy=False)["state"]
    return [torch.get_rng_state().tolist(), random.getstate(), numpys["key"].tolist(), numpys["pos"]]


def _alike(inputs: tuple[Tensor, ...], others: list[Tensor]) -> bool:
    return len(inputs) == len(others) and all(
        x.shape == y.shape and x.dtype == y.dtype for x, y in zip(inputs, others)
    )


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks a network is made of: members of one class that follow each other in a list.

    A list is an `nn.Sequential` or `nn.ModuleList` with two or more members of a class that has modules
    of its own; where such blocks hold further ones, those are taken.
    """
    found: list[nn.Module] = []
    for child in model.children():
        found += repeated_blocks(child)
    if isinstance(model, nn.Sequential | nn.ModuleList):
        kinds = [type(child) for child in model]
        for child in model:
            simple = isinstance(child, nn.Sequential | nn.ModuleList) or not any(
                True for _ in child.children()
            )
            inner = any(block is part for part in child.modules() for block in found)
            if not simple and not inner and kinds.count(type(child)) > 1:
                found.append(child)
    return found


@contextmanager
def compiled_blocks(
    model: nn.Module, blocks: Blocks | None = None, **options: Any
) -> Iterator[list[nn.Module]]:
    """Compile a network's blocks while inside; equal blocks share their code, so that it takes seconds.

    Args:
        model: changed in place, and left as it was.
        blocks: ``model -> modules`` to be compiled; None: its `repeated_blocks`.
        options: further ones of `torch.compile`.
    """
    found = list(repeated_blocks(model) if blocks is None else blocks(model))
    if not found:
        raise ValueError(
            f"no repeated blocks found in {type(model).__name__}; name what to compile with blocks="
        )
    from torch._dynamo import config

    before = [block._compiled_call_impl for block in found]
    try:
        for block in found:
            block.compile(dynamic=False, **options)
        # Stages, first blocks, training and evaluation, one network after another: more kinds of block
        # than the eight that torch allows.
        with config.patch(recompile_limit=1024, accumulated_recompile_limit=1024):
            yield found
    finally:
        for block, own in zip(found, before):
            block._compiled_call_impl = own
