# mypy: disallow-untyped-calls, disallow-any-generics, disallow-subclassing-any, disallow-untyped-decorators
# mypy: check-untyped-defs, warn-return-any, strict-equality, extra-checks
"""Mistakes that a type checker must find; each line says with which code. `tests/test_typing.py` checks it."""

import torch

import attractor as at
from attractor.attention import pde_attention
from attractor.ode import fit, systems

at.evolve(systems.Lorenz(), [1.0, 2.0, 3.0], torch.linspace(0, 1, 11))  # arg-type
fit(systems.Lorenz(), dt="0.1", horizon=1.0)  # arg-type
fit(systems.Lorenz(), dt=0.1)  # call-arg
x = torch.ones(1, 1, 4, 4)
pde_attention(x, x, x, pde="wave", stepps=3)  # call-arg
