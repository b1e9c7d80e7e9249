"""torchdiffeq's `odeint` and `odeint_adjoint`, so that its users change one import."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attractor.common.checks import check_values, is_number
from attractor.core.adaptive import solve_adaptive
from attractor.core.callbacks import Solution
from attractor.core.fixed import solve_fixed, solve_fixed_until
from attractor.core.flat_states import State, Tolerance, flat_tolerance, flatten, map_parts, parts_of
from attractor.core.grid import on_grid
from attractor.core.implicit import TABLEAUS
from attractor.core.odeint_hybrid import solve_by_hybrid
from attractor.core.odeint_options import (
    ADAMS,
    SCIPY,
    callbacks_of,
    control_of,
    grid_of,
    method_of,
    rule_of,
    warn_of_unused,
)
from attractor.core.problem import check_problem
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.rounds import Control
from attractor.core.scheme import Scheme
from attractor.core.scipy_solver import solve_scipy, solve_scipy_adjoint
from attractor.core.transforms import check_checkpoint, without_vmap

MAX_STEPS = 2**31 - 1  # torchdiffeq's: it stops when a step size vanishes
MAX_EVENT_STEPS = 100_000  # the default where an event may never come


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
            "dopri8" is accepted as another name of "dop853"; for stiff equations "rodas4" and "rodas5p",
            whose linear systems are of the size of the whole y0. Fixed steps: "euler", "midpoint",
            "heun2", "heun3", "rk4" (the 3/8 rule, as in torchdiffeq), "explicit_adams",
            "implicit_adams"; implicit: "implicit_euler", "implicit_midpoint", "trapezoid", "radauIIA3",
            "gl4", "radauIIA5", "gl6", "sdirk2", "trbdf2". "scipy_solver" calls
            `scipy.integrate.solve_ivp` and has no gradients except in `odeint_adjoint`. A Scheme,
            Rosenbrock or Splitting is adaptive if it has an embedded pair. A HybridSolver steps the last
            dimension of y0 by its own dt and guards its steps (see `HybridSolver.solve`), except under
            transforms of torch.func. Such a solver belongs to one equation: func must be that equation.
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
    """Solve as `odeint`, with gradients in the memory of about the square root of the number of steps.

    torchdiffeq solves a second equation backward in time, whose solution is the gradient of the exact
    flow, with an error of its own. This function stores a state every few steps, and repeats the steps
    between in the backward pass, so that the gradients are those of `odeint`. There is no adjoint
    equation: arguments such as `adjoint_rtol` are accepted and not used. All parameters that func uses
    get gradients, also if func is not a module. Those of `adjoint_params`, by default the parameters of
    a module, that func does not use get zeros, as in torchdiffeq. The attributes
    callback_step_adjoint, callback_accept_step_adjoint and callback_reject_step_adjoint of func are
    called at the repeated steps.

    With method "scipy_solver" SciPy solves the adjoint equation for the gradients of y0, t and
    `adjoint_params`.
    """
    if adjoint_params is None:
        adjoint_params = func.parameters() if isinstance(func, nn.Module) else ()
    tensors = [p for p in (*adjoint_params, *args) if isinstance(p, Tensor) and p.requires_grad]
    if method != SCIPY:
        check_checkpoint(True)
    with without_vmap(f"odeint_adjoint with method {_label(method)}"):
        solution = _solve(
            func, y0, t, rtol, atol, method, options, event_fn, args, checkpoint=True, parameters=tensors
        )
    if not tensors or not torch.is_grad_enabled() or method == SCIPY:
        return solution
    with_zeros = lambda part: _WithZeros.apply(part, *tensors)
    if event_fn is not None:
        when, solution = solution
        return with_zeros(when), map_parts(with_zeros, solution)
    return map_parts(with_zeros, solution)


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
        description = (
            f"has shape {list(t0.shape)}" if isinstance(t0, Tensor) else f"is a {type(t0).__name__}"
        )
        raise TypeError(f"t0 {description}; pass a tensor of one time, such as torch.tensor(0.0)")
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
    rate, flat, unflatten = flatten(func, y0)
    t = check_problem(flat, t)
    if hasattr(method, "correction"):
        if event_fn is not None:
            raise ValueError("a HybridSolver does not support events; use a Scheme as method")
        return solve_by_hybrid(func, y0, t, method, options, checkpoint)
    if isinstance(y0, dict | tuple | list) and isinstance(options.get("norm"), str):
        raise ValueError("norm must be a function of the state")
    callbacks, adjoint = (callbacks_of(original, unflatten, end) for end in ("", "_adjoint"))
    event = None
    if event_fn is not None:
        if len(t) != 2:
            raise ValueError(
                f"t has {len(t)} times; with event_fn pass t[0], and t[1] for the direction"
            )
        event = _event(event_fn, t, flat, unflatten, args)
    if method == SCIPY:
        if event is not None:
            raise ValueError("scipy_solver does not support events here; use another method")
        warn_of_unused(callbacks, SCIPY, ())
        tolerances = flat_tolerance("rtol", rtol, y0), flat_tolerance("atol", atol, y0)
        if parameters is None or not torch.is_grad_enabled():
            return unflatten(solve_scipy(rate, flat, t, *tolerances, options))
        return unflatten(solve_scipy_adjoint(rate, flat, t, *tolerances, options, parameters))
    if isinstance(method, str) and (method in ADAMS or method in TABLEAUS):
        name, scheme, adaptive = method, None, False
    else:
        scheme, adaptive = method_of(method)
        name = scheme.name
    if adaptive:
        assert isinstance(scheme, Scheme | Rosenbrock)
        most = MAX_STEPS if event is None else MAX_EVENT_STEPS
        tolerances = flat_tolerance("rtol", rtol, y0), flat_tolerance("atol", atol, y0)
        control = Control(*tolerances, max_steps=most)
        control, stops = control_of(control, options, unflatten, len(parts_of(y0)))
        if flat.numel() == 0:
            return unflatten(flat.expand(len(t), 0))
        solution = solve_adaptive(
            rate, flat, t, scheme, control, stops=stops, callbacks=callbacks, adjoint=adjoint,
            event=event, checkpoint=checkpoint,
        )  # fmt: skip
        return _shaped(solution, t, unflatten)

    warn_of_unused(callbacks, name, ("step",))
    perturb, interp = bool(options.pop("perturb", False)), options.pop("interp", None)
    if interp not in (None, "linear", "cubic"):
        raise ValueError(f"interp = {interp!r} is not one of 'linear', 'cubic'")
    plain = scheme is not None and not (perturb or interp or event or callbacks.step or adjoint.step)
    if plain:
        assert scheme is not None
        grid, index = grid_of(func, y0, t, options)
        return unflatten(on_grid(rate, flat, grid, scheme, watch=False, checkpoint=checkpoint).u[index])
    rule = rule_of(method, scheme, perturb, options, rtol, atol)
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
    grid, _ = grid_of(func, y0, t, options, merge=interp is None)
    options = {"callbacks": callbacks, "adjoint": adjoint, "checkpoint": checkpoint}
    return unflatten(solve_fixed(rate, flat, t, grid, rule, interp=interp, **options).u)


def _shaped(solution: Solution, t: Tensor, unflatten: Callable[[Tensor], Any]) -> Any:
    if solution.event_time is None:
        return unflatten(solution.u)
    return solution.event_time.to(t.dtype), unflatten(solution.u)


def _event(
    event_fn: Callable[..., Any],
    t: Tensor,
    flat: Tensor,
    unflatten: Callable[[Tensor], Any],
    args: tuple[Any, ...],
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return one event function ``[]``, positive at the start and zero where one of the elements is."""
    with torch.no_grad():
        first = event_fn(t[0].to(flat.real.dtype), unflatten(flat), *args)
        if is_number(first):
            first = torch.as_tensor(first)
        if not isinstance(first, Tensor) or not first.is_floating_point() or not first.numel():
            description = (
                f"{first.dtype} {list(first.shape)}" if isinstance(first, Tensor) else repr(first)
            )
            raise TypeError(
                f"event_fn returned {description}; return real numbers that cross zero at the event"
            )
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
