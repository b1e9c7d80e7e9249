"""Fitting in several processes: all have the same data and take the same decisions, the work is shared.

Random numbers come from the same seeds everywhere, so every process knows which rows belong to a least
squares problem or to a batch; each does its share of them, and sums over processes are what one process
would have found, up to rounding.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Crew:
    """The processes of a fit, all of which call the same methods; by default there is one.

    Attributes:
        rank: this process.
        count: how many there are.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def find(cls) -> "Crew":
        """As ``torchrun`` or ``accelerate launch`` made them; alone without."""
        if not dist.is_available():
            return cls()
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
                return cls()
            dist.init_process_group()
        return cls(dist.get_rank(), dist.get_world_size())

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
            dist.all_reduce(number)
        return number

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every process the sum of all gradients."""
        if self.count == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
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
        dist.all_gather(found, square)
        return self.agreed(torch.linalg.qr(torch.cat(found), mode="r")[1])

    def agreed(self, x: Tensor) -> Tensor:
        """The first process's: another machine may round differently, and decide otherwise."""
        if self.count > 1:
            x = x.contiguous()
            dist.broadcast(x, 0)
        return x

    def agreed_number(self, x: float, like: Tensor) -> float:
        """The same for a number; `like` is a tensor of the device that processes talk about."""
        if self.count == 1:
            return x
        return self.agreed(torch.tensor([x], dtype=torch.float64, device=like.device)).item()

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            dist.barrier()
