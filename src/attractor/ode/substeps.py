"""How many steps make up a time, and how many of the reference a step of fine data needs."""

import math
from typing import Any

import torch
from torch import Tensor

from attractor.common.checks import MOST_STEPS, is_number
from attractor.core import evolve
from attractor.core.rates import Rate
from attractor.ode.trajectories import (
    GOLDEN,
    LostTrajectoriesError,
    exact_solution,
    fine_trajectories,
)

SUBSTEPS = (1, 2, 4, 8, 16, 32, 64, 128)
SETTLED = 8  # a difference of order 8 may be so much larger for the same error as one of order 5
ROUNDING = 1e-14  # that thousands of steps may gather, relative to a state


def enough_substeps(
    rate: Rate,
    u0: Tensor,
    dt: float,
    steps: int,
    tolerance: float = 1e-9,
    period: float | None = None,
    parameters: Tensor | None = None,
) -> int:
    """Return the fewest substeps after which twice as many change a state by less than the tolerance.

    Measured on a few trajectories over at most fifty steps, relative to the size of each component, so
    that a large one does not hide what the others do.

    Args:
        period: Of a rate that depends on t, whose trajectories start at several times.
        parameters: Of each trajectory ``[n, k]``, for a rate that takes them.

    Raises:
        LostTrajectoriesError: Trajectories become non-finite with any number of substeps.
        ValueError: No number of substeps suffices, or the rate's exact solution does not solve it.
    """
    few, steps = u0[:8], min(steps, 50)
    p = None if parameters is None else parameters[:8]
    t0 = 0.0 if period is None else GOLDEN * period
    if p is None and exact_solution(rate, t0) is not None:
        _check_exact(rate, few, dt, steps, t0)
        return 1
    before = _or_none(rate, few, dt, steps, SUBSTEPS[0], t0, p)
    for substeps in SUBSTEPS[1:]:
        after = _or_none(rate, few, dt, steps, substeps, t0, p)
        if before is not None and after is not None:
            size = after.abs().amax((0, 1))  # [d]
            # The error after twice as many substeps is a small part of the difference. Below the
            # rounding of the largest component a small one need not settle.
            allowed = torch.maximum(SETTLED * tolerance * size, ROUNDING * size.max())
            if bool(((after - before).abs().amax((0, 1)) <= allowed).all()):
                return substeps
        before = after
    if before is None:
        raise LostTrajectoriesError(
            f"trajectories become non-finite even with {SUBSTEPS[-1]} substeps of dt = {dt:g}, within "
            f"{steps * dt:g}: if the solution itself does, shorten the horizon or change sample; if the "
            "problem is stiff, use a smaller dt, or set the step of the fine data with fine_dt="
        )
    raise ValueError(
        f"even {SUBSTEPS[-1]} substeps of dt = {dt:g} do not settle the fine solution: the problem is "
        "too stiff or too chaotic for this dt; use a smaller one, or set the step of the fine data with "
        "fine_dt= (on the command line --fine-dt)"
    )


def _check_exact(rate: Any, u0: Tensor, dt: float, steps: int, t0: float) -> None:
    """Raise if the exact solution of a rate is not a solution, as far as dopri5 can tell."""
    steps = min(steps, 8)
    exact = fine_trajectories(rate, u0, dt, steps, 1, t0)
    times = t0 + torch.arange(steps + 1, dtype=torch.float64, device=u0.device) * dt
    with torch.no_grad():
        solved = evolve(rate, u0.double(), times, "dopri5", rtol=1e-9, atol=1e-12)
    size = exact.abs().amax((0, 1)) + solved.u.abs().amax((0, 1))
    difference = (exact - solved.u).abs().amax((0, 1))
    # Where error control gave up, nothing can be said.
    if bool(solved.ok.all()) and bool((difference > 1e-5 * size + 1e-9 * size.max()).any()):
        raise ValueError(
            f"the method exact of {type(rate).__name__} does not solve its rate: within {steps} steps "
            f"of dt = {dt:g} from t = {t0:g} it differs from dopri5 by {difference.max().item():.2g}; "
            "correct it, or remove it"
        )


def substeps_for(dt: float, fine_dt: float) -> int:
    """Return the number of steps of at most fine_dt that make up one of dt."""
    if not (is_number(fine_dt) and 0 < fine_dt <= dt):
        raise ValueError(f"fine_dt = {fine_dt!r} must be positive and at most dt = {dt:g}")
    if dt / fine_dt > MOST_STEPS:
        raise ValueError(f"fine_dt = {fine_dt:g} makes more than {MOST_STEPS:g} steps of dt = {dt:g}")
    return math.ceil(dt / fine_dt - 1e-9)


def whole_steps(dt: float, horizon: float) -> int:
    """Return the number of steps of dt that make up the horizon."""
    if not (is_number(dt) and dt > 0 and math.isfinite(dt)):
        raise ValueError(f"dt = {dt!r} must be a positive number")
    if not (is_number(horizon) and math.isfinite(horizon / dt)):
        raise ValueError(
            f"horizon = {horizon!r} must be a finite number, a whole number of steps of dt = {dt:g}"
        )
    if horizon / dt > MOST_STEPS:
        raise ValueError(
            f"horizon = {horizon:g} is more than {MOST_STEPS:g} steps of dt = {dt:g}; shorten it"
        )
    steps = round(horizon / dt)
    if steps < 1 or abs(steps * dt - horizon) > 1e-9 * horizon:
        raise ValueError(
            f"horizon = {horizon:g} is not a whole number of steps of dt = {dt:g}; the nearest is "
            f"{max(steps, 1) * dt!r}, {max(steps, 1):,} of them"
        )
    return steps


def _or_none(
    rate: Rate,
    u0: Tensor,
    dt: float,
    steps: int,
    substeps: int,
    t0: float,
    parameters: Tensor | None = None,
) -> Any:
    try:
        return fine_trajectories(rate, u0, dt, steps, substeps, t0, parameters=parameters)
    except LostTrajectoriesError:  # perhaps because the steps are too large; other errors are the rate's
        return None
