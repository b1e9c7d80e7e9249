"""Attaching a gate to a block: `attach`.

A gate is the block's child module `gate`. It is called in one of three ways:

- The block has an attribute `gate` that is None, and its forward calls the module stored there. The
  blocks of this library do this.
- The call is written into a copy of the block's forward, see `rewriting`.
- If the source of forward does not show the end of the branch, two modules are *intercepted*: the block
  stores x when it is called, and the part that ends the branch passes its output through the gate. The
  value stored between the two calls is local to the thread.
"""

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from attractor.residual.branch import Arguments, Branch, Source, copied
from attractor.residual.dispatch import tensors_in
from attractor.residual.gates import Gate
from attractor.residual.rewriting import call_counts, gate_branch, gate_flat_branch, gated_class
from attractor.train import generators


def attach(block: Any, gate: nn.Module, branch: Branch) -> None:
    """Add the gate to the block as a child module, and let the block call it on its branch.

    Args:
        block: The block, changed in place. Unless it calls the gate itself, it stores `branch` as its
            attribute `gated_branch`.
        gate: The gate, called as ``gate(f, x)``. x is None if it is unknown and not needed.
        branch: The residual branch of the block.
    """
    if "gate" in vars(block):  # the block calls it, and the attribute is still None
        block.gate = gate
        return
    original = gate.owner[0] if isinstance(gate, SharedGate) else gate
    flat = branch.axes != 4 and isinstance(original, Gate)
    source = branch.source
    if source is not None and source.part is not None and not getattr(gate, "needs_x", True):
        source = None
    gated = gated_class(block, branch.end, source, flat)
    works = gated is not None and branch.trial is not None and _calls_once(block, gated, branch.trial)
    block.gate, block.gated_branch = gate, replace(branch, trial=None)
    if works:
        block.__class__ = gated
    else:
        _intercept(block, branch.end, source, flat)


def _calls_once(block: nn.Module, kind: type[nn.Module], trial: Arguments) -> bool:
    """Whether the forward of a class calls the gate once, both in evaluation and in training mode."""
    args, kwargs = trial
    with torch.no_grad(), generators.forked(torch.device("cpu")):
        return call_counts(copied(block), kind, lambda b: b(*args, **kwargs)) == [1, 1]


# One gate for several blocks


class SharedGate(nn.Module):
    """A reference to the gate of another block, which owns its parameters."""

    owner: Any

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.owner = (gate,)  # in a tuple, so that it is not registered as a child

    @property
    def needs_x(self) -> bool:
        """Whether the gate uses the shortcut."""
        return getattr(self.owner[0], "needs_x", True)

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return the gated branch ``[batch, channels, height, width]``."""
        return self.owner[0](f, x)

    def start(self) -> None:
        """Clear the memory of the gate."""
        self.owner[0].start()

    def resume(self, x: Any) -> None:
        """Restore the memory of the gate that belongs to the input x of a block."""
        self.owner[0].resume(x)

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError(
            f"{type(self.owner[0]).__name__} is one gate for several blocks, which the replicas of "
            "nn.DataParallel would share; use DistributedDataParallel"
        )

    def __prepare_scriptable__(self) -> Any:
        prepare = getattr(self.owner[0], "__prepare_scriptable__", None)
        if prepare is not None:
            prepare()
        raise NotImplementedError(
            f"{type(self.owner[0]).__name__} is one gate for several blocks, which torch.jit.script "
            "would copy; use torch.jit.trace or torch.export, or script torch.fx.symbolic_trace(network)"
        )


def share(gate: nn.Module, blocks: list[Any]) -> list[nn.Module]:
    """Return a gate for each block of a stage: the shared one for the first, references for the others.

    Hooks of the blocks clear its memory before the first block and after the last.

    Args:
        gate: The gate.
        blocks: The blocks of the stage in the order of their calls.
    """
    first, *others = blocks
    first.register_forward_pre_hook(start_gate)
    for block in others:
        block.register_forward_pre_hook(resume_gate, with_kwargs=True)
    for block in blocks[:-1]:
        block.register_forward_hook(leave_gate, always_call=True)
    blocks[-1].register_forward_hook(start_gate, always_call=True)
    return [gate, *(SharedGate(gate) for _ in others)]


def start_gate(block: Any, *_: Any) -> None:
    """Clear the memory of a shared gate; a hook before the first and after the last block of a stage."""
    block.gate.start()


def resume_gate(block: Any, args: Any, kwargs: Any) -> None:
    """Restore the memory of a shared gate for a block's input; a hook before each further block."""
    block.gate.resume(next(iter(tensors_in([*args, *kwargs.values()])), None))


