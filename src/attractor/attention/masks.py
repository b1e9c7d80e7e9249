"""Who may attend to whom: every way of saying it, as one boolean matrix, and the walls it makes.

Matrices here are ``[..., queries, keys]``, True where a query may attend, and broadcast: a dimension
that does not matter has size 1. Positions of queries and keys are both counted from 0 (top left), as
`torch.nn.functional.scaled_dot_product_attention` does.
"""

import torch
from torch import Tensor

Window = int | tuple[int, int]


def allowed(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    key_padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: Window | None = None,
) -> Tensor | None:
    """All masks together, or None where everything is allowed.

    Args:
        queries, keys: how many there are.
        device: where the matrix is made.
        attn_mask: bool, True = attend, or a float bias, whose walls count.
        is_causal: keys up to the query's own position.
        key_padding: ``[batch, keys]`` bool, True = a real token.
        documents: ``[batch, tokens]`` ids; a token attends within its own document.
        window: (left, right), how far a query sees on either side, -1 for no limit; a single number
            stands for both.
    """
    parts = []
    if is_causal or window is not None:
        ahead = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
        if is_causal:
            parts.append(ahead <= 0)
        left, right = sides(window)
        if left >= 0:
            parts.append(ahead >= -left)
        if right >= 0:
            parts.append(ahead <= right)
    if attn_mask is not None:
        parts.append(attn_mask if attn_mask.dtype == torch.bool else ~walls_of_bias(attn_mask))
    if key_padding is not None:
        parts.append(key_padding[:, None, None, :])
    if documents is not None:
        parts.append((documents[:, :, None] == documents[:, None, :])[:, None])
    together = None
    for part in parts:
        together = part if together is None else together & part
    return together


def sides(window: Window | None) -> tuple[int, int]:
    """(left, right) of a window; -1 where there is no limit."""
    if window is None:
        return -1, -1
    return (window, window) if isinstance(window, int) else window


def walls_of_bias(bias: Tensor) -> Tensor:
    """True where an additive mask forbids: -inf, or the lowest number of any float type.

    Masks are often made in one type and cast to another, so that float16's lowest number counts in
    a float32 mask, and bfloat16's too.
    """
    lowest = max(torch.finfo(bias.dtype).min, torch.finfo(torch.bfloat16).min)
    return (bias <= lowest) | (bias == torch.finfo(torch.float16).min)


def open_faces(allowed: Tensor, dim: int = -1) -> Tensor:
    """True where something may flow between neighbours along dim: where both of them are allowed."""
    n = allowed.shape[dim]
    if n == 1:  # the same for all positions
        return allowed
    return allowed.narrow(dim, 0, n - 1) & allowed.narrow(dim, 1, n - 1)


def sees_no_future(allowed: Tensor | None) -> bool:
    """Whether no query may attend to a later key, which makes attention causal however it was said.

    Looks at the values, so it is not for compiled code.
    """
    if allowed is None or allowed.shape[-1] == 1 or allowed.shape[-2] == 1:
        return False
    return not bool(allowed.triu(1).any())
