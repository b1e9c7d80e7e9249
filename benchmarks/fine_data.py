"""Fine data on a GPU: one kernel for all substeps, beside the step loop as it is and compiled, and diffrax.

    python -m benchmarks.fine_data

What a correction learns from: states every 0.1, by 16 steps of dopri5 between them, in float64. All take
the same steps; diffrax with constant ones (jit, vmap). Seconds of a call, the median of three after a first
one, whose own time, with compiling, is told too.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attractor import systems
from attractor.core import evolve
from attractor.ode import fused
from attractor.ode.jax_rates import jax_rate
from attractor.ode.trajectories import fine_trajectories
from benchmarks.results import save

DT, SUBSTEPS, ROUNDS = 0.1, 16, 3
CASES = {"elastic": systems.ElasticPendulum(), "2-link": systems.PendulumChain(2)}


def diffrax_of(system: Any, u0: Tensor, steps: int) -> Callable[[], Tensor]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import diffrax
    import jax
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    term, times = diffrax.ODETerm(jax_rate(system, u0[0])), np.arange(steps + 1) * DT
    start = jax.device_put(u0.cpu().numpy())

    def solve(y: Any) -> Any:
        return diffrax.diffeqsolve(
            term, diffrax.Dopri5(), 0.0, steps * DT, DT / SUBSTEPS, y, max_steps=steps * SUBSTEPS + 8,
            saveat=diffrax.SaveAt(ts=times), stepsize_controller=diffrax.ConstantStepSize(), throw=False,
        ).ys  # fmt: skip

    whole = jax.jit(jax.vmap(solve, out_axes=1))
    return lambda: torch.from_numpy(np.array(whole(start).block_until_ready()))


def contenders(system: Any, u0: Tensor, steps: int) -> dict[str, Callable[[], Tensor]]:
    """Calls that give states ``[steps + 1, n, d]``."""
    grid = torch.arange(steps * SUBSTEPS + 1, dtype=torch.float64, device=u0.device) * (DT / SUBSTEPS)

    def loop(compile: bool) -> Tensor:
        with torch.no_grad():
            return evolve(system, u0, grid, "dopri5", every=SUBSTEPS, compile=compile).u

    return {
        "kernel": lambda: fine_trajectories(system, u0, DT, steps, SUBSTEPS),
        "loop": lambda: loop(False),
        "loop, compiled": lambda: loop(True),
        "diffrax": diffrax_of(system, u0, steps),
    }


def clock(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    out = call()
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, out


def measured(name: str, n: int, steps: int, device: str) -> dict[str, Any]:
    """Seconds of everybody, and how far their states are from the loop's."""
    system, row = CASES[name], {"case": name, "trajectories": n, "steps": steps}
    u0 = system.sample(n, torch.Generator().manual_seed(0), torch.float64).to(device)
    calls = contenders(system, u0, steps)
    first, states = {}, {}
    for who, call in calls.items():
        first[who], states[who] = clock(call)
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(ROUNDS):
        for who, call in calls.items():
            times[who].append(clock(call)[0])
    truth = states["loop"].cpu()
    row["seconds"] = {who: statistics.median(found) for who, found in times.items()}
    row["first"] = first
    row["off"] = {who: (found.cpu() - truth).abs().max().item() for who, found in states.items()}
    row["over kernel"] = {who: t / row["seconds"]["kernel"] for who, t in row["seconds"].items()}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, nargs="+", default=[2_000, 20_000])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not (torch.cuda.is_available() and fused.TRITON):
        raise SystemExit("this needs a CUDA device and Triton; --device cpu runs without the kernel")
    rows = [measured(case, n, args.steps, args.device) for case in CASES for n in args.trajectories]
    if args.device == "cuda":
        save("fine_data", {"device": torch.cuda.get_device_name(), "rows": rows})


if __name__ == "__main__":
    main()
