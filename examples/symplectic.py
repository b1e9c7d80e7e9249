"""Energy over a long time: leapfrog against rk4 on Hénon-Heiles."""

import torch

import attractor as at

system = at.systems.HenonHeiles()
u0 = system.sample(10, torch.Generator().manual_seed(0), torch.float64)
t = torch.arange(0, 5001, dtype=torch.float64) * 0.3
for scheme in ("leapfrog", "yoshida4", "rk4"):
    with torch.no_grad():
        solved = at.evolve(system, u0, t, scheme, every=100)
    error = ((system.energy(solved.u) - system.energy(u0)) / system.energy(u0)).abs().amax(-1)
    print(
        f"{scheme:9} largest energy error: first tenth {error[:6].max():.1e}, last tenth {error[-5:].max():.1e}"
    )
