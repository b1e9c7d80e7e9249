"""Tune solvers of many equations, as jobs for this process, several or a cluster."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from attractor import jobs
from attractor.core.rates import Rate
from attractor.jobs.naming import name_of, named
from attractor.ode import serialization
from attractor.ode.samples import Sampler
from attractor.ode.tuning import TunedSolver, tune
from attractor.storage import schema
from attractor.storage.files import json_bytes
from attractor.storage.fingerprint import fingerprint
from attractor.train import checkpoint
from attractor.train.tensors import CheckpointError

# What `tune_one` returns.
RESULT = schema.any_of(
    schema.record({"failure": schema.text(100_000)}),
    schema.record({"report": schema.plain, "files": checkpoint.PACKED}),
)


@dataclass(frozen=True)
class Problem:
    """The arguments of `tune` that belong to one equation.

    Attributes:
        rate: One of `attractor.systems`, or a function of a module or a file.
        horizon: The duration of a trajectory.
        sample, parameters: Samplers of initial states and parameters: functions of a module or a file.
        period: Period of a rate that depends on t.
    """

    rate: Rate
    horizon: float
    sample: Sampler | None = None
    parameters: Sampler | None = None
    period: float | None = None


def tune_all(
    problems: Mapping[str, Problem],
    folder: Path | str,
    *,
    error: float,
    device: str = "cpu",
    engine: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    threads: int | None = None,
    **options: Any,
) -> Iterator[tuple[str, TunedSolver | ValueError]]:
    """Call `tune` for many equations, and yield the name and the result of each when it is complete.

    Results in the folder are yielded first and are not computed again; this includes the errors of
    equations that could not be solved, for which another folder is needed to try again. All times
    of one equation are measured by one worker, so that its candidates can be compared. They depend
    on the machine of the worker and on the other work of that machine.

    Args:
        problems: The equations by name.
        folder: Folder of the results. It belongs to one error and one set of options.
        error: The error to reach.
        device: Where the equations are solved.
        engine, workers, address: See `attractor.jobs.each`.
        threads: Number of torch threads per worker.
        options: Further arguments of `tune`: batch, budget, compile and seed.

    Yields:
        The name of an equation, and its solver or the error that `tune` raised for this equation.

    Raises:
        TypeError: A rate or a sampler is not a function of a module or a file.
        ValueError: The folder holds the results of another error or other options.
    """
    config = {"error": float(error), "device": device, "options": options}
    described = {name: _described(name, problem) for name, problem in problems.items()}
    shards = {}
    for name, problem in problems.items():
        functions = (problem.rate, problem.sample, problem.parameters)
        code = [fingerprint(x) for x in functions if name_of(x)]
        shards[name] = (name, sha256(json_bytes([described[name], code])).hexdigest()[:16])
    job = jobs.Job(
        "attractor.ode.tuning_sweep:tune_one", {**config, "problems": described},
        threads=threads, gpus=int("cuda" in device),
    )  # fmt: skip
    engine_options = {"engine": engine, "workers": workers, "address": address}
    for artifact in jobs.keep(job, shards.values(), folder, config, **engine_options):
        name, content = artifact.shard[0], artifact.json(folder)
        schema.check(content, RESULT, f"the result of {name} in {folder}", CheckpointError)
        if "failure" in content:
            yield name, ValueError(content["failure"])
        else:
            with checkpoint.unpacked(content["files"], f"the result of {name} in {folder}") as place:
                solver = TunedSolver.load(place, problems[name].rate)
            yield name, solver


def tune_one(config: Mapping[str, Any], shard: tuple[str, str]) -> dict[str, Any]:
    """Tune a solver of one equation; the job that `tune_all` runs.

    Args:
        config: Error, device, further options of `tune`, and the equations by name.
        shard: The name of an equation, and a hash of its description.

    Returns:
        The report and the files of the saved solver in base64, or the message of a ValueError.
    """
    problem = config["problems"][shard[0]]
    rate, sample, parameters = (_function(problem[key]) for key in ("rate", "sample", "parameters"))
    try:
        solver = tune(
            rate, error=config["error"], horizon=problem["horizon"], sample=sample,
            parameters=parameters, period=problem["period"], device=config["device"],
            **config["options"],
        )  # fmt: skip
    except ValueError as error:  # the other equations are tuned nevertheless
        return {"failure": str(error)}
    with tempfile.TemporaryDirectory() as temporary:
        files = checkpoint.packed(solver.save(Path(temporary) / "solver"))
    return {"report": solver.report.to_json(), "files": files}


def _described(name: str, problem: Problem) -> dict[str, Any]:
    """Return a problem as JSON, with functions by the names by which workers import them."""
    described: dict[str, Any] = {"horizon": float(problem.horizon), "period": problem.period}
    for key in ("rate", "sample", "parameters"):
        value = getattr(problem, key)
        if value is None:
            described[key] = None
        elif serialization.is_system(value):
            described[key] = serialization.rate_to_json(value)
        elif function_name := name_of(value):
            described[key] = {"function": function_name}
        else:
            raise TypeError(
                f"the {key} of {name} must be a built-in system or a function of a module or a file, "
                "because workers import it by its name"
            )
    return described


def _function(described: dict[str, Any] | None) -> Any:
    """Return the system or function that `_described` describes."""
    if described is None:
        return None
    if "function" in described:
        return named(described["function"])
    return serialization.rate_from_json(described)
