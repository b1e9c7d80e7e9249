"""What an arm does: one function a kind of experiment, ``(config, context) -> outcome``.

An outcome has "metrics" (name -> number), and may have "curves" (name -> list), "data" (hashes of what
was read) and further notes; all of it plain enough for JSON. A task trains, solves and probes with the
library and nothing else, and is a pure function of configuration, seed and data.
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
    """Where and how an arm is run, which its configuration does not say.

    Attributes:
        seed: of everything random.
        device: as torch names it.
        folder: of the data; None: what ``ATTRACTOR_DATA`` names.
        scratch: a folder for checkpoints, where a task that was interrupted finds its own; None: none.
        tell: called with a line on how far it is.
        cache: a folder for what takes long to make and is the same for all arms; None: none.
    """

    seed: int = 0
    device: str = "cpu"
    folder: Path | None = None
    scratch: Path | None = None
    tell: Callable[[str], None] = lambda line: None
    cache: Path | None = None


def task_of(name: str) -> Task:
    """The function that ``module:function`` names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def data_of(name: str, config: dict[str, Any], context: Context) -> dict[str, str] | None:
    """Hashes of the data that a task would read, as its outcome has them; None if it does not say.

    The function ``classify`` of a module says it by a function ``classify_data`` beside it.
    """
    module, _, function = name.partition(":")
    found = getattr(import_module(module), f"{function}_data", None)
    return None if found is None else found(config, context)


def echo(config: dict[str, Any], context: Context) -> Outcome:
    """The configuration itself; for examples and tests."""
    return {"metrics": dict(config)}
