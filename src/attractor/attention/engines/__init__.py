"""Engines: the ways in which PDE attention is computed. `plan` chooses one for each call.

    dense     builds the map and steps it, as Algorithm 1 is printed. The reference for all others.
    stepped   steps the values of a linear PDE, and calls softmax attention.
    tiled     builds, steps and discards the map tile by tile, for any PDE, in O(T) memory.

They share `values` (stepped values), `boundary` (keys near a wall that moves with the row, by products
of `bands`), and `softmax` (by an operator of `backends` that `selection` chooses).
"""
