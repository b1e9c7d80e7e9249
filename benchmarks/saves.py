"""Several processes save to one place and others load from it: every load must be of one save.

1,000 saves of four processes to a folder; 200 SIGKILLs of two processes that save to a folder; saves of
four processes to a server with the protocol of S3, and 20 SIGKILLs of two. The attacks are those of
the tests. Needs the extra `store`: pip install 'attractor[store]'.

    python -m benchmarks.saves
"""

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import save
from tests.storage import test_objects as stores
from tests.trust import test_concurrent_saves as folders

WRITERS, SAVES, KILLS = 4, 250, 200
STORE_SAVES, STORE_KILLS = 100, 20  # saves of each writer, for a store takes longer


def folder_rows() -> list[dict[str, Any]]:
    """Attack a folder, without kills and with them."""
    with tempfile.TemporaryDirectory() as name:
        result = folders.attack(Path(name) / "saves", WRITERS, SAVES)
        errors = [*result["errors"], *filter(None, [result["final"]])]
        first = {"kills": 0, "saves": WRITERS * SAVES, "loads": result["loads"], "errors": errors}
        folders.check_kills(Path(name) / "kills", KILLS)  # loads after each kill
    second = {"kills": KILLS, "saves": None, "loads": KILLS + 1, "errors": []}
    return [{"place": "folder", **row} for row in (first, second)]


def store_rows() -> list[dict[str, Any]]:
    """Attack a server with the protocol of S3, without kills and with them."""
    server, address = stores.start_server()
    rows = []
    try:
        stores.use_server(address)
        for kills, writers, saves in ((0, WRITERS, STORE_SAVES), (STORE_KILLS, 2, 10_000)):
            url = f"s3://bucket/{random.getrandbits(64):x}"
            loads, errors = stores.attack(url, writers, saves, kills)
            total = None if kills else writers * saves
            rows.append({"kills": kills, "saves": total, "loads": loads, "errors": errors})
    finally:
        server.kill()
    return [{"place": "server of S3", **row} for row in rows]


def main() -> None:
    torch.set_num_threads(1)  # processes are forked
    began, rows = time.perf_counter(), [*folder_rows(), *store_rows()]
    for row in rows:
        print(row)
    save("saves", {"rows": rows, "seconds": time.perf_counter() - began})


if __name__ == "__main__":
    main()
