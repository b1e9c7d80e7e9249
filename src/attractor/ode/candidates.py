"""Candidates of a search for the fastest way to an error: how they solve, and their errors."""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attractor.core import Trajectory, evolve
from attractor.core.rates import Rate
from attractor.ode.solver import HybridSolver


@dataclass(frozen=True)
class Candidate:
    """One way to solve the equation, and what it measured.

    Attributes:
        method: "fixed", "adaptive" or "hybrid".
        scheme: Name of the scheme.
        setting: The step size, or the tolerance of an adaptive scheme.
        width: Width of a hybrid's network of the stages; 0 for a linear map of them. None without one.
        degree: Degree of a hybrid's polynomial of the state. None without one.
        dtype: "float64" or "float32".
        compiled: Whether steps are compiled.
        error: The error on fresh trajectories.
        seconds: Wall time for the batch; infinite if it was not measured.
        rate_calls: Calls of the rate, each for the whole batch.
    """

    method: str
    scheme: str
    setting: float
    width: int | None = None
    dtype: str = "float64"
    compiled: bool = False
    error: float = math.inf
    seconds: float = math.inf
    rate_calls: int = 0
    degree: int | None = None

    @property
    def is_hybrid(self) -> bool:
        """Whether it has a correction."""
        return self.method == "hybrid"

    @property
    def correction(self) -> str:
        """The correction in words; empty without one."""
        if self.degree is not None:
            return f"polynomial of degree {self.degree}"
        if self.width is not None:
            return f"network of {self.width}" if self.width else "linear map of stages"
        return ""

    def __str__(self) -> str:
        what = f"tolerance {self.setting:.2g}" if self.method == "adaptive" else f"dt {self.setting:.4g}"
        scheme = () if self.degree is not None else (self.scheme,)
        parts = [*scheme, *filter(None, [self.correction]), what]
        parts += ["float32"] * (self.dtype == "float32") + ["compiled"] * self.compiled
        return ", ".join(parts)


def in_dtype(solver: HybridSolver, dtype: str) -> HybridSolver:
    """Return the solver, or a copy of it in another dtype."""
    wanted = getattr(torch, dtype)
    if solver.dtype == wanted:
        return solver
    trust = copy.deepcopy(solver.trust)
    moved = HybridSolver(
        solver.rate, solver.scheme, copy.deepcopy(solver.correction), solver.dt, trust, solver.history
    )
    return moved.to(wanted)


def solved_by(
    rate: Rate,
    way: Candidate,
    solver: HybridSolver | None,
    u0: Tensor,
    t0: float,
    t_end: float,
    parameters: Tensor | None,
    scale: Tensor,
    error: float,
) -> Trajectory:
    """Return the first and the last states by a candidate, in the dtype of u0."""
    u = u0.to(getattr(torch, way.dtype))
    if way.method == "adaptive":
        solution = evolve(
            rate, u, [t0, t_end], way.scheme, rtol=way.setting, atol=way.setting * scale.to(u),
            parameters=parameters, compile=way.compiled,
        )  # fmt: skip
        return replace(solution, u=solution.u.to(u0.dtype))
    length = abs(t_end - t0)
    if way.method == "fixed":
        n = max(1, math.ceil(length / way.setting - 1e-9))
        t = torch.linspace(t0, t_end, n + 1, dtype=torch.float64, device=u0.device)
        options: Any = {"parameters": parameters, "every": n, "compile": way.compiled}
        solution = evolve(rate, u, t, way.scheme, **options)
        return replace(solution, u=solution.u.to(u0.dtype))
    assert solver is not None
    n = max(0, math.floor((t_end - t0) / solver.dt + 1e-9))
    reached = t0 + n * solver.dt
    solution = solver.solve(
        u, reached, t0, every=max(n, 1), compile=way.compiled and n > 0, parameters=parameters
    )
    if t_end - reached <= 1e-9 * max(length, abs(t_end)):
        return replace(solution, u=solution.u.to(u0.dtype))
    # The last part of a step, by a scheme that needs no correction.
    last = evolve(
        rate, solution.final, [reached, t_end], "dop853", rtol=1e-2 * error,
        atol=1e-2 * error * scale.to(u), parameters=parameters,
    )  # fmt: skip
    calls = solution.stats.rate_calls + last.stats.rate_calls
    return Trajectory(
        torch.stack((solution.t[0], last.t[-1])),
        torch.stack((solution.u[0], last.final)).to(u0.dtype),
        replace(solution.stats, rate_calls=calls),
        solution.ok & last.ok,
        torch.where(solution.ok, last.until, solution.until),
        torch.where(last.ok, solution.status, last.status),
    )


def sizes(solution: Trajectory) -> Tensor:
    """Return the root mean square of each component; 1 where that is 0."""
    size = solution.u.square().mean((0, 1)).sqrt()
    return torch.where(size > 0, size, 1.0)


def distance(u: Tensor, truth: Tensor, scale: Tensor) -> float:
    """Return the largest relative root mean square error of a component."""
    return ((u - truth).square().mean(0).sqrt() / scale).max().item()
