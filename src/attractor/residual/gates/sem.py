"""SEM: "Switchable Self-attention Module" (Zhong, Wen and Qin, 2022, arXiv:2209.05680)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from attractor.residual.gates.eca import adaptive_kernel
from attractor.residual.gates.excitation import Excitation, narrow, odd
from attractor.residual.gates.gate import Gate, average, check_branch, is_scripting, opened


class SEM(Gate):
    """Three excitations of the pooled f, each with a learnt weight.

    ``F = sigma(w1 SE) sigma(w2 ECA) sigma(w3 IE)`` with SE's two layers, ECA's convolution, IE a scale
    and a shift per channel (starting at 0 and -1), and ``w = sigma(Linear(pool(f)))``, three numbers per
    sample. ``2 C h + h + C + k + 2 C + 3 C + 3`` parameters, h and k as in SE and ECA.

    Args:
        channels: C.
        reduction: Ratio of C to the hidden size of SE.
        kernel_size: Kernel size of ECA, odd; by default the paper's.
        identity: See `Gate`; all three excitations start at 0.
        device, dtype: Device and dtype of the parameters.
    """

    sigmoids: ClassVar[int] = 3

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 16,
        kernel_size: int | None = None,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, identity, dtype, device)
        size = odd("SEM", kernel_size, adaptive_kernel(channels))
        hidden = narrow("SEM", channels, reduction)
        self.excitation = Excitation(
            channels, channels, hidden, zero=identity, device=device, dtype=dtype
        )
        self.conv = nn.Conv1d(1, 1, size, padding=size // 2, bias=False, device=device, dtype=dtype)
        self.scale = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))
        self.shift = nn.Parameter(torch.full_like(self.scale, 0.0 if identity else -1.0))
        self.decide = nn.Linear(channels, 3, device=device, dtype=dtype)
        if identity:
            nn.init.zeros_(self.conv.weight)

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return F ``[batch, channels, 1, 1]``."""
        if not is_scripting():
            check_branch(self, f)
        mean = average(f, self.scale.dtype).flatten(1)
        excitations = (
            self.excitation(mean),
            self.conv(mean[:, None])[:, 0],
            self.scale * mean + self.shift,
        )
        decision = self.decide(mean).sigmoid()
        se, eca, ie = (
            opened(decision[:, i, None] * z, self.identity) for i, z in enumerate(excitations)
        )
        return (se * eca * ie)[..., None, None].to(f.dtype)
