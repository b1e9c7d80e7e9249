"""Call a rate with a time per trajectory, as error control requires."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from attractor.core.rates import Linearised, Rate, call_rate
from attractor.core.rounds import as_time
from attractor.core.step import with_parameters

# Messages of torch on tensors of several numbers in place of one.
_ONE_NUMBER = re.compile("one element tensors|converted to Scalar|more than one value is ambiguous")


class OneTimeError(ValueError):
    """A rate does not accept a time per trajectory."""


@dataclass(frozen=True)
class _OfComponents:
    """A rate that computes with the components of u ``[*batch]``, and so with times ``[*batch]``."""

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
    """Return the rate for times ``[*batch, 1]``, its value at the start, and the number of calls.

    ``u * t`` requires times ``[*batch, 1]``, and ``x * t`` with ``x, y = u.unbind(-1)`` requires
    ``[*batch]``. With the wrong shape the rate fails or returns a wrong shape, so that one call decides
    between the two. Another call checks that a trajectory does not depend on the times of others.

    Raises:
        OneTimeError: The rate does not accept a time per trajectory.
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
                f"the rate treats t as one number ({error}), but under error control every trajectory "
                f"has its own time, and t has shape {list(start.shape)}. Use tensor operations such as "
                "torch.cos(t) or torch.where(t < 1, ...), or solve without rtol and atol, where t is "
                "one number"
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
            "time, and t has shape [*batch, 1]: multiply states or rates by t, not a matrix"
        )
    return f, k, 2
