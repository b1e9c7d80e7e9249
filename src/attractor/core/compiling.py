"""`torch.compile` for chunks of steps: one compiled copy per rate, in a layout that vectorises."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# On the CPU: a C++ wrapper, because a Python one would take longer than the arithmetic of a chunk, and
# no second thread for a few thousand numbers, whose start would take longer than their computation.
CPU_OPTIONS = {"cpp_wrapper": True, "cpp.min_chunk_size": 16_384}
VECTORS = {"AVX512": 64, "AVX2": 32, "SVE256": 32}  # bytes of a vector of this machine; else 16
CAPABILITY = torch.backends.cpu.get_cpu_capability()
LANES = 4  # numbers per vector, from which vector functions are faster than scalar ones


_NUMBERS = count()


def compiled(
    run: Callable[..., Any], device: torch.device, *fixed: Any, or_plain: bool = True
) -> Callable[..., Any]:
    """Return `run`, compiled for a device; the same copy for the same fixed arguments.

    torch counts recompilations per code object and stops after eight. Each rate therefore gets a copy
    with a code object of its own.

    Args:
        or_plain: Whether to call `run` itself, with a warning, if torch cannot compile it; otherwise
            calls raise NotCompiledError.
    """
    keys = (x if _hashable(x) else _Identity(x) for x in fixed)
    return _compiled(run, device.type, or_plain, *keys)


class NotCompiledError(RuntimeError):
    """torch cannot compile a function."""


@lru_cache(maxsize=64)
def _compiled(run: Callable[..., Any], device: str, or_plain: bool, *fixed: Any) -> Callable[..., Any]:
    def laid_out(*args: Any) -> Any:
        with ComponentsFirst():
            return run(*args)

    # With one name torch would treat values that differ between rates, such as the number of steps, as
    # dynamic.
    code = laid_out.__code__.replace(co_name=f"laid_out_{next(_NUMBERS)}")
    copy = FunctionType(code, laid_out.__globals__, closure=laid_out.__closure__)
    fast = torch.compile(copy, options=dict(CPU_OPTIONS) if device == "cpu" else None)
    reason: str | None = None

    def fast_or_plain(*args: Any) -> Any:
        nonlocal reason
        if reason is None:
            try:
                return fast(*args)
            except (torch._dynamo.exc.TorchDynamoException, AssertionError) as error:
                # An assertion of the compiler; `run` raises one of the rate again.
                reason = (str(error).strip().splitlines() or ["an assertion of the compiler"])[0]
                if or_plain:
                    warnings.warn(f"the steps are not compiled ({reason})", stacklevel=2)
        if or_plain:
            return run(*args)
        raise NotCompiledError(reason)

    return fast_or_plain


def vectorised(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return `ComponentsFirst` if vectors of this machine hold enough numbers of a dtype, else no mode.

    Modes do not apply to the bodies of compiled loops, so that each body enters this context.
    """
    enough = VECTORS.get(CAPABILITY, 16) >= LANES * dtype.itemsize
    return ComponentsFirst() if enough else nullcontext()


def components_first(u: Tensor) -> Tensor:
    """Return u with each component contiguous in memory, the layout of states in compiled chunks."""
    return u.movedim(-1, 0).contiguous().movedim(0, -1)


def operations(run: Callable[..., Any], fixed: tuple[Any, ...], *args: Any) -> int:
    """Return the number of torch operations of ``run(*fixed, *args)``, counted once per `fixed`."""
    key = (run, *(x if _hashable(x) else _Identity(x) for x in fixed))
    if key not in _COUNTED:
        if len(_COUNTED) >= 64:
            _COUNTED.pop(next(iter(_COUNTED)))
        _COUNTED[key] = count_operations(lambda: run(*fixed, *args))
    return _COUNTED[key]


_COUNTED: dict[Any, int] = {}


def count_operations(call: Callable[[], Any]) -> int:
    """Return the number of torch operations of a call."""
    with _Counter() as counter:
        call()
    return counter.count


class ComponentsFirst(TorchFunctionMode):
    """Lay out the results of ``stack(..., dim=-1)`` and ``cat(..., dim=-1)`` component by component.

    A rate such as ``stack((du_0, du_1), -1)`` would write its components d numbers apart, which
    compiled code cannot vectorise. Values and shapes are unchanged; only strides differ.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.stack, torch.cat) and len(args) + len(kwargs) == 2 and "out" not in kwargs:
            tensors = args[0] if args else kwargs["tensors"]
            dim = args[1] if len(args) == 2 else kwargs.get("dim")
            if dim == -1 and tensors[0].dim() > (func is torch.cat):
                if func is torch.cat:
                    tensors = [x.movedim(-1, 0) for x in tensors]
                return func(tensors, 0).movedim(0, -1)
        return func(*args, **kwargs)


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Identity:
    """A dictionary key for an object that is not hashable."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
