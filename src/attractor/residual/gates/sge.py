"""SGE: "Spatial Group-wise Enhance" (Li, Hu and Yang, 2019, arXiv:1905.09646)."""

import torch
from torch import Tensor, nn

from attractor.common.checks import as_int
from attractor.residual.gates.gate import Gate, average, check_branch, is_scripting, opened


class SGE(Gate):
    """One weight per pixel and group of channels: the similarity of the pixel and the group's mean.

    Within a group ``s = <f, pool(f)>`` over its channels, standardised over space, and
    ``F = sigma(scale s + shift)`` with a scale and a shift per group, which start at 0 and 1. The
    standard deviation is ``sqrt(variance + eps^2)`` with the biased variance, so that single pixels and
    constant maps have finite gradients.

    Args:
        channels: C.
        groups: Number of groups; by default the largest divisor of C up to 64, the paper's number.
        eps: See above.
        identity: See `Gate`; the shift starts at 0.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        channels: int,
        *,
        groups: int | None = None,
        eps: float = 1e-5,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, identity, dtype, device)
        if groups is None:
            groups = max(g for g in range(1, min(channels, 64) + 1) if channels % g == 0)
        groups = as_int(groups)
        if not isinstance(groups, int) or groups < 1 or channels % groups:
            raise ValueError(
                f"SGE({channels}, groups={groups}): the groups must have equal size; pass a "
                f"divisor of {channels}, or None for the largest one up to 64"
            )
        self.groups, self.eps = groups, eps
        self.scale = nn.Parameter(torch.zeros(groups, device=device, dtype=dtype))
        self.shift = nn.Parameter(torch.full_like(self.scale, 0.0 if identity else 1.0))

    def weights(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return F ``[batch, channels, height, width]``, which is equal within a group."""
        return self._maps(f).repeat_interleave(self.channels // self.groups, 1).flatten(1, 2)

    def forward(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Return the gated branch ``f * F`` without repeating F within the groups."""
        maps = self._maps(f)
        return (f.unflatten(1, (self.groups, -1)) * maps).flatten(1, 2)

    def _maps(self, f: Tensor) -> Tensor:
        """Return F ``[batch, groups, 1, height, width]``."""
        if not is_scripting():
            check_branch(self, f)
        dtype = torch.promote_types(f.dtype, torch.float32)  # eps^2 underflows in half precision
        products = (f * average(f, dtype)).unflatten(1, (self.groups, -1))
        similarity = products.sum(2, keepdim=True)
        variance, mean = torch.var_mean(similarity, (3, 4), correction=0, keepdim=True)
        standard = (similarity - mean) / (variance + self.eps**2).sqrt()
        scale, shift = (p[:, None, None, None] for p in (self.scale, self.shift))
        return opened(scale * standard + shift, self.identity).to(f.dtype)
