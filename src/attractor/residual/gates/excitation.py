"""The two linear layers with which several gates compute the weights of their channels."""

import torch
from torch import Tensor, nn


class Excitation(nn.Module):
    """``Linear -> ReLU -> Linear`` from ``[batch, inputs]`` to ``[batch, outputs]``, with biases.

    Args:
        inputs: Size of the input.
        outputs: Size of the output.
        hidden: Size between the layers, see `narrow`.
        zero: Start the second layer, and so the output, at 0.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
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


def narrow(name: str, channels: int, reduction: int) -> int:
    """Return ``channels // reduction``, at least 1."""
    if isinstance(reduction, bool) or not isinstance(reduction, int) or reduction < 1:
        raise ValueError(f"{name}(reduction={reduction!r}); pass a positive integer")
    return max(1, channels // reduction)
