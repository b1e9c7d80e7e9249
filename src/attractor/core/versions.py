"""Versions of what numbers depend on, to be written beside them."""

import platform

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
