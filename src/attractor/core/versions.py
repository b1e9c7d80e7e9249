"""Versions of what numbers depend on, to be written beside them, and what torch exports."""

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


def exporting() -> bool:
    """Return whether the code that runs is being recorded by `torch.export`.

    `torch.compiler.is_exporting` says so too, but is always True in what torch 2.10 and 2.11 compile.
    """
    return bool(torch.compiler._is_exporting_flag)
