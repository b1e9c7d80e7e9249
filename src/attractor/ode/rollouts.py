"""Rollouts of corrected steps beside fine trajectories: the errors that a fit is judged by."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attractor.core import evolve, stiffness
from attractor.core.rates import Rate
from attractor.core.step import with_parameters
from attractor.core.tableaus import AnyScheme
from attractor.ode.pairs import Pairs
from attractor.ode.processes import Crew
from attractor.ode.trajectories import LostTrajectoriesError, Run


@dataclass(frozen=True)
class Rollouts:
    """Trajectories that a fit does not learn from, and the mean square errors of rollouts on them."""

    rate: Rate
    scheme: AnyScheme
    dt: float
    runs: list[Run]
    crew: Crew

    def error(self, correction: nn.Module | None) -> float:
        """Return the mean over all trajectories; infinite if one is lost."""
        return self.crew.agreed_number(self.errors(correction).mean().item(), self.runs[0].u)

    def errors(self, correction: nn.Module | None) -> Tensor:
        """Return the error of each trajectory ``[n]``, in float64; infinite where it is lost.

        Components that are constant along all trajectories, such as parameters that are carried along as
        states, do not count: every scheme has them right.
        """
        own = torch.float64 if correction is None else next(correction.parameters()).dtype
        moves = torch.stack([(run.u - run.u[:1]).abs().amax((0, 1)) for run in self.runs]).amax(0)
        size = torch.stack([run.u.abs().amax((0, 1)) for run in self.runs]).amax(0)
        varies = moves > 1e-12 * size
        varies = varies if bool(varies.any()) else torch.ones_like(varies)
        errors = []
        for run in self.runs:
            steps = torch.arange(len(run.u), dtype=torch.float64, device=run.u.device)
            with torch.no_grad():
                t = run.t0 + steps * self.dt
                solved = evolve(
                    self.rate, run.u[0].to(own), t, self.scheme, correction, parameters=run.parameters
                )
            square = (solved.u.double() - run.u)[..., varies].square().mean((0, 2))
            errors.append(torch.where(solved.ok, square, math.inf))
        return torch.cat(errors)

    def lost(self) -> LostTrajectoriesError:
        """Return the error of a fit without a finite error, with the index that shows stiffness."""
        run, dt, name = self.runs[0], self.dt, self.scheme.name
        few = run.u[:: max(1, len(run.u) // 8), :8].flatten(0, 1)
        try:
            own = None if run.parameters is None else run.parameters[:8].repeat(len(few) // 8, 1)
            bound = with_parameters(self.rate, own)
            index = stiffness.stiffness_index(bound, few, t=run.t0).max().item()
        except (RuntimeError, ValueError, TypeError):
            index = math.nan  # a rate that torch cannot differentiate
        advice = "Use a smaller dt, a shorter horizon, more trajectories or more training."
        if math.isfinite(index) and dt * index > 1:
            advice = (
                "The equation is stiff there: its stiffness index, the largest |Re| of an eigenvalue of "
                f"the Jacobian, is {index:.3g}, so that dt times the index is {dt * index:.3g}, where "
                f"explicit schemes such as {name} need at most 2 to 3. Use dt <= {2 / index:.1g}."
            )
        return LostTrajectoriesError(
            f"no correction of {name} with dt = {dt:g} can follow all held-out trajectories to the "
            f"horizon {(len(run.u) - 1) * dt:g}: states become non-finite. {advice}"
        )


def step_accuracy(correction: nn.Module, pairs: Pairs) -> Tensor:
    """Return the root mean square error of a corrected step ``[d]``, rounding of its dtype included."""
    dtype = next(correction.parameters()).dtype
    with torch.no_grad():
        added = correction(pairs.to(dtype).step()).double()
    rounding = torch.finfo(dtype).eps * pairs.u.abs()
    return ((added - pairs.error).square() + rounding.square()).mean(0).sqrt()
