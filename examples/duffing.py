"""A double well, driven: your own equation from a file to a solver.

A mass between two magnets, shaken: chaotic, and it depends on the time. From the shell:

    attractor fit examples/duffing.py:rate
    attractor compare out/fit/solver --rate examples/duffing.py:rate
    attractor solve out/fit/solver --rate examples/duffing.py:rate

The command finds the rate, `sample`, and the suggestions below it; options override them.
"""

import math

import torch

dt = 0.2  # the big step
horizon = 10.0  # how far trajectories go
period = 2 * math.pi / 1.4  # the rate repeats after this time


def rate(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, x - x**3 - 0.1 * v + 0.35 * torch.cos(1.4 * t)), -1)


def sample(n, generator):
    """Initial states [n, 2]: anywhere in the wells or between them."""
    return 3 * torch.rand(n, 2, generator=generator, dtype=torch.float64) - 1.5


if __name__ == "__main__":
    import attractor as at

    solver = at.fit(
        rate, dt=dt, horizon=horizon, sample=sample, period=period, trajectories=200, width=256,
        fine_dt=0.02,
    )  # fmt: skip
    print(solver)
    u0 = sample(5, torch.Generator().manual_seed(1))
    print(solver.solve(u0, horizon))