def leave_gate(block: Any, args: Any, out: Any) -> None:
    """Clear the memory of a shared gate if a block raised an error; a hook after the other blocks."""
    if out is None:
        block.gate.start()


# Blocks whose forward cannot be rewritten


class Handover(threading.local):
    """A value that one thread stores in a module for a later call. Copies of the module hold none."""

    value: Any = None

    def take(self) -> Any:
        """Return the value and remove it."""
        value, self.value = self.value, None
        return value

    def __deepcopy__(self, memo: Any) -> "Handover":
        return Handover()

    def __reduce__(self) -> tuple[Any, ...]:
        return Handover, ()


def _intercept(block: nn.Module, end: str, source: Source | None, flat: bool) -> None:
    """Store x before a block's forward, and gate the output of the part that ends the branch."""
    _intercept_call(block.get_submodule(end), _call_end)
    if source is not None and source.part is not None:
        _intercept_call(block.get_submodule(source.part), _call_shortcut)
    names = list(inspect.signature(block.forward).parameters)
    position = None if source is None else names.index(source.argument)
    hook = partial(_store, end=end, source=source, position=position, flat=flat)
    block.register_forward_pre_hook(hook, with_kwargs=True)
    block.register_forward_hook(partial(_clear, end=end, source=source), always_call=True)


def _intercept_call(part: Any, call: Callable[..., Any]) -> None:
    part.__class__ = _intercepting_class(part.__class__, call)
    part.handover = Handover()


@cache
def _intercepting_class(kind: Any, call: Callable[..., Any]) -> Any:
    """Return a subclass whose call is ``call(self, call_of_kind, args, kwargs)``."""
    subclass: Any = None
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__call__": lambda self, *args, **kwargs: call(
            self, super(subclass, self).__call__, args, kwargs
        ),
        "__reduce__": lambda self: (_empty, (kind, call), self.__getstate__()),
        "__prepare_scriptable__": _refuse_script,
    }
    subclass = type(kind.__name__, (kind,), names)
    return subclass


def _empty(kind: Any, call: Callable[..., Any]) -> nn.Module:
    subclass = _intercepting_class(kind, call)
    return subclass.__new__(subclass)


def _refuse_script(part: Any) -> Any:
    raise NotImplementedError(
        f"a gate behind a {type(part).__name__} cannot be scripted, since the source of its block's "
        "forward does not call it as self.NAME(...); write the call in this form, or use "
        "torch.jit.trace or torch.export"
    )


def _store(
    block: Any, args: Any, kwargs: Any, *, end: str, source: Source | None, position: Any, flat: bool
) -> None:
    """Store the block, x and the function that calls the gate; a hook before the block."""
    x = None
    if source is not None:
        x = kwargs[source.argument] if source.argument in kwargs else args[position]
        x = x if source.index is None else x[source.index]
    if source is not None and source.part is not None:
        projection = block.get_submodule(source.part)
        if not hasattr(projection, "handover"):  # the part was replaced
            _intercept_call(projection, _call_shortcut)
        projection.handover.value = None
        x = projection(x)
        projection.handover.value = (x,)
    part = block.get_submodule(end)
    if not hasattr(part, "handover"):  # the part was replaced, as by convert_sync_batchnorm
        _intercept_call(part, _call_end)
    part.handover.value = (block, x, gate_flat_branch if flat else gate_branch)


def _clear(block: Any, args: Any, out: Any, *, end: str, source: Source | None) -> None:
    """Remove the stored values; a hook after the block, which also runs if it raised an error."""
    for path in (end, None if source is None else source.part):
        if path is not None:
            block.get_submodule(path).handover.value = None


def _call_end(part: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the part that ends the branch, then the gate."""
    stored = part.handover.take()
    f = call(*args, **kwargs)
    if stored is None:
        if getattr(part, "traced", False):  # a graph of torch.fx calls part and gate separately
            return f
        raise RuntimeError(
            f"a {type(part).__name__} at the end of a gated branch was called outside of its block, as "
            "checkpointing inside a block's forward does; call or checkpoint the whole block"
        )
    if isinstance(f, torch.fx.Proxy):
        part.traced = True
    block, x, apply_gate = stored
    return apply_gate(block, f, x)


def _call_shortcut(part: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the projection that was computed before the branch, so that the part runs once per call."""
    projection = part.handover.take()
    return call(*args, **kwargs) if projection is None else projection[0]
