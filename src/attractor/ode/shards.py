"""Fine data on disk: shards of trajectories that can be made anywhere and resumed any time.

A folder holds `manifest.json` (equation, plan, and a hash of the code that makes the numbers) and a
safetensors file a shard. The manifest is written first; a shard takes its name only when it is
complete, so what is there can be relied on, and what is not there is made by the next call. Who makes
it is up to `attractor.jobs`: this process, several, or a cluster; the files are the same.

>>> import tempfile, attractor as at
>>> folder = tempfile.mkdtemp()
>>> data = make_trajectories(
...     at.systems.Lorenz(), folder, trajectories=30, dt=0.1, horizon=1.0, shard_size=20
... )
>>> [list(run.u.shape) for run in data.runs(fraction=0.5)]
[[11, 15, 3]]
"""

import dataclasses
import hashlib
import inspect
import json
import math
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from attractor import jobs
from attractor.core import limits
from attractor.core.files import (
    check_source,
    check_target,
    json_bytes,
    lock_folder,
    open_plain,
    write_bytes,
    write_json,
)
from attractor.core.scheme import Rate, call_rate
from attractor.core.step import with_parameters
from attractor.jobs.naming import name_of, named
from attractor.ode import systems
from attractor.ode.serialization import rate_to_json
from attractor.ode.trajectories import (
    REFERENCE,
    Plan,
    Run,
    Sampler,
    enough_substeps,
    exact_solution,
    initial_states,
    make_run,
    sampled_parameters,
    substeps_for,
    whole_steps,
    with_noise,
)
from attractor.train.checkpoint import CheckpointError
from attractor.train.tensors import read_json

