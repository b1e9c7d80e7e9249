"""DIA: "DIANet: Dense-and-Implicit Attention Network" (Huang et al., AAAI 2020)."""

import threading
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from attractor.residual.gates.excitation import Excitation, narrow
from attractor.residual.gates.gate import Gate, average, check_branch, traced


class DIA(Gate):
    """One LSTM cell for all blocks of a stage: it reads the pooled f of each, its output is the gate.

    The authors' cell: input, forget, candidate and output gates are the sum of two `Excitation`, of
    pool(f) and of the last output h; ``c = forget c + input tanh(candidate)`` and
    ``h = sigma(output) sigma(c)``, a sigmoid where an LSTM has tanh, so that h is a weight. (Their
    dropout acts between layers only, and there is one.) ``2 (5 C n + n + 4 C)`` parameters a stage for
    ``n = max(1, C // reduction)``.

    The memory (h, c) belongs to one pass of one thread through the stage. Whoever owns the gate calls
    `start` before the stage's first block and `resume` with the block's input before each further one,
    in every forward; calling `start` after the last block too lets the memory and its graph go at once.
    `weights` and `forward` both move the memory on. Copies and saved states carry no memory.

    Activation checkpointing is exact with ``use_reentrant=False``, of blocks, stages and networks:
    `resume` finds the memory that a block began with by the block's input. Reentrant checkpointing of
    single blocks, which cuts the graph between them, raises an error, and so does any of blocks that
    are compiled one by one; that of whole stages is exact.

    Args:
        channels: C.
        reduction: how much narrower the middle of the excitations is.
        identity, device, dtype: see `Gate`; with identity both excitations start at 0, so that h is 1/4,
            which is then multiplied by 4.
    """

    shared: ClassVar[bool] = True
    sigmoids: ClassVar[int] = 2

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 4,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, identity, dtype, device)
        hidden = narrow("DIA", channels, reduction)
        factory: Any = {"zero": identity, "device": device, "dtype": dtype}
        self.read = Excitation(channels, 4 * channels, hidden, **factory)
        self.recall = Excitation(channels, 4 * channels, hidden, **factory)
        self.memories = Memories()

    @property
    def memory(self) -> "Memory | None":
        """What this thread's pass remembers; None before the first block of a stage."""
        return self.memories.current

    def start(self) -> None:
        """Forget: the next block is a stage's first."""
        self.memories.current = None

    def resume(self, x: Any) -> None:
        """Take the memory that the block with the input x begins with: that of the last block.

        If the block was run on x before, as activation checkpointing does, it is the one of that time.

        Raises:
            RuntimeError: the graph of the memory was cut, or the memory is not known any more.
        """
        if isinstance(x, Tensor):
            self.memories.resume(x)

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """F ``[batch, channels, 1, 1]``; moves the memory on."""
        check_branch(self, f)
        dtype = self.read.reduce.weight.dtype
        mean = average(f, dtype).flatten(1)
        memory = self.memories.current
        if memory is None:
            h = c = torch.zeros_like(mean)
        else:
            h, c = memory.h, memory.c
            if not traced(h) and (h.shape != mean.shape or h.device != mean.device):
                raise ValueError(
                    f"DIA remembers {h.shape[0]} samples on {h.device} and was given {mean.shape[0]} on "
                    f"{mean.device}; call start() before the first block of a stage, in every forward"
                )
        gates = self.read(mean).to(dtype) + self.recall(h).to(dtype)
        take, keep, candidate, give = gates.chunk(4, 1)
        c = keep.sigmoid() * c + take.sigmoid() * candidate.tanh()
        h = give.sigmoid() * c.sigmoid()
        self.memories.current = Memory(h, c, torch.is_grad_enabled())
        if not torch.compiler.is_compiling() and in_backward():
            self.memories.forget_after_backward()
        return (4 * h if self.identity else h)[..., None, None].to(f.dtype)

    def __prepare_scriptable__(self) -> Any:
        raise NotImplementedError(
            "DIA hands a memory from block to block in Python, which torch.jit.script cannot compile; "
            "use torch.jit.trace or torch.export, or script torch.fx.symbolic_trace(network)"
        )


class Memory(NamedTuple):
    """The LSTM's output h and cell c, each ``[batch, channels]``; whether gradients were recorded."""

    h: Tensor
    c: Tensor
    recorded: bool


class Memories:
    """The memories of passes under way: the current one per thread, and those that blocks began with.

    The latter are known by the storage of a block's input, as checkpointing may detach the input that it
    keeps, and are let go with it.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._begun = WeakIdKeyDictionary()

    @property
    def current(self) -> Memory | None:
        """The memory of this thread's pass."""
        return getattr(self._thread, "memory", None)

    @current.setter
    def current(self, memory: Memory | None) -> None:
        self._thread.memory = memory

    def resume(self, x: Tensor) -> None:
        """Make current what the block with the input x begins with, and keep it for another run."""
        compiling = torch.compiler.is_compiling()  # storages are not known there
        storage, place = (None, None) if compiling else _place_of(x)
        begun = None if storage is None else self._begun.get(storage)
        if begun is not None and begun[0] == place:
            self.current = begun[1]
            return
        memory = self.current
        if memory is None:
            if in_backward():
                raise RuntimeError(
                    "a block with a DIA gate is run again in the backward pass, and the memory that it "
                    "began with is not known, as after reentrant checkpointing, where saved tensors are "
                    "moved, or where the block alone is compiled; use torch.utils.checkpoint.checkpoint("
                    "..., use_reentrant=False) and compile around it, or checkpoint whole stages"
                )
            return
        if not memory.recorded and x.requires_grad and not x.is_leaf:
            raise RuntimeError(
                "the block before this one ran without a graph, as reentrant checkpointing lets it, so "
                "that gradients through the memory of its DIA gate would be lost; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or checkpoint whole stages"
            )
        if storage is not None and torch.is_grad_enabled():
            self._begun[storage] = (place, memory)

    def forget_after_backward(self) -> None:
        """Let this thread's memory go when the backward pass that runs it again has ended."""
        kept = vars(self._thread)  # the callback may run in another thread
        torch.autograd.Variable._execution_engine.queue_callback(lambda: kept.pop("memory", None))

    def __deepcopy__(self, memo: Any) -> "Memories":
        return Memories()

    def __reduce__(self) -> tuple[Any, ...]:
        return Memories, ()


def in_backward() -> bool:
    """Whether this thread runs a backward pass, in which checkpointing runs blocks again.

    In compiled code it is as it was when the code was compiled.
    """
    return torch._C._current_graph_task_id() != -1


# What torch.compiler.assume_constant_result does, which would import the compiler here.
in_backward._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _place_of(x: Tensor) -> tuple[Any, Any]:
    """The storage of a tensor, and where and when in it; a detached tensor has the same.

    None if there is no storage.
    """
    try:
        return x.untyped_storage(), (x._version, x.storage_offset(), x.shape)
    except (NotImplementedError, RuntimeError):  # of torch.func, or of inference mode
        return None, None
