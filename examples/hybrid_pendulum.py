# %% [markdown]
"""Learn the error of a big step: an elastic pendulum, plain and corrected."""

# %%
import torch

import attractor as at

pendulum = at.systems.ElasticPendulum()
u0 = pendulum.sample(20, torch.Generator().manual_seed(1), torch.float64)
t = torch.arange(0, 51, dtype=torch.float64) * 0.1
truth = at.evolve(pendulum, u0, t, "dopri5", rtol=1e-10, atol=1e-12)

# %% [markdown]
# The error of a plain step is the same function of the state at every visit. `fit` learns it by least squares, from
# fine trajectories, in seconds.

# %%
solver = at.fit(
    pendulum, dt=0.1, horizon=5.0, trajectories=60, width=128, correction="attns", fine_dt=0.01
)
print(solver)
for name, solved in {
    "rk4": at.evolve(pendulum, u0, t, "rk4"),
    "corrected": solver.solve(u0, 5.0),
}.items():
    print(f"{name:9} mean square error {(solved.u - truth.u).square().mean():.1e}")

# %% [markdown]
# Does it pay? `at.compare(solver, horizon=10.0).verdict` measures it on your machine, against other solvers, too.
