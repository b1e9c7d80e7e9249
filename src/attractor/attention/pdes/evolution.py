"""An equation, the number of its steps and their size, validated once."""

import math
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attractor.attention.pdes.advection_diffusion import AdvectionDiffusion
from attractor.attention.pdes.diffusion import Diffusion
from attractor.attention.pdes.line import Neighbourhood
from attractor.attention.pdes.pde import PDE, as_equation, evolve, take_steps
from attractor.attention.pdes.reaction_diffusion import ReactionDiffusion
from attractor.attention.pdes.wave import Wave
from attractor.common.checks import as_int, is_number

IMMUTABLE = (Diffusion, Wave, ReactionDiffusion, AdvectionDiffusion)


@dataclass(frozen=True, eq=False)
class Evolution:
    """What happens to an attention map in pseudo-time: `steps` steps of size `dt` of a PDE.

    Attributes:
        pde: The equation.
        steps: Number of steps.
        dt: Size of a step.
        constant: Whether the coefficients never change. If they are numbers, calls with equal arguments
            share one object.
        stencils: Matrices of all steps together, which `engines.values` and `kernels.stencils` compute
            once per dtype. It stays empty unless `constant`.
    """

    pde: PDE
    steps: int
    dt: float
    constant: bool = False
    stencils: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, pde: PDE | str, steps: int, dt: float, axis: str = "key") -> "Evolution":
        """Return the evolution of an equation, which may be given by its name.

        Raises:
            ValueError: The equation, `steps` or `dt` is invalid, or a step is unstable.
        """
        if not torch.compiler.is_compiling():
            values = () if type(pde) is str else _numbers(pde)
            if values is not None:
                try:
                    return _shared(pde if type(pde) is str else type(pde), values, steps, dt, axis)
                except TypeError:  # an argument that cannot be hashed
                    pass
        return _checked(pde, steps, dt, axis, constant=False)

    @property
    def linear(self) -> bool:
        """Whether all steps together are a matrix, so that the values can be stepped instead."""
        return self.pde.linear

    @property
    def same_for_all_heads(self) -> bool:
        """Whether no coefficient differs from head to head."""
        if not is_dataclass(self.pde):
            return False  # it may keep coefficients anywhere
        values = [getattr(self.pde, field.name) for field in fields(self.pde)]
        return all(not isinstance(value, Tensor) or value.numel() == 1 for value in values)

    @property
    def reach(self) -> int:
        """Number of neighbours on either side that all steps together use."""
        return self.steps * self.pde.reach if self.steps else 0

    def of_map(self, attention_map: Tensor, line: Neighbourhood) -> Tensor:
        """Return the map after all steps."""
        return evolve(self.pde, attention_map, line, self.steps, self.dt)

    def of_linear(self, u: Tensor, line: Neighbourhood) -> Tensor:
        """Return u after all steps, without the PDE's ``start``."""
        return take_steps(self.pde, u, line, self.steps, self.dt)

    def with_pde(self, pde: PDE) -> "Evolution":
        """Return the same steps of an equation with coefficients of other shapes."""
        return self if pde is self.pde else Evolution(pde, self.steps, self.dt)


def _numbers(pde: Any) -> tuple[Any, ...] | None:
    """Return the fields of an equation of this library, or None if one of them is a tensor."""
    if type(pde) not in IMMUTABLE:
        return None
    values = tuple(vars(pde).values())
    return None if any(isinstance(value, Tensor) for value in values) else values


@lru_cache(maxsize=256, typed=True)
def _shared(kind: Any, values: tuple[Any, ...], steps: int, dt: float, axis: str) -> Evolution:
    """Return the shared evolution of an equation, given by its name or by its class and fields."""
    pde = kind if isinstance(kind, str) else kind(*values)
    return _checked(pde, steps, dt, axis, constant=True)


def _checked(pde: Any, steps: Any, dt: Any, axis: str, constant: bool) -> Evolution:
    pde = as_equation(pde)
    steps = as_int(steps)
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(
            f"steps = {steps} must be a whole number of at least 0; 0 is ordinary attention"
        )
    if not is_number(dt) or not 0 <= dt < math.inf:
        raise ValueError(f"dt = {dt} must be a finite number of at least 0; a PDE does not run backward")
    if steps:
        pde.check(dt, axis)
    return Evolution(pde, steps, dt, constant)
