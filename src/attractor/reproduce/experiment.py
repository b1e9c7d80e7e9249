"""What an experiment is."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attractor.reproduce.results import Results
from attractor.reproduce.verdict import INCONCLUSIVE, NOT_RUN, Verdict

Config = Mapping[str, Any]  # whatever JSON can hold
SCALES = ("smoke", "cpu", "gpu")


@dataclass(frozen=True)
class Scale:
    """How large an experiment is run.

    Attributes:
        config: what differs from the experiment's `base`.
        seeds: of every arm.
        arms: the names of those that are run; None: all.
        judged: whether it is large enough for a verdict; a smoke test shows only that everything runs.
        note: what is special about it, told beside its results.
        time: what to expect, such as "4 min on one H200".
        training: The share of the paper's training, such as "30 of 164 epochs"; empty if nothing is
            trained.
    """

    config: Config = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    arms: tuple[str, ...] | None = None
    judged: bool = True
    time: str = ""
    note: str = ""
    training: str = ""


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper.

    Attributes:
        name: paper and place, as ``stepnet-table1``; the file has the same with an underscore.
        paper: The short name of a paper, with which the experiment's name begins. Titles of the papers
            are in ``experiments/__init__.py``; any other paper may be named.
        place: where in the paper, with the rows that were typed in.
        claim: what the paper says there, in a sentence.
        task: ``module:function``, called with the configuration of an arm and a `Context`.
        arms: name -> what is special about it.
        scales: "smoke" (seconds), "cpu" (minutes), "gpu" (minutes on one large GPU), as far as it has
            them.
        metric: the number that is compared, one of those the task returns.
        better: "higher", "lower", or "" where neither is.
        numbers: the paper's, by arm.
        judge: ``results -> Verdict``.
        base: what all arms have in common.
        extra: arms that the claim is not about, run beside the others; no verdict waits for them.
        others: further numbers to show beside the metric.
        unit: of the metric, such as "%".
        logarithmic: the metric differs by factors, as errors do: means over seeds are geometric.
        data: data sets that it needs, by their names in `attractor.data`.
        missing: which data it needs that do not come with the others, and what to do about it; where
            they are, it runs.
        note: what was settled differently from the paper, and why.
        picture: ``results -> figure`` of Matplotlib, or None.
    """

    name: str
    paper: str
    place: str
    claim: str
    task: str
    arms: Mapping[str, Config]
    scales: Mapping[str, Scale]
    metric: str
    better: str
    numbers: Mapping[str, float]
    judge: Callable[[Results], Verdict]
    base: Config = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    unit: str = ""
    logarithmic: bool = False
    data: tuple[str, ...] = ()
    missing: str = ""
    note: str = ""
    picture: Callable[[Results], Any] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]*", self.paper):
            raise ValueError(
                f"{self.name}: paper {self.paper!r} is not a short name of lower-case letters and digits"
            )
        if not self.name.startswith(f"{self.paper}-"):
            raise ValueError(
                f"{self.name}: the name of an experiment of {self.paper!r} begins with '{self.paper}-'"
            )
        for what, given, known in (
            ("scales", self.scales, SCALES),
            ("numbers", self.numbers, self.arms),
            ("extra", self.extra, self.arms),
            *((f"arms of {n}", s.arms or (), self.arms) for n, s in self.scales.items()),
        ):
            unknown = [x for x in given if x not in known]
            if unknown:
                raise ValueError(f"{self.name}: {what} has {unknown}; there is {', '.join(known)}")
        if self.better not in ("higher", "lower", ""):
            raise ValueError(f"{self.name}: better = {self.better!r} is not higher, lower or empty")

    def scale(self, name: str) -> Scale:
        """The scale of that name; an error that names those there are."""
        if name not in self.scales:
            raise ValueError(f"{self.name} has no scale {name!r}, but {', '.join(self.scales)}")
        return self.scales[name]

    def config(self, arm: str, scale: str) -> dict[str, Any]:
        """Everything an arm is run with, but its seed, as JSON would give it back."""
        if arm not in self.arms:
            raise ValueError(f"{self.name} has no arm {arm!r}, but {', '.join(self.arms)}")
        merged = {**self.base, **self.scale(scale).config, **self.arms[arm]}
        return json.loads(json.dumps(merged, sort_keys=True))

    def arms_of(self, scale: str) -> list[str]:
        """The names of the arms that are run at a scale."""
        return list(self.scale(scale).arms or self.arms)

    def verdict(self, results: Results | None) -> Verdict | None:
        """Return the judge's verdict; None where there is nothing, or not enough, to judge."""
        if results is None or not results.complete:
            return Verdict(NOT_RUN, self.missing) if self.missing else None
        if not self.scale(results.scale).judged:
            return None
        judged = [arm for arm in results.arms if arm not in results.extra]
        lost = [arm for arm in judged if any(map(math.isnan, results.values(arm)))]
        if lost:  # rules compare numbers
            return Verdict(INCONCLUSIVE, f"{self.metric} is not finite for {'; '.join(lost)}")
        mixed = [arm for arm in judged if self.data and len(results.data_of(arm)) > 1]
        if mixed:
            return Verdict(INCONCLUSIVE, f"seeds were run on different data: {'; '.join(mixed)}")
        return self.judge(results)
