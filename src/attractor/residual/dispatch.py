"""Observation of a model while it runs: the operations that torch dispatches, the running modules."""

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
Stack: TypeAlias = tuple[tuple[Path, int], ...]  # running modules, and the numbers of their calls


def split_path(name: str) -> Path:
    """Return the parts of a module's name, without those that torch.compile adds."""
    return tuple(part for part in name.split(".") if part not in ("", "_orig_mod"))


class Calls:
    """The modules that are running, recorded by hooks that exist for one pass only."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack: list[tuple[Path, int]] = []
        self.inputs: list[list[Tensor]] = []  # of each running call
        self._count = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the running calls while the context is active: the path of each, and its number.

        A module whose name does not lie inside its caller's, because two blocks share it, gets the path
        of its caller.
        """
        handles = []
        try:
            for name, module in self.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                enter = partial(self._enter, split_path(name))
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def path(self) -> Path:
        """Path of the innermost call."""
        return self.stack[-1][0] if self.stack else ()

    def _enter(self, path: Path, module: nn.Module, args: Any, kwargs: Any) -> None:
        caller = self.path
        self._count += 1
        self.inputs.append(tensors_in([*args, *kwargs.values()]))
        self.stack.append((path if path[: len(caller)] == caller else caller, self._count))

    def _leave(self, *_: Any) -> None:
        self.stack.pop()
        self.inputs.pop()


class Counted(TorchDispatchMode):
    """Counts operations, and hashes their sequence; `index` is the number of the current one."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.index, self.digest = -1, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled during a probe, and torch's guard against it is costly."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Number the operation, and pass it to `run`."""
        self.index += 1
        self.digest = hash((self.digest, func))
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation; subclasses add what they observe."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kind:
    """Properties of an operation.

    Attributes:
        name: Name without library and overload, such as "add_".
        view: Whether the output is a view of the input.
        pointwise: Whether each element of the output depends on one element of each operand.
        outputs: Positions and names of the arguments that it writes to.
    """

    name: str
    view: bool
    pointwise: bool
    outputs: tuple[tuple[int, str], ...]

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that a call writes to."""
        return tensors_in(args[i] if i < len(args) else kwargs.get(name) for i, name in self.outputs)


@cache
def kind_of(func: Any) -> Kind:
    """Return the properties of an operation; only the name if it has no schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Kind(str(func), False, False, ())
    outputs = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name = schema.name.partition("::")[2]
    return Kind(name, bool(getattr(func, "is_view", False)), torch.Tag.pointwise in func.tags, outputs)


def storage_of(tensor: Tensor) -> int:
    """Return an identifier of the storage, which views share."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return -id(tensor)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return all tensors among the values, including those in nested lists and tuples."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


def is_feature(value: Any) -> bool:
    """Whether a value is a floating-point or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def is_scalar(value: Any) -> bool:
    """Whether a value is a number, or a tensor with one element."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def extent_of(tensor: Tensor) -> int:
    """Return the number of distinct elements; an expanded axis counts once."""
    return prod(n for n, stride in zip(tensor.shape, tensor.stride()) if stride != 0)
