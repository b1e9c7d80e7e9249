"""Data sets as tensors. Each loader reads files from a folder, or downloads them from their usual hub.

The folder is an argument, or the value of the environment variable ``ATTRACTOR_DATA``. One set of images
needs neither:

>>> from attractor.data import images, text
>>> digits = images.load("digits")
>>> digits.images.shape, digits.images.dtype, len(digits.classes)
(torch.Size([1437, 1, 8, 8]), torch.uint8, 10)
>>> words = text.Words.of(["the cat sat", "the dog"])
>>> ids, real = text.padded(["the cat", "a dog ran"], words, max_tokens=8)
>>> ids.tolist(), real.tolist()
([[3, 4, 0], [1, 6, 1]], [[True, True, False], [True, True, True]])
"""

from types import ModuleType

from attractor.common.lazy import submodule
from attractor.data import images, text

__all__ = ["images", "text"]


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name)
