"""The patches of cells in which a fitted correction of fields can be trusted."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from attractor.core.chunks import Guard
from attractor.core.tableaus import AnyScheme
from attractor.ode.trust import plain_guard

RIDGE = 1e-6  # of the largest direction: what directions have at least that patches never take


class PatchRegion(nn.Module):
    """An ellipsoid around the patches that a fit has seen, for each of its polynomials.

    A field is inside if all its patches are, so that a region serves fields of any size. It does not
    see parameters.

    Args:
        dim: Size of a state.
        polynomials, size: Number of polynomials of the correction, and of the cells in a patch.

    Attributes:
        mean: ``[polynomials, size]``, the centre of each ellipsoid.
        factor: ``[polynomials, size, size]``, an upper triangle; ``(x - mean) @ factor`` has the squared
            norm `limit` on the surface.
        limit: ``[polynomials]``.
        accuracy: ``[dim]``, root mean square error of a corrected step; -1 if it is not known.
        indices: Components of a state in each patch, ``[cells, size]`` for each polynomial.
    """

    mean: Tensor
    factor: Tensor
    limit: Tensor
    accuracy: Tensor

    def __init__(self, dim: int, polynomials: int, size: int, **factory: Any) -> None:
        super().__init__()
        self.indices: list[Tensor] = []
        self.register_buffer("mean", torch.zeros(polynomials, size, **factory))
        self.register_buffer("factor", torch.eye(size, **factory).repeat(polynomials, 1, 1))
        self.register_buffer("limit", torch.ones(polynomials, **factory))
        self.register_buffer("accuracy", torch.full((dim,), -1.0, **factory))

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        return f"dim={len(self.accuracy)}, patches of {self.mean.shape[-1]} cells"

    @classmethod
    def of(cls, correction: Any, **factory: Any) -> Self:
        """Return the region of a `Patches` correction without knowledge of states."""
        indices = [correction.patches(i) for i in range(len(correction.net))]
        region = cls(correction.grid.dim, len(indices), indices[0].shape[-1], **factory)
        region.indices = indices
        return region

    @classmethod
    def around(cls, u: Tensor, correction: Any, margin: float = 1.0) -> Self:
        """Return the region of the patches of states u ``[n, dim]``.

        Args:
            correction: The `Patches` correction whose patches are meant.
            margin: Factor by which the squared distance may exceed its largest value among u.
        """
        region = cls.of(correction, dtype=u.dtype, device=u.device)
        for i, index in enumerate(region.indices):
            x = u[:, index.to(u.device)].flatten(0, 1)
            region.mean[i] = x.mean(0)
            centred = x - x.mean(0)
            covariance = centred.T @ centred / len(x)
            largest = covariance.diagonal().max().clamp_min(torch.finfo(u.dtype).tiny)
            covariance = covariance + RIDGE * largest * torch.eye(len(covariance)).to(u)
            # x' C^-1 x = |x U^-1|^2 for C = U'U with a triangle U.
            triangle = torch.linalg.cholesky(covariance, upper=True)
            region.factor[i] = torch.linalg.inv(triangle)
            region.limit[i] = margin * (centred @ region.factor[i]).square().sum(-1).max()
        return region

    def distance(self, u: Tensor) -> Tensor:
        """Return the largest squared distance ``[*batch]`` of a patch of u over the limit."""
        parts = [
            ((u[..., index.to(u.device)] - mean) @ factor).square().sum(-1).amax(-1) / limit
            for index, mean, factor, limit in zip(self.indices, self.mean, self.factor, self.limit)
        ]
        return torch.stack(parts).amax(0)

    def inside(self, u: Tensor) -> Tensor:
        """Return ``[*batch]``, True for states u ``[*batch, dim]`` in the region; NaN is outside."""
        return self.distance(u[..., : len(self.accuracy)]) <= 1

    def is_valid(self) -> bool:
        """Return whether distances are defined: limits are above 0, and factors are triangles."""
        return bool((self.limit > 0).all() and not self.factor.tril(-1).any())

    def guard(self, scheme: AnyScheme, replace: bool = True, compile: bool = False) -> Guard:
        """Return the guard of a solver with this scheme, for one solve; see `TrustRegion.guard`.

        Plain steps solve the coarse equation, so that the error of its grid remains in them.
        """
        spread = torch.linalg.inv(self.factor[0]).square().sum(0).max().sqrt()
        size = (self.mean.abs().max() + spread).expand(len(self.accuracy))
        return plain_guard(self, self.inside, size, self.accuracy, scheme, replace, compile)
