"""Versions of packages that results depend on, and whether torch exports."""

import platform
from collections.abc import Callable
from functools import partial

import numpy as np
import torch


def versions() -> dict[str, str]:
    """Return the versions of this library, torch, NumPy and Python."""
    from attractor import __version__  # not at the top, because attractor imports this package

    return {
        "attractor": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


# Whether torch.export is tracing. `torch.compiler.is_exporting` is always True in code that torch 2.10
# and 2.11 compile.
exporting: Callable[[], bool] = partial(getattr, torch.compiler, "_is_exporting_flag")
