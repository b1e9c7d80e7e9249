"""The solver's wing: equations, and hybrid solvers that learn the error of a big step.

>>> import torch
>>> from attractor.core import evolve
>>> from attractor.ode import systems
>>> pendulum = systems.ElasticPendulum()
>>> u0 = pendulum.sample(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
>>> trajectory = evolve(pendulum, u0, torch.linspace(0, 10, 1001), "rk4", every=100)
>>> drift = pendulum.energy(trajectory.final) - pendulum.energy(u0)
>>> bool(drift.abs().max() < 1e-5)
True

>>> from attractor.ode import fit
>>> solver = fit(systems.Logistic(), dt=0.5, horizon=5.0, width=32, trajectories=100)
>>> u0 = solver.rate.sample(50, dtype=torch.float64)
>>> error = solver.solve(u0, 5.0).final - solver.rate.exact(torch.tensor([5.0]), u0)[0]
>>> bool(error.abs().max() < 1e-4)
True
"""

from types import ModuleType

from attractor.common.lazy import submodule
from attractor.ode import corrections, pretrained, systems
from attractor.ode.fine_data import FineData
from attractor.ode.fitting import fit
from attractor.ode.grids import Grid
from attractor.ode.recipes import Paper, Ridge
from attractor.ode.shards import make_trajectories
from attractor.ode.solver import HybridSolver
from attractor.ode.tuning import TunedSolver, tune

__all__ = [
    "FineData",
    "Grid",
    "HybridSolver",
    "Paper",
    "Ridge",
    "TunedSolver",
    "corrections",
    "fit",
    "make_trajectories",
    "pretrained",
    "systems",
    "tune",
]


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name)
