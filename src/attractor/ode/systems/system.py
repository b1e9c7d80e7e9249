"""What every system offers, and how initial states are drawn."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from attractor.common.checks import check_beside, check_dtype, check_tensor, is_whole


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
    dtype = checked_dtype(dtype)
    draws = _draws(torch.rand, n, len(low), generator)
    lows, highs = torch.tensor([low, high], dtype=torch.float64, device=draws.device)
    return cast(lows + (highs - lows) * draws, dtype, device)


def normal(n: int, size: int, generator: torch.Generator | None) -> Tensor:
    """n rows of `size` standard normal numbers in float64, drawn where the generator lives."""
    return _draws(torch.randn, n, size, generator)


def _draws(draw: Any, n: int, size: int, generator: torch.Generator | None) -> Tensor:
    if not is_whole(n) or n < 0:
        raise ValueError(f"cannot sample {n!r} states; give a number of at least 0")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator is a {type(generator).__name__}; give a torch.Generator, or None")
    home = generator.device if generator is not None else "cpu"
    return draw(n, size, generator=generator, dtype=torch.float64, device=home)


def cast(states: Tensor, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return states in a dtype and on a device."""
    try:
        return states.to(dtype).to(device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # of a device that is not there
        reason = str(error).splitlines()[0]
        raise ValueError(f"device = {device!r} cannot be used here: {reason}") from None


def checked_dtype(dtype: Any) -> torch.dtype:
    """The dtype of states, torch's default for None."""
    if dtype is None:
        return torch.get_default_dtype()
    check_dtype(dtype)
    return dtype


def check_state(system: System, u: Any) -> None:
    """Raise unless u is a tensor ``[*batch, dim]`` of a system's states."""
    if not isinstance(u, Tensor) or u.dim() == 0 or u.shape[-1] != system.dim:
        given = list(u.shape) if isinstance(u, Tensor) else f"a {type(u).__name__}"
        raise ValueError(
            f"{type(system).__name__} was given {given}; its states are tensors [*batch, {system.dim}]"
        )
    if not (u.is_floating_point() or u.is_complex()):
        raise TypeError(f"states of {u.dtype} do not move; use .float() or .double()")


def check_times(t: Any, u0: Tensor) -> None:
    """Raise unless t is a tensor of times ``[n]`` beside the states u0."""
    check_tensor("t", t, "[n] of times", floating=False)
    check_beside("t", t, "u0", u0)
    if t.dim() != 1:
        raise ValueError(f"t has shape {list(t.shape)}; give times [n]")
