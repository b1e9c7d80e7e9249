"""PDE attention as printed: Algorithm 1, with walls. Every engine is tested against it."""

import torch
from torch import Tensor
from torch.nn.functional import dropout

from attractor.attention import masks
from attractor.attention.pdes import PDE, Line, Neighbourhood, Plane, evolve
from attractor.attention.precision import accumulate_dtype, for_scores


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    pde: PDE,
    steps: int,
    dt: float,
    axis: str = "key",
    walls: str = "mask",
    key_padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: masks.Window | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[*batch, heads, queries, value dim]`` and the map A(Nt).

    The arguments are those of `pde_attention`, which checks them. Key and value may have fewer heads
    than query. In half precision the map is stored and stepped in float32. A query that may attend to
    no key has a row of zeros and zero output.
    """
    if query.ndim > 2 and key.shape[-3] != query.shape[-3]:
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, dim=-3), value.repeat_interleave(shared, dim=-3)
    allowed = masks.allowed(
        query.shape[-2], key.shape[-2], query.device, attn_mask=attn_mask, is_causal=is_causal,
        key_padding=key_padding, documents=documents, window=window,
    )  # fmt: skip

    scale = query.shape[-1] ** -0.5 if scale is None else scale
    own, keys = for_scores(query, key)
    scores = (own * scale) @ keys.transpose(-2, -1)  # scaled before float16 can overflow
    scores = scores.to(accumulate_dtype(scores.dtype))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        bias = attn_mask.masked_fill(masks.walls_of_bias(attn_mask), 0.0)
        scores = scores + masks.without_offset(bias, masks.row_offset(bias, allowed))
    if allowed is None:
        A = scores.softmax(-1)
    else:  # a finite filling, so that rows without keys have neither values nor gradients that are NaN
        filled = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        A = filled.softmax(-1).masked_fill(~allowed, 0.0)
    A = evolve(pde, dropout(A, dropout_p), space(allowed, axis, walls), steps, dt)
    A = A.reshape(scores.shape)  # coefficients of heads are [heads, 1, 1], and a query may have none
    return A.to(value.dtype) @ value, A


def space(allowed: Tensor | None, axis: str, walls: str) -> Neighbourhood:
    """Return the neighbourhood of a map ``[..., queries, keys]`` along an axis, with these walls."""

    def line(dim: int) -> Line:
        if walls == "mask" and allowed is not None:
            return Line(dim, masks.open_faces(allowed, dim))
        return Line(dim, periodic=walls == "periodic")

    return Plane(line(-1), line(-2)) if axis == "both" else line(-1 if axis == "key" else -2)
