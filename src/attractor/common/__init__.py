"""What every folder uses and is not about time stepping: checks of arguments, versions, views.

>>> from attractor.common.checks import check_whole
>>> check_whole("steps", 0, 1)
Traceback (most recent call last):
    ...
ValueError: steps = 0 must be a whole number of at least 1
"""

from types import ModuleType

from attractor.common.lazy import submodule


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name)
