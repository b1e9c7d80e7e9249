"""Symbolic lengths, in programs that `torch.export` exports for all lengths.

A comparison of symbols in plain Python becomes a guard on the inputs, which an exported program cannot
have. Comparisons that only save work use `statically_true` instead. Code of `torch.compile` does not
need this, because it is compiled again for other lengths.
"""

import torch
from torch import Tensor

from attractor.common.versions import exporting


def statically_true(condition: bool) -> bool:
    """Return whether a condition holds for all lengths in an export; otherwise, whether it holds."""
    if not exporting():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # a slow import

    return bool(statically_known_true(condition))


def has_symbolic_length(*lengths: int) -> bool:
    """Return whether one of the lengths is a symbol in an export."""
    return exporting() and any(isinstance(n, torch.SymInt) for n in lengths)


def round_up(tokens: int, block: int, least: int = 0) -> int:
    """Return the number of tokens rounded up to a multiple of `block`, at least `least` blocks."""
    blocks = (tokens + block - 1) // block
    return (torch.sym_max(least, blocks) if least else blocks) * block


def take_first(x: Tensor, tokens: int) -> Tensor:
    """Return the first tokens of x ``[..., tokens, dim]``, in an export without a slice."""
    if not exporting():
        return x[..., :tokens, :]
    return x.index_select(-2, torch.arange(tokens, device=x.device))


def row_ranges(first: int, last: int, height: int) -> list[tuple[int, int]]:
    """Return (start, stop) of blocks of at most `height` rows, or of one block in an export."""
    if exporting():
        return [(first, last)]
    return [(start, min(start + height, last)) for start in range(first, last, height)]
