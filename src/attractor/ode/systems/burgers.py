"""The viscous Burgers equation: waves that steepen until viscosity stops them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.common.checks import is_whole
from attractor.ode.grids import Grid
from attractor.ode.systems.system import cast, check_state, checked_dtype, normal

MODES = 4  # waves of an initial state


@dataclass(frozen=True)
class Burgers:
    """``u_t + (u^2 / 2)_x = viscosity u_xx``, periodic, in finite volumes.

    A state holds the means of u over cells of equal length. Initial states are sums of four waves with
    random phases and normally distributed amplitudes, with exact means, so that those of a fine grid
    coarsen to those of a coarse one. The mean of u over all cells is conserved.

    Attributes:
        cells: Number of cells.
        viscosity: The viscosity.
        length: Length of the domain.
        order: Order of the values and slopes at the faces between cells, 2 or 4.
    """

    cells: int = 64
    viscosity: float = 0.05
    length: float = 2 * math.pi
    order: int = 2

    def __post_init__(self) -> None:
        if not is_whole(self.cells) or self.cells < 4:
            raise ValueError(f"cells = {self.cells!r} must be a whole number of at least 4")
        for name in ("viscosity", "length"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be positive and finite")
        if self.order not in (2, 4):
            raise ValueError(f"order = {self.order!r} must be 2 or 4")

    @property
    def grid(self) -> Grid:
        """The grid of the states."""
        return Grid((self.cells,))

    @property
    def dim(self) -> int:
        """Size of a state."""
        return self.cells

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        width = self.length / self.cells
        right = torch.roll(u, -1, -1)
        value, slope = u + right, right - u
        if self.order == 4:
            beyond, before = torch.roll(u, -2, -1), torch.roll(u, 1, -1)
            value = (7 * value - (beyond + before)) / 6
            slope = (15 * slope - (beyond - before)) / 12
        flux = value.square() / 8 - slope * (self.viscosity / width)
        return (torch.roll(flux, 1, -1) - flux) / width

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        dtype, draws = checked_dtype(dtype), normal(n, 2 * MODES, generator)
        number = torch.arange(1, MODES + 1, dtype=torch.float64, device=draws.device)
        x = (torch.arange(self.cells, dtype=torch.float64, device=draws.device) + 0.5) / self.cells
        angle = 2 * math.pi * number[:, None] * x
        # The mean over a cell of a wave is its value in the middle times a sinc.
        size = torch.sinc(number / self.cells) / number
        cosine, sine = (draws * size.repeat(2)).chunk(2, -1)
        return cast((cosine @ angle.cos() + sine @ angle.sin()) / math.sqrt(2), dtype, device)
