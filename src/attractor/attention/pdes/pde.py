"""What every PDE offers, the loop that steps it, and the check of its step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from attractor.attention.pdes.line import Neighbourhood
from attractor.core.checks import check_beside, check_number, check_tensor, is_number

AXES = ("key", "query", "both")


class PDE(Protocol):
    """``du/dt = P(u)`` along the keys, the queries, or both."""

    @property
    def linear(self) -> bool:
        """Whether a step is a matrix applied to the map: then the values can be stepped instead.

        Such a matrix must be a polynomial in one sum of `laplacian` and `gradient`, so that `evolve`
        over ``line.adjoint`` is its transpose.
        """
        ...

    @property
    def reach(self) -> int:
        """How many neighbours away a step looks: 1 for a `laplacian`, 2 for the laplacian of one."""
        ...

    def max_dt(self, axis: str = "key") -> float:
        """The largest stable step."""
        ...

    def check(self, dt: float, axis: str = "key") -> None:
        """Raises a ValueError if a step of that size is unstable."""
        ...

    def step(
        self, u: Tensor, velocity: Tensor | None, line: Neighbourhood, dt: float
    ) -> tuple[Tensor, Tensor | None]:
        """u and its velocity after one step; PDEs of first order in time pass the velocity on."""
        ...


def evolve(pde: PDE, u: Tensor, line: Neighbourhood, steps: int, dt: float) -> Tensor:
    """The map u after that many steps, starting at rest.

    A PDE may have a method ``start(u, time)``, which changes the map entry by entry before the first
    step; time is the whole pseudo-time to come.
    """
    if steps and hasattr(pde, "start"):
        u = pde.start(u, steps * dt)
    return take_steps(pde, u, line, steps, dt)


def take_steps(pde: PDE, u: Tensor, line: Neighbourhood, steps: int, dt: float) -> Tensor:
    """The map, or the values, after that many steps, without what comes before the first."""
    check_tensor("u", u, "[..., positions]")
    if isinstance(pde, type) or not hasattr(pde, "step"):
        raise ValueError(f"pde {pde!r} is not an equation; give one such as pdes.Diffusion(alpha=0.1)")
    if not hasattr(line, "laplacian"):
        raise TypeError(f"line is a {type(line).__name__}; give a Line or a Plane")
    velocity = None
    for _ in range(steps):
        u, velocity = pde.step(u, velocity, line, dt)
    return u


def plus(u: Tensor, factor: float | Tensor, change: Tensor) -> Tensor:
    """``u + factor * change``, in one pass over memory."""
    if not torch.compiler.is_compiling():
        check_factor(u, factor, change)
    if isinstance(factor, Tensor):
        return torch.addcmul(u, factor.to(u.device, u.dtype), change)
    return torch.add(u, change, alpha=float(factor))


def check_factor(u: Tensor, factor: float | Tensor, change: Tensor) -> None:
    """Raise unless ``u + factor * change`` can be computed; u may grow heads that the others have."""
    check_tensor("u", u, "[..., positions]")
    check_beside("velocity", change, "u", u)
    for name, shape in (("a velocity", change.shape), ("coefficients", getattr(factor, "shape", ()))):
        sizes = zip(reversed(shape), reversed(u.shape))
        if any(size != own and 1 not in (size, own) for size, own in sizes):
            raise ValueError(
                f"{name} {list(shape)} and u {list(u.shape)} do not go together; coefficients are "
                "[heads, 1, 1], a velocity is like u"
            )
    if not isinstance(factor, Tensor) and not abs(factor) <= torch.finfo(u.dtype).max:
        raise ValueError(
            f"dt times a coefficient is {factor:g}, more than {u.dtype} holds; take smaller steps"
        )


def dimensions(axis: str) -> int:
    """How many dimensions an axis has: both is two."""
    if axis not in AXES:
        raise ValueError(f"axis {axis!r} is not one of {', '.join(AXES)}")
    return 2 if axis == "both" else 1


def each_head(*coefficients: float | Tensor) -> list[tuple[float, ...]]:
    """The coefficients' numbers, head by head."""
    if not any(isinstance(c, Tensor) for c in coefficients):
        return [tuple(float(c) for c in coefficients)]
    tensors = [torch.as_tensor(c).detach().cpu().double() for c in coefficients]
    return list(zip(*(t.flatten().tolist() for t in torch.broadcast_tensors(*tensors))))


