"""Ring attention: keys and values pass through all processes, and each row has one softmax over them."""

from collections.abc import Callable, Iterator, Sequence
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
        tokens: The runs of keys and values that pass through the processes.
        step: A function of these tokens, the rank of their owner, and coefficients. It returns keys and
            stepped values of the runs `keys`. None: the tokens are keys and stepped values already.
    """

    processes: Processes
    rows: Layout
    keys: Layout
    reach: int | None
    tokens: Layout
    step: Callable[[Tensor, int, Sequence[Tensor]], Tensor] | None = None

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
        """Start to send x ``[..., tokens, dim]`` to the next process, and receive from the previous one.

        Return the tensor to receive into, which is needed at `turn`, and the requests to wait for.
        """
        rank, size = self.processes.rank, self.processes.size
        incoming = x.new_empty(*x.shape[:-2], count_tokens(self.tokens[self.owner(turn)]), x.shape[-1])
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
    query: Tensor,
    tokens: Tensor,
    boundary_scores: Tensor,
    ring: Ring,
    scale: float,
    coefficients: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Return `engines.softmax.split_softmax` for keys that are distributed over processes.

    Args:
        query: This process's, ``[batch, heads, rows, dim]``.
        tokens: This process's keys and values, ``[batch, key heads, tokens, dim + value dim]``. Each
            head serves ``heads / key heads`` consecutive heads of query.
        boundary_scores: Additional scores ``[batch, heads, rows, n]`` in at least float32, -inf where
            there is no key.
        ring: The queries and keys of all processes.
        scale: Scale of the scores, greater than 0.
        coefficients: The arguments of `Ring.step`, which get gradients.

    Returns:
        The sum of weight times value over the keys of the ring, ``[batch, heads, rows, value dim]``, and
        the weights of the additional scores, both in the dtype of `boundary_scores`.
    """
    return _RingSoftmax.apply(query, tokens, boundary_scores, ring, scale, *coefficients)


class _RingSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        tokens: Tensor,
        boundary_scores: Tensor,
        ring: Ring,
        scale: float,
        *coefficients: Tensor,
    ) -> tuple[Tensor, Tensor]:
        dim = query.shape[-1]
        lse = boundary_scores.logsumexp(-1)
        out = boundary_scores.new_zeros(*query.shape[:-1], tokens.shape[-1] - dim)
        for turn, present in ring.turns(tokens):
            if ring.step is not None:
                present = ring.step(present, ring.owner(turn), coefficients)
            for rows, columns, scope in ring.blocks(turn):
                q, k, v = query[..., rows, :], present[..., columns, :dim], present[..., columns, dim:]
                block_out, block_lse = attend(q, k, v, scope, scale)
                total_lse = torch.logaddexp(lse[..., rows], block_lse)
                out[..., rows, :] *= (lse[..., rows] - total_lse).exp()[..., None]
                out[..., rows, :] += block_out.to(out.dtype) * (block_lse - total_lse).exp()[..., None]
                lse[..., rows] = total_lse
        weights = (boundary_scores - lse[..., None]).exp()
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(query, tokens, out, weights, lse, *coefficients)
        return out, weights

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, do: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        query, tokens, out, weights, lse, *coefficients = ctx.saved_tensors
        ring, dim = ctx.ring, query.shape[-1]
        total = (grad_weights * weights).sum(-1, keepdim=True) + (do * out).sum(-1, keepdim=True)
        do = do.to(tokens.dtype)
        effective_out = output_with_product(do, total)
        dq = torch.zeros_like(query, dtype=out.dtype)
        own_gradient = incoming = dq.new_zeros(())
        grad_coefficients = [torch.zeros_like(x) for x in coefficients]
        requests: list[Any] = []
        for turn, present in ring.turns(tokens):
            stepped = present
            if ring.step is not None:
                stepped = ring.step(present, ring.owner(turn), coefficients)
            gradient = torch.zeros_like(stepped, dtype=out.dtype)  # of keys and values
            for rows, columns, scope in ring.blocks(turn):
                q, k, v = query[..., rows, :], stepped[..., columns, :dim], stepped[..., columns, dim:]
                block_dq, block_dk, block_dv = attend_backward(
                    do[..., rows, :], q, k, v, effective_out[..., rows, :], lse[..., rows],
                    scope, ctx.scale,
                )  # fmt: skip
                dq[..., rows, :] += block_dq
                gradient[..., columns, :dim] += block_dk
                gradient[..., columns, dim:] += block_dv
            if ring.step is not None:
                gradient, *shares = _step_backward(ring, turn, present, coefficients, gradient)
                for sums, share in zip(grad_coefficients, shares):
                    sums += 0 if share is None else share
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
        grad_scores = weights * (grad_weights - total)
        grads = dq.to(query.dtype), own_gradient.to(tokens.dtype), grad_scores
        return *grads, None, None, *grad_coefficients


def _step_backward(
    ring: Ring, turn: int, tokens: Tensor, coefficients: Sequence[Tensor], gradient: Tensor
) -> tuple[Any, ...]:
    """Return the gradients of the tokens and of the coefficients of `Ring.step` at a turn.

    The gradient of tokens has the dtype of `gradient`, and is summed over the heads of query that share
    a head of key.
    """
    assert ring.step is not None
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (tokens.to(gradient.dtype), *coefficients)]
        stepped = ring.step(leaves[0], ring.owner(turn), leaves[1:])
    return torch.autograd.grad(stepped, leaves, gradient, allow_unused=True)
