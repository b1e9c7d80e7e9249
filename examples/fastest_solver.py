# %% [markdown]
"""The fastest way to an error: a mass on a hardening spring, solved for many starting points."""

# %%
import torch

import attractor as at


def spring(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, -x - x**3), -1)


def sample(n, generator):
    return 2 * torch.rand(n, 2, generator=generator, dtype=torch.float64) - 1


# %% [markdown]
# `tune` tries schemes, step sizes, error control and hybrids, compiled and not, and measures all of them at the
# same error on trajectories that no fit has seen. The report has everything that was measured, the winner first.

# %%
solver = at.tune(spring, error=1e-6, horizon=20.0, sample=sample, batch=1000, budget=20)
print(solver.report)

# %% [markdown]
# For a spring without friction a polynomial of the state wins: it takes large steps and never calls the rate.

# %%
u0 = sample(1000, torch.Generator().manual_seed(1))
truth = at.evolve(spring, u0, [0.0, 20.0], "dop853", rtol=1e-11, atol=1e-13)
solved = solver.solve(u0, 20.0)
print("error on other trajectories:", (solved.final - truth.final).square().mean().sqrt().item())
print("calls of the rate:", solved.stats.rate_calls)
