"""Runs what is missing of an experiment, an arm and a seed at a time, and keeps every result at once."""

import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from attractor import jobs
from attractor.core.files import FolderLockedError, json_bytes, lock_folder
from attractor.core.versions import versions
from attractor.reproduce import results as kept
from attractor.reproduce.experiment import Experiment
from attractor.reproduce.results import Results, Run, digest
from attractor.reproduce.tasks import Context, data_of, task_of
from attractor.train import generators
from attractor.train.tensors import CheckpointError

Shard = tuple[str, int]  # arm and seed
Tell = Callable[[str], None]


def run(
    experiment: Experiment,
    scale: str,
    *,
    folder: Path | str | None = None,
    data: Path | str | None = None,
    device: str = "cpu",
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    workers: int | None = None,
    budget: float = float("inf"),
    again: bool = False,
    tell: Tell = lambda line: None,
    engine: str | None = None,
    address: str | None = None,
    threads: int | None = None,
    part: str | None = None,
) -> Results:
    """All runs of an experiment at a scale: those in the folder, and the missing ones, made now.

    Args:
        folder: of results; every run is there as soon as it has ended, and what was interrupted goes on
            from its last checkpoint. None: nothing is kept.
        data: the folder of data sets; None: ``ATTRACTOR_DATA``. Where it is named, runs in the results
            that were made on other data raise.
        arms: only these.
        seeds: these instead of the scale's.
        workers: runs at a time, each in a process of its own; times are then not comparable.
        budget: seconds after which no further run begins.
        again: do what is there already once more.
        engine: "here", "processes" or "ray"; None: processes if there are several workers. address: of a
            Ray cluster, whose machines have the data at the same place. See `attractor.jobs.each`.
        threads: of a run on the CPU; None: one, or all where one run has the machine to itself. Sums,
            and so the last digits of what is trained, may depend on it.
        part: such as "3/16": only every sixteenth run, from the third on. Processes on one machine may
            work on one folder at the same time; on several machines each part needs a folder of its own,
            and `merge` puts them together.

    Raises:
        ValueError: runs in the folder were made on other data than those in `data`.
        CheckpointError: a run that was interrupted had begun with other data.
        FolderLockedError: another process is making the same run in the same folder.
    """
    engine = jobs.chosen(engine, workers, address)
    first, every = jobs.part_of(part or "1/1")
    wanted = list(seeds) if seeds is not None else list(experiment.scale(scale).seeds)
    for arm in arms or ():
        experiment.config(arm, scale)  # raises if there is none
    with tempfile.TemporaryDirectory() as nowhere:
        place = Path(nowhere if folder is None else folder)
        path = kept.path_of(place, experiment.name, scale)
        found = kept.load(experiment, scale, place)
        found.seeds = wanted
        missing = set(found.missing())
        mine = [(a, s) for s in wanted for a in found.arms if arms is None or a in arms][first::every]
        todo = [job for job in mine if again or job in missing]
        scratch = path.parent / f".{scale}"
        context = Context(
            0, device, None if data is None else Path(data), scratch, tell, place / ".tokens"
        )
        if data is not None:
            _check_data(experiment, scale, found, [job for job in mine if job not in todo], context)
        if again:  # from the beginning, not from where it was interrupted
            for arm, seed in todo:
                _clear(Path(f"{_scratch(scratch, experiment, arm, scale)}-{seed}"))
        how = {"engine": engine, "workers": workers, "address": address}
        is_open = lambda job: again or job in kept.load(experiment, scale, place).missing((job[1],))
        for (arm, seed), outcome in _outcomes(
            experiment, scale, todo, is_open, context, budget, threads, how
        ):
            kept.add(path, experiment.name, scale, arm, seed, outcome, tuple(experiment.arms))
            value = outcome["metrics"].get(experiment.metric)
            told = "not finite" if value is None else f"{value:.5g}"
            tell(f"{arm}, seed {seed}: {experiment.metric} {told} [{outcome['seconds']:.0f} s]")
        found.runs = kept.load(experiment, scale, place).runs  # also of other processes
        if not found.missing():
            for left in scratch.glob("*"):
                with suppress(FolderLockedError):
                    _clear(left, wait=0.0)
            with suppress(OSError):  # another process is working there
                scratch.rmdir()
    return found


