"""The methods and options of `odeint`, which are torchdiffeq's."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attractor.common.checks import MOST_STEPS, is_number
from attractor.core.callbacks import Callbacks, Stops
from attractor.core.fixed import StepRule, explicit_rule
from attractor.core.flat_states import parts_of
from attractor.core.implicit import TABLEAUS, implicit_rule
from attractor.core.multistep import adams_rule
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.rounds import Control
from attractor.core.scheme import Scheme
from attractor.core.tableaus import AnyScheme, get_scheme

# torchdiffeq's names, and two of ours. Its "rk4" is the 3/8 rule, and its "dopri8" is our "dop853".
ADAPTIVE = {n: n for n in ("dopri5", "bosh3", "fehlberg2", "adaptive_heun", "tsit5", "dop853")} | {
    "dopri8": "dop853",
    "rodas4": "rodas4",
    "rodas5p": "rodas5p",
}
FIXED = {
    "euler": "euler",
    "midpoint": "midpoint",
    "heun2": "heun",
    "heun3": "heun3",
    "rk4": "rk4_38",
}
ADAMS = {"explicit_adams": False, "implicit_adams": True, "fixed_adams": True}  # whether implicit
SCIPY = "scipy_solver"
CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")
CONTROL_OPTIONS = {
    "first_step": "first",
    "safety": "safety",
    "ifactor": "grow",
    "dfactor": "shrink",
    "min_step": "least",
    "max_step": "most",
    "max_num_steps": "max_steps",
}


def method_of(method: str | AnyScheme | None) -> tuple[AnyScheme, bool]:
    """Return the scheme of a method, and whether it is adaptive."""
    if method is None:
        return get_scheme("dopri5"), True
    if isinstance(method, str):
        if method not in ADAPTIVE and method not in FIXED:
            raise ValueError(
                f"odeint has no method {method!r}; adaptive: {', '.join(ADAPTIVE)}; fixed steps: "
                f"{', '.join((*FIXED, *ADAMS, *TABLEAUS))}; {SCIPY}; or pass a Scheme"
            )
        return get_scheme({**ADAPTIVE, **FIXED}[method]), method in ADAPTIVE
    scheme = get_scheme(method)
    return scheme, isinstance(scheme, Scheme | Rosenbrock) and scheme.b_low is not None


def control_of(
    control: Control, options: dict[str, Any], unflatten: Callable[[Tensor], Any], parts: int
) -> tuple[Control, Stops]:
    """Apply torchdiffeq's options; the norm of a tuple is the largest of its parts'."""
    norm, dtype = options.pop("norm", None), options.pop("dtype", torch.float64)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype = {dtype!r} is not a floating-point type, such as torch.float64")
    stops = Stops(*(_times(key, options.pop(key, ())) for key in ("step_t", "jump_t")))
    unknown = set(options) - set(CONTROL_OPTIONS)
    if unknown:
        raise ValueError(
            f"options {sorted(unknown)} are not supported with an adaptive method; "
            f"there are {', '.join(CONTROL_OPTIONS)}, norm, step_t, jump_t, dtype"
        )
    values: dict[str, Any] = {
        CONTROL_OPTIONS[key]: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x
        for key, x in options.items()
    }
    control = replace(control, **values)
    if norm is None and parts > 1:
        norm = lambda y: max(part.abs().square().mean().sqrt() for part in parts_of(y) if part.numel())
    if norm is not None:
        control = replace(control, norm=lambda x: norm(unflatten(x)))
    return control, stops


def _times(name: str, times: Any) -> list[float]:
    if isinstance(times, Tensor):
        times = times.detach().double().reshape(-1).tolist()
    try:
        return [float(x) for x in times]
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {times!r}; pass a tensor or a list of times") from None


def grid_of(
    func: Any, y0: Any, t: Tensor, options: dict[str, Any], merge: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the grid to step on and, if the output times are merged into it, their indices."""
    step, constructor = options.pop("step_size", None), options.pop("grid_constructor", None)
    if options:
        raise ValueError(
            f"options {sorted(options)} are not supported with fixed steps; "
            "there are step_size, grid_constructor, perturb, interp"
        )
    if step is not None and constructor is not None:
        raise ValueError("step_size and grid_constructor were both passed; pass one of them")
    if (step is None and constructor is None) or len(t) == 1:
        return t, torch.arange(len(t))
    if constructor is not None:
        own = torch.as_tensor(constructor(func, y0, t)).to(t)
    else:
        if not (is_number(step) or (isinstance(step, Tensor) and step.numel() == 1)) or not step > 0:
            raise ValueError(f"step_size = {step!r} must be positive, also backward in time")
        length = ((t[-1] - t[0]).abs() / step).ceil().item()
        if not length <= MOST_STEPS:
            raise ValueError(f"step_size = {step} makes {length:g} steps; pass a larger one")
        count = int(length)
        own = t[0] + (t[-1] - t[0]).sign() * step * torch.arange(count, device=t.device, dtype=t.dtype)
    if not merge:
        first, last, inner = own[:1], t[-1:], own[1:]
        if bool(first != t[0]):
            raise ValueError(f"grid_constructor starts at {first.item():g}, but t at {t[0].item():g}")
        return torch.cat((first, inner[(inner - t[-1]) * (t[-1] - t[0]) < 0], last)), torch.arange(0)
    # Points of the grid that nearly coincide with an output time are left out.
    sign = -1.0 if bool(t[-1] < t[0]) else 1.0
    after = torch.searchsorted(sign * t.detach(), sign * own.detach()).clamp(1, len(t) - 1)
    apart = torch.minimum((own - t[after]).abs(), (own - t[after - 1]).abs())
    coincides = apart <= 1e-3 * (own.diff().abs().min() if len(own) > 1 else 0)
    inside = ((own - t[0]) * (own - t[-1]) < 0) & ~coincides
    grid, order = torch.cat((t, own[inside])).sort(descending=sign < 0)
    return grid, order.argsort()[: len(t)]


