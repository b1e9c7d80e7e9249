"""Random numbers of one call, which do not depend on calls in other threads.

Most calls draw from a `torch.Generator` of their own. Initial weights of modules, masks of dropout and
the order of data loaders come from global generators instead, one per process and GPU. There are two
ways to isolate them:

- `own` gives a block generators of its own, in this thread only. It costs some microseconds per
  operation, so it is meant for making modules, not for training.
- `forked` gives a block the global generators, and restores their states afterwards. Blocks in other
  threads wait.
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
    """Seed the global generators of torch, Python and NumPy."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the global generators, as tensors of integers."""
    _, words, gauss = random.getstate()
    numpys: Any = np.random.get_state()
    kind, key, position, has_gauss, cached = numpys
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([*words, gauss is not None, _bits(gauss or 0.0)]),
    }
    if kind == "MT19937":
        states["numpy"] = torch.tensor([*key.tolist(), position, has_gauss, _bits(cached)])
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore states; generators without a saved state, or of a missing device, are unchanged."""
    # Clone, because torch reads out of bounds if a state is a view of another tensor, and may crash.
    torch.set_rng_state(states["torch"].clone())
    *words, has_gauss, bits = states["python"].tolist()
    random.setstate((3, tuple(words), _number(bits) if has_gauss else None))
    if "numpy" in states:
        *key, position, has_gauss, bits = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, _number(bits)))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


def turn() -> AbstractContextManager[Any]:
    """Return a lock: a context in which no other thread uses the global generators."""
    return _turns


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Use the global generators in a context that restores their states at the end.

    One thread at a time may enter, and the others wait. The context is reentrant.
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
    """Let torch draw from generators of this context, in this thread; global ones are unchanged.

    The numbers are the same as after ``torch.manual_seed(number)``.
    """
    return _OwnGenerators(number)


class _OwnGenerators(TorchDispatchMode):
    """A mode that passes a generator to each random operation without one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.generators = number, dict[torch.device, torch.Generator]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because True imports torch's compiler, and this mode is not used in its code."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        overload = _random_overload(func)
        if overload is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        like = next((x.device for x in args if isinstance(x, Tensor)), None)
        device = torch.device(kwargs.get("device") or like or "cpu")
        if device.type == "meta":
            return func(*args, **kwargs)
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.number)
        return overload(*args, **kwargs, generator=self.generators[device])


@cache
def _random_overload(func: Any) -> Any:
    """Return the overload of an operation that takes a generator; None if it is not random."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    name = func._overloadname
    overloads = ("generator" if name == "default" else f"{name}_generator",)
    packet = func.overloadpacket
    return next((getattr(packet, one) for one in overloads if one in packet.overloads()), None)


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
