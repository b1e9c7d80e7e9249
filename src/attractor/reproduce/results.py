"""Files of results: one for an experiment and a scale, with a run for every arm and seed.

    {"format": 1, "experiment": ..., "scale": ..., "runs": {arm: {seed: run}}}

A run has the configuration it was made with and a digest of it; what was made with another configuration
than the experiment has now does not count. Runs of several files, made on several days and devices, are
put together by `merge`.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from attractor.core import schema
from attractor.core.files import lock_folder, write_json
from attractor.core.limits import read_json

FORMAT = 1
Run = dict[str, Any]
RUN = schema.record(
    {
        "digest": schema.text(), "metrics": schema.mapping(schema.any_of(schema.number(), schema.null)),
        "seconds": schema.number(0), "device": schema.text(),
    },
    {
        "curves": schema.mapping(schema.plain), "versions": schema.mapping(schema.text()),
        "data": schema.any_of(schema.mapping(schema.plain), schema.null),
        "made_by": schema.any_of(schema.text(), schema.null),
    },
    others=schema.plain,
)  # fmt: skip
SEEDS = schema.mapping(lambda run, path: None)  # `fault` says whether a run counts
FILE = schema.record(
    {"experiment": schema.text(), "scale": schema.text(), "runs": schema.mapping(SEEDS)},
    others=lambda value, path: None,
)
LONGEST = schema.LONGEST  # characters of a name


@dataclass
class Results:
    """Runs of an experiment at one scale.

    Attributes:
        experiment, scale: their names.
        metric: what `values` and `mean` are about if nothing else is asked for.
        arms, seeds: those there should be.
        extra: arms among them that no verdict waits for.
        runs: arm -> seed -> what the task returned, with configuration, device and so on.
        numbers: The paper's values of the metric, by arm.
        logarithmic: The metric differs by factors.
    """

    experiment: str
    scale: str
    metric: str
    arms: list[str]
    seeds: list[int]
    runs: dict[str, dict[int, Run]] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    logarithmic: bool = False

    @property
    def complete(self) -> bool:
        """Whether the arms that the claim is about can be compared: some seed is there of all."""
        own = [set(self.runs.get(arm, ())) for arm in self.arms if arm not in self.extra]
        return bool(own) and bool(set.intersection(*own))

    @property
    def partly(self) -> bool:
        """Whether runs that the claim is about are missing."""
        return any(arm not in self.extra for arm, _ in self.missing())

    def missing(self, seeds: Iterable[int] | None = None) -> list[tuple[str, int]]:
        """(arm, seed) of the runs that are not there, all arms of a seed before the next seed.

        Args:
            seeds: Only these, which need not be in `self.seeds`; None for `self.seeds`.
        """
        seeds = self.seeds if seeds is None else seeds
        return [(a, s) for s in seeds for a in self.arms if s not in self.runs.get(a, {})]

    def values(self, arm: str, metric: str | None = None) -> list[float]:
        """A metric of an arm, of all its seeds; a number that was not finite is NaN."""
        found = [run["metrics"][metric or self.metric] for run in self.runs.get(arm, {}).values()]
        return [math.nan if x is None else float(x) for x in found]

    def mean(self, arm: str, metric: str | None = None) -> float:
        """Over seeds; NaN without any."""
        values = self.values(arm, metric)
        return statistics.fmean(values) if values else math.nan

    def spread(self, arm: str, metric: str | None = None) -> float | None:
        """The standard deviation over seeds; None of fewer than two, or where one is not finite."""
        values = self.values(arm, metric)
        known = len(values) > 1 and all(map(math.isfinite, values))
        return statistics.stdev(values) if known else None

    def typical(self, arm: str, metric: str | None = None) -> float:
        """The geometric mean over seeds, of what differs by factors; NaN without any."""
        values = self.values(arm, metric)
        if not values or any(map(math.isnan, values)):
            return math.nan
        return 10 ** statistics.fmean(math.log10(max(x, 1e-300)) for x in values)

    def factor(self, arm: str, metric: str | None = None) -> float | None:
        """What one standard deviation of the logarithm multiplies by; None of fewer than two seeds."""
        values = self.values(arm, metric)
        if len(values) < 2 or any(map(math.isnan, values)):
            return None
        return 10 ** min(statistics.stdev(math.log10(max(x, 1e-300)) for x in values), 300)

    def paired(self, arm: str, other: str, metric: str | None = None) -> list[float]:
        """Differences arm - other, at the seeds that both have."""
        name, both = metric or self.metric, self.runs.get(arm, {}).keys() & self.runs.get(other, {})

        def get(which: str, seed: int) -> float:
            found = self.runs[which][seed]["metrics"][name]
            return math.nan if found is None else float(found)

        return [get(arm, seed) - get(other, seed) for seed in sorted(both)]

    def curve(self, arm: str, name: str, seed: int | None = None) -> list[Any]:
        """A list that the task kept, of the first seed or of a given one."""
        runs = self.runs[arm]
        return runs[next(iter(runs)) if seed is None else seed]["curves"][name]

    def data_of(self, arm: str) -> set[str]:
        """Hashes of what its seeds were run on, each in one string."""
        found = self.runs.get(arm, {}).values()
        return {json.dumps(run["data"], sort_keys=True) for run in found if run.get("data")}

    def seconds(self) -> float:
        """All runs together."""
        return sum(run["seconds"] for runs in self.runs.values() for run in runs.values())

    def devices(self) -> list[str]:
        """What the runs were made on."""
        return sorted({run["device"] for runs in self.runs.values() for run in runs.values()})


def digest(task: str, config: Mapping[str, Any]) -> str:
    """A name for what an arm was run with."""
    return hashlib.sha256(json.dumps([task, config], sort_keys=True).encode()).hexdigest()[:16]


def path_of(folder: Path | str, experiment: str, scale: str) -> Path:
    """Where results are kept."""
    return Path(folder) / experiment.replace("-", "_") / f"{scale}.json"


def read(path: Path, experiment: str, scale: str) -> dict[str, dict[int, Run]]:
    """The runs in a file, whatever they were made with; nothing if there is no file."""
    try:
        found = _content(path)
    except FileNotFoundError:
        return {}
    if (found["experiment"], found["scale"]) != (experiment, scale):
        raise ValueError(
            f"{path} holds {found['experiment']} at scale {found['scale']}, not {experiment} at {scale}"
        )
    try:
        return {arm: {int(seed): run for seed, run in own.items()} for arm, own in found["runs"].items()}
    except ValueError as error:
        raise ValueError(f"{path} has a seed that is no number: {error}") from None


def _content(path: Path) -> dict[str, Any]:
    """What a file of results holds; runs themselves are not checked."""
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is no file of results: {error}") from None
    if isinstance(found, dict) and found.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{path} has format {found['format']!r:.40}; this version reads {FORMAT}")
    schema.check(found, FILE, f"{path} is no file of results")
    return found


def write(path: Path, experiment: str, scale: str, runs: Mapping[str, Mapping[int, Run]]) -> None:
    """Write a file of results; seeds in their order."""
    plain = {arm: {str(s): seeds[s] for s in sorted(seeds)} for arm, seeds in runs.items()}
    write_json(path, {"format": FORMAT, "experiment": experiment, "scale": scale, "runs": plain})


def fault(run: Any, metric: str | None = None) -> str | None:
    """Return what is wrong with a run of a file of results, or None.

    Args:
        metric: Name of a metric that it must have.
    """
    wrong = schema.mismatch(run, RUN)
    if wrong is None and metric is not None and metric not in run["metrics"]:
        return f"its metrics lack {metric!r}"
    return wrong


def add(
    path: Path, experiment: str, scale: str, arm: str, seed: int, run: Run, order: Iterable[str] = ()
) -> None:
    """Add a run to a file of results, in which other processes may keep theirs at the same time.

    Args:
        order: Names of arms in the order of the file; others come after them.
    """
    with lock_folder(path.parent):
        runs = read(path, experiment, scale)
        runs.setdefault(arm, {})[seed] = run
        names = [*order, *(name for name in runs if name not in order)]
        write(path, experiment, scale, {name: runs[name] for name in names if name in runs})


@lru_cache(maxsize=8)
def _by_digest(files: tuple[tuple[Path, int, int], ...]) -> dict[str, dict[int, Run]]:
    """All runs in these files, as they were at these times and in these places of the disk."""
    found: dict[str, dict[int, Run]] = {}
    for path, *_ in files:
        kept = _content(path)
        name, scale = kept["experiment"], kept["scale"]
        for seeds in read(path, name, scale).values():
            for seed, run in seeds.items():
                if fault(run) is None:
                    found.setdefault(run["digest"], {})[seed] = run
    return found


def load(experiment: Any, scale: str, folder: Path | str) -> Results:
    """What there is of an experiment, made with the configuration it has now.

    A run is a pure function of task, configuration and seed; so those that another experiment has made
    count as well. A run that `fault` finds damaged does not count.
    """
    kept = read(path_of(folder, experiment.name, scale), experiment.name, scale)
    files = [(path, path.stat()) for path in sorted(Path(folder).glob(f"*/{scale}.json"))]
    lent = _by_digest(tuple((path, now.st_mtime_ns, now.st_ino) for path, now in files))
    arms = experiment.arms_of(scale)
    runs: dict[str, dict[int, Run]] = {}
    for arm in arms:
        wanted = digest(experiment.task, experiment.config(arm, scale))
        own = {s: run for s, run in kept.get(arm, {}).items() if fault(run) is None}
        own = {s: run for s, run in own.items() if run["digest"] == wanted}
        every = {**lent.get(wanted, {}), **own}
        runs[arm] = {s: every[s] for s in sorted(every) if experiment.metric in every[s]["metrics"]}
    seeds = list(experiment.scale(scale).seeds)
    return Results(
        experiment.name, scale, experiment.metric, arms, seeds, runs, experiment.extra,
        experiment.numbers, experiment.logarithmic,
    )  # fmt: skip


def _current(experiment: Any, arm: str, scale: str) -> str | None:
    """The digest that an arm's runs should have; None if there is no such arm."""
    known = arm in experiment.arms_of(scale)
    return digest(experiment.task, experiment.config(arm, scale)) if known else None


