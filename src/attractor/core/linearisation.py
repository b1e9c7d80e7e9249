"""Derivatives of a rate, and the linear systems of linearly implicit steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attractor.core.rates import Linearised, Rate, call_rate
from attractor.core.transforms import under_vmap


def linearised(name: str, f: Rate, t: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Jacobian ``[*batch, d, d]`` of a rate and its derivative in time ``[*batch, d]``.

    Requires: trajectories do not depend on each other. The gradient of one component of the rate is then
    computed for all trajectories by one backward pass, and the passes of all components are one call.

    Args:
        name: Name of the scheme, for messages.
        f: The rate. The Jacobian of a `Linearised` rate is called in place of automatic differentiation.
        t: A number, or a tensor ``[]`` or ``[*batch, 1]``.

    Raises:
        ValueError: The rate cannot be differentiated, or the user's Jacobian has a wrong shape or type.
    """
    t = t if isinstance(t, Tensor) else u.new_tensor(t)
    rate = lambda t, u: call_rate(f, t, u)
    if not isinstance(f, Linearised):
        with _explained(name, "the Jacobian of the rate"):
            return _differentiated(rate, t, u)
    jacobian, in_time = _split(f.jacobian(t, u))
    _check(jacobian, u, (*u.shape, u.shape[-1]), "jacobian")
    if in_time is None:
        with _explained(name, "the derivative of the rate in time"):
            return jacobian, _in_time(rate, t, u)
    _check(in_time, u, u.shape, "the derivative in time of jacobian")
    return jacobian, in_time


def linear_solver(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function that solves ``(I + matrix) x = y`` for y ``[*batch, d]``.

    The solution is NaN where the matrix ``[*batch, d, d]`` is not finite, and not finite where it is
    singular. Types of fewer than 32 bits are solved in float32.
    """
    dtype = matrix.dtype
    if dtype.itemsize < 4:
        matrix = matrix.float()
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    finite = torch.isfinite(matrix.detach()).all(-1, keepdim=True).all(-2, keepdim=True)
    whole = identity + torch.where(finite, matrix, 0.0)
    # The derivatives of torch.linalg.lu_solve and solve are wrong under vmap (torch 2.13).
    if under_vmap():
        inverse, singular = torch.linalg.inv_ex(whole)
        inverse = torch.where((singular != 0)[..., None, None], torch.nan, inverse)
        solution = lambda y: inverse @ y
    else:
        factors, pivots, _ = torch.linalg.lu_factor_ex(whole)
        solution = lambda y: torch.linalg.lu_solve(factors, pivots, y)

    def solve(y: Tensor) -> Tensor:
        x = solution(y[..., None].to(whole.dtype))
        return torch.where(finite, x, torch.nan)[..., 0].to(dtype)

    return solve


def _differentiated(f: Rate, t: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    try:
        return _in_reverse_mode(f, t, u)
    except RuntimeError:  # with the hooks of a checkpoint, for example
        columns = _in_forward_mode(f, t, u)
        return columns[:-1].movedim(0, -1), columns[-1]


def _in_reverse_mode(f: Rate, t: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    d = u.shape[-1]
    rows = torch.eye(d, dtype=u.dtype, device=u.device).view(d, *[1] * (u.dim() - 1), d)
    rows = rows.expand(d, *u.shape)
    pull = torch.func.vjp(f, t, u)[1]
    in_time, in_state = torch.func.vmap(pull)(rows)
    if t.shape == (*u.shape[:-1], 1):
        return in_state.movedim(0, -2), in_time[..., 0].movedim(0, -1)
    return in_state.movedim(0, -2), _transposed(lambda v: pull(v)[0], u)


def _in_forward_mode(f: Rate, t: Tensor, u: Tensor) -> Tensor:
    """Return the derivatives ``[d + 1, *batch, d]`` in the directions of the components, and in time.

    With torch 2.13 this takes several times longer than in reverse mode.
    """
    d, t, u = u.shape[-1], t.contiguous(), u.contiguous()  # torch writes tangents beside both
    along_u = torch.eye(d + 1, d, dtype=u.dtype, device=u.device)
    along_t = torch.eye(d + 1, dtype=t.dtype, device=t.device)[d]

    def derivative(du: Tensor, dt: Tensor) -> Tensor:
        tangents = dt.expand(t.shape).clone(), du.expand(u.shape).clone()
        return torch.func.jvp(f, (t, u), tangents)[1]

    return torch.func.vmap(derivative)(along_u, along_t)


def _in_time(f: Rate, t: Tensor, u: Tensor) -> Tensor:
    """Return df/dt ``[*batch, d]``."""
    try:
        pull = torch.func.vjp(lambda t: f(t, u), t)[1]
        return _transposed(lambda v: pull(v)[0], u)
    except RuntimeError:
        t = t.contiguous()
        return torch.func.jvp(lambda t: f(t, u), (t,), (torch.ones_like(t),))[1]


def _transposed(in_time_of_sum: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    """Return df/dt, the gradient in v of the derivative in time of the sum of ``v f``, linear in v."""
    derivative, pull = torch.func.vjp(in_time_of_sum, torch.zeros_like(u))[:2]
    return pull(torch.ones_like(derivative))[0]


@contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{name} needs {what}, and torch.func failed: {error}. Write the rate with "
            "differentiable torch operations, or pass evolve(..., jacobian=) a function of the rate's "
            "arguments that returns the pair (df/du [*batch, d, d], df/dt [*batch, d])"
        ) from error


def _split(value: Any) -> tuple[Any, Any]:
    """Return a Jacobian and the derivative in time, or None where the user returns the first only."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    return value, None


def _check(value: Any, u: Tensor, shape: tuple[int, ...], what: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} returned a {type(value).__name__}; return a tensor {list(shape)}")
    if tuple(value.shape) != tuple(shape) or value.dtype != u.dtype:
        raise ValueError(
            f"{what} returned {list(value.shape)} in {value.dtype} for states {list(u.shape)} in "
            f"{u.dtype}; return {list(shape)} in {u.dtype}, with J[..., i, j] = df_i/du_j"
        )
