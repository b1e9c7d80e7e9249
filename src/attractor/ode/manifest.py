"""What the numbers of fine data depend on: the equation, the plan, the code and the arithmetic."""

import hashlib
import inspect
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from attractor.ode.fine_data import MANIFEST, SCHEMA, is_close, short, slopes_at
from attractor.ode.samples import initial_states, sampled_parameters
from attractor.ode.trajectories import Plan
from attractor.storage import limits
from attractor.storage.files import json_bytes, write_new
from attractor.storage.objects import AnyPath
from attractor.storage.schema import check
from attractor.train.checkpoint import CheckpointError

WITNESS = 1000  # largest size of a state that is written into a manifest
# What the numbers of a shard depend on.
MODULES = (
    "attractor.core.rates",
    "attractor.core.scheme",
    "attractor.core.tableaus",
    "attractor.core.grid",
    "attractor.core.march",
    "attractor.core.chunks",
    "attractor.ode.samples",
    "attractor.ode.trajectories",
)


def arithmetic() -> str:
    """Return what bits depend on beside the code. AVX512 and AVX2 give the same bits."""
    vectors = torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX2")
    return f"torch {torch.__version__}, {platform.machine()}, {vectors}"


def begin(folder: AnyPath, manifest: dict[str, Any]) -> None:
    """Write the manifest, or check that the existing one is the same.

    Raises:
        ValueError: The folder holds other data.
        CheckpointError: The existing manifest is damaged.
    """
    try:
        there = limits.read_json(folder / "manifest.json", MANIFEST)
        check(there, SCHEMA, "the manifest")
    except FileNotFoundError:
        if not write_new(folder / "manifest.json", json_bytes(manifest)):
            begin(folder, manifest)  # another process without a common lock was first
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
        first = short(then["states"][0])
        if not is_close(now["states"], then["states"]):
            told.append(
                f"sample gave {first} first, and gives {short(now['states'][0])}: it is another, or it "
                "does not draw from its generator"
            )
        elif not is_close(now["slopes"], then["slopes"]):
            was, is_ = (short(w["slopes"][0][0]) for w in (then, now))
            told.append(f"at u = {first} the rate was {was}, and is {is_}")
    if told:
        what = "; ".join(told)
        raise ValueError(f"{folder} holds other data ({what}); take another folder, or empty this one")


def witness_of(
    rate: Any, sample: Any, parameters: Any, plan: Plan, device: Any
) -> dict[str, Any] | None:
    """Return some states of the sampler and the rate there, which sources alone do not determine.

    None where states are too large to be written, or a rate is not finite.
    """
    u = initial_states(rate, sample, 3, plan.generator(0, "witness"), device)
    times = [0.0, 0.37 * plan.dt * plan.steps]
    p = sampled_parameters(parameters, 3, plan.generator(0, "witness parameters"), device)
    slopes = slopes_at(rate, u, times, p)
    if u.shape[-1] > WITNESS or not bool(torch.isfinite(torch.tensor(slopes)).all()):
        return None
    own = {} if p is None else {"parameters": p.tolist()}
    return {"states": u.tolist(), **own, "times": times, "slopes": slopes}


def code_hash(rate: Any, sample: Any, parameters: Any) -> str:
    """Return the hash of the sources that determine the numbers, the user's included."""
    total = hashlib.sha256()
    for name in MODULES:
        total.update(inspect.getsource(sys.modules[name]).encode())
    for thing in (rate, sample, parameters):
        if thing is not None:
            total.update(_source(thing).encode())
    return total.hexdigest()


def _source(thing: Any) -> str:
    """Return the file that defines a function or a class, which may use the rest of the file."""
    owner = thing if inspect.isroutine(thing) else type(thing)
    try:
        return Path(inspect.getsourcefile(owner) or "").read_text()
    except (OSError, TypeError):
        return getattr(owner, "__qualname__", repr(owner))
