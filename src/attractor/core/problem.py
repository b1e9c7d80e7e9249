"""Checks of the initial states, times and parameters of a problem."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attractor.common.checks import check_values
from attractor.core.rates import broadcasts
from attractor.core.transforms import is_vmapped


def check_problem(u0: Tensor, t: Tensor | Sequence[float], per_trajectory: bool = False) -> Tensor:
    """Return the times as a tensor beside u0, after checking both.

    Args:
        per_trajectory: Whether t may be ``[n+1, *batch]``.
    """
    check_initial(u0)
    if not isinstance(t, Tensor):
        try:
            t = torch.as_tensor(t, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"t is {t!r}; pass a 1-D tensor of times, or a list of numbers") from None
    check_values("t", t)
    t = t.to(u0.device)
    if t.is_complex():
        raise TypeError(f"t has dtype {t.dtype}; times must be real")
    if not t.is_floating_point():
        t = t.to(torch.float64)
    own_times = per_trajectory and t.dim() > 1 and t.shape[1:] == u0.shape[:-1]
    if (t.dim() != 1 and not own_times) or len(t) == 0:
        also = f", or [n+1, *{list(u0.shape[:-1])}]" if per_trajectory else ""
        raise ValueError(f"t has shape {list(t.shape)}; pass a 1-D tensor of times{also}")
    if is_vmapped(t) and not per_trajectory:
        return t  # its values are hidden
    steps = t.detach().diff(dim=0)
    if not (bool((steps > 0).all()) or bool((steps < 0).all())):
        raise ValueError("t must be finite and strictly increasing or strictly decreasing")
    if not bool(torch.isfinite(t.detach()).all()):
        raise ValueError("t contains non-finite times")
    return t


def check_initial(u0: Tensor) -> None:
    """Raise unless u0 is a tensor of states."""
    if not isinstance(u0, Tensor):
        raise TypeError(
            f"u0 is a {type(u0).__name__}; pass a tensor [*batch, d], for example torch.as_tensor(u0)"
        )
    if not (u0.is_floating_point() or u0.is_complex()):
        raise TypeError(
            f"u0 has dtype {u0.dtype}; states must be floating or complex: use u0.float() or u0.double()"
        )
    if u0.dim() == 0:
        raise ValueError("u0 has no dimension; a state needs one, even of size 1: use u0[None]")
    check_values("u0", u0)


def check_parameters(u0: Tensor, parameters: Tensor | None) -> Tensor | None:
    """Return the parameters of each trajectory ``[*batch, k]``, of the type of u0 and on its device."""
    if parameters is None:
        return None
    if not isinstance(parameters, Tensor):
        raise TypeError(
            f"parameters is a {type(parameters).__name__}; pass a tensor [*batch, k], or [k] for all"
        )
    if not parameters.is_floating_point() and not parameters.is_complex():
        raise TypeError(
            f"parameters has dtype {parameters.dtype}; pass floating numbers, such as parameters.to(u0)"
        )
    check_values("parameters", parameters)
    batch = u0.shape[:-1]
    if parameters.dim() == 0 or not broadcasts(parameters[..., 0], batch):
        raise ValueError(
            f"parameters {list(parameters.shape)} do not fit u0 {list(u0.shape)}; pass one row per "
            f"trajectory, {[*batch, 'k']}, or one for all, ['k']"
        )
    return parameters.to(u0).expand(*batch, parameters.shape[-1])
