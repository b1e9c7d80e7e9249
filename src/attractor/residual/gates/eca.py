"""ECA: "ECA-Net: Efficient Channel Attention" (Wang et al., CVPR 2020)."""

import torch
from torch import Tensor, nn

from attractor.residual.gates.excitation import odd
from attractor.residual.gates.gate import Gate, average, check_branch, is_scripting, opened


class ECA(Gate):
    """``sigma(conv(pool(f)))``: a channel's weight depends on its own and its neighbours' means.

    It has k parameters for kernel size k.

    Args:
        channels: C.
        kernel_size: Kernel size, odd. By default the paper's ``(log2(C) + 1) / 2``, rounded down and
            then up to an odd number: 3 for 64 channels, 5 for 128 to 512.
        identity: See `Gate`; the kernel starts at 0.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        channels: int,
        *,
        kernel_size: int | None = None,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, identity, dtype, device)
        size = odd("ECA", kernel_size, adaptive_kernel(channels))
        self.conv = nn.Conv1d(1, 1, size, padding=size // 2, bias=False, device=device, dtype=dtype)
        if identity:
            nn.init.zeros_(self.conv.weight)

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return F ``[batch, channels, 1, 1]``."""
        if not is_scripting():
            check_branch(self, f)
        z = self.conv(average(f, self.conv.weight.dtype).flatten(2).mT)  # [batch, 1, channels]
        return opened(z.mT[..., None], self.identity).to(f.dtype)


def adaptive_kernel(channels: int) -> int:
    """Return ``floor((log2(channels) + 1) / 2)``, or the next number if it is even."""
    return channels.bit_length() // 2 | 1
