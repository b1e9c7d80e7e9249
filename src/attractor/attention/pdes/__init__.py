"""The PDEs under which attention maps evolve in pseudo-time, one per file.

A PDE is a small frozen dataclass with five members: `linear` (a step is a matrix, so that the values
can be stepped instead of the map), `reach` (the number of neighbours that a step uses on either side),
``max_dt(axis)``, ``check(dt, axis)``, and ``step(u, velocity, line, dt)``, written with
``line.laplacian`` and ``line.gradient``. The `Line` contains the walls, and ``line.adjoint`` applies the
same steps to values. Coefficients are numbers, or tensors that broadcast as ``[heads, 1, 1]``.

>>> import torch
>>> row = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
>>> wall = torch.tensor([True, True, False, True])      # nothing passes between keys 2 and 3
>>> evolve(Diffusion(alpha=0.1), row, Line(open=wall), steps=2, dt=1.0)
tensor([0.0100, 0.1700, 0.8200, 0.0000, 0.0000])

Such a class can be defined anywhere, for example for fourth-order smoothing:

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Smoothing:
...     kappa: float = 0.02
...     linear = True
...     reach = 2
...
...     def max_dt(self, axis="key"):
...         return 1 / (32 if axis == "both" else 8) / self.kappa
...
...     def check(self, dt, axis="key"):
...         if dt > self.max_dt(axis):
...             raise ValueError(f"dt = {dt} is unstable; the limit is {self.max_dt(axis)}")
...
...     def step(self, u, velocity, line, dt):
...         return u - dt * self.kappa * line.laplacian(line.laplacian(u)), velocity
>>> evolve(Smoothing(), row, Line(), steps=1, dt=1.0)
tensor([-0.0200,  0.0800,  0.8800,  0.0800, -0.0200])

With a method ``interval(name, dt, axis)``, its coefficients can be learned: `LearnedPDE` keeps them
where the PDE is stable. Where the limits depend on each other, or a coefficient has no effect of
first order at 0, ``to_unit(dt, axis)`` and ``from_unit(unit, dt, axis)`` say in which coordinates it
learns (`AdvectionDiffusion`, `Wave`).

`for_length` scales coefficients with the length of a text.

To add a PDE to the library, add a file and its lines below; `tests/contracts.py` then tests it.
"""

from typing import Any

from attractor.attention.pdes.advection_diffusion import AdvectionDiffusion
from attractor.attention.pdes.diffusion import Diffusion
from attractor.attention.pdes.learned import LearnedPDE
from attractor.attention.pdes.line import Line, Neighbourhood, Plane
from attractor.attention.pdes.pde import AXES, PDE, evolve, take_steps
from attractor.attention.pdes.reaction_diffusion import ReactionDiffusion
from attractor.attention.pdes.scaling import for_length
from attractor.attention.pdes.wave import Wave
from attractor.common.checks import nearest

__all__ = [
    "AXES",
    "PDE",
    "AdvectionDiffusion",
    "Diffusion",
    "LearnedPDE",
    "Line",
    "Neighbourhood",
    "Plane",
    "ReactionDiffusion",
    "Wave",
    "evolve",
    "for_length",
    "get_pde",
    "take_steps",
]

BY_NAME: dict[str, type[Any]] = {
    "diffusion": Diffusion,
    "wave": Wave,
    "reaction_diffusion": ReactionDiffusion,
    "advection_diffusion": AdvectionDiffusion,
}


def get_pde(name: str) -> type[Any]:
    """Return the PDE class with this name, such as ``"diffusion"``."""
    if not isinstance(name, str) or name not in BY_NAME:
        hint = nearest(name, list(BY_NAME))
        raise ValueError(f"no PDE is called {name!r}; there are {', '.join(BY_NAME)}{hint}")
    return BY_NAME[name]
