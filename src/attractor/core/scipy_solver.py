"""Solutions by SciPy's `solve_ivp`, with gradients by the adjoint equation if they are required."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attractor.core.rates import Rate, call_rate

OPTIONS = ("solver", "min_step", "max_step")


def solve_scipy(f: Rate, u0: Tensor, t: Tensor, rtol: Any, atol: Any, options: dict[str, Any]) -> Tensor:
    """Return states ``[n+1, d]`` of one state u0 ``[d]`` at the times t, without a graph.

    Args:
        options: solver (a method of `scipy.integrate.solve_ivp`, "LSODA" by default), max_step, and
            min_step, which only LSODA uses.
    """
    try:
        from scipy.integrate import solve_ivp  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ImportError("scipy is missing; install it with: pip install scipy") from None
    unknown = set(options) - set(OPTIONS)
    if unknown:
        raise ValueError(
            f"options {sorted(unknown)} are not supported with scipy_solver; there are "
            f"{', '.join(OPTIONS)}"
        )
    options = dict(options)
    solver, least = options.pop("solver", "LSODA"), options.pop("min_step", 0)
    if solver == "LSODA":
        options["min_step"] = least
    start, times = u0.detach(), t.detach().double().cpu().numpy()
    if len(t) == 1:
        return start[None].clone()

    dtype = torch.complex128 if start.is_complex() else torch.float64

    def rate_of_arrays(time: float, y: Any) -> Any:
        with torch.no_grad():
            slope = call_rate(f, start.real.new_full((), time), torch.as_tensor(y).to(start))
        return slope.cpu().to(dtype).numpy()

    tolerances = [x.cpu().double().numpy() if isinstance(x, Tensor) else x for x in (rtol, atol)]
    solution = solve_ivp(
        rate_of_arrays, (times[0], times[-1]), start.cpu().to(dtype).numpy(), method=solver,
        t_eval=times, rtol=tolerances[0], atol=tolerances[1], **options,
    )  # fmt: skip
    if not solution.success:
        raise FloatingPointError(f"SciPy's {solver} gave up: {solution.message}")
    return torch.as_tensor(solution.y.T.copy()).to(start)


def solve_scipy_adjoint(
    f: Rate,
    u0: Tensor,
    t: Tensor,
    rtol: Any,
    atol: Any,
    options: dict[str, Any],
    parameters: Sequence[Tensor],
) -> Tensor:
    """`solve_scipy` with gradients of u0, t and the parameters, by the adjoint equation."""
    solve: Callable[..., Tensor] = lambda f, u, t, rtol, atol: solve_scipy(f, u, t, rtol, atol, options)
    return _Adjoint.apply(f, solve, rtol, atol, u0, t, *parameters)


class _Adjoint(torch.autograd.Function):
    """Chen et al. 2018, Algorithm 1: the gradient obeys an equation that is solved backward in time."""

    @staticmethod
    def forward(
        ctx: Any, f: Rate, solve: Any, rtol: Any, atol: Any, u0: Tensor, t: Tensor, *ps: Tensor
    ) -> Any:
        states = solve(f, u0, t, rtol, atol)
        ctx.f, ctx.solve = f, solve
        ctx.tolerances = [x.mean().item() if isinstance(x, Tensor) else x for x in (rtol, atol)]
        ctx.save_for_backward(t, states, *ps)
        return states

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        t, states, *parameters = ctx.saved_tensors
        f, d, sizes = ctx.f, states.shape[1], [p.numel() for p in parameters]
        real = states.real.dtype

        def augmented(time: Tensor, y: Tensor) -> Tensor:
            """Return the rates of the state and of the gradients of state, time and parameters."""
            with torch.enable_grad():
                u, when = y[:d].detach().requires_grad_(), time.detach().requires_grad_()
                slope = call_rate(f, when, u)
                inputs = (u, when, *parameters)
                gradients = torch.autograd.grad(slope, inputs, -y[d : 2 * d], allow_unused=True)
            parts = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients)]
            return torch.cat([slope.detach(), *(g.reshape(-1).to(y) for g in parts)])

        adjoint = gradient.new_zeros(d + 1 + sum(sizes))
        by_time = torch.zeros_like(t)
        for i in range(len(t) - 1, 0, -1):
            moving = (call_rate(f, t[i].to(real), states[i]) * gradient[i]).sum()
            by_time[i] = moving
            adjoint[d] -= moving
            adjoint[:d] += gradient[i]
            start = torch.cat([states[i], adjoint])
            adjoint = ctx.solve(augmented, start, t[i - 1 : i + 1].flip(0), *ctx.tolerances)[-1, d:]
        adjoint[:d] += gradient[0]
        by_time[0] = adjoint[d]
        pieces = adjoint[d + 1 :].split(sizes) if sizes else ()
        by_parameter = [x.reshape(p.shape).to(p) for x, p in zip(pieces, parameters)]
        return None, None, None, None, adjoint[:d], by_time, *by_parameter
