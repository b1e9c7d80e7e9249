"""Linear: a matrix, exact for linear systems."""

from typing import Any

from torch import Tensor, nn

from attractor.ode.corrections.network import Affine


class Linear(nn.Module):
    """``M u + b``, added to ``u + dt S``.

    For a linear system the error of a step is linear in the state, so one trajectory fits it to
    rounding: a known answer for tests, not a showcase. Does not vanish with the step.

    Args:
        dim: size of a state.
    """

    def __init__(self, dim: int, **factory: Any) -> None:
        super().__init__()
        self.config = dict(dim=dim)
        self.net = Affine(dim, dim, **factory)

    def inputs(self, u: Tensor, slope: Tensor, dt: Any) -> Tensor:
        """What the map sees."""
        return u

    def forward(self, u: Tensor, slope: Tensor, dt: Any) -> Tensor:
        """What is added to a plain step."""
        return self.net(u)
