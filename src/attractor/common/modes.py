"""Training and evaluation modes of modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Put all modules of a model into evaluation mode, and restore their modes on exit.

    A function, which has no mode, is left unchanged.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, mode in zip(modules, modes):
            module.training = mode
