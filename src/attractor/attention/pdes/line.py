"""Positions along a dimension of a tensor, with walls between some of them, where a PDE acts.

A face is the place between positions j and j + 1. Differences and means map positions to faces, and
their transposes map faces to positions:

    laplacian = divergence . open . difference          divergence = -difference^T
    gradient = divergence . open . mean                 gradient^T = -mean^T . open . difference

where `open` sets the flux through a wall to zero. Sums along the line are conserved with any walls.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.common.checks import check_beside, check_tensor


class Neighbourhood(Protocol):
    """The space in which a PDE acts: a `Line`, or a `Plane` of two lines."""

    def laplacian(self, u: Tensor) -> Tensor:
        """Return the discrete second derivative, with the shape of u."""
        ...

    def gradient(self, u: Tensor) -> Tensor:
        """Return the discrete first derivative in flux form, with the shape of u."""
        ...


@dataclass(frozen=True, eq=False)
class Line:
    """Positions along one dimension of a tensor.

    Args:
        dim: The dimension, counted from the end: -1 for the keys of a map, -2 for its queries or for
            the keys of values.
        open: Bool, False where a wall separates positions j and j + 1. It broadcasts against a tensor
            with n - 1 positions along `dim`. None: there are no walls but the ends.
        periodic: Whether the first position follows the last one. There are no walls then.
        transposed: Whether the gradient is replaced by its transpose; see `adjoint`.
    """

    dim: int = -1
    open: Tensor | None = None
    periodic: bool = False
    transposed: bool = False

    @property
    def adjoint(self) -> "Line":
        """The transposed line: ``<line.gradient(u), v> = <u, line.adjoint.gradient(v)>``."""
        return replace(self, transposed=not self.transposed)

    def laplacian(self, u: Tensor) -> Tensor:
        """Return ``u_{j+1} - 2 u_j + u_{j-1}``, with no flux through walls."""
        self._check(u)
        return self._divergence(self._through(self._difference(u)))

    def gradient(self, u: Tensor) -> Tensor:
        """Return ``(u_{j+1} - u_{j-1}) / 2``, the difference of face fluxes ``(u_j + u_{j+1}) / 2``."""
        self._check(u)
        if self.transposed:
            flux = self._through(self._difference(u))
            upper = flux.roll(1, self.dim) if self.periodic else self._padded(flux, 1, 0)
            lower = flux if self.periodic else self._padded(flux, 0, 1)
            return -0.5 * (upper + lower)
        if self.periodic:
            return self._divergence(0.5 * (u.roll(-1, self.dim) + u))
        n = u.shape[self.dim] - 1
        return self._divergence(
            self._through(0.5 * (u.narrow(self.dim, 1, n) + u.narrow(self.dim, 0, n)))
        )

    def _check(self, u: Tensor) -> None:
        check_tensor("u", u, "[..., positions]")
        if not -u.dim() <= self.dim < 0:
            raise ValueError(
                f"dim = {self.dim} of a Line counts from the end: -1 to {-u.dim()} for u {[*u.shape]}"
            )
        if u.shape[self.dim] == 0:
            raise ValueError(f"u {list(u.shape)} has no positions along dimension {self.dim}")
        if self.open is None or torch.compiler.is_compiling():
            return
        faces = list(u.shape)
        faces[self.dim] -= 1
        sizes = zip(reversed(self.open.shape), reversed(faces))
        fits = self.open.ndim <= u.ndim and all(size in (1, face) for size, face in sizes)
        if self.open.dtype != torch.bool or not fits:
            raise ValueError(
                f"open {list(self.open.shape)} of {self.open.dtype} must be bools that broadcast to the "
                f"faces {faces} of u {list(u.shape)}"
            )
        check_beside("open", self.open, "u", u)

    def _through(self, flux: Tensor) -> Tensor:
        return flux if self.open is None else torch.where(self.open, flux, 0.0)

    def _difference(self, u: Tensor) -> Tensor:
        return u.roll(-1, self.dim) - u if self.periodic else u.diff(dim=self.dim)

    def _divergence(self, flux: Tensor) -> Tensor:
        if self.periodic:
            return flux - flux.roll(1, self.dim)
        return self._padded(flux, 1, 1).diff(dim=self.dim)

    def _padded(self, flux: Tensor, before: int, after: int) -> Tensor:
        return pad(flux, (0, 0) * (-self.dim - 1) + (before, after))


@dataclass(frozen=True, eq=False)
class Plane:
    """Keys and queries together. Derivatives are the sums of those along both."""

    keys: Line
    queries: Line

    def laplacian(self, u: Tensor) -> Tensor:
        """Return the sum of the two Laplacians."""
        return self.keys.laplacian(u) + self.queries.laplacian(u)

    def gradient(self, u: Tensor) -> Tensor:
        """Return the sum of the two gradients."""
        return self.keys.gradient(u) + self.queries.gradient(u)
