"""Make fine data in a folder: shards of trajectories, by any number of processes and in any order.

A folder holds `manifest.json` (equation, plan, and a hash of the code that makes the numbers) and one
safetensors file per shard. The manifest is written first. A shard takes its name only when it is
complete, so that existing files are valid and the next call makes the missing ones. Shards are made by
`attractor.jobs`: in this process, in several, or on a cluster; the files are the same.

>>> import tempfile, attractor as at
>>> folder = tempfile.mkdtemp()
>>> data = make_trajectories(
...     at.systems.Lorenz(), folder, trajectories=30, dt=0.1, horizon=1.0, shard_size=20
... )
>>> [list(run.u.shape) for run in data.runs(fraction=0.5)]
[[11, 15, 3]]
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attractor import jobs
from attractor.core.rates import Rate
from attractor.jobs.naming import name_of, named
from attractor.ode import systems
from attractor.ode.fine_data import FineData, check_shards, is_good, shard_name, tensor_hash
from attractor.ode.manifest import arithmetic, begin, code_hash, witness_of
from attractor.ode.samples import Sampler, initial_states, sampled_parameters
from attractor.ode.serialization import rate_to_json
from attractor.ode.substeps import enough_substeps, substeps_for, whole_steps
from attractor.ode.trajectories import REFERENCE, Plan, exact_solution, make_run
from attractor.storage.files import check_target, json_bytes, lock_folder, names_in, write_bytes
from attractor.storage.objects import AnyPath, path_of

# Code and arithmetic that this process has: sources may be edited while it works.
AGREED: set[tuple[str, str]] = set()


def make_trajectories(
    system_or_rate: Rate,
    folder: AnyPath | str,
    *,
    trajectories: int,
    dt: float,
    horizon: float,
    sample: Sampler | None = None,
    parameters: Sampler | None = None,
    fine_dt: float | None = None,
    period: float | None = None,
    seed: int = 0,
    shard_size: int = 1000,
    workers: int | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[str], None] = lambda what: None,
    engine: str | None = None,
    address: str | None = None,
    part: str | None = None,
) -> FineData:
    """Make fine data in a folder, or continue where an earlier call was interrupted.

    Args:
        folder: The folder; a URL such as "s3://bucket/data" names one in an object store.
        trajectories: Number of trajectories.
        dt: Time between two states.
        horizon: Duration of a trajectory, a whole number of dt.
        sample: ``(n, generator=...) -> [n, d]`` initial states, for a rate of your own.
        parameters: ``(n, generator=...) -> [n, k]`` parameters of an equation ``rate(t, u, p)``, one row
            per trajectory. The shards hold them beside the states, as `Run.parameters`.
        fine_dt: Step of the reference. None: found by refinement.
        period: Period of a rate that depends on t. Shards start at different phases of it.
        seed: Seed of the initial states and parameters.
        shard_size: Number of trajectories per file. The numbers depend on it, but not on `workers`.
        workers: Number of shards that are made at once.
        device: Where the trajectories are computed.
        progress: Called with a line for each shard.
        engine: "here", "processes" or "ray"; None: processes if there are several workers. See
            `attractor.jobs.each`.
        address: The address of a Ray cluster.
        part: A part of the shards: "3/16" makes every sixteenth shard, from the third on, so that
            several machines can work on one folder.

    Raises:
        ValueError: The folder holds data of another plan, equation or version of the code.
    """
    folder = path_of(folder)
    steps = whole_steps(dt, horizon)
    if min(trajectories, shard_size) < 1:
        raise ValueError(
            f"trajectories = {trajectories}, shard_size = {shard_size}: each must be 1 or more"
        )
    engine = jobs.chosen(engine, workers, address)
    first, every = jobs.part_of(part or "1/1")
    plan = Plan(trajectories, dt, steps, 1, seed, shard_size, period)
    check_shards(plan)
    if fine_dt is not None:
        substeps = substeps_for(dt, fine_dt)
    else:
        few = initial_states(system_or_rate, sample, 8, plan.generator(0, "substeps"))
        few_p = sampled_parameters(parameters, 8, plan.generator(0, "substeps parameters"))
        substeps = enough_substeps(system_or_rate, few, dt, steps, period=period, parameters=few_p)
    plan = dataclasses.replace(plan, substeps=substeps)
    exact = None if parameters is not None else exact_solution(system_or_rate, plan.start(0))
    manifest = json.loads(
        json_bytes(
            {
                "kind": "fine trajectories",
                "rate": rate_to_json(system_or_rate),
                "plan": dataclasses.asdict(plan),
                "reference": REFERENCE if exact is None else "exact",
                "code": code_hash(system_or_rate, sample, parameters),
                "witness": witness_of(system_or_rate, sample, parameters, plan, device),
            }
        )
    )
    with lock_folder(folder):  # shards need none: equal plans give equal files, written whole
        begin(folder, manifest)

    mine = range(first, plan.shards, every)
    present = names_in(folder)
    is_present = lambda k: shard_name(k) in present and is_good(folder / shard_name(k), plan, k)
    missing = [k for k in mine if not is_present(k)]
    for k in missing:  # before anything is computed
        check_target(folder / shard_name(k))
    done = len(mine) - len(missing)
    functions = {"rate": system_or_rate, "sample": sample, "parameters": parameters}
    job = _job(functions, plan, device, manifest["code"], engine)
    for made in jobs.each(job, missing, engine=engine, workers=workers, address=address):
        write_bytes(folder / shard_name(made.shard), made.content)
        done += 1
        progress(f"shard {done} of {len(mine)}")
    return FineData(folder, plan, manifest)


def make_shard(config: Mapping[str, Any], shard: int) -> bytes:
    """Return the content of the file of a shard; the job that `make_trajectories` runs.

    Raises:
        ValueError: The code or the arithmetic here is not that of the caller.
    """
    from safetensors.torch import save

    rate, sample, parameters = (_found(config[key]) for key in ("rate", "sample", "parameters"))
    if (config["code"], config["arithmetic"]) not in AGREED:
        code = code_hash(rate, sample, parameters)
        for what, ours in (("code", code), ("arithmetic", arithmetic())):
            if config[what] != ours:
                raise ValueError(
                    f"the {what} of this worker is not that of the caller ({ours}, not {config[what]}), "
                    "so its numbers might differ; install the same on all machines"
                )
        AGREED.add((config["code"], config["arithmetic"]))
    run = make_run(rate, sample, Plan(**config["plan"]), shard, config["device"], parameters)
    tensors = {"u": run.u.cpu().contiguous()}
    if run.parameters is not None:
        tensors["parameters"] = run.parameters.cpu().contiguous()
    about = {"shard": shard, "t0": run.t0.hex(), "sha256": tensor_hash(*tensors.values())}
    # One entry, because safetensors writes several in an order that changes from run to run.
    return save(tensors, {"about": json.dumps(about)})


def _job(functions: dict[str, Any], plan: Plan, device: Any, code: str, engine: str) -> jobs.Job:
    config = {
        **{key: thing if engine == "here" else _told(thing) for key, thing in functions.items()},
        "plan": dataclasses.asdict(plan),
        "device": None if device is None else str(device),
        "code": code,
        "arithmetic": arithmetic(),
    }
    AGREED.add((code, config["arithmetic"]))
    gpus = int("cuda" in str(device))
    return jobs.Job("attractor.ode.shards:make_shard", config, gpus=gpus, copies=True)


def _told(thing: Any) -> Any:
    """Return a system or a function as JSON, or the object itself if it has no name to import."""
    saved = {} if thing is None else rate_to_json(thing)
    if "system" in saved and thing == _found(saved):
        return saved
    name = name_of(thing)
    return {"function": name} if name else thing


def _found(told: Any) -> Any:
    if not isinstance(told, dict):
        return told
    if "function" in told:
        return named(told["function"])
    return getattr(systems, told["system"])(**told["options"])
