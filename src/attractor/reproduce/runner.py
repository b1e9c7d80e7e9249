"""Run the missing arms and seeds of an experiment, and save each result as soon as it is available."""

import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from attractor import jobs
from attractor.common.versions import versions
from attractor.reproduce import results as result_files
from attractor.reproduce.experiment import Experiment
from attractor.reproduce.results import Results, Run, digest
from attractor.reproduce.tasks import Context, data_of, task_of
from attractor.storage.files import FolderLockedError, discard_folder, json_bytes, lock_folder
from attractor.train import generators
from attractor.train.tensors import CheckpointError

Shard = tuple[str, int]  # arm and seed
Tell = Callable[[str], None]
POLL_SECONDS = 2.0  # until runs of other processes are looked at again


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
    """Run an experiment at a scale, and return its results with those that the folder already has.

    Args:
        experiment: The experiment.
        scale: Name of one of its scales.
        folder: Folder of results. Each run is saved there when it ends, and an interrupted run resumes
            from its last checkpoint. None to save nothing.
        data: Folder of the data sets; None for ``ATTRACTOR_DATA``. If it is passed, existing runs on
            other data raise an error.
        device: Name of the torch device.
        arms: Names of the arms to run; None for all arms of the scale.
        seeds: Seeds to run; None for those of the scale.
        workers: Number of runs at a time, each in its own process. Durations are then not comparable.
        budget: Number of seconds after which no further run starts.
        again: Repeat runs that exist already.
        tell: Function that is called with lines of progress.
        engine: "here", "processes" or "ray"; None for "processes" if there are several workers, else
            "here". See `attractor.jobs.each`.
        address: Address of a Ray cluster, whose machines have the data at the same path.
        threads: Number of threads of a run on the CPU. None for one thread, or for all if only one run
            uses the machine. Rounding, and so the last digits of trained weights, may depend on it.
        part: A part of the runs, such as "3/16" for every sixteenth run from the third on. Processes on
            one machine may share a folder, also without parts, and each makes runs that no other is
            making. On several machines, each part needs its own folder; combine the folders with
            `merge`.

    Raises:
        ValueError: Runs in the folder were made on other data than those in `data`.
        CheckpointError: An interrupted run was started with other data.
    """
    engine = jobs.chosen(engine, workers, address)
    offset, stride = jobs.part_of(part or "1/1")
    seed_list = list(seeds) if seeds is not None else list(experiment.scale(scale).seeds)
    for arm in arms or ():
        experiment.config(arm, scale)  # raises an error for an unknown arm
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary if folder is None else folder)
        path = result_files.path_of(root, experiment.name, scale)
        results = result_files.load(experiment, scale, root)
        results.seeds = seed_list
        missing_shards = set(results.missing())
        shards = [(a, s) for s in seed_list for a in results.arms if arms is None or a in arms]
        shards = shards[offset::stride]
        pending = [shard for shard in shards if again or shard in missing_shards]
        scratch = path.parent / f".{scale}"
        context = Context(
            0, device, None if data is None else Path(data), scratch, tell, root / ".tokens"
        )
        if data is not None:
            complete = [shard for shard in shards if shard not in pending]
            _check_data(experiment, scale, results, complete, context)
        if again:  # without the checkpoints of interrupted runs
            for arm, seed in pending:
                discard_folder(Path(f"{_scratch(scratch, experiment, arm, scale)}-{seed}"))
        engine_options = {"engine": engine, "workers": workers, "address": address}
        load = lambda: result_files.load(experiment, scale, root)
        is_open = lambda shard: again or shard in load().missing((shard[1],))
        for (arm, seed), outcome in _outcomes(
            experiment, scale, pending, is_open, context, budget, threads, engine_options
        ):
            result_files.add(path, experiment.name, scale, arm, seed, outcome, tuple(experiment.arms))
            with suppress(FolderLockedError):  # another process has just looked at it
                discard_folder(Path(f"{_scratch(scratch, experiment, arm, scale)}-{seed}"), wait=0.0)
            value = outcome["metrics"].get(experiment.metric)
            value_text = "not finite" if value is None else f"{value:.5g}"
            tell(f"{arm}, seed {seed}: {experiment.metric} {value_text} [{outcome['seconds']:.0f} s]")
        results.runs = load().runs  # including those of other processes
        if not results.missing():
            for entry in scratch.glob("*"):
                with suppress(FolderLockedError):
                    discard_folder(entry, wait=0.0)
            with suppress(OSError):  # not empty: another process uses the folder
                scratch.rmdir()
    return results