def over(a: float, b: float) -> float:
    """a / b for numbers that are not negative; nothing limits a step whose limit is a / 0."""
    return a / b if b > 0 else math.inf


def check_dt(pde: Any, dt: float, axis: str, formula: str) -> None:
    """Raises if dt is above the limit. Not for tensors: learnt ones are stable by construction."""
    if any(isinstance(getattr(pde, field.name), Tensor) for field in fields(pde)):
        return
    check_number("dt", dt)
    limit = pde.max_dt(axis)
    if dt <= limit * (1 + 1e-12):
        return
    if limit > 0 and math.isfinite(dt / limit):
        more = math.ceil(dt / limit * (1 - 1e-12))
        cure = f"take {more} times as many steps with dt={dt / more:g}, or smaller coefficients"
    else:
        cure = "choose other coefficients"
    raise ValueError(
        f"dt = {dt:g} is unstable for {pde} (limit {limit:g}, {formula}, axis {axis!r}); {cure}"
    )


def check_step_size(dt: Any) -> None:
    """Raise unless dt is a finite number above 0."""
    check_number("dt", dt)
    if not dt > 0:
        raise ValueError(f"dt = {dt} must be more than 0")


def check_coefficient(pde: Any, name: str, signed: bool = False) -> None:
    """Raises if a coefficient given as a number is not one."""
    value = getattr(pde, name)
    if isinstance(value, Tensor):
        return
    if not is_number(value) or not math.isfinite(value) or (value < 0 and not signed):
        kind = "a finite number" if signed else "a finite number of at least 0"
        raise ValueError(f"{name} = {value!r} of {type(pde).__name__} must be {kind}")


def check_heads(pde: Any, shape: Sequence[int]) -> None:
    """Raise unless coefficients that are tensors suit maps ``[*batch, heads, queries, keys]``.

    Args:
        pde: the equation.
        shape: ``[*batch, heads]`` of the maps.
    """
    for field in fields(pde) if is_dataclass(pde) else ():
        given = getattr(pde, field.name)
        if not isinstance(given, Tensor):
            continue
        sizes = zip_longest(reversed(given.shape), (1, 1, *reversed(shape)), fillvalue=1)
        if any(size not in (1, own) for size, own in sizes):
            heads = shape[-1] if shape else 1
            raise ValueError(
                f"{field.name} {list(given.shape)} of {type(pde).__name__} does not suit {heads} heads; "
                f"give a number, or a tensor [{heads}, 1, 1]"
            )


def with_coefficients(pde: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The equation with each of its coefficients that is a tensor changed; as it is if none is."""
    changed = {}
    for field in fields(pde) if is_dataclass(pde) else ():
        given = getattr(pde, field.name)
        other = change(given) if isinstance(given, Tensor) else given
        if other is not given:
            changed[field.name] = other
    return replace(pde, **changed) if changed else pde


def for_maps(pde: Any, shape: Sequence[int]) -> Any:
    """The equation with coefficients of no more dimensions than maps have.

    Args:
        pde: the equation; its coefficients suit `shape`, as `check_heads` says.
        shape: ``[*batch, heads]`` of the maps.
    """
    most = len(shape) + 2
    return with_coefficients(pde, lambda x: x.reshape(x.shape[-most:]) if x.ndim > most else x)


def for_heads(pde: Any, shape: Sequence[int]) -> Any:
    """The equation for maps ``[batch, heads, queries, keys]``, to which engines flatten all others.

    Args:
        pde, shape: as in `for_maps`, of the maps before they are flattened.
    """

    def flat(x: Tensor) -> Tensor:
        return x.expand(*shape[:-1], *x.shape[-3:]).flatten(0, -4) if x.ndim > 3 else x

    pde = for_maps(pde, shape if len(shape) > 2 else (1, 1))
    return with_coefficients(pde, flat) if len(shape) > 2 else pde


def same(pde: Any, other: Any) -> bool:
    """Equality of PDEs: equal numbers, and the very same tensors."""
    if type(pde) is not type(other):
        return False
    pairs = [(getattr(pde, field.name), getattr(other, field.name)) for field in fields(pde)]
    return all(
        a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b) for a, b in pairs
    )
