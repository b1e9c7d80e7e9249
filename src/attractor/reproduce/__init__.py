"""Run the tables and figures of the papers again, and judge the claims.

An `Experiment` states what is varied (its arms), what the paper reports, which metric is compared, and
how the claim is judged. A task of `reproduce.tasks` runs one arm with one seed. The experiments of the
project are in its folder ``experiments``, one short file each, without any training code.

>>> from attractor.reproduce import Experiment, Scale, best
>>> example = Experiment(
...     name="attns-example", paper="attns", place="Table 0", claim="Two is more than one.",
...     task="attractor.reproduce.tasks:echo", arms={"one": {"value": 1.0}, "two": {"value": 2.0}},
...     scales={"smoke": Scale(judged=True)}, metric="value", better="higher",
...     numbers={"one": 1.0, "two": 2.0}, judge=best("two"),
... )
>>> from attractor.reproduce import run
>>> results = run(example, "smoke")
>>> results.mean("two")
2.0
>>> print(example.judge(results))  # one seed has no standard deviation, hence no interval
inconclusive (size unclear: 100 %): the least lead is that over one: 1, no interval (1 inconclusive)

On the command line: ``attractor reproduce --list``, ``attractor reproduce stepnet-table1 --scale cpu``.
"""

from types import ModuleType

from attractor.common.lazy import submodule
from attractor.reproduce.effects import (
    CONTRADICTED,
    DIRECTIONS,
    EXACT,
    INCONCLUSIVE,
    NOT_RUN,
    SUPPORTED,
    Deviation,
    Effect,
    compare,
    margin,
    mean_effect,
    number,
    quantile,
    values_of,
)
from attractor.reproduce.experiment import Experiment, Scale
from attractor.reproduce.results import Results, load, merge
from attractor.reproduce.runner import run
from attractor.reproduce.shelf import catalogue, find, from_file, papers
from attractor.reproduce.tasks import Context
from attractor.reproduce.verdict import (
    Rule,
    Verdict,
    all_of,
    below,
    best,
    combine,
    decide,
    gains,
    within,
)

__all__ = [
    "CONTRADICTED",
    "DIRECTIONS",
    "EXACT",
    "INCONCLUSIVE",
    "NOT_RUN",
    "SUPPORTED",
    "Context",
    "Deviation",
    "Effect",
    "Experiment",
    "Results",
    "Rule",
    "Scale",
    "Verdict",
    "all_of",
    "below",
    "best",
    "catalogue",
    "combine",
    "compare",
    "decide",
    "find",
    "from_file",
    "gains",
    "load",
    "margin",
    "mean_effect",
    "merge",
    "number",
    "papers",
    "quantile",
    "run",
    "values_of",
    "within",
]


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name)
