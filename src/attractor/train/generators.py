"""Random numbers that belong to a call, so that calls in several threads do not change each other's.

Most calls draw from a `torch.Generator` of their own. Modules draw their first weights, dropout its
masks and data loaders their order from global generators instead, one per process and GPU. There are
two ways to deal with them:

- `own` gives a block generators of its own, in this thread alone. It costs some microseconds per
  operation, so it is for modules that are made, not for training.
- `forked` gives a block the global generators, which are afterwards where they were before. Blocks in
  other threads wait.
"""

import os
import random
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_turns = threading.RLock()  # held by the thread that uses the global generators


def _renew() -> None:
    """Make a new lock in a forked child, which does not have the thread that holds the old one."""
    global _turns
    _turns = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def seed(number: int) -> None:
    """Seed them all."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def state(device: torch.device) -> dict[str, Tensor]:
    """Where they all are, as tensors of integers."""
    _, words, gauss = random.getstate()
    numpys: Any = np.random.get_state()
    kind, key, place, has_gauss, cached = numpys
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([*words, gauss is not None, _bits(gauss or 0.0)]),
    }
    if kind == "MT19937":
        found["numpy"] = torch.tensor([*key.tolist(), place, has_gauss, _bits(cached)])
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: dict[str, Tensor], device: torch.device) -> None:
    """Put them back where they were; those that are not there, or not here, stay as they are."""
    # Clones: torch reads beside a state that is a part of another tensor, and may crash.
    torch.set_rng_state(found["torch"].clone())
    *words, has_gauss, bits = found["python"].tolist()
    random.setstate((3, tuple(words), _number(bits) if has_gauss else None))
    if "numpy" in found:
        *key, place, has_gauss, bits = found["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(key, np.uint32), place, has_gauss, _number(bits)))
    if "cuda" in found and device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"].clone(), device)


def turn() -> AbstractContextManager[Any]:
    """Use the global generators, or wait until the other thread that does so has ended."""
    return _turns


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Use the global generators, which are after it where they were before.

    Of several threads one does so at a time, and the others wait. A thread may do so again within it.
    """
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with _turns, torch.random.fork_rng(devices):
        pythons, numpys = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)


def own(number: int = 0) -> AbstractContextManager[Any]:
    """Let torch draw from generators of this block, in this thread; global ones are left alone.

    The numbers are those that follow ``torch.manual_seed(number)``.
    """
    return _Own(number)


class _Own(TorchDispatchMode):
    """Passes a generator to each operation that draws and has none."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.generators = number, dict[torch.device, torch.Generator]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drawing = _drawing(func)
        if drawing is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        like = next((x.device for x in args if isinstance(x, Tensor)), None)
        device = torch.device(kwargs.get("device") or like or "cpu")
        if device.type == "meta":
            return func(*args, **kwargs)
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.number)
        return drawing(*args, **kwargs, generator=self.generators[device])


@cache
def _drawing(func: Any) -> Any:
    """The overload of an operation that takes a generator; None if it draws no numbers."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    name = func._overloadname
    known = ("generator" if name == "default" else f"{name}_generator",)
    packet = func.overloadpacket
    return next((getattr(packet, one) for one in known if one in packet.overloads()), None)


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
