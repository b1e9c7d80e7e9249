"""Files of results: one file per experiment and scale, with one run per arm and seed.

    {"format": 1, "experiment": ..., "scale": ..., "runs": {arm: {seed: run}}}

A run contains its configuration and a digest of it. Runs with another configuration than the experiment
has now are not used. `merge` combines the runs of several files, made on different days or devices.
"""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from attractor.storage import schema
from attractor.storage.files import lock_folder, write_json
from attractor.storage.limits import read_json

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
SEEDS = schema.mapping(lambda run, path: None)  # runs themselves are validated by `fault`
FILE = schema.record(
    {"experiment": schema.text(), "scale": schema.text(), "runs": schema.mapping(SEEDS)},
    others=lambda value, path: None,
)
SEED = re.compile("0|-?[1-9][0-9]{0,18}")  # as written by `write`
LONGEST = schema.LONGEST  # maximum number of characters of a name in messages


@dataclass
class Results:
    """Runs of an experiment at one scale.

    Attributes:
        experiment: Name of the experiment.
        scale: Name of the scale.
        metric: The metric that `values`, `mean` and similar methods use by default.
        arms: Names of the arms that a complete set of runs has.
        seeds: Seeds that a complete set of runs has.
        runs: The runs by arm and seed. A run is the outcome of the task, with its configuration, device,
            versions and duration.
        extra: Arms whose runs a verdict does not require.
        numbers: The paper's values of the metric, by arm.
        logarithmic: Whether the metric is compared by ratios.
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
        """Whether all arms of the claim have a run of one common seed, so that they can be compared."""
        seed_sets = [set(self.runs.get(arm, ())) for arm in self.arms if arm not in self.extra]
        return bool(seed_sets) and bool(set.intersection(*seed_sets))

    @property
    def partly(self) -> bool:
        """Whether runs of the arms of the claim are missing."""
        return any(arm not in self.extra for arm, _ in self.missing())

    def missing(self, seeds: Iterable[int] | None = None) -> list[tuple[str, int]]:
        """Return (arm, seed) of the missing runs, ordered by seed, then by arm.

        Args:
            seeds: The seeds to check, which need not be in `self.seeds`; None for `self.seeds`.
        """
        seeds = self.seeds if seeds is None else seeds
        return [(a, s) for s in seeds for a in self.arms if s not in self.runs.get(a, {})]

    def values(self, arm: str, metric: str | None = None) -> list[float]:
        """Return a metric of an arm for all of its seeds; NaN where it was not finite."""
        numbers = [run["metrics"][metric or self.metric] for run in self.runs.get(arm, {}).values()]
        return [math.nan if x is None else float(x) for x in numbers]

    def mean(self, arm: str, metric: str | None = None) -> float:
        """Return the mean of a metric over seeds; NaN if the arm has no runs."""
        values = self.values(arm, metric)
        return statistics.fmean(values) if values else math.nan

    def spread(self, arm: str, metric: str | None = None) -> float | None:
        """Return the standard deviation over seeds.

        It is None if there are fewer than two seeds, or if a value is not finite.
        """
        values = self.values(arm, metric)
        is_finite = len(values) > 1 and all(map(math.isfinite, values))
        return statistics.stdev(values) if is_finite else None

    def typical(self, arm: str, metric: str | None = None) -> float:
        """Return the geometric mean over seeds; NaN if the arm has no runs or a value is NaN."""
        values = self.values(arm, metric)
        if not values or any(map(math.isnan, values)):
            return math.nan
        return 10 ** statistics.fmean(math.log10(max(x, 1e-300)) for x in values)

    def factor(self, arm: str, metric: str | None = None) -> float | None:
        """Return the geometric standard deviation over seeds.

        It is None if there are fewer than two seeds, or if a value is NaN.
        """
        values = self.values(arm, metric)
        if len(values) < 2 or any(map(math.isnan, values)):
            return None
        return 10 ** min(statistics.stdev(math.log10(max(x, 1e-300)) for x in values), 300)

    def paired(self, arm: str, other: str, metric: str | None = None) -> list[float]:
        """Return the differences arm - other at the seeds that both arms have."""
        name, seeds = metric or self.metric, self.runs.get(arm, {}).keys() & self.runs.get(other, {})

        def get(arm_name: str, seed: int) -> float:
            value = self.runs[arm_name][seed]["metrics"][name]
            return math.nan if value is None else float(value)

        return [get(arm, seed) - get(other, seed) for seed in sorted(seeds)]

    def curve(self, arm: str, name: str, seed: int | None = None) -> list[Any]:
        """Return a curve of an arm, for a seed; None for the first seed of the arm."""
        runs = self.runs[arm]
        return runs[next(iter(runs)) if seed is None else seed]["curves"][name]

    def data_of(self, arm: str) -> set[str]:
        """Return the distinct data hashes of an arm's runs, each as a JSON string."""
        runs = self.runs.get(arm, {}).values()
        return {json.dumps(run["data"], sort_keys=True) for run in runs if run.get("data")}

    def seconds(self) -> float:
        """Return the total duration of all runs."""
        return sum(run["seconds"] for runs in self.runs.values() for run in runs.values())

    def devices(self) -> list[str]:
        """Return the names of the devices on which the runs were made."""
        return sorted({run["device"] for runs in self.runs.values() for run in runs.values()})


