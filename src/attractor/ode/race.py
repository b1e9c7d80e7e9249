"""One problem solved in many ways: the error, the wall time and the rate calls of each."""

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attractor.core import Trajectory, evolve
from attractor.ode.comparison import Point
from attractor.ode.peers import with_error_control
from attractor.ode.solver import HybridSolver

TOLERANCES = (1e-4, 1e-6, 1e-8, 1e-10, 1e-12)
FINEST = 512  # plain steps in one of dt, at most
ENOUGH = 0.6  # seconds of repetition after which a time is known well enough
PATIENCE = 5.0  # seconds a solve may take; finer settings of that method are then left out


class Race:
    """Solves one problem in many ways."""

    def __init__(
        self,
        solver: HybridSolver,
        u0: Tensor,
        parameters: Tensor | None,
        truth: Tensor,
        steps: int,
        compile: bool,
        progress: Callable[[str], None],
    ) -> None:
        self.rate, self.dt, self.steps, self.u0, self.truth = solver.rate, solver.dt, steps, u0, truth
        self.parameters = parameters
        self.compile, self.progress = compile, progress
        self.times = torch.arange(steps + 1, dtype=torch.float64, device=u0.device) * solver.dt

    def error(self, u: Tensor, stride: int = 1) -> float:
        """Return the mean square error of states ``[steps / stride + 1, batch, d]``."""
        value = (u.to(self.truth) - self.truth[::stride]).square().mean().item()
        return value if math.isfinite(value) else math.inf

    def hybrid(self, solver: HybridSolver) -> Point:
        """The hybrid solver, as a user calls it."""
        self.progress(f"hybrid, dt = {self.dt:.2g}")
        solve = partial(solver.solve, self.u0, self.steps * self.dt, parameters=self.parameters)
        end = lambda: solve(every=self.steps, compile=self.compile)
        return self.fixed_point("hybrid", self.dt, solve(), end)

    def fixed(self, scheme: Any, substeps: int, stride: int = 1) -> Point:
        """A plain scheme with steps of ``stride * dt / substeps``."""
        dt = self.dt * stride / substeps
        self.progress(f"{scheme.name}, dt = {dt:.2g}")
        n = self.steps // stride * substeps
        t = torch.arange(n + 1, dtype=torch.float64, device=self.u0.device) * dt
        solve = partial(evolve, self.rate, self.u0, t, scheme, parameters=self.parameters)
        whole, end = solve(every=substeps), lambda: solve(every=n, compile=self.compile)
        return self.fixed_point(scheme.name, dt, whole, end, stride)

    def fixed_point(
        self, method: str, dt: float, solved: Trajectory, run: Callable[[], Any], stride: int = 1
    ) -> Point:
        """A method with fixed steps: its solution, and the call to time."""
        error = self.error(solved.u, stride) if bool(solved.ok.all()) else math.inf
        seconds, first = self.seconds(run)
        return Point(method, dt, False, error, seconds, solved.stats.rate_calls, first)

    def refine(self, scheme: Any, target: float) -> list[Point]:
        """Halve the step until the target is reached; double it if dt reaches the target already."""
        found = [self.fixed(scheme, 1)]
        substeps = stride = 1
        while found[-1].error > target and found[-1].seconds <= PATIENCE and substeps < FINEST:
            substeps *= 2
            found.append(self.fixed(scheme, substeps))
        while substeps == 1 and found[-1].error <= target and self.steps % (2 * stride) == 0:
            stride *= 2
            found.append(self.fixed(scheme, 1, stride))
        return sorted(found, key=lambda point: -point.setting)

    def adaptive(self, jax_rate: Callable[..., Any] | None, target: float) -> list[Point]:
        """Solvers with error control over tolerances, until the target is reached."""
        found = []
        rivals = with_error_control(self.rate, self.u0, self.parameters, jax_rate, self.progress)
        for method, solve in rivals.items():
            for tolerance in TOLERANCES:
                self.progress(f"{method}, rtol = {tolerance:.0e}")
                try:
                    u, calls = solve(tolerance, self.times)
                except (FloatingPointError, RuntimeError, AssertionError) as error:
                    # A step size that fell to nothing: no point here, and the reader is told.
                    reason = (str(error).splitlines() or [""])[0]
                    warnings.warn(f"{method} at rtol = {tolerance:.0e} gave up: {reason}", stacklevel=3)
                    continue
                ends = self.times[[0, -1]]
                seconds, first = self.seconds(lambda: solve(tolerance, ends))  # noqa: B023
                found.append(Point(method, tolerance, True, self.error(u), seconds, calls, first))
                if found[-1].error <= target or seconds > PATIENCE:
                    break
        return found

    def seconds(self, run: Callable[[], Any]) -> tuple[float, float]:
        """The shortest of several repetitions, and the first call, which compiles."""
        times: list[float] = []
        start = time.perf_counter()
        run()
        if self.u0.is_cuda:
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        while len(times) < 3 or (sum(times) < ENOUGH and len(times) < 100):
            start = time.perf_counter()
            run()
            if self.u0.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            if times[-1] > PATIENCE / 4:
                break
        return min(times), first
