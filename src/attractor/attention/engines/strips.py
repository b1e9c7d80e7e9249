"""Strips of an attention map, and operators that compute the softmax of a strip.

An operator is a pair of functions for the part of a map that a `Strip` describes:

    forward   (query, key, value, strip, scale) -> output, log-sum-exp [batch, heads, rows]
    backward  (grad, output, query, key, value, log-sum-exp, strip, scale) -> the three gradients

Key and value may have fewer heads than query; each of their heads serves as many consecutive heads of
query. `backends` contains the functions, and `selection` chooses an operator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Packed documents of consecutive tokens, as FlashAttention takes them.

    Attributes:
        cu_seqlens: First positions of the documents in the concatenated batch rows, and the total
            number of tokens; int32 ``[documents + 1]``.
        max_seqlen: Number of tokens of the longest document.
        single: Whether every batch row is a single document. False if this is unknown.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    single: bool = False


@dataclass(frozen=True, eq=False)
class Strip:
    """Some rows and keys of a map, and which of these keys each row may attend to.

    Attributes:
        rows, columns: The rows and the keys.
        causal: Whether row i may attend only to keys up to i, both counted within the strip.
        allowed: bool mask, or None if every key is allowed.
        bias: Bias of the scores, or None.
        empty_rows: bool ``[batch or 1, heads or 1, rows]``, True for rows that may attend to no key, or
            None if there are none.
        left, right: Sides of a band. The last row may attend to `left` keys before and `right` keys
            after the last key, the row before it to those around the key before, and so on. None means
            no limit.
        packed: The documents of the keys, and of the rows that are not empty. None: one document.
    """

    rows: slice
    columns: slice
    causal: bool = False
    allowed: Tensor | None = None
    bias: Tensor | None = None
    empty_rows: Tensor | None = None
    left: int | None = None
    right: int | None = None
    packed: PackedSequences | None = None

    def select(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the strip's part of query, key and value."""
        rows, columns = self.rows, self.columns
        return take_tokens(query, rows), take_tokens(key, columns), take_tokens(value, columns)


@dataclass(eq=False)
class Dropout:
    """Dropout of weights after the softmax.

    Attributes:
        p: Probability that a weight is dropped. The others are divided by ``1 - p``.
        state: The state of the random numbers, int64 ``[2]``. The forward of an operator stores it, and
            the backward drops the same weights.
    """

    p: float
    state: Tensor | None = None

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Both entries of the state."""
        assert self.state is not None, "the forward of the operator has not run"
        return self.state[0], self.state[1]


@dataclass(frozen=True, eq=False)
class Operator:
    """An attention operator for one problem.

    Attributes:
        name: Name for `explain`.
        forward, backward: The pair of functions.
        strip: The strip that it computes in one call; None if it computes any small strip.
        with_dropout: Whether both functions have an argument for a `Dropout`.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Any, ...]]
    strip: Strip | None = None
    with_dropout: bool = False

    @property
    def takes_dropout(self) -> bool:
        """Whether a call of the operator can drop weights."""
        return self.strip is not None and self.with_dropout


def take_tokens(x: Tensor, tokens: slice) -> Tensor:
    """Return some tokens of x ``[..., tokens, dim]``; x itself if these are all tokens."""
    return x if tokens.start == 0 and tokens.stop == x.shape[-2] else x[..., tokens, :]
