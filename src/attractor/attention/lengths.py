"""Lengths that are not known while a program is made: one that is exported for all of them.

A question about such a length is answered for the one that is there, and the answer becomes a condition
of the program, which an exported one cannot have. So questions that only save some work are asked by
`surely`. Code that is compiled asks plainly: for lengths that differ it is compiled again, because one
program for all would take Inductor minutes to make.
"""

import torch
from torch import Tensor


def surely(condition: bool) -> bool:
    """Whether it holds for all lengths that a program is exported for; without one, whether it holds."""
    if not torch.compiler.is_exporting():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a while

    return bool(statically_known_true(condition))


def free(*lengths: int) -> bool:
    """Whether a program is to be exported for other lengths than these."""
    return torch.compiler.is_exporting() and any(isinstance(n, torch.SymInt) for n in lengths)


def whole_blocks(tokens: int, block: int, least: int = 0) -> int:
    """So many tokens that they fill whole blocks, at least so many of these."""
    blocks = (tokens + block - 1) // block
    return (blocks if least == 0 else larger(least, blocks)) * block


def first_of(x: Tensor, tokens: int) -> Tensor:
    """So many of x ``[..., tokens, dim]``; there are as many, which export does not see by itself."""
    if not torch.compiler.is_exporting():
        return x[..., :tokens, :]
    return x.index_select(-2, torch.arange(tokens, device=x.device))


def smaller(a: int, b: int) -> int:
    """The smaller of the two, without a question of which that is."""
    if not torch.compiler.is_exporting():
        return min(a, b)
    return a if surely(a <= b) else b if surely(b <= a) else torch.sym_min(a, b)


def larger(a: int, b: int) -> int:
    """The larger of the two, likewise."""
    if not torch.compiler.is_exporting():
        return max(a, b)
    return a if surely(a >= b) else b if surely(b >= a) else torch.sym_max(a, b)


def strips(first: int, last: int, height: int) -> list[tuple[int, int]]:
    """Rows from `first` on, before `last`, as (from, to) of at most so many; one if exported."""
    if torch.compiler.is_exporting():
        return [(first, last)]
    return [(start, min(start + height, last)) for start in range(first, last, height)]
