"""Sliding windows with global tokens, as in Longformer (Beltagy et al., 2020), refined by a PDE.

A query attends to its window and to the first few tokens of the sequence; those few attend to
everything. Time and memory are O(T) for every PDE. Between the global tokens and a window that does
not touch them is a wall.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.attention import masks
from attractor.attention.masks import Scope
from attractor.attention.pde_attention import four_dimensions, pde_attention
from attractor.attention.pdes import PDE, Diffusion, Line, evolve, get_pde
from attractor.attention.precision import autocast_as_sdpa, wide
from attractor.attention.stepped import Others, stepped
from attractor.attention.tiled import tiled

ROWS = 8192  # at a time: what they need for a while then stays small


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
        key_padding: ``[batch, tokens]`` bool, True = a real token.
        pde: None for windows without a PDE.

    The other arguments are those of `pde_attention`.
    """
    tokens = query.shape[-2]
    if global_tokens < 0:
        raise ValueError(f"global_tokens = {global_tokens} must be at least 0")
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"query has {tokens} tokens and key {key.shape[-2]}: windows need as many of both"
        )
    if query.ndim != 4:
        raise ValueError(f"query {list(query.shape)} must be [batch, heads, tokens, dim]")
    equation: PDE = Diffusion() if pde is None else get_pde(pde)() if isinstance(pde, str) else pde
    steps = 0 if pde is None else steps
    common: Any = {
        "dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa, "pde": equation,
        "steps": steps, "dt": dt,
    }  # fmt: skip
    left, right = masks.sides(window)
    right = 0 if is_causal else right
    if left < 0:
        return pde_attention(query, key, value, key_padding=key_padding, window=(left, right), **common)
    count = min(global_tokens, tokens)

    def whole_rows(end: int, window: tuple[int, int], start: int = 0) -> Tensor:
        """Rows whose keys have no gap before them: from the first on, as far as the window goes."""
        reach = end if window[1] == 0 else tokens if window[1] < 0 else min(end + window[1], tokens)
        padding = None if key_padding is None else key_padding[:, :reach]
        rows = pde_attention(
            query[..., :end, :], key[..., :reach, :], value[..., :reach, :], key_padding=padding,
            window=window, **common,
        )  # fmt: skip
        return rows[..., start:, :]

    # A window that starts at key `count` or before joins the global tokens without a gap.
    joined = min(tokens, count + left + 1)
    parts = []
    if not is_causal and count:
        parts.append(whole_rows(count, (-1, -1)))
    if is_causal or count < joined:
        parts.append(whole_rows(joined, (-1, right), start=0 if is_causal else count))
    if joined < tokens:
        parts += _apart(query, key, value, count, joined, (left, right), key_padding, **common)
    return torch.cat(parts, -2)


def _apart(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    count: int,
    start: int,
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
    """The rows from `start` on, whose windows do not touch the first `count` keys, some at a time."""
    left, right = window
    tokens = query.shape[-2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value, _ = four_dimensions(query, key, value, None)
    options: Any = {"pde": pde, "steps": steps, "dt": dt}
    real = None if key_padding is None else key_padding[:, None, None, :]
    globals_ = _Globals(key, value, None if real is None else real[..., :count], count, options)

    # A row needs no key beyond its window, and feels no wall but its own: so do parts of the sequence.
    size = tokens if right < 0 else max(ROWS, left, right)
    cuts = [left, *([size] * ((tokens - start - 1) // size)), (tokens - start - 1) % size + 1]
    keys, values = (x[..., start - left :, :].split(cuts, -2) for x in (key, value))
    for n, rows in enumerate(query[..., start:, :].split(size, -2), 1):
        k, v = (_with_margins(x, n, left, right) for x in (keys, values))
        first = start - left + (n - 1) * size  # the first key that these rows see
        near = None if real is None else real[..., first : first + k.shape[-2]]
        band = None if right < 0 else left + right  # to the right of the first key of a row
        scope = Scope(rows.shape[-2], k.shape[-2], 0, band, near)
        if pde.linear and not dropout_p:
            yield stepped(rows, k, v, scope, scale, others=globals_.others(rows, scale), **options)
        else:
            others = globals_.others(rows, scale)
            yield tiled(rows, k, v, scope, scale, dropout_p=dropout_p, others=others, **options)


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
    count: int
    options: dict[str, Any]

    def others(self, rows: Tensor, scale: float) -> Others | None:
        """Scores of the rows, and what their weights add, as `stepped` wants them."""
        if not self.count:
            return None
        key, value = (x[..., : self.count, :].to(wide(x.dtype)) for x in (self.key, self.value))
        scores = (rows * scale).to(key.dtype) @ key.mT
        if self.real is not None:
            scores = scores.masked_fill(~self.real, -torch.inf)
        faces = None if self.real is None else self.real[..., 1:] & self.real[..., :-1]

        def add(weights: Tensor) -> Tensor:
            return evolve(u=weights, line=Line(-1, faces), **self.options) @ value

        return scores, add
