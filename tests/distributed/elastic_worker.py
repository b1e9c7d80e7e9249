"""Trainings and a fit in two processes, one of which is killed once in each of them.

``torchrun --max-restarts 3 --nproc-per-node 2 elastic_worker.py FOLDER KILL``: KILL is True or False.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from attractor import fit, systems
from attractor.ode import Paper
from attractor.ode.unfinished import Unfinished
from attractor.train import Recipe, train
from tests.distributed.join_worker import model_of
from tests.distributed.launching import write_result
from tests.distributed.train_worker import TIMES

STEPS = 40  # per epoch; a checkpoint is written after step 32
RECIPE = Recipe(epochs=2, learning_rate=0.05, warmup=0.5, precision="fp32")


def die_once(marker):
    """End the process of rank 1 with SIGKILL, unless the marker says that it has ended before."""
    if marker is not None and os.environ["RANK"] == "1" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Batches:
    """Batches, and the death of one process at step 36 of the second epoch."""

    def __init__(self, marker):
        self.marker, self.epoch = marker, 0
        generator = torch.Generator().manual_seed(8)
        self.inputs = torch.randn(2 * STEPS, 4, 3, generator=generator, dtype=torch.float64)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.inputs)

    def __iter__(self):
        for i, inputs in enumerate(self.inputs):
            if self.epoch == 1 and i == 71:
                die_once(self.marker)
            yield inputs, (inputs.sum(1) > 0).long()


def training_result(folder, marker, sharding):
    """Checkpoints before the call, and rows and weights after it."""
    names = sorted(p.name for p in folder.glob("epoch-*"))
    model = model_of(0)
    history = train(
        model, Batches(marker), None, RECIPE,
        device="cpu", out=folder, save_minutes=0.0, sharding=sharding,
    )  # fmt: skip
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in history]
    weights = torch.cat([x.double().flatten() for x in model.state_dict().values()])
    return {"checkpoints": names, "rows": rows, "weights": weights.tolist()}


def fit_result(folder, marker):
    """Checkpoints before the call, and the losses and steps of a solver after it."""
    names = sorted(p.name for p in folder.glob("epoch-*"))
    due, calls = Unfinished.due, 0

    def counted_due(self, last=False):  # called after every epoch
        nonlocal calls
        calls += 1
        if calls == 15:
            die_once(marker)
        return due(self, last)

    Unfinished.SECONDS, Unfinished.due = 0.0, counted_due
    system = systems.PendulumChain(2)
    u = system.sample(20, torch.Generator().manual_seed(9), torch.float64)
    with warnings.catch_warnings():  # few steps of the recipe do not reduce the error
        warnings.simplefilter("ignore")
        solver = fit(
            system, dt=0.1, horizon=1.0, fine_dt=0.025, seed=3, trajectories=61, recipe=Paper(20),
            width=32, out=folder, process_group="world",
        )  # fmt: skip
    own = u.to(next(solver.correction.parameters()).dtype)
    with torch.no_grad():
        steps = solver.correction(solver.scheme.step(system, 0.0, own, 0.1)).double().flatten()
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in solver.history]
    return {"checkpoints": names, "rows": rows, "weights": steps.tolist()}


def main():
    folder, kill = Path(sys.argv[1]), sys.argv[2] == "True"
    result = {"restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
    marker = lambda name: folder / f"{name}-killed" if kill else None
    for sharding in ("none", "full"):
        result[sharding] = training_result(folder / sharding, marker(sharding), sharding)
    result["fit"] = fit_result(folder / "fit", marker("fit"))
    write_result(folder, int(os.environ["RANK"]), result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
