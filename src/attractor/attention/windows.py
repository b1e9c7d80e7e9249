"""Sliding windows with global tokens, as in Longformer (Beltagy et al., 2020), refined by a PDE.

A query attends to its window and to the first few tokens of the sequence; those few attend to
everything. Time and memory are O(T) for every PDE. Between the global tokens and a window that does
not touch them is a wall. On a GPU, linear PDEs and
attention without a PDE use the kernels in `kernels/window.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.attention import kernels, masks
from attractor.attention.call import Call, autocast_as_sdpa, four_dimensions, with_positive_scale
from attractor.attention.engines import softmax
from attractor.attention.engines.stepped import Others, stepped
from attractor.attention.engines.tiled import tiled
from attractor.attention.engines.values import step_values
from attractor.attention.masks import Scope
from attractor.attention.pde_attention import pde_attention
from attractor.attention.pdes import PDE, Diffusion, Line
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.pdes.pde import for_heads
from attractor.attention.plan import refuse_transforms
from attractor.attention.precision import first_derivatives_only, wide
from attractor.core.checks import as_int, is_whole

ROWS = 8192  # at a time: what they need for a while then stays small
PART = 1024  # rows that a gradient of a few keys is summed over at once


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
    """Attention within a window and to the first tokens, ``[batch, heads, tokens, value dim]``.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, as many tokens each.
        window: (left, right), how far a query sees on either side; a single number stands for both.
        global_tokens: how many tokens at the start attend to, and are attended to by, all others.
        is_causal: a query, global ones too, attends to nothing after itself.
        key_padding: ``[batch or 1, tokens]`` bool, True = a real token.
        pde: None for windows without a PDE.

    The other arguments are those of `pde_attention`.
    """
    refuse_transforms("window_attention", "pde_attention with window= and method='dense'")
    steps, pde = (0, "diffusion") if pde is None else (steps, pde)
    call = Call.of(
        query, key, value, None, dropout_p, is_causal, scale, enable_gqa, pde=pde, steps=steps, dt=dt,
        key_padding=key_padding, window=window,
    )  # fmt: skip
    query, key, value, key_padding = call.query, call.key, call.value, call.key_padding
    global_tokens, tokens = as_int(global_tokens), query.shape[-2]
    if not is_whole(global_tokens) or global_tokens < 0:
        raise ValueError(f"global_tokens = {global_tokens!r} must be a whole number of at least 0")
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"query has {tokens} tokens and key {key.shape[-2]}: windows need as many of both"
        )
    if query.ndim != 4:
        raise ValueError(f"query {list(query.shape)} must be [batch, heads, tokens, dim]")
    if call.empty:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    query, scale = with_positive_scale(query, scale)
    common: Any = {
        "dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa,
        "pde": for_heads(call.pde, query.shape[:-2]), "steps": call.steps, "dt": dt,
    }  # fmt: skip
    left, right = masks.sides(call.window)
    right = 0 if is_causal else right
    if left < 0 <= right and global_tokens and not is_causal:
        left = tokens - 1  # no limit either, but the global tokens see beyond `right`
    if left < 0:
        return pde_attention(query, key, value, key_padding=key_padding, window=(left, right), **common)
    count = min(global_tokens, tokens)
    window = left, right
    if (
        not dropout_p
        and key_padding is None
        and not _why_no_kernels(query, value, window, count, common)
    ):
        return _by_kernels(query, key, value, window, count, is_causal, common)
    # A window that starts at key `count` or before joins the global tokens without a gap.
    joined = min(tokens, count + left + 1)
    near = _seen_first(tokens, joined, right, count, is_causal)
    query, far_query = _parts(query, (0, joined), (joined, tokens))
    key, far_key, first_key = _parts(key, (0, near), (joined - left, tokens), (0, count))
    value, far_value, first_value = _parts(value, (0, near), (joined - left, tokens), (0, count))
    parts = _first_rows(query, key, value, right, count, is_causal, key_padding, common)
    if joined < tokens:
        far = far_query, far_key, far_value
        parts = [*parts, *_apart(*far, first_key, first_value, window, key_padding, **common)]
    return torch.cat(parts, -2)


def _seen_first(tokens: int, joined: int, right: int, count: int, is_causal: bool) -> int:
    """How many keys the first rows see, those whose windows join the global tokens."""
    return tokens if right < 0 or (count and not is_causal) else min(joined + right, tokens)


def _first_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    right: int,
    count: int,
    is_causal: bool,
    key_padding: Tensor | None,
    common: dict[str, Any],
) -> list[Tensor]:
    """Rows whose keys have no gap before them: from the first on, as far as the window goes.

    Args:
        query: of these rows.
        key, value: of all keys that they see.
        count: of global tokens, which are among the rows.
    """
    rows, keys = query.shape[-2], key.shape[-2]

    def up_to(end: int, right: int, start: int = 0) -> Tensor:
        reach = end if right == 0 else keys if right < 0 else min(end + right, keys)
        plain = right == 0 and key_padding is None
        found = pde_attention(
            query[..., :end, :], key[..., :reach, :], value[..., :reach, :], is_causal=plain,
            key_padding=None if key_padding is None else key_padding[:, :reach],
            window=None if plain else (-1, right), **common,
        )  # fmt: skip
        return found[..., start:, :]

    if is_causal:
        return [up_to(rows, right)]
    parts = [up_to(count, -1)] if count else []
    return [*parts, up_to(rows, right, start=count)] if count < rows else parts


def _why_no_kernels(
    query: Tensor, value: Tensor, window: tuple[int, int], count: int, common: dict[str, Any]
) -> str:
    """Why `_by_kernels` cannot do it, empty if it can."""
    pde, steps = common["pde"], common["steps"]
    if not pde.linear:
        return f"{type(pde).__name__} is not linear"
    evolution = Evolution.of(pde, steps, common["dt"]) if steps else Evolution.of(Diffusion(), 1, 1.0)
    why = kernels.why_not(query, value, evolution)
    if why:
        return why
    from attractor.attention.kernels import window as window_kernels

    return window_kernels.why_not(window, count, query.shape[-2], steps * pde.reach)


def _by_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: tuple[int, int],
    count: int,
    is_causal: bool,
    common: dict[str, Any],
) -> Tensor:
    """The output where nothing is masked but by the window; the first and last rows as elsewhere."""
    from attractor.attention.kernels import values
    from attractor.attention.kernels import window as window_kernels

    (left, right), tokens = window, query.shape[-2]
    options: Any = {name: common[name] for name in ("pde", "steps", "dt")}
    scale = query.shape[-1] ** -0.5 if common["scale"] is None else common["scale"]
    if not count and not options["steps"]:
        query, key, value = four_dimensions(query, key, value)
        return _Band.apply(query, key, value, left, right, scale)
    table = values.taps(like=value, **options) if options["steps"] else None
    if right == 0 and (is_causal or not count):
        query, key, value = four_dimensions(query, key, value)
        return window_kernels.causal(query, key, value, count, table, left, scale)
    begin, end = count + left + 1, tokens - right
    near = _seen_first(tokens, begin, right, count, is_causal)
    first, last = (0, count), (end - left, tokens)
    query, query_above, query_below = _with_parts(query, (0, begin), (end, tokens))
    key, key_above, key_below, first_key = _with_parts(key, (0, near), last, first)
    value, value_above, value_below, first_value = _with_parts(value, (0, near), last, first)
    rows = _first_rows(query_above, key_above, value_above, right, count, is_causal, None, common)
    above = torch.cat(rows, -2)
    below = above[..., :0, :]
    if right:
        far = query_below, key_below, value_below, first_key, first_value
        below = torch.cat(list(_apart(*far, window, None, **common)), -2)
    _, first_key, first_value = four_dimensions(query, first_key, first_value)
    query, key, value = four_dimensions(query, key, value)
    first_value = first_value.to(wide(value.dtype))
    if table is not None and count:
        first_value = values.step(first_value, table, None)
    return window_kernels.attend(
        query, key, value, first_key, first_value, (above, below), table, window, scale
    )


class _Band(torch.autograd.Function):
    """A window and nothing else: an operator's business."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, left: int, right: int, scale: float
    ) -> Tensor:
        ctx.scope, ctx.scale = Scope(query.shape[-2], key.shape[-2], left, right), scale
        out, lse = softmax.attend(query, key, value, ctx.scope, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = softmax.attend_backward(grad, query, key, value, out, lse, ctx.scope, ctx.scale)
        return *grads, None, None, None


def _with_parts(x: Tensor, *ranges: tuple[int, int]) -> tuple[Tensor, ...]:
    """x, and some of its tokens (from, to) once more, with one gradient for all."""
    if torch.compiler.is_compiling():  # which adds the gradients up in one kernel
        return x, *(x[..., start:stop, :] for start, stop in ranges)
    return _WithParts.apply(x, ranges)


class _WithParts(torch.autograd.Function):
    """The gradient of x has to be nobody else's: those of the small parts are added to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.ranges = x.shape, ranges
        return x.view_as(x), *(x[..., start:stop, :] for start, stop in ranges)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, whole: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        for grad, (start, stop) in zip(grads, ctx.ranges):
            if grad is None or start == stop:
                continue
            if whole is None:
                whole = grad.new_zeros(ctx.shape)
            whole[..., start:stop, :] += grad
        return whole, None


def _parts(x: Tensor, *ranges: tuple[int, int]) -> tuple[Tensor, ...]:
    """Some of the tokens (from, to), in several parts that may overlap, with one gradient for all."""
    if torch.compiler.is_compiling():  # which adds the gradients up in one kernel
        return tuple(x[..., start:stop, :] for start, stop in ranges)
    return _Parts.apply(x, ranges)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.ranges = x.shape, ranges
        return tuple(x[..., start:stop, :] for start, stop in ranges)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [(x, *where) for x, where in zip(grads, ctx.ranges) if x is not None]
        whole = None
        for grad, start, stop in sorted(given, key=lambda part: part[1] - part[2]):  # the longest first
            if whole is None:
                whole = grad.new_empty(ctx.shape)
                whole[..., :start, :], whole[..., stop:, :] = 0.0, 0.0
                whole[..., start:stop, :] = grad
            else:
                whole[..., start:stop, :] += grad
        return whole, None


def _apart(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_key: Tensor,
    first_value: Tensor,
    window: tuple[int, int],
    key_padding: Tensor | None,
    *,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
    pde: PDE,
    steps: int,
    dt: float,
) -> Iterator[Tensor]:
    """The last rows, whose windows do not touch the first keys, some at a time.

    Args:
        key, value: those from the first window on.
        first_key, first_value: of the global tokens.
        key_padding: of all tokens.
    """
    left, right = window
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    _, first_key, first_value = four_dimensions(query, first_key, first_value)
    query, key, value = four_dimensions(query, key, value)
    rows, count = query.shape[-2], first_key.shape[-2]
    evolution = Evolution.of(pde, steps, dt)
    real = None if key_padding is None else key_padding[:, None, None, :]
    of_first = None if real is None else real[..., :count]
    real = None if real is None else real[..., real.shape[-1] - key.shape[-2] :]
    globals_ = _Globals(first_key, first_value, of_first, evolution)

    # A row needs no key beyond its window, and feels no wall but its own: so do parts of the sequence.
    # On a GPU, where launches count, linear PDEs take it whole; a gradient keeps all parts anyway.
    linear = pde.linear and not dropout_p
    whole = right < 0 or (linear and query.device.type == "cuda")
    size = rows if whole else max(ROWS, left, right)
    cuts = [left, *([size] * ((rows - 1) // size)), (rows - 1) % size + 1]
    keys, values = (x.split(cuts, -2) for x in (key, value))
    for n, part in enumerate(query.split(size, -2), 1):
        k, v = key, value
        if len(cuts) > 2:
            k, v = (_with_margins(x, n, left, right) for x in (keys, values))
        first = (n - 1) * size  # the first key that these rows see
        near = None if real is None else real[..., first : first + k.shape[-2]]
        band = None if right < 0 else left + right  # to the right of the first key of a row
        scope = Scope(part.shape[-2], k.shape[-2], 0, band, near)
        others = globals_.others(part, scale)
        if linear:
            yield stepped(part, k, v, scope, scale, evolution, others)
        else:
            yield tiled(part, k, v, scope, scale, evolution, dropout_p, others)


def _with_margins(parts: Sequence[Tensor], n: int, left: int, right: int) -> Tensor:
    """Part n, with the last keys of the one before and the first of the one after."""
    before = parts[n - 1][..., parts[n - 1].shape[-2] - left :, :]
    after = [] if right <= 0 or n + 1 == len(parts) else [parts[n + 1][..., :right, :]]
    return torch.cat((before, parts[n], *after), -2)


@dataclass(frozen=True, eq=False)
class _Globals:
    """The first tokens, as others see them that are far: between walls of their own."""

    key: Tensor
    value: Tensor
    real: Tensor | None
    evolution: Evolution

    def others(self, rows: Tensor, scale: float) -> Others | None:
        """Scores of the rows, and what their weights add, as `stepped` wants them."""
        if not self.key.shape[-2]:
            return None
        key, value = (x.to(wide(x.dtype)) for x in (self.key, self.value))
        scores = _Product.apply(rows, (scale * key).mT)
        if self.real is not None:
            scores = scores.masked_fill(~self.real, -torch.inf)
        faces = None if self.real is None else self.real[..., 1:] & self.real[..., :-1]
        if self.evolution.linear:  # a few values take the steps, and not weights of every row
            value = step_values(self.evolution, value, faces)
            return scores, lambda weights: _Product.apply(weights, value)

        def add(weights: Tensor) -> Tensor:
            return _Product.apply(self.evolution.of_map(weights, Line(-1, faces)), value)

        return scores, add


class _Product(torch.autograd.Function):
    """Rows ``[..., rows, n]`` times a small matrix ``[..., n, m]``, in the type of the matrix."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        return rows.to(matrix.dtype) @ matrix

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, matrix = ctx.saved_tensors
        of_rows = (grad @ matrix.mT).to(rows.dtype)
        # One product over a million rows would be one processor's: some rows each, then their sum.
        end = rows.shape[-2] // PART * PART
        rows = rows.to(matrix.dtype)
        of_matrix = rows[..., end:, :].mT @ grad[..., end:, :]
        if end:  # Inductor may compile a sum of no parts to other values than 0
            parts = [x[..., :end, :].unflatten(-2, (-1, PART)) for x in (rows, grad)]
            of_matrix = of_matrix + (parts[0].mT @ parts[1]).sum(-3)
        return of_rows, of_matrix
