"""torchdiffeq's `odeint` and `odeint_adjoint`, so that its users change one import."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attractor.core.adaptive import Callbacks, Solution, Stops, solve_adaptive
from attractor.core.checks import MOST_STEPS, check_values, is_number
from attractor.core.fixed import StepRule, explicit_rule, solve_fixed, solve_fixed_until
from attractor.core.grid import on_grid
from attractor.core.implicit import TABLEAUS, implicit_rule
from attractor.core.multistep import adams_rule
from attractor.core.problem import check_problem
from attractor.core.rounds import Control
from attractor.core.scheme import Rate, Scheme, check_same_rate
from attractor.core.scipy_solver import solve_scipy, solve_scipy_adjoint
from attractor.core.tableaus import AnyScheme, get_scheme
from attractor.core.transforms import check_checkpoint, has_tangent, is_transformed, without_vmap

State: TypeAlias = Tensor | tuple[Tensor, ...] | dict[Any, Tensor]
Tolerance: TypeAlias = Any  # a number, a tensor, or a tuple or dict of these for the parts of a state

# torchdiffeq's names, and two of ours. Its "rk4" is the 3/8 rule, and its "dopri8" is our "dop853".
ADAPTIVE = {n: n for n in ("dopri5", "bosh3", "fehlberg2", "adaptive_heun", "tsit5", "dop853")} | {
    "dopri8": "dop853"
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
MAX_STEPS = 2**31 - 1  # torchdiffeq's: it stops when a step size vanishes
MAX_EVENT_STEPS = 100_000  # the default where an event may never come
CHECKED_TIMES = 8  # of a hybrid solver's trajectory, at which func and its own rate are compared
CONTROL_OPTIONS = {
    "first_step": "first",
    "safety": "safety",
    "ifactor": "grow",
    "dfactor": "shrink",
    "min_step": "least",
    "max_step": "most",
    "max_num_steps": "max_steps",
}


def odeint(
    func: Callable[..., Any],
    y0: State,
    t: Tensor,
    *,
    rtol: Tolerance = 1e-7,
    atol: Tolerance = 1e-9,
    method: Any = None,
    options: dict[str, Any] | None = None,
    event_fn: Callable[..., Any] | None = None,
    args: tuple[Any, ...] = (),
) -> Any:
    """Solve ``dy/dt = func(t, y)``, with torchdiffeq's arguments and meanings.

    The whole of y0, batch dimensions included, is one state with one step size; `evolve` with rtol
    gives every trajectory its own. Gradients flow through the steps.

    Args:
        func: ``(t, y, *args) -> dy/dt``, t a tensor of no dimension, y of y0's shape (or a tuple or
            dict). Its attributes callback_step, callback_accept_step and callback_reject_step, if there
            are any, are called with (t, y, dt) at each step; fixed steps only have the first one.
        y0: A tensor of any shape, or a tuple or dict of tensors.
        t: 1-D times, increasing or decreasing.
        rtol, atol: Error control of adaptive methods: numbers, tensors that broadcast to y0, or for a
            tuple or dict one of these per part. Fixed-step methods do not use them.
        method: Adaptive: "dopri5" (default), "bosh3", "fehlberg2", "adaptive_heun", "tsit5", "dop853";
            "dopri8" is accepted as another name of "dop853". Fixed steps: "euler", "midpoint", "heun2",
            "heun3", "rk4" (the 3/8 rule, as in torchdiffeq), "explicit_adams", "implicit_adams";
            implicit: "implicit_euler", "implicit_midpoint", "trapezoid", "radauIIA3", "gl4",
            "radauIIA5", "gl6", "sdirk2", "trbdf2". "scipy_solver" calls `scipy.integrate.solve_ivp` and
            has no gradients except in `odeint_adjoint`. A Scheme or Splitting is adaptive if it has an
            embedded pair. A HybridSolver steps the last dimension of y0 by its own dt and guards its
            steps (see `HybridSolver.solve`), except under transforms of torch.func. Such a solver
            belongs to one equation: func must be that equation.
        options: Adaptive: first_step, safety, ifactor, dfactor, min_step, max_step, max_num_steps, norm,
            step_t (times at which steps end), jump_t (times at which func is discontinuous), dtype (the
            clock is always float64). Fixed: step_size, grid_constructor, perturb (do not call func
            exactly at the ends of steps), interp ("linear" or "cubic" between the steps; by default
            steps end at the times t, so that nothing is interpolated); Adams methods: max_order,
            max_iters; implicit methods: max_iters. scipy_solver: solver, min_step, max_step.
        event_fn: ``(t, y, *args) -> tensor``. The solution ends where one of its elements crosses zero;
            ``t[1]`` only gives the direction. Fixed steps need the option step_size.
        args: Further arguments of func and event_fn.

    Returns:
        Solution ``[len(t), *y0.shape]``, or a tuple or dict of such. With event_fn the time of the event
        and the solution ``[2, *y0.shape]`` at ``t[0]`` and at the event, both with their gradients by
        the implicit function theorem.

    Raises:
        ValueError: The method or an option is not supported; the message lists what is. Or func is not
            the equation of a HybridSolver.
        FloatingPointError: An adaptive method cannot reach ``t[-1]``, or there is no event. What blows
            up with fixed steps is infinite or NaN from there on.
    """
    with without_vmap(f"odeint with method {_label(method)}"):
        return _solve(func, y0, t, rtol, atol, method, options, event_fn, args)


def odeint_adjoint(
    func: Callable[..., Any],
    y0: State,
    t: Tensor,
    *,
    rtol: Tolerance = 1e-7,
    atol: Tolerance = 1e-9,
    method: Any = None,
    options: dict[str, Any] | None = None,
    event_fn: Callable[..., Any] | None = None,
    args: tuple[Any, ...] = (),
    adjoint_rtol: Tolerance | None = None,
    adjoint_atol: Tolerance | None = None,
    adjoint_method: Any = None,
    adjoint_options: dict[str, Any] | None = None,
    adjoint_params: Any = None,
) -> Any:
    """`odeint` whose gradients take less memory: about the square root of the number of steps.

    torchdiffeq solves a second equation backward in time, whose solution is the gradient of the exact
    flow, up to its own errors. Here every so many steps a state is kept, and the steps between are
    taken again in the backward pass: the gradients are `odeint`'s, of the steps that were taken. So
    there is no adjoint equation to choose a method or tolerances for: arguments such as `adjoint_rtol`
    are accepted and not used. All parameters that func uses get gradients, be func a module or not, and
    those that it does not use get zeros, as in torchdiffeq: `adjoint_params`, by default the parameters
    of a module. The attributes callback_step_adjoint, callback_accept_step_adjoint and
    callback_reject_step_adjoint of func are called at the steps that are taken again.

    With method "scipy_solver" the gradients of y0, t and `adjoint_params` do come from the adjoint
    equation, which SciPy solves too.
    """
    if adjoint_params is None:
        adjoint_params = func.parameters() if isinstance(func, nn.Module) else ()
    wanted = [p for p in (*adjoint_params, *args) if isinstance(p, Tensor) and p.requires_grad]
    if method != SCIPY:
        check_checkpoint(True)
    with without_vmap(f"odeint_adjoint with method {_label(method)}"):
        solution = _solve(
            func, y0, t, rtol, atol, method, options, event_fn, args, checkpoint=True, parameters=wanted
        )
    if not wanted or not torch.is_grad_enabled() or method == SCIPY:
        return solution
    with_zeros = lambda part: _WithZeros.apply(part, *wanted)
    if event_fn is not None:
        when, solution = solution
        return with_zeros(when), _mapped(with_zeros, solution)
    return _mapped(with_zeros, solution)


def odeint_event(
    func: Callable[..., Any],
    y0: State,
    t0: Tensor,
    *,
    event_fn: Callable[..., Any],
    reverse_time: bool = False,
    odeint_interface: Callable[..., Any] = odeint,
    **kwargs: Any,
) -> Any:
    """Solve from time t0 until event_fn crosses zero.

    Args:
        t0: The starting time, a tensor of one element.
        event_fn: See `odeint`.
        reverse_time: Solve backward in time.
        odeint_interface: `odeint` or `odeint_adjoint`.
        **kwargs: Further arguments of these.

    Returns:
        The time of the event, and the solution ``[2, *y0.shape]`` at t0 and there. Both have gradients.
    """
    if not isinstance(t0, Tensor) or t0.numel() != 1:
        got = f"has shape {list(t0.shape)}" if isinstance(t0, Tensor) else f"is a {type(t0).__name__}"
        raise TypeError(f"t0 {got}; pass a tensor of one time, such as torch.tensor(0.0)")
    if not callable(event_fn):
        raise TypeError(f"event_fn is a {type(event_fn).__name__}; pass a function (t, y) -> values")
    if not callable(odeint_interface):
        raise TypeError(
            f"odeint_interface is a {type(odeint_interface).__name__}; pass odeint or odeint_adjoint"
        )
    start = t0.reshape(1)
    t = torch.cat((start, start.detach() + (-1.0 if reverse_time else 1.0)))
    return odeint_interface(func, y0, t, event_fn=event_fn, **kwargs)


def _label(method: Any) -> str:
    """Return the name of a method for a message."""
    return repr("dopri5" if method is None else getattr(method, "name", method))


def _mapped(function: Callable[[Tensor], Tensor], state: State) -> Any:
    """Apply a function to each tensor of a state."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return {key: function(part) for key, part in state.items()}
    return tuple(map(function, state))


