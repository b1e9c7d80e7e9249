"""Processes that train together find each other, and compare what they are about to train."""

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from attractor.core.files import json_bytes
from attractor.core.fingerprint import fingerprint
from attractor.train.definition import Definition

JOIN_SECONDS = 120.0  # that a process waits for the others to call train
TOGETHER = (
    "all processes that torchrun or accelerate launch has started train one run together: seed before "
    "the model is made and give all of them the same data, or distributed=False to train in each alone"
)

_joined = 0  # how many times this process has met the others


def join(
    share: tuple[int, int], definition: Definition, options: Mapping[str, bool | int | str | None]
) -> None:
    """Raise, in every process, unless all of them are about to train the same run in the same way.

    What a process is about to do is written to the store of the process group, where the others read
    it: nobody waits in a collective operation that the others never reach.

    Args:
        share: this process, and how many there are.
        definition: of the run.
        options: further arguments of `train` on which processes have to agree.

    Raises:
        RuntimeError: another process has not called within `JOIN_SECONDS`.
        ValueError: processes train different runs; says in what they differ.
    """
    global _joined
    rank, world = share
    if world == 1:
        return
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    mine = {"definition": definition.to_json(), "options": dict(options)}
    store.set(_key(_joined, rank, "run"), json_bytes(mine).decode())
    store.set(_key(_joined, rank, "digest"), fingerprint(mine))
    absent = _absent(store, [_key(_joined, other, "digest") for other in range(world)])
    if absent:
        _forget(store, _joined, rank)
        raise RuntimeError(
            f"rank {rank} has waited {JOIN_SECONDS:g} s for ranks {absent} to call train, too; "
            f"{TOGETHER}"
        )
    _forget(store, _joined - 1, rank)  # which all have read
    digests = [store.get(_key(_joined, other, "digest")) for other in range(world)]
    others = [other for other in range(world) if digests[other] != digests[0]]
    if others:
        one, other = (json.loads(store.get(_key(_joined, r, "run"))) for r in (0, others[0]))
    _joined += 1
    if others:
        first, second = (Definition.from_json(x["definition"]) for x in (one, other))
        unlike = first.unlike(second) + [
            f"{name} = {value!r}, not {other['options'][name]!r}"
            for name, value in one["options"].items()
            if value != other["options"][name]
        ]
        told = f"ranks {others} train another run than rank 0: rank 0 has {'; '.join(unlike)}"
        raise ValueError(f"{told}; {TOGETHER}")


def launched(cpu: bool) -> Any:
    """An Accelerator of all launched processes, none of which waits for ever for the others."""
    from accelerate import Accelerator, InitProcessGroupKwargs

    if torch.distributed.is_initialized():
        return Accelerator(cpu=cpu)
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=JOIN_SECONDS))
    try:
        made = Accelerator(cpu=cpu, kwargs_handlers=[limit])
    except torch.distributed.DistError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise RuntimeError(
            f"not all of the {os.environ['WORLD_SIZE']} processes have called train within "
            f"{JOIN_SECONDS:g} s ({reason}); {TOGETHER}"
        ) from None
    if torch.distributed.is_initialized():  # later operations may take their usual time
        inside = torch.distributed.distributed_c10d
        inside._get_default_store().set_timeout(inside.default_pg_timeout)
        inside._set_pg_timeout(inside._get_default_timeout(torch.distributed.get_backend()))
    return made


def _key(meeting: int, rank: int, what: str) -> str:
    return f"attractor.train {meeting} {rank} {what}"


def _forget(store: Any, meeting: int, rank: int) -> None:
    for what in ("run", "digest") if meeting >= 0 else ():
        store.delete_key(_key(meeting, rank, what))


def _absent(store: Any, keys: list[str]) -> list[int]:
    """The indices of keys that nobody has set within `JOIN_SECONDS`."""
    deadline, pause = time.monotonic() + JOIN_SECONDS, 0.001
    while not store.check(keys):
        if time.monotonic() > deadline:
            return [i for i, key in enumerate(keys) if not store.check([key])]
        time.sleep(pause)
        pause = min(0.1, 2 * pause)
    return []
