"""Where training happens: device, processes and precision, by Accelerate."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from attractor.train.join import launched

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Place:
    """A device and this process's share; of several processes all call the same methods.

    Attributes:
        device: of model and data.
        precision: "fp32", "bf16" or "fp16".
        share: this process and how many there are.
    """

    device: torch.device
    precision: str
    accelerator: Any = None

    @classmethod
    def find(
        cls,
        device: torch.device | str | None = None,
        precision: str = "auto",
        distributed: bool = True,
    ) -> "Place":
        """The device given, else the best there is; processes as torchrun or accelerate made them.

        Args:
            distributed: False: this process alone, whoever has launched it.
        """
        try:
            from accelerate import Accelerator
        except ImportError:
            raise ImportError("training needs Accelerate: pip install 'attractor[train]'") from None
        # On CPUs Accelerate has to be told, or each process would train alone, over the others' files.
        wanted = "cpu" if device is None and not torch.accelerator.is_available() else device
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1 and not distributed:
            told = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").replace("no", "fp32")
            place = _own_device() if wanted is None else torch.device(wanted)
            return cls(place, _precision(precision, place, told))
        several_cpus = world > 1 and wanted is not None and torch.device(wanted).type == "cpu"
        accelerator = launched(several_cpus) if world > 1 else Accelerator()
        if accelerator.num_processes != world and world > 1:
            raise ValueError(
                f"this is one of {world} processes, but Accelerate knows of "
                f"{accelerator.num_processes}: an Accelerator was made before, of another kind; make it "
                "with cpu=True, or none"
            )
        if accelerator.num_processes > 1:
            if device is not None and torch.device(device).type != accelerator.device.type:
                raise ValueError(
                    f"device = {device!r}, but accelerate launch gave this process "
                    f"{accelerator.device}; leave device out"
                )
            place = accelerator.device
        else:
            place = torch.device(accelerator.device if device is None else device)
        told = accelerator.mixed_precision.replace("no", "fp32")
        precision = _precision(precision, place, told)
        if accelerator.num_processes > 1 and told not in ("fp32", precision):
            raise ValueError(
                f"precision = {precision!r}, but accelerate launch was told {told!r}; choose one"
            )
        return cls(place, precision, accelerator)

    @property
    def share(self) -> tuple[int, int]:
        """Index of this process, and how many there are."""
        if self.accelerator is None:
            return 0, 1
        return self.accelerator.process_index, self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and tells of progress."""
        return self.share[0] == 0

    @property
    def wide(self) -> torch.dtype:
        """What sums are kept in."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def half(self, cache: bool = True) -> AbstractContextManager[Any]:
        """Mixed precision; without a cache of cast weights where operations are captured."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, HALVES[self.precision], cache_enabled=cache)

    def shared(self, model: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
        """The model whose gradients are means over all processes, and what undoes it.

        Its batch normalisations see one batch, that of all processes together.
        """
        if self.share[1] == 1:
            return model, lambda: None
        wrapped = self.accelerator.prepare_model(model)
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            forward = wrapped.forward

            def as_one_batch(*inputs: Any, **options: Any) -> Any:
                with _OneBatch():
                    return forward(*inputs, **options)

            wrapped.forward = as_one_batch
        return wrapped, lambda: self.accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)

    def agree(self, model: nn.Module) -> None:
        """Give all processes the first one's buffers, such as running means: all have one model."""
        if self.share[1] > 1:
            for buffer in model.buffers():
                first = buffer.clone(memory_format=torch.contiguous_format)
                torch.distributed.broadcast(first, 0)
                buffer.copy_(first)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, on the CPU."""
        if self.share[1] > 1:
            numbers = self.accelerator.reduce(numbers.to(self.device), "sum")
        return numbers.cpu()

    def wait(self) -> None:
        """Until all processes are here."""
        if self.share[1] > 1:
            self.accelerator.wait_for_everyone()

    def raise_together(self, error: Exception | None) -> None:
        """Raise an error in all processes if there is one in any of them: no process waits in vain."""
        rank, world = self.share
        if world > 1:
            flags = torch.zeros(world, dtype=torch.int64)
            flags[rank] = error is not None
            ranks = self.total(flags).nonzero().flatten().tolist()
            if ranks and error is None:
                raise RuntimeError(f"ranks {ranks} cannot begin to train; see the error of each of them")
        if error is not None:
            raise error


def _own_device() -> torch.device:
    """The accelerator of this process, of those on the machine."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    return torch.device(found.type, index)


def _precision(wanted: str, place: torch.device, told: str) -> str:
    """The precision in use on a device; `told` is what Accelerate was told."""
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device = {str(place)!r}, but torch finds no GPU here; say 'cpu'")
    if wanted == "auto":
        bf16 = place.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        wanted = told if told != "fp32" else "bf16" if bf16 else "fp32"
    if wanted not in ("fp32", *HALVES) or (wanted == "fp16" and place.type == "cpu"):
        raise ValueError(f"precision {wanted!r} on {place}; use 'fp32' or 'bf16'")
    return wanted


class _OneBatch(TorchFunctionMode):
    """While inside, batch normalisation in training is over the batches of all processes.

    As a mode it reaches all of them, those inside gates too. (`nn.SyncBatchNorm` is for GPUs alone, and
    is not what a class of one's own derives from.)
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm`, with mean and variance over all processes in training."""
    if not training:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    others = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    count = x.new_full((1,), x.numel() / x.shape[1])
    *_, n = sums = _Sum.apply(torch.cat((x.sum(others), count)))
    mean = sums[:-1] / n
    centred = x - mean.view(shape)
    variance = _Sum.apply(centred.square().sum(others)) / n
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * (n / (n - 1).clamp(min=1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    out = centred * (variance + eps).rsqrt().view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(input.dtype)


class _Sum(torch.autograd.Function):
    """Over all processes; so is its gradient's, for what each of them does with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.contiguous().clone()
        torch.distributed.all_reduce(total)
        return total