def digest(task: str, config: Mapping[str, Any]) -> str:
    """Return a digest of a task and the configuration of an arm."""
    return hashlib.sha256(json.dumps([task, config], sort_keys=True).encode()).hexdigest()[:16]


def path_of(folder: Path | str, experiment: str, scale: str) -> Path:
    """Return the path of the file with the results of an experiment at a scale."""
    return Path(folder) / experiment.replace("-", "_") / f"{scale}.json"


def read(path: Path, experiment: str, scale: str) -> dict[str, dict[int, Run]]:
    """Return all runs in a file, whatever their configuration; empty if the file does not exist.

    Raises:
        ValueError: The file is not a file of results, or it is of another experiment or scale.
    """
    try:
        content = _content(path)
    except FileNotFoundError:
        return {}
    if (content["experiment"], content["scale"]) != (experiment, scale):
        raise ValueError(
            f"{path} has the results of {content['experiment']} at scale {content['scale']}; expected "
            f"{experiment} at scale {scale}"
        )
    for seed in chain.from_iterable(content["runs"].values()):
        if not SEED.fullmatch(seed):
            raise ValueError(f"{path} has the seed {seed[:40]!r}, which is no integer of 64 bits")
    return {
        arm: {int(seed): run for seed, run in seeds.items()} for arm, seeds in content["runs"].items()
    }


