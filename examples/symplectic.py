# %% [markdown]
"""Energy over a long time: leapfrog against rk4 on Hénon-Heiles."""

# %%
import torch

import attractor as at

system = at.systems.HenonHeiles()
u0 = system.sample(10, torch.Generator().manual_seed(0), torch.float64)
t = torch.arange(0, 2001, dtype=torch.float64) * 0.3

# %% [markdown]
# A symplectic step follows the exact flow of a nearby energy: its error swings and does not grow. That of rk4 is smaller at
# first, and grows.

# %%
for scheme in ("leapfrog", "yoshida4", "rk4"):
    with torch.no_grad():
        solved = at.evolve(system, u0, t, scheme, every=50)
    error = ((system.energy(solved.u) - system.energy(u0)) / system.energy(u0)).abs().amax(-1)
    print(
        f"{scheme:9} energy error: first tenth {error[:5].max():.1e}, last tenth {error[-4:].max():.1e}"
    )
