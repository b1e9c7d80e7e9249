"""Evaluation mode for measurements: eager, without gradients and fused layers, restored afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

PROCESS_LOCK = RLock()  # fused layers and compilation are switched off for the whole process


@contextmanager
def evaluation_mode(
    model: nn.Module | None, device: torch.device | str | None = None
) -> Iterator[nn.Module | None]:
    """Put a model into evaluation mode on a device; restore its modes, statistics and device at the end.

    Raises:
        ValueError: The device is not available, or the model lies on several devices.
    """
    if model is None:
        yield None
        return
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    modes = [(module, module.training) for module in model.modules()]
    statistics = [(norm, {k: b.clone() for k, b in norm.named_buffers()}) for norm in fresh_norms(model)]
    devices = {p.device for p in model.parameters()} or {torch.device("cpu")}
    if device is not None and len(devices) > 1:
        raise ValueError(
            f"the model lies on {', '.join(sorted(map(str, devices)))}, so device={str(device)!r} would "
            "not be undone; omit device to run the model where it is"
        )
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        if device is not None:
            _move(model, device)
        for module, _ in modes:
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield model
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, training in modes:
            module.training = training
        for norm, buffers in statistics:
            for name, buffer in norm.named_buffers():
                buffer.copy_(buffers[name])
        if device is not None:
            model.to(next(iter(devices)))


def fresh_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch normalisations whose statistics are still the initial ones."""
    return [
        norm
        for norm in model.modules()
        if isinstance(norm, _BatchNorm)
        and norm.running_mean is not None
        and norm.running_var is not None
        and not norm.num_batches_tracked
        and not bool(norm.running_mean.any())
        and bool((norm.running_var == 1).all())
    ]


def _move(model: nn.Module, device: Any) -> None:
    try:
        model.to(torch.device(device))
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device = {device!r} cannot be used here: {reason}") from None
