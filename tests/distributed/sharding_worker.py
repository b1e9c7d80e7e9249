"""Trainings with sharded parameters: images, texts, and a model with shared and frozen parameters.

``torchrun --nproc-per-node 2 sharding_worker.py FOLDER OTHERS``: trains in FOLDER, and goes on from the
checkpoints of one process in OTHERS. Without OTHERS, it trains with compiled blocks.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from attractor.train import DivergedError, Recipe, train
from attractor.train.place import Place
from tests.distributed import train_worker
from tests.distributed.launching import write_result

RECIPE = Recipe(epochs=3, learning_rate=0.05, warmup=0.0, clip=0.5, precision="fp32")


class Block(nn.Module):
    """A residual block, some of whose copies share a parameter."""

    def __init__(self, linear=None):
        super().__init__()
        self.linear = linear or nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Shared(nn.Module):
    """Four blocks, two with the same linear layer, a frozen layer, and a parameter of one row."""

    def __init__(self):
        super().__init__()
        linear = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([Block(), Block(linear), Block(linear), Block()])
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.scale * self.frozen(x)


def batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def next_row(model, batch):
    return mse_loss(model(batch), batch.roll(1, -1), reduction="none").mean(1)


def shared_model():
    torch.manual_seed(7)
    return Shared().double()


def shared_training(folder, processes=1, recipe=RECIPE, **options):
    """Train on 6 steps per epoch, and evaluate 7 batches, which two processes cannot share equally."""
    model = shared_model()
    data = batches(12, 0) if processes == 2 else pairs(batches(12, 0))
    return model, train(
        model, data, batches(7, 1), recipe, loss=next_row, device="cpu", out=folder, **options
    )


def pairs(values):
    return [torch.cat((a, b)) for a, b in zip(values[::2], values[1::2])]


def restoration(folder):
    """Whether a trained model is as it was before, apart from its weights, and can be trained again."""
    model = shared_model()
    parameters, classes = list(model.parameters()), [type(module) for module in model.modules()]
    attributes, shares = [set(vars(module)) for module in model.modules()], []

    def tell(progress):
        shares.append(sum(p.to_local().numel() for p in model.parameters()))

    options = {"loss": next_row, "device": "cpu", "sharding": "full"}
    train(model, batches(12, 0), None, RECIPE, tell=tell, **options)
    hooks = sum(len(x) for module in model.modules() for k, x in vars(module).items() if "_hooks" in k)
    again = train(model, batches(12, 0), None, RECIPE, **options)
    return {
        "parameters": all(a is b for a, b in zip(parameters, model.parameters(), strict=True)),
        "plain": all(type(p) is nn.Parameter and p.grad is None for p in model.parameters()),
        "classes": [type(module) for module in model.modules()] == classes,
        "attributes": [set(vars(module)) for module in model.modules()] == attributes,
        "hooks": hooks,
        "training": any(module.training for module in model.modules()),
        "total": sum(p.numel() for p in model.parameters()),
        "shares": shares,
        "again": again.last("train_loss"),
    }


def divergence():
    """The error of a training that diverges, and the kinds of the parameters afterwards."""
    model, recipe = shared_model(), replace(RECIPE, learning_rate=1e200, clip=None)
    try:
        train(model, batches(12, 0), None, recipe, loss=next_row, device="cpu", sharding="full")
    except DivergedError as error:
        return {"message": str(error), "plain": all(type(p) is nn.Parameter for p in model.parameters())}
    return {}


def disagreement():
    """The message if one process asks for sharding and the other does not."""
    try:
        shared_training(None, 2, sharding=("none", "full")[Place.find("cpu").share[0]])
    except ValueError as error:
        return str(error)
    return ""


def results(folder, others):
    return {
        "whole": train_worker.whole(folder, sharding="full"),
        "resumed": train_worker.resumed(others, folder, sharding="full"),
        "replicated": train_worker.resumed(folder, folder / "replicated"),
        "shared": train_worker.told(*shared_training(folder / "shared", 2, sharding="full")),
        "restoration": restoration(folder),
        "divergence": divergence(),
        "disagreement": disagreement(),
    }


def compiled_training():
    recipe = replace(RECIPE, capture="compile")
    return train_worker.told(*shared_training(None, 2, recipe, sharding="full"))


def main():
    folder, *others = map(Path, sys.argv[1:])
    result = results(folder, *others) if others else compiled_training()
    write_result(folder, Place.find().share[0], result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
