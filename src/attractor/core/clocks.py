"""Whether a rate accepts a time per trajectory, as it needs to under error control."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from attractor.core.rates import Linearised, Rate, call_rate
from attractor.core.rounds import as_time
from attractor.core.step import with_parameters

# How torch says that a tensor of several numbers is not one.
_ONE_NUMBER = re.compile("one element tensors|converted to Scalar|more than one value is ambiguous")


class OneTimeError(ValueError):
    """A rate does not accept a time per trajectory."""


@dataclass(frozen=True)
class _OfComponents:
    """A rate that works on the components of u, and so wants times [*batch] to go with them."""

    f: Rate

    def __call__(self, t: Tensor, u: Tensor, *parameters: Tensor) -> Tensor:
        return self.f(t[..., 0], u, *parameters)


def _of_components(f: Rate) -> Rate:
    """Return the rate, with its Jacobian, for times ``[*batch, 1]``."""
    if isinstance(f, Linearised):
        return Linearised(_OfComponents(f.f), _OfComponents(f.jacobian))
    return _OfComponents(f)


def fitted_to_time(
    f: Rate, t: Tensor, u0: Tensor, parameters: Tensor | None
) -> tuple[Rate, Tensor, int]:
    """Return the rate for times ``[*batch, 1]``, its value at the start, and the calls that were made.

    ``u * t`` needs times [*batch, 1], ``x * t`` with ``x, y = u.unbind(-1)`` needs [*batch]. The
    wrong one gives the wrong shape, so one call tells which a rate wants; another one tells whether
    a trajectory sees its neighbours' times.
    """
    start = as_time(t[:1] if t.dim() == 1 else t[0][..., None], u0).expand(*u0.shape[:-1], 1)
    try:
        k = call_rate(with_parameters(f, parameters), start, u0)
    except (RuntimeError, ValueError) as error:
        try:
            f = _of_components(f)
            k = call_rate(with_parameters(f, parameters), start, u0)
        except (RuntimeError, ValueError):
            if not _ONE_NUMBER.search(str(error)):
                raise error from None
            raise OneTimeError(
                f"the rate takes t for one number ({error}), but under error control every trajectory "
                f"has its own time: t is {list(start.shape)}. Use torch.cos(t), torch.where(t < 1, ...) "
                "and the like; or a grid of times, without rtol and atol, where t is one number"
            ) from None
    if start.numel() == 1 or len(t) == 1:
        return f, k, 1
    later = start.detach().clone().reshape(-1, 1)
    later[1:] += 0.4 * as_time(t[-1] - t[0], u0).detach().abs().max()
    alone = k.detach().reshape(-1, u0.shape[-1])[0]
    rate = with_parameters(f, parameters)
    beside = call_rate(rate, later.reshape(start.shape), u0).detach().reshape(-1, u0.shape[-1])[0]
    rounding = 1e3 * torch.finfo(start.dtype).eps
    if bool(((beside - alone).abs() > rounding * alone.abs().max()).any()):
        raise OneTimeError(
            "the rate mixes the times of different trajectories; under error control each has its own "
            "time, and t has shape [*batch, 1]: let t multiply states or rates, not a matrix"
        )
    return f, k, 2
