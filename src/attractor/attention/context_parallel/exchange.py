"""Communication between the processes of a group: sending, receiving, and fetching tokens of others."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attractor.attention.context_parallel.parts import Layout, Runs, count_tokens
from attractor.attention.precision import first_derivatives_only

TOKENS, GRADIENTS = 0, 1  # tags of messages


@dataclass(frozen=True)
class Processes:
    """The processes of a group of `torch.distributed`, all if None, and the rank of this one."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any) -> "Processes":
        """Return the processes of a group; only this one if `torch.distributed` is not initialized."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(None, 0, 1)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                "This process is not a member of group; call the function only in its members."
            )
        return cls(group, rank, dist.get_world_size(group))

    def exchange(
        self,
        outgoing: list[tuple[int, Tensor]],
        incoming: list[tuple[int, Tensor]],
        tag: int = TOKENS,
    ) -> list[Any]:
        """Start to send and to receive pairs of a peer's rank and a tensor, and return the requests.

        Requires: Every tensor stays alive, and unchanged if it is outgoing, until all requests complete.
        """
        operations = [
            dist.P2POp(operation, x, group=self.group, tag=tag, group_peer=peer)
            for operation, pairs in ((dist.isend, outgoing), (dist.irecv, incoming))
            for peer, x in pairs
            if x.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def all_gather(self, numbers: list[int], device: torch.device | None) -> list[list[int]]:
        """Return the numbers of every process, equally many in each, in the order of their ranks."""
        if self.size == 1:
            return [numbers]
        own = torch.tensor(numbers, device=device)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, self.group)
        return torch.stack(rows).tolist()


def wait(requests: list[Any]) -> None:
    """Wait until all requests are complete."""
    for request in requests:
        request.wait()


def fetch(x: Tensor, processes: Processes, source: Layout, target: Layout) -> Tensor:
    """Return this process's tokens ``[batch, heads, tokens, dim]`` in the target layout.

    A token occurs once in the source layout, and any number of times in the target layout. Its
    gradient is the sum of its gradients in all processes that fetched it.
    """
    return x if source == target else _Fetch.apply(x, processes, source, target)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, processes: Processes, source: Layout, target: Layout) -> Tensor:
        ctx.processes, ctx.source, ctx.target = processes, source, target
        return _redistribute(x, processes, source, target)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _redistribute(grad, ctx.processes, ctx.target, ctx.source), None, None, None


def _redistribute(x: Tensor, processes: Processes, source: Layout, target: Layout) -> Tensor:
    """Return the tokens of this process in another layout, summed where a token occurs repeatedly."""
    rank = processes.rank
    output = x.new_zeros(*x.shape[:-2], count_tokens(target[rank]), x.shape[-1])
    outgoing, incoming = [], []
    for peer in range(processes.size):
        if peer == rank:
            continue
        slices = overlaps(source[rank], target[peer])
        if slices:
            tokens = torch.cat([x[..., i : i + length, :] for i, _, length in slices], -2)
            outgoing.append((peer, tokens.contiguous()))
        length = sum(length for _, _, length in overlaps(source[peer], target[rank]))
        if length:
            incoming.append((peer, x.new_empty(*x.shape[:-2], length, x.shape[-1])))
    requests = processes.exchange(outgoing, incoming)
    for i, j, length in overlaps(source[rank], target[rank]):
        output[..., j : j + length, :] += x[..., i : i + length, :]
    wait(requests)
    for peer, tokens in incoming:
        slices = overlaps(source[peer], target[rank])
        lengths = [length for _, _, length in slices]
        for (_, j, length), run in zip(slices, tokens.split(lengths, -2)):
            output[..., j : j + length, :] += run
    return output


def overlaps(source: Runs, target: Runs) -> list[tuple[int, int, int]]:
    """Return the tokens that are in both, as (index in source, index in target, number of tokens).

    An index counts the tokens of all runs of a process, as in a tensor that holds them.
    """
    slices, source_index = [], 0
    for source_start, source_stop in source:
        target_index = 0
        for target_start, target_stop in target:
            start, stop = max(source_start, target_start), min(source_stop, target_stop)
            if start < stop:
                i, j = source_index + start - source_start, target_index + start - target_start
                slices.append((i, j, stop - start))
            target_index += target_stop - target_start
        source_index += source_stop - source_start
    return slices
