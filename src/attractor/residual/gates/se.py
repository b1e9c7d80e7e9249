"""SE: "Squeeze-and-Excitation Networks" (Hu, Shen and Sun, CVPR 2018)."""

import torch
from torch import Tensor

from attractor.residual.gates.excitation import Excitation, narrow
from attractor.residual.gates.gate import Gate, average, check_branch, is_scripting, opened


class SE(Gate):
    """``sigma(W2 relu(W1 pool(f)))`` with the mean over space as pool: one weight per channel.

    ``2 C h + h + C`` parameters for ``h = max(1, C // reduction)``.

    Args:
        channels: C.
        reduction: Ratio of C to the hidden size.
        identity: See `Gate`; W2 starts at 0.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 16,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, identity, dtype, device)
        hidden = narrow("SE", channels, reduction)
        self.excitation = Excitation(
            channels, channels, hidden, zero=identity, device=device, dtype=dtype
        )

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return F ``[batch, channels, 1, 1]``."""
        if not is_scripting():
            check_branch(self, f)
        z = self.excitation(average(f, self.excitation.reduce.weight.dtype).flatten(1))
        return opened(z, self.identity)[..., None, None].to(f.dtype)
