"""Versions of what numbers depend on, to be written beside them, and what torch exports."""

import platform
from collections.abc import Callable
from functools import partial

import numpy as np
import torch


def versions() -> dict[str, str]:
    """Of the library, torch, numpy and Python."""
    from attractor import __version__  # it imports this package

    return {
        "attractor": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


# Whether torch.export records the code that runs. `torch.compiler.is_exporting` says so too, but is
# always True in what torch 2.10 and 2.11 compile.
exporting: Callable[[], bool] = partial(getattr, torch.compiler, "_is_exporting_flag")