class _WithZeros(torch.autograd.Function):
    """The identity of x, whose backward pass gives parameters gradients of zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *(torch.zeros_like(p) for p in ctx.saved_tensors)


def _solve(
    func: Callable[..., Any],
    y0: State,
    t: Tensor,
    rtol: Tolerance,
    atol: Tolerance,
    method: Any,
    options: dict[str, Any] | None,
    event_fn: Callable[..., Any] | None,
    args: tuple[Any, ...] = (),
    checkpoint: bool = False,
    parameters: list[Tensor] | None = None,
) -> Any:
    if not callable(func):
        raise TypeError(f"func is a {type(func).__name__}; pass a function (t, y) -> dy/dt")
    if not isinstance(args, tuple):
        raise TypeError(f"args is a {type(args).__name__}; pass a tuple, such as args=(parameter,)")
    options, original = dict(options or {}), func
    if args:
        func = lambda t, y: original(t, y, *args)
    rate, flat, unflatten = _flattened(func, y0)
    t = check_problem(flat, t)
    if hasattr(method, "correction"):
        if event_fn is not None:
            raise ValueError("a HybridSolver has no events; use a Scheme as method")
        return _by_hybrid_solver(func, y0, t, method, options, checkpoint)
    if isinstance(y0, dict | tuple | list) and isinstance(options.get("norm"), str):
        raise ValueError("norm must be a function of the state")
    callbacks, adjoint = (_callbacks(original, unflatten, end) for end in ("", "_adjoint"))
    event = None
    if event_fn is not None:
        if len(t) != 2:
            raise ValueError(
                f"t has {len(t)} times; with event_fn pass t[0], and t[1] for the direction"
            )
        event = _event(event_fn, t, flat, unflatten, args)
    if method == SCIPY:
        if event is not None:
            raise ValueError("scipy_solver has no events here; use another method")
        _warn_of(callbacks, SCIPY, ())
        tolerances = _tolerance("rtol", rtol, y0), _tolerance("atol", atol, y0)
        if parameters is None or not torch.is_grad_enabled():
            return unflatten(solve_scipy(rate, flat, t, *tolerances, options))
        return unflatten(solve_scipy_adjoint(rate, flat, t, *tolerances, options, parameters))
    if isinstance(method, str) and (method in ADAMS or method in TABLEAUS):
        name, scheme, adaptive = method, None, False
    else:
        scheme, adaptive = _method(method)
        name = scheme.name
    if adaptive:
        assert isinstance(scheme, Scheme)
        control = Control(
            rtol=_tolerance("rtol", rtol, y0),
            atol=_tolerance("atol", atol, y0),
            max_steps=MAX_STEPS if event is None else MAX_EVENT_STEPS,
        )
        parts = 1 if isinstance(y0, Tensor) else len(y0)
        control, stops = _control(control, options, unflatten, parts)
        if flat.numel() == 0:
            return unflatten(flat.expand(len(t), 0))
        solution = solve_adaptive(
            rate, flat, t, scheme, control, stops=stops, callbacks=callbacks, adjoint=adjoint,
            event=event, checkpoint=checkpoint,
        )  # fmt: skip
        return _shaped(solution, t, unflatten)

    _warn_of(callbacks, name, ("step",))
    perturb, interp = bool(options.pop("perturb", False)), options.pop("interp", None)
    if interp not in (None, "linear", "cubic"):
        raise ValueError(f"interp = {interp!r} is not one of 'linear', 'cubic'")
    plain = scheme is not None and not (perturb or interp or event or callbacks.step or adjoint.step)
    if plain:
        assert scheme is not None
        grid, wanted = _grid(func, y0, t, options)
        return unflatten(on_grid(rate, flat, grid, scheme, watch=False, checkpoint=checkpoint).u[wanted])
    rule = _rule(method, scheme, perturb, options, rtol, atol)
    if event is not None:
        step = options.pop("step_size", None)
        if not is_number(step) or not 0 < step < 1e-2 * torch.finfo(flat.dtype).max or options:
            raise ValueError(
                f"events with fixed steps need the option step_size > 0, in {flat.dtype}, and no grid; "
                f"step_size is {step!r}, the other options are {options}"
            )
        solution = solve_fixed_until(
            rate, flat, t, float(step), rule, event, interp=interp or "cubic", callbacks=callbacks
        )
        return _shaped(solution, t, unflatten)
    if isinstance(method, str) and method in ADAMS and "step_size" in options:
        interp = interp or "cubic"  # Adams methods need even steps
    grid, _ = _grid(func, y0, t, options, merge=interp is None)
    solution = solve_fixed(
        rate,
        flat,
        t,
        grid,
        rule,
        interp=interp,
        callbacks=callbacks,
        adjoint=adjoint,
        checkpoint=checkpoint,
    )
    return unflatten(solution.u)


def _shaped(solution: Solution, t: Tensor, unflatten: Callable[[Tensor], Any]) -> Any:
    if solution.event_time is None:
        return unflatten(solution.u)
    return solution.event_time.to(t.dtype), unflatten(solution.u)


def _rule(
    method: Any, scheme: AnyScheme | None, perturb: bool, options: dict[str, Any], rtol: Any, atol: Any
) -> StepRule:
    """The step of a fixed method."""
    if isinstance(method, str) and method in ADAMS:
        chosen = {key: options.pop(key) for key in ("max_order", "max_iters") if key in options}
        rtol, atol = (float(x) if is_number(x) else y for x, y in ((rtol, 1e-7), (atol, 1e-9)))
        return adams_rule(ADAMS[method], rtol, atol, perturb, **chosen)
    if isinstance(method, str) and method in TABLEAUS:
        chosen = {"max_iters": options.pop("max_iters")} if "max_iters" in options else {}
        return implicit_rule(method, perturb, **chosen)
    if not isinstance(scheme, Scheme):
        raise ValueError("a Splitting has no perturb, interp, events or callbacks; use a Scheme")
    return explicit_rule(scheme, perturb)


def _callbacks(func: Any, unflatten: Callable[[Tensor], Any], end: str) -> Callbacks:
    """The callbacks of func, called with states of its shape."""

    def wrapped(name: str) -> Any:
        callback = getattr(func, name + end, None)
        if callback is None:
            return None
        return lambda t, u, dt: callback(t, unflatten(u), dt)

    return Callbacks(*map(wrapped, CALLBACKS))


def _warn_of(callbacks: Callbacks, method: str, allowed: tuple[str, ...]) -> None:
    """Warn of callbacks that a method does not call."""
    unused = [
        name for name, key in zip(CALLBACKS, ("step", "accept", "reject"))
        if getattr(callbacks, key) is not None and key not in allowed
    ]  # fmt: skip
    if unused:
        warnings.warn(f"{method} does not call {', '.join(unused)}", stacklevel=4)


def _event(
    event_fn: Callable[..., Any],
    t: Tensor,
    flat: Tensor,
    unflatten: Callable[[Tensor], Any],
    args: tuple[Any, ...],
) -> Callable[[Tensor, Tensor], Tensor]:
    """One event function ``[]`` that is positive at the start, and zero where one of the elements is."""
    with torch.no_grad():
        first = event_fn(t[0].to(flat.real.dtype), unflatten(flat), *args)
        if is_number(first):
            first = torch.as_tensor(first)
        if not isinstance(first, Tensor) or not first.is_floating_point() or not first.numel():
            got = f"{first.dtype} {list(first.shape)}" if isinstance(first, Tensor) else repr(first)
            raise TypeError(f"event_fn returned {got}; return real numbers that cross zero at the event")
        check_values("the tensor that event_fn returned", first)
        if bool(torch.isnan(first).any()):
            raise ValueError(
                f"event_fn is not a number at the start, t = {t[0].item():g}; return numbers that cross "
                "zero at the event"
            )
        signs = first.sign()

    def event(t: Tensor, u: Tensor) -> Tensor:
        return (event_fn(t, unflatten(u), *args) * signs).min()

    return event


def _tolerance(name: str, tolerance: Tolerance, y0: State) -> float | Tensor:
    """A number, or a tensor ``[d]`` for the flattened state."""
    if isinstance(tolerance, Tensor) and tolerance.numel() == 1:
        return float(tolerance.item())
    if not isinstance(tolerance, Tensor | tuple | list | dict):
        return tolerance  # Control says what is wrong with it
    if isinstance(y0, Tensor):
        if not isinstance(tolerance, Tensor):
            raise TypeError(
                f"{name} is a {type(tolerance).__name__}, but y0 is one tensor; pass a number, or a "
                "tensor that broadcasts to y0"
            )
        pairs: list[tuple[Any, Tensor]] = [(tolerance, y0)]
    else:
        if isinstance(tolerance, Tensor) or len(tolerance) != len(y0):
            raise ValueError(
                f"{name} must be one number, or hold one tolerance per part of y0 ({len(y0)})"
            )
        if isinstance(y0, dict):
            per_part = [tolerance[key] for key in y0] if isinstance(tolerance, dict) else [*tolerance]
            pairs = list(zip(per_part, y0.values()))
        else:
            pairs = list(zip(tolerance, y0))
    return torch.cat(
        [
            torch.as_tensor(x, device=y.device).to(y.real.dtype).expand(y.shape).reshape(-1)
            for x, y in pairs
        ]
    )


def _by_hybrid_solver(
    func: Any, y0: Any, t: Tensor, solver: Any, options: dict[str, Any], checkpoint: bool
) -> Tensor:
    if options or not isinstance(y0, Tensor):
        raise ValueError("a HybridSolver takes no options, and a single tensor for y0")
    if (torch.is_grad_enabled() and t.requires_grad) or has_tangent(t):
        raise ValueError(
            "t requires a gradient, but a HybridSolver's step is fixed, so its times have none; pass "
            "t.detach(), or use a Scheme as method"
        )
    # The clock of `HybridSolver.solve`, whatever the dtype of t: float32 would lose what is corrected.
    clock = t.detach().to(torch.float32 if t.device.type == "mps" else torch.float64)
    steps = ((clock - clock[0]) / solver.dt).round()
    apart = (clock[0] + steps * solver.dt - clock).abs().max().item()
    rounding = 4 * torch.finfo(t.dtype).eps * clock.abs().max().item()
    if bool((steps < 0).any()) or apart > max(1e-6 * solver.dt, rounding):
        raise ValueError(f"t must be whole steps of the solver's dt = {solver.dt:g} after t[0]")
    grid = clock[0] + torch.arange(int(steps[-1]) + 1).to(clock) * solver.dt
    _check_along(func, solver.rate, clock[:1], y0[None])
    solved = on_grid(
        func, solver._converted(y0), grid.to(solver.device), solver.scheme, solver.correction,
        watch=False, checkpoint=checkpoint, guard=None if is_transformed(y0) else solver._guard(None),
    )  # fmt: skip
    _check_along(func, solver.rate, grid, solved.u)
    return solved.u[steps.long()].to(y0)


def _check_along(func: Any, rate: Any, t: Tensor, u: Tensor) -> None:
    """Raise if func is not the rate of a hybrid solver, at some of the states u ``[n, *batch, d]``."""
    if func == rate or is_transformed(u):
        return
    for i in range(0, len(t), math.ceil(len(t) / CHECKED_TIMES)):
        check_same_rate(
            func, rate, t[i].to(u.dtype), u[i],
            "func is not the equation that this HybridSolver was fitted to",
        )  # fmt: skip


def _method(method: str | AnyScheme | None) -> tuple[AnyScheme, bool]:
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
    return scheme, isinstance(scheme, Scheme) and scheme.b_low is not None


def _control(
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
        norm = lambda y: max(part.abs().square().mean().sqrt() for part in _tensors(y) if part.numel())
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


def _tensors(y: State) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else [*(y.values() if isinstance(y, dict) else y)]


def _grid(
    func: Any, y0: Any, t: Tensor, options: dict[str, Any], merge: bool = True
) -> tuple[Tensor, Tensor]:
    """The grid to step on and, if all wanted times are merged into it, where they are in it."""
    step, constructor = options.pop("step_size", None), options.pop("grid_constructor", None)
    if options:
        raise ValueError(
            f"options {sorted(options)} are not supported with fixed steps; "
            "there are step_size, grid_constructor, perturb, interp"
        )
    if step is not None and constructor is not None:
        raise ValueError("give step_size or grid_constructor, not both")
    if (step is None and constructor is None) or len(t) == 1:
        return t, torch.arange(len(t))
    if constructor is not None:
        own = torch.as_tensor(constructor(func, y0, t)).to(t)
    else:
        if not (is_number(step) or (isinstance(step, Tensor) and step.numel() == 1)) or not step > 0:
            raise ValueError(f"step_size = {step!r} must be positive, also backward in time")
        length = ((t[-1] - t[0]).abs() / step).ceil().item()
        if not length <= MOST_STEPS:
            raise ValueError(f"step_size = {step} makes {length:g} steps; take a larger one")
        count = int(length)
        own = t[0] + (t[-1] - t[0]).sign() * step * torch.arange(count, device=t.device, dtype=t.dtype)
    if not merge:
        first, last, inner = own[:1], t[-1:], own[1:]
        if bool(first != t[0]):
            raise ValueError(f"grid_constructor starts at {first.item():g}, but t at {t[0].item():g}")
        return torch.cat((first, inner[(inner - t[-1]) * (t[-1] - t[0]) < 0], last)), torch.arange(0)
    # Points of the grid that a wanted time all but repeats give way to it.
    sign = -1.0 if bool(t[-1] < t[0]) else 1.0
    after = torch.searchsorted(sign * t.detach(), sign * own.detach()).clamp(1, len(t) - 1)
    apart = torch.minimum((own - t[after]).abs(), (own - t[after - 1]).abs())
    near = apart <= 1e-3 * (own.diff().abs().min() if len(own) > 1 else 0)
    inside = ((own - t[0]) * (own - t[-1]) < 0) & ~near
    grid, order = torch.cat((t, own[inside])).sort(descending=sign < 0)
    return grid, order.argsort()[: len(t)]


def _flattened(func: Callable[..., Any], y0: State) -> tuple[Rate, Tensor, Callable[[Tensor], Any]]:
    """The problem for one state of one dimension, and how its solutions get their shape back."""
    if isinstance(y0, Tensor):
        shape = y0.shape

        def rate(t: Tensor, u: Tensor) -> Tensor:
            du = func(t.reshape(()), u.reshape(shape))
            if not isinstance(du, Tensor) or du.shape != shape:
                got = list(du.shape) if isinstance(du, Tensor) else type(du).__name__
                raise ValueError(f"func returned {got} for a state of shape {list(shape)}")
            return du.reshape(-1)

        return rate, y0.reshape(-1), lambda u: u.reshape((*u.shape[:-1], *shape))

    parts = [*y0.values()] if isinstance(y0, dict) else y0
    if not (isinstance(parts, tuple | list) and parts and all(isinstance(y, Tensor) for y in parts)):
        raise TypeError("y0 must be a tensor or a tuple or dict of tensors")
    if len({y.device for y in parts}) > 1:
        devices = ", ".join(str(y.device) for y in parts)
        raise ValueError(f"y0 holds tensors on {devices}; give all on one device")
    shapes, sizes = [y.shape for y in parts], [y.numel() for y in parts]
    keys = list(y0) if isinstance(y0, dict) else None

    def unflatten(u: Tensor) -> Any:
        pieces = u.split(sizes, -1)
        shaped = tuple(piece.reshape((*u.shape[:-1], *s)) for piece, s in zip(pieces, shapes))
        return shaped if keys is None else dict(zip(keys, shaped))

    def rate_of_parts(t: Tensor, u: Tensor) -> Tensor:
        rates = func(t.reshape(()), unflatten(u))
        if keys is not None:
            if not isinstance(rates, dict) or set(rates) != set(keys):
                kind = sorted(map(str, rates)) if isinstance(rates, dict) else type(rates).__name__
                raise ValueError(
                    f"func returned {kind} for a dict with the keys {sorted(map(str, keys))}"
                )
            rates = [rates[key] for key in keys]
        right = isinstance(rates, tuple | list) and all(isinstance(du, Tensor) for du in rates)
        if not right or [du.numel() for du in rates] != sizes:
            got = [list(getattr(du, "shape", ())) for du in rates] if right else type(rates).__name__
            raise ValueError(f"func returned {got} for states of shapes {[list(s) for s in shapes]}")
        return torch.cat([du.reshape(-1) for du in rates])

    return rate_of_parts, torch.cat([y.reshape(-1) for y in parts]), unflatten
