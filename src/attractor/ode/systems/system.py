"""What every system offers, and how initial states are drawn."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class System(Protocol):
    """An equation of motion with its initial states."""

    @property
    def dim(self) -> int:
        """Size of a state."""
        ...

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt, of u's shape ``[*batch, dim]``."""
        ...

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states ``[n, dim]``."""
        ...


def uniform(
    n: int,
    low: Sequence[float],
    high: Sequence[float],
    generator: torch.Generator | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Tensor:
    """n states with components uniform between low and high.

    Drawn in float64 where the generator lives, then cast: a seed gives the same states in every
    dtype and on every device.
    """
    if n < 0:
        raise ValueError(f"cannot sample {n} states; give a number of at least 0")
    home = generator.device if generator is not None else "cpu"
    lows, highs = torch.tensor([low, high], dtype=torch.float64, device=home)
    draws = torch.rand(n, len(low), generator=generator, dtype=torch.float64, device=home)
    return (lows + (highs - lows) * draws).to(dtype=dtype or torch.get_default_dtype(), device=device)
