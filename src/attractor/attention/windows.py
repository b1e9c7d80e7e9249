"""Sliding windows with global tokens, as in Longformer (Beltagy et al., 2020), refined by a PDE.

A query attends to its window and to the first few tokens of the sequence; those few attend to
everything. Time and memory are O(T) for every PDE. Between the global tokens and a window that does
not touch them is a wall.
"""

from typing import Any

import torch
from torch import Tensor

from attractor.attention import masks
from attractor.attention.bands import step_values
from attractor.attention.flash import wide
from attractor.attention.masks import Scope, open_faces
from attractor.attention.pde_attention import four_dimensions, pde_attention
from attractor.attention.pdes import PDE, Diffusion, Line, evolve, get_pde
from attractor.attention.stepped import stepped
from attractor.attention.tiled import tiled


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
    equation: PDE = Diffusion() if pde is None else get_pde(pde)() if isinstance(pde, str) else pde
    steps = 0 if pde is None else steps
    common: Any = {
        "dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa, "pde": equation,
        "steps": steps, "dt": dt,
    }  # fmt: skip
    left, right = masks.sides(window)
    right = 0 if is_causal else right
    if left < 0 or global_tokens == 0:
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
    if is_causal:
        parts.append(whole_rows(joined, (-1, 0)))
    else:
        parts.append(whole_rows(count, (-1, -1)))
        parts.append(whole_rows(joined, (-1, right), start=count))
    if joined < tokens:
        parts.append(_apart(query, key, value, count, joined, (left, right), key_padding, **common))
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
) -> Tensor:
    """The rows from `start` on, whose windows do not touch the first `count` keys."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value, _ = four_dimensions(query, key, value, None)
    first_keys, first_values = key[..., :count, :], value[..., :count, :].to(wide(value.dtype))
    rows = query[..., start:, :]
    scores = (rows * scale).to(wide(query.dtype)) @ first_keys.mT.to(wide(key.dtype))
    real = None if key_padding is None else key_padding[:, None, None, :count]
    if real is not None:
        scores = scores.masked_fill(~real, -torch.inf)
    faces = None if real is None else open_faces(real)

    # Keys are counted from the first one that the first of these rows sees.
    origin = start - window[0]
    padding = None if key_padding is None else key_padding[:, origin:]
    shift = window[0]
    scope = Scope.of(rows.shape[-2], key.shape[-2] - origin, key_padding=padding)
    scope = Scope(
        scope.queries, scope.keys, 0, shift + window[1] if window[1] >= 0 else None, scope.real
    )
    options: Any = {"pde": pde, "steps": steps, "dt": dt}
    rest = key[..., origin:, :], value[..., origin:, :]
    if pde.linear and not dropout_p:
        taken = step_values(pde, first_values, faces, steps, dt)
        return stepped(rows, *rest, scope, scale, others=(scores, lambda w: w @ taken), **options)

    def moved(weights: Tensor) -> Tensor:
        return evolve(pde, weights, Line(-1, faces), steps, dt) @ first_values

    return tiled(rows, *rest, scope, scale, dropout_p=dropout_p, others=(scores, moved), **options)
