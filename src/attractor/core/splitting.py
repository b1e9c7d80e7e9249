"""Symplectic splittings for separable second-order systems, with the same slope as a Scheme."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attractor.common.checks import check_values
from attractor.core.rates import Rate, add_increment, call_rate, check_state
from attractor.core.step import Step, with_parameters
from attractor.core.tableau_checks import Coefficient, as_fractions, check_stages, checked_order
from attractor.core.trees import defect

Halves: TypeAlias = tuple[Tensor | None, Tensor | None]  # q' and p', or None to compute them


@dataclass(frozen=True)
class Splitting:
    """A symplectic scheme of kicks and drifts, the exact flows of the halves of a separable system.

    The state stacks positions and momenta, ``u = (q, p)``, with ``q' = v(t, p)`` and
    ``p' = a(t, q)``. A kick moves p by ``kick[i] * dt * a``, a drift moves q by
    ``drift[i] * dt * v``. Such a step is symplectic: over long times the energy error stays
    bounded, where a Runge-Kutta scheme's grows.

    Args:
        name: Name for `get_scheme` and tables.
        kick: Fraction of a step for each kick; zeros are allowed.
        drift: Fraction of a step for each drift, as many as kicks or one less.
        order: Order of convergence, checked to 1e-10.

    >>> Splitting("leapfrog", kick=(0.5, 0.5), drift=(1,), order=2)
    Splitting('leapfrog', order 2, kicks 2, drifts 1)
    """

    name: str
    kick: tuple[float, ...]
    drift: tuple[float, ...]
    order: int

    def __init__(
        self, name: str, kick: Sequence[Coefficient], drift: Sequence[Coefficient], order: int
    ) -> None:
        if len(kick) - len(drift) not in (0, 1):
            raise ValueError(
                f"{name}: {len(kick)} kicks and {len(drift)} drifts do not alternate; "
                "pass as many drifts as kicks, or one less"
            )
        check_stages(name, len(kick))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "kick", tuple(map(float, as_fractions(name, kick))))
        object.__setattr__(self, "drift", tuple(map(float, as_fractions(name, drift))))
        object.__setattr__(self, "order", checked_order(name, order))
        for what, parts in (("kicks", self.kick), ("drifts", self.drift)):
            if abs(sum(parts) - 1) > 1e-10:
                raise ValueError(f"{name}: the {what} add up to {sum(parts)}, not to 1")
        # A splitting is a partitioned Runge-Kutta method: a kick depends on the drifts before it, a
        # drift on the kicks before it and its own. Trees then alternate between the two tableaus.
        kick_matrix = [[d * (j < i) for j, d in enumerate(self.drift)] for i in range(len(kick))]
        drift_matrix = [[k * (j <= i) for j, k in enumerate(self.kick)] for i in range(len(drift))]
        for p in range(1, order + 1):
            miss = max(
                defect(p, self.kick, kick_matrix, drift_matrix),
                defect(p, self.drift, drift_matrix, kick_matrix),
            )
            if miss > 1e-10:
                raise ValueError(
                    f"{name}: claims order {order}, but the conditions of order {p} have a residual of "
                    f"{float(miss):.3g}; with these coefficients pass order={p - 1}"
                )

    def __repr__(self) -> str:
        kicks, drifts = (sum(map(bool, parts)) for parts in (self.kick, self.drift))
        return f"Splitting({self.name!r}, order {self.order}, kicks {kicks}, drifts {drifts})"

    @property
    def rate_calls(self) -> int:
        """Calls of the rate per step, each of which computes both halves, of which one is used."""
        return sum(map(bool, (*self.kick, *self.drift)))

    @property
    def saved_calls(self) -> int:
        """Calls that the halves of the step before save: 1 if steps begin as they end, else 0."""
        order = [i % 2 for i, x in enumerate(_alternating(self.kick, self.drift)) if x]
        return int(order[0] == order[-1])

    def slope(self, f: Rate, t: Any, u: Tensor, dt: Any) -> Tensor:
        """Return S, so that ``u + dt * S`` is the symplectic step. Arguments as in `Scheme.slope`."""
        return self._slope_after(f, t, u, dt)[0]

    def step(self, f: Rate, t: Any, u: Tensor, dt: Any, parameters: Tensor | None = None) -> Step:
        """Return the plain step from u, which has no stages. Arguments as in `Scheme.step`."""
        return Step(u, self.slope(with_parameters(f, parameters), t, u, dt), dt, t, (), parameters)

    def _slope_after(
        self, f: Rate, t: Any, u: Tensor, dt: Any, halves: Halves = (None, None)
    ) -> tuple[Tensor, Halves]:
        """Return the slope, and the halves of the rate that the next step can use.

        If steps begin and end with a kick, or begin and end with a drift, the last half of a step is the
        first one of the next step. Requires: u changes by this slope alone.

        Args:
            halves: The halves that the step before returned, which save one call of the rate.
        """
        half = _half(self.name, u, t, dt)
        q, p = q0, p0 = u[..., :half], u[..., half:]
        slope_q = slope_p = None
        velocity, force = halves
        kicked = drifted = 0.0  # fractions of the step so far; the time is that of the other half
        for kick, drift in zip(self.kick, (*self.drift, 0.0)):
            if kick:
                if force is None:
                    force = call_rate(f, t + drifted * dt, torch.cat((q, p), -1))[..., half:]
                slope_p = kick * force if slope_p is None else slope_p.add(force, alpha=kick)
                p, velocity = add_increment(p0, dt, (1.0,), (slope_p,)), None
            kicked += kick
            if drift:
                if velocity is None:
                    velocity = call_rate(f, t + kicked * dt, torch.cat((q, p), -1))[..., :half]
                slope_q = drift * velocity if slope_q is None else slope_q.add(velocity, alpha=drift)
                q, force = add_increment(q0, dt, (1.0,), (slope_q,)), None
            drifted += drift
        assert slope_q is not None, "drifts add up to 1"
        assert slope_p is not None, "kicks add up to 1"
        return torch.cat((slope_q, slope_p), -1), (velocity, force)

    def check_rate(self, f: Rate, t: Any, u: Tensor) -> None:
        """Raise ValueError if q' depends on q, or p' on p: then kicks and drifts are not exact."""
        half = _half(self.name, u)
        check_values("u", u)
        u = u.detach()
        rate = call_rate(f, t, u).detach()
        nudge = 0.1 * (1 + u.abs())
        rounding = 100 * torch.finfo(u.dtype).eps
        for what, part in (("q'", slice(None, half)), ("p'", slice(half, None))):
            nudged = u.clone()
            nudged[..., part] += nudge[..., part]
            other = call_rate(f, t, nudged).detach()
            change = (other - rate)[..., part].abs()
            scale = (other.abs() + rate.abs()).amax(-1, keepdim=True) + u.abs().amax(-1, keepdim=True)
            if bool((change > rounding * scale).any()):  # never where something is NaN
                raise ValueError(
                    f"{self.name} needs a separable rate (q' a function of p alone, p' of q "
                    f"alone, u = (q, p)), but {what} changed with {what[0]}; use a Runge-Kutta "
                    "scheme such as 'rk4', or coordinates in which the system is separable"
                )


def _alternating(kick: Sequence[float], drift: Sequence[float]) -> list[float]:
    return [x for pair in zip(kick, (*drift, 0.0)) for x in pair]


def _half(name: str, u: Tensor, t: Any = 0.0, dt: Any = 0.0) -> int:
    check_state(u, t, dt)
    for what, x in (("t", t), ("dt", dt)):
        if isinstance(x, Tensor) and x.dim() and x.shape[-1] != 1:
            raise ValueError(
                f"{what} {list(x.shape)} must be [*batch, 1], because q and p are stepped together"
            )
    if u.dim() == 0 or u.shape[-1] % 2 or not u.shape[-1]:
        raise ValueError(f"{name} needs a state (q, p) of even size, not one of shape {list(u.shape)}")
    return u.shape[-1] // 2
