"""SRM: "A Style-based Recalibration Module for Convolutional Neural Networks" (Lee et al., 2019)."""

import torch
from torch import Tensor, nn

from attractor.residual.gates.gate import Gate, check_batch, check_branch, is_scripting, opened


class SRM(Gate):
    """``sigma(BN(a mean(f) + b std(f)))`` with mean and standard deviation over space.

    a and b are numbers per channel; with those of BN there are 4C parameters. The standard deviation is
    ``sqrt(variance + eps)`` with the biased variance, so that it and its gradient are finite for
    constant channels and single pixels. a and b start at 0, as in the paper, so each weight starts at
    1/2. Training needs at least two samples.

    Args:
        channels: C.
        eps: See above.
        identity: See `Gate`.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        channels: int,
        *,
        eps: float = 1e-5,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, identity, dtype, device)
        self.eps = eps
        self.style = nn.Parameter(torch.zeros(2, channels, device=device, dtype=dtype))
        self.norm = nn.BatchNorm2d(channels, device=device, dtype=dtype)

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return F ``[batch, channels, 1, 1]``."""
        if not is_scripting():
            check_branch(self, f)
            check_batch("SRM", self.norm, f.shape[0])
        dtype = torch.promote_types(f.dtype, torch.float32)  # half precision has three digits
        variance, mean = torch.var_mean(f.to(dtype), (2, 3), correction=0)
        z = self.style[0] * mean + self.style[1] * (variance + self.eps).sqrt()
        z = self.norm(z.to(self.style.dtype)[..., None, None])
        return opened(z, self.identity).to(f.dtype)
