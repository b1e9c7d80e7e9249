"""torchdiffeq's `odeint` and `odeint_adjoint`, so that its users change one import."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core.checks import MOST_STEPS, is_number
from attractor.core.control import Control, controlled, has_tangent, is_transformed
from attractor.core.evolve import check_problem, on_grid
from attractor.core.scheme import Rate, Scheme, check_same_rate
from attractor.core.tableaus import AnyScheme, get_scheme

# torchdiffeq's names, and two of ours. Its "rk4" is the 3/8 rule.
ADAPTIVE = {n: n for n in ("dopri5", "bosh3", "fehlberg2", "adaptive_heun", "tsit5", "dop853")}
FIXED = {
    "euler": "euler",
    "midpoint": "midpoint",
    "heun2": "heun",
    "heun3": "heun3",
    "rk4": "rk4_38",
}
CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")
MAX_STEPS = 2**31 - 1  # torchdiffeq's: it stops when a step size vanishes
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
    y0: Tensor | tuple[Tensor, ...],
    t: Tensor,
    *,
    rtol: float = 1e-7,
    atol: float = 1e-9,
    method: Any = None,
    options: dict[str, Any] | None = None,
    event_fn: Callable[..., Any] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Solve ``dy/dt = func(t, y)``, with torchdiffeq's arguments and meanings.

    The whole of y0, batch dimensions included, is one state with one step size; `evolve` with rtol
    gives every trajectory its own. Gradients flow through the steps.

    Args:
        func: ``(t, y) -> dy/dt``, t a tensor of no dimension, y of y0's shape (or a tuple).
        y0: a tensor of any shape, or a tuple of them.
        t: 1-D times, increasing or decreasing.
        rtol, atol: error control of adaptive methods; fixed-step methods do not use them.
        method: "dopri5" (default), "bosh3", "fehlberg2", "adaptive_heun", "tsit5", "dop853"; on the
            grid t "euler", "midpoint", "heun2", "heun3", "rk4" (the 3/8 rule, as in torchdiffeq); a
            Scheme or Splitting, adaptive if it has an embedded pair; or a HybridSolver, which steps the
            last dimension of y0 by its own dt and guards its steps (see `HybridSolver.solve`), except
            under transforms of torch.func. Such a solver belongs to one equation: func must be that
            equation.
        options: adaptive: first_step, safety, ifactor, dfactor, min_step, max_step, max_num_steps,
            norm. Fixed: step_size, grid_constructor; steps end at the times t, so nothing is
            interpolated.

    Returns:
        Solution ``[len(t), *y0.shape]``, or a tuple of such.

    Raises:
        ValueError: for a method or an option that is not supported here, and what is; for callbacks of
            func, which are not supported; and for a func that is not the equation of a HybridSolver.
        FloatingPointError: if an adaptive method cannot reach ``t[-1]``. What blows up with fixed
            steps is infinite or NaN from there on.
    """
    return _solve(func, y0, t, rtol, atol, method, options, event_fn)


def odeint_adjoint(
    func: Callable[..., Any],
    y0: Tensor | tuple[Tensor, ...],
    t: Tensor,
    *,
    rtol: float = 1e-7,
    atol: float = 1e-9,
    method: Any = None,
    options: dict[str, Any] | None = None,
    event_fn: Callable[..., Any] | None = None,
    adjoint_rtol: float | None = None,
    adjoint_atol: float | None = None,
    adjoint_method: Any = None,
    adjoint_options: dict[str, Any] | None = None,
    adjoint_params: Any = None,
) -> Tensor | tuple[Tensor, ...]:
    """`odeint` whose gradients take less memory: about the square root of the number of steps.

    torchdiffeq solves a second equation backward in time, whose solution is the gradient of the exact
    flow, up to its own errors. Here every so many steps a state is kept, and the steps between are
    taken again in the backward pass: the gradients are `odeint`'s, of the steps that were taken. So
    there is no adjoint equation to choose a method or tolerances for: arguments such as `adjoint_rtol`
    are accepted and not used. All parameters that func uses get gradients, be func a module or not, and
    those that it does not use get zeros, as in torchdiffeq: `adjoint_params`, by default the parameters
    of a module.
    """
    solution = _solve(func, y0, t, rtol, atol, method, options, event_fn, checkpoint=True)
    if adjoint_params is None:
        adjoint_params = func.parameters() if isinstance(func, nn.Module) else ()
    wanted = [p for p in adjoint_params if isinstance(p, Tensor) and p.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return solution
    if isinstance(solution, Tensor):
        return _WithZeros.apply(solution, *wanted)
    return tuple(_WithZeros.apply(part, *wanted) for part in solution)


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
    y0: Tensor | tuple[Tensor, ...],
    t: Tensor,
    rtol: float,
    atol: float,
    method: Any,
    options: dict[str, Any] | None,
    event_fn: Callable[..., Any] | None,
    checkpoint: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    if event_fn is not None:
        raise ValueError("event_fn is not supported; scipy's solve_ivp has events")
    callbacks = [f"{name}{end}" for end in ("", "_adjoint") for name in CALLBACKS]
    used = [name for name in callbacks if hasattr(func, name)]
    if used:
        raise ValueError(
            f"func has {', '.join(used)}; callbacks of torchdiffeq are not supported: remove them, and "
            "solve between the times at which they must act"
        )
    options = dict(options or {})
    rate, flat, unflatten = _flattened(func, y0)
    t = check_problem(flat, t)
    if hasattr(method, "correction"):
        return _by_hybrid_solver(func, y0, t, method, options, checkpoint)
    scheme, adaptive = _method(method)
    if adaptive:
        parts = 1 if isinstance(y0, Tensor) else len(y0)
        rtol, atol = (x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for x in (rtol, atol))
        control = Control(rtol=rtol, atol=atol, max_steps=MAX_STEPS)
        control = _control(control, options, unflatten, parts)
        solution = controlled(rate, flat, t, scheme, control, checkpoint=checkpoint)
        if not bool(solution.ok):
            raise FloatingPointError(
                f"{scheme.name} gave up at t = {solution.until.item():.6g} after "
                f"{solution.stats.steps} steps: the state became non-finite, the step size fell to "
                "nothing or max_num_steps was reached; is the problem stiff or singular there?"
            )
        return unflatten(solution.u)
    grid, wanted = _grid(func, y0, t, options)
    return unflatten(on_grid(rate, flat, grid, scheme, watch=False, checkpoint=checkpoint).u[wanted])


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
                f"odeint has no method {method!r}; adaptive: {', '.join(ADAPTIVE)}; "
                f"fixed steps: {', '.join(FIXED)}; or pass a Scheme"
            )
        return get_scheme({**ADAPTIVE, **FIXED}[method]), method in ADAPTIVE
    scheme = get_scheme(method)
    return scheme, isinstance(scheme, Scheme) and scheme.b_low is not None


