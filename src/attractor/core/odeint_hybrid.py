"""`odeint` with a hybrid solver as method."""

import math
from typing import Any

import torch
from torch import Tensor

from attractor.core.grid import on_grid
from attractor.core.rates import check_same_rate
from attractor.core.transforms import has_tangent, is_transformed

CHECKED_TIMES = 8  # of a trajectory, at which func and the solver's own rate are compared


def solve_by_hybrid(
    func: Any, y0: Any, t: Tensor, solver: Any, options: dict[str, Any], checkpoint: bool
) -> Tensor:
    """Return the states at the times t ``[n]``, whole steps of the solver's dt after the first one."""
    if options or not isinstance(y0, Tensor):
        raise ValueError("with a HybridSolver as method, pass no options, and one tensor as y0")
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
    trajectory = on_grid(
        func, solver._converted(y0), grid.to(solver.device), solver.scheme, solver.correction,
        watch=False, checkpoint=checkpoint, guard=None if is_transformed(y0) else solver._guard(None),
    )  # fmt: skip
    _check_along(func, solver.rate, grid, trajectory.u)
    return trajectory.u[steps.long()].to(y0)


def _check_along(func: Any, rate: Any, t: Tensor, u: Tensor) -> None:
    """Raise if func is not the rate of a hybrid solver, at some of the states u ``[n, *batch, d]``."""
    if func == rate or is_transformed(u):
        return
    for i in range(0, len(t), math.ceil(len(t) / CHECKED_TIMES)):
        check_same_rate(
            func, rate, t[i].to(u.dtype), u[i],
            "func is not the equation that this HybridSolver was fitted to",
        )  # fmt: skip
