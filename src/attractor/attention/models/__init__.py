"""Transformers with PDE attention; with ``pde=None`` they are standard transformers.

`PDEAttention` is a layer of multi-head attention, `Stack` the layers of a transformer, `Classifier` a
text encoder with a classification head, and `LanguageModel` a causal decoder. A standard transformer is
the same class with ``pde=None``, and a Longformer or a Performer is the same class with another function
for ``attention=``. The classes differ in nothing else, and the same seed gives all of them the same
initial weights.

>>> import torch
>>> model = LanguageModel(vocabulary=100, dim=32, heads=4, layers=2, hidden=64, pde="wave", steps=4)
>>> ids = torch.randint(100, (2, 10))
>>> model(ids).shape
torch.Size([2, 10, 100])
>>> from attractor.attention import assert_causal
>>> assert_causal(model, ids)

A Longformer that attends to the last 64 tokens, and a Performer:

>>> from attractor.attention.performer import RandomFeatures, performer_attention
>>> from attractor.attention.windows import window_attention
>>> size = {"dim": 32, "heads": 4, "layers": 2, "hidden": 64}
>>> longformer = LanguageModel(100, **size, attention=window_attention, window=64, global_tokens=1)
>>> performer = LanguageModel(100, **size, attention=performer_attention, features=RandomFeatures(8))
>>> longformer(ids).shape == performer(ids).shape == model(ids).shape
True
"""

from attractor.attention.models.classifier import Classifier
from attractor.attention.models.language_model import LanguageModel
from attractor.attention.models.layer import PDEAttention
from attractor.attention.models.stack import Embedding, Layer, Residual, Stack

__all__ = [
    "Classifier",
    "Embedding",
    "LanguageModel",
    "Layer",
    "PDEAttention",
    "Residual",
    "Stack",
]