MANIFEST = 1 << 20  # bytes that one may have
SHARDS = 100_000  # files per folder, at most
WITNESS = 1000  # numbers of a state that are still written into one
# What the numbers of a shard depend on.
MODULES = (
    "attractor.core.scheme",
    "attractor.core.tableaus",
    "attractor.core.grid",
    "attractor.core.march",
    "attractor.core.runs",
    "attractor.ode.trajectories",
)
# Code and arithmetic that this process has: sources may be edited while it works.
AGREED: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class FineData:
    """A folder of finished shards."""

    folder: Path
    plan: Plan
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        rate = self.manifest.get("rate", {})
        told = f"{self.plan.trajectories:,} trajectories of {rate.get('system') or rate.get('name')}"
        return f"FineData({told}, dt {self.plan.dt:g}, {self.plan.steps} steps, in {self.folder})"

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """The data in a folder.

        Raises:
            CheckpointError: there are none, they are damaged, or shards are still missing.
        """
        folder = Path(folder)
        try:
            manifest, _ = read_json(folder / "manifest.json", MANIFEST, link=False)
            entries = dict(manifest["plan"])
            if "count" in entries:  # data of the first versions
                entries["trajectories"] = entries.pop("count")
            plan = Plan(**entries)
            _check_shards(plan)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder} holds no fine data ({type(error).__name__}: {error})"
            ) from None
        data = cls(folder, plan, manifest)
        missing = data.missing()
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {plan.shards} shards; the call that began it goes on "
                "where it was interrupted"
            )
        return data

    def missing(self) -> list[int]:
        """Shards that are not there yet."""
        present = {path.name for path in self.folder.iterdir() if path.is_file()}
        return [k for k in range(self.plan.shards) if _name(k) not in present]

    @property
    def hash(self) -> str:
        """SHA-256 of all files and their names: equal for equal data."""
        total = hashlib.sha256()
        for name in ("manifest.json", *map(_name, range(self.plan.shards))):
            with open_plain(self.folder / name) as file:
                total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    def check_rate(self, rate: Rate, device: torch.device | str | None = None) -> None:
        """Raise if the data are clearly of another equation.

        Args:
            device: where the rate is asked.

        Raises:
            ValueError: it gives other values where the equation of the data was asked.
        """
        seen = self.manifest.get("witness")  # data of the first versions have none
        if seen is None:
            return
        tensor = lambda key: torch.tensor(seen[key], dtype=torch.float64, device=device)
        parameters = tensor("parameters") if "parameters" in seen else None
        now = _slopes(rate, tensor("states"), seen["times"], parameters)
        if not _is_close(now, seen["slopes"]):
            raise ValueError(
                f"{self.folder} holds data of another equation: at u = {_short(seen['states'][0])} its "
                f"rate was {_short(seen['slopes'][0][0])}, and this one gives {_short(now[0][0])}"
            )

    def runs(
        self, fraction: float = 1.0, noise: float = 0.0, device: torch.device | str | None = None
    ) -> list[Run]:
        """The first part of the trajectories, every state with normal noise of that size.

        Noise belongs to (seed, shard): the same every time, on any machine.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction = {fraction} must be above 0 and at most 1")
        if not 0 <= noise < math.inf:
            raise ValueError(f"noise = {noise} must be a finite number, and not negative")
        left, found = max(1, round(fraction * self.plan.trajectories)), []
        for k in range(self.plan.shards):
            if left <= 0:
                break
            run = _read(self.folder / _name(k), self.plan, k)
            if noise:
                run = with_noise(run, noise, self.plan.generator(k, "noise"))
            found.append(run.part(left).to(device))
            left -= self.plan.size(k)
        return found


def make_trajectories(
    system_or_rate: Rate,
    folder: Path | str,
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
    """Make fine data in a folder, or go on with what is there.

    Args:
        trajectories: Number of trajectories.
        dt: Time between two states.
        horizon: Duration of a trajectory, a whole number of dt.
        sample: ``(n, generator=...) -> [n, d]`` initial states, for a rate of your own.
        parameters: ``(n, generator=...) -> [n, k]`` parameters of an equation ``rate(t, u, p)``, one row
            per trajectory. The shards hold them beside the states, as `Run.parameters`.
        fine_dt: step of the reference; None finds one.
        period: of a rate that depends on t: shards start at different phases.
        shard_size: trajectories in a file. The numbers depend on it, on `workers` they do not.
        workers: shards at a time. engine: "here", "processes" or "ray"; None: processes if there are
            several workers. address: of a Ray cluster. See `attractor.jobs.each`.
        progress: called with a line for each shard.
        part: such as "3/16": only every sixteenth shard, from the third on. Several machines may so work
            on one folder; the data are there when all of them have ended.

    Raises:
        ValueError: the folder holds data of another plan, equation or version of the code.
    """
    folder = Path(folder)
    steps = whole_steps(dt, horizon)
    if min(trajectories, shard_size) < 1:
        raise ValueError(
            f"trajectories = {trajectories}, shard_size = {shard_size}: each must be 1 or more"
        )
    engine = jobs.chosen(engine, workers, address)
    first, every = jobs.part_of(part or "1/1")
    plan = Plan(trajectories, dt, steps, 1, seed, shard_size, period)
    _check_shards(plan)
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
                "code": _code_hash(system_or_rate, sample, parameters),
                "witness": _witness(system_or_rate, sample, parameters, plan, device),
            }
        )
    )
    with lock_folder(folder):  # shards need none: equal plans give equal files, written whole
        _begin(folder, manifest)

    mine = range(first, plan.shards, every)
    missing = [k for k in mine if not _is_good(folder / _name(k), plan, k)]
    for k in missing:  # before anything is computed
        check_target(folder / _name(k))
    done = len(mine) - len(missing)
    functions = {"rate": system_or_rate, "sample": sample, "parameters": parameters}
    job = _job(functions, plan, device, manifest["code"], engine)
    for made in jobs.each(job, missing, engine=engine, workers=workers, address=address):
        write_bytes(folder / _name(made.shard), made.content)
        done += 1
        progress(f"shard {done} of {len(mine)}")
    return FineData(folder, plan, manifest)


def _check_shards(plan: Plan) -> None:
    """Raise a ValueError if a plan has more than `SHARDS` shards."""
    if plan.shards > SHARDS:
        raise ValueError(
            f"{plan.trajectories:,} trajectories in shards of {plan.shard_size:,} are {plan.shards:,} "
            f"files, and a folder holds at most {SHARDS:,}; use a larger shard_size"
        )


def make_shard(config: Mapping[str, Any], shard: int) -> bytes:
    """The file of one shard: what a job of `make_trajectories` runs.

    Raises:
        ValueError: the code or the arithmetic here is not that of the caller.
    """
    from safetensors.torch import save

    rate, sample, parameters = (_found(config[key]) for key in ("rate", "sample", "parameters"))
    if (config["code"], config["arithmetic"]) not in AGREED:
        code = _code_hash(rate, sample, parameters)
        for what, ours in (("code", code), ("arithmetic", _arithmetic())):
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
    about = {"shard": shard, "t0": run.t0.hex(), "sha256": _tensor_hash(*tensors.values())}
    # One entry, because safetensors writes several in an order that changes from run to run.
    return save(tensors, {"about": json.dumps(about)})


def _job(functions: dict[str, Any], plan: Plan, device: Any, code: str, engine: str) -> jobs.Job:
    config = {
        **{key: thing if engine == "here" else _told(thing) for key, thing in functions.items()},
        "plan": dataclasses.asdict(plan),
        "device": None if device is None else str(device),
        "code": code,
        "arithmetic": _arithmetic(),
    }
    AGREED.add((code, config["arithmetic"]))
    return jobs.Job("attractor.ode.shards:make_shard", config, gpus=int("cuda" in str(device)))


def _told(thing: Any) -> Any:
    """A system or a function as JSON; whatever has no name as it is, for workers that can be sent it."""
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


def _arithmetic() -> str:
    """What bits depend on beside our code. AVX512 and AVX2 give the same, others need not."""
    vectors = torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX2")
    return f"torch {torch.__version__}, {platform.machine()}, {vectors}"


def _begin(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, or check that the one there says the same."""
    try:
        there = limits.read_json(folder / "manifest.json", MANIFEST)
    except FileNotFoundError:
        write_json(folder / "manifest.json", manifest)
        return
    except ValueError as error:
        raise CheckpointError(
            f"{folder}/manifest.json is damaged ({error}); use another folder"
        ) from None
    flat = lambda m: {**m.pop("plan", {}), **m}
    old, new = flat(dict(there)), flat(dict(manifest))
    then, now = (m.pop("witness", None) for m in (old, new))
    differs = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
    told = [f"{k} was {old.get(k)!r}, is {new.get(k)!r}" for k in differs if k != "code"]
    if "code" in differs:
        told.append("the file of the rate or of sample, or attractor itself, was edited since")
    if then is not None and now is not None and not told:
        first = _short(then["states"][0])
        if not _is_close(now["states"], then["states"]):
            told.append(
                f"sample gave {first} first, and gives {_short(now['states'][0])}: it is another, or it "
                "does not draw from its generator"
            )
        elif not _is_close(now["slopes"], then["slopes"]):
            was, is_ = (_short(w["slopes"][0][0]) for w in (then, now))
            told.append(f"at u = {first} the rate was {was}, and is {is_}")
    if told:
        what = "; ".join(told)
        raise ValueError(f"{folder} holds other data ({what}); take another folder, or empty this one")


