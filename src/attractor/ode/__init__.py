"""The solver's wing: equations, and (in time) hybrid solvers that learn the error of a big step.

>>> import torch
>>> from attractor.core import evolve
>>> from attractor.ode import systems
>>> pendulum = systems.ElasticPendulum()
>>> u0 = pendulum.sample(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
>>> trajectory = evolve(pendulum, u0, torch.linspace(0, 10, 1001), "rk4", every=100)
>>> drift = pendulum.energy(trajectory.final) - pendulum.energy(u0)
>>> bool(drift.abs().max() < 1e-5)
True
"""

from attractor.ode import systems

__all__ = ["systems"]
