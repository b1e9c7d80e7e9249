"""The distribution of a sequence over the processes of a group: `Parts`, and functions on its runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attractor.common.checks import check_beside, check_tensor, check_whole, is_whole

Run = tuple[int, int]  # consecutive tokens: the position of the first, and one past the last
Runs = tuple[Run, ...]  # of one process, in ascending order
Layout = tuple[Runs, ...]  # of all processes, indexed by rank


@dataclass(frozen=True)
class Parts:
    """The tokens of a sequence that each process of a group holds.

    Attributes:
        runs: For each process, its runs ``(start, stop)`` of consecutive tokens in ascending order. Each
            token of the sequence belongs to exactly one run.

    Raises:
        ValueError: The runs overlap, leave out a token, are not in order, or are empty.

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

    runs: Layout

    def __post_init__(self) -> None:
        try:
            layout = tuple(tuple((start, stop) for start, stop in runs) for runs in self.runs)
            valid = all(is_whole(position) for runs in layout for run in runs for position in run)
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(
                f"runs = {self.runs!r} must contain, for each process, its runs (start, stop) of whole "
                "numbers, such as (((0, 5),), ((5, 10),))"
            )
        object.__setattr__(self, "runs", layout)
        end = 0
        for start, stop in sorted(run for runs in self.runs for run in runs):
            if start != end or stop <= start:
                raise ValueError(
                    f"runs = {self.runs} must cover the whole sequence, each token once; a run that "
                    f"starts at {end} and is not empty is needed instead of ({start}, {stop})"
                )
            end = stop
        if any(not runs or list(runs) != sorted(runs) for runs in self.runs):
            raise ValueError(
                f"runs = {self.runs} must contain at least one run per process, in ascending order"
            )

    @classmethod
    def split(cls, tokens: int, processes: int, zigzag: bool = False) -> "Parts":
        """Return parts whose runs have equal lengths, up to one token.

        In causal attention, later queries attend to more keys. With one run per process, the last of P
        processes does 2 - 1 / P times the mean work, and all others wait for it. With `zigzag`, all
        processes do the same work.

        Args:
            tokens: Number of tokens of the sequence.
            processes: Number of processes.
            zigzag: Whether each process has two runs, an early one and a late one, instead of one.

        Raises:
            ValueError: There are fewer tokens than runs.
        """
        check_whole("tokens", tokens, 1)
        check_whole("processes", processes, 1)
        count = processes * (2 if zigzag else 1)
        if tokens < count:
            raise ValueError(
                f"{tokens} tokens cannot be split into {count} runs for {processes} processes; use "
                "fewer processes"
            )
        runs = list(pairwise(tokens * n // count for n in range(count + 1)))
        if zigzag:
            return cls(tuple((runs[rank], runs[-1 - rank]) for rank in range(processes)))
        return cls(tuple((run,) for run in runs))

    @property
    def tokens(self) -> int:
        """The number of tokens of the whole sequence."""
        return sum(map(count_tokens, self.runs))

    def positions(self, process: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions ``[tokens]`` of a process's tokens in the whole sequence.

        Args:
            process: Rank of the process in its group.
            device: Device of the result.
        """
        return torch.cat([torch.arange(*run, device=device) for run in self._runs_of(process)])

    def take(self, x: Tensor, process: int, dim: int = -2) -> Tensor:
        """Return the tokens of one process.

        Args:
            x: A tensor with all tokens of the sequence along `dim`.
            process: Rank of the process in its group.
            dim: Dimension of the tokens.
        """
        runs = self._runs_of(process)
        _check_tokens("x", x, dim, self.tokens)
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs], dim)

    def join(self, pieces: Sequence[Tensor], dim: int = -2) -> Tensor:
        """Return the whole sequence; the inverse of `take`.

        Args:
            pieces: One tensor per process, with the tokens of this process along `dim`.
            dim: Dimension of the tokens.
        """
        if not isinstance(pieces, Sequence) or len(pieces) != len(self.runs):
            is_sequence = isinstance(pieces, Sequence)
            message = f"has {len(pieces)} elements" if is_sequence else f"is a {type(pieces).__name__}"
            raise ValueError(f"pieces {message}; pass a tensor for each of {len(self.runs)} processes")
        for rank, (runs, x) in enumerate(zip(self.runs, pieces)):
            _check_tokens(f"pieces[{rank}]", x, dim, count_tokens(runs))
            check_beside(f"pieces[{rank}]", x, "pieces[0]", pieces[0])
        if len({(*x.shape[:dim], *x.shape[dim:][1:]) for x in pieces}) > 1:
            shapes = [list(x.shape) for x in pieces]
            raise ValueError(f"pieces {shapes} may differ only in tokens, along dim {dim}")
        tensors = [
            (run, tensor)
            for runs, x in zip(self.runs, pieces, strict=True)
            for run, tensor in zip(runs, split_runs(x, runs, dim))
        ]
        return torch.cat([tensor for _, tensor in sorted(tensors, key=lambda pair: pair[0])], dim)

    def _runs_of(self, process: int) -> Runs:
        if not is_whole(process) or not 0 <= process < len(self.runs):
            raise ValueError(f"process = {process!r} must be from 0 to {len(self.runs) - 1}")
        return self.runs[process]


def count_tokens(runs: Runs) -> int:
    """Return the number of tokens of a process."""
    return sum(stop - start for start, stop in runs)


def split_runs(x: Tensor, runs: Runs, dim: int = -2) -> tuple[Tensor, ...]:
    """Return one view per run of a tensor with the tokens of a process along `dim`."""
    return x.split([stop - start for start, stop in runs], dim)


def extend_runs(layout: Layout, left: int, right: int, tokens: int) -> Layout:
    """Return the runs with more tokens before and after each, within a sequence of `tokens` tokens.

    A negative number removes tokens instead; runs may become empty.
    """
    return tuple(
        tuple((max(start - left, 0), min(max(stop + right, 0), tokens)) for start, stop in runs)
        for runs in layout
    )


def _check_tokens(name: str, x: Any, dim: int, tokens: int) -> None:
    """Raise unless x is a tensor with this number of tokens along dim."""
    check_tensor(name, x, "with all tokens along dim", floating=False)
    if not is_whole(dim) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim = {dim!r} is not a dimension of {name} {list(x.shape)}")
    if x.shape[dim] != tokens:
        raise ValueError(f"{name} {list(x.shape)} must have {tokens} tokens along dim {dim}")
