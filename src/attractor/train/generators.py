"""All random generators that a training may draw from: torch's, Python's and NumPy's."""

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


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


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """The caller's generators are after it where they were before."""
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
