"""Attention to learnt mixtures of values, a baseline for attention under a PDE.

Under a linear PDE along keys, the evolved map times the values equals the map times evolved values. Far
from the boundary these are fixed mixtures of a few neighbours. Here the mixture is learnt instead.

>>> import torch
>>> query, key, value = torch.randn(3, 1, 2, 6, 4)
>>> attention = MixedValues(3)
>>> start = attention(query, key, value, is_causal=True)
>>> torch.equal(start, scaled_dot_product_attention(query, key, value, is_causal=True))
True
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention


class MixedValues(nn.Module):
    """Attention to ``v'[t] = w[0] v[t] + w[1] v[t - 1] + ...``, which is causal if the map is.

    Args:
        count: Number of values in a mixture, including the token's own. Initially the mixture is the
            token's own value.
        heads: Number of heads, each with its own mixture; 1 for a shared one.
        dim: Number of channels, each with its own mixture; 1 for a shared one.
    """

    def __init__(self, count: int, heads: int = 1, dim: int = 1) -> None:
        super().__init__()
        is_own_value = torch.arange(count) == 0
        self.weight = nn.Parameter(is_own_value.float()[:, None, None, None].repeat(1, heads, 1, dim))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        pde: Any = None,
        steps: int = 0,
        dt: float = 1.0,
    ) -> Tensor:
        """Return the output ``[batch, heads, tokens, dim]``. The arguments of a PDE are ignored."""
        tokens = value.shape[-2]
        mixture = sum(pad(value, (0, 0, k, 0))[..., :tokens, :] * w for k, w in enumerate(self.weight))
        return scaled_dot_product_attention(query, key, mixture.to(value.dtype), is_causal=is_causal)
