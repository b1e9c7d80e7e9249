"""What all wings train and keep with: one checkpoint format (and, in time, one training loop).

>>> import tempfile, torch
>>> from attractor.train import checkpoint
>>> folder = tempfile.mkdtemp() + "/weights"
>>> _ = checkpoint.save(folder, "example", {"w": torch.ones(2)}, {"made by": "hand"})
>>> checkpoint.load(folder, "example")
({'w': tensor([1., 1.])}, {'made by': 'hand'})
"""

from attractor.train import checkpoint
from attractor.train.checkpoint import CheckpointError

__all__ = ["CheckpointError", "checkpoint"]
