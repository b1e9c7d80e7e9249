"""Transformers with PDE attention; with ``pde=None`` they are standard transformers.

A Longformer or a Performer is the same class with another function for ``attention=``. The same seed
gives all of them the same initial weights.

>>> import torch
>>> from attractor.attention import PerformerAttention, assert_causal, window_attention
>>> size = {"dim": 32, "heads": 4, "layers": 2, "hidden": 64}
>>> model = LanguageModel(100, **size, pde="wave", steps=4)
>>> longformer = LanguageModel(100, **size, attention=window_attention, window=64, global_tokens=1)
>>> performer = LanguageModel(100, **size, attention=PerformerAttention(8))
>>> ids = torch.randint(100, (2, 10))
>>> longformer(ids).shape == performer(ids).shape == model(ids).shape == (2, 10, 100)
True
>>> assert_causal(model, ids)
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
