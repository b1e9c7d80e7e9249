"""Tables and figures of the papers, run again and judged.

An `Experiment` says what is varied (its arms), what the paper reports, which number is compared and when
the claim holds; a task of `reproduce.tasks` does one arm with one seed. Experiments are in the folder
``experiments`` of the project, one short file each; they hold no training code.

>>> from attractor.reproduce import Experiment, Scale, best
>>> example = Experiment(
...     name="example", paper="attns", place="Table 0", claim="Two is more than one.",
...     task="attractor.reproduce.tasks:echo", arms={"one": {"value": 1.0}, "two": {"value": 2.0}},
...     scales={"smoke": Scale(judged=True)}, metric="value", better="higher",
...     numbers={"one": 1.0, "two": 2.0}, judge=best("two"),
... )
>>> from attractor.reproduce import run
>>> results = run(example, "smoke")
>>> results.mean("two")
2.0
>>> print(example.judge(results))
holds in direction: two is best, at one seed, 2 against 1 (one)

On the command line: ``attractor reproduce --list``, ``attractor reproduce stepnet-table1 --scale cpu``.
"""

from types import ModuleType

from attractor.core.lazy import submodule
from attractor.reproduce.experiment import Experiment, Scale
from attractor.reproduce.results import Results, load, merge
from attractor.reproduce.runner import run
from attractor.reproduce.shelf import catalogue, find
from attractor.reproduce.tasks import Context
from attractor.reproduce.verdict import (
    DIRECTION,
    FAILS,
    HOLDS,
    UNTESTED,
    Verdict,
    all_of,
    below,
    best,
    gains,
    within,
)

__all__ = [
    "DIRECTION",
    "FAILS",
    "HOLDS",
    "UNTESTED",
    "Context",
    "Experiment",
    "Results",
    "Scale",
    "Verdict",
    "all_of",
    "below",
    "best",
    "catalogue",
    "find",
    "gains",
    "load",
    "merge",
    "run",
    "within",
]


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name)
