"""Adapters to other libraries, which are imported when they are used.

>>> import attractor as at
>>> from attractor.integrations import scipy
>>> springs = at.systems.HarmonicOscillator()
>>> method = scipy.hybrid(at.fit(springs, dt=0.5, horizon=5.0, correction="linear", trajectories=10))
>>> from scipy.integrate import solve_ivp
>>> solve_ivp(lambda t, u: [u[1], -u[0]], (0, 5), [1.0, 0.0], method=method).y[:, -1].round(6)
array([0.283662, 0.958924])
"""

from types import ModuleType

from attractor.common.lazy import submodule

_ADAPTERS = ("hub", "onnx", "onnx_networks", "scipy", "timm", "transformers")


def __getattr__(name: str) -> ModuleType:
    try:
        return submodule(__name__, name)
    except AttributeError:
        message = f"attractor.integrations has no {name!r}; there are {', '.join(_ADAPTERS)}"
        raise AttributeError(message) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_ADAPTERS})
