"""Prints the digests of many runs, as JSON; they must not depend on the process."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from attractor.attention import LanguageModel
from attractor.data import images
from attractor.residual import resnet_cifar, vit
from attractor.train import Recipe
from attractor.train.definition import Definition

SHARED = {"a", "b", "c"}  # in another order in every process


class Own(nn.Module):
    """Holds what has an order of its own in every process."""

    def __init__(self):
        super().__init__()
        self.inner, self.names, self.kinds = nn.Linear(2, 2), set(SHARED), frozenset(SHARED)

    def forward(self, x):
        return self.inner(x)


def loss(model, batch):
    return model(batch[0]).mean() * len(SHARED)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=32))


MODELS = {
    **{
        gate: lambda gate=gate: resnet_cifar(20, width=4, gate=gate)
        for gate in ("dia", "iebn", "stepnet")
    },
    "vit": lambda: vit(image_size=8, dim=16, depth=1, heads=2),
    "language": lambda: LanguageModel(
        20, dim=16, heads=2, layers=1, hidden=32, max_tokens=16, pde="wave"
    ),
    "own": Own,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(2, 2))),
    "gpt2": gpt2,
}
DATA = {
    "images": lambda: images.load("digits", "train").subset(8),
    "loader": lambda: DataLoader(
        Subset(TensorDataset(torch.arange(9.0)), [1, 2]), 2, shuffle=True, num_workers=1
    ),
    "batches": lambda: [{"x": torch.ones(2), "y": torch.zeros(2)}],
}


def digests():
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        try:
            model = make()
        except ImportError:
            continue
        for kind, data in DATA.items():
            made = Definition.of(model, data(), None, Recipe(), loss, precision="fp32", processes=1)
            found[f"{name}, {kind}"] = made.digest
    return found


if __name__ == "__main__":
    print(json.dumps(digests()))
