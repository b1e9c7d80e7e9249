"""Device, processes and precision of training, from Accelerate."""

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

from attractor.train.capture import Blocks
from attractor.train.join import launched
from attractor.train.sharding import shard

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Place:
    """The device, precision and processes of a training. All processes must call the same methods.

    Attributes:
        device: the device of model and data.
        precision: "fp32", "bf16" or "fp16".
        share: the rank of this process and the number of processes.
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
        """Return the place of a training, with the processes that torchrun or accelerate launched.

        Args:
            device: the device; None: an accelerator if there is one.
            precision: a precision, or "auto" as in `Recipe`.
            distributed: whether launched processes train together; False: this process trains alone.
        """
        try:
            from accelerate import Accelerator
        except ImportError:
            raise ImportError("training needs Accelerate: pip install 'attractor[train]'") from None
        # On CPUs Accelerate needs an argument, or each process would train alone and overwrite files.
        requested = "cpu" if device is None and not torch.accelerator.is_available() else device
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1 and not distributed:
            launch_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").replace("no", "fp32")
            place = _own_device() if requested is None else torch.device(requested)
            return cls(place, _precision(precision, place, launch_precision))
        several_cpus = world > 1 and requested is not None and torch.device(requested).type == "cpu"
        accelerator = launched(several_cpus) if world > 1 else Accelerator()
        if accelerator.num_processes != world and world > 1:
            raise ValueError(
                f"{world} processes were launched, but Accelerate has {accelerator.num_processes}: an "
                "Accelerator of another kind was made before; make it with cpu=True, or do not make it"
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
        launch_precision = accelerator.mixed_precision.replace("no", "fp32")
        precision = _precision(precision, place, launch_precision)
        if accelerator.num_processes > 1 and launch_precision not in ("fp32", precision):
            raise ValueError(
                f"precision = {precision!r}, but accelerate launch was called with "
                f"{launch_precision!r}; choose one"
            )
        return cls(place, precision, accelerator)

    @property
    def share(self) -> tuple[int, int]:
        """The rank of this process, and the number of processes."""
        if self.accelerator is None:
            return 0, 1
        return self.accelerator.process_index, self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.share[0] == 0

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype of sums of losses."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def half(self, cache: bool = True) -> AbstractContextManager[Any]:
        """Return a context of mixed precision; captured operations need `cache` False."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, HALVES[self.precision], cache_enabled=cache)

    def share_model(
        self, model: nn.Module, sharded: bool = False, blocks: Blocks | None = None
    ) -> tuple[nn.Module, Callable[[], None]]:
        """Prepare a model for training by all processes, which averages gradients.

        Its batch normalisations use the statistics of the batches of all processes together.

        Args:
            model: the model.
            sharded: whether parameters are sharded in place (`attractor.train.sharding`); otherwise the
                model is wrapped, and each process has all of them.
            blocks: the blocks to shard one by one.

        Returns:
            The model to train, and a function that undoes the preparation. If the model is sharded, all
            processes must call this function.
        """
        if self.share[1] == 1:
            return model, lambda: None
        own_forward = vars(model).get("forward")
        if sharded:
            parallel, gather = model, shard(model, self.device, blocks)
        else:
            parallel = self.accelerator.prepare_model(model)
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            forward = parallel.forward

            def as_one_batch(*inputs: Any, **options: Any) -> Any:
                with _OneBatch() if model.training else nullcontext():
                    return forward(*inputs, **options)

            parallel.forward = as_one_batch

        def undo() -> None:
            if not sharded:
                self.accelerator.unwrap_model(parallel, keep_fp32_wrapper=False)
                return
            gather()
            vars(model).pop("forward", None)
            if own_forward is not None:
                model.forward = own_forward

        return parallel, undo

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not average gradients over processes."""
        if self.share[1] == 1:
            return nullcontext()
        return self.accelerator.no_sync(model)

    def agree(self, model: nn.Module) -> None:
        """Copy buffers, such as running means, from the first process to all others."""
        if self.share[1] > 1:
            for buffer in model.buffers():
                first = buffer.clone(memory_format=torch.contiguous_format)
                torch.distributed.broadcast(first, 0)
                buffer.copy_(first)

    def anywhere(self, condition: bool) -> bool:
        """Return whether a condition holds in any process."""
        return bool(self.total(torch.tensor([int(condition)])))

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum over all processes, on the CPU."""
        if self.share[1] > 1:
            numbers = self.accelerator.reduce(numbers.to(self.device), "sum")
        return numbers.cpu()

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        if self.share[1] > 1:
            self.accelerator.wait_for_everyone()

    def raise_together(self, error: Exception | None) -> None:
        """Raise in all processes if there is an error in any of them, so that none waits for ever."""
        rank, world = self.share
        if world > 1:
            flags = torch.zeros(world, dtype=torch.int64)
            flags[rank] = error is not None
            ranks = self.total(flags).nonzero().flatten().tolist()
            if ranks and error is None:
                raise RuntimeError(f"ranks {ranks} cannot begin to train; see the error on each of them")
        if error is not None:
            raise error


def _own_device() -> torch.device:
    """Return the accelerator of this machine that belongs to this process."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    return torch.device(accelerator.type, index)


def _precision(precision: str, device: torch.device, launch_precision: str) -> str:
    """Return the precision on a device.

    Args:
        precision: the precision of the recipe.
        device: the device.
        launch_precision: the precision with which Accelerate was launched.

    Raises:
        ValueError: the device is not there, or does not support the precision.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device = {str(device)!r}, but torch finds no GPU here; use device='cpu'")
    if precision == "auto":
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = launch_precision if launch_precision != "fp32" else "bf16" if bf16 else "fp32"
    if precision not in ("fp32", *HALVES) or (precision == "fp16" and device.type == "cpu"):
        raise ValueError(f"precision {precision!r} on {device}; use 'fp32' or 'bf16'")
    return precision


class _OneBatch(TorchFunctionMode):
    """A mode in which batch normalisation uses the batches of all processes in training.

    As a mode it applies to all of them, also inside gates. (`nn.SyncBatchNorm` needs GPUs, and would not
    replace subclasses that users define.)
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
    """Compute `torch.nn.functional.batch_norm`, in training with statistics over all processes."""
    if not training:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    others = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    count = x.new_full((1,), x.numel() / x.shape[1])
    *_, n = sums = _Sum.apply(torch.cat((x.sum(others), count)))
    mean = sums[:-1] / n
    deviation = x - mean.view(shape)
    variance = _Sum.apply(deviation.square().sum(others)) / n
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * (n / (n - 1).clamp(min=1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    out = deviation * (variance + eps).rsqrt().view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(input.dtype)


class _Sum(torch.autograd.Function):
    """Sum a tensor over all processes; the backward pass sums the gradients over all processes."""

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
