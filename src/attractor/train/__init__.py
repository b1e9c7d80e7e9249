"""One training loop and one checkpoint format for the whole library.

`train` trains a model by a `Recipe`, and `train_seeds` repeats it with several seeds:

>>> import torch
>>> from types import SimpleNamespace
>>> from attractor.train import Recipe, train
>>> labels = torch.arange(64) % 2
>>> images = (labels * 200).to(torch.uint8)[:, None, None, None].expand(64, 1, 4, 4)
>>> data = SimpleNamespace(images=images, labels=labels, mean=(0.5,), std=(0.3,))
>>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
>>> recipe = Recipe(epochs=2, batch=16, learning_rate=0.1, warmup=0, crop=0)
>>> train(model, data, data, recipe, device="cpu").accuracy
1.0

`checkpoint` reads and writes the format of all saved objects:

>>> import tempfile
>>> from attractor.train import checkpoint
>>> folder = tempfile.mkdtemp() + "/weights"
>>> _ = checkpoint.save(folder, "example", {"w": torch.ones(2)}, {"made by": "hand"})
>>> checkpoint.load(folder, "example")
({'w': tensor([1., 1.])}, {'made by': 'hand'})
"""

from attractor.train import checkpoint
from attractor.train.capture import compiled_blocks, repeated_blocks
from attractor.train.checkpoint import CheckpointError
from attractor.train.classify import Classify
from attractor.train.evaluation import evaluate
from attractor.train.groups import parameter_groups
from attractor.train.history import DivergedError, History, Progress, Seeds, TerminatedError
from attractor.train.loop import train
from attractor.train.recipe import PAPER, SHORT, Recipe
from attractor.train.seeds import train_seeds

__all__ = [
    "PAPER",
    "SHORT",
    "CheckpointError",
    "Classify",
    "DivergedError",
    "History",
    "Progress",
    "Recipe",
    "Seeds",
    "TerminatedError",
    "checkpoint",
    "compiled_blocks",
    "evaluate",
    "parameter_groups",
    "repeated_blocks",
    "train",
    "train_seeds",
]
