"""Trajectories that no fit has seen: errors of solvers, and the time in which plain ones reach an error."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from attractor import HybridSolver, evolve
from attractor.core import Trajectory, get_scheme
from attractor.ode.peers import with_error_control
from attractor.ode.samples import Sampler, initial_states, sampled_parameters
from attractor.ode.substeps import whole_steps

SEED = 2**42  # fits, `compare` and `tune` draw from other seeds
FIXED = ("rk4", "dopri5", "dop853")
HOPELESS = 6  # times the rate calls of another scheme: not compiled
FINEST = 128  # plain steps in one of dt, at most
LONG = 20.0  # seconds that a search for a tolerance may take


@dataclass(frozen=True)
class Way:
    """A plain solver whose setting reaches an error.

    Attributes:
        name: Such as "dop853, dt 0.02".
        error: The error that it has.
        solve: The call to time, compiled if it is one of our schemes with fixed steps.
    """

    name: str
    error: float
    solve: Callable[[], Any]


@dataclass(frozen=True)
class Fresh:
    """Initial states ``[n, d]`` and parameters ``[n, k]``, and the solution ``[steps + 1, n, d]``."""

    rate: Callable[..., Tensor]
    dt: float
    u0: Tensor
    parameters: Tensor | None
    truth: Tensor
    scale: Tensor

    @classmethod
    def draw(
        cls,
        rate: Callable[..., Tensor],
        dt: float,
        horizon: float,
        sample: Sampler | None = None,
        parameters: Sampler | None = None,
        count: int = 1000,
        device: str = "cpu",
        seed: int = 0,
    ) -> Self:
        """Draw trajectories, and solve for their states every dt by dop853 at a tolerance of 1e-12."""
        generator = torch.Generator().manual_seed(SEED + seed)
        u0 = initial_states(rate, sample, count, generator, device)
        p = sampled_parameters(parameters, count, generator, device)
        t = torch.arange(whole_steps(dt, horizon) + 1, dtype=torch.float64, device=device) * dt
        truth = evolve(rate, u0, t, "dop853", parameters=p, rtol=1e-12, atol=1e-14).u
        scale = truth.square().mean((0, 1)).sqrt()
        return cls(rate, dt, u0, p, truth, torch.where(scale > 0, scale, 1.0))

    @property
    def steps(self) -> int:
        """Number of steps of dt."""
        return len(self.truth) - 1

    def error(self, final: Tensor) -> float:
        """Return the largest relative root mean square error of a component of final states."""
        value = ((final - self.truth[-1]).square().mean(0).sqrt() / self.scale).max().item()
        return value if math.isfinite(value) else math.inf

    def errors(self, solved: Trajectory) -> dict[str, Any]:
        """Return the errors of a solution with a state every dt.

        Returns:
            `final` as `error` has it, `median` of final states over trajectories, `mse` over all states
            as `compare` has it, and the number of `lost` trajectories.
        """
        off = (solved.u - self.truth) / self.scale
        return {
            "final": self.error(solved.final) if bool(solved.ok.all()) else math.inf,
            "median": off[-1].square().mean(-1).sqrt().median().item(),
            "mse": (solved.u - self.truth).square().mean().item(),
            "lost": int((~solved.ok).sum()),
        }

    def plain(self, scheme: str, substeps: int = 1) -> Trajectory:
        """Solve by a plain scheme with steps of dt / substeps."""
        n = self.steps * substeps
        t = torch.arange(n + 1, dtype=torch.float64, device=self.u0.device) * (self.dt / substeps)
        return evolve(self.rate, self.u0, t, scheme, parameters=self.parameters, every=substeps)

    def hybrid(self, solver: HybridSolver, **options: Any) -> Trajectory:
        """Solve by a hybrid solver."""
        end = self.steps * self.dt
        return solver.solve(self.u0, end, parameters=self.parameters, **options)

    def ways(self, error: float, schemes: tuple[str, ...] = FIXED, scipy: bool = True) -> list[Way]:
        """Return plain solvers that reach the error on these trajectories."""
        counts = {name: self._fewest_steps(name, error) for name in schemes}
        calls = {name: n * get_scheme(name).rate_calls for name, n in counts.items() if n is not None}
        least = min(calls.values(), default=0)
        ways = [self._fixed(n, counts[n]) for n in calls if calls[n] <= HOPELESS * least]
        if scipy:
            solver = with_error_control(self.rate, self.u0, self.parameters, None, lambda text: None)
            ways += self._with_tolerance("SciPy DOP853", solver["SciPy DOP853"], error)
        return ways

    def _final(self, scheme: str, n: int, compile: bool = False) -> Tensor:
        t = torch.linspace(0, self.steps * self.dt, n + 1, dtype=torch.float64, device=self.u0.device)
        options: Any = {"every": n, "compile": compile, "parameters": self.parameters}
        return evolve(self.rate, self.u0, t, scheme, **options).final

    def _fewest_steps(self, scheme: str, error: float) -> int | None:
        """Return the smallest number of steps that reaches the error, to within 2 %."""
        many = max(1, self.steps // 16)
        while self.error(self._final(scheme, many)) > error:
            many *= 2
            if many > FINEST * self.steps:
                return None
        few = many // 2
        while many - few > max(1, many // 50):
            middle = (few + many) // 2
            reached = self.error(self._final(scheme, middle)) <= error
            few, many = (few, middle) if reached else (middle, many)
        return many

    def _fixed(self, scheme: str, n: int) -> Way:
        dt, error = self.steps * self.dt / n, self.error(self._final(scheme, n))
        return Way(f"{scheme}, dt {dt:.3g}", error, lambda: self._final(scheme, n, compile=True))

    def _with_tolerance(self, name: str, solve: Callable[..., Any], error: float) -> list[Way]:
        ends = torch.tensor([0.0, self.steps * self.dt], dtype=torch.float64)
        began, tolerance = time.perf_counter(), min(1e-2, 10 * error)
        while tolerance > 1e-14 and time.perf_counter() - began < LONG:
            reached = self.error(solve(tolerance, ends)[0][-1].to(self.u0))
            if reached <= error:
                call = partial(solve, tolerance, ends)
                return [Way(f"{name}, rtol {tolerance:.1e}", reached, call)]
            tolerance *= 0.5
        return []


def seconds(calls: Mapping[str, Callable[[], Any]], rounds: int = 7) -> dict[str, dict[str, float]]:
    """Return the shortest time of each call and that of its first, in rounds in which all have a turn."""
    first = {name: _seconds(call) for name, call in calls.items()}
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            best[name] = min(best[name], _seconds(call))
    return {name: {"seconds": best[name], "first_seconds": first[name]} for name in calls}


def _seconds(call: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
