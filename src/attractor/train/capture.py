"""CUDA graphs, which need one launch per step, and compiled blocks."""

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
    """A function of tensors that is captured as a CUDA graph and then replayed.

    The first calls run eagerly on a side stream; they have their normal effect. The last of them also
    detects operations that a graph cannot contain: those that wait for the GPU, and random numbers of
    the CPU, which a replay would not draw again. Functions that cannot be captured, and inputs of other
    shapes than the first, run eagerly.

    Args:
        run: the function. It must change tensors, parameters included, in place; its result is
            overwritten by the next call.
        snapshot: a function that copies everything that `run` changes, and returns a function that
            restores it.
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
        """Return the result of `run` for these inputs."""
        if not self.calls:
            self.inputs = [x.clone() for x in inputs]  # the buffers that the graph reads
        if self.failed or not _alike(inputs, self.inputs):
            return self.run(*inputs)
        self.calls += 1
        if self.calls < WARMUP:
            return self._on_side_stream(inputs)
        if self.calls == WARMUP:
            return self._checked_call(inputs)
        if self.graph is None and not self._capture():
            return self.run(*inputs)
        for own, new in zip(self.inputs, inputs):
            own.copy_(new, non_blocking=True)
        return self.replay()

    def replay(self) -> Any:
        """Replay the graph with the inputs of the last call."""
        assert self.graph is not None
        self.graph.replay()
        return self.result

    def _on_side_stream(self, inputs: tuple[Tensor, ...]) -> Any:
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            result = self.run(*inputs)
        main.wait_stream(self.stream)
        return result

    def _checked_call(self, inputs: tuple[Tensor, ...]) -> Any:
        """Call `run` with an error for operations that wait for the GPU; if it fails, call it again."""
        random_states = _host_random()
        restore, mode = self.snapshot(), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():  # torch warns that it does not detect all of them
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            result = self._on_side_stream(inputs)
        except RuntimeError as error:
            self._give_up(error)
        else:
            if _host_random() != random_states:
                self._give_up(RuntimeError("random numbers are drawn on the CPU; draw them on the GPU"))
            return result
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        restore()
        return self.run(*inputs)

    def _capture(self) -> bool:
        """Capture a call without executing it; return whether that was possible."""
        graph, main = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:  # other threads, such as those that load data, may allocate
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.result = self.run(*self.inputs)
        except RuntimeError as error:
            # Torch stays on the stream of the capture, and its generator is in capture mode and cannot
            # draw, until another capture succeeds.
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
    """Return the states of the random generators of torch, Python and NumPy on the CPU."""
    numpys = np.random.get_state(legacy=False)["state"]
    return [torch.get_rng_state().tolist(), random.getstate(), numpys["key"].tolist(), numpys["pos"]]


def _alike(inputs: tuple[Tensor, ...], others: list[Tensor]) -> bool:
    return len(inputs) == len(others) and all(
        x.shape == y.shape and x.dtype == y.dtype for x, y in zip(inputs, others)
    )


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a network: members of one class in a list of modules.

    A list is an `nn.Sequential` or `nn.ModuleList` with two or more members of a class that has
    submodules. If such blocks contain repeated blocks, the inner ones are returned.
    """
    blocks: list[nn.Module] = []
    for child in model.children():
        blocks += repeated_blocks(child)
    if isinstance(model, nn.Sequential | nn.ModuleList):
        kinds = [type(child) for child in model]
        for child in model:
            simple = isinstance(child, nn.Sequential | nn.ModuleList) or not any(
                True for _ in child.children()
            )
            inner = any(block is part for part in child.modules() for block in blocks)
            if not simple and not inner and kinds.count(type(child)) > 1:
                blocks.append(child)
    return blocks


@contextmanager
def compiled_blocks(
    model: nn.Module, blocks: Blocks | None = None, **options: Any
) -> Iterator[list[nn.Module]]:
    """Compile the blocks of a network within a context. Equal blocks share code, so it takes seconds.

    Args:
        model: the network; it is changed in place and restored at the end.
        blocks: ``model -> modules`` returns the blocks to compile; None: `repeated_blocks`.
        options: further options of `torch.compile`.
    """
    compiled = list(repeated_blocks(model) if blocks is None else blocks(model))
    if not compiled:
        raise ValueError(
            f"no repeated blocks found in {type(model).__name__}; name what to compile with blocks="
        )
    from torch._dynamo import config

    before = [block._compiled_call_impl for block in compiled]
    try:
        for block in compiled:
            block.compile(dynamic=False, **options)
        # Stages, first blocks, training and evaluation, and several networks need more compilations than
        # the eight that torch allows.
        with config.patch(recompile_limit=1024, accumulated_recompile_limit=1024):
            yield compiled
    finally:
        for block, own in zip(compiled, before):
            block._compiled_call_impl = own
