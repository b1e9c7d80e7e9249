"""The 25 non-stiff DETEST problems (Hull, Enright, Fellen and Sedgwick, 1972) on [0, 20].

rk4 with 2,000 and 4,000 steps and dopri5 at three tolerances, against SciPy's DOP853 at 1e-12.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from attractor import evolve
from benchmarks.results import save

END = 20.0
RK4_STEPS = (2_000, 4_000)
TOLERANCES = (1e-4, 1e-7, 1e-10)


@dataclass(frozen=True)
class Detest:
    """A problem: its rate and initial state."""

    name: str
    rate: Callable[[Tensor, Tensor], Tensor]
    u0: list[float]

    def reference(self) -> Tensor:
        """The state at t = 20 by DOP853 at 1e-12."""
        rate = lambda t, u: self.rate(torch.tensor(t, dtype=torch.float64), torch.from_numpy(u)).numpy()
        solved = solve_ivp(rate, (0, END), np.array(self.u0), "DOP853", rtol=1e-12, atol=1e-12)
        return torch.from_numpy(solved.y[:, -1])


def _system(*components):
    """A rate from one function of (t, u_1, u_2, ...) a component."""
    return lambda t, u: torch.stack([f(t, *u.unbind(-1)) + 0 * u[..., 0] for f in components], -1)


def _b4(t, u):
    x, y, z = u.unbind(-1)
    r = (x * x + y * y).sqrt()
    return torch.stack((-y - x * z / r, x - y * z / r, x / r), -1)


def _chain(rates):
    """Decay along ten substances: each loses rates[i] times itself to the next."""

    def rate(t, u):
        flow = torch.tensor(rates, dtype=u.dtype) * u[..., :-1]
        zero = torch.zeros_like(u[..., :1])
        return torch.cat((zero, flow), -1) - torch.cat((flow, zero), -1)

    return rate


def _heat(t, u):
    return torch.nn.functional.pad(u, (1, 1)).diff().diff()


MASSES = (
    0.000954786104043,
    0.000285583733151,
    0.0000437273164546,
    0.0000517759138449,
    0.00000277777777778,
)
SUN, GRAVITY = 1.00000597682, 2.95912208286
PLANETS = [
    *(3.42947415189, 3.35386959711, 1.35494901715),
    *(6.64145542550, 5.97156957878, 2.18231499728),
    *(11.2630437207, 14.6952576794, 6.27960525067),
    *(-30.1552268759, 1.65699966404, 1.43785752721),
    *(-21.1238353380, 28.4465098142, 15.3882659679),
    *(-0.557160570446, 0.505696783289, 0.230578543901),
    *(-0.415570776342, 0.365682722812, 0.169143213293),
    *(-0.325325669158, 0.189706021964, 0.0877265322780),
    *(-0.0240476254170, -0.287659532608, -0.117219543175),
    *(-0.176860753121, -0.216393453025, -0.0148647893090),
]


def _five_bodies(t, u):
    """Five outer planets relative to the sun."""
    q, v = u[..., :15].unflatten(-1, (5, 3)), u[..., 15:]
    m = torch.tensor(MASSES, dtype=u.dtype)
    cube = lambda x: (x * x).sum(-1, keepdim=True) ** 1.5
    to_sun = q / cube(q)
    apart = q[..., None, :, :] - q[..., :, None, :]  # [.., i, j]: from i to j
    pull = apart / (cube(apart) + torch.eye(5, dtype=u.dtype)[..., None])
    others = (m[:, None] * (pull - to_sun[..., None, :, :])) * (1 - torch.eye(5, dtype=u.dtype))[
        ..., None
    ]
    acceleration = GRAVITY * (-(SUN + m)[:, None] * to_sun + others.sum(-2))
    return torch.cat((v, acceleration.flatten(-2)), -1)


def _orbit(t, u):
    q, v = u.chunk(2, -1)
    return torch.cat((v, -q * (q * q).sum(-1, keepdim=True) ** -1.5), -1)


def _from_rest(e):
    return [1 - e, 0.0, 0.0, math.sqrt((1 + e) / (1 - e))]


PROBLEMS = [
    Detest("A1", lambda t, u: -u, [1.0]),
    Detest("A2", lambda t, u: -(u**3) / 2, [1.0]),
    Detest("A3", lambda t, u: u * t.cos(), [1.0]),
    Detest("A4", lambda t, u: u / 4 * (1 - u / 20), [1.0]),
    Detest("A5", lambda t, u: (u - t) / (u + t), [4.0]),
    Detest("B1", _system(lambda t, x, y: 2 * (x - x * y), lambda t, x, y: -(y - x * y)), [1.0, 3.0]),
    Detest(
        "B2",
        _system(lambda t, x, y, z: y - x, lambda t, x, y, z: x - 2 * y + z, lambda t, x, y, z: y - z),
        [2.0, 0.0, 1.0],
    ),
    Detest(
        "B3",
        _system(lambda t, x, y, z: -x, lambda t, x, y, z: x - y * y, lambda t, x, y, z: y * y),
        [1.0, 0.0, 0.0],
    ),
    Detest("B4", _b4, [3.0, 0.0, 0.0]),
    Detest(
        "B5",
        _system(lambda t, x, y, z: y * z, lambda t, x, y, z: -x * z, lambda t, x, y, z: -0.51 * x * y),
        [0.0, 1.0, 1.0],
    ),
    Detest("C1", _chain([1.0] * 9), [1.0] + [0.0] * 9),
    Detest("C2", _chain([float(i) for i in range(1, 10)]), [1.0] + [0.0] * 9),
    Detest("C3", _heat, [1.0] + [0.0] * 9),
    Detest("C4", _heat, [1.0] + [0.0] * 50),
    Detest("C5", _five_bodies, PLANETS),
    *(Detest(f"D{i}", _orbit, _from_rest(e)) for i, e in enumerate((0.1, 0.3, 0.5, 0.7, 0.9), 1)),
    Detest(
        "E1",
        _system(lambda t, x, v: v, lambda t, x, v: -(v / (t + 1) + (1 - 0.25 / (t + 1) ** 2) * x)),
        [0.6713967071418030, 0.09540051444747446],
    ),
    Detest("E2", _system(lambda t, x, v: v, lambda t, x, v: (1 - x * x) * v - x), [2.0, 0.0]),
    Detest(
        "E3",
        _system(lambda t, x, v: v, lambda t, x, v: x**3 / 6 - x + 2 * (2.78535 * t).sin()),
        [0.0, 0.0],
    ),
    Detest("E4", _system(lambda t, x, v: v, lambda t, x, v: 0.032 - 0.4 * v * v), [30.0, 0.0]),
    Detest("E5", _system(lambda t, x, v: v, lambda t, x, v: (1 + v * v).sqrt() / (25 - t)), [0.0, 0.0]),
]


def row(problem: Detest) -> dict[str, float | int | str]:
    """Largest error of a component at t = 20, and rate calls, for every solver."""
    truth = problem.reference()
    u0 = torch.tensor(problem.u0, dtype=torch.float64)
    found: dict[str, float | int | str] = {"problem": problem.name}
    for n in RK4_STEPS:
        t = torch.linspace(0, END, n + 1, dtype=torch.float64)
        found[f"rk4 {n}"] = (
            (evolve(problem.rate, u0, t, "rk4", every=n).final - truth).abs().max().item()
        )
    for tolerance in TOLERANCES:
        solved = evolve(problem.rate, u0, [0.0, END], "dopri5", rtol=tolerance, atol=tolerance)
        found[f"dopri5 {tolerance:g}"] = (solved.final - truth).abs().max().item()
        found[f"calls {tolerance:g}"] = solved.stats.rate_calls
    return found


def main() -> None:
    rows = []
    for problem in PROBLEMS:
        rows.append(row(problem))
        if len(rows) == 1:
            print(" ".join(f"{key:>13}" for key in rows[0]))
        cells = (
            x if isinstance(x, str) else f"{x:.1e}" if isinstance(x, float) else str(x)
            for x in rows[-1].values()
        )
        print(" ".join(f"{cell:>13}" for cell in cells))
    save("detest", {"end": END, "rows": rows})


if __name__ == "__main__":
    main()
