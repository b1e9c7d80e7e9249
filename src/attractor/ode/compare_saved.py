"""Comparisons of many saved solvers, as jobs for this process, several or a cluster."""

from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from attractor import jobs
from attractor.core import get_scheme
from attractor.jobs.naming import name_of, named
from attractor.ode.compare import compare
from attractor.ode.comparison import Comparison
from attractor.ode.samples import Sampler
from attractor.ode.solver import HybridSolver
from attractor.storage.files import json_bytes
from attractor.storage.fingerprint import fingerprint
from attractor.storage.objects import AnyPath
from attractor.train import checkpoint


def compare_all(
    solvers: Mapping[str, AnyPath | str],
    folder: Path | str,
    *,
    horizon: float | Mapping[str, float | None] | None = None,
    rate: Callable[..., Tensor] | None = None,
    sample: Sampler | None = None,
    parameters: Sampler | None = None,
    jax_rate: Callable[..., Any] | None = None,
    device: str = "cpu",
    engine: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    threads: int | None = None,
    **options: Any,
) -> Iterator[tuple[str, Comparison]]:
    """`compare` for many saved solvers, each with its name as it ends; those in the folder come first.

    A comparison stays whole: all of its times are from one machine. Errors and calls do not depend on
    who made it; times do, and are best with one worker a machine.

    Args:
        solvers: name -> folder. Their files travel to the workers.
        folder: where comparisons are kept, and not made again.
        horizon: one for all, or name -> horizon; None: a hundred steps of each solver.
        rate, sample, parameters, jax_rate: of all solvers, if the equation is your own: functions of a
            module or a file.
        engine, workers, address: see `attractor.jobs.each`. threads: of torch, for a comparison.
        options: further ones of `compare`, such as batch and schemes.
    """
    for scheme in options.get("schemes", ()):
        get_scheme(scheme)
    own = {"rate": rate, "sample": sample, "parameters": parameters, "jax_rate": jax_rate}
    names = {key: name_of(function) for key, function in own.items()}
    for key, function in own.items():
        if function is not None and names[key] is None:
            raise TypeError(f"{key} must be a function of a module or a file, for workers to find")
    own_horizons = dict(horizon) if isinstance(horizon, Mapping) else {}
    about = {
        "horizon": None if own_horizons else horizon, "device": device, "options": options, **names,
    }  # fmt: skip
    code = {key: fingerprint(function) for key, function in own.items() if function is not None}
    files = {name: checkpoint.packed(place) for name, place in solvers.items()}
    shards = []
    for name, packed in files.items():
        known = packed if own_horizons.get(name) is None else [packed, own_horizons[name]]
        shards.append((name, sha256(json_bytes(known)).hexdigest()[:16]))
    job = jobs.Job(
        "attractor.ode.compare_saved:compare_one", {**about, "solvers": files, "horizons": own_horizons},
        threads=threads, gpus=int("cuda" in device),
    )  # fmt: skip
    how = {"engine": engine, "workers": workers, "address": address}
    for made in jobs.keep(job, shards, folder, {**about, "code": code}, **how):
        yield made.shard[0], Comparison.from_json(made.json(folder))


def compare_one(config: Mapping[str, Any], shard: tuple[str, str]) -> dict[str, Any]:
    """What a job of `compare_all` does for a solver, which the shard names with a hash of its files."""
    rate, *own = (
        config[key] and named(config[key]) for key in ("rate", "sample", "parameters", "jax_rate")
    )
    with checkpoint.unpacked(config["solvers"][shard[0]], shard[0]) as folder:
        solver = HybridSolver.load(folder, rate).to(config["device"])
    horizon = config["horizons"].get(shard[0], config["horizon"])
    horizon = 100 * solver.dt if horizon is None else horizon
    how = dict(zip(("sample", "parameters", "jax_rate"), own)) | config["options"]
    return compare(solver, horizon=horizon, **how).to_json()
