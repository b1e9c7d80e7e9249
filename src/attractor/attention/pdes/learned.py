"""Coefficients that learn and cannot become unstable."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attractor.attention.pdes.pde import PDE, as_equation
from attractor.core.checks import check_whole, is_number

MARGIN = 1e-6  # of an interval: rounding must not carry a coefficient over its end
HALVES = (torch.float16, torch.bfloat16)


class LearnedPDE(nn.Module):
    """A PDE whose coefficients are parameters; calling it returns the PDE with their current values.

    Each coefficient is a logistic function of its parameter, onto the interval where the PDE is stable
    for steps of size dt. So no optimiser can make training blow up, coefficients near zero move in
    proportion to their size, and every gradient at the start is of the size of what it can change.
    AdvectionDiffusion keeps to the smaller interval, ``|beta| <= 2 alpha``, where maps stay
    non-negative: there its steps average, and are stable with walls anywhere.

    Parameters stay in float32 in a half-precision model, and so do the coefficients. They are vectors
    (``alpha_logit [heads]``). Weight decay would pull them toward 0, the middle of the interval, even
    without a gradient: `no_weight_decay` says so, and `attractor.train.parameter_groups` returns
    optimiser groups that leave them alone, as do all optimisers that this library makes.

    Args:
        pde: The initial equation, whose coefficients are numbers or tensors with one number per head, or
            a name such as ``"diffusion"`` for an equation with its default numbers.
        heads: Number of heads with a coefficient each. None: one coefficient for all heads.
        dt: Step size for which the equation must be stable.
        axis: Axis along which steps are taken.

    A PDE of one's own can be learnt if it is a frozen dataclass and has a method ``interval(name, dt,
    axis)`` that returns the lowest and the highest stable value of that field; it may use the fields
    before it.

    >>> learned = LearnedPDE("advection_diffusion", heads=8)
    >>> pde = learned()
    >>> pde.alpha.shape, round(pde.alpha.mean().item(), 4), round(pde.beta.mean().item(), 4)
    (torch.Size([8, 1, 1]), 0.1, 0.03)
    """

    no_weight_decay = True

    def __init__(
        self, pde: str | PDE, heads: int | None = None, dt: float = 1.0, axis: str = "key"
    ) -> None:
        super().__init__()
        equation = as_equation(pde)
        if not is_number(dt) or not 0 < dt < float("inf"):
            raise ValueError(f"dt = {dt} must be more than 0: without a step there is nothing to learn")
        if heads is not None:
            check_whole("heads", heads, 1)
        self.kind: Any = type(equation)
        self.dt, self.axis = float(dt), axis
        names = _coefficients(equation)
        self.options = {
            f.name: getattr(equation, f.name) for f in fields(equation) if f.name not in names
        }
        self.signed: dict[str, bool] = {}
        self.start: dict[str, list[float]] = {}
        values = {**self.options, **dict.fromkeys(names, torch.tensor(torch.nan, device="cpu"))}
        for name in names:
            value = _each(equation, name, heads)
            low, high = self.kind(**values).interval(name, self.dt, axis)
            self.signed[name] = bool(torch.as_tensor(low, device="cpu").any())
            place = (value - low) / (high - low)
            margin = MARGIN if self.signed[name] else 0.0
            place = (place - margin) / (1 - MARGIN - margin)
            if not ((place > 0) & (place < 1)).all():
                raise ValueError(
                    f"{name} = {_text(value)} of {self.kind.__name__} must lie between {_text(low)} "
                    f"and {_text(high)}, ends excluded, to be learnt with dt = {dt:g} on axis {axis!r}; "
                    "start elsewhere, or take other steps"
                )
            values[name], self.start[name] = value, place.logit().flatten().tolist()
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
            self.register_parameter(f"{name}_logit", nn.Parameter(torch.empty(heads or 1, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the parameters to their initial values."""
        with torch.no_grad():
            for name, logits in self.start.items():
                parameter = getattr(self, f"{name}_logit")
                parameter.copy_(torch.tensor(logits, dtype=torch.float64, device="cpu"))

    def forward(self) -> Any:
        """Return the PDE, with coefficients ``[heads, 1, 1]`` or, if heads is None, ``[1, 1, 1]``."""
        logits = {name: getattr(self, f"{name}_logit")[:, None, None] for name in self.signed}
        values = {**self.options, **logits}
        for name, signed in self.signed.items():
            low, high = self.kind(**values).interval(name, self.dt, self.axis)
            logit = logits[name].float() if logits[name].dtype in HALVES else logits[name]
            if signed:  # as the one below, but exact where low and high cancel
                values[name] = (low + high) / 2 + (0.5 - MARGIN) * (high - low) * (logit / 2).tanh()
            else:  # all of the lower end is kept, for coefficients may be tiny
                values[name] = (1 - MARGIN) * high * logit.sigmoid()
        return self.kind(**values)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LearnedPDE":
        def keep(tensor: Tensor) -> Tensor:  # model.half() moves, but does not round
            result = fn(tensor)
            rounds = result.dtype in HALVES and tensor.dtype not in HALVES
            return tensor.to(result.device) if rounds else result

        return super()._apply(keep, recurse)

    def extra_repr(self) -> str:
        """Return the equation and its learnt coefficients, for ``repr``."""
        heads = len(getattr(self, f"{next(iter(self.signed))}_logit"))
        return f"{self.kind.__name__}, {', '.join(self.signed)}, heads={heads}, dt={self.dt:g}"


def _coefficients(pde: Any) -> list[str]:
    """Return the names of the fields that are numbers or tensors."""
    kind = type(pde).__name__
    values = {f.name: getattr(pde, f.name) for f in fields(pde) if f.init} if is_dataclass(pde) else {}
    numbers = (int, float, Tensor)
    names = [n for n, v in values.items() if isinstance(v, numbers) and not isinstance(v, bool)]
    if not names:
        raise ValueError(
            f"{kind} has nothing to learn: make it a frozen dataclass whose coefficients are fields, or "
            "use it as it is (learn=False)"
        )
    if not hasattr(pde, "interval"):
        raise ValueError(
            f"nobody knows where {' and '.join(names)} of {kind} may go: give it a method "
            "interval(name, dt, axis) that returns the lowest and the highest stable value of a "
            "coefficient (pdes.Diffusion has one to copy), or use it as it is (learn=False)"
        )
    return names


def _each(pde: Any, name: str, heads: int | None) -> Tensor:
    """Return the initial value of a coefficient, ``[heads or 1, 1, 1]``."""
    value = torch.as_tensor(getattr(pde, name), dtype=torch.float64, device="cpu").detach()
    if value.numel() not in (1, heads or 1):
        raise ValueError(
            f"{name} of {type(pde).__name__} has {value.numel()} numbers; give one, or one for each of "
            f"heads={heads} heads"
        )
    return value.reshape(-1, 1, 1).expand(heads or 1, 1, 1)


def _text(value: float | Tensor) -> str:
    numbers = sorted(set(torch.as_tensor(value, device="cpu").flatten().tolist()))
    return ", ".join(f"{x:g}" for x in numbers)
