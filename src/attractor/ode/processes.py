"""Fitting in several processes: all have the same data and take the same decisions, the work is shared.

Random numbers come from the same seeds everywhere, so every process knows which rows belong to a least
squares problem or to a batch; each does its share of them, and sums over processes are what one process
would have found, up to rounding.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attractor.common.restarts import init_method

Group: TypeAlias = "dist.ProcessGroup | str | None"


@dataclass(frozen=True)
class Crew:
    """The processes of a fit, all of which call the same methods; by default there is one.

    Attributes:
        rank: The rank of this process.
        count: Number of processes.
        group: Their group; None for the default group.
    """

    rank: int = 0
    count: int = 1
    group: Any = None

    @classmethod
    def of(cls, group: Group) -> "Crew":
        """Return the processes of a group.

        Args:
            group: A group of `torch.distributed`; "world" for all processes that ``torchrun`` or
                ``accelerate launch`` started; None for this process alone.

        Raises:
            ValueError: The group is not initialised, or this process is not a member.
        """
        if group is None:
            return cls()
        if isinstance(group, str) and group != "world":
            raise ValueError(f"process_group = {group!r}; it is a process group, 'world' or None")
        if group == "world":
            if not launched() and not (dist.is_available() and dist.is_initialized()):
                return cls()
            if not dist.is_initialized():
                dist.init_process_group(init_method=init_method())
            return cls(dist.get_rank(), dist.get_world_size())
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group is a {type(group).__name__}; pass a torch.distributed group, 'world' or "
                "None"
            )
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not a member of process_group; only its members may call")
        return cls(rank, dist.get_world_size(group), group)

    def check_agreement(self, definition: Mapping[str, Any]) -> None:
        """Raise in all processes unless all of them have the same definition of the work."""
        if self.count == 1:
            return
        digests: list[Any] = [None] * self.count
        digest = lambda value: hashlib.sha256(repr(value).encode()).hexdigest()
        own = {key: digest(value) for key, value in definition.items()}
        dist.all_gather_object(digests, own, group=self.group)
        other = sorted(key for key in own if any(theirs[key] != own[key] for theirs in digests))
        if other:
            raise ValueError(
                f"the processes of process_group call fit with different {', '.join(other)}; all of "
                "them must make the same call. For one fit per process leave process_group at None"
            )

    def raise_together(self, error: Exception | None) -> None:
        """Raise in all processes if there is an error in any of them, so that none waits in vain."""
        if self.count > 1:
            failed: list[Any] = [False] * self.count
            dist.all_gather_object(failed, error is not None, group=self.group)
            ranks = [rank for rank, flag in enumerate(failed) if flag]
            if ranks and error is None:
                raise RuntimeError(f"Ranks {ranks} cannot begin to fit; see the error on each of them.")
        if error is not None:
            raise error

    def share(self, rows: Tensor) -> Tensor:
        """This process's part of some rows, all but equal ones."""
        return rows if self.count == 1 else rows.tensor_split(self.count)[self.rank]

    def mean(self, numbers: Tensor, rows: int) -> Tensor:
        """This share ``[own rows, ...]`` of a mean over so many rows of all processes.

        The sum of these, and of their gradients, is the mean's.
        """
        if self.count == 1:
            return numbers.mean()
        return numbers.sum() / (rows * numbers[0:1].numel() if len(numbers) else rows)

    def total(self, number: Tensor) -> Tensor:
        """The sum over all processes, the same in all."""
        if self.count > 1:
            number = number.clone()
            dist.all_reduce(number, group=self.group)
        return number

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every process the sum of all gradients."""
        if self.count == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=self.group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(total.view_as(grad))

    def triangle(self, own: Tensor) -> Tensor:
        """R of a QR decomposition of all processes' rows, from that of each one's ``[n, k]``."""
        if self.count == 1:
            return own
        width = own.shape[-1]
        square = own.new_zeros(width, width)
        square[: len(own)] = own
        found = [torch.empty_like(square) for _ in range(self.count)]
        dist.all_gather(found, square, group=self.group)
        return self.agreed(torch.linalg.qr(torch.cat(found), mode="r")[1])

    def agreed(self, x: Tensor) -> Tensor:
        """The first process's: another machine may round differently, and decide otherwise."""
        if self.count > 1:
            x = x.contiguous()
            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def agreed_number(self, x: float, like: Tensor) -> float:
        """The same for a number; `like` is a tensor of the device that processes talk about."""
        if self.count == 1:
            return x
        return self.agreed(torch.tensor([x], dtype=torch.float64, device=like.device)).item()

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            dist.barrier(group=self.group)


def launched() -> bool:
    """Return whether ``torchrun`` or ``accelerate launch`` started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
