"""The protocol of a PDE, the loop over its steps, and checks of its coefficients and step size."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from attractor.attention.pdes.line import Neighbourhood
from attractor.common.checks import check_beside, check_number, check_tensor, is_number

AXES = ("key", "query", "both")


class PDE(Protocol):
    """``du/dt = P(u)`` along the keys, the queries, or both."""

    @property
    def linear(self) -> bool:
        """Whether a step is a matrix applied to the map, so that the values can be stepped instead.

        Such a matrix must be a polynomial in one sum of `laplacian` and `gradient`, so that `evolve`
        over ``line.adjoint`` is its transpose.
        """
        ...

    @property
    def reach(self) -> int:
        """Number of neighbours on either side that a step uses: 1 for a `laplacian`, 2 for two."""
        ...

    def max_dt(self, axis: str = "key") -> float:
        """Return the largest stable step size."""
        ...

    def check(self, dt: float, axis: str = "key") -> None:
        """Raise a ValueError if a step of that size is unstable."""
        ...

    def step(
        self, u: Tensor, velocity: Tensor | None, line: Neighbourhood, dt: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return u and its velocity after one step; first-order PDEs return the velocity unchanged."""
        ...


def as_equation(pde: Any) -> Any:
    """Return an equation, or the default one with this name; raise for anything else."""
    if isinstance(pde, str):
        from attractor.attention.pdes import get_pde

        return get_pde(pde)()
    if isinstance(pde, type) or not hasattr(pde, "step"):
        hint = "call it: it returns one" if isinstance(pde, torch.nn.Module) else "pass one"
        raise ValueError(f"pde {pde!r} is not an equation; {hint} such as pdes.Diffusion(alpha=0.1)")
    return pde


def evolve(pde: PDE, u: Tensor, line: Neighbourhood, steps: int, dt: float) -> Tensor:
    """Return the map u after a number of steps from rest.

    A PDE may have a method ``start(u, time)``, which changes the map entry by entry before the first
    step; `time` is the pseudo-time of all steps.
    """
    if steps and hasattr(pde, "start"):
        u = pde.start(u, steps * dt)
    return take_steps(pde, u, line, steps, dt)


def take_steps(pde: PDE, u: Tensor, line: Neighbourhood, steps: int, dt: float) -> Tensor:
    """Return a map or values after a number of steps, without the PDE's ``start``."""
    check_tensor("u", u, "[..., positions]")
    pde = as_equation(pde)
    if not hasattr(line, "laplacian"):
        raise TypeError(f"line is a {type(line).__name__}; pass a Line or a Plane")
    velocity = None
    for _ in range(steps):
        u, velocity = pde.step(u, velocity, line, dt)
    return u


def plus(u: Tensor, factor: float | Tensor, change: Tensor) -> Tensor:
    """Return ``u + factor * change``, computed in one pass over memory."""
    if not torch.compiler.is_compiling():
        check_factor(u, factor, change)
    if isinstance(factor, Tensor):
        return torch.addcmul(u, factor.to(u.device, u.dtype), change)
    return torch.add(u, change, alpha=float(factor))


def check_factor(u: Tensor, factor: float | Tensor, change: Tensor) -> None:
    """Raise unless ``u + factor * change`` can be computed; u may broadcast along heads."""
    check_tensor("u", u, "[..., positions]")
    check_beside("velocity", change, "u", u)
    for name, shape in (("a velocity", change.shape), ("coefficients", getattr(factor, "shape", ()))):
        sizes = zip(reversed(shape), reversed(u.shape))
        if any(size != own and 1 not in (size, own) for size, own in sizes):
            raise ValueError(
                f"{name} {list(shape)} and u {list(u.shape)} do not broadcast; coefficients must be "
                "[heads, 1, 1], and a velocity must have the shape of u"
            )
    if not isinstance(factor, Tensor) and not abs(factor) <= torch.finfo(u.dtype).max:
        raise ValueError(
            f"dt times a coefficient is {factor:g}, which overflows {u.dtype}; take smaller steps"
        )


def dimensions(axis: str) -> int:
    """Return the number of dimensions of an axis: 2 for "both"."""
    if axis not in AXES:
        raise ValueError(f"axis {axis!r} is not one of {', '.join(AXES)}")
    return 2 if axis == "both" else 1