def _control(
    control: Control, options: dict[str, Any], unflatten: Callable[[Tensor], Any], parts: int
) -> Control:
    """With torchdiffeq's options; for a tuple its norm, the largest of the parts'."""
    norm = options.pop("norm", None)
    unknown = set(options) - set(CONTROL_OPTIONS)
    if unknown:
        raise ValueError(
            f"options {sorted(unknown)} are not supported with an adaptive method; "
            f"there are {', '.join(CONTROL_OPTIONS)}, norm"
        )
    given: dict[str, Any] = {
        CONTROL_OPTIONS[key]: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x
        for key, x in options.items()
    }
    control = replace(control, **given)
    if norm is None and parts > 1:
        norm = lambda y: torch.stack([part.square().mean().sqrt() for part in y]).max()
    if norm is not None:
        control = replace(control, norm=lambda x: torch.as_tensor(norm(unflatten(x))).reshape(1))
    return control


def _grid(func: Any, y0: Any, t: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The grid to step on, which holds all wanted times, and where they are in it."""
    step, constructor = options.pop("step_size", None), options.pop("grid_constructor", None)
    if options:
        raise ValueError(
            f"options {sorted(options)} are not supported with fixed steps; "
            "there are step_size, grid_constructor"
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
    # Points of the grid that a wanted time all but repeats give way to it.
    sign = -1.0 if bool(t[-1] < t[0]) else 1.0
    after = torch.searchsorted(sign * t.detach(), sign * own.detach()).clamp(1, len(t) - 1)
    apart = torch.minimum((own - t[after]).abs(), (own - t[after - 1]).abs())
    near = apart <= 1e-3 * (own.diff().abs().min() if len(own) > 1 else 0)
    inside = ((own - t[0]) * (own - t[-1]) < 0) & ~near
    grid, order = torch.cat((t, own[inside])).sort(descending=sign < 0)
    return grid, order.argsort()[: len(t)]


def _flattened(
    func: Callable[..., Any], y0: Tensor | tuple[Tensor, ...]
) -> tuple[Rate, Tensor, Callable[[Tensor], Any]]:
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

    if not (isinstance(y0, tuple | list) and y0 and all(isinstance(y, Tensor) for y in y0)):
        raise TypeError("y0 must be a tensor or a tuple of tensors")
    if len({y.device for y in y0}) > 1:
        given = ", ".join(str(y.device) for y in y0)
        raise ValueError(f"y0 holds tensors on {given}; give all on one device")
    shapes, sizes = [y.shape for y in y0], [y.numel() for y in y0]

    def unflatten(u: Tensor) -> tuple[Tensor, ...]:
        parts = u.split(sizes, -1)
        return tuple(part.reshape((*u.shape[:-1], *s)) for part, s in zip(parts, shapes))

    def rate_of_parts(t: Tensor, u: Tensor) -> Tensor:
        rates = func(t.reshape(()), unflatten(u))
        right = isinstance(rates, tuple | list) and all(isinstance(du, Tensor) for du in rates)
        if not right or [du.numel() for du in rates] != sizes:
            got = [list(getattr(du, "shape", ())) for du in rates] if right else type(rates).__name__
            raise ValueError(f"func returned {got} for states of shapes {[list(s) for s in shapes]}")
        return torch.cat([du.reshape(-1) for du in rates])

    return rate_of_parts, torch.cat([y.reshape(-1) for y in y0]), unflatten
