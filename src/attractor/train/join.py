"""Let processes that train together find each other and compare their runs before they begin."""

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from attractor.common.restarts import init_method
from attractor.storage.files import json_bytes
from attractor.storage.fingerprint import fingerprint
from attractor.train.definition import Definition

JOIN_SECONDS = 120.0  # how long a process waits for the others to call train
TOGETHER = (
    "all processes that torchrun or accelerate launch has started train one run together: seed before "
    "the model is made and give all of them the same data, or distributed=False to train in each alone"
)

_calls = 0  # number of calls of `join` in this process


def join(
    share: tuple[int, int], definition: Definition, options: Mapping[str, bool | int | str | None]
) -> None:
    """Raise in every process unless all of them are about to train the same run in the same way.

    Each process writes its run to the store of the process group, where the others read it. So none
    waits in a collective operation that the others never reach.

    Args:
        share: the rank of this process and the number of processes.
        definition: the definition of the run.
        options: further arguments of `train` on which processes have to agree.

    Raises:
        RuntimeError: another process has not called within `JOIN_SECONDS`.
        ValueError: processes train different runs; the message names the differences.
    """
    global _calls
    rank, world = share
    if world == 1:
        return
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    mine = {"definition": definition.to_json(), "options": dict(options)}
    store.set(_key(_calls, rank, "run"), json_bytes(mine).decode())
    store.set(_key(_calls, rank, "digest"), fingerprint(mine))
    absent = _absent(store, [_key(_calls, other, "digest") for other in range(world)])
    if absent:
        _delete(store, _calls, rank)
        raise RuntimeError(
            f"rank {rank} has waited {JOIN_SECONDS:g} s for ranks {absent} to call train, too; "
            f"{TOGETHER}"
        )
    _delete(store, _calls - 1, rank)  # all processes have read the entries of the previous call
    digests = [store.get(_key(_calls, other, "digest")) for other in range(world)]
    others = [other for other in range(world) if digests[other] != digests[0]]
    if others:
        one, other = (json.loads(store.get(_key(_calls, r, "run"))) for r in (0, others[0]))
    _calls += 1
    if others:
        first, second = (Definition.from_json(x["definition"]) for x in (one, other))
        differences = first.unlike(second) + [
            f"{name} = {value!r}, not {other['options'][name]!r}"
            for name, value in one["options"].items()
            if value != other["options"][name]
        ]
        message = f"ranks {others} train another run than rank 0: rank 0 has {'; '.join(differences)}"
        raise ValueError(f"{message}; {TOGETHER}")


def launched(cpu: bool) -> Any:
    """Return an Accelerator of all launched processes, with a limit on the time to wait for them."""
    from accelerate import Accelerator, InitProcessGroupKwargs

    if torch.distributed.is_initialized():
        return Accelerator(cpu=cpu)
    limit = InitProcessGroupKwargs(init_method=init_method(), timeout=timedelta(seconds=JOIN_SECONDS))
    try:
        accelerator = Accelerator(cpu=cpu, kwargs_handlers=[limit])
    except torch.distributed.DistError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise RuntimeError(
            f"not all of the {os.environ['WORLD_SIZE']} processes have called train within "
            f"{JOIN_SECONDS:g} s ({reason}); {TOGETHER}"
        ) from None
    if torch.distributed.is_initialized():  # later operations have the default limit
        inside = torch.distributed.distributed_c10d
        inside._get_default_store().set_timeout(inside.default_pg_timeout)
        inside._set_pg_timeout(inside._get_default_timeout(torch.distributed.get_backend()))
    return accelerator


def _key(call: int, rank: int, what: str) -> str:
    return f"attractor.train {call} {rank} {what}"


def _delete(store: Any, call: int, rank: int) -> None:
    for what in ("run", "digest") if call >= 0 else ():
        store.delete_key(_key(call, rank, what))


def _absent(store: Any, keys: list[str]) -> list[int]:
    """Return the indices of keys that no process has set within `JOIN_SECONDS`."""
    deadline, pause = time.monotonic() + JOIN_SECONDS, 0.001
    while not store.check(keys):
        if time.monotonic() > deadline:
            return [i for i, key in enumerate(keys) if not store.check([key])]
        time.sleep(pause)
        pause = min(0.1, 2 * pause)
    return []
