"""PDEs with learnable coefficients that remain stable."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from attractor.attention.pdes.pde import PDE, as_equation
from attractor.common.checks import check_whole, is_number

MARGIN = 1e-6  # part of an interval at its ends that rounding may need
HALVES = (torch.float16, torch.bfloat16)


class LearnedPDE(nn.Module):
    """A PDE whose coefficients are parameters; calling it returns the PDE with their current values.

    With a parameter `raw`, a coefficient between 0 and `high` is ``high * |raw| / (1 + |raw|)``, and a
    coefficient between ``-high`` and `high` is ``high * raw / (1 + |raw|)``, where `high` is the limit
    of stability for steps of size dt. Therefore training cannot make the steps unstable. At 0, where the
    output equals that without a PDE, a coefficient has a gradient, and one update of Adam changes it by
    about the learning rate times `high`. A coefficient that training pushes below 0 is reflected: it
    stays within about one update of 0, and increases again once its gradient changes sign.

    Two equations define coordinates of their own, `to_unit` and `from_unit`. Wave learns c², because the
    gradient with respect to c is 0 at c = 0. AdvectionDiffusion learns beta, and alpha between ``|beta|
    / 2`` and its limit, where steps are averages: maps remain non-negative, and steps are stable with
    any walls.

    In a half-precision model, the parameters and the coefficients remain in float32. The parameters are
    vectors (``alpha_raw [heads]``). Weight decay would move them toward 0, even without a gradient.
    Therefore the class declares `no_weight_decay`, which `attractor.train.parameter_groups` and all
    optimisers of this library respect.

    State dicts of earlier versions contain logits (``alpha_logit``). `load_state_dict` converts them in
    float64 to parameters with the same coefficients, up to rounding.

    Args:
        pde: The initial equation, whose coefficients are numbers or tensors with one number per head, or
            a name such as ``"diffusion"`` for an equation with its default numbers.
        heads: Number of heads with coefficients of their own, or None for one set of coefficients.
        dt: Step size for which the equation must be stable.
        axis: Axis of the derivatives.

    A PDE of your own can be learned if it is a frozen dataclass with a method ``interval(name, dt,
    axis)`` that returns the lowest and the highest stable value of a field. The method may use the
    fields before this one. The lowest value must be 0, or the negative of the highest.

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
            raise ValueError(
                f"dt = {dt} must be more than 0, because steps of size 0 have nothing to learn"
            )
        if heads is not None:
            check_whole("heads", heads, 1)
        self.kind: Any = type(equation)
        self.dt, self.axis = float(dt), axis
        names = _coefficients(equation)
        self.options = {
            f.name: getattr(equation, f.name) for f in fields(equation) if f.name not in names
        }
        unknown: Any = {**self.options, **dict.fromkeys(names, torch.tensor(torch.nan, device="cpu"))}
        self.signed = {
            name: bool(
                torch.as_tensor(self.kind(**unknown).interval(name, dt, axis)[0], device="cpu").any()
            )
            for name in names
        }
        values = {name: _each(equation, name, heads) for name in names}
        self.start: dict[str, list[float]] = {}
        for name, raw in self._raw_of(values).items():
            if not raw.isfinite().all():
                equation = self.kind(**self.options, **values)
                low, high = equation.interval(name, self.dt, axis)
                raise ValueError(
                    f"{name} = {_text(values[name])} of {self.kind.__name__} must lie between "
                    f"{_text(low)} and {_text(high)}, the upper end excluded, to be learned with "
                    f"dt = {dt:g} on axis {axis!r}; use another initial value, or another dt"
                )
            self.start[name] = raw.flatten().tolist()
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
            self.register_parameter(f"{name}_raw", nn.Parameter(torch.empty(heads or 1, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the parameters to their initial values."""
        with torch.no_grad():
            for name, numbers in self.start.items():
                parameter = getattr(self, f"{name}_raw")
                parameter.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))

    def forward(self) -> Any:
        """Return the PDE, with coefficients ``[heads, 1, 1]`` or, if heads is None, ``[1, 1, 1]``."""
        unit = {}
        for name, signed in self.signed.items():
            raw = getattr(self, f"{name}_raw")[:, None, None]
            raw = raw.float() if raw.dtype in HALVES else raw
            # |raw| with the gradient -1 at 0, where training may start; abs has the gradient 0 there
            size = leaky_relu(raw, -1.0)
            unit[name] = (1 - MARGIN) * (raw if signed else size) / (1 + size)
        if hasattr(self.kind, "from_unit"):
            return self.kind(**self.options, **self.kind.from_unit(unit, self.dt, self.axis))
        values = {**self.options, **unit}
        for name, signed in self.signed.items():
            low, high = self.kind(**values).interval(name, self.dt, self.axis)
            values[name] = (
                (low + high) / 2 + (high - low) / 2 * unit[name] if signed else high * unit[name]
            )
        return self.kind(**values)

    def _raw_of(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of coefficients ``[heads, 1, 1]``, NaN for unstable coefficients."""
        equation = self.kind(**self.options, **values)
        if hasattr(equation, "to_unit"):
            unit = equation.to_unit(self.dt, self.axis)
        else:
            unit = {}
            for name, signed in self.signed.items():
                low, high = equation.interval(name, self.dt, self.axis)
                unit[name] = (
                    (2 * values[name] - low - high) / (high - low) if signed else values[name] / high
                )
        raws = {}
        for name, signed in self.signed.items():
            low, high = equation.interval(name, self.dt, self.axis)
            place = unit[name] / (1 - MARGIN)
            stable = (values[name] >= low) & (values[name] <= high)
            stable &= (place.abs() if signed else place) < 1
            raws[name] = (place / (1 - place.abs())).masked_fill(~stable, torch.nan)
        return raws

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        logits = {name: state_dict.get(f"{prefix}{name}_logit") for name in self.signed}
        if all(isinstance(logit, Tensor) for logit in logits.values()):
            for name, raw in self._raw_of_logits(logits).items():
                like = state_dict.pop(f"{prefix}{name}_logit")
                state_dict[f"{prefix}{name}_raw"] = raw.to(like.device, like.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _raw_of_logits(self, logits: dict[str, Any]) -> dict[str, Tensor]:
        """Return parameters for the coefficients of an earlier version's ``alpha_logit [heads]``.

        In that version, coefficients were logistic functions onto the interval of stability.
        """
        logits = {name: x.detach().cpu().double()[:, None, None] for name, x in logits.items()}
        values = {**self.options, **logits}
        for name, signed in self.signed.items():
            low, high = self.kind(**values).interval(name, self.dt, self.axis)
            if signed:
                middle, width = (low + high) / 2, (1 - 2 * MARGIN) * (high - low)
                values[name] = middle + width / 2 * (logits[name] / 2).tanh()
            else:
                values[name] = (1 - MARGIN) * high * logits[name].sigmoid()
        raws = self._raw_of({name: values[name] for name in self.signed})
        largest = 1 / MARGIN  # for a coefficient at its limit
        return {name: raw.nan_to_num(largest).clamp(max=largest).flatten() for name, raw in raws.items()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LearnedPDE":
        def keep(tensor: Tensor) -> Tensor:  # model.half() moves, but does not round
            result = fn(tensor)
            rounds = result.dtype in HALVES and tensor.dtype not in HALVES
            return tensor.to(result.device) if rounds else result

        return super()._apply(keep, recurse)

    def extra_repr(self) -> str:
        """Return the equation and the names of its coefficients, for ``repr``."""
        heads = len(getattr(self, f"{next(iter(self.signed))}_raw"))
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
            "pass learn=False"
        )
    if not hasattr(pde, "interval"):
        raise ValueError(
            f"the stable values of {' and '.join(names)} of {kind} are unknown: add a method "
            "interval(name, dt, axis) that returns the lowest and the highest stable value of a "
            "coefficient (as in pdes.Diffusion), or pass learn=False"
        )
    return names


def _each(pde: Any, name: str, heads: int | None) -> Tensor:
    """Return the initial value of a coefficient, ``[heads or 1, 1, 1]``."""
    value = torch.as_tensor(getattr(pde, name), dtype=torch.float64, device="cpu").detach()
    if value.numel() not in (1, heads or 1):
        raise ValueError(
            f"{name} of {type(pde).__name__} has {value.numel()} numbers; pass one, or one for each of "
            f"heads={heads} heads"
        )
    return value.reshape(-1, 1, 1).expand(heads or 1, 1, 1)


def _text(value: float | Tensor) -> str:
    numbers = sorted(set(torch.as_tensor(value, device="cpu").flatten().tolist()))
    return ", ".join(f"{x:g}" for x in numbers)
