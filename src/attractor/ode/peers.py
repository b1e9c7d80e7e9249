"""Solvers with error control, ours and those of other libraries, with one call for all of them."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from attractor.core import evolve
from attractor.core.rates import Rate
from attractor.core.step import with_parameters
from attractor.ode.jax_rates import jax_rate as translated

# (tolerance, times [n+1]) -> states [n+1, batch, d] and the number of rate calls
Solve: TypeAlias = Callable[[float, Tensor], tuple[Tensor, int]]


def with_error_control(
    rate: Rate,
    u0: Tensor,
    parameters: Tensor | None,
    jax_rate: Callable[..., Any] | None,
    progress: Callable[[str], None],
) -> dict[str, Solve]:
    """Return the solvers that are installed, by name. All take the batch u0 ``[batch, d]`` as one state.

    Args:
        parameters: Parameters ``[batch, k]`` of a rate ``(t, u, p)``, or None.
        jax_rate: ``(t, u, args) -> du`` in JAX, for diffrax; None translates the rate.
        progress: Called with a message for each library that is not installed.
    """
    solvers: dict[str, Solve] = {"dopri5, own steps": _ours(rate, u0, parameters)}
    try:
        import scipy.integrate  # noqa: F401
    except ImportError:
        progress("SciPy is not installed: left out")
    else:
        solvers["SciPy DOP853"] = _scipy(rate, u0, parameters)
    try:
        import torchdiffeq  # noqa: F401
    except ImportError:
        progress("torchdiffeq is not installed: left out")
    else:
        solvers["torchdiffeq dopri5"] = _torchdiffeq(rate, u0, parameters)
    try:
        import diffrax  # noqa: F401
    except ImportError:
        progress("diffrax is not installed: left out")
    else:
        try:
            solvers["diffrax Tsit5"] = _Diffrax(
                jax_rate or translated(rate, u0, parameters), u0, parameters
            )
        except NotImplementedError as reason:
            progress(f"diffrax is left out, since the rate cannot be translated to JAX: {reason}")
    return solvers


def _ours(rate: Rate, u0: Tensor, parameters: Tensor | None) -> Solve:
    def solve(tolerance: float, t: Tensor) -> tuple[Tensor, int]:
        atol = 1e-2 * tolerance
        solved = evolve(rate, u0, t, "dopri5", parameters=parameters, rtol=tolerance, atol=atol)
        return solved.u, solved.stats.rate_calls

    return solve


def _scipy(rate: Rate, u0: Tensor, parameters: Tensor | None) -> Solve:
    from scipy.integrate import solve_ivp

    bound = with_parameters(rate, None if parameters is None else parameters.double().cpu())

    def of_numpy(t: float, y: np.ndarray) -> np.ndarray:
        u = torch.from_numpy(y).reshape(u0.shape)
        return bound(torch.tensor(t, dtype=torch.float64), u).reshape(-1).numpy()

    def solve(tolerance: float, t: Tensor) -> tuple[Tensor, int]:
        start, when = u0.double().cpu().numpy().ravel(), t.cpu().numpy()
        options = {"rtol": max(tolerance, 3e-14), "atol": 1e-2 * tolerance, "t_eval": when}
        solved = solve_ivp(of_numpy, (when[0], when[-1]), start, "DOP853", **options)
        if not solved.success:
            raise FloatingPointError(solved.message)
        return torch.from_numpy(solved.y.T.reshape(-1, *u0.shape)), int(solved.nfev)

    return solve


def _torchdiffeq(rate: Rate, u0: Tensor, parameters: Tensor | None) -> Solve:
    import torchdiffeq

    bound = with_parameters(rate, parameters)

    def solve(tolerance: float, t: Tensor) -> tuple[Tensor, int]:
        calls = 0

        def counted(t: Tensor, u: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return bound(t, u)

        return torchdiffeq.odeint(counted, u0, t, rtol=tolerance, atol=1e-2 * tolerance), calls

    return solve


class _Diffrax:
    """Tsit5 with error control, compiled by JAX for each tolerance and set of times."""

    def __init__(self, rate: Callable[..., Any], u0: Tensor, parameters: Tensor | None) -> None:
        import diffrax
        import jax

        jax.config.update("jax_enable_x64", True)

        def solve(u0: Any, times: Any, tolerance: float) -> Any:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(rate), diffrax.Tsit5(), times[0], times[-1], 1e-3, u0, args,
                saveat=diffrax.SaveAt(ts=times), max_steps=1_000_000,
                stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=1e-2 * tolerance),
            )  # fmt: skip

        args = None if parameters is None else jax.numpy.asarray(parameters.cpu().numpy())
        self.solve, self.u0 = jax.jit(solve), u0.cpu().numpy()

    def __call__(self, tolerance: float, t: Tensor) -> tuple[Tensor, int]:
        solved = self.solve(self.u0, t.cpu().numpy(), tolerance)
        states = torch.from_numpy(np.array(solved.ys))
        return states, 6 * int(solved.stats["num_steps"])  # Tsit5 has six stages a step
