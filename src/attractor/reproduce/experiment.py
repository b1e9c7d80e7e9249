"""The declaration of an experiment: a table or figure of a paper, with its arms and its judge."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attractor.reproduce.effects import INCONCLUSIVE, NOT_RUN
from attractor.reproduce.results import Results
from attractor.reproduce.verdict import Verdict

Config = Mapping[str, Any]  # JSON values only
SCALES = ("smoke", "cpu", "gpu")


@dataclass(frozen=True)
class Scale:
    """The size at which an experiment is run.

    Attributes:
        config: Entries that replace or extend those of the experiment's `base`.
        seeds: Seeds of every arm.
        arms: Names of the arms to run; None for all.
        judged: Whether the scale is large enough for a verdict. A smoke test only shows that everything
            runs.
        time: The expected duration, such as "4 min on one H200".
        note: A remark on this scale, printed below its results.
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
        name: Paper and place, such as ``stepnet-table1``. The file has the same name with underscores.
        paper: The short name of a paper, with which the experiment's name begins. Titles of the papers
            are in ``experiments/__init__.py``; any other paper may be named.
        place: The place in the paper, with the rows whose numbers are in `numbers`.
        claim: The paper's claim in one sentence.
        task: ``module:function``. The function is called with the configuration of an arm and a
            `Context`.
        arms: Configuration entries of each arm, by the name of the arm.
        scales: The scales that the experiment has, of "smoke" (seconds), "cpu" (minutes) and "gpu"
            (minutes on one large GPU).
        metric: The metric that is compared; the task returns it.
        better: "higher" or "lower"; "" if neither is better.
        numbers: The paper's values of the metric, by arm.
        judge: Function ``results -> Verdict``.
        base: Configuration entries that all arms share.
        extra: Additional arms that the claim does not mention. A verdict does not require their runs.
        others: Further metrics to show beside `metric`.
        unit: Unit of the metric, such as "%".
        logarithmic: Whether the metric is compared by ratios, as errors are. Means over seeds are then
            geometric.
        data: Names of the required data sets in `attractor.data`.
        missing: Message that names required data that cannot be downloaded automatically, and says how
            to pass them. The experiment runs if the data are present.
        note: Deviations from the paper's setting, with reasons.
        picture: Function ``results -> figure`` that draws with Matplotlib, or None.
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
                f"{self.name}: paper {self.paper!r} is not a short name; use lower-case letters and "
                "digits, with a letter first"
            )
        if not self.name.startswith(f"{self.paper}-"):
            raise ValueError(
                f"{self.name}: the name of an experiment of {self.paper!r} must begin with "
                f"'{self.paper}-'"
            )
        for field_name, names, choices in (
            ("scales", self.scales, SCALES),
            ("numbers", self.numbers, self.arms),
            ("extra", self.extra, self.arms),
            *((f"arms of {n}", s.arms or (), self.arms) for n, s in self.scales.items()),
        ):
            unknown_names = [x for x in names if x not in choices]
            if unknown_names:
                raise ValueError(
                    f"{self.name}: {field_name} has the unknown names {unknown_names}; the allowed "
                    f"names are {', '.join(choices)}"
                )
        if self.better not in ("higher", "lower", ""):
            raise ValueError(
                f"{self.name}: better = {self.better!r} is not allowed; use 'higher', 'lower' or ''"
            )

    def scale(self, name: str) -> Scale:
        """Return the scale of a name.

        Raises:
            ValueError: The experiment has no such scale.
        """
        if name not in self.scales:
            raise ValueError(
                f"{self.name} has no scale {name!r}; its scales are {', '.join(self.scales)}"
            )
        return self.scales[name]

    def config(self, arm: str, scale: str) -> dict[str, Any]:
        """Return the configuration of an arm at a scale, without the seed, as read back from JSON.

        Raises:
            ValueError: The experiment has no such arm or scale.
        """
        if arm not in self.arms:
            raise ValueError(f"{self.name} has no arm {arm!r}; its arms are {', '.join(self.arms)}")
        config = {**self.base, **self.scale(scale).config, **self.arms[arm]}
        return json.loads(json.dumps(config, sort_keys=True))

    def arms_of(self, scale: str) -> list[str]:
        """Return the names of the arms that are run at a scale."""
        return list(self.scale(scale).arms or self.arms)

    def verdict(self, results: Results | None) -> Verdict | None:
        """Return the judge's verdict; None if runs are missing or the scale is not judged."""
        if results is None or not results.complete:
            return Verdict(NOT_RUN, self.missing) if self.missing else None
        if not self.scale(results.scale).judged:
            return None
        arms = [arm for arm in results.arms if arm not in results.extra]
        nan_arms = [arm for arm in arms if any(map(math.isnan, results.values(arm)))]
        if nan_arms:  # the rules of `judge` require finite numbers
            return Verdict(INCONCLUSIVE, f"{self.metric} is not finite for {'; '.join(nan_arms)}")
        mixed_arms = [arm for arm in arms if self.data and len(results.data_of(arm)) > 1]
        if mixed_arms:
            return Verdict(INCONCLUSIVE, f"seeds were run on different data: {'; '.join(mixed_arms)}")
        return self.judge(results)
