"""Does a hybrid solver pay? Error against work, beside plain schemes and other libraries' solvers.

Two numbers describe a hybrid solver. m is the number of plain steps of the same scheme (of rk4, where
there is none) that reach the error of one hybrid step; m* is the cost of a hybrid step in plain steps.
The hybrid beats its own scheme if and only if m > m*. It pays if it is also faster than every other
method at its error, in compiled code and for the number of trajectories that are solved at once.

>>> import attractor as at
>>> from attractor.ode.compare import compare
>>> solver = at.fit(at.systems.Logistic(growth=2.0), dt=0.5, horizon=4.0, width=16, trajectories=50)
>>> found = compare(solver, horizon=4.0, batch=20, schemes=("rk4",), compile=False, peers=False)
>>> found.hybrid.error < found.plain("rk4")[0].error
True
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attractor.common.checks import check_seed, check_tensor
from attractor.core import get_scheme
from attractor.ode.comparison import Comparison, Point, methods_of, reach
from attractor.ode.race import Race
from attractor.ode.samples import Sampler, initial_states, sampled_parameters
from attractor.ode.serialization import rate_to_json
from attractor.ode.solver import HybridSolver
from attractor.ode.substeps import enough_substeps, whole_steps
from attractor.ode.trajectories import fine_trajectories

__all__ = ["SCHEMES", "Comparison", "Point", "compare"]

SCHEMES = ("rk4", "dopri5", "dop853")  # plain schemes that a hybrid solver is compared with


def compare(
    solver: HybridSolver,
    *,
    horizon: float,
    u0: Tensor | None = None,
    batch: int = 1000,
    sample: Sampler | None = None,
    parameters: Sampler | Tensor | None = None,
    schemes: Sequence[str] = SCHEMES,
    compile: bool = True,
    peers: bool = True,
    jax_rate: Callable[..., Any] | None = None,
    seed: int = 1,
    progress: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Error against wall time and rate calls, everybody in one run on one machine.

    Plain schemes take steps of dt, dt/2, dt/4 ... until they are better than the hybrid, or if dt is
    enough of 2 dt, 4 dt ... as long as they are. Solvers with error control go through tolerances. All
    solve the same batch, in the dtype of the solver, and compute only the final states when timed. Plain
    schemes and the hybrid are compiled, and the hybrid is guarded, as in `HybridSolver.solve`; solvers
    of other libraries take the batch as one state, which is the fastest way to use them.

    Args:
        horizon: how far, a whole number of the solver's steps.
        u0: initial states ``[batch, d]``; None samples them with `sample`, or with the system's own,
            from a seed that a fit does not use.
        parameters: ``(n, generator=...) -> [n, k]`` parameters of an equation ``rate(t, u, p)``, one row
            per trajectory, as for `fit`; or the parameters themselves, ``[batch, k]`` beside u0.
        schemes: plain schemes beside the solver's own.
        compile: Whether plain schemes and the hybrid are compiled. False gives a quick answer about
            eager code, which decides nothing about compiled code.
        peers: also solvers with error control: ours, SciPy's, torchdiffeq's and diffrax's where
            installed.
        jax_rate: ``(t, u, args) -> du`` in JAX, for diffrax, which cannot call a rate in torch. `args`
            are the parameters, or None. By default the rate is translated, and diffrax is left out where
            that is not possible.
        progress: called with a line for each solve.

    Raises:
        ValueError: The solver loses trajectories, or was fitted with parameters and there are none.
    """
    steps = whole_steps(solver.dt, horizon)
    base = solver.plain_scheme
    rivals = [get_scheme(s) for s in schemes if s != base.name]
    check_seed(seed)
    cells, grid = (solver.history or [{}])[-1].get("cells"), getattr(solver.correction, "grid", None)
    if grid is not None and cells not in (None, grid.cells):
        raise ValueError(
            f"the solver corrects a grid of {grid.cells} cells towards one of {cells}, and compare "
            "measures errors on one grid; compare its solutions with restricted ones of the fine grid, "
            "as benchmarks/fields.py does"
        )
    generator = torch.Generator().manual_seed(seed + 2**40)
    if u0 is None:
        u0 = initial_states(solver.rate, sample, batch, generator)
    check_tensor("u0", u0, "[batch, d]")
    u0 = solver._converted(u0)
    if parameters is None and solver.parameter_count:
        raise ValueError(
            f"the solver was fitted to an equation with {solver.parameter_count} parameters; pass "
            "parameters=, a function (n, generator=...) -> [n, k], such as the one that fit was given"
        )
    if not isinstance(parameters, Tensor):
        parameters = sampled_parameters(parameters, len(u0), generator)
    p = solver._parameters(u0, parameters)
    progress("reference")
    own = None if p is None else p.double()
    enough = enough_substeps(solver.rate, u0.double(), solver.dt, steps, parameters=own)
    substeps = max(32, 2 * enough)
    truth = fine_trajectories(solver.rate, u0, solver.dt, steps, substeps, parameters=own)
    race = Race(solver, u0, p, truth, steps, compile, progress)
    with torch.no_grad():
        hybrid = race.hybrid(solver)
        if not math.isfinite(hybrid.error):
            raise ValueError(
                f"{solver} loses trajectories over horizon = {horizon:g}: nothing to compare"
            )
        points = [p for s in (base, *rivals) for p in race.refine(s, hybrid.error)]
        if peers:
            points += race.adaptive(jax_rate, hybrid.error)
    plain = [p for p in points if p.method == base.name]
    reached = reach(plain, hybrid.error)
    one = min(plain, key=lambda p: abs(p.setting - solver.dt))
    by_method = [reach([p for p in points if p.method == m], hybrid.error) for m in methods_of(points)]
    fastest = min((p for p in by_method if p is not None), key=lambda p: p.seconds, default=None)
    about = {
        "rate": rate_to_json(solver.rate), "scheme": solver.scheme.name, "dt": solver.dt,
        "correction": {"name": type(solver.correction).__name__, **_options(solver)},
        "horizon": horizon, "batch": len(u0), "dtype": str(u0.dtype).removeprefix("torch."),
        "device": str(u0.device), "threads": torch.get_num_threads(), "compiled": compile,
        "fit_seconds": solver.history[-1].get("seconds") if solver.history else None,
    }  # fmt: skip
    return Comparison(
        hybrid=hybrid,
        points=tuple(points),
        m=solver.dt / reached.setting if reached else math.inf,
        m_star=hybrid.seconds / one.seconds,
        rival=fastest,
        about=about,
    )


def _options(solver: HybridSolver) -> dict[str, Any]:
    config: Any = getattr(solver.correction, "config", {})
    return dict(config)