def _check_data(
    experiment: Experiment, scale: str, results: Results, shards: list[Shard], context: Context
) -> None:
    """Check that existing runs were made on the data in the folder of the context.

    Raises:
        ValueError: A run was made on other data.
    """
    for arm in dict.fromkeys(arm for arm, _ in shards):
        try:
            data_hashes = data_of(experiment.task, experiment.config(arm, scale), context)
        except FileNotFoundError:  # without the data there is nothing to compare
            continue
        other = [
            seed
            for name, seed in shards
            if name == arm
            and data_hashes is not None
            and results.runs[arm][seed].get("data", data_hashes) != data_hashes
        ]
        if other:
            raise ValueError(
                f"{arm}, seed {other[0]}, is in the results of {experiment.name}, but was run on other "
                f"data than those in {context.folder}; give another folder for the results (--out), or "
                "again=True (--again) to repeat the run"
            )


def _outcomes(
    experiment: Experiment, scale: str, shards: list[Shard], is_open: Callable[[Shard], bool],
    context: Context, budget: float, threads: int | None, engine: dict[str, Any],
) -> Iterator[tuple[Shard, Run]]:  # fmt: skip
    """Yield each run when it ends. A shard is skipped if it is no longer open when it would start.

    Shards that other processes are running come last: most will have ended by then, and those of a
    process that was killed are free.
    """
    start = time.perf_counter()
    in_process = engine["engine"] == "here"
    scratch, cache = context.scratch, context.cache
    assert scratch is not None
    assert cache is not None
    config = {
        "task": experiment.task,
        "arms": {arm: experiment.config(arm, scale) for arm, _ in shards},
        "scratch": {arm: str(_scratch(scratch.absolute(), experiment, arm, scale)) for arm, _ in shards},
        "cache": str(cache.absolute()),
        "device": context.device,
        "data": None if context.folder is None else str(context.folder.absolute()),
        "tell": context.tell if in_process else None,
    }
    in_time = lambda shard: time.perf_counter() - start <= budget
    job = jobs.Job(
        "attractor.reproduce.runner:arm", config, threads=threads, gpus=int("cuda" in context.device)
    )
    if shards:
        scratch.mkdir(parents=True, exist_ok=True)
    try:
        reported = set[Shard]()
        while shards:
            busy: list[Shard] = []
            open_shards = takewhile(in_time, (shard for shard in shards if is_open(shard)))
            for result in jobs.each(job, open_shards, **engine):
                outcome = result.json()
                if outcome is not None:
                    yield result.shard, outcome
                    continue
                busy.append(result.shard)
                if result.shard not in reported:
                    reported.add(result.shard)
                    context.tell("{}, seed {}: another process is running it".format(*result.shard))
            shards = list(filter(is_open, busy))
            if shards:
                time.sleep(POLL_SECONDS)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{experiment.missing or experiment.name}: {error}") from error


def _scratch(folder: Path, experiment: Experiment, arm: str, scale: str) -> Path:
    """Return the path of an arm's checkpoints, to which a seed is appended; unique per configuration."""
    return folder / digest(experiment.task, experiment.config(arm, scale))


def arm(config: Mapping[str, Any], shard: Shard) -> Run | None:
    """Run one shard of the job that `run` starts; return None if another process is running it.

    Checkpoints are saved in the folder of results, so that an interrupted run can resume. On a machine
    without this folder they are saved in a temporary one.
    """
    name, seed = shard
    scratch, cache = Path(f"{config['scratch'][name]}-{seed}"), Path(config["cache"])
    with tempfile.TemporaryDirectory() as temporary:
        if not scratch.parent.is_dir():
            scratch, cache = Path(temporary) / "scratch", Path(temporary) / "cache"
        data = None if config["data"] is None else Path(config["data"])
        context = Context(seed, config["device"], data, scratch, config["tell"] or _silent, cache)
        try:
            with lock_folder(scratch, wait=0.0):
                return one(config["task"], config["arms"][name], context)
        except FolderLockedError:
            return None
        except CheckpointError as error:
            raise CheckpointError(
                f"{name}, seed {seed}, cannot be resumed: {error}; or repeat the run with again=True "
                "(--again)"
            ) from error


def one(task: str, config: dict[str, Any], context: Context) -> Run:
    """Run a task once, and return its outcome with configuration, duration, device and versions."""
    start = time.perf_counter()
    with generators.forked(torch.device(context.device)):  # tasks seed the global generators
        outcome = task_of(task)(config, context)
    seconds = time.perf_counter() - start
    record = {
        "task": task,
        "config": config,
        "digest": digest(task, config),
        **outcome,
        "seconds": seconds,
        "device": device_name(context.device),
        "versions": versions(),
    }
    return json.loads(json_bytes(record))  # the same values as after saving and loading


def device_name(device: str) -> str:
    """Return the model name of a device."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine() or device


def _silent(line: str) -> None:
    pass
