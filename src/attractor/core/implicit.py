"""Implicit Runge-Kutta methods with fixed steps, solved by Newton's method."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from attractor.core.fixed import History, Moment, StepRule, beside
from attractor.core.rates import Rate, call_rate

ITERATIONS = 30

_R2, _R3, _R6, _R15 = (math.sqrt(x) for x in (2, 3, 6, 15))
_G = 1 - _R2 / 2

# Weights a of the stages, and b of the slope (Hairer and Wanner II, IV.5 and IV.6; TR-BDF2: Bank et al.
# 1985). The stages' times are the sums of the rows.
TABLEAUS: dict[str, tuple[Sequence[Sequence[float]], Sequence[float]]] = {
    "implicit_euler": ([[1]], [1]),
    "implicit_midpoint": ([[1 / 2]], [1]),
    "trapezoid": ([[0, 0], [1 / 2, 1 / 2]], [1 / 2, 1 / 2]),
    "radauIIA3": ([[5 / 12, -1 / 12], [3 / 4, 1 / 4]], [3 / 4, 1 / 4]),
    "gl4": ([[1 / 4, 1 / 4 - _R3 / 6], [1 / 4 + _R3 / 6, 1 / 4]], [1 / 2, 1 / 2]),
    "radauIIA5": (
        [
            [(88 - 7 * _R6) / 360, (296 - 169 * _R6) / 1800, (-2 + 3 * _R6) / 225],
            [(296 + 169 * _R6) / 1800, (88 + 7 * _R6) / 360, (-2 - 3 * _R6) / 225],
            [(16 - _R6) / 36, (16 + _R6) / 36, 1 / 9],
        ],
        [(16 - _R6) / 36, (16 + _R6) / 36, 1 / 9],
    ),
    "gl6": (
        [
            [5 / 36, 2 / 9 - _R15 / 15, 5 / 36 - _R15 / 30],
            [5 / 36 + _R15 / 24, 2 / 9, 5 / 36 - _R15 / 24],
            [5 / 36 + _R15 / 30, 2 / 9 + _R15 / 15, 5 / 36],
        ],
        [5 / 18, 4 / 9, 5 / 18],
    ),
    "sdirk2": ([[_G, 0], [1 - _G, _G]], [1 - _G, _G]),
    "trbdf2": (
        [[0, 0, 0], [_G, _G, 0], [_R2 / 4, _R2 / 4, _G]],
        [_R2 / 4, _R2 / 4, _G],
    ),
}


def implicit_rule(name: str, perturb: bool = False, max_iters: int = ITERATIONS) -> StepRule:
    """Return the steps of an implicit method of `TABLEAUS`.

    Newton's method with exact Jacobians ``[stages * d, stages * d]`` finds the stages without a graph.
    One more iteration with a graph, in which the Jacobian is a constant, gives the first derivatives of
    the exact stages.
    """
    rows, weights = TABLEAUS[name]
    times = [sum(row) for row in rows]

    def step(f: Rate, moment: Moment, u: Tensor, history: History) -> tuple[Tensor, Tensor, History]:
        if u.is_complex():
            raise TypeError(f"{name} is implemented for real states; u has dtype {u.dtype}")
        t, t1, dt = moment
        size = dt.item() if isinstance(dt, Tensor) else dt
        a, b = (torch.tensor(x, dtype=u.dtype, device=u.device) for x in (rows, weights))
        clock = [t if c == 0 else t1 if abs(c - 1) < 1e-12 else t + c * dt for c in times]
        if perturb:
            clock = [
                beside(x, t1) if c == 0 else beside(x, t) if x is t1 else x for x, c in zip(clock, times)
            ]

        def residual(k: Tensor, u: Tensor) -> Tensor:
            places = u + dt * (a @ k)
            return k - torch.stack([call_rate(f, x, y) for x, y in zip(clock, places)])

        def jacobian(k: Tensor) -> Tensor:
            places = u.detach() + size * (a @ k)
            # Hooks of a checkpoint would take all steps again for each of these backward passes.
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                slopes = [
                    torch.autograd.functional.jacobian(lambda y, x=x: f(x.detach(), y), y)
                    for x, y in zip(clock, places)
                ]
            d = u.numel()
            blocks = -size * a[:, :, None, None] * torch.stack(slopes)[:, None]
            matrix = blocks.transpose(1, 2).reshape(len(rows) * d, len(rows) * d)
            return matrix + torch.eye(len(matrix)).to(matrix)

        k0 = call_rate(f, beside(t, t1) if perturb else t, u)
        k = k0.detach().expand(len(rows), -1)
        small = 16 * torch.finfo(u.dtype).eps
        with torch.no_grad():
            for _ in range(max_iters):
                change = torch.linalg.solve(jacobian(k), residual(k, u).flatten()).reshape(k.shape)
                k = k - change
                if not bool(change.norm() > small * (k.norm() + u.norm())):
                    break
            else:
                raise FloatingPointError(
                    f"{name}: Newton's method did not converge in {max_iters} iterations at "
                    f"t = {t.item():.6g}; use a smaller step_size"
                )
            matrix = jacobian(k)
        change = torch.linalg.solve(matrix, residual(k, u).flatten())
        k = k - change.reshape(k.shape)
        return u + dt * (b @ k), k0, history

    return step
