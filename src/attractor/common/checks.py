"""Checks of arguments. Errors say what was passed, what is allowed and what to do.

The checks are cheap enough for functions that are called in a loop.
"""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_STEPS = 10**9  # of one call; the times of more steps do not fit into memory
MOST_PARTS = 10_000  # layers or links, each of which Python creates or calls


def check_tensor(name: str, x: Any, shape: str, floating: bool = True) -> None:
    """Raise unless x is a tensor, with a floating dtype if `floating`.

    Args:
        name: Name of the argument.
        x: The value.
        shape: The shape for the message, such as "[*batch, d]".
        floating: Whether the dtype must be floating.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; pass a tensor {shape}")
    if floating and not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}; pass floats {shape}, for example {name}.float()")


def check_dtype(dtype: Any) -> None:
    """Raise unless dtype is a floating dtype, or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype = {dtype!r} is not a floating dtype; pass one such as torch.float64")


def check_values(name: str, x: Tensor) -> None:
    """Raise if x is on the meta device, where it has no values."""
    if x.device.type == "meta":
        raise ValueError(f"{name} is on the meta device and has no values; move it to another device")


def check_beside(name: str, x: Any, other: str, y: Tensor) -> None:
    """Raise if x is a tensor on another device than y."""
    if isinstance(x, Tensor) and x.device != y.device:
        raise ValueError(
            f"{name} is on {x.device} and {other} is on {y.device}; move one of them with .to(...)"
        )


def check_home(name: str, x: Any, what: str, weight: Any) -> None:
    """Raise unless x is on the device of a weight.

    Weights that are no plain tensors (quantised), or on the meta device until a hook loads them
    (offloaded), are not checked.
    """
    if isinstance(weight, Tensor) and weight.device.type != "meta":
        check_beside(name, x, what, weight)


def check_time(t: Any, u: Tensor) -> None:
    """Raise unless t is a number, or a tensor of one number on the device of u."""
    if not isinstance(t, Tensor) and not is_number(t):
        raise TypeError(f"t is a {type(t).__name__}; pass a number, or a tensor without dimensions")
    if not (
        isinstance(t, Tensor) and t.dim() == 0 and t.device.type == "cpu"
    ):  # torch moves such tensors
        check_beside("t", t, "u", u)


def check_input(name: str, x: Any, shape: str, what: str, weight: Any) -> None:
    """Raise unless x is a floating tensor with the dtype and device of a weight of the module `what`."""
    check_tensor(name, x, shape)
    check_home(name, x, what, weight)
    plain = isinstance(weight, Tensor) and weight.is_floating_point()
    if plain and x.dtype != weight.dtype and not autocast(x):
        raise ValueError(
            f"{name} has dtype {x.dtype} and {what} has {weight.dtype}; use {name}.to({weight.dtype}), "
            f"or convert {what}"
        )


def autocast(x: Tensor) -> bool:
    """Return whether autocast is enabled on the device of x."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def all_finite(u: Tensor) -> bool:
    """Return whether all values of u are finite."""
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
    """Raise unless seed is a 64-bit integer, as the generators of torch require."""
    if not is_whole(seed):
        raise TypeError(f"seed = {seed!r} must be a whole number")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed = {seed} must be between -2**63 and 2**63 - 1")


def is_whole(value: Any) -> bool:
    """Return whether value is an integer of Python or NumPy, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def as_int(value: Any) -> Any:
    """Return an integer of NumPy as one of Python, and any other value unchanged."""
    return int(value) if isinstance(value, np.integer) else value


def is_number(value: Any) -> bool:
    """Return whether value is a real number of Python or NumPy, and no bool."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def as_number(name: str, value: Any) -> float:
    """Return a number, or a tensor of one number, as a float.

    Raises:
        TypeError: The value is neither.
        ValueError: The number is too large for a float.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "meta":
        value = value.item()
    if not is_number(value):
        what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{name} = {what} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{name} is too large for a float: a whole number of more than 300 digits"
        ) from None


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise unless value is a finite number from low to high."""
    if isinstance(value, Tensor):
        raise TypeError(f"{name} is a tensor; pass a number, such as {name}.item()")
    if not (is_number(value) and abs(value) < math.inf and low <= value <= high):
        edges = (
            f"of at least {low:g}" if low > -math.inf else "",
            f"at most {high:g}" if high < math.inf else "",
        )
        bounds = " and ".join(filter(None, edges))
        raise ValueError(f"{name} = {value!r} must be a finite number{bounds and f' {bounds}'}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless value is one of the choices; the message suggests the most similar one."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(choices)}{nearest(value, choices)}")


def nearest(value: Any, choices: Sequence[str]) -> str:
    """Return "; did you mean ...?" with the most similar choice, or "" if none is similar."""
    matches = get_close_matches(str(value), list(choices), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
