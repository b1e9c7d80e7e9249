"""Looking at a model while it runs: the operations that torch dispatches, the modules at work."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Path: TypeAlias = tuple[str, ...]
Stack: TypeAlias = tuple[tuple[Path, int], ...]  # modules at work, and the numbers of their calls


class Calls:
    """Which modules are running, by hooks that are there for one pass only."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack: list[tuple[Path, int]] = []
        self.inputs: list[list[Tensor]] = []  # of each call under way
        self._count = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the stack holds path and number of each call under way.

        A module that is also part of another block, which it is named after, has the path of its caller.
        """
        handles = []
        try:
            for name, module in self.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                path = tuple(part for part in name.split(".") if part not in ("", "_orig_mod"))
                enter = partial(self._enter, path)
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def path(self) -> Path:
        """Of the innermost call."""
        return self.stack[-1][0] if self.stack else ()

    def _enter(self, path: Path, module: nn.Module, args: Any, kwargs: Any) -> None:
        around = self.path
        self._count += 1
        self.inputs.append(tensors_in([*args, *kwargs.values()]))
        self.stack.append((path if path[: len(around)] == around else around, self._count))

    def _leave(self, *_: Any) -> None:
        self.stack.pop()
        self.inputs.pop()


class Counted(TorchDispatchMode):
    """Counts operations, and hashes their sequence: `index` is the number of the one under way."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.index, self.digest = -1, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled during a probe, and torch's guard against it costs more than the rest."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Number the operation, and hand it to `see`."""
        self.index += 1
        self.digest = hash((self.digest, func))
        return self.see(func, args, kwargs or {})

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation, and whatever the mode is for."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kind:
    """What is known of an operation.

    Attributes:
        name: without its library and overload, as "add_".
        view: whether it looks at memory that is there in another way, and does nothing else.
        pointwise: whether each element of what it makes depends on one element of each operand.
        written: positions and names of the arguments that it writes to.
    """

    name: str
    view: bool
    pointwise: bool
    written: tuple[tuple[int, str], ...]

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that a call of it writes to."""
        return tensors_in(args[i] if i < len(args) else kwargs.get(name) for i, name in self.written)


@cache
def kind_of(func: Any) -> Kind:
    """What is known of an operation; of one without a schema, its name."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Kind(str(func), False, False, ())
    written = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name = schema.name.partition("::")[2]
    return Kind(name, bool(getattr(func, "is_view", False)), torch.Tag.pointwise in func.tags, written)


def storage_of(tensor: Tensor) -> int:
    """A number that views of one memory share."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return -id(tensor)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """All tensors among arguments, lists opened."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def is_feature(value: Any) -> bool:
    """Whether something is a tensor of real or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def is_scalar(value: Any) -> bool:
    """Whether something is one number."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def extent_of(tensor: Tensor) -> int:
    """The number of different elements: an expanded axis counts once."""
    return prod(n for n, stride in zip(tensor.shape, tensor.stride()) if stride != 0)