def _witness(rate: Any, sample: Any, parameters: Any, plan: Plan, device: Any) -> dict[str, Any] | None:
    """Some states of the sampler and what the rate gives there: sources do not tell all of it.

    None where states are too large to be written, or a rate is not finite.
    """
    u = initial_states(rate, sample, 3, plan.generator(0, "witness"), device)
    times = [0.0, 0.37 * plan.dt * plan.steps]
    p = sampled_parameters(parameters, 3, plan.generator(0, "witness parameters"), device)
    slopes = _slopes(rate, u, times, p)
    if u.shape[-1] > WITNESS or not bool(torch.isfinite(torch.tensor(slopes)).all()):
        return None
    own = {} if p is None else {"parameters": p.tolist()}
    return {"states": u.tolist(), **own, "times": times, "slopes": slopes}


def _slopes(
    rate: Any, u: torch.Tensor, times: list[float], parameters: torch.Tensor | None
) -> list[list[list[float]]]:
    """The rate of states ``[n, d]`` with parameters ``[n, k]`` at each time."""
    bound = with_parameters(rate, parameters)
    with torch.no_grad():
        return [call_rate(bound, torch.tensor(t).to(u), u).tolist() for t in times]


def _is_close(one: Any, other: Any) -> bool:
    """Equal up to the rounding of another machine."""
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (one, other))
    return a.shape == b.shape and torch.allclose(a, b, 1e-6, 1e-9 * b.abs().max().item())


def _short(numbers: list[float]) -> str:
    """The first of them, for a message."""
    more = ", ..." if len(numbers) > 4 else ""
    return f"[{', '.join(f'{x:.6g}' for x in numbers[:4])}{more}]"


def _read(path: Path, plan: Plan, shard: int) -> Run:
    from safetensors import SafetensorError, safe_open

    try:
        check_source(path)
        with safe_open(path, "pt") as file:
            about, u = limits.parse_json(file.metadata()["about"], path), file.get_tensor("u")
            p = file.get_tensor("parameters") if "parameters" in file.keys() else None  # noqa: SIM118
        t0 = float.fromhex(about["t0"])
        known = (u,) if p is None else (u, p)
        good = about["sha256"] == _tensor_hash(*known) and about["shard"] == shard
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    fits = u.shape[:2] == (plan.steps + 1, plan.size(shard)) and (p is None or len(p) == u.shape[1])
    if not good or not fits:
        raise CheckpointError(f"{path} is damaged: it does not match its own hash or the plan")
    return Run(t0, u, p)


def _is_good(path: Path, plan: Plan, shard: int) -> bool:
    try:
        _read(path, plan, shard)
    except CheckpointError:
        return False
    return True


def _tensor_hash(*tensors: torch.Tensor) -> str:
    total = hashlib.sha256()
    for x in tensors:
        total.update(x.cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def _code_hash(rate: Any, sample: Any, parameters: Any) -> str:
    """Of the sources that make the numbers: ours, and those of the rate and the samplers."""
    total = hashlib.sha256()
    for name in MODULES:
        total.update(inspect.getsource(sys.modules[name]).encode())
    for thing in (rate, sample, parameters):
        if thing is not None:
            total.update(_source(thing).encode())
    return total.hexdigest()


def _source(thing: Any) -> str:
    """The whole file a function or a class is from, since it may use what else is there."""
    owner = thing if inspect.isroutine(thing) else type(thing)
    try:
        return Path(inspect.getsourcefile(owner) or "").read_text()
    except (OSError, TypeError):
        return getattr(owner, "__qualname__", repr(owner))


def _name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"
