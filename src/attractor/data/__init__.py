"""Data sets as tensors. Each loader reads files of a folder, or asks the hub it is usually found on.

The folder is an argument, or what the environment variable ``ATTRACTOR_DATA`` names.

>>> from attractor.data import text
>>> words = text.Words.of(["the cat sat", "the dog"])
>>> ids, real = text.padded(["the cat", "a dog ran"], words, max_tokens=8)
>>> ids.tolist(), real.tolist()
([[3, 4, 0], [1, 6, 1]], [[True, True, False], [True, True, True]])
"""

from attractor.data import text

__all__ = ["text"]
