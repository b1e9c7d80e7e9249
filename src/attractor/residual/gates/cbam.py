"""CBAM: "Convolutional Block Attention Module" (Woo et al., ECCV 2018)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from attractor.residual.gates.excitation import Excitation, narrow, odd
from attractor.residual.gates.gate import Gate, average, check_batch, check_branch, is_scripting, opened


class CBAM(Gate):
    """One weight per channel, then one weight per pixel of the product.

    The weights of the channels are ``sigma(M(mean f) + M(max f))`` with the two layers M of SE and mean
    and max over space. The weights of the pixels are ``sigma(BN(conv(mean, max)))`` with mean and max
    over the channels of the product. There are ``2 C h + h + C + 100`` parameters for
    ``h = max(1, C // reduction)``, as in the authors' code. The StepNet paper states 0.01 M more for
    ResNet164.

    Args:
        channels: C.
        reduction: Ratio of C to the hidden size of M.
        kernel_size: Kernel size of the convolution, odd.
        identity: See `Gate`; the second layer of M and the scale of BN start at 0.
        device, dtype: Device and dtype of the parameters.
    """

    sigmoids: ClassVar[int] = 2
    needs_image: ClassVar[bool] = True

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 16,
        kernel_size: int = 7,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, identity, dtype, device)
        kernel_size = odd("CBAM", kernel_size, 7)
        hidden = narrow("CBAM", channels, reduction)
        self.excitation = Excitation(
            channels, channels, hidden, zero=identity, device=device, dtype=dtype
        )
        self.conv = nn.Conv2d(
            2, 1, kernel_size, padding=kernel_size // 2, bias=False, device=device, dtype=dtype
        )
        self.norm = nn.BatchNorm2d(1, momentum=0.01, device=device, dtype=dtype)
        if identity:
            nn.init.zeros_(self.norm.weight)

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return F ``[batch, channels, height, width]``."""
        channels = self._channels(f)
        return channels * self._pixels(f * channels)

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return the gated branch ``f * F`` without computing F, which is as large as f."""
        f = f * self._channels(f)
        return f * self._pixels(f)

    def _channels(self, f: Tensor) -> Tensor:
        """Return the weights of the channels ``[batch, channels, 1, 1]``."""
        if not is_scripting():
            check_branch(self, f)
        dtype = self.excitation.reduce.weight.dtype
        mean, largest = average(f, dtype).flatten(1), f.amax((2, 3)).to(dtype)
        z = self.excitation(mean) + self.excitation(largest)
        return opened(z, self.identity)[..., None, None].to(f.dtype)

    def _pixels(self, f: Tensor) -> Tensor:
        """Return the weights of the pixels ``[batch, 1, height, width]``."""
        dtype = self.conv.weight.dtype
        mean, largest = f.mean(1, keepdim=True, dtype=dtype), f.amax(1, keepdim=True).to(dtype)
        if not is_scripting():
            check_batch("CBAM", self.norm, f.shape[0] * f.shape[2] * f.shape[3])
        z = self.norm(self.conv(torch.cat((mean, largest), 1)))
        return opened(z, self.identity).to(f.dtype)
