"""Sequences longer than one device: every process of a group holds a part of the tokens.

A linear PDE on the key axis steps the values (see `stepped`), and a stepped value depends on values no
further away than the reach, steps times the PDE's own. So a process fetches a halo from its neighbours,
steps its values between no other walls than those at the ends of the whole sequence, and what is left
is ordinary attention to keys that others hold: these go round a ring of processes, and the shares of a
row's softmax are merged by their log-sum-exp. Memory is O(tokens / processes).

Causal attention has a wall behind every row's own key. As in `stepped`, the last `reach` keys of a row
spread their weights between that wall and the keys before, which a halo to the left provides; all keys
before them are far. With keys counted `reach` later than they are, far keys are those up to the row
itself: blocks of a ring are then whole, causal or empty, as in ordinary attention. Nothing is ever
fetched from the right, and no block of later keys is looked at: causality is exact.

Torch has a ring attention of its own (`torch.distributed.tensor.experimental.context_parallel`). It
takes the place of whole calls of SDPA on CUDA, with parts of equal length, and hands out no log-sum-exp
to merge the near keys with; hence this one, of the same operators.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attractor.attention.call import Call, autocast_as_sdpa
from attractor.attention.engines import boundary
from attractor.attention.engines.bands import band_scores, band_values
from attractor.attention.engines.softmax import attend, attend_backward
from attractor.attention.engines.values import step_values
from attractor.attention.masks import Scope
from attractor.attention.parts import Parts, Runs, count
from attractor.attention.pdes import PDE, Diffusion
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.precision import first_derivatives_only, wide

KEYS, SUMS = 0, 1  # tags of messages


@autocast_as_sdpa
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pde: PDE | str | None = None,
    *,
    steps: int = 4,
    dt: float = 1.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    parts: Parts | None = None,
    group: Any = None,
) -> Tensor:
    """`pde_attention` of a linear PDE over a sequence that the processes of a group hold together.

    All of them call it, each with its own tokens; the result is what one process would give for the
    whole sequence, up to rounding, and so are all gradients. Every process has gradients of its own
    tokens. Those of the PDE's coefficients are each process's share, as are those of all weights that
    processes have in common: their sum over the group is the gradient (DistributedDataParallel and
    `torch.distributed.all_reduce` take it).

    Args:
        query, key: this process's part, ``[*batch, heads, own tokens, dim]``.
        value: ``[*batch, heads, own tokens, value dim]``.
        pde: a linear equation of `attractor.pdes`, one of your own, or a name such as ``"diffusion"``;
            None, as ``steps=0``, is standard attention.
        steps: how many steps the map takes.
        dt: pseudo-time of a step.
        is_causal: a query attends to keys up to its own position in the whole sequence.
        scale: of the scores, ``dim ** -0.5`` if None.
        enable_gqa: query may have a multiple of the heads of key and value.
        parts: who holds which tokens. None: process n's come right before process n + 1's, however
            many each has; they are asked in every call, for which a GPU is waited for. With parts
            nobody is asked, and what is wrong in one process alone leaves the others waiting. Runs may
            be shorter than the PDE's reach; then halos come from further away than the neighbours.
        group: of `torch.distributed`; None for all processes. Without any, there is one.

    Returns:
        ``[*batch, heads, own tokens, value dim]``, in query's dtype.

    Raises:
        ValueError: in all processes alike where they can all see it, such as a PDE that is not linear.

    With ``attention=context_parallel_attention`` a `PDEAttention`, or a whole `Stack`, is context
    parallel; see examples/context_parallel.py.

    >>> query, key, value = torch.randn(3, 1, 8, 100, 64)
    >>> context_parallel_attention(query, key, value, "diffusion", is_causal=True).shape
    torch.Size([1, 8, 100, 64])
    """
    steps, pde = (0, Diffusion()) if pde is None else (steps, pde)
    processes, call, wrong = Processes.of(group), None, None
    try:
        call = Call.of(
            query, key, value, None, 0.0, is_causal, scale, enable_gqa, pde=pde, steps=steps, dt=dt
        )
        _check(call)
    except (TypeError, ValueError) as error:
        wrong = error
    if parts is None:
        parts = _asked(processes, query, call, wrong)
    if wrong:
        raise wrong
    assert call is not None
    shape = call.query.shape[:-1]
    _check_parts(parts, processes, call.query)
    if call.empty:
        return query.new_zeros(*shape, value.shape[-1])
    query, key, value, scale, evolution = call.flattened()
    attention = _causal if is_causal else _all_to_all
    out = attention(query, key, value, processes, parts, evolution, scale)
    return out.to(value.dtype).reshape(*shape, value.shape[-1])


def _all_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    processes: "Processes",
    parts: Parts,
    evolution: Evolution,
    scale: float,
) -> Tensor:
    """Every row attends to all keys: a halo on both sides, and the ring."""
    reach, tokens = evolution.reach, parts.tokens
    wanted = tuple(
        tuple((max(start - reach, 0), min(stop + reach, tokens)) for start, stop in runs)
        for runs in parts.runs
    )
    values = _fetched(value, processes, parts.runs, wanted)
    stepped = _stepped(values, wanted[processes.rank], parts.runs[processes.rank], evolution)
    ring = Ring(processes, parts.runs, parts.runs, None)
    out, _ = _RingSoftmax.apply(query, key, stepped, _no_scores(query), ring, scale)
    return out


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    processes: "Processes",
    parts: Parts,
    evolution: Evolution,
    scale: float,
) -> Tensor:
    """Far keys by the ring, counted `reach` later than they are; near ones by hand."""
    reach, dtype = evolution.reach, wide(query.dtype)
    mine = parts.runs[processes.rank]
    keys, values = (_to_the_left(parts.runs, start, 0) for start in (reach, 2 * reach))
    far = _to_the_left(parts.runs, reach, reach)
    own_keys, own_values, own_far = (runs[processes.rank] for runs in (keys, values, far))
    key = _fetched(key, processes, parts.runs, keys)
    value = _fetched(value, processes, parts.runs, values)
    stepped = _stepped(value, own_values, own_far, evolution)
    far_key = torch.cat(
        [run[..., : b - a, :] for run, (a, b) in zip(_split(key, own_keys), own_far)], -2
    )
    near = _no_scores(query)
    if reach:
        rows = zip(_split(query, mine), _split(key, own_keys), mine, own_keys)
        near = torch.cat(
            [_near_scores(q.to(dtype), k.to(dtype), reach, start, first, scale)
             for q, k, (start, _), (first, _) in rows], -2
        )  # fmt: skip
    ring = Ring(processes, parts.runs, far, reach)
    out, weights = _RingSoftmax.apply(query, far_key, stepped, near, ring, scale)
    if not reach:
        return out
    band = boundary.before_wall(0, reach)
    sums = [
        band_values(
            boundary.spread(w, band, evolution, row=start), v.to(dtype), start + band.patch - first
        )
        for w, v, (start, _), (first, _) in zip(
            _split(weights, mine), _split(value, own_values), mine, own_values
        )
    ]
    return out + torch.cat(sums, -2)


def _to_the_left(every: tuple[Runs, ...], start: int, stop: int) -> tuple[Runs, ...]:
    """Runs whose ends are moved so many tokens to the left, not beyond the first."""
    return tuple(tuple((max(a - start, 0), max(b - stop, 0)) for a, b in runs) for runs in every)


def _split(x: Tensor, runs: Runs) -> tuple[Tensor, ...]:
    """Run by run."""
    return x.split([stop - start for start, stop in runs], -2)


def _no_scores(query: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:-1], 0, dtype=wide(query.dtype))


def _stepped(value: Tensor, given: Runs, wanted: Runs, evolution: Evolution) -> Tensor:
    """The values of some runs after their steps, from those runs and what is within reach of them."""
    if not evolution.steps:
        return value
    found = []
    for x, (first, _), (start, stop) in zip(_split(value, given), given, wanted):
        moved = step_values(evolution, x.to(wide(x.dtype)), None)
        found.append(moved[..., start - first : stop - first, :].to(x.dtype))
    return torch.cat(found, -2)


def _near_scores(query: Tensor, key: Tensor, reach: int, start: int, first: int, scale: float) -> Tensor:
    """Scores ``[batch, heads, rows, reach]`` of row i with its last keys; -inf before the first key.

    Args:
        query: a run, from row `start` on.
        key: a run, from key `first` on.
    """
    scores = scale * band_scores(query, key, start - reach + 1 - first, reach)
    row = torch.arange(start, start + query.shape[-2], device=query.device)[:, None]
    missing = row + torch.arange(1 - reach, 1, device=query.device) < 0
    return scores.masked_fill(missing, -torch.inf)


# Processes


@dataclass(frozen=True)
class Processes:
    """Those of a group, and which of them this is."""

    group: Any
    rank: int
    count: int

    @classmethod
    def of(cls, group: Any) -> "Processes":
        """The group's; one if `torch.distributed` has not been started."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(None, 0, 1)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not of the group; only those that are may call")
        return cls(group, rank, dist.get_world_size(group))

    def exchange(
        self, sent: list[tuple[int, Tensor]], wanted: list[tuple[int, Tensor]], tag: int = KEYS
    ) -> list[Any]:
        """Begin to send and to receive (process, tensor); what is returned must be waited for."""
        operations = [
            dist.P2POp(kind, x, self._global(peer), self.group, tag)
            for kind, pairs in ((dist.isend, sent), (dist.irecv, wanted))
            for peer, x in pairs
            if x.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def asked(self, numbers: Tensor) -> list[list[int]]:
        """Every process's numbers."""
        found = [torch.empty_like(numbers) for _ in range(self.count)]
        dist.all_gather(found, numbers, self.group)
        return torch.stack(found).tolist()

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _fetched(
    x: Tensor, processes: Processes, held: tuple[Runs, ...], wanted: tuple[Runs, ...]
) -> Tensor:
    """Tokens ``[batch, heads, own tokens, dim]`` and those around them, from whoever holds them."""
    return x if held == wanted else _Fetch.apply(x, processes, held, wanted)


class _Fetch(torch.autograd.Function):
    """What is fetched in one direction gives its gradient back in the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, processes: Processes, held: tuple[Runs, ...], wanted: tuple[Runs, ...]
    ) -> Tensor:
        ctx.plan = processes, held, wanted
        return _moved(x, processes, held, wanted)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        processes, held, wanted = ctx.plan
        return _moved(grad, processes, wanted, held), None, None, None


def _moved(
    x: Tensor, processes: Processes, source: tuple[Runs, ...], target: tuple[Runs, ...]
) -> Tensor:
    """Runs of one layout from those of another; what several processes have of a token is added up."""
    rank, others = processes.rank, [p for p in range(processes.count) if p != processes.rank]
    moved = x.new_zeros(*x.shape[:-2], count(target[rank]), x.shape[-1])
    sent, awaited = [], []
    for peer in others:
        leaving = _overlaps(source[rank], target[peer])
        if leaving:
            sent.append(
                (peer, torch.cat([x[..., i : i + n, :] for i, _, n in leaving], -2).contiguous())
            )
        arriving = _overlaps(source[peer], target[rank])
        if arriving:
            size = sum(n for _, _, n in arriving)
            awaited.append((peer, x.new_empty(*x.shape[:-2], size, x.shape[-1])))
    works = processes.exchange(sent, awaited)
    for i, j, n in _overlaps(source[rank], target[rank]):
        moved[..., j : j + n, :] += x[..., i : i + n, :]
    for work in works:
        work.wait()
    for peer, found in awaited:
        arriving = _overlaps(source[peer], target[rank])
        for (_, j, n), piece in zip(arriving, found.split([n for _, _, n in arriving], -2)):
            moved[..., j : j + n, :] += piece
    return moved


def _overlaps(source: Runs, target: Runs) -> list[tuple[int, int, int]]:
    """Tokens in both, run by run: where in the source, where in the target, and how many."""
    found, at = [], 0
    for start, stop in source:
        to = 0
        for first, last in target:
            low, high = max(start, first), min(stop, last)
            if low < high:
                found.append((at + low - start, to + low - first, high - low))
            to += last - first
        at += stop - start
    return found


# The ring


@dataclass(frozen=True)
class Ring:
    """Who meets whose keys.

    Attributes:
        rows: every process's runs of rows.
        keys: for each of them a run of keys; possibly an empty one.
        reach: None if every row meets all keys; else row i meets keys up to ``i - reach``, and a run's
            keys end where the reach of its rows begins.
    """

    processes: Processes
    rows: tuple[Runs, ...]
    keys: tuple[Runs, ...]
    reach: int | None

    def meetings(self, owner: int) -> Iterator[tuple[slice, slice, bool]]:
        """Own rows, a process's keys, and whether they meet up to the diagonal only."""
        top = 0
        for start, stop in self.rows[self.processes.rank]:
            left = 0
            for (first, _), (low, high) in zip(self.rows[owner], self.keys[owner]):
                rows, columns = slice(top, top + stop - start), slice(left, left + high - low)
                left += high - low
                if low == high or (self.reach is not None and first > start):
                    continue
                diagonal = self.reach is not None and first == start
                if diagonal:
                    rows = slice(rows.stop - (high - low), rows.stop)  # those before have no far key
                yield rows, columns, diagonal
            top += stop - start

    def owner(self, turn: int) -> int:
        """Whose keys are here at that turn."""
        return (self.processes.rank - turn) % self.processes.count

    def pass_on(self, x: Tensor, turn: int, tag: int = KEYS) -> tuple[Tensor, list[Any]]:
        """Begin to send x on, and to receive what belongs to the owner of that turn's keys."""
        rank, processes = self.processes.rank, self.processes.count
        arriving = x.new_empty(*x.shape[:-2], count(self.keys[self.owner(turn)]), x.shape[-1])
        works = self.processes.exchange(
            [((rank + 1) % processes, x)], [((rank - 1) % processes, arriving)], tag
        )
        return arriving, works

    def turns(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every process's block, the own one first; the next is on its way meanwhile."""
        last = self.processes.count - 1
        for turn in range(last + 1):
            arriving, works = self.pass_on(block, turn + 1) if turn < last else (block, [])
            yield turn, block
            for work in works:
                work.wait()
            block = arriving


class _RingSoftmax(torch.autograd.Function):
    """One softmax over keys that go round, and over some more scores a row; see `split_softmax`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, near: Tensor, ring: Ring, scale: float
    ) -> tuple[Tensor, Tensor]:
        dim = key.shape[-1]
        lse = near.logsumexp(-1)
        out = near.new_zeros(*query.shape[:-1], value.shape[-1])
        for turn, block in ring.turns(torch.cat((key, value), -1)):
            for rows, columns, diagonal in ring.meetings(ring.owner(turn)):
                keys, values = block[..., columns, :dim], block[..., columns, dim:]
                q = query[..., rows, :]
                part, part_lse = attend(q, keys, values, _scope(q, keys, diagonal), scale)
                together = torch.logaddexp(lse[..., rows], part_lse)
                out[..., rows, :] *= (lse[..., rows] - together).exp()[..., None]
                out[..., rows, :] += part.to(out.dtype) * (part_lse - together).exp()[..., None]
                lse[..., rows] = together
        weights = (near - lse[..., None]).exp()
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(query, key, value, out, weights, lse)
        return out, weights

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        query, key, value, out, weights, lse = ctx.saved_tensors
        ring, dim, last = ctx.ring, key.shape[-1], ctx.ring.processes.count - 1
        # The operator subtracts <grad, out>; for one softmax over all keys it is given an out that makes
        # this the sum over both shares (flash.py).
        total = (grad_weights * weights).sum(-1, keepdim=True) + (grad * out).sum(-1, keepdim=True)
        size = torch.linalg.vector_norm(grad, dim=-1, keepdim=True)
        stand_in = torch.where(size > 1e-30, grad * (total / size / size), 0.0).to(value.dtype)
        grad = grad.to(value.dtype)
        of_query = torch.zeros_like(query, dtype=out.dtype)
        own = coming = of_query.new_zeros(())
        works: list[Any] = []
        for turn, block in ring.turns(torch.cat((key, value), -1)):
            of_block = torch.zeros_like(block, dtype=out.dtype)
            for rows, columns, diagonal in ring.meetings(ring.owner(turn)):
                q, keys, values = (
                    query[..., rows, :],
                    block[..., columns, :dim],
                    block[..., columns, dim:],
                )
                of_q, of_keys, of_values = attend_backward(
                    grad[..., rows, :], q, keys, values, stand_in[..., rows, :], lse[..., rows],
                    _scope(q, keys, diagonal), ctx.scale,
                )  # fmt: skip
                of_query[..., rows, :] += of_q
                of_block[..., columns, :dim] += of_keys
                of_block[..., columns, dim:] += of_values
            if not turn:
                own = of_block
                continue
            for work in works:  # what the processes before have added up for this block
                work.wait()
            of_block += coming if turn > 1 else 0
            sent = of_block  # kept until it has arrived
            coming, works = ring.pass_on(sent, turn + 1, SUMS)
        if last:
            for work in works:
                work.wait()
            own = own + coming
        of_near = weights * (grad_weights - total)
        of_key, of_value = own[..., :dim].to(key.dtype), own[..., dim:].to(value.dtype)
        return of_query.to(query.dtype), of_key, of_value, of_near, None, None


def _scope(query: Tensor, key: Tensor, diagonal: bool) -> Scope:
    return Scope(query.shape[-2], key.shape[-2], right=0 if diagonal else None)


# Input


def _check(call: Call) -> None:
    query, key, pde = call.query, call.key, call.pde
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"query has {query.shape[-2]} tokens and key {key.shape[-2]}: every process holds queries, "
            "keys and values of the same tokens"
        )
    if call.steps and not pde.linear:
        raise ValueError(
            f"{type(pde).__name__} is not linear: its map has to be built, and no halo of values will "
            "do; use a linear PDE (diffusion, wave, advection_diffusion), or pde_attention with all "
            "tokens in one process, which takes O(tokens) memory (method='tiled' or 'fused')"
        )
    if call.steps and not hasattr(pde, "reach"):
        raise ValueError(
            f"{type(pde).__name__} does not say its reach, how many neighbours away a step looks, which "
            "is the width of a halo; give it one"
        )


def _asked(
    processes: Processes, query: Tensor, call: Call | None, wrong: ValueError | TypeError | None
) -> Parts:
    """One run for each process, in the order of their ranks, as long as it says.

    Raises in all processes, or in none.
    """
    names = (
        "tokens", "rows of all heads", "dim", "value dim", "bytes a number", "steps", "is_causal",
        "wrong",
    )  # fmt: skip
    told = [0] * (len(names) - 1) + [1]
    if call is not None and not wrong:
        q, v = call.query, call.value
        told = [
            q.shape[-2], q.shape[:-2].numel(), q.shape[-1], v.shape[-1], q.element_size(), call.steps,
            int(call.is_causal), 0,
        ]  # fmt: skip
    if processes.count > 1:
        device = query.device if isinstance(query, Tensor) else None
        found = processes.asked(torch.tensor(told, device=device))
    else:
        found = [told]
    if wrong:
        raise wrong
    if any(row[-1] for row in found):
        others = [n for n, row in enumerate(found) if row[-1]]
        raise ValueError(f"processes {others} were given what they cannot use; they say why")
    if min(row[0] for row in found) < 1:
        held = [row[0] for row in found]
        raise ValueError(f"processes hold {held} tokens; each needs one at least: use fewer processes")
    for name, numbers in zip(names[1:], list(zip(*found))[1:]):
        if len(set(numbers)) > 1:
            raise ValueError(f"processes differ in {name}: {list(numbers)}; only tokens may differ")
    ends = [sum(row[0] for row in found[:n]) for n in range(len(found) + 1)]
    return Parts(tuple((run,) for run in pairwise(ends)))


def _check_parts(parts: Parts, processes: Processes, query: Tensor) -> None:
    if not isinstance(parts, Parts):
        raise TypeError(f"parts is a {type(parts).__name__}; give Parts, such as Parts.split(...)")
    if len(parts.runs) != processes.count:
        raise ValueError(
            f"parts are for {len(parts.runs)} processes, and the group has {processes.count}"
        )
    expected = count(parts.runs[processes.rank])
    if query.shape[-2] != expected:
        raise ValueError(
            f"process {processes.rank} has {query.shape[-2]} tokens, and {expected} by parts"
        )
