"""Which tokens of a sequence each process of a group holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attractor.core.checks import check_beside, check_tensor, check_whole, is_whole

Run = tuple[int, int]  # of tokens: the first, and one past the last
Runs = tuple[Run, ...]  # of one process


@dataclass(frozen=True)
class Parts:
    """Which tokens of a sequence each process of a group holds.

    Attributes:
        runs: for each process its runs ``(start, stop)``, in their order. Together they are the
            sequence, each token once.

    >>> Parts.split(10, 2).runs
    (((0, 5),), ((5, 10),))
    >>> zigzag = Parts.split(10, 2, zigzag=True)
    >>> zigzag.runs
    (((0, 2), (7, 10)), ((2, 5), (5, 7)))
    >>> pieces = [zigzag.take(torch.arange(10), process, dim=0) for process in (0, 1)]
    >>> pieces
    [tensor([0, 1, 7, 8, 9]), tensor([2, 3, 4, 5, 6])]
    >>> zigzag.join(pieces, dim=0)
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    runs: tuple[Runs, ...]

    def __post_init__(self) -> None:
        try:
            runs = tuple(tuple((start, stop) for start, stop in runs) for runs in self.runs)
            whole = all(is_whole(n) for own in runs for run in own for n in run)
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise ValueError(
                f"runs = {self.runs!r} must have for each process its runs (start, stop) of whole "
                "numbers, such as (((0, 5),), ((5, 10),))"
            )
        object.__setattr__(self, "runs", runs)
        end = 0
        for start, stop in sorted(run for runs in self.runs for run in runs):
            if start != end or stop <= start:
                raise ValueError(
                    f"runs {self.runs} must be the whole sequence, each token once, and none of them "
                    f"empty; ({start}, {stop}) follows {end}"
                )
            end = stop
        if any(not runs or list(runs) != sorted(runs) for runs in self.runs):
            raise ValueError(f"runs {self.runs}: every process needs one at least, and them in order")

    @classmethod
    def split(cls, tokens: int, processes: int, zigzag: bool = False) -> "Parts":
        """Equal parts, up to one token; with zigzag two runs a process, an early and a late one.

        In causal attention late rows have more keys: with one run each, the last of P processes does
        2 - 1 / P times the mean work, and all wait for it; with zigzag all do the same.
        """
        check_whole("tokens", tokens, 1)
        check_whole("processes", processes, 1)
        pieces = processes * (2 if zigzag else 1)
        if tokens < pieces:
            raise ValueError(
                f"{tokens} tokens cannot be split into {pieces} runs for {processes} processes; use "
                "fewer processes"
            )
        ends = [tokens * n // pieces for n in range(pieces + 1)]
        every = list(pairwise(ends))
        if zigzag:
            return cls(tuple((every[p], every[-1 - p]) for p in range(processes)))
        return cls(tuple((run,) for run in every))

    @property
    def tokens(self) -> int:
        """Of the whole sequence."""
        return sum(map(count, self.runs))

    def positions(self, process: int, device: torch.device | str | None = None) -> Tensor:
        """Of a process's tokens in the sequence ``[tokens]``, such as embeddings of positions need."""
        return torch.cat([torch.arange(*run, device=device) for run in self._of(process)])

    def take(self, x: Tensor, process: int, dim: int = -2) -> Tensor:
        """A process's part of a tensor with all tokens along dim."""
        runs = self._of(process)
        _check_tokens("x", x, dim, self.tokens)
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs], dim)

    def join(self, pieces: Sequence[Tensor], dim: int = -2) -> Tensor:
        """The whole, from every process's part."""
        if not isinstance(pieces, Sequence) or len(pieces) != len(self.runs):
            given = len(pieces) if isinstance(pieces, Sequence) else type(pieces).__name__
            raise ValueError(f"pieces are {given}; give a tensor for each of {len(self.runs)} processes")
        for n, (runs, x) in enumerate(zip(self.runs, pieces)):
            _check_tokens(f"pieces[{n}]", x, dim, count(runs))
            check_beside(f"pieces[{n}]", x, "pieces[0]", pieces[0])
        others = {(*x.shape[:dim], *x.shape[dim:][1:]) for x in pieces}
        if len(others) > 1:
            shapes = [list(x.shape) for x in pieces]
            raise ValueError(f"pieces {shapes} may differ only in tokens, along dim {dim}")
        found = [
            (run, piece)
            for runs, x in zip(self.runs, pieces, strict=True)
            for run, piece in zip(runs, x.split([stop - start for start, stop in runs], dim))
        ]
        return torch.cat([piece for _, piece in sorted(found, key=lambda pair: pair[0])], dim)

    def _of(self, process: int) -> Runs:
        if not is_whole(process) or not 0 <= process < len(self.runs):
            raise ValueError(f"process = {process!r} must be from 0 to {len(self.runs) - 1}")
        return self.runs[process]


def count(runs: Runs) -> int:
    """Tokens of a process."""
    return sum(stop - start for start, stop in runs)


def _check_tokens(name: str, x: Any, dim: int, tokens: int) -> None:
    """Raise unless x is a tensor with so many tokens along dim."""
    check_tensor(name, x, "with all tokens along dim", floating=False)
    if not is_whole(dim) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim = {dim!r} is no dimension of {name} {list(x.shape)}")
    if x.shape[dim] != tokens:
        raise ValueError(f"{name} {list(x.shape)} has not {tokens} tokens along dim {dim}")
