"""States of any shape, tuples and dicts of tensors, as one state of one dimension for solvers."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attractor.core.rates import Rate

State: TypeAlias = Tensor | tuple[Tensor, ...] | dict[Any, Tensor]
Tolerance: TypeAlias = Any  # a number, a tensor, or a tuple or dict of these for the parts of a state


def parts_of(y: State) -> list[Tensor]:
    """Return the tensors of a state."""
    return [y] if isinstance(y, Tensor) else [*(y.values() if isinstance(y, dict) else y)]


def map_parts(function: Callable[[Tensor], Tensor], y: State) -> Any:
    """Apply a function to each tensor of a state."""
    if isinstance(y, Tensor):
        return function(y)
    if isinstance(y, dict):
        return {key: function(part) for key, part in y.items()}
    return tuple(map(function, y))


def flatten(func: Callable[..., Any], y0: State) -> tuple[Rate, Tensor, Callable[[Tensor], Any]]:
    """Return the problem for one state of one dimension, and what restores the shape of solutions."""
    if not isinstance(y0, Tensor | tuple | list | dict) or not (
        len(parts := parts_of(y0)) and all(isinstance(y, Tensor) for y in parts)
    ):
        raise TypeError("y0 must be a tensor or a tuple or dict of tensors")
    if len({y.device for y in parts}) > 1:
        devices = ", ".join(str(y.device) for y in parts)
        raise ValueError(f"y0 has tensors on {devices}; pass all on one device")
    shapes, sizes = [y.shape for y in parts], [y.numel() for y in parts]
    keys = list(y0) if isinstance(y0, dict) else None

    def restore(u: Tensor) -> Any:
        if isinstance(y0, Tensor):
            return u.reshape((*u.shape[:-1], *y0.shape))
        pieces = zip(u.split(sizes, -1), shapes)
        shaped = tuple(piece.reshape((*u.shape[:-1], *shape)) for piece, shape in pieces)
        return shaped if keys is None else dict(zip(keys, shaped))

    def rate(t: Tensor, u: Tensor) -> Tensor:
        rates: Any = func(t.reshape(()), restore(u))
        if isinstance(y0, Tensor):
            if not isinstance(rates, Tensor) or rates.shape != y0.shape:
                description = list(rates.shape) if isinstance(rates, Tensor) else type(rates).__name__
                raise ValueError(f"func returned {description} for a state of shape {list(y0.shape)}")
            return rates.reshape(-1)
        if keys is not None:
            if not isinstance(rates, dict) or set(rates) != set(keys):
                kind = sorted(map(str, rates)) if isinstance(rates, dict) else type(rates).__name__
                raise ValueError(
                    f"func returned {kind} for a dict with the keys {sorted(map(str, keys))}"
                )
            rates = [rates[key] for key in keys]
        right = isinstance(rates, tuple | list) and all(isinstance(du, Tensor) for du in rates)
        if not right or [du.numel() for du in rates] != sizes:
            own = [list(getattr(du, "shape", ())) for du in rates] if right else type(rates).__name__
            raise ValueError(f"func returned {own} for states of shapes {[list(s) for s in shapes]}")
        return torch.cat([du.reshape(-1) for du in rates])

    flat = parts[0].reshape(-1) if isinstance(y0, Tensor) else torch.cat([y.reshape(-1) for y in parts])
    return rate, flat, restore


def flat_tolerance(name: str, tolerance: Tolerance, y0: State) -> float | Tensor:
    """Return a tolerance as a number, or as a tensor ``[d]`` for the flattened state."""
    if isinstance(tolerance, Tensor) and tolerance.numel() == 1:
        return float(tolerance.item())
    if not isinstance(tolerance, Tensor | tuple | list | dict):
        return tolerance  # Control says what is wrong with it
    if isinstance(y0, Tensor):
        if not isinstance(tolerance, Tensor):
            raise TypeError(
                f"{name} is a {type(tolerance).__name__}, but y0 is one tensor; pass a number, or a "
                "tensor that broadcasts to y0"
            )
        each: list[Any] = [tolerance]
    elif isinstance(tolerance, Tensor) or len(tolerance) != len(y0):
        raise ValueError(f"{name} must be one number, or hold one tolerance per part of y0 ({len(y0)})")
    elif isinstance(tolerance, dict) and isinstance(y0, dict):
        each = [tolerance[key] for key in y0]
    else:
        each = [*tolerance]
    spread = lambda x, y: torch.as_tensor(x, device=y.device).to(y.real.dtype).expand(y.shape)
    return torch.cat([spread(x, y).reshape(-1) for x, y in zip(each, parts_of(y0))])