def _content(path: Path) -> dict[str, Any]:
    """Return the content of a file of results. The runs in it are not validated."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is no file of results: {error}") from None
    if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{path} has format {content['format']!r:.40}; this version reads {FORMAT}")
    schema.check(content, FILE, f"{path} is no file of results")
    return content


def write(path: Path, experiment: str, scale: str, runs: Mapping[str, Mapping[int, Run]]) -> None:
    """Write a file of results, with the seeds of each arm in ascending order."""
    plain = {arm: {str(s): seeds[s] for s in sorted(seeds)} for arm, seeds in runs.items()}
    write_json(path, {"format": FORMAT, "experiment": experiment, "scale": scale, "runs": plain})


def fault(run: Any, metric: str | None = None) -> str | None:
    """Return what is wrong with a run of a file of results; None for a valid run.

    Args:
        metric: Name of a metric that the run must have.
    """
    problem = schema.mismatch(run, RUN)
    if problem is None and metric is not None and metric not in run["metrics"]:
        return f"its metrics lack {metric!r}"
    return problem


def add(
    path: Path, experiment: str, scale: str, arm: str, seed: int, run: Run, order: Iterable[str] = ()
) -> None:
    """Add a run to a file of results. Several processes may do so at the same time.

    Args:
        order: Names of arms in the order of the file; other arms come after them.
    """
    with lock_folder(path.parent):
        runs = read(path, experiment, scale)
        runs.setdefault(arm, {})[seed] = run
        names = [*order, *(name for name in runs if name not in order)]
        write(path, experiment, scale, {name: runs[name] for name in names if name in runs})


@lru_cache(maxsize=8)
def _by_digest(files: tuple[tuple[Path, int, int], ...]) -> dict[str, dict[int, Run]]:
    """Return all valid runs of some files, by digest and seed.

    Args:
        files: Path, modification time and inode of each file, so that the cache is not used for a file
            that has changed.
    """
    runs: dict[str, dict[int, Run]] = {}
    for path, *_ in files:
        content = _content(path)
        name, scale = content["experiment"], content["scale"]
        for seeds in read(path, name, scale).values():
            for seed, run in seeds.items():
                if fault(run) is None:
                    runs.setdefault(run["digest"], {})[seed] = run
    return runs


def load(experiment: Any, scale: str, folder: Path | str) -> Results:
    """Load the valid runs of an experiment whose configuration is the present one.

    A run is a pure function of task, configuration and seed, so runs of other experiments with the same
    task and configuration are used as well. Runs that `fault` rejects are left out.
    """
    file_runs = read(path_of(folder, experiment.name, scale), experiment.name, scale)
    files = [(path, path.stat()) for path in sorted(Path(folder).glob(f"*/{scale}.json"))]
    shared_runs = _by_digest(tuple((path, now.st_mtime_ns, now.st_ino) for path, now in files))
    arms = experiment.arms_of(scale)
    runs: dict[str, dict[int, Run]] = {}
    for arm in arms:
        current_digest = digest(experiment.task, experiment.config(arm, scale))
        valid_runs = {s: run for s, run in file_runs.get(arm, {}).items() if fault(run) is None}
        valid_runs = {s: run for s, run in valid_runs.items() if run["digest"] == current_digest}
        candidates = {**shared_runs.get(current_digest, {}), **valid_runs}
        runs[arm] = {
            s: candidates[s] for s in sorted(candidates) if experiment.metric in candidates[s]["metrics"]
        }
    seeds = list(experiment.scale(scale).seeds)
    return Results(
        experiment.name, scale, experiment.metric, arms, seeds, runs, experiment.extra,
        experiment.numbers, experiment.logarithmic,
    )  # fmt: skip


def _current(experiment: Any, arm: str, scale: str) -> str | None:
    """Return the digest of an arm's present configuration; None if the scale has no such arm."""
    if arm not in experiment.arms_of(scale):
        return None
    return digest(experiment.task, experiment.config(arm, scale))


def merge(experiment: Any, scale: str, folder: Path | str, others: Iterable[Path]) -> Results:
    """Merge the runs of other files into the file of an experiment and scale in a folder.

    If both have a run of the same arm and seed, the one in the folder is kept, unless it is invalid or
    only the other one has the present configuration of the experiment. Nothing is written if any file
    is invalid.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A file is of another experiment or scale, or a run in it is invalid.
    """
    path = path_of(folder, experiment.name, scale)
    with lock_folder(path.parent):
        runs = read(path, experiment.name, scale)
        for other in others:
            if not Path(other).exists():
                raise FileNotFoundError(f"{other} cannot be merged: the file does not exist")
            for arm, seeds in read(Path(other), experiment.name, scale).items():
                metric = experiment.metric if arm in experiment.arms else None
                current = _current(experiment, arm, scale)
                for seed, run in seeds.items():
                    problem = fault(run, metric)
                    if problem:
                        raise ValueError(
                            f"{other} cannot be merged: {problem}, in the run of arm "
                            f"{arm[:LONGEST]!r} and seed {seed}; remove this run from the file"
                        )
                    existing = runs.setdefault(arm, {}).get(seed)
                    if (
                        existing is None
                        or fault(existing)
                        or existing["digest"] != run["digest"] == current
                    ):
                        runs[arm][seed] = run
        write(path, experiment.name, scale, runs)
    return load(experiment, scale, folder)
