"""Attention in float64 by definition: what every public function must give, or raise.

It shares nothing with the library but the PDEs' own steps: masks are matrices made entry by entry, heads
are repeated, and the map is built.
"""

import torch

from attractor.attention.pdes import Line, Plane, evolve

WALL = -8192.0


def attend(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    pde,
    steps=4,
    dt=1.0,
    axis="key",
    walls="mask",
    key_padding=None,
    documents=None,
    window=None,
    renormalise=False,
    method="auto",
    global_tokens=0,
    features=None,
):
    """The output, and the map it is made with."""
    assert not dropout_p
    query, key, value = (x.double() for x in (query, key, value))
    if enable_gqa:
        ndim = max(3, query.ndim, key.ndim, value.ndim)
        query, key, value = (x[(None,) * (ndim - x.ndim)] for x in (query, key, value))
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    rows, columns = query.shape[-2], key.shape[-2]
    allowed = torch.ones(*lead, rows, columns, dtype=torch.bool)
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        inside = ((left < 0) | (i - j <= left)) & ((right < 0) | (j - i <= right))
        if global_tokens:
            inside = inside | (i < global_tokens) | (j < global_tokens)
        allowed = allowed & inside
    if is_causal:
        allowed = allowed & (j <= i)
    bias = torch.zeros(())
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        allowed = allowed & ~(attn_mask <= WALL)
        bias = attn_mask.double().masked_fill(attn_mask <= WALL, 0.0)
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])[:, None]
    if key_padding is not None:
        allowed = allowed & key_padding[:, None, None, :]
    flowing = allowed
    if key_padding is not None and axis != "key" and rows == columns:
        flowing = flowing & key_padding[:, None, :, None]  # padding's rows do not flow into others
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale + bias if features is None else _logs(query, key, features, scale)
    scores = scores.masked_fill(~allowed, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    A = weights / total.masked_fill(total == 0, 1.0)
    if key_padding is not None and axis != "key" and rows == columns:
        A = A * key_padding[:, None, :, None]

    def line(dim):
        if walls != "mask":
            return Line(dim, periodic=walls == "periodic")
        n = flowing.shape[dim] - 1
        return Line(dim, flowing.narrow(dim, 0, n) & flowing.narrow(dim, 1, n))

    space = Plane(line(-1), line(-2)) if axis == "both" else line(-1 if axis == "key" else -2)
    A = evolve(pde, A, space, steps, dt).reshape(A.shape)
    if renormalise:
        mass = A.sum(-1, keepdim=True)
        A = A / mass.masked_fill(mass == 0, 1.0)
    return A @ value, A


def _logs(query, key, features, scale):
    """Logarithms of the weights that random features [..., dim, count] give."""
    root = abs(scale) ** 0.5
    query, key = query * root * (1 if scale >= 0 else -1), key * root
    log_q, log_k = query @ features.double(), key @ features.double() - key.square().sum(-1, True) / 2
    return (log_q.unsqueeze(-2) + log_k.unsqueeze(-3)).logsumexp(-1)