def rule_of(
    method: Any, scheme: AnyScheme | None, perturb: bool, options: dict[str, Any], rtol: Any, atol: Any
) -> StepRule:
    """Return the step of a fixed method."""
    if isinstance(method, str) and method in ADAMS:
        kwargs = {key: options.pop(key) for key in ("max_order", "max_iters") if key in options}
        rtol, atol = (float(x) if is_number(x) else y for x, y in ((rtol, 1e-7), (atol, 1e-9)))
        return adams_rule(ADAMS[method], rtol, atol, perturb, **kwargs)
    if isinstance(method, str) and method in TABLEAUS:
        kwargs = {"max_iters": options.pop("max_iters")} if "max_iters" in options else {}
        return implicit_rule(method, perturb, **kwargs)
    if not isinstance(scheme, Scheme):
        raise ValueError(
            f"a {type(scheme).__name__} has no perturb, interp, events or callbacks with fixed steps; "
            "use a Scheme"
        )
    return explicit_rule(scheme, perturb)


def callbacks_of(func: Any, unflatten: Callable[[Tensor], Any], end: str) -> Callbacks:
    """Return the callbacks of func, called with states of its shape."""

    def wrapped(name: str) -> Any:
        callback = getattr(func, name + end, None)
        if callback is None:
            return None
        return lambda t, u, dt: callback(t, unflatten(u), dt)

    return Callbacks(*map(wrapped, CALLBACKS))


def warn_of_unused(callbacks: Callbacks, method: str, allowed: tuple[str, ...]) -> None:
    """Warn of callbacks that a method does not call."""
    unused = [
        name for name, key in zip(CALLBACKS, ("step", "accept", "reject"))
        if getattr(callbacks, key) is not None and key not in allowed
    ]  # fmt: skip
    if unused:
        warnings.warn(f"{method} does not call {', '.join(unused)}", stacklevel=4)
