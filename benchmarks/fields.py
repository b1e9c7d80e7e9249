"""Corrections of fields: error against time of a coarse corrected grid, and of plain grids up to 8 times finer.

The viscous Burgers equation, with the exact solution of Cole and Hopf. Hybrid solvers of 32 and 64 cells are
fitted to trajectories of 256 cells with values of order 4 at the faces. Plain schemes of order 2 and 4 in
space take the fewest steps that leave the error of their grid. All solvers are compiled, and all solve the
same initial states, which no fit has seen, in one thread.
"""

import math
import time
from functools import partial

import torch
from torch import Tensor

import attractor as at
from attractor.ode.systems import Burgers
from benchmarks.results import save

F64 = {"dtype": torch.float64}
HORIZON, VISCOSITY = 2.0, 0.05
BATCHES = (1, 100)
FINE = 256  # cells of the reference
TRAJECTORIES = 96  # that a fit learns from
HYBRIDS = [  # cells, step, radius, degree
    (32, 1 / 16, 2, 3), (32, 1 / 16, 2, 5), (64, 1 / 32, 2, 3), (64, 1 / 32, 2, 4), (64, 1 / 32, 2, 5),
    (64, 1 / 32, 3, 4),
]  # fmt: skip
CELLS = {2: (32, 64, 128, 256, 512), 4: (32, 64, 96, 128, 192, 256)}  # by order in space
PLAIN = [(cells, order) for order in CELLS for cells in CELLS[order]]
SCHEMES = ("rk4", "dop853")
SLACK = 1.1  # by which steps may exceed the error of the grid


def exact(system: Burgers, draws: Tensor, t: float) -> Tensor:
    """Return the means ``[n, cells]`` at time t of initial states with these draws ``[n, 8]``.

    By the transform of Cole and Hopf, ``u = -2 nu (log phi)_x``: a mean is a difference of ``log phi`` at
    the faces, and phi the convolution of its initial values with a Gaussian, by the trapezoidal rule.
    """
    nu, length = system.viscosity, system.length
    number = torch.arange(1, draws.shape[-1] // 2 + 1, **F64)
    k = 2 * math.pi / length * number[:, None]
    y = torch.linspace(-length, 2 * length, 12_001, **F64)[:-1]
    cosine, sine = (draws / number.repeat(2) / math.sqrt(2)).chunk(2, -1)
    integral = cosine @ ((k * y).sin() / k) - sine @ ((k * y).cos() / k)
    faces = torch.linspace(0, length, system.cells + 1, **F64)
    gaussian = -((faces[:, None] - y) ** 2) / (4 * nu * t)
    rows = [(gaussian - row / (2 * nu)).logsumexp(-1) for row in integral]
    return -2 * nu * torch.stack(rows).diff(dim=-1) * system.cells / length


def relative_error(u: Tensor, truth: Tensor) -> float:
    """Return the median over trajectories of the relative error of final fields."""
    return ((u - truth).norm(dim=-1) / truth.norm(dim=-1)).median().item()


def seconds(call, rounds: int = 5) -> float:
    """Return the least CPU time of a few calls, after one that compiles, which needs no quiet machine."""
    call()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def sampled(system: Burgers, n: int, seed: int = 1_000) -> tuple[Tensor, Tensor]:
    """Return initial states, and what they were drawn from."""
    u = system.sample(n, torch.Generator().manual_seed(seed), torch.float64)
    return u, torch.randn(n, 8, generator=torch.Generator().manual_seed(seed), **F64)


def fewest_steps(system: Burgers, scheme: str, u: Tensor, truth: Tensor, floor: float) -> int:
    """Return the fewest steps whose error is that of the grid, up to `SLACK`."""
    count, good = 16, None
    while good is None or count < good:
        t = torch.linspace(0, HORIZON, count + 1, **F64)
        solved = at.evolve(system, u, t, scheme, every=count)
        if bool(solved.ok.all()) and relative_error(solved.final, truth) <= SLACK * floor:
            return count
        count = math.ceil(1.25 * count)
    return good


def plain(cells: int, order: int) -> dict:
    """Return the error of a plain grid and the least time in which a scheme reaches it."""
    system = Burgers(cells, VISCOSITY, order=order)
    u, draws = sampled(system, max(BATCHES))
    truth = exact(system, draws, HORIZON)
    few, t = slice(0, 20), torch.tensor([0.0, HORIZON], **F64)
    tight = at.evolve(system, u[few], t, "dop853", rtol=1e-8, atol=1e-8, compile=True).final
    floor = relative_error(tight, truth[few])
    row = {"cells": cells, "order": order, "error": floor, "schemes": {}}
    for scheme in SCHEMES:
        count = fewest_steps(system, scheme, u[few], truth[few], floor)
        grid = torch.linspace(0, HORIZON, count + 1, **F64)
        solve = partial(at.evolve, system, t=grid, scheme=scheme, every=count, compile=True)
        times = {n: seconds(partial(solve, u0=u[:n])) for n in BATCHES}
        error = relative_error(solve(u0=u).final, truth)
        row["schemes"][scheme] = {"steps": count, "error": error, "seconds": times}
    return row


def hybrid(cells: int, dt: float, radius: int, degree: int) -> dict:
    """Return the error and the time of a hybrid solver, and what its fit took."""
    coarse, fine = Burgers(cells, VISCOSITY), Burgers(FINE, VISCOSITY, order=4)
    start = time.perf_counter()
    solver = at.fit(
        coarse, reference=fine, dt=dt, horizon=HORIZON, scheme="identity", trajectories=TRAJECTORIES,
        options={"radius": radius, "degree": degree}, fine_dt=1 / 256,
    )  # fmt: skip
    fitted = time.perf_counter() - start
    u, draws = sampled(coarse, max(BATCHES))
    truth = exact(coarse, draws, HORIZON)
    solve = partial(solver.solve, t_end=HORIZON, every=round(HORIZON / dt), compile=True)
    solved = solve(u0=u)
    return {
        "cells": cells, "dt": dt, "radius": radius, "degree": degree, "fit_seconds": fitted,
        "error": relative_error(solved.final, truth), "left": int((solved.status != 0).sum()),
        "mean_drift": (solved.final.mean(-1) - u.mean(-1)).abs().max().item(),
        "seconds": {n: seconds(partial(solve, u0=u[:n])) for n in BATCHES},
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    rows = {"plain": [], "hybrid": []}
    for kind, cases, measure in (("plain", PLAIN, plain), ("hybrid", HYBRIDS, hybrid)):
        for case in cases:
            rows[kind].append(measure(*case))
            print(kind, rows[kind][-1], flush=True)
    save("fields", {"horizon": HORIZON, "viscosity": VISCOSITY, "trajectories": TRAJECTORIES, **rows})


if __name__ == "__main__":
    main()
