"""The two layers with a narrow middle that several gates compute their channels' weights with."""

import torch
from torch import Tensor, nn


class Excitation(nn.Module):
    """``Linear -> ReLU -> Linear`` from ``[batch, inputs]`` to ``[batch, outputs]``, with biases.

    Args:
        inputs, outputs: sizes.
        hidden: the width of the middle; `narrow` says what a reduction makes of a number of channels.
        zero: start the second layer at 0, and so the output.
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
        """Values before a sigmoid."""
        return self.expand(self.reduce(z).relu())


def narrow(name: str, channels: int, reduction: int) -> int:
    """``channels / reduction``, at least 1."""
    if isinstance(reduction, bool) or not isinstance(reduction, int) or reduction < 1:
        raise ValueError(f"{name}(reduction={reduction!r}); it divides the channels: a positive integer")
    return max(1, channels // reduction)
