"""Fine data: what a correction learns from, in float64."""

import math
from typing import Any

import torch
from torch import Tensor

from attractor.core import evolve
from attractor.core.scheme import Rate

SUBSTEPS = (4, 8, 16, 32, 64, 128, 256)


def fine_trajectories(rate: Rate, u0: Tensor, dt: float, steps: int, substeps: int) -> Tensor:
    """States ``[steps + 1, trajectories, d]`` every dt, by `substeps` steps of dopri5 between them.

    A system that knows its exact solution is asked for it instead.
    """
    u0 = u0.double()
    t = torch.arange(steps + 1, dtype=torch.float64, device=u0.device) * dt
    exact = getattr(rate, "exact", None)
    if exact is not None:
        return exact(t, u0)
    fine = torch.arange(steps * substeps + 1, dtype=torch.float64, device=u0.device) * (dt / substeps)
    with torch.no_grad():
        solved = evolve(rate, u0, fine, "dopri5", every=substeps)
    if not bool(solved.ok.all()):
        lost = int((~solved.ok).sum())
        raise ValueError(
            f"{lost} of {len(u0)} trajectories become non-finite even with steps of {dt / substeps:g}; "
            "sample initial states that can be followed to the horizon, or shorten it"
        )
    return solved.u


def enough_substeps(rate: Rate, u0: Tensor, dt: float, steps: int, tolerance: float = 1e-9) -> int:
    """The fewest substeps after which twice as many change a state by less than tolerance.

    Tried on a few trajectories over at most fifty steps; relative to the size of the states.
    """
    if hasattr(rate, "exact"):
        return 1
    few, steps = u0[:8], min(steps, 50)
    before = _or_none(rate, few, dt, steps, SUBSTEPS[0])
    for substeps in SUBSTEPS[1:]:
        after = _or_none(rate, few, dt, steps, substeps)
        settled = before is not None and after is not None
        if settled and (after - before).abs().max() <= tolerance * after.abs().max():
            return substeps
        before = after
    raise ValueError(
        f"even {SUBSTEPS[-1]} substeps of dt = {dt:g} do not settle the fine solution: the problem is "
        "too stiff or too chaotic for this dt; use a smaller one, or give fine_dt"
    )


def substeps_for(dt: float, fine_dt: float) -> int:
    """How many steps of about fine_dt make one of dt."""
    if not 0 < fine_dt <= dt:
        raise ValueError(f"fine_dt = {fine_dt:g} must be positive and at most dt = {dt:g}")
    return math.ceil(dt / fine_dt - 1e-9)


def _or_none(rate: Rate, u0: Tensor, dt: float, steps: int, substeps: int) -> Any:
    try:
        return fine_trajectories(rate, u0, dt, steps, substeps)
    except ValueError:
        return None
