"""K pendulums hanging from each other, chaotic from K = 2 on (AttNS, Eq. 13)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.common.checks import MOST_PARTS, check_whole
from attractor.ode.systems.system import check_state, uniform


@dataclass(frozen=True)
class PendulumChain:
    """K links of unit mass and length; state (theta_1..theta_K, theta_1'..theta_K').

    The paper solves ``A theta'' = b`` with ``A_ij = (K - max(i, j) + 1) cos(theta_i - theta_j)``,
    K^3 operations. The same accelerations come from the tensions in the rods: the rod's fixed
    length gives one equation a link in which only its neighbours appear,

        2 T_i - cos(theta_i - theta_{i-1}) T_{i-1} - cos(theta_i - theta_{i+1}) T_{i+1} = theta_i'^2

    (with T_1 once instead of twice and ``+ g cos theta_1`` in the first), so elimination takes K
    operations and its pivots are at least 1. Initial angles are uniform in [0, pi/8], at rest.
    """

    links: int = 2
    g: float = 9.8

    def __post_init__(self) -> None:
        check_whole("links", self.links, 1, "a chain needs at least one link", most=MOST_PARTS)

    @property
    def dim(self) -> int:
        """Size of a state."""
        return 2 * self.links

    def __call__(self, t: Any, u: Tensor) -> Tensor:
        """du/dt."""
        check_state(self, u)
        theta, omega = u.chunk(2, -1)
        between = theta.diff()
        cos, sin = between.cos().unbind(-1), between.sin().unbind(-1)
        right = list((omega**2).unbind(-1))
        right[0] = right[0] + self.g * theta[..., 0].cos()
        pivot: list[Any] = [1.0]
        for i, c in enumerate(cos):
            factor = c / pivot[i]
            pivot.append(2 - c * factor)
            right[i + 1] = right[i + 1] + factor * right[i]
        tension = [right[-1] / pivot[-1]]
        for c, r, p in zip(cos[::-1], right[-2::-1], pivot[-2::-1]):
            tension.append((r + c * tension[-1]) / p)
        tension.reverse()

        turn = [-self.g * theta[..., 0].sin()] + [torch.zeros_like(right[0])] * (self.links - 1)
        for i, s in enumerate(sin):
            turn[i] = turn[i] + tension[i + 1] * s
            turn[i + 1] = turn[i + 1] - tension[i] * s
        return torch.cat((omega, torch.stack(turn, -1)), -1)

    def energy(self, u: Tensor) -> Tensor:
        """Kinetic energy and gravity's, summed over the masses."""
        check_state(self, u)
        theta, omega = u.chunk(2, -1)
        vx = (omega * theta.cos()).cumsum(-1)
        vy = (omega * theta.sin()).cumsum(-1)
        height = -theta.cos().cumsum(-1)
        return ((vx**2 + vy**2) / 2 + self.g * height).sum(-1)

    def sample(
        self,
        n: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """n initial states."""
        k = self.links
        return uniform(n, [0.0] * 2 * k, [math.pi / 8] * k + [0.0] * k, generator, dtype, device)
