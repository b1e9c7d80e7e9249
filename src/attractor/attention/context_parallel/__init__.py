"""Attention over sequences longer than one device: each process of a group holds some of the tokens.

A stepped value depends only on values within its reach, so each process fetches a halo of this width and
steps its own values; only the ends of the whole sequence are walls. What remains is standard attention
to the keys of all processes (`ring`), merged by log-sum-exp, in O(tokens / processes) memory.

Under a causal mask, the last `reach` keys of a row take the steps themselves (`engines.boundary`), and
row i attends to the far keys up to ``i - reach``. Shifted by `reach`, this is an ordinary causal mask,
so each block of the ring is complete, causal or empty. No tokens are fetched from the right, and blocks
of later keys are not computed: causality is exact.

Keys and values travel with their own heads, also if several heads of query share each of them, and so do
their gradients. If the coefficients differ from head to head, so do the stepped values of shared heads;
then values travel as they are, with their halo, and each process steps them for its heads of query.

PyTorch's own ring attention
(`torch.distributed.tensor.experimental.context_parallel`) does not return the log-sum-exp that this
needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from attractor.attention.call import Call, autocast_as_sdpa
from attractor.attention.context_parallel.exchange import Processes, fetch
from attractor.attention.context_parallel.parts import (
    Layout,
    Parts,
    Runs,
    count_tokens,
    extend_runs,
    split_runs,
)
from attractor.attention.context_parallel.ring import Ring, ring_softmax
from attractor.attention.engines import boundary
from attractor.attention.engines.bands import band_values
from attractor.attention.engines.values import step_values
from attractor.attention.masks import Scope
from attractor.attention.pdes import PDE, Diffusion
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.pdes.pde import with_coefficients
from attractor.attention.precision import accumulate_dtype

__all__ = ["Parts", "context_parallel_attention"]

INVALID = -1  # what a process reports as its number of tokens if it rejects its arguments
# What all processes must have in common.
COMMON = (
    "batch size times heads", "batch size times key heads", "dim", "value dim", "bytes per element",
    "steps", "is_causal", "whether coefficients differ from head to head",
)  # fmt: skip


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
    """Compute `pde_attention` of a linear PDE over a sequence that a group of processes holds.

    Every process of the group calls this function with its own tokens. Outputs and gradients equal those
    of one process with the whole sequence, up to rounding. Each process gets the gradients of its own
    tokens. For the PDE's coefficients, and for all weights that processes have in common, it gets its
    own contribution to the gradient. The gradient is the sum of these over the group, which
    `torch.distributed.all_reduce` computes; DistributedDataParallel computes their mean.

    Args:
        query, key: The tokens of this process, ``[*batch, heads, own tokens, dim]``.
        value: ``[*batch, heads, own tokens, value dim]``.
        pde: As in `pde_attention`, but the equation must be linear. None is standard attention.
        steps, dt, scale, enable_gqa: As in `pde_attention`.
        is_causal: Whether a query attends only to keys up to its own position in the whole sequence.
        parts: The tokens of each process. Runs may be shorter than the PDE's reach; halos then come from
            processes further away than the neighbours. If None, the tokens of rank n directly precede
            those of rank n + 1; the processes exchange their lengths in every call, which synchronizes
            with the GPU. With `parts`, nothing is exchanged before the computation, so that an invalid
            argument in one process leaves the others waiting.
        group: A process group of `torch.distributed`; None for all processes. If `torch.distributed` is
            not initialized, this process holds the whole sequence.

    Returns:
        ``[*batch, heads, own tokens, value dim]``, in the dtype of query.

    Raises:
        TypeError, ValueError: An argument is invalid, such as a PDE that is not linear. All processes
            raise if `parts` is None.

    With ``attention=context_parallel_attention``, a `PDEAttention` or a whole `Stack` is context
    parallel; see examples/context_parallel.py.

    >>> query, key, value = torch.randn(3, 1, 8, 100, 64)
    >>> context_parallel_attention(query, key, value, "diffusion", is_causal=True).shape
    torch.Size([1, 8, 100, 64])
    """
    steps, pde = (0, Diffusion()) if pde is None else (steps, pde)
    processes = Processes.of(group)
    try:
        call = Call(
            query, key, value, None, 0.0, is_causal, scale, enable_gqa, pde=pde, steps=steps, dt=dt
        )
        _check_call(call)
    except (TypeError, ValueError):
        if parts is None:  # the other processes wait for the numbers of this one
            device = query.device if isinstance(query, Tensor) else None
            processes.all_gather([INVALID] * (1 + len(COMMON)), device)
        raise
    parts = _gather_parts(processes, call) if parts is None else parts
    _check_parts(parts, processes, call.query)
    shape = *call.query.shape[:-1], value.shape[-1]
    if call.empty:
        return query.new_zeros(shape)
    query, key, value, scale, evolution = call.flatten_heads(_can_share_heads(call.evolution))
    out = _attend(query, key, value, processes, parts, evolution, scale, is_causal)
    return out.to(value.dtype).reshape(shape)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    processes: Processes,
    parts: Parts,
    evolution: Evolution,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """Return the output; this process computes keys near causal walls, and the ring all others.

    Key and value may have fewer heads than query.
    """
    runs, rank, reach, heads = parts.runs, processes.rank, evolution.reach, query.shape[1]
    width = reach if is_causal else 0  # number of keys per row whose weights take the steps
    value_halo = extend_runs(runs, reach + width, reach - width, parts.tokens)
    far = extend_runs(runs, width, -width, parts.tokens)
    step_later = bool(evolution.steps) and key.shape[1] != heads and not evolution.same_for_all_heads
    key_halo = value_halo if step_later else extend_runs(runs, width, 0, parts.tokens)
    key, value = fetch(key, processes, runs, key_halo), fetch(value, processes, runs, value_halo)
    if step_later:
        tokens = torch.cat((key, value), -1)
        step = _step_on_arrival(evolution, heads, query.shape[-1], value_halo, far)
        ring = Ring(processes, runs, far, reach if is_causal else None, value_halo, step)
        coefficients = _coefficients(evolution)
    else:
        stepped = _step_runs(value, value_halo[rank], far[rank], evolution)
        tokens = torch.cat((_crop_runs(key, key_halo[rank], far[rank]), stepped), -1)
        ring = Ring(processes, runs, far, reach if is_causal else None, far)
        coefficients = []
    dtype = accumulate_dtype(query.dtype)
    if not width:
        no_scores = query.new_empty(*query.shape[:-1], 0, dtype=dtype)
        return ring_softmax(query, tokens, no_scores, ring, scale, coefficients)[0]

    starts, key_starts, value_starts = (
        [start for start, _ in layout[rank]] for layout in (runs, key_halo, value_halo)
    )
    queries = split_runs(query, runs[rank])
    keys = split_runs(_repeat_heads(key, heads), key_halo[rank])
    values = split_runs(_repeat_heads(value, heads).to(dtype), value_halo[rank])
    band, scores = boundary.before_wall(0, reach), []
    for q, k, start, key_start in zip(queries, keys, starts, key_starts):
        relative = band._replace(first=start + band.first - key_start)
        scores.append(boundary.scores(q, k, Scope(q.shape[-2], k.shape[-2]), scale, relative))
    out, weights = ring_softmax(query, tokens, torch.cat(scores, -2), ring, scale, coefficients)
    sums = []
    for w, v, start, value_start in zip(split_runs(weights, runs[rank]), values, starts, value_starts):
        patch = boundary.spread(w, band, evolution, row=start)
        sums.append(band_values(patch, v, start + band.patch - value_start))
    return out + torch.cat(sums, -2)


def _can_share_heads(evolution: Evolution) -> bool:
    """Return whether the coefficients of an equation are known, so that they can get gradients."""
    return not evolution.steps or is_dataclass(evolution.pde)


def _coefficients(evolution: Evolution) -> list[Tensor]:
    """Return the coefficients that are tensors, in the order of `with_coefficients`."""
    values = [getattr(evolution.pde, field.name) for field in fields(evolution.pde)]  # type: ignore[arg-type]
    return [value for value in values if isinstance(value, Tensor)]


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values with as many heads as query."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _crop_runs(x: Tensor, source: Runs, target: Runs) -> Tensor:
    """Return the tokens of the target runs, each of which lies in its source run."""
    if source == target:
        return x
    runs = zip(split_runs(x, source), source, target)
    return torch.cat(
        [y[..., start - first : stop - first, :] for y, (first, _), (start, stop) in runs], -2
    )


def _step_on_arrival(
    evolution: Evolution, heads: int, dim: int, source: Layout, target: Layout
) -> Callable[[Tensor, int, Sequence[Tensor]], Tensor]:
    """Return `Ring.step` for coefficients that differ between heads of query that share values.

    Args:
        evolution: The steps; `Ring.step` gets the equation's coefficients as an argument.
        heads: Number of heads of query.
        dim: Size of the keys, which the values follow in the last dimension.
        source: The runs of the tokens of each process.
        target: The runs that the result contains.
    """

    def step(tokens: Tensor, owner: int, coefficients: Sequence[Tensor]) -> Tensor:
        values = iter(coefficients)
        current = evolution.with_pde(with_coefficients(evolution.pde, lambda _: next(values)))
        tokens = _repeat_heads(tokens, heads)
        key = _crop_runs(tokens[..., :dim], source[owner], target[owner])
        value = _step_runs(tokens[..., dim:], source[owner], target[owner], current)
        return torch.cat((key, value), -1)

    return step


def _step_runs(value: Tensor, source: Runs, target: Runs, evolution: Evolution) -> Tensor:
    """Return the values of the target runs after all steps.

    Each source run contains its target run and all tokens within reach of it.
    """
    if not evolution.steps:
        return value
    runs = split_runs(value.to(accumulate_dtype(value.dtype)), source)
    stepped = torch.cat([step_values(evolution, v, None) for v in runs], -2)
    return _crop_runs(stepped, source, target).to(value.dtype)


def _check_call(call: Call) -> None:
    """Raise unless processes can share the computation of a call."""
    queries, keys, pde = call.query.shape[-2], call.key.shape[-2], call.evolution.pde
    if queries != keys:
        raise ValueError(
            f"query has {queries} tokens and key {keys}; each process must pass queries, keys and "
            "values of the same tokens"
        )
    if call.steps and not pde.linear:
        raise ValueError(
            f"{type(pde).__name__} is not linear, so that its map has to be computed and a halo of "
            "values does not suffice; use a linear PDE (diffusion, wave, advection_diffusion), or "
            "pde_attention with all tokens in one process, which needs O(tokens) memory "
            "(method='tiled' or 'fused')"
        )
    if call.steps and not hasattr(pde, "reach"):
        raise ValueError(
            f"{type(pde).__name__} has no attribute reach, the number of neighbours on either side that "
            "a step depends on, which determines the width of a halo; add it to the class"
        )


def _gather_parts(processes: Processes, call: Call) -> Parts:
    """Return one run per process in the order of their ranks, with the lengths that they report."""
    q, v = call.query, call.value
    sizes = q.shape[:-2].numel(), v.shape[:-2].numel(), q.shape[-1], v.shape[-1], q.element_size()
    same = call.evolution.same_for_all_heads
    numbers = [q.shape[-2], *sizes, call.steps, int(call.is_causal), int(not same)]
    lengths, *columns = zip(*processes.all_gather(numbers, q.device))
    invalid = [rank for rank, length in enumerate(lengths) if length == INVALID]
    if invalid:
        raise ValueError(
            f"Ranks {invalid} rejected their arguments; see the error on each of those ranks."
        )
    if min(lengths) < 1:
        raise ValueError(
            f"The ranks hold {list(lengths)} tokens, but each needs at least one; use fewer processes."
        )
    for name, column in zip(COMMON, columns):
        if len(set(column)) > 1:
            raise ValueError(
                f"The ranks differ in {name}: {list(column)}; only the number of tokens may differ."
            )
    return Parts(tuple((run,) for run in pairwise(accumulate(lengths, initial=0))))


def _check_parts(parts: Any, processes: Processes, query: Tensor) -> None:
    """Raise unless parts agree with the group and with the number of tokens of this process."""
    if not isinstance(parts, Parts):
        raise TypeError(f"parts is a {type(parts).__name__}; pass Parts, such as Parts.split(...)")
    if len(parts.runs) != processes.size:
        raise ValueError(f"parts is for {len(parts.runs)} processes, but the group has {processes.size}")
    expected = count_tokens(parts.runs[processes.rank])
    if query.shape[-2] != expected:
        raise ValueError(
            f"query has {query.shape[-2]} tokens on rank {processes.rank}, but parts assigns {expected} "
            "tokens to this rank"
        )
