"""Adaptive solves beside torchdiffeq and SciPy, on one torch rate.

    python -m benchmarks.gradients_ode
    python -m benchmarks.gradients_ode --scipy
    python -m benchmarks.gradients_ode --save

Against torchdiffeq: a neural ODE with "dopri5" and "bosh3" at equal tolerances, forward, and forward with a
backward pass, by `odeint` and `odeint_adjoint`. Against SciPy's DOP853: Kepler orbits by `odeint` and by
`evolve`, which gives each orbit its own steps, also with ``compile=True``. Everyone runs once per round; times are medians of rounds, and
each ratio is the peer's time over ours in the same rounds. --save writes the results; use a quiet machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attractor as at
from benchmarks.results import save

ROUNDS = 9
F64: Any = dict(dtype=torch.float64)


def medians(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median time of each call in milliseconds; all are called once per round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


class Field(torch.nn.Module):
    """The neural ODE of torchdiffeq's example: a small network of the cubes of the state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = torch.nn.Linear(2, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2)
        self.net = torch.nn.Sequential(*layers).double()
        self.calls = 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the rate, and count the call."""
        self.calls += 1
        result: Tensor = self.net(y**3)
        return result


def beside_torchdiffeq(method: str, interface: str) -> dict[str, Any]:
    """Times of one method in both libraries, forward alone and with a backward pass."""
    import torchdiffeq

    torch.manual_seed(1)
    y0, t = 2 * torch.rand(20, 2, **F64), torch.linspace(0, 5, 20, **F64)

    def solve(library: Any, backward: bool) -> Field:
        field = Field()
        with torch.set_grad_enabled(backward):
            y = getattr(library, interface)(field, y0, t, method=method, rtol=1e-6, atol=1e-8)
        if backward:
            y.square().mean().backward()
        return field

    row: dict[str, Any] = {"method": method, "interface": interface}
    for name, backward in (("forward", False), ("backward", True)):
        found = medians(
            {
                "ours": lambda backward=backward: solve(at, backward),  # type: ignore[misc]
                "theirs": lambda backward=backward: solve(torchdiffeq, backward),  # type: ignore[misc]
            }
        )
        row[name] = {**found, "ratio": found["theirs"] / found["ours"]}
        row[name]["calls"] = [solve(library, backward).calls for library in (at, torchdiffeq)]
    return row


def kepler(t: Any, u: Tensor) -> Tensor:
    """Rate of plane orbits around a fixed mass."""
    x, y, vx, vy = u.unbind(-1)
    pull = (x * x + y * y) ** -1.5
    return torch.stack((vx, vy, -x * pull, -y * pull), -1)


def beside_scipy(batch: int, tolerance: float, end: float = 10.0) -> dict[str, Any]:
    """Times and errors of DOP853 for a batch of orbits with eccentricities from 0.1 to 0.5.

    `odeint` and `evolve` run at the tolerance. SciPy runs at it too, and at the largest tolerance at which its
    error is not larger than that of `evolve` ("scipy, equal error").
    """
    from scipy.integrate import solve_ivp

    e = torch.linspace(0.1, 0.5, batch, **F64)
    u0 = torch.stack((1 - e, 0 * e, 0 * e, ((1 + e) / (1 - e)).sqrt()), -1)
    t = torch.tensor([0.0, end], **F64)

    def rate(t: float, y: Any) -> Any:
        return kepler(t, torch.from_numpy(y.reshape(batch, 4))).numpy().reshape(-1)

    def scipy(tolerance: float) -> Tensor:
        how: Any = dict(method="DOP853", rtol=tolerance, atol=tolerance)
        solved = solve_ivp(rate, (0.0, end), u0.numpy().reshape(-1), **how)
        return torch.from_numpy(solved.y[:, -1].reshape(batch, 4).copy())

    how: Any = dict(rtol=tolerance, atol=tolerance)
    calls: dict[str, Callable[[], Tensor]] = {
        "odeint": lambda: at.odeint(kepler, u0, t, method="dop853", **how)[-1],
        "evolve": lambda: at.evolve(kepler, u0, t, "dop853", **how).final,
        "evolve, compiled": lambda: at.evolve(kepler, u0, t, "dop853", compile=True, **how).final,
        "scipy": lambda: scipy(tolerance),
    }
    with torch.no_grad():
        torch.compiler.reset()  # or later batches run code that was compiled for any batch
        truth = at.evolve(kepler, u0, t, "dop853", rtol=1e-13, atol=1e-14).final
        error = lambda call: (call() - truth).abs().max().item()
        start = time.perf_counter()
        errors = {"evolve, compiled": error(calls["evolve, compiled"])}
        first = time.perf_counter() - start
        errors |= {name: error(call) for name, call in calls.items() if name not in errors}
        tolerances = [10 ** (-k / 4) for k in range(16, 49)]
        equal = next(x for x in tolerances if error(lambda x=x: scipy(x)) <= errors["evolve"])  # type: ignore[misc]
        calls["scipy, equal error"] = lambda: scipy(equal)
        errors["scipy, equal error"] = error(calls["scipy, equal error"])
        times = medians(calls, 5)
    ours = [name for name in calls if not name.startswith("scipy")]
    ratios = {name: times["scipy"] / times[name] for name in ours}
    at_equal = {name: times["scipy, equal error"] / times[name] for name in ours}
    return {"batch": batch, "tolerance": tolerance, "ms": times, "error": errors, "ratio": ratios,
            "ratio at equal error": at_equal, "scipy tolerance at equal error": equal,
            "seconds of the first compiled call": first}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="Write the results to benchmarks/results.")
    parser.add_argument("--scipy", action="store_true", help="Run only the comparison with SciPy.")
    options = parser.parse_args()
    if options.save and options.scipy:
        parser.error("--scipy leaves out results that --save would write; pass only one of them")
    torch.set_num_threads(1)
    ours = []
    for method in () if options.scipy else ("dopri5", "bosh3"):
        for interface in ("odeint", "odeint_adjoint"):
            ours.append(beside_torchdiffeq(method, interface))
            print(ours[-1], flush=True)
    orbits = []
    for batch in (1, 100, 10_000):
        orbits.append(beside_scipy(batch, 1e-7))
        print(orbits[-1], flush=True)
    if options.save:
        save("gradients_ode", {"torchdiffeq": ours, "scipy": orbits})


if __name__ == "__main__":
    main()
