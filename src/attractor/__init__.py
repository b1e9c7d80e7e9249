"""attractor: attention as time stepping.

Three papers say the same thing in three places. In a numerical solver attention is a correction
computed from the slope; in a residual network it is a step size computed from the stiffness; in a
transformer it is a state that evolves in pseudo-time. This library is one vocabulary for all three.

>>> import torch
>>> import attractor as at
>>> pendulum = at.systems.PendulumChain(links=2)
>>> trajectory = at.evolve(pendulum, pendulum.sample(5), torch.linspace(0, 1, 101), "rk4")
>>> trajectory.u.shape
torch.Size([101, 5, 4])

`import attractor` loads nothing else; each name loads its module at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attractor.common.lazy import submodule
from attractor.common.views import register_pictures

if TYPE_CHECKING:  # the names that `__getattr__` below loads, for type checkers and editors
    from attractor import attention, data, integrations, jobs, ode, report, reproduce, residual, train
    from attractor.attention import pdes
    from attractor.attention.causality import CausalityError, assert_causal
    from attractor.attention.pde_attention import pde_attention
    from attractor.core import (
        Rosenbrock,
        Scheme,
        Splitting,
        Stats,
        Status,
        Trajectory,
        evolve,
        get_scheme,
        odeint,
        odeint_adjoint,
        odeint_event,
        stiffness,
    )
    from attractor.core import tableaus as schemes
    from attractor.ode import corrections, systems
    from attractor.ode.compare import compare
    from attractor.ode.fitting import fit
    from attractor.ode.shards import make_trajectories
    from attractor.ode.solver import HybridSolver
    from attractor.ode.tuning import TunedSolver, tune
    from attractor.residual import gates
    from attractor.residual.insert import insert_gates
    from attractor.residual.probing import probe
    from attractor.train.checkpoint import CheckpointError

__version__ = "0.1.0"

__all__ = [
    "CausalityError",
    "CheckpointError",
    "HybridSolver",
    "Rosenbrock",
    "Scheme",
    "Splitting",
    "Stats",
    "Status",
    "Trajectory",
    "TunedSolver",
    "assert_causal",
    "attention",
    "compare",
    "corrections",
    "data",
    "evolve",
    "fit",
    "gates",
    "get_scheme",
    "insert_gates",
    "integrations",
    "jobs",
    "make_trajectories",
    "ode",
    "odeint",
    "odeint_adjoint",
    "odeint_event",
    "pde_attention",
    "pdes",
    "probe",
    "report",
    "reproduce",
    "residual",
    "schemes",
    "stiffness",
    "systems",
    "train",
    "tune",
]

_LAZY = {  # name -> module, or module:name in it
    **{
        name: f"attractor.core:{name}"
        for name in (
            "Rosenbrock", "Scheme", "Splitting", "Stats", "Status", "Trajectory", "evolve", "get_scheme",
            "odeint", "odeint_adjoint", "odeint_event",
        )
    },
    "CausalityError": "attractor.attention.causality:CausalityError",
    "CheckpointError": "attractor.train.checkpoint:CheckpointError",
    "HybridSolver": "attractor.ode.solver:HybridSolver",
    "TunedSolver": "attractor.ode.tuning:TunedSolver",
    "assert_causal": "attractor.attention.causality:assert_causal",
    "attention": "attractor.attention",
    "compare": "attractor.ode.compare:compare",
    "corrections": "attractor.ode.corrections",
    "data": "attractor.data",
    "fit": "attractor.ode.fitting:fit",
    "gates": "attractor.residual.gates",
    "insert_gates": "attractor.residual.insert:insert_gates",
    "integrations": "attractor.integrations",
    "jobs": "attractor.jobs",
    "make_trajectories": "attractor.ode.shards:make_trajectories",
    "ode": "attractor.ode",
    "pde_attention": "attractor.attention.pde_attention:pde_attention",
    "pdes": "attractor.attention.pdes",
    "probe": "attractor.residual.probing:probe",
    "report": "attractor.report",
    "reproduce": "attractor.reproduce",
    "residual": "attractor.residual",
    "schemes": "attractor.core.tableaus",
    "stiffness": "attractor.core.stiffness",
    "systems": "attractor.ode.systems",
    "train": "attractor.train",
    "tune": "attractor.ode.tuning:tune",
}  # fmt: skip


def _figures() -> Any:
    import attractor.report.figures

    return attractor.report.figures


def _stiffness_figures() -> Any:
    import attractor.report.stiffness

    return attractor.report.stiffness


register_pictures("figures", _figures)
register_pictures("stiffness", _stiffness_figures)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, _, inside = _LAZY[name].partition(":")
        value = getattr(import_module(module), inside) if inside else import_module(module)
        globals()[name] = value  # the next use does not come here
        return value
    return submodule(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
