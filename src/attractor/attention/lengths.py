"""Lengths that are symbols, in a program that is exported for all of them.

Plain Python asks such a program whether a symbol is larger than another, and records the answer as a
condition on its inputs, which an exported program cannot have. Questions that only save work go through
`surely`. Compiled code needs none of this: it is compiled again for lengths that differ.
"""

import torch
from torch import Tensor

from attractor.common.versions import exporting


def surely(condition: bool) -> bool:
    """Return whether a condition holds for all lengths; without an export, whether it holds."""
    if not exporting():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # a slow import

    return bool(statically_known_true(condition))


def free(*lengths: int) -> bool:
    """Return whether a program is exported for other lengths than these."""
    return exporting() and any(isinstance(n, torch.SymInt) for n in lengths)


def whole_blocks(tokens: int, block: int, least: int = 0) -> int:
    """Return the number of tokens that fill whole blocks, at least so many of these."""
    blocks = (tokens + block - 1) // block
    return (torch.sym_max(least, blocks) if least else blocks) * block


def first_of(x: Tensor, tokens: int) -> Tensor:
    """Return the first tokens of x ``[..., tokens, dim]``, which a slice may not, if exported."""
    if not exporting():
        return x[..., :tokens, :]
    return x.index_select(-2, torch.arange(tokens, device=x.device))


def strips(first: int, last: int, height: int) -> list[tuple[int, int]]:
    """Return the rows from `first` to `last` as (start, stop) of at most `height`; one if exported."""
    if exporting():
        return [(first, last)]
    return [(start, min(start + height, last)) for start in range(first, last, height)]
