"""DIA: "DIANet: Dense-and-Implicit Attention Network" (Huang et al., AAAI 2020)."""

import threading
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from attractor.residual.gates.excitation import Excitation, narrow
from attractor.residual.gates.gate import Gate, average, check_branch, traced


class DIA(Gate):
    """One LSTM cell for all blocks of a stage; its inputs are the pooled f, its outputs the gates.

    In the authors' cell the input, forget, candidate and output gates are the sum of two `Excitation`
    modules, of pool(f) and of the previous output h. ``c = forget c + input tanh(candidate)`` and
    ``h = sigma(output) sigma(c)``, with a sigmoid instead of the LSTM's tanh, so that h is a weight.
    (Their dropout acts between layers, and there is only one.) ``2 (5 C n + n + 4 C)`` parameters per
    stage for ``n = max(1, C // reduction)``.

    The memory (h, c) belongs to one pass of one thread through the stage. Requires: in each forward, the
    owner of the gate calls `start` before the first block of the stage, and `resume` with the block's
    input before each further block. A call of `start` after the last block releases the memory and its
    graph. `weights` and `forward` both update the memory. Copies and saved states have no memory.

    Activation checkpointing with ``use_reentrant=False`` is exact for blocks, stages and networks:
    `resume` identifies the memory of a block by the block's input. Reentrant checkpointing is exact for
    whole stages. For single blocks it would cut the graph between them, and raises an error; so does any
    checkpointing of blocks that are compiled separately.

    Args:
        channels: C.
        reduction: Ratio of C to the hidden size of the excitations.
        identity: See `Gate`; both excitations start at 0, so that h is 1/4, and F is 4 h.
        device, dtype: Device and dtype of the parameters.
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
        """The memory of this thread's pass; None before the first block of a stage."""
        return self.memories.current

    def start(self) -> None:
        """Clear the memory: the next block is the first of a stage."""
        self.memories.current = None

    def resume(self, x: Any) -> None:
        """Set the memory for the block with the input x: that of the previous block.

        If the block has run on x before, as in activation checkpointing, it is the memory of that run.

        Raises:
            RuntimeError: The graph of the memory was cut, or the memory is no longer known.
        """
        if isinstance(x, Tensor):
            self.memories.resume(x)

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return F ``[batch, channels, 1, 1]``, and update the memory."""
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
                    f"DIA has a memory of {h.shape[0]} samples on {h.device}, but f has {mean.shape[0]} "
                    f"on {mean.device}; call start() before the first block of a stage, in every forward"
                )
        gates = self.read(mean).to(dtype) + self.recall(h).to(dtype)
        inputs, forget, candidate, output = gates.chunk(4, 1)
        c = forget.sigmoid() * c + inputs.sigmoid() * candidate.tanh()
        h = output.sigmoid() * c.sigmoid()
        self.memories.current = Memory(h, c, torch.is_grad_enabled())
        if not torch.compiler.is_compiling() and in_backward():
            self.memories.forget_after_backward()
        return (4 * h if self.identity else h)[..., None, None].to(f.dtype)

    def __prepare_scriptable__(self) -> Any:
        raise NotImplementedError(
            "DIA passes a memory from block to block in Python, which torch.jit.script cannot compile; "
            "use torch.jit.trace or torch.export, or script torch.fx.symbolic_trace(network)"
        )


class Memory(NamedTuple):
    """The output h and the cell c of the LSTM ``[batch, channels]``, and whether they have a graph."""

    h: Tensor
    c: Tensor
    has_graph: bool


class Memories:
    """The memories of running passes: the current one per thread, and the initial one per block.

    The key of an initial memory is the storage of the block's input, since checkpointing may detach the
    input that it stores. The memory is released with the storage.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._initial = WeakIdKeyDictionary()

    @property
    def current(self) -> Memory | None:
        """The memory of this thread's pass."""
        return getattr(self._thread, "memory", None)

    @current.setter
    def current(self, memory: Memory | None) -> None:
        self._thread.memory = memory

    def resume(self, x: Tensor) -> None:
        """Set the memory for the block with the input x, and store it for a second run of the block."""
        compiling = torch.compiler.is_compiling()  # storages are unknown there
        storage, version = (None, None) if compiling else _storage_and_version(x)
        initial = None if storage is None else self._initial.get(storage)
        if initial is not None and initial[0] == version:
            self.current = initial[1]
            return
        memory = self.current
        if memory is None:
            if in_backward():
                raise RuntimeError(
                    "a block with a DIA gate runs again in the backward pass, and its initial memory is "
                    "unknown, as after reentrant checkpointing, if saved tensors are moved, or if only "
                    "the block is compiled; use torch.utils.checkpoint.checkpoint("
                    "..., use_reentrant=False) and compile around it, or checkpoint whole stages"
                )
            return
        if not memory.has_graph and x.requires_grad and not x.is_leaf:
            raise RuntimeError(
                "the previous block ran without a graph, as in reentrant checkpointing, so gradients "
                "through the memory of its DIA gate would be lost; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or checkpoint whole stages"
            )
        if storage is not None and torch.is_grad_enabled():
            self._initial[storage] = (version, memory)

    def forget_after_backward(self) -> None:
        """Release this thread's memory at the end of the current backward pass."""
        variables = vars(self._thread)  # the callback may run in another thread
        torch.autograd.Variable._execution_engine.queue_callback(lambda: variables.pop("memory", None))

    def __deepcopy__(self, memo: Any) -> "Memories":
        return Memories()

    def __reduce__(self) -> tuple[Any, ...]:
        return Memories, ()


def in_backward() -> bool:
    """Whether this thread runs a backward pass, in which checkpointing runs blocks again.

    In compiled code the value is that at the time of compilation.
    """
    return torch._C._current_graph_task_id() != -1


# The effect of torch.compiler.assume_constant_result, which would import the compiler.
in_backward._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _storage_and_version(x: Tensor) -> tuple[Any, Any]:
    """Return the storage of a tensor, and its version, offset and shape, as a detached tensor has them.

    Both are None if the tensor has no storage.
    """
    try:
        return x.untyped_storage(), (x._version, x.storage_offset(), x.shape)
    except (NotImplementedError, RuntimeError):  # a tensor of torch.func or of inference mode
        return None, None
