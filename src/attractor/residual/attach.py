"""Adding a gate to a block, and calling it there: `attach`.

A gate is the block's child module `gate`. It is called in one of three ways:

- The block has an attribute `gate` that is None and calls the module stored there, as the blocks of this
  library do.
- The call is written into a copy of the block's forward, see `rewriting`.
- Where the source of forward does not show the end of the branch, two modules are *intercepted*: the
  block stores x when it is called, and the part that ends the branch passes its output through the gate.
  The value stored between the two calls is local to the thread.
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
from attractor.residual.rewriting import counts, gate_branch, gate_flat_branch, gated_class


def attach(block: Any, gate: nn.Module, branch: Branch) -> None:
    """Add the gate to the block as a child module, and have it called on the branch.

    Args:
        block: changed in place. A block that does not call the gate itself keeps `branch` as its
            attribute `gated_branch`.
        gate: called as ``gate(f, x)``; x is None where the gate does not need it and it is not known.
        branch: of the block.
    """
    calls_it_itself = "gate" in vars(block)  # as None, until now
    if calls_it_itself:
        block.gate = gate
        return
    own = gate.elsewhere[0] if isinstance(gate, SharedGate) else gate
    flat = branch.axes != 4 and isinstance(own, Gate)
    source = branch.source
    if source is not None and source.part is not None and not getattr(gate, "needs_x", True):
        source = None
    kind = gated_class(block, branch.end, source, flat)
    written = kind is not None and branch.trial is not None and _calls_once(block, kind, branch.trial)
    block.gate, block.gated_branch = gate, replace(branch, trial=None)
    if written:
        block.__class__ = kind
    else:
        _intercept(block, branch.end, source, flat)


def _calls_once(block: nn.Module, kind: type[nn.Module], trial: Arguments) -> bool:
    """Whether a forward with a gate in it calls the gate once, both in evaluation and in training."""
    args, kwargs = trial
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return counts(copied(block), kind, lambda b: b(*args, **kwargs)) == [1, 1]


# One gate for several blocks


class SharedGate(nn.Module):
    """A gate that belongs to another block: used here, but its weights are kept only there."""

    elsewhere: Any

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.elsewhere = (gate,)  # in a tuple, so that it is not registered as a child

    @property
    def needs_x(self) -> bool:
        """Whether the gate looks at the shortcut."""
        return getattr(self.elsewhere[0], "needs_x", True)

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """The gated branch ``[batch, channels, height, width]``, by the other block's gate."""
        return self.elsewhere[0](f, x)

    def start(self) -> None:
        """Let the gate forget what it has seen."""
        self.elsewhere[0].start()

    def resume(self, x: Any) -> None:
        """Let the gate take the memory that belongs to a block's input."""
        self.elsewhere[0].resume(x)

    def _replicate_for_data_parallel(self) -> Any:
        raise RuntimeError(
            f"{type(self.elsewhere[0]).__name__} is one gate for several blocks, which the copies of "
            "nn.DataParallel would share with each other; use DistributedDataParallel"
        )

    def __prepare_scriptable__(self) -> Any:
        prepare = getattr(self.elsewhere[0], "__prepare_scriptable__", None)
        if prepare is not None:
            prepare()
        raise NotImplementedError(
            f"{type(self.elsewhere[0]).__name__} is one gate for several blocks, which torch.jit.script "
            "would copy; use torch.jit.trace or torch.export, or script torch.fx.symbolic_trace(network)"
        )