def _clear(folder: Path, wait: float | None = None) -> None:
    """Remove the checkpoints of a run, unless another process is making it.

    Raises:
        FolderLockedError: Another process is making the run.
    """
    if folder.is_dir():
        with lock_folder(folder, wait=wait):
            shutil.rmtree(folder, ignore_errors=True)


def _check_data(
    experiment: Experiment, scale: str, results: Results, shards: list[Shard], context: Context
) -> None:
    """Raise if runs that are there were made on other data than those in the folder of the context."""
    for arm in dict.fromkeys(arm for arm, _ in shards):
        try:
            read = data_of(experiment.task, experiment.config(arm, scale), context)
        except FileNotFoundError:  # nothing can be run on what is not there
            continue
        other = [
            seed
            for name, seed in shards
            if name == arm and read is not None and results.runs[arm][seed].get("data", read) != read
        ]
        if other:
            raise ValueError(
                f"{arm}, seed {other[0]}, is in the results of {experiment.name}, but was run on other "
                f"data than {context.folder} holds; give another folder for the results (--out), or "
                "again=True (--again) to run it once more"
            )


def _outcomes(
    experiment: Experiment, scale: str, wanted: list[Shard], is_open: Callable[[Shard], bool],
    context: Context, budget: float, threads: int | None, engine: dict[str, Any],
) -> Iterator[tuple[Shard, Run]]:  # fmt: skip
    """Every run as it ends, without those that are not open anymore when they would begin."""
    began = time.perf_counter()
    alone = engine["engine"] == "here"
    scratch, cache = context.scratch, context.cache
    assert scratch is not None
    assert cache is not None
    config = {
        "task": experiment.task,
        "arms": {arm: experiment.config(arm, scale) for arm, _ in wanted},
        "scratch": {arm: str(_scratch(scratch.absolute(), experiment, arm, scale)) for arm, _ in wanted},
        "cache": str(cache.absolute()),
        "device": context.device,
        "data": None if context.folder is None else str(context.folder.absolute()),
        "tell": context.tell if alone else None,
    }
    in_time = takewhile(lambda job: time.perf_counter() - began <= budget, filter(is_open, wanted))
    job = jobs.Job(
        "attractor.reproduce.runner:arm", config, threads=threads, gpus=int("cuda" in context.device)
    )
    if wanted:
        scratch.mkdir(parents=True, exist_ok=True)
    try:
        for made in jobs.each(job, in_time, **engine):
            yield made.shard, made.json()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{experiment.missing or experiment.name}: {error}") from error


def _scratch(folder: Path, experiment: Experiment, arm: str, scale: str) -> Path:
    """Where an arm keeps its checkpoints, a seed added: no other configuration finds them there."""
    return folder / digest(experiment.task, experiment.config(arm, scale))


def arm(config: Mapping[str, Any], shard: Shard) -> Run:
    """What a job of `run` does for an arm and a seed.

    Checkpoints go to the folder of results, where they are found after an interruption; on a machine
    that does not have this folder, to a temporary one.
    """
    which, seed = shard
    scratch, cache = Path(f"{config['scratch'][which]}-{seed}"), Path(config["cache"])
    with tempfile.TemporaryDirectory() as elsewhere:
        if not scratch.parent.is_dir():
            scratch, cache = Path(elsewhere) / "scratch", Path(elsewhere) / "cache"
        data = None if config["data"] is None else Path(config["data"])
        context = Context(seed, config["device"], data, scratch, config["tell"] or _silent, cache)
        try:
            with lock_folder(scratch):
                return one(config["task"], config["arms"][which], context)
        except CheckpointError as error:
            raise CheckpointError(
                f"{which}, seed {seed}, cannot go on where it was interrupted: {error}; or run it with "
                "again=True (--again)"
            ) from error


def one(task: str, config: dict[str, Any], context: Context) -> Run:
    """A single run, with all that tells how it was made."""
    began = time.perf_counter()
    with generators.forked(torch.device(context.device)):  # tasks seed the global ones
        outcome = task_of(task)(config, context)
    seconds = time.perf_counter() - began
    if context.scratch is not None:
        shutil.rmtree(context.scratch, ignore_errors=True)
    made = {
        "task": task,
        "config": config,
        "digest": digest(task, config),
        **outcome,
        "seconds": seconds,
        "device": named(context.device),
        "versions": versions(),
    }
    return json.loads(json_bytes(made))  # as it will be read again


def named(device: str) -> str:
    """The device's own name."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine() or device


def _silent(line: str) -> None:
    pass