def merge(experiment: Any, scale: str, folder: Path | str, others: Iterable[Path]) -> Results:
    """Take runs of other files into the one in the folder.

    Those that are there already stay, whatever numbers a second run gave, unless they were made with
    another configuration than the experiment has now, and the new ones were not. Nothing is written
    before all files are known to be sound.

    Raises:
        ValueError: a file is of another experiment or scale, or a run in it is damaged.
    """
    path = path_of(folder, experiment.name, scale)
    with lock_folder(path.parent):
        runs = read(path, experiment.name, scale)
        for other in others:
            if not Path(other).exists():
                raise FileNotFoundError(f"{other} is not there to be merged")
            for arm, seeds in read(Path(other), experiment.name, scale).items():
                metric = experiment.metric if arm in experiment.arms else None
                current = _current(experiment, arm, scale)
                for seed, run in seeds.items():
                    wrong = fault(run, metric)
                    if wrong:
                        raise ValueError(
                            f"{other} cannot be merged: {wrong}, in the run of arm "
                            f"{arm[:LONGEST]!r} and seed {seed}; remove this run from the file"
                        )
                    known = runs.setdefault(arm, {}).get(seed)
                    if known is None or fault(known) or known["digest"] != run["digest"] == current:
                        runs[arm][seed] = run
        write(path, experiment.name, scale, runs)
    return load(experiment, scale, folder)
