"""Time stepping, which solvers, residual networks and PDE attention share.

A *state* is one tensor whose last dimension is the state's own and whose leading dimensions are a
batch of independent trajectories. A *rate* is any callable ``(t, u) -> du/dt``. A *scheme* turns a
rate into a slope ``S``, so that a plain step is ``u + dt * S``; a *correction* is added to it.

>>> import torch
>>> from attractor.core import evolve
>>> trajectory = evolve(lambda t, u: -u, torch.ones(3, 1), torch.linspace(0, 1, 11), "rk4")
>>> trajectory.u.shape, trajectory.ok.all().item(), trajectory.stats.rate_calls
(torch.Size([11, 3, 1]), True, 40)

This folder imports torch and `attractor.common`, and nothing else of the library.
"""

from types import ModuleType

from attractor.common.lazy import submodule
from attractor.core import stiffness, tableaus
from attractor.core.evolve import evolve
from attractor.core.odeint import odeint, odeint_adjoint, odeint_event
from attractor.core.rosenbrock import Rosenbrock
from attractor.core.scheme import Scheme
from attractor.core.splitting import Splitting
from attractor.core.tableaus import get_scheme
from attractor.core.trajectory import Stats, Status, Trajectory

__all__ = [
    "Rosenbrock",
    "Scheme",
    "Splitting",
    "Stats",
    "Status",
    "Trajectory",
    "evolve",
    "get_scheme",
    "odeint",
    "odeint_adjoint",
    "odeint_event",
    "stiffness",
    "tableaus",
]


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name)
