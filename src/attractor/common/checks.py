"""Checks of arguments: what was given, what is allowed, what to do.

Cheap enough for functions that are called in a loop, and silent in compiled code.
"""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_STEPS = 10**9  # of one call: more do not end, nor do their times fit into memory
MOST_PARTS = 10_000  # layers or links, of which each is made, or called, by Python


def check_tensor(name: str, x: Any, shape: str, floating: bool = True) -> None:
    """Raise unless x is a tensor, of floats if `floating`; shape is for the message: "[*batch, d]"."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; give a tensor {shape}")
    if floating and not x.is_floating_point():
        raise TypeError(f"{name} is of {x.dtype}; give floats {shape}, for example {name}.float()")


def check_dtype(dtype: Any) -> None:
    """Raise unless dtype is a type of floats, or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype = {dtype!r} is no type of floats; give one such as torch.float64")


def check_values(name: str, x: Tensor) -> None:
    """Raise if x holds no numbers to look at."""
    if x.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, which holds no numbers; move it to another")


def check_beside(name: str, x: Any, other: str, y: Tensor) -> None:
    """Raise unless x, if it is a tensor at all, is on the device of y."""
    if isinstance(x, Tensor) and x.device != y.device:
        raise ValueError(f"{name} is on {x.device} but {other} on {y.device}; move one with .to(...)")


def check_home(name: str, x: Any, what: str, weight: Any) -> None:
    """Raise unless x is on the device of a weight.

    Not looked at: what is no plain tensor (quantised), or on meta until a hook brings it (offloaded).
    """
    if isinstance(weight, Tensor) and weight.device.type != "meta":
        check_beside(name, x, what, weight)


def check_time(t: Any, u: Tensor) -> None:
    """Raise unless t is a number, or a tensor of one beside u."""
    if not isinstance(t, Tensor) and not is_number(t):
        raise TypeError(f"t is a {type(t).__name__}; give a number, or a tensor of no dimension")
    if not (isinstance(t, Tensor) and t.dim() == 0 and t.device.type == "cpu"):  # torch moves those
        check_beside("t", t, "u", u)


def check_input(name: str, x: Any, shape: str, what: str, weight: Any) -> None:
    """Raise unless x is a tensor of floats that can be multiplied with a weight of what it enters."""
    check_tensor(name, x, shape)
    check_home(name, x, what, weight)
    plain = isinstance(weight, Tensor) and weight.is_floating_point()
    if plain and x.dtype != weight.dtype and not autocast(x):
        raise ValueError(
            f"{name} is of {x.dtype} but {what} of {weight.dtype}; use {name}.to({weight.dtype}), or "
            "the other way round"
        )


def autocast(x: Tensor) -> bool:
    """Return whether autocast is on where x is."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def all_finite(u: Tensor) -> bool:
    """Return whether u is finite; its sum tells, unless that overflows."""
    u = torch.view_as_real(u.detach().resolve_conj()) if u.is_complex() else u.detach()
    dtype = torch.float32 if u.dtype.itemsize < 4 else u.dtype
    return math.isfinite(u.sum(dtype=dtype).item()) or bool(torch.isfinite(u).all())


def check_whole(name: str, value: Any, least: int, what: str = "", *, most: int | None = None) -> None:
    """Raise unless value is a whole number of at least `least`, and at most `most`."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most:,}"
        raise ValueError(
            f"{name} = {value!r} must be a whole number of at least {least}{limit}{what and f'; {what}'}"
        )


def check_seed(seed: Any) -> None:
    """Raise unless torch's generators can be seeded with it; a little is left to add to it."""
    if not is_whole(seed):
        raise TypeError(f"seed = {seed!r} must be a whole number")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed = {seed} must be of 64 bits")


def is_whole(value: Any) -> bool:
    """Return whether value is a whole number of Python's or numpy's."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def as_int(value: Any) -> Any:
    """Return a whole number of numpy's as Python's, which kernels and files need; all else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def is_number(value: Any) -> bool:
    """Return whether value is a real number of Python's or numpy's."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def as_number(name: str, value: Any) -> float:
    """Return a number, or a tensor of one number, as Python's float; raise if it is neither."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "meta":
        value = value.item()
    if not is_number(value):
        what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{name} = {what} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large: a whole number of more than 300 digits") from None


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise unless value is a finite number from low to high."""
    if isinstance(value, Tensor):
        raise TypeError(f"{name} is a tensor; give a number, such as {name}.item()")
    if not (is_number(value) and abs(value) < math.inf and low <= value <= high):
        edges = (
            f"of at least {low:g}" if low > -math.inf else "",
            f"at most {high:g}" if high < math.inf else "",
        )
        asked = " and ".join(filter(None, edges))
        raise ValueError(f"{name} = {value!r} must be a finite number{asked and f' {asked}'}")


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Raise unless value is one of the known names; says which is nearest."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}{nearest(value, known)}")


def nearest(value: Any, known: Sequence[str]) -> str:
    """``; did you mean ...?``, or nothing if nothing is near."""
    near = get_close_matches(str(value), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
