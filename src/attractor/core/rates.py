"""Calls of a rate, and the sums of its values that steps consist of."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attractor.common.checks import check_tensor, is_number

Rate: TypeAlias = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Linearised:
    """A rate with its Jacobian; implicit schemes call the latter in place of automatic differentiation.

    Attributes:
        f: The rate.
        jacobian: A function of the arguments of f. It returns df/du ``[*batch, d, d]``, or the pair of
            df/du and df/dt ``[*batch, d]``.
    """

    f: Callable[..., Tensor]
    jacobian: Callable[..., Any]

    def __call__(self, t: Any, u: Tensor, *parameters: Tensor) -> Tensor:
        """Return the rate."""
        return self.f(t, u, *parameters)


def masked(f: Callable[..., Tensor], where: Tensor) -> Callable[..., Tensor]:
    """Return the rate f, with its Jacobian, where a mask ``[*batch, 1]`` is true, and 0 elsewhere."""
    own = f.f if isinstance(f, Linearised) else f
    rate = lambda t, u, *p: torch.where(where, own(t, u, *p), 0.0)
    if not isinstance(f, Linearised):
        return rate
    jacobian_of = f.jacobian

    def jacobian(t: Any, u: Tensor, *p: Tensor) -> Any:
        value = jacobian_of(t, u, *p)
        pair = isinstance(value, tuple | list)
        matrix, *in_time = value if pair else (value,)
        matrix = torch.where(where[..., None], matrix, 0.0)
        return (matrix, *(torch.where(where, x, 0.0) for x in in_time)) if pair else matrix

    return Linearised(rate, jacobian)


_OTHER_TYPE = re.compile("same dtype|scalar type|Input type")  # messages of torch on unequal dtypes


def check_state(u: Any, t: Any = 0.0, dt: Any = 0.0) -> None:
    """Raise unless u is a floating or complex tensor, and t and dt broadcast against it."""
    check_tensor("u", u, "[*batch, d]", floating=False)
    if not (u.is_floating_point() or u.is_complex()):
        raise TypeError(
            f"u has dtype {u.dtype}; states must be floating or complex: use u.float() or u.double()"
        )
    for name, x in (("t", t), ("dt", dt)):
        if not isinstance(x, Tensor):
            if not is_number(x):
                raise TypeError(f"{name} is a {type(x).__name__}; pass a number or a tensor")
        elif x.is_complex() and not u.is_complex():
            raise TypeError(
                f"{name} has dtype {x.dtype} and u has {u.dtype}; times and steps must be real"
            )
        elif x.device != u.device and (x.dim() or x.device.type != "cpu"):
            raise ValueError(
                f"{name} is on {x.device} and u is on {u.device}; move one of them with .to(...)"
            )
        elif not broadcasts(x, u.shape) and (name == "dt" or not broadcasts(x, u.shape[:-1])):
            raise ValueError(f"{name} {list(x.shape)} does not broadcast against u {list(u.shape)}")


def broadcasts(x: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a product of x with a tensor of that shape has that shape."""
    sizes = zip(reversed(x.shape), reversed(shape))
    return x.dim() <= len(shape) and all(size in (1, own) for size, own in sizes)


def weighted_sum(weights: Sequence[float], terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of ``w * x`` without zero weights; in one buffer where no graph is recorded."""
    (w, x), *rest = [(w, x) for w, x in zip(weights, terms) if w != 0] or [(0.0, terms[0])]
    total = x if w == 1 and not rest else w * x
    for w, x in rest:
        total = total.add(x, alpha=w) if torch.is_grad_enabled() else total.add_(x, alpha=w)
    return total


def add_increment(u: Tensor, dt: Any, weights: Sequence[float], terms: Sequence[Tensor]) -> Tensor:
    """Return ``u + dt * weighted_sum(weights, terms)``, in fewer operations where dt is a number."""
    if not isinstance(dt, float):
        return u + dt * weighted_sum(weights, terms)
    for w, x in zip(weights, terms):
        if w != 0:
            u = u.add(x, alpha=w * dt)
    return u


def call_rate(f: Rate, t: Any, u: Tensor) -> Tensor:
    """Return ``f(t, u)``.

    Raises:
        TypeError: The rate did not return a tensor.
        ValueError: The result differs from u in shape or dtype, or the rate does not accept this dtype.
    """
    try:
        du = f(t, u)
    except RuntimeError as error:
        if not _OTHER_TYPE.search(str(error)):
            raise
        raise ValueError(
            f"the rate failed for a state in {u.dtype}: {error}. If its weights or constants have "
            "another dtype, convert them, for example by network.double(), or pass states in their dtype"
        ) from error
    if not isinstance(du, Tensor):
        raise TypeError(f"the rate returned a {type(du).__name__}; it must return a tensor like u")
    if du.shape != u.shape:
        raise ValueError(
            f"the rate returned shape {list(du.shape)} for a state of shape {list(u.shape)}; "
            "they must be equal (the last dimension is that of the state, the others are the batch)"
        )
    if du.dtype != u.dtype:
        raise ValueError(
            f"the rate returned {du.dtype} for a state in {u.dtype}; cast its constants to the "
            "state, for example with .to(u)"
        )
    return du


def check_same_rate(rate: Rate, expected: Rate, t: Any, u: Tensor, message: str) -> None:
    """Raise if two rates differ at states u ``[*batch, d]``; non-finite values are not compared.

    Args:
        message: Description of the rates, to which the difference and the remedy are added.

    Raises:
        ValueError: They differ by more than rounding.
    """
    if rate is expected or not u.numel():
        return
    with torch.no_grad():
        ours, theirs = (call_rate(f, t, u.detach()) for f in (rate, expected))
    difference, size = (x.abs().nan_to_num(0.0, 0.0).max().item() for x in (ours - theirs, theirs))
    if difference > max(1e-6, math.sqrt(torch.finfo(u.dtype).eps)) * size + 1e-12:
        raise ValueError(
            f"{message}: at t = {float(t):g} they differ by {difference:.2g}, where its size is "
            f"{size:.2g}. A correction belongs to one equation; fit a solver to this one, or use a "
            "plain scheme"
        )


def version(u: Tensor) -> int:
    """Return how often u was modified in place; 0 where torch does not count."""
    return 0 if u.is_inference() else u._version


def check_not_modified(u: Tensor, before: int) -> None:
    """Raise if a rate has modified its argument u in place."""
    if version(u) != before:
        raise ValueError(
            "the rate modifies its argument u in place, and so has changed u0, from which later stages "
            "start; return a new tensor: -u instead of u.neg_(), or use u = u.clone() first"
        )


def _owner(x: Tensor) -> Tensor:
    """Return the tensor that x is a view of, or x."""
    return x if x._base is None else x._base


def check_distinct(f: Rate, t: Any, u: Tensor, stages: Sequence[Tensor]) -> None:
    """Raise if the last two stages are one tensor, which every call of the rate overwrites."""
    du = stages[-1]
    if torch.compiler.is_compiling() or _owner(du) is not _owner(stages[-2]):
        return
    before = version(du)
    f(t, u)
    if version(du) != before:
        raise ValueError(
            "the rate returns the same tensor in every call and overwrites it, so that all rates of a "
            "step are the last one; return a new tensor, or a .clone() of the buffer"
        )
