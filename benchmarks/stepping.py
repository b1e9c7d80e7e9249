"""1,000 elastic pendulums, 1,000 steps of rk4 in float32 on the CPU, beside its peers.

Every contender returns the final states only and uses all threads. One warm-up run each, then
rounds in which everyone runs once; medians are reported.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

from attractor import evolve, odeint, systems
from attractor.ode.jax_rates import jax_rate
from benchmarks.results import save

BATCH, STEPS, DT, ROUNDS = 1_000, 1_000, 0.1, 9
SYSTEM = systems.ElasticPendulum()


def contenders(u0: torch.Tensor) -> dict[str, Callable[[], np.ndarray]]:
    t = torch.linspace(0, STEPS * DT, STEPS + 1, dtype=torch.float64)
    ends = torch.tensor([0.0, STEPS * DT])
    found: dict[str, Callable[[], np.ndarray]] = {
        "attractor eager": lambda: evolve(SYSTEM, u0, t, "rk4", every=STEPS).final.numpy(),
        "attractor compiled": lambda: evolve(
            SYSTEM, u0, t, "rk4", every=STEPS, compile=True
        ).final.numpy(),
        "attractor odeint": lambda: odeint(SYSTEM, u0, ends, method="rk4", options={"step_size": DT})[
            -1
        ].numpy(),
    }
    try:
        import torchdiffeq

        found["torchdiffeq"] = lambda: torchdiffeq.odeint(
            SYSTEM, u0, ends, method="rk4", options={"step_size": DT}
        )[-1].numpy()
    except ImportError:
        print("torchdiffeq is not installed: left out")
    try:
        found |= _diffrax(u0.numpy())
    except ImportError:
        print("diffrax is not installed: left out")
    return found


def _diffrax(u0: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    import diffrax
    import jax

    class RK4(diffrax.AbstractERK):
        tableau = diffrax.ButcherTableau(
            a_lower=(np.array([0.5]), np.array([0, 0.5]), np.array([0, 0, 1.0])),
            b_sol=np.array([1 / 6, 1 / 3, 1 / 3, 1 / 6]),
            b_error=np.zeros(4),
            c=np.array([0.5, 0.5, 1.0]),
        )
        interpolation_cls = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k

        def order(self, terms):
            return 4

    def solve(y):
        rate = jax_rate(SYSTEM, torch.zeros(y.shape) + SYSTEM.sample(1)[0])
        return diffrax.diffeqsolve(
            diffrax.ODETerm(rate), RK4(), 0.0, STEPS * DT, DT, y,
            saveat=diffrax.SaveAt(t1=True), stepsize_controller=diffrax.ConstantStepSize(),
            max_steps=STEPS + 10,
        ).ys[0]  # fmt: skip

    whole, mapped = jax.jit(solve), jax.jit(jax.vmap(solve))
    return {
        "diffrax, batch as one state": lambda: np.asarray(whole(u0)),
        "diffrax, vmap": lambda: np.asarray(mapped(u0)),
    }


def scipy_seconds(u0: torch.Tensor) -> float:
    """One trajectory with RK45 forced to steps of dt, times the batch."""
    from scipy.integrate import solve_ivp

    g, k, m, length = SYSTEM.g, SYSTEM.k, SYSTEM.m, SYSTEM.length

    def rate(t, u):
        theta, r, omega, v = u
        turn = (-g * np.sin(theta) - 2 * omega * v) / r
        return [omega, v, turn, r * omega**2 - k / m * (r - length) + g * np.cos(theta)]

    start = time.perf_counter()
    solve_ivp(rate, (0, STEPS * DT), u0[0].numpy(), "RK45", first_step=DT, max_step=DT, rtol=1, atol=1)
    return (time.perf_counter() - start) * BATCH


def peak_states(compile: bool) -> float:
    """Most memory alive at once beyond u0 and the result, in states, with every= at work.

    The rate is ``-u``, which has no temporaries of its own.
    """
    u0 = torch.rand(100_000, 4)
    t = torch.linspace(0, 1, 101)

    def solve() -> None:
        evolve(lambda t, u: -u, u0, t, "rk4", every=100, compile=compile)

    solve()
    with torch.profiler.profile(profile_memory=True) as profile:
        solve()
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    state = u0.numel() * u0.element_size()
    return peak / state - 2  # the result holds two states


def main() -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # a first call that is one
    torch.manual_seed(0)
    u0 = SYSTEM.sample(BATCH)
    with torch.no_grad():
        found = contenders(u0)
        first = {}
        ends = {}
        for name, run in found.items():
            start = time.perf_counter()
            ends[name] = run()
            first[name] = time.perf_counter() - start
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(ROUNDS):
            for name, run in found.items():
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
        memory = {"eager": peak_states(False), "compiled": peak_states(True)}
    seconds = {name: statistics.median(values) for name, values in times.items()}
    truth = evolve(
        SYSTEM, u0.double(), torch.linspace(0, STEPS * DT, STEPS + 1).double(), "rk4", every=STEPS
    )
    error = {
        name: float(np.sqrt(((end - truth.final.numpy()) ** 2).mean())) for name, end in ends.items()
    }
    peer = min((s for n, s in seconds.items() if n.startswith("diffrax")), default=None)
    print(f"{'':28} {'seconds':>8} {'first':>7} {'vs torchdiffeq':>14} {'from float64 rk4':>17}")
    for name, value in seconds.items():
        ratio = seconds["torchdiffeq"] / value if "torchdiffeq" in seconds else float("nan")
        print(f"{name:28} {value:8.4f} {first[name]:7.1f} {ratio:13.1f}x {error[name]:17.1e}")
    scipy = scipy_seconds(u0)
    print(f"{'scipy, one trajectory x 1000':28} {scipy:8.4f}")
    if peer is not None:
        print(f"compiled / fastest diffrax: {seconds['attractor compiled'] / peer:.2f}")
    print(f"peak memory beyond result, in states: {memory} (rk4: stages + 3 = 7)")
    save(
        "stepping",
        {"batch": BATCH, "steps": STEPS, "dtype": "float32", "seconds": seconds, "first_call": first,
         "rms_from_float64": error, "scipy_scaled": scipy, "peak_states": memory},
    )  # fmt: skip


if __name__ == "__main__":
    main()
