"""Engines: the ways in which PDE attention is computed. `plan` chooses one for each call.

    dense     builds the map and steps it, as Algorithm 1 is printed. The reference for all others.
    stepped   steps the values of a linear PDE, and calls softmax attention.
    tiled     builds, steps and discards the map tile by tile, for any PDE, in O(T) memory.

They share four parts: `values` (the values of a linear PDE after its steps), `boundary` (keys within
reach of a wall that moves with the row, by the banded products of `bands`), `softmax` (softmax attention
that returns the log-sum-exp, by an operator of `backends` that `selection` chooses), and the merge of
both.

>>> import torch
>>> from attractor.attention.engines.dense import dense
>>> from attractor.attention.pdes import Diffusion
>>> query, key, value = torch.randn(3, 2, 8, 16, 64)
>>> output, attention_map = dense(query, key, value, is_causal=True, pde=Diffusion(), steps=4, dt=1.0)
>>> output.shape, attention_map.shape
(torch.Size([2, 8, 16, 64]), torch.Size([2, 8, 16, 16]))
"""
