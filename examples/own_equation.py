# %% [markdown]
"""Your own equation: a forced Duffing oscillator, its error controlled, every trajectory apart."""

# %%
import torch

import attractor as at


def duffing(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, x - x**3 - 0.3 * v + 0.37 * torch.cos(1.2 * t)), -1)


# %% [markdown]
# Two hundred states at once. `rtol` asks for error control: each trajectory has a step size of its own.

# %%
u0 = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
t = torch.linspace(0, 50, 251, dtype=torch.float64)
solved = at.evolve(duffing, u0, t, "dopri5", rtol=1e-8, atol=1e-10)
print(solved)
print("in the right well at the end:", (solved.final[:, 0] > 0).sum().item(), "of 200")
print("steps, least and most:", solved.stats.accepted.min().item(), solved.stats.accepted.max().item())
