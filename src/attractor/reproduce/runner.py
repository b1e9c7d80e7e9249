"""Runs what is missing of an experiment, an arm and a seed at a time, and keeps every result at once."""

import json
import multiprocessing
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attractor import __version__
from attractor.core.files import json_bytes
from attractor.reproduce import results as kept
from attractor.reproduce.experiment import Experiment
from attractor.reproduce.results import Results, Run, digest
from attractor.reproduce.tasks import Context, task_of

Job = tuple[str, int]  # arm and seed
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
    workers: int = 1,
    budget: float = float("inf"),
    again: bool = False,
    tell: Tell = lambda line: None,
) -> Results:
    """All runs of an experiment at a scale: those in the folder, and the missing ones, made now.

    Args:
        folder: of results; every run is there as soon as it has ended, and what was interrupted goes on
            from its last checkpoint. None: nothing is kept.
        data: the folder of data sets; None: ``ATTRACTOR_DATA``.
        arms: only these.
        seeds: these instead of the scale's.
        workers: runs at a time, each in a process of its own; times are then not comparable.
        budget: seconds after which no further run begins.
        again: do what is there already once more.
    """
    wanted = list(seeds) if seeds is not None else list(experiment.scale(scale).seeds)
    for arm in arms or ():
        experiment.config(arm, scale)  # raises if there is none
    with tempfile.TemporaryDirectory() as nowhere:
        place = Path(nowhere if folder is None else folder)
        path = kept.path_of(place, experiment.name, scale)
        found = kept.load(experiment, scale, place)
        found.seeds = wanted
        jobs = found.missing() if not again else [(a, s) for s in wanted for a in found.arms]
        jobs = [job for job in jobs if arms is None or job[0] in arms]
        context = Context(0, device, None if data is None else Path(data), None, tell)
        scratch = path.parent / f".{scale}"
        for (arm, seed), outcome in _outcomes(
            experiment, scale, jobs, context, scratch, workers, budget
        ):
            everything = kept.read(path, experiment.name, scale)
            everything.setdefault(arm, {})[seed] = outcome
            order = [*experiment.arms, *(a for a in everything if a not in experiment.arms)]
            kept.write(
                path, experiment.name, scale, {a: everything[a] for a in order if a in everything}
            )
            found.runs.setdefault(arm, {})[seed] = outcome
            found.runs[arm] = dict(sorted(found.runs[arm].items()))
            value = outcome["metrics"].get(experiment.metric)
            told = "not finite" if value is None else f"{value:.5g}"
            tell(f"{arm}, seed {seed}: {experiment.metric} {told} [{outcome['seconds']:.0f} s]")
        if not found.missing():
            shutil.rmtree(scratch, ignore_errors=True)
    return found


def _outcomes(
    experiment: Experiment, scale: str, jobs: list[Job], context: Context, scratch: Path, workers: int,
    budget: float,
) -> Iterator[tuple[Job, Run]]:  # fmt: skip
    """Every run as it ends."""
    began = time.perf_counter()
    late = lambda: time.perf_counter() - began > budget

    def given(job: Job) -> tuple[Any, ...]:
        arm, seed = job
        name = f"{experiment.arms_of(scale).index(arm)}-{seed}"
        quiet = replace(context, seed=seed, scratch=scratch / name)
        return experiment.task, experiment.config(arm, scale), quiet

    if workers == 1:
        for job in jobs:
            if late():
                return
            try:
                yield job, one(*given(job))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{experiment.missing or experiment.name}: {error}") from error
        return
    silent = [(task, config, replace(c, tell=_silent)) for task, config, c in map(given, jobs)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(one, *arguments): job for job, arguments in zip(jobs, silent)}
        for done in as_completed(running):
            if late():
                pool.shutdown(wait=False, cancel_futures=True)
            if not done.cancelled():
                yield running[done], done.result()


def one(task: str, config: dict[str, Any], context: Context) -> Run:
    """A single run, with all that tells how it was made."""
    began = time.perf_counter()
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


def versions() -> dict[str, str]:
    """Of what numbers depend on."""
    return {
        "attractor": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _silent(line: str) -> None:
    pass
