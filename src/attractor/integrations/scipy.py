"""A hybrid solver as a method of SciPy's `solve_ivp`."""

from typing import Any

import numpy as np
import torch

from attractor.core import evolve
from attractor.core.rates import check_same_rate
from attractor.core.step import with_parameters
from attractor.ode import HybridSolver


def hybrid(solver: HybridSolver, parameters: Any = None) -> type:
    """Return the solver as an `OdeSolver` class: ``solve_ivp(fun, span, y0, method=hybrid(solver))``.

    Steps use the solver's dt and rate. A correction belongs to one equation, so `fun` with its `args`
    must be that equation; it is compared with the solver's rate at the first step and at a few later
    ones. A last step shorter than dt, states between steps (`t_eval`, `dense_output`), and the roots of
    events are computed by dopri5 with a tolerance of 1e-10 from the start of the step, because a
    polynomial through steps of this size would lose the accuracy of the correction. If dopri5 fails, so
    does the last step, and states between steps are NaN. Steps are guarded as in `HybridSolver.solve`.

    Args:
        solver: The solver.
        parameters: The parameters ``[k]``, for a solver of an equation ``rate(t, u, p)``. `fun` must use
            the same parameters, for example by ``args=(parameters,)``.

    Raises:
        TypeError: `solver` is not a HybridSolver.
        ValueError: The solver was fitted with parameters, but `parameters` does not have as many. When
            solving: `fun` is not the equation of the solver.
    """
    if not isinstance(solver, HybridSolver):
        raise TypeError(f"solver is a {type(solver).__name__}; pass a HybridSolver, as fit returns")
    from scipy.integrate import DenseOutput, OdeSolver

    p = None
    if parameters is not None:
        p = torch.as_tensor(parameters, dtype=torch.float64, device=solver.device)
    if solver.parameter_count and (p is None or p.shape != (solver.parameter_count,)):
        shape = "none" if p is None else list(p.shape)
        raise ValueError(
            f"the solver was fitted to an equation with {solver.parameter_count} parameters, and there "
            f"are {shape}; use hybrid(solver, parameters=[...]) with {solver.parameter_count} numbers"
        )
    equation = with_parameters(solver.rate, p)

    def between(t0: float, y0: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the states [d, n] at increasing times after t0, and the last time that was reached.

        Later states are NaN.
        """
        u0 = torch.from_numpy(np.ascontiguousarray(y0)).double().to(solver.device)
        with torch.no_grad():
            t = torch.from_numpy(np.concatenate(([t0], times)))
            solution = evolve(equation, u0, t, "dopri5", rtol=1e-10, atol=1e-12)
        states, until = solution.u[1:].T.cpu().numpy(), solution.until.item()
        if not bool(solution.ok):
            states[:, times > until] = np.nan
        return states, until

    class Inside(DenseOutput):
        def __init__(self, t_old: float, t: float, y_old: np.ndarray) -> None:
            super().__init__(t_old, t)
            self.y_old = y_old

        def _call_impl(self, t: Any) -> np.ndarray:
            times, place = np.unique(np.atleast_1d(t), return_inverse=True)
            later = times > self.t_old
            states = np.repeat(self.y_old[:, None], len(times), axis=1)
            if later.any():
                states[:, later], _ = between(self.t_old, self.y_old, times[later])
            states = states[:, place.reshape(-1)]
            return states[:, 0] if np.ndim(t) == 0 else states

    class Hybrid(OdeSolver):
        t: float
        y: np.ndarray

        def __init__(
            self, fun: Any, t0: float, y0: Any, t_bound: float, vectorized: bool = False, **options: Any
        ) -> None:
            if not callable(fun):
                raise TypeError(f"fun is {fun!r}; pass the equation that the solver was fitted to")
            super().__init__(fun, t0, y0, t_bound, vectorized)
            if options:
                raise ValueError(
                    f"options {sorted(options)} mean nothing to a hybrid solver: its step is "
                    f"{solver.dt:g}, its accuracy that of its fit"
                )
            if self.direction < 0:
                raise ValueError("a hybrid solver goes forward in time; its correction is for +dt")
            self.y_old: np.ndarray = self.y
            self.steps, self.next_check = 0, 0

        def _check_fun(self) -> None:
            """Compare `fun` with the solver's rate after 0, 1, 2, 4, 8 ... steps.

            The first state alone may hide a difference: at rest, friction does not show.
            """
            if self.steps < self.next_check and self.t < self.t_bound - solver.dt:
                return
            self.next_check = max(1, 2 * self.steps)

            def rate(t: Any, u: torch.Tensor) -> torch.Tensor:
                return torch.as_tensor(np.asarray(self.fun(float(t), u.cpu().numpy()))).to(u)

            u = torch.from_numpy(np.ascontiguousarray(self.y)).double().to(solver.device)
            check_same_rate(
                rate, equation, torch.tensor(self.t, dtype=u.dtype, device=u.device), u,
                "fun, with its args, is not the equation that this HybridSolver was fitted to",
            )  # fmt: skip

        def _step_impl(self) -> tuple[bool, str | None]:
            self._check_fun()
            self.steps += 1
            self.y_old = self.y
            remaining = self.t_bound - self.t
            if remaining < solver.dt * (1 - 1e-9):
                states, until = between(self.t, self.y, np.array([self.t_bound]))
                if not np.isfinite(states).all():
                    return False, f"the state cannot be followed beyond t = {until:g}; is it singular?"
                self.y, self.t = states[:, 0], self.t_bound
                return True, None
            with torch.no_grad():
                u = torch.from_numpy(np.ascontiguousarray(self.y))
                new = solver.step(u, self.t, parameters=p).double().cpu().numpy()
            if not np.isfinite(new).all():
                return False, f"the state became non-finite at t = {self.t:g}"
            self.nfev += solver.scheme.rate_calls
            arrives = remaining <= solver.dt * (1 + 1e-9)
            self.y, self.t = new, self.t_bound if arrives else self.t + solver.dt
            return True, None

        def _dense_output_impl(self) -> Inside:
            return Inside(self.t_old, self.t, self.y_old)

    return Hybrid
