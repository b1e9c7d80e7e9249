"""Where a fitted correction can be trusted."""

from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor, nn

from attractor.core.checks import check_input, check_tensor, check_values, check_whole


class TrustRegion(nn.Module):
    """The states a fit has seen, as the leverage of a least squares fit with quadratic features.

    ``distance(u)`` is ``z' (Z'Z)^-1 z`` over the largest value among the training states, with z the
    standardised state, its products and 1: up to 1 inside, growing with the fourth power outside. It
    is the predictive variance of a ridge fit on z; that of the fit itself would cost the square of
    its width in every step.
    """

    mean: Tensor
    deviation: Tensor
    factor: Tensor
    limit: Tensor

    def __init__(self, dim: int, **factory: Any) -> None:
        super().__init__()
        check_whole("dim", dim, 1)
        size = self._features(torch.zeros(dim)).numel()
        self.register_buffer("mean", torch.zeros(dim, **factory))
        self.register_buffer("deviation", torch.ones(dim, **factory))
        self.register_buffer("factor", torch.eye(size, **factory))
        self.register_buffer("limit", torch.ones((), **factory))

    def extra_repr(self) -> str:
        """For repr."""
        return f"dim={self.mean.numel()}, {self.factor.shape[0]} features"

    @classmethod
    def around(cls, u: Tensor) -> Self:
        """The region of states u ``[n, dim]``."""
        check_tensor("u", u, "[n, dim]")
        check_values("u", u)
        if u.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"u is of {u.dtype}; a region needs float32 or float64")
        if u.dim() != 2 or len(u) < 2 or not bool(torch.isfinite(u).all()):
            raise ValueError(f"u has shape {list(u.shape)}; give at least two finite states [n, dim]")
        region = cls(u.shape[-1], dtype=u.dtype, device=u.device)
        region.mean = u.mean(0)
        spread = u.std(0)
        region.deviation = torch.where(spread > 0, spread, 1.0)
        z = region._features((u - region.mean) / region.deviation)
        triangle = torch.linalg.qr(z, mode="r")[1]
        # Directions the data never takes: leave them a small but not vanishing size.
        size = triangle.diagonal().abs().max()
        size = size if size > 0 else triangle.abs().max()  # two states that are one
        ridge = 1e-6 * size * torch.eye(z.shape[-1]).to(z)
        triangle = torch.linalg.qr(torch.cat((triangle, ridge)), mode="r")[1]
        with suppress(RuntimeError):  # torch.linalg.LinAlgError
            region.factor = torch.linalg.inv(triangle)
            region.limit = (z @ region.factor).square().sum(-1).max()
            if bool(torch.isfinite(region.factor).all() & torch.isfinite(region.limit)):
                return region
        raise ValueError(
            f"states of {u.dtype} from {u.min():.2g} to {u.max():.2g} have no region; scale them, "
            "or use float64"
        )

    def distance(self, u: Tensor) -> Tensor:
        """Leverage over its largest training value, ``[*batch]``."""
        check_input("u", u, f"[*batch, {len(self.mean)}]", "the trust region", self.mean)
        if u.dim() == 0 or u.shape[-1] != len(self.mean):
            raise ValueError(
                f"u has shape {list(u.shape)}; this region is of states [*batch, {len(self.mean)}]"
            )
        z = self._features((u - self.mean) / self.deviation)
        return (z @ self.factor).square().sum(-1) / self.limit

    @staticmethod
    def _features(x: Tensor) -> Tensor:
        d = x.shape[-1]
        if d <= 16:
            i, j = torch.triu_indices(d, d, device=x.device)
            products = x[..., i] * x[..., j]
        else:
            products = x**2
        return torch.cat((products, x, torch.ones_like(x[..., :1])), -1)
