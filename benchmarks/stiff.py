"""Stiff kinetics: a batch of trajectories by Rosenbrock schemes, beside SciPy's Radau and diffrax's Kvaerno5.

Run ``python -m benchmarks.stiff --batch 10000``. Robertson's reaction to 1e11, HIRES, the Oregonator and
Pollution, each from random initial states. Schemes of this library are called with ``compile=True`` on the
CPU. The error is the largest difference from SciPy's Radau at 1e-10
over the first trajectories of the batch, relative to the largest value of each component at the end. SciPy
solves some trajectories in a loop, and diffrax some under vmap, compiled before they are timed; both times
are scaled to the batch. With JAX, SciPy's rate and Jacobian are compiled by it.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

import attractor as at
from attractor import systems
from attractor.ode.jax_rates import jax_rate
from benchmarks.results import save

SYSTEMS = {
    "Robertson": systems.Robertson(),
    "HIRES": systems.HIRES(),
    "Oregonator": systems.Oregonator(),
    "Pollution": systems.Pollution(),
}
SCHEMES = ("rodas4", "rodas5p")
RTOL = (1e-4, 1e-6)
SHARE = 1e-3  # absolute tolerance, relative to rtol times the value of a component at the end
REFERENCE = 1e-10
CHECKED = 2  # trajectories on which errors are measured
LOOPED = 5  # trajectories that SciPy solves at most, for each tolerance
MAPPED = 100  # trajectories that diffrax solves at most
MOST_STEPS = 10_000  # of diffrax
REPEATS = 3  # timings, of which the least counts
LONG = 5.0  # seconds, after which a call is not repeated


class Problem:
    """A system with a batch of initial states, its true final states, and tolerances per component."""

    def __init__(self, name: str, batch: int) -> None:
        self.system, self.batch = SYSTEMS[name], batch
        self.t_end = self.system.END
        self.u0 = self.system.sample(batch, torch.Generator().manual_seed(0), torch.float64)
        self.rate, self.jacobian = numpy_functions(self.system, self.u0)
        published = torch.tensor(self.system.START, dtype=torch.float64)
        reference = torch.tensor(self.system.REFERENCE, dtype=torch.float64)
        self.sizes = reference.abs().clamp(min=1e-20)
        self.published = self.relative(self.radau(published, REFERENCE)["final"] - reference).item()
        truth = [self.radau(u, REFERENCE)["final"] for u in self.u0[:CHECKED]]
        self.truth = torch.stack(truth)
        self.sizes = self.truth.abs().amax(0).clamp(min=1e-20)

    def atol(self, rtol: float) -> np.ndarray:
        """Return absolute tolerances [d]; intermediate states of Robertson are larger than the last."""
        return (SHARE * rtol * self.sizes.clamp(min=1e-12)).numpy()

    def relative(self, difference: Tensor) -> Tensor:
        """Return the largest error of a component, relative to its size."""
        return (difference.abs() / self.sizes).max()

    def error(self, final: Tensor) -> float:
        """Return the error of final states ``[batch, d]``."""
        checked = final[:CHECKED]
        return self.relative(checked - self.truth[: len(checked)]).item()

    def radau(self, u0: Tensor, rtol: float) -> dict[str, Any]:
        """Solve for one trajectory by SciPy."""
        solved = solve_ivp(
            self.rate, (0.0, self.t_end), u0.numpy(), "Radau", rtol=rtol, atol=self.atol(rtol),
            jac=self.jacobian,
        )  # fmt: skip
        return {"final": torch.from_numpy(solved.y[:, -1]), "steps": len(solved.t) - 1,
                "rate_calls": solved.nfev, "jacobians": solved.njev}  # fmt: skip

    def scipy(self, rtol: float) -> dict[str, Any]:
        """Solve for some trajectories in a loop."""
        count = min(self.batch, LOOPED)
        began = time.perf_counter()
        solved = [self.radau(u, rtol) for u in self.u0[:count]]
        seconds = time.perf_counter() - began
        mean = lambda key: sum(x[key] for x in solved) / count
        return {"error": self.error(torch.stack([x["final"] for x in solved])), "trajectories": count,
                "seconds": seconds * self.batch / count, "steps": mean("steps"),
                "rate_calls": mean("rate_calls"), "jacobians": mean("jacobians")}  # fmt: skip

    def attractor(self, scheme: str, rtol: float) -> dict[str, Any]:
        """Solve for the batch by a scheme of this library."""
        atol = torch.from_numpy(self.atol(rtol))
        solve = lambda: at.evolve(
            self.system, self.u0, [0.0, self.t_end], scheme, rtol=rtol, atol=atol, compile=True
        )
        with torch.no_grad():
            began = time.perf_counter()
            solve()
            first = time.perf_counter() - began
            solved, seconds = timed(solve)
        stats = solved.stats
        return {"error": self.error(solved.final), "seconds": seconds, "first_call": first,
                "ok": bool(solved.ok.all()), "rounds": stats.steps, "rate_calls": stats.rate_calls,
                "steps": stats.accepted.double().mean().item(),
                "rejected": stats.rejected.double().mean().item()}  # fmt: skip

    def diffrax(self, rtol: float) -> dict[str, Any]:
        """Solve for the batch by Kvaerno5 under vmap."""
        import diffrax
        import jax

        jax.config.update("jax_enable_x64", True)
        rate = jax_rate(self.system, self.u0[:1])
        term = diffrax.ODETerm(lambda t, u, args: rate(t, u[None], args)[0])
        control = diffrax.PIDController(rtol, jax.numpy.asarray(self.atol(rtol)))

        def one(u0: Any) -> Any:
            solution = diffrax.diffeqsolve(
                term, diffrax.Kvaerno5(), 0.0, self.t_end, None, u0, saveat=diffrax.SaveAt(t1=True),
                stepsize_controller=control, max_steps=MOST_STEPS, throw=False,
            )  # fmt: skip
            done = solution.result == diffrax.RESULTS.successful
            stats = solution.stats
            return solution.ys[0], done, stats["num_accepted_steps"], stats["num_rejected_steps"]

        count = min(self.batch, MAPPED)
        many, start = jax.jit(jax.vmap(one)), self.u0[:count].numpy()
        began = time.perf_counter()
        jax.block_until_ready(many(start))
        first = time.perf_counter() - began
        (final, done, accepted, rejected), seconds = timed(lambda: jax.block_until_ready(many(start)))
        return {"error": self.error(torch.from_numpy(np.array(final))), "trajectories": count,
                "seconds": seconds * self.batch / count, "first_call": first, "ok": bool(np.all(done)), "steps": float(np.mean(accepted)),
                "rejected": float(np.mean(rejected))}  # fmt: skip


def numpy_functions(system: Any, u0: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the rate of an autonomous system and its Jacobian for NumPy's arrays."""
    if importlib.util.find_spec("diffrax"):
        import jax

        jax.config.update("jax_enable_x64", True)
        translated = jax_rate(system, u0[:1])
        rate = lambda u: translated(0.0, u[None], None)[0]
        compiled = jax.jit(rate), jax.jit(jax.jacfwd(rate))
        return tuple(lambda t, u, f=f: np.asarray(f(u)) for f in compiled)  # type: ignore[return-value]
    of_torch = torch.func.jacrev(lambda u: system(0.0, u))
    return (
        lambda t, u: system(t, torch.from_numpy(u.copy())).numpy(),
        lambda t, u: of_torch(torch.from_numpy(u.copy())).numpy(),
    )