def each_head(*coefficients: float | Tensor) -> list[tuple[float, ...]]:
    """Return the values of the coefficients, one tuple per head."""
    if not any(isinstance(c, Tensor) for c in coefficients):
        return [tuple(float(c) for c in coefficients)]
    tensors = [torch.as_tensor(c).detach().cpu().double() for c in coefficients]
    return list(zip(*(t.flatten().tolist() for t in torch.broadcast_tensors(*tensors))))


def over(a: float, b: float) -> float:
    """Return a / b for b > 0, and infinity for b = 0, where any step size is stable."""
    return a / b if b > 0 else math.inf


def check_dt(pde: Any, dt: float, axis: str, formula: str) -> None:
    """Raise if dt is above the limit. Coefficients that are tensors are not checked."""
    if any(isinstance(getattr(pde, field.name), Tensor) for field in fields(pde)):
        return
    check_number("dt", dt)
    limit = pde.max_dt(axis)
    if dt <= limit * (1 + 1e-12):
        return
    if limit > 0 and math.isfinite(dt / limit):
        factor = math.ceil(dt / limit * (1 - 1e-12))
        remedy = f"take {factor} times as many steps with dt={dt / factor:g}, or smaller coefficients"
    else:
        remedy = "choose other coefficients"
    raise ValueError(
        f"dt = {dt:g} is unstable for {pde} (limit {limit:g}, {formula}, axis {axis!r}); {remedy}"
    )


def check_step_size(dt: Any) -> None:
    """Raise unless dt is a finite positive number."""
    check_number("dt", dt)
    if not dt > 0:
        raise ValueError(f"dt = {dt} must be more than 0")


def check_coefficient(pde: Any, name: str, signed: bool = False) -> None:
    """Raise if a coefficient is neither a tensor nor an allowed number."""
    value = getattr(pde, name)
    if isinstance(value, Tensor):
        return
    if not is_number(value) or not math.isfinite(value) or (value < 0 and not signed):
        kind = "a finite number" if signed else "a finite number of at least 0"
        raise ValueError(f"{name} = {value!r} of {type(pde).__name__} must be {kind}")


def check_heads(pde: Any, shape: Sequence[int]) -> None:
    """Raise unless all tensors in pde broadcast to maps of this shape, ``[*batch, heads]``."""
    for field in fields(pde) if is_dataclass(pde) else ():
        coefficient = getattr(pde, field.name)
        if not isinstance(coefficient, Tensor):
            continue
        sizes = zip_longest(reversed(coefficient.shape), (1, 1, *reversed(shape)), fillvalue=1)
        if any(size not in (1, own) for size, own in sizes):
            heads = shape[-1] if shape else 1
            raise ValueError(
                f"{field.name} {list(coefficient.shape)} of {type(pde).__name__} does not suit {heads} "
                f"heads; pass a number, or a tensor [{heads}, 1, 1]"
            )


def with_coefficients(pde: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the equation with a function applied to each coefficient that is a tensor."""
    others = {}
    for field in fields(pde) if is_dataclass(pde) else ():
        coefficient = getattr(pde, field.name)
        other = change(coefficient) if isinstance(coefficient, Tensor) else coefficient
        if other is not coefficient:
            others[field.name] = other
    return replace(pde, **others) if others else pde


def for_heads(pde: Any, shape: Sequence[int]) -> Any:
    """Return the equation for maps ``[*batch, heads]`` that are flattened to four dimensions."""
    most = max(len(shape), 2) + 2

    def reshape(x: Tensor) -> Tensor:
        x = x.reshape(x.shape[-most:]) if x.ndim > most else x
        if len(shape) > 2 and x.ndim > 3:
            x = x.expand(*shape[:-1], *x.shape[-3:]).flatten(0, -4)
        return x

    return with_coefficients(pde, reshape)


def same(pde: Any, other: Any) -> bool:
    """Return whether two PDEs are equal: equal numbers, and identical tensors."""
    if type(pde) is not type(other):
        return False
    pairs = [(getattr(pde, field.name), getattr(other, field.name)) for field in fields(pde)]
    return all(
        a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b) for a, b in pairs
    )
