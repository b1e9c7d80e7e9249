"""Patches: a polynomial of the cells around each face or cell of a grid, the same for all of them."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attractor.common.checks import check_whole
from attractor.core.chunks import Guard
from attractor.core.step import Step
from attractor.ode.corrections.correction import Correction, as_step
from attractor.ode.corrections.patches_kernel import Kernel
from attractor.ode.corrections.polynomial import Monomials
from attractor.ode.corrections.polynomial_kernel import TYPES
from attractor.ode.grids import Grid
from attractor.ode.patch_region import PatchRegion

# The last kernel of each correction. It is not an attribute, for modules are copied and saved.
_KERNELS: WeakKeyDictionary[nn.Module, Kernel] = WeakKeyDictionary()


class Patches(Correction):
    """A polynomial of the patch around each face of a grid, whose differences are added to the cells.

    A field is not a vector of unrelated numbers: what happens to a cell within a step depends on the
    cells around it, in the same way everywhere. This correction is therefore one polynomial of a patch
    of cells, for all faces of one direction, and commutes with translations. It is a flux through the
    face, so that the mean of each channel is conserved to rounding; with ``conservative=False`` it is a
    polynomial of the patch around each cell, which is added to the cell.

    With the scheme "identity" it replaces all calls of the rate. Fitted to trajectories of a finer grid
    (`fit` with `reference=`), it corrects the coarse grid and the large step at once. Then, with
    ``compile=True``, on a CPU and without gradients, all steps of a solve are one loop in C.

    Args:
        dim: Size of a state, ``channels * cells``.
        shape: Number of cells along each axis; None: one axis.
        channels: Number of values per cell.
        walls: Whether the domain ends at walls, through which there is no flux, not periodically.
        radius: Number of cells to each side of a face that its flux depends on. Information must not
            travel farther in a step. Without `conservative`, cells in all directions around a cell.
        breadth: Number of cells to each side along the other axes.
        degree: The largest total degree.
        conservative: Whether the polynomials are fluxes through faces.
        period: For equations that repeat in time; the phase joins each patch as a cosine and a sine.
        parameters: Number of parameters of the equation; those of each trajectory join its patches.
        factory: device and dtype.
    """

    fit_defaults: ClassVar[dict[str, Any]] = {}
    net: Any

    def __init__(
        self,
        dim: int,
        shape: Sequence[int] | None = None,
        channels: int = 1,
        walls: bool = False,
        radius: int = 2,
        breadth: int = 1,
        degree: int = 3,
        conservative: bool = True,
        period: float | None = None,
        parameters: int = 0,
        **factory: Any,
    ) -> None:
        super().__init__()
        check_whole("dim", dim, 1)
        check_whole("radius", radius, 1)
        check_whole("breadth", breadth, 0)
        self.grid = Grid((dim // channels,) if shape is None else tuple(shape), channels, walls)
        if self.grid.dim != dim:
            raise ValueError(
                f"dim = {dim} is not {channels} channels times the cells of shape = {self.grid.shape}"
            )
        if not isinstance(conservative, bool):
            raise TypeError(f"conservative = {conservative!r} must be True or False")
        self.config = {
            "dim": dim, "shape": list(self.grid.shape), "channels": channels, "walls": walls,
            "radius": radius, "breadth": breadth, "degree": degree, "conservative": conservative,
            "period": period, "parameters": parameters,
        }  # fmt: skip
        axes = range(len(self.grid.shape)) if conservative else [None]
        self.axes: list[int | None] = list(axes)
        size = self.patches(0).shape[-1]
        self.net = _Faces(
            Monomials(size, channels, degree, period, parameters, **factory) for _ in self.axes
        )

    def patches(self, i: int) -> Tensor:
        """Return the components ``[cells, size]`` of a state in each patch of the i-th polynomial."""
        config = self.config
        return self.grid.patches(self.axes[i], config["radius"], config["breadth"])

    def patch_inputs(self, i: int, step: Step) -> Tensor:
        """Return what the i-th polynomial sees ``[*batch, cells, inputs]`` of a step."""
        x = step.u[..., self.patches(i).to(step.u.device)]
        own = self._conditions(step)
        if own is None:
            return x
        return torch.cat((x, own[..., None, :].expand(*x.shape[:-1], own.shape[-1])), -1)

    def _conditions(self, step: Step) -> Tensor | None:
        """Return the parameters and the phase ``[*batch, n]`` of trajectories; None without any."""
        if not (self.config["parameters"] or self.timed):
            return None
        return super().inputs(step)

    def _seen(self, step: Step) -> Tensor:
        """Return nothing of the state, beside which parameters and phase are put."""
        return step.u[..., :0]

    def differences(self, i: int, flux: Tensor) -> Tensor:
        """Return what values ``[*batch, cells, n]`` at the i-th polynomial's faces add to the cells.

        That is the flux through the face below a cell minus that through the face above it, and none
        through walls. Values of cells are returned as they are.
        """
        axis = self.axes[i]
        if axis is None:
            return flux
        grid = self.grid
        below = grid.neighbours(tuple(-(k == axis) for k in range(len(grid.shape))))
        if not grid.walls:
            return flux[..., below.to(flux.device), :] - flux
        place = torch.arange(grid.cells, device=flux.device) // math.prod(grid.shape[axis + 1 :])
        place = (place % grid.shape[axis])[:, None]
        above = flux * (place < grid.shape[axis] - 1)
        return above[..., below.to(flux.device), :] * (place > 0) - above

    def forward(
        self, u: Tensor | Step, slope: Tensor | None = None, dt: Any = None, t: Any = None
    ) -> Tensor:
        """Return what is added to a plain step."""
        step = as_step(u, slope, dt, t)
        self.grid.field(step.u)  # raises if it is none
        parts = [self.differences(i, net(self.patch_inputs(i, step))) for i, net in enumerate(self.net)]
        return sum(parts[1:], start=parts[0]).movedim(-1, -2).flatten(-2)

    def _identity_loop(self, u: Tensor, guard: Guard | None) -> Kernel | None:
        """Return a loop of steps of the scheme "identity" in C; None if there is none.

        Args:
            u: The states ``[*batch, d]`` from which the loop starts.
            guard: What stops it.
        """
        like = self.net[0].head.weight
        if u.device.type != "cpu" or u.dtype != like.dtype or u.dtype not in TYPES:
            return None
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.net.parameters()):
            return None
        region = None if guard is None else guard.region
        if guard is not None and (not isinstance(region, PatchRegion) or region.mean.dtype != u.dtype):
            return None
        tensors = [x for net in self.net for x in (net.head.weight, net.centre, net.scale)]
        tensors += [net.head.bias for net in self.net]
        if region is not None:
            tensors += [region.mean, region.factor, region.limit]
        known = _KERNELS.get(self.net)
        if known is None or not known.is_of(tensors):
            known = _KERNELS[self.net] = Kernel(self, tensors, region)
        return known if known.available else None


class _Faces(nn.ModuleList):
    """The polynomials of the faces of each direction."""

    @property
    def period(self) -> float | None:
        """The period of the equation."""
        first: Any = self[0]
        return first.period

    @property
    def parameter_count(self) -> int:
        """The number of parameters of the equation."""
        first: Any = self[0]
        return first.parameter_count
