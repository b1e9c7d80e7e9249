"""The two linear layers with which several gates compute the weights of their channels."""

import torch
from torch import Tensor, nn

from attractor.common.checks import as_int


class Excitation(nn.Module):
    """``Linear -> ReLU -> Linear`` from ``[batch, inputs]`` to ``[batch, outputs]``, with biases.

    Args:
        inputs: Size of the input.
        outputs: Size of the output.
        hidden: Size between the layers, see `narrow`.
        zero: Start the second layer, and so the output, at 0.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden: int,
        *,
        zero: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.zero = zero
        self.reduce = nn.Linear(inputs, hidden, device=device, dtype=dtype)
        self.expand = nn.Linear(hidden, outputs, device=device, dtype=dtype)
        if zero:
            nn.init.zeros_(self.expand.weight)
            nn.init.zeros_(self.expand.bias)

    def forward(self, z: Tensor) -> Tensor:
        """Return the output, to which callers apply a sigmoid."""
        return self.expand(self.reduce(z).relu())


def odd(name: str, kernel_size: int | None, default: int) -> int:
    """Return a kernel size, or the default if it is None; raise an error unless it is odd."""
    size = default if kernel_size is None else as_int(kernel_size)
    if not isinstance(size, int) or size < 1 or size % 2 == 0:
        raise ValueError(f"{name}(kernel_size={size}); pass an odd number, such as {default}")
    return size


def narrow(name: str, channels: int, reduction: int) -> int:
    """Return ``channels // reduction``, at least 1."""
    if isinstance(reduction, bool) or not isinstance(reduction, int) or reduction < 1:
        raise ValueError(f"{name}(reduction={reduction!r}); pass a positive integer")
    return max(1, channels // reduction)
