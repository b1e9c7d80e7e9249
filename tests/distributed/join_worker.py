"""What two processes of one launcher do when they do not agree, or when one of them trains alone.

``torchrun --nproc-per-node 2 join_worker.py FOLDER``
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from attractor.train import Recipe, evaluate, join, train
from tests.distributed.launching import write_result

RECIPE = Recipe(epochs=2, learning_rate=0.05, warmup=0, precision="fp32")


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(4) % 2
    return [(torch.randn(4, 3, generator=generator, dtype=torch.float64), labels) for _ in range(4)]


def trained(seed, data=0, recipe=RECIPE, **options):
    """Weights after a training; or the error, and whether it came soon."""
    model, began = model_of(seed), time.monotonic()
    try:
        train(model, batches(data), None, recipe, device="cpu", **options)
    except (ValueError, RuntimeError) as error:
        return {"error": type(error).__name__, "told": str(error), "soon": time.monotonic() - began < 20}
    return torch.cat([x.double().flatten() for x in model.state_dict().values()]).tolist()


def lonely(folder):
    """Before any group is there the first rank calls, and nobody else does."""
    rank = int(os.environ["RANK"])
    join.JOIN_SECONDS = 3.0
    found = trained(0) if rank == 0 else None
    while rank and not (folder / "given-up").exists():
        time.sleep(0.1)
    (folder / "given-up").touch()
    return {"alone": found}


def disagreeing(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {"weights": trained(rank), "data": trained(0, rank)}
    found["recipe"] = trained(0, recipe=replace(RECIPE, seed=rank))
    found["call"] = trained(0, save_every=rank, out=folder / "call")
    found["out"] = trained(0, out=folder / "out" if rank else None)
    found["each"] = trained(rank, out=folder / f"each-{rank}", distributed=False)
    found["one folder"] = trained(rank, out=folder / "one", distributed=False)
    dist.barrier()
    if rank == 0:
        found["one rank"] = trained(7, distributed=False)
        found["evaluated"] = evaluate(model_of(0), batches(0))
        join.JOIN_SECONDS = 2.0
        found["alone"] = trained(0)
    dist.barrier()
    join.JOIN_SECONDS = 120.0
    found["together"] = [trained(0), trained(1, out=folder / "together")]
    found["another"] = trained(2, out=folder / "together")
    found["again"] = trained(1, out=folder / "together")
    return found


def main():
    folder = Path(sys.argv[1])
    found = {"lonely": lonely, "disagreeing": disagreeing}[sys.argv[2]](folder)
    write_result(folder, int(os.environ["RANK"]), found)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