def timed(solve: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call returns, and the least of its durations."""
    seconds = list[float]()
    while len(seconds) < REPEATS and sum(seconds) < LONG:
        began = time.perf_counter()
        result = solve()
        seconds.append(time.perf_counter() - began)
    return result, min(seconds)


def measure(name: str, batch: int) -> list[dict[str, Any]]:
    """Return the rows of a system."""
    problem, rows = Problem(name, batch), []

    def add(solver: str, rtol: float, result: dict[str, Any]) -> None:
        row = {"system": name, "solver": solver, "rtol": rtol, "batch": batch, **result}
        rows.append({**row, "reference_difference": problem.published})
        print(f"{name:11} {solver:18} {rtol:7.0e} {row['error']:9.1e} {row['steps']:8.0f} "
              f"{row['seconds']:9.3f} s", flush=True)  # fmt: skip

    for rtol in RTOL:
        for scheme in SCHEMES:
            add(scheme, rtol, problem.attractor(scheme, rtol))
        add("SciPy Radau", rtol, problem.scipy(rtol))
        if importlib.util.find_spec("diffrax"):
            add("diffrax Kvaerno5", rtol, problem.diffrax(rtol))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--batch", type=int, default=20)
    options = parser.parse_args()
    rows = [row for name in options.only for row in measure(name, options.batch)]
    counts = {"checked": CHECKED, "looped": LOOPED, "mapped": MAPPED, "most_steps": MOST_STEPS}
    save("stiff", {"batch": options.batch, **counts, "rows": rows})


if __name__ == "__main__":
    main()
