"""How a measurement is kept: numbers, versions and the machine, in one JSON file."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from attractor.storage.files import write_json

FOLDER = Path(__file__).parent / "results"


def save(name: str, content: dict[str, Any]) -> Path:
    """Write results/<name>.json and say so."""
    packages = ("attractor", "torch", "numpy", "scipy", "torchdiffeq", "diffrax", "jax")
    found = {p: v for p in packages if (v := _version(p))}
    command = f"python -m benchmarks.{name}"
    path = write_json(
        FOLDER / f"{name}.json", {"command": command, "versions": found, "machine": machine(), **content}
    )
    print(f"-> benchmarks/results/{path.name}")
    return path


def machine() -> dict[str, Any]:
    """Return what times depend on beside the code."""
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processor": _processor(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "unknown")
