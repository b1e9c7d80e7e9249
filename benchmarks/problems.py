"""Initial value problems with known answers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ellipj, ellipk
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """``u' = rate(t, u)`` on [0, end] with solution exact(t) -> [len(t), d]; u0 is exact(0)."""

    name: str
    rate: Callable[[Tensor, Tensor], Tensor]
    exact: Callable[[np.ndarray], np.ndarray]
    end: float
    separable: bool = False  # (q, p) with q' = v(t, p), p' = a(t, q): splittings can step it

    def truth(self, t: Tensor) -> Tensor:
        """The solution at times t."""
        return torch.from_numpy(np.asarray(self.exact(t.numpy()), dtype=np.float64))


def _newton(name, acceleration, q, p, end):
    """q'' = acceleration(t, q) with solutions q(t), p(t) = q'(t): scalars or lists of components."""

    def rate(t, u):
        half = u.shape[-1] // 2
        return torch.cat((u[..., half:], acceleration(t, u[..., :half])), -1)

    def exact(t):
        components = [np.broadcast_to(x, t.shape) for x in (*np.atleast_2d(q(t)), *np.atleast_2d(p(t)))]
        return np.stack(components, -1)

    return Problem(name, rate, exact, end, separable=True)


def _kepler(e, end):
    def anomaly(t):
        x = t + e * np.sin(t)
        for _ in range(60):
            x = x - (x - e * np.sin(x) - t) / (1 - e * np.cos(x))
        return x

    def position(t):
        x = anomaly(t)
        return [np.cos(x) - e, np.sqrt(1 - e * e) * np.sin(x)]

    def velocity(t):
        x = anomaly(t)
        turn = 1 / (1 - e * np.cos(x))
        return [-np.sin(x) * turn, np.sqrt(1 - e * e) * np.cos(x) * turn]

    pull = lambda t, q: -q * (q * q).sum(-1, keepdim=True) ** -1.5
    return _newton(f"kepler, eccentricity {e}", pull, position, velocity, end)


def _pendulum(angle):
    k = np.sin(angle / 2)
    u = lambda t: ellipj(ellipk(k * k) + t, k * k)
    return _newton(
        "pendulum",
        lambda t, q: -q.sin(),
        lambda t: 2 * np.arcsin(k * u(t)[0]),
        lambda t: 2 * k * u(t)[1],
        3.0,
    )


def _duffing(a):
    w, m = np.sqrt(1 + a * a), a * a / (2 * (1 + a * a))
    return _newton(
        "duffing",
        lambda t, q: -q - q**3,
        lambda t: a * ellipj(w * t, m)[1],
        lambda t: -a * w * ellipj(w * t, m)[0] * ellipj(w * t, m)[2],
        3.0,
    )


def _morse(energy):
    w, s = np.sqrt(2 * (1 - energy)), np.sqrt(energy)
    return _newton(
        "morse",
        lambda t, q: -2 * (1 - (-q).exp()) * (-q).exp(),
        lambda t: np.log((1 - s * np.cos(w * t)) / (1 - energy)),
        lambda t: s * w * np.sin(w * t) / (1 - s * np.cos(w * t)),
        3.0,
    )


def _coupled():
    """Two masses, three springs: modes (1, 1) with frequency 1 and (1, -1) with sqrt 3."""
    r = np.sqrt(3)
    matrix = torch.tensor([[-2.0, 1.0], [1.0, -2.0]], dtype=torch.float64)
    return _newton(
        "coupled oscillators",
        lambda t, q: q @ matrix,
        lambda t: [np.cos(t) + np.sin(r * t), np.cos(t) - np.sin(r * t)],
        lambda t: [-np.sin(t) + r * np.cos(r * t), -np.sin(t) - r * np.cos(r * t)],
        3.0,
    )


def _rigid_body(k2=0.51):
    def rate(t, u):
        x, y, z = u.unbind(-1)
        return torch.stack((y * z, -x * z, -k2 * x * y), -1)

    return Problem("rigid body", rate, lambda t: np.stack(ellipj(t, k2)[:3], -1), 3.0)


def _hopf():
    """A spiral onto the unit circle: r' = r (1 - r^2), angle' = 2."""

    def rate(t, u):
        x, y = u.unbind(-1)
        grow = 1 - x * x - y * y
        return torch.stack((x * grow - 2 * y, y * grow + 2 * x), -1)

    def exact(t):
        r = 1 / np.sqrt(1 + 3 * np.exp(-2 * t))
        return np.stack((r * np.cos(2 * t), r * np.sin(2 * t)), -1)

    return Problem("hopf spiral", rate, exact, 3.0)


def _decay_chain():
    def rate(t, u):
        a, b, _ = u.unbind(-1)
        return torch.stack((-a, a - b, b), -1)

    exact = lambda t: np.stack((np.exp(-t), t * np.exp(-t), 1 - (1 + t) * np.exp(-t)), -1)
    return Problem("decay chain", rate, exact, 3.0)


def _scalar(name, rate, exact, end):
    return Problem(name, rate, lambda t: exact(t)[:, None], end)


PROBLEMS = [
    _newton("harmonic", lambda t, q: -q, np.cos, lambda t: -np.sin(t), 3.0),
    _newton(
        "harmonic, faster",
        lambda t, q: -6.25 * q,
        lambda t: np.sin(2.5 * t),
        lambda t: 2.5 * np.cos(2.5 * t),
        2.0,
    ),
    _coupled(),
    _newton(
        "repeller",
        lambda t, q: q,
        lambda t: np.cosh(t) + 0.5 * np.sinh(t),
        lambda t: np.sinh(t) + 0.5 * np.cosh(t),
        2.0,
    ),
    _newton(
        "forced",
        lambda t, q: -4 * q + t.cos(),
        lambda t: np.sin(2 * t) + np.cos(t) / 3,
        lambda t: 2 * np.cos(2 * t) - np.sin(t) / 3,
        3.0,
    ),
    _pendulum(2.0),
    _duffing(1.2),
    _kepler(0.0, 3.0),
    _kepler(0.5, 3.0),
    _morse(0.5),
    _newton(
        "liouville",
        lambda t, q: -2 * q.exp(),
        lambda t: -2 * np.log(np.cosh(t - 1)),
        lambda t: -2 * np.tanh(t - 1),
        3.0,
    ),
    _newton(
        "cubic",
        lambda t, q: 2 * q**3,
        lambda t: 1 / (1 + t),
        lambda t: -1 / (1 + t) ** 2,
        2.0,
    ),
    _newton(
        "euler-cauchy",
        lambda t, q: 0.75 * q / (1 + t) ** 2,
        lambda t: (1 + t) ** 1.5 + (1 + t) ** -0.5,
        lambda t: 1.5 * (1 + t) ** 0.5 - 0.5 * (1 + t) ** -1.5,
        2.0,
    ),
    _newton(
        "gaussian",
        lambda t, q: (4 * t**2 - 2) * q,
        lambda t: np.exp(-(t**2)),
        lambda t: -2 * t * np.exp(-(t**2)),
        1.5,
    ),
    _rigid_body(),
    _hopf(),
    _decay_chain(),
    _scalar("logistic", lambda t, u: u * (1 - u), lambda t: 1 / (1 + 4 * np.exp(-t)), 3.0),
    _scalar("inverse root", lambda t, u: -(u**3) / 2, lambda t: 1 / np.sqrt(1 + t), 3.0),
    _scalar("growth by cosine", lambda t, u: u * t.cos(), lambda t: np.exp(np.sin(t)), 3.0),
    _scalar("tangent", lambda t, u: 1 + u**2, np.tan, 1.0),
]
