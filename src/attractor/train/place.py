"""Where training happens: device, processes and precision, by Accelerate."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    def find(cls, device: torch.device | str | None = None, precision: str = "auto") -> "Place":
        """The device given, else the best there is; processes as ``accelerate launch`` made them."""
        try:
            from accelerate import Accelerator
        except ImportError:
            raise ImportError("training needs Accelerate: pip install 'attractor[train]'") from None
        accelerator = Accelerator()
        if accelerator.num_processes > 1:
            if device is not None and torch.device(device).type != accelerator.device.type:
                raise ValueError(
                    f"device = {device!r}, but accelerate launch gave this process "
                    f"{accelerator.device}; leave device out"
                )
            place = accelerator.device
        else:
            place = torch.device(accelerator.device if device is None else device)
        if place.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device = {device!r}, but torch finds no GPU here; say 'cpu'")
        launched = accelerator.mixed_precision.replace("no", "fp32")
        if precision == "auto":
            bf16 = place.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            precision = launched if launched != "fp32" else "bf16" if bf16 else "fp32"
        if precision not in ("fp32", *HALVES) or (precision == "fp16" and place.type == "cpu"):
            raise ValueError(f"precision {precision!r} on {place}; use 'fp32' or 'bf16'")
        if accelerator.num_processes > 1 and launched not in ("fp32", precision):
            raise ValueError(
                f"precision = {precision!r}, but accelerate launch was told {launched!r}; choose one"
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
        """The model whose gradients are means over all processes, and what undoes it."""
        if self.share[1] == 1:
            return model, lambda: None
        wrapped = self.accelerator.prepare_model(model)
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
