"""Sliding windows with global tokens, as in Longformer (Beltagy et al., 2020), refined by a PDE.

Time and memory are O(T) for every PDE. Rows are computed in two groups:

    joint rows      the first ones, whose windows adjoin the global tokens: ordinary PDE attention
    separate rows   all later ones, with walls between the global tokens and the window: the engines for
                    windows, with global tokens as additional scores

On a GPU, linear PDEs, and attention without a PDE, use the kernels in `kernels/window.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.attention import kernels, masks
from attractor.attention.call import Call, autocast_as_sdpa
from attractor.attention.engines import softmax
from attractor.attention.engines.stepped import stepped
from attractor.attention.engines.tiled import tiled
from attractor.attention.global_tokens import global_scores
from attractor.attention.masks import Scope
from attractor.attention.pde_attention import pde_attention
from attractor.attention.pdes import PDE, Diffusion
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.plan import refuse_transforms
from attractor.attention.precision import accumulate_dtype, first_derivatives_only
from attractor.common.checks import as_int, is_whole

ROWS = 8192  # separate rows per call of an engine, which limits its temporary memory


@autocast_as_sdpa
def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: masks.Window,
    global_tokens: int = 0,
    is_causal: bool = False,
    key_padding: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    pde: PDE | str | None = None,
    steps: int = 4,
    dt: float = 1.0,
) -> Tensor:
    """Compute attention within a window and to global tokens, refined by a PDE.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, with equal numbers of tokens.
        window: (left, right), the number of keys before and after its own position that a query attends
            to, -1 for no limit. A single number stands for both.
        global_tokens: Number of tokens at the start of the sequence that attend to all tokens, and that
            all tokens attend to.
        is_causal: Whether queries, including global ones, attend only to keys up to their own position.
        key_padding: ``[batch or 1, tokens]`` bool, True for valid tokens.
        dropout_p, scale, enable_gqa: As in `pde_attention`.
        pde: As in `pde_attention`; None for windows without a PDE.
        steps, dt: As in `pde_attention`.

    Returns:
        ``[batch, heads, tokens, value dim]``, in the dtype of query.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """
    refuse_transforms("window_attention", "pde_attention with window= and method='dense'")
    steps, pde = (0, "diffusion") if pde is None else (steps, pde)
    call = Call(
        query, key, value, None, dropout_p, is_causal, scale, enable_gqa, pde=pde, steps=steps, dt=dt,
        key_padding=key_padding, window=window,
    )  # fmt: skip
    query, key, value = call.query, call.key, call.value
    global_tokens, tokens = as_int(global_tokens), query.shape[-2]
    if not is_whole(global_tokens) or global_tokens < 0:
        raise ValueError(f"global_tokens = {global_tokens!r} must be a whole number of at least 0")
    if tokens != key.shape[-2]:
        raise ValueError(
            f"query has {tokens} tokens and key {key.shape[-2]}; windows need equal numbers of both"
        )
    if query.ndim != 4:
        raise ValueError(f"query {list(query.shape)} must be [batch, heads, tokens, dim]")
    if call.empty:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    query, key, value, scale, evolution = call.flatten_heads()
    left, right = masks.sides(call.window)
    right = 0 if is_causal else right
    if left < 0 <= right and global_tokens and not is_causal:
        left = tokens - 1  # no limit either, but global tokens attend to keys beyond `right`
    count, padding = min(global_tokens, tokens), call.key_padding
    options = _Options((left, right), count, is_causal, padding, dropout_p, scale, evolution)
    if left < 0:
        return options.attend(query, key, value, key_padding=padding, window=(left, right))
    plain = padding is None and not dropout_p
    if plain and not _why_no_kernels(query, value, (left, right), count, evolution):
        return _attend_by_kernels(query, key, value, options)
    joint_rows = min(tokens, options.joint_rows)
    ranges = (0, options.joint_keys(tokens)), (joint_rows - left, tokens), (0, count)
    query, separate_query = _slices(query, (0, joint_rows), (joint_rows, tokens))
    key, separate_key, global_key = _slices(key, *ranges)
    value, separate_value, global_value = _slices(value, *ranges)
    outputs = _attend_joint_rows(query, key, value, options)
    if joint_rows < tokens:
        separate_rows = _attend_separate_rows(
            separate_query, separate_key, separate_value, global_key, global_value, options
        )
        outputs = [*outputs, *separate_rows]
    return torch.cat(outputs, -2)


@dataclass(frozen=True, eq=False)
class _Options:
    """The arguments of `window_attention` that all rows have in common, as `Call` returns them."""

    window: tuple[int, int]
    global_tokens: int
    is_causal: bool
    key_padding: Tensor | None
    dropout_p: float
    scale: float
    evolution: Evolution

    @property
    def joint_rows(self) -> int:
        """The number of rows whose windows adjoin the global tokens, if there are enough tokens."""
        return self.global_tokens + self.window[0] + 1

    def joint_keys(self, tokens: int) -> int:
        """Return the number of keys that the joint rows attend to."""
        right = self.window[1]
        if right < 0 or (self.global_tokens and not self.is_causal):
            return tokens
        return min(self.joint_rows + right, tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        """Return `pde_attention` with these options, and with masks as further arguments."""
        return pde_attention(
            query, key, value, dropout_p=self.dropout_p, scale=self.scale, pde=self.evolution.pde,
            steps=self.evolution.steps, dt=self.evolution.dt, **kwargs,
        )  # fmt: skip


def _attend_joint_rows(query: Tensor, key: Tensor, value: Tensor, options: _Options) -> list[Tensor]:
    """Return the output of the joint rows in one or two tensors, given all keys they attend to."""
    rows, keys, padding = query.shape[-2], key.shape[-2], options.key_padding

    def attend(stop: int, right: int, start: int = 0) -> Tensor:
        """Return the output of rows start to stop - 1, which attend to all keys on their left."""
        end = stop if right == 0 else keys if right < 0 else min(stop + right, keys)
        causal_only = right == 0 and padding is None
        output = options.attend(
            query[..., :stop, :], key[..., :end, :], value[..., :end, :], is_causal=causal_only,
            key_padding=None if padding is None else padding[:, :end],
            window=None if causal_only else (-1, right),
        )  # fmt: skip
        return output[..., start:, :]

    right, count = options.window[1], 0 if options.is_causal else options.global_tokens
    outputs = [attend(count, -1)] if count else []  # the global tokens, which attend to all keys
    return [*outputs, attend(rows, right, start=count)] if count < rows else outputs


def _attend_separate_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    global_key: Tensor,
    global_value: Tensor,
    options: _Options,
) -> Iterator[Tensor]:
    """Yield the output of the separate rows, block by block.

    Keys and values begin with the first one in the window of the first separate row.
    """
    (left, right), evolution, dropout_p = options.window, options.evolution, options.dropout_p
    rows, keys, count = query.shape[-2], key.shape[-2], options.global_tokens
    valid = valid_global = None
    if options.key_padding is not None:
        valid = options.key_padding[:, None, None, :]
        valid, valid_global = valid[..., valid.shape[-1] - keys :], valid[..., :count]
    of_global_tokens = global_key, global_value, valid_global, evolution, options.scale

    # A row depends only on the keys in its window, so that blocks of rows are independent. On a GPU,
    # where the number of launches matters, linear PDEs take all rows as one block; for gradients all
    # blocks are kept in memory in any case.
    linear = evolution.linear and not dropout_p
    one_block = right < 0 or (linear and query.device.type == "cuda")
    size = rows if one_block else max(ROWS, left, right)
    last = (rows - 1) // size  # block; a block attends to the keys from its first row's window on
    ranges = [(n * size, keys if n == last else (n + 1) * size + left + right) for n in range(last + 1)]
    blocks = zip(ranges, query.split(size, -2), _slices(key, *ranges), _slices(value, *ranges))
    for (start, _), q, k, v in blocks:
        block_valid = None if valid is None else valid[..., start : start + k.shape[-2]]
        # Row i of a block attends to its keys i to i + left + right.
        scope = Scope(q.shape[-2], k.shape[-2], 0, None if right < 0 else left + right, block_valid)
        others = global_scores(q, *of_global_tokens)
        if linear:
            step = kernels.value_step_function(q, v, evolution)
            yield stepped(q, k, v, scope, options.scale, evolution, others, step)
        else:
            yield tiled(q, k, v, scope, options.scale, evolution, dropout_p, others)


def _why_no_kernels(
    query: Tensor, value: Tensor, window: tuple[int, int], global_tokens: int, evolution: Evolution
) -> str:
    """Return why kernels cannot compute windows without padding and dropout; empty if they can."""
    if not evolution.linear:
        return f"{type(evolution.pde).__name__} is not linear"
    reason = kernels.why_not(
        query, value, evolution if evolution.steps else Evolution.of(Diffusion(), 1, 1.0)
    )
    if reason:
        return reason
    from attractor.attention.kernels import window as window_kernels

    return window_kernels.why_not(window, global_tokens, query.shape[-2], evolution.reach)


def _attend_by_kernels(query: Tensor, key: Tensor, value: Tensor, options: _Options) -> Tensor:
    """Return the output of all rows by kernels, without padding and dropout.

    Unless attention is causal, the joint rows and the last rows, whose windows extend beyond the last
    key, are computed without kernels.
    """
    from attractor.attention.kernels import window as window_kernels
    from attractor.attention.kernels.stencils import stencil_table
    from attractor.attention.kernels.values import step

    (left, right), tokens, evolution = options.window, query.shape[-2], options.evolution
    count, scale = options.global_tokens, options.scale
    if not count and not evolution.steps:
        return softmax.attention(query, key, value, Scope(tokens, tokens, left, right), scale)
    table = stencil_table(evolution, value) if evolution.steps else None
    if right == 0 and (options.is_causal or not count):
        return window_kernels.causal(query, key, value, count, table, left, scale)
    start, stop = options.joint_rows, tokens - right  # of the rows that kernels compute
    ranges = (0, tokens), (0, options.joint_keys(tokens)), (stop - left, tokens), (0, count)
    query, first_query, last_query = _slices(query, (0, tokens), (0, start), (stop, tokens))
    key, first_key, last_key, global_key = _slices(key, *ranges)
    value, first_value, last_value, global_value = _slices(value, *ranges)
    first_rows = torch.cat(_attend_joint_rows(first_query, first_key, first_value, options), -2)
    last_rows = first_rows[..., :0, :]
    if right:
        outputs = _attend_separate_rows(
            last_query, last_key, last_value, global_key, global_value, options
        )
        last_rows = torch.cat(list(outputs), -2)
    global_value = global_value.to(accumulate_dtype(value.dtype))
    if table is not None and count:
        global_value = step(global_value, table, None)
    return window_kernels.attend(
        query, key, value, global_key, global_value, (first_rows, last_rows), table, (left, right), scale
    )


def _slices(x: Tensor, *ranges: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the tokens start to stop - 1 of x for each range, with one gradient tensor for all slices.

    Requires: No other code uses the gradient of a slice that contains all tokens, because the gradients
    of the other slices are added to it in place.
    """
    if torch.compiler.is_compiling():  # compiled code adds the gradients in one kernel
        return tuple(x[..., start:stop, :] for start, stop in ranges)
    return _Slices.apply(x, ranges)


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.ranges = x.shape, ranges
        return tuple(x[..., start:stop, :] for start, stop in ranges)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        slices = [(grad, *bounds) for grad, bounds in zip(grads, ctx.ranges) if grad is not None]
        slices.sort(key=lambda piece: piece[1] - piece[2])  # the longest first
        total = None
        for grad, start, stop in slices:
            if total is not None:
                total[..., start:stop, :] += grad
            elif grad.shape == ctx.shape:
                total = grad
            else:
                total = grad.new_empty(ctx.shape)
                total[..., :start, :], total[..., stop:, :] = 0.0, 0.0
                total[..., start:stop, :] = grad
        return total, None
