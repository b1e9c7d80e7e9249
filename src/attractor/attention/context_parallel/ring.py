"""Ring attention: keys and values pass through all processes, and each row has one softmax over them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.attention.context_parallel.exchange import GRADIENTS, TOKENS, Processes, wait
from attractor.attention.context_parallel.parts import Layout, count_tokens
from attractor.attention.engines.softmax import attend, attend_backward, output_with_product
from attractor.attention.masks import Scope
from attractor.attention.precision import first_derivatives_only


@dataclass(frozen=True)
class Ring:
    """The queries and keys of all processes, and the order in which keys pass through them.

    Attributes:
        processes: The group.
        rows: The runs of queries of all processes.
        keys: For each run of queries a run of keys, which may be empty.
        reach: None if every query attends to all keys. Otherwise query i attends to the keys up to
            ``i - reach``, and the keys of a run end `reach` tokens before its queries do.
    """

    processes: Processes
    rows: Layout
    keys: Layout
    reach: int | None

    def blocks(self, turn: int) -> Iterator[tuple[slice, slice, Scope]]:
        """Yield (rows, columns, scope) of each block of the map of own queries and the keys of a turn.

        A block is causal or complete. Blocks without any allowed pair are left out.
        """
        owner, row = self.owner(turn), 0
        for start, stop in self.rows[self.processes.rank]:
            column = 0
            for (owner_start, _), (key_start, key_stop) in zip(self.rows[owner], self.keys[owner]):
                length = key_stop - key_start
                rows, columns = slice(row, row + stop - start), slice(column, column + length)
                column += length
                if not length or (self.reach is not None and owner_start > start):
                    continue
                causal = self.reach is not None and owner_start == start
                if causal:
                    rows = slice(rows.stop - length, rows.stop)  # earlier rows attend to none of them
                yield rows, columns, Scope(rows.stop - rows.start, length, right=0 if causal else None)
            row += stop - start

    def owner(self, turn: int) -> int:
        """Return the rank of the process whose keys are here at this turn."""
        return (self.processes.rank - turn) % self.processes.size

    def pass_on(self, x: Tensor, turn: int, tag: int = TOKENS) -> tuple[Tensor, list[Any]]:
        """Start to send x ``[..., keys, dim]`` to the next process, and receive from the previous one.

        Return the tensor to receive into, which is needed at `turn`, and the requests to wait for.
        """
        rank, size = self.processes.rank, self.processes.size
        incoming = x.new_empty(*x.shape[:-2], count_tokens(self.keys[self.owner(turn)]), x.shape[-1])
        requests = self.processes.exchange(
            [((rank + 1) % size, x)], [((rank - 1) % size, incoming)], tag
        )
        return incoming, requests

    def turns(self, tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each turn and the tokens that are here at that turn, beginning with the own ones.

        While the caller computes, the tokens of the next turn are transferred.
        """
        last = self.processes.size - 1
        for turn in range(last + 1):
            incoming, requests = self.pass_on(tokens, turn + 1) if turn < last else (tokens, [])
            yield turn, tokens
            wait(requests)
            tokens = incoming


def ring_softmax(
    query: Tensor, key: Tensor, value: Tensor, boundary_scores: Tensor, ring: Ring, scale: float
) -> tuple[Tensor, Tensor]:
    """Return `engines.softmax.split_softmax` for keys that are distributed over processes.

    Args:
        query, key, value: This process's, ``[batch, heads, tokens, dim]``.
        boundary_scores: Additional scores ``[batch, heads, rows, n]`` in at least float32, -inf where
            there is no key.
        ring: The queries and keys of all processes.
        scale: Scale of the scores, greater than 0.

    Returns:
        The sum of weight times value over the keys of the ring, ``[batch, heads, rows, value dim]``, and
        the weights of the additional scores, both in the dtype of `boundary_scores`.
    """
    return _RingSoftmax.apply(query, key, value, boundary_scores, ring, scale)


class _RingSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        boundary_scores: Tensor,
        ring: Ring,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        dim = key.shape[-1]
        lse = boundary_scores.logsumexp(-1)
        out = boundary_scores.new_zeros(*query.shape[:-1], value.shape[-1])
        for turn, tokens in ring.turns(torch.cat((key, value), -1)):
            for rows, columns, scope in ring.blocks(turn):
                q, k, v = query[..., rows, :], tokens[..., columns, :dim], tokens[..., columns, dim:]
                block_out, block_lse = attend(q, k, v, scope, scale)
                total_lse = torch.logaddexp(lse[..., rows], block_lse)
                out[..., rows, :] *= (lse[..., rows] - total_lse).exp()[..., None]
                out[..., rows, :] += block_out.to(out.dtype) * (block_lse - total_lse).exp()[..., None]
                lse[..., rows] = total_lse
        weights = (boundary_scores - lse[..., None]).exp()
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(query, key, value, out, weights, lse)
        return out, weights

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, do: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        query, key, value, out, weights, lse = ctx.saved_tensors
        ring, dim = ctx.ring, key.shape[-1]
        total = (grad_weights * weights).sum(-1, keepdim=True) + (do * out).sum(-1, keepdim=True)
        do = do.to(value.dtype)
        effective_out = output_with_product(do, total)
        dq = torch.zeros_like(query, dtype=out.dtype)
        own_gradient = incoming = dq.new_zeros(())
        requests: list[Any] = []
        for turn, tokens in ring.turns(torch.cat((key, value), -1)):
            gradient = torch.zeros_like(tokens, dtype=out.dtype)  # of keys and values
            for rows, columns, scope in ring.blocks(turn):
                q, k, v = query[..., rows, :], tokens[..., columns, :dim], tokens[..., columns, dim:]
                block_dq, block_dk, block_dv = attend_backward(
                    do[..., rows, :], q, k, v, effective_out[..., rows, :], lse[..., rows],
                    scope, ctx.scale,
                )  # fmt: skip
                dq[..., rows, :] += block_dq
                gradient[..., columns, :dim] += block_dk
                gradient[..., columns, dim:] += block_dv
            if not turn:
                own_gradient = gradient
                continue
            # Gradients follow their tokens around the ring, one turn behind, and end at the owner.
            wait(requests)
            gradient += incoming if turn > 1 else 0
            outgoing = gradient  # a reference that keeps the tensor alive until it is sent
            incoming, requests = ring.pass_on(outgoing, turn + 1, GRADIENTS)
        if ring.processes.size > 1:
            wait(requests)
            own_gradient = own_gradient + incoming
        dk, dv = own_gradient[..., :dim].to(key.dtype), own_gradient[..., dim:].to(value.dtype)
        grad_scores = weights * (grad_weights - total)
        return dq.to(query.dtype), dk, dv, grad_scores, None, None
