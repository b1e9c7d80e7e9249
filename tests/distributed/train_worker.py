"""Image, text and correction training, in as many processes as there are.

``accelerate launch --cpu --num_processes 2 train_worker.py FOLDER OTHERS``: trains in FOLDER, and goes on
from what others left in OTHERS after their first epoch.
"""

import shutil
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from attractor import fit, systems
from attractor.attention import LanguageModel
from attractor.data import images
from attractor.ode import Paper, Ridge
from attractor.residual.gates import IEBN, SE
from attractor.train import Recipe, train
from attractor.train.place import Place
from tests.distributed.launching import write_result

TIMES = ("seconds", "images_per_second", "samples_per_second")
BATCH = 24  # of all processes together
IMAGES = Recipe(
    epochs=3, batch=BATCH, learning_rate=0.05, warmup=0.5, crop=1, precision="fp32", mixup=0.2
)
TEXT = Recipe(
    epochs=3, learning_rate=3e-3, warmup=0.5, optimiser="adamw", clip=1.0, precision="fp32", crop=0
)


class Gated(nn.Module):
    """Two kinds of batch normalisation, and a gate."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(1, 6, 3, padding=1, bias=False),
            nn.Conv2d(6, 6, 3, padding=1),
        )
        self.norm, self.iebn, self.gate = nn.BatchNorm2d(6), IEBN(6), SE(6, reduction=2)
        self.head = nn.Linear(6 * 64, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head((x + self.gate(self.iebn(self.second(x)))).flatten(1))


def next_token(model, batch):
    logits = model(batch[0][:, :-1])
    return cross_entropy(logits.transpose(1, 2), batch[0][:, 1:], reduction="none")


def image_training(folder, **options):
    torch.manual_seed(5)
    model = Gated().double()
    data, valid = images.load("digits", "train").subset(150), images.load("digits", "test").subset(51)
    return model, train(model, data, valid, IMAGES, out=folder, **options)


def text_training(folder, **options):
    torch.manual_seed(6)
    model = LanguageModel(
        20, dim=16, heads=2, layers=2, hidden=32, max_tokens=16, dropout=0.0, pde="diffusion", steps=2
    ).double()
    ids = (torch.arange(100)[:, None] * 7 + torch.arange(13) ** 2) % 20
    # A loader's batch is each process's own.
    own = BATCH // Place.find().share[1]
    loader = DataLoader(TensorDataset(ids), own, shuffle=True, drop_last=True)
    valid = DataLoader(TensorDataset((ids[:30] + 1) % 20), 5)
    return model, train(model, loader, valid, TEXT, loss=next_token, out=folder, **options)


TRAININGS = {"images": image_training, "text": text_training}


def told(model, history):
    """Numbers to compare, and whether the folder's processes have one model."""
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in history]
    weights = torch.cat([x.double().flatten() for x in model.state_dict().values()])
    same = True
    if dist.is_initialized():
        first = weights.clone()
        dist.broadcast(first, 0)
        same = bool(torch.equal(first, weights))
    return {"rows": rows, "weights": weights.tolist(), "same": same}


def whole(folder, **options):
    """All trainings from the start; what is there after the first epoch is kept aside."""
    found = {}
    for name, training in TRAININGS.items():
        keep = partial(keep_aside, Path(folder), name)
        found[name] = told(*training(Path(folder) / name, tell=keep, **options))
    return found


def keep_aside(folder, name, progress):
    if progress.row and progress.epoch == 1:
        shutil.copytree(folder / name, folder / f"{name}-begun")


def resumed(others, folder, **options):
    """All trainings from where others were after their first epoch."""
    found = {}
    for name, training in TRAININGS.items():
        copy = Path(folder) / f"{name}-resumed"
        if Place.find().is_main:
            shutil.copytree(Path(others) / f"{name}-begun", copy)
        Place.find().wait()
        found[name] = told(*training(copy, **options))
    return found


def corrections(folder):
    """Fitted three ways: what each adds to a step from other states, and what was found on the way.

    But for Adam's they are kept in the folder, and go on from what is there.
    """
    found = {}
    ways = {"default": {"width": 32}, "adam": {"width": 32, "recipe": Ridge(10), "correction": "attns"},
            "paper": {"recipe": Paper(40), "width": 32}}  # fmt: skip
    system, common = systems.PendulumChain(2), {"dt": 0.1, "horizon": 1.0, "fine_dt": 0.025, "seed": 3}
    u = system.sample(50, torch.Generator().manual_seed(9), torch.float64)
    for name, options in ways.items():
        with warnings.catch_warnings():  # forty steps of the paper's recipe are of no use
            warnings.simplefilter("ignore")
            out = None if name == "adam" else Path(folder) / f"fit-{name}"
            solver = fit(system, trajectories=61, out=out, process_group="world", **common, **options)
        own = u.to(next(solver.correction.parameters()).dtype)
        with torch.no_grad():
            added = solver.correction(solver.scheme.step(system, 0.0, own, 0.1))
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in solver.history]
        found[name] = {"added": added.double().flatten().tolist(), "history": rows}
    return found


def main():
    folder, others, fitting = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
    share = Place.find().share
    result = {"share": share, "whole": whole(folder), "resumed": resumed(others, folder)}
    if fitting:
        result["corrections"] = corrections(folder)
    write_result(folder, share[0], result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
