"""Fields on grids of cells: how a state holds one, the cells around a cell, and coarser grids.

A field is a state ``[*batch, dim]`` like any other: the channels of the field one after the other, each
of them with its cells in row-major order.

>>> import torch
>>> fine, coarse = Grid((8,)), Grid((4,))
>>> coarse.restrict(torch.arange(8.0), fine)
tensor([0.5000, 2.5000, 4.5000, 6.5000])
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor

from attractor.common.checks import is_whole


@dataclass(frozen=True)
class Grid:
    """A grid of equal cells.

    Attributes:
        shape: Number of cells along each axis.
        channels: Number of values per cell.
        walls: Whether the domain ends at walls, which nothing flows through, instead of being periodic.
    """

    shape: tuple[int, ...]
    channels: int = 1
    walls: bool = False

    def __post_init__(self) -> None:
        shape = tuple(self.shape) if isinstance(self.shape, list | tuple) else (self.shape,)
        if not shape or not all(is_whole(n) and n >= 1 for n in shape):
            raise ValueError(
                f"shape = {self.shape!r}; give the number of cells along each axis, such as (64,) or "
                "(128, 128)"
            )
        if not is_whole(self.channels) or self.channels < 1:
            raise ValueError(f"channels = {self.channels!r} must be a whole number of at least 1")
        if not isinstance(self.walls, bool):
            raise TypeError(f"walls = {self.walls!r} must be True or False")
        object.__setattr__(self, "shape", tuple(map(int, shape)))
        object.__setattr__(self, "channels", int(self.channels))

    @property
    def cells(self) -> int:
        """The number of cells."""
        return math.prod(self.shape)

    @property
    def dim(self) -> int:
        """The size of a state."""
        return self.channels * self.cells

    def field(self, u: Tensor) -> Tensor:
        """Return a state ``[*batch, dim]`` as a field ``[*batch, channels, *shape]``."""
        if not isinstance(u, Tensor) or u.dim() == 0 or u.shape[-1] != self.dim:
            shape = list(u.shape) if isinstance(u, Tensor) else type(u).__name__
            raise ValueError(f"u is {shape}; states of {self} are tensors [*batch, {self.dim}]")
        return u.unflatten(-1, (self.channels, *self.shape))

    def state(self, field: Tensor) -> Tensor:
        """Return a field ``[*batch, channels, *shape]`` as a state ``[*batch, dim]``."""
        shape = (self.channels, *self.shape)
        if not isinstance(field, Tensor) or tuple(field.shape[-len(shape) :]) != shape:
            actual = list(field.shape) if isinstance(field, Tensor) else type(field).__name__
            raise ValueError(f"field is {actual}; fields of {self} are tensors [*batch, *{list(shape)}]")
        return field.flatten(-1 - len(self.shape))

    def factor_of(self, fine: "Grid") -> int:
        """Return how many cells of a finer grid make up one of this grid, along each axis.

        Raises:
            ValueError: The finer grid does not coarsen evenly to this one.
            TypeError: It is no `Grid`.
        """
        if not isinstance(fine, Grid):
            raise TypeError(f"fine is a {type(fine).__name__}; pass a Grid")
        fits = len(self.shape) == len(fine.shape) and self.channels == fine.channels
        fits &= self.walls == fine.walls
        ratios = {divmod(n, m) for n, m in zip(fine.shape, self.shape)} if fits else set()
        if len(ratios) != 1 or next(iter(ratios))[1]:
            raise ValueError(
                f"{fine} does not coarsen evenly to {self}: both need the same axes, channels and "
                "walls, and the same whole number of fine cells in a coarse one along each axis"
            )
        return next(iter(ratios))[0]

    def restrict(self, u: Tensor, fine: "Grid") -> Tensor:
        """Return states ``[*batch, dim]`` of this grid: means over cells of those of a finer one."""
        factor = self.factor_of(fine)
        field = fine.field(u)
        if not (u.is_floating_point() or u.is_complex()):
            raise TypeError(f"u has dtype {u.dtype}, which has no means; use u.float() or u.double()")
        if factor > 1:
            for axis in range(-len(self.shape), 0):
                field = field.movedim(axis, -1).unflatten(-1, (-1, factor)).mean(-1).movedim(-1, axis)
        return self.state(field)

    def coarsened(self, factor: int) -> Self:
        """Return the grid of which one cell is made up of `factor` cells of this one along each axis."""
        if not is_whole(factor) or factor < 1 or any(n % factor for n in self.shape):
            raise ValueError(
                f"{self} does not coarsen evenly by a factor of {factor!r}; it must divide "
                f"{math.gcd(*self.shape)}"
            )
        return type(self)(tuple(n // factor for n in self.shape), self.channels, self.walls)

    def neighbours(self, offset: tuple[int, ...]) -> Tensor:
        """Return, for each cell ``[cells]``, the number of the cell at an offset from it.

        Beyond a wall that is the cell's mirror image, and around a period the one at the other end.
        """
        rows = [self._moved(n, k) for n, k in zip(self.shape, offset)]
        index = torch.zeros((), dtype=torch.long)
        for n, row in zip(self.shape, rows):
            index = index[..., None] * n + row
        return index.flatten()

    def _moved(self, n: int, offset: int) -> Tensor:
        index = torch.arange(n) + offset
        if not self.walls:
            return index % n
        index = index % (2 * n)  # mirror images repeat after twice the length
        return torch.where(index < n, index, 2 * n - 1 - index)

    def patches(self, axis: int | None, radius: int, breadth: int) -> Tensor:
        """Return the components ``[cells, size]`` of a state in the patch around each face, or cell.

        Args:
            axis: The patch is around the face between a cell and the next one along this axis, `radius`
                cells to each side. None: around the cell itself, `radius` cells in all directions.
            breadth: Number of cells to each side along the other axes.
        """
        return _patches(self, axis, radius, breadth)

    def offsets(self, axis: int | None, radius: int, breadth: int) -> list[tuple[int, ...]]:
        """Return the offsets of the cells of a patch; arguments as for `patches`."""
        across = range(-breadth, breadth + 1)
        along = range(-radius + 1, radius + 1)
        around = range(-radius, radius + 1)
        axes: list[Any] = [
            around if axis is None else along if i == axis else across for i in range(len(self.shape))
        ]
        return list(product(*axes))


@lru_cache(maxsize=64)
def _patches(grid: Grid, axis: int | None, radius: int, breadth: int) -> Tensor:
    columns = [grid.neighbours(offset) for offset in grid.offsets(axis, radius, breadth)]
    return torch.stack([c * grid.cells + col for c in range(grid.channels) for col in columns], -1)


def grid_of(rate: Any, grid: Grid | None = None) -> Grid:
    """Return the grid of a rate: `grid` itself, or the rate's attribute of that name."""
    known = getattr(rate, "grid", None) if grid is None else grid
    if not isinstance(known, Grid):
        raise ValueError(
            "corrections of fields need the grid: give the rate an attribute `grid`, or pass it, such "
            'as options={"grid": attractor.ode.Grid((64,))}'
        )
    return known
