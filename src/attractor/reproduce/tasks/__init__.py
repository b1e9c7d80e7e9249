"""Tasks: functions ``(config, context) -> outcome`` that run one arm of an experiment with one seed.

An outcome is a JSON object with "metrics" (name -> number). It may also have "curves" (name -> list),
"data" (hashes of the data that were read) and further entries. A task uses only the library, and is a
pure function of configuration, seed and data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

Outcome = dict[str, Any]
Task = Callable[[dict[str, Any], "Context"], Outcome]


@dataclass(frozen=True)
class Context:
    """The circumstances of a run that are not part of its configuration.

    Attributes:
        seed: Seed of all random numbers.
        device: Name of the torch device.
        folder: Folder of the data sets; None for ``ATTRACTOR_DATA``.
        scratch: Folder of checkpoints, from which an interrupted task resumes; None for no checkpoints.
        tell: Function that is called with lines of progress.
        cache: Folder for intermediate data that all arms share, such as tokens; None for no cache.
    """

    seed: int = 0
    device: str = "cpu"
    folder: Path | None = None
    scratch: Path | None = None
    tell: Callable[[str], None] = lambda line: None
    cache: Path | None = None


def task_of(name: str) -> Task:
    """Return the task of a name ``module:function``."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def data_of(name: str, config: dict[str, Any], context: Context) -> dict[str, str] | None:
    """Return the hashes of the data that a task would read, in the format of its outcome.

    They come from the function ``classify_data`` of the same module if the task is called ``classify``.
    If there is no such function, return None.
    """
    module, _, function = name.partition(":")
    hash_function = getattr(import_module(module), f"{function}_data", None)
    return None if hash_function is None else hash_function(config, context)


def echo(config: dict[str, Any], context: Context) -> Outcome:
    """Return the configuration as metrics; for examples and tests."""
    return {"metrics": dict(config)}
