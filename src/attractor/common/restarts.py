"""The process group of processes that torchrun has restarted."""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

SCHEME = "attractor-restart"


def init_method() -> str | None:
    """Return the `init_method` of `torch.distributed.init_process_group` for launched processes.

    By default torchrun keeps one store for all restarts, in which a new process group would read the
    addresses of processes that have ended (https://github.com/pytorch/pytorch/issues/135712). The
    processes of a restart therefore write their keys with the number of the restart as a prefix.

    Returns:
        None, torch's default, unless torchrun has restarted the processes with one store.

    Raises:
        RuntimeError: the processes run on several machines, which count restarts differently.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise RuntimeError(
            "torchrun has restarted processes on several machines, which would read addresses of "
            "processes that have ended; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every "
            "machine"
        )
    from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

    if SCHEME not in _rendezvous_handlers:
        register_rendezvous_handler(SCHEME, _rendezvous)
    return f"{SCHEME}://"


def _rendezvous(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store, the rank and the number of processes, as torch's ``env://`` does."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    prefix = f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    for store, rank, world in rendezvous("env://", timeout=timeout):
        yield PrefixStore(prefix, store), rank, world
