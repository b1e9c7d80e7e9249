"""Adapters to other libraries, a few dozen lines each; each imports its library when it is used.

>>> import attractor as at
>>> from attractor.integrations import scipy
>>> springs = at.systems.HarmonicOscillator()
>>> method = scipy.hybrid(at.fit(springs, dt=0.5, horizon=5.0, correction="linear", trajectories=10))
>>> from scipy.integrate import solve_ivp
>>> solve_ivp(lambda t, u: [u[1], -u[0]], (0, 5), [1.0, 0.0], method=method).y[:, -1].round(6)
array([0.283662, 0.958924])
"""

from importlib import import_module
from types import ModuleType

_ADAPTERS = ("hub", "onnx", "scipy", "timm", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name not in _ADAPTERS:
        raise AttributeError(f"attractor.integrations has no {name!r}; there are {', '.join(_ADAPTERS)}")
    return import_module(f"attractor.integrations.{name}")