def share(gate: nn.Module, blocks: list[Any]) -> list[nn.Module]:
    """The gates of the blocks of a stage that share one: it is the first block's, others refer to it.

    By hooks of the blocks it starts before the first of them and forgets after the last.

    Args:
        gate: of the first block.
        blocks: of the stage, in the order in which they are called.
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
    """As a hook before the first block of a stage and after the last: a shared gate forgets."""
    block.gate.start()


def resume_gate(block: Any, args: Any, kwargs: Any) -> None:
    """As a hook before a further block: a shared gate takes the memory that belongs to its input."""
    block.gate.resume(next(iter(tensors_in([*args, *kwargs.values()])), None))


def leave_gate(block: Any, args: Any, out: Any) -> None:
    """As a hook after other blocks than the last: a shared gate forgets if the block raised an error."""
    if out is None:
        block.gate.start()


# Blocks whose forward cannot be written


class Handover(threading.local):
    """A value that a thread stores in a module for a later call. Copies of the module hold none."""

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
    _intercepted(block.get_submodule(end), _call_end)
    if source is not None and source.part is not None:
        _intercepted(block.get_submodule(source.part), _call_shortcut)
    names = list(inspect.signature(block.forward).parameters)
    position = None if source is None else names.index(source.argument)
    hook = partial(_hand_over, end=end, source=source, position=position, flat=flat)
    block.register_forward_pre_hook(hook, with_kwargs=True)
    block.register_forward_hook(partial(_forget, end=end, source=source), always_call=True)


def _intercepted(part: Any, call: Callable[..., Any]) -> None:
    part.__class__ = _intercepting(part.__class__, call)
    part.handover = Handover()


@cache
def _intercepting(kind: Any, call: Callable[..., Any]) -> Any:
    """A class whose instances are called by ``call(self, plain, ...)``; plain is the call of `kind`."""
    made: Any = None
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__call__": lambda self, *args, **kwargs: call(self, super(made, self).__call__, args, kwargs),
        "__reduce__": lambda self: (_empty, (kind, call), self.__getstate__()),
        "__prepare_scriptable__": _refuse_script,
    }
    made = type(kind.__name__, (kind,), names)
    return made


def _empty(kind: Any, call: Callable[..., Any]) -> nn.Module:
    made = _intercepting(kind, call)
    return made.__new__(made)


def _refuse_script(part: Any) -> Any:
    raise NotImplementedError(
        f"a gate behind a {type(part).__name__} cannot be scripted, since the source of its block's "
        "forward does not call it as self.NAME(...); write the call so, or use torch.jit.trace or "
        "torch.export"
    )


def _hand_over(
    block: Any, args: Any, kwargs: Any, *, end: str, source: Source | None, position: Any, flat: bool
) -> None:
    """Before a block: store the block, x and the gate's function at the end of the branch."""
    x = None
    if source is not None:
        x = kwargs[source.argument] if source.argument in kwargs else args[position]
        x = x if source.index is None else x[source.index]
    if source is not None and source.part is not None:
        projection = block.get_submodule(source.part)
        if not hasattr(projection, "handover"):  # replaced
            _intercepted(projection, _call_shortcut)
        projection.handover.value = None
        x = projection(x)
        projection.handover.value = (x,)
    part = block.get_submodule(end)
    if not hasattr(part, "handover"):  # replaced, as by convert_sync_batchnorm
        _intercepted(part, _call_end)
    part.handover.value = (block, x, gate_flat_branch if flat else gate_branch)


def _forget(block: Any, args: Any, out: Any, *, end: str, source: Source | None) -> None:
    """After a block, also if it raised an error: remove what is stored."""
    for path in (end, None if source is None else source.part):
        if path is not None:
            block.get_submodule(path).handover.value = None


def _call_end(part: Any, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """At the end of the branch: call the part, then the gate."""
    handed = part.handover.take()
    f = plain(*args, **kwargs)
    if handed is None:
        if getattr(part, "traced", False):  # a graph of torch.fx calls part and gate one by one
            return f
        raise RuntimeError(
            f"a {type(part).__name__} at the end of a gated branch was called outside of its block, as "
            "checkpointing inside of a block's forward does; call or checkpoint the block as a whole"
        )
    if isinstance(f, torch.fx.Proxy):
        part.traced = True
    block, x, gated = handed
    return gated(block, f, x)


def _call_shortcut(part: Any, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the projection that was computed before the branch, so that the part runs once per call."""
    early = part.handover.take()
    return plain(*args, **kwargs) if early is None else early[0]
