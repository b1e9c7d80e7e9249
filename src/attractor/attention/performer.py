"""Performer attention (FAVOR+, https://arxiv.org/abs/2009.14794), with a PDE on its map, in O(T).

The softmax kernel is an average over random directions w: ``exp(q . k) = E[f(q) f(k)]`` with positive
features ``f(x) = exp(w . x - |x|² / 2)``. With m of them a map is ``f(Q) f(K)^T``, its rows divided by
their sums, and is never built: sums over keys come first. Under a linear PDE the far keys of a row
multiply stepped values, and the keys near its causal wall take the steps themselves, as in `stepped`.

Exponentials need a scale, and the usual one, the largest over all keys, brings the future into the
rounding of the past. Here every scale is taken from keys that all of its rows may attend to, one for
each feature. So causality is exact, denominators are at least 1, and nothing is added to them.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attractor.attention import masks
from attractor.attention.call import autocast_as_sdpa, check_flag, check_tensors
from attractor.attention.engines import boundary
from attractor.attention.engines.bands import band_values
from attractor.attention.engines.dense import space
from attractor.attention.engines.values import step_values
from attractor.attention.pdes import PDE
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.pdes.pde import check_heads, for_maps
from attractor.attention.plan import refuse_transforms
from attractor.attention.precision import wide
from attractor.attention.tracing import as_node, is_symbolic
from attractor.core.checks import check_beside, check_number, check_tensor, check_whole, is_whole


class RandomFeatures(nn.Module):
    """Positive random features of the softmax kernel: ``f(x) . f(y)`` is ``exp(x . y)`` on average.

    The directions are a buffer, so they are saved with a model and move with it; they do not learn.

    Args:
        dim: of queries and keys.
        count: how many features; errors fall like ``1 / sqrt(count)``.
        heads: so many draws, one for each head; None: the same for all.
        orthogonal: directions in blocks of `dim` are orthogonal, which lowers the variance.
        generator: of the draw.

    Attributes:
        projection: ``[dim, count]``, or ``[heads, dim, count]``.
    """

    projection: Tensor

    def __init__(
        self,
        dim: int,
        count: int = 256,
        *,
        heads: int | None = None,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not all(is_whole(x) and x >= 1 for x in (dim, count, 1 if heads is None else heads)):
            raise ValueError(
                f"dim = {dim!r}, count = {count!r} and heads = {heads!r} must be at least 1"
            )
        self.orthogonal = orthogonal
        lead = () if heads is None else (heads,)
        self.register_buffer("projection", torch.empty(*lead, dim, count))
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """New directions, in place; while training, now and then, so that no draw is fitted to."""
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                f"generator is a {type(generator).__name__}; give a torch.Generator, or None"
            )
        *lead, dim, count = self.projection.shape
        device = None if generator is None else generator.device
        randn = lambda *shape: torch.randn(
            *lead, *shape, dtype=torch.float64, generator=generator, device=device
        )
        if not self.orthogonal:
            self.projection.copy_(randn(dim, count))
            return
        blocks = []
        for _ in range(-(-count // dim)):
            q, r = torch.linalg.qr(randn(dim, dim))
            blocks.append(q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2))  # uniform directions
        lengths = randn(dim, count).norm(dim=-2, keepdim=True)  # as long as independent ones
        self.projection.copy_(torch.cat(blocks, -1)[..., :count] * lengths)

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[..., count]`` of x ``[..., dim]``."""
        if is_symbolic(x):
            return as_node(self, x)
        dim = self.projection.shape[-2]
        check_tensor("x", x, f"[..., {dim}]")
        check_beside("x", x, "the features", self.projection)
        if x.dim() == 0 or x.shape[-1] != dim:
            raise ValueError(f"x has shape {list(x.shape)}; these features are of [..., {dim}]")
        logs = x @ self.projection.to(x.dtype) - 0.5 * x.square().sum(-1, keepdim=True)
        return logs.exp() / math.sqrt(self.projection.shape[-1])

    def extra_repr(self) -> str:
        """What `print` shows."""
        *lead, dim, count = self.projection.shape
        heads = f", heads={lead[0]}" if lead else ""
        return f"dim={dim}, count={count}{heads}, orthogonal={self.orthogonal}"


@autocast_as_sdpa
def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: RandomFeatures | Tensor,
    is_causal: bool = False,
    key_padding: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    pde: PDE | str | None = None,
    steps: int = 4,
    dt: float = 1.0,
    chunk: int = 128,
) -> Tensor:
    """Performer attention whose map moves under a linear PDE, in O(T) time and memory.

    Equal to `performer_dense`, whose map it never builds. A PDE that is not linear needs that map: it
    raises a ValueError.

    Args:
        query: ``[*batch, heads, queries, dim]``.
        key: ``[*batch, heads, keys, dim]``.
        value: ``[*batch, heads, keys, value dim]``.
        features: a `RandomFeatures`, or the directions themselves, ``[dim, count]`` or
            ``[heads, dim, count]``.
        is_causal: a query attends to keys up to its own position, both counted from 0.
        key_padding: ``[batch, keys]`` bool, True = a real token.
        scale: of the scores, ``dim ** -0.5`` if None.
        enable_gqa: query may have a multiple of the heads of key and value.
        pde: an equation or its name; None: plain Performer attention.
        steps, dt: how many steps the map takes, and their size.
        chunk: causal rows are taken in blocks of so many; speed and memory only.

    Returns:
        ``[*batch, heads, queries, value dim]``, in query's dtype; half precisions are summed in
        float32. A query that may attend to nothing has zero output.
    """
    check_flag("is_causal", is_causal)
    evolution = _evolution(pde, steps, dt)
    if evolution is not None and not evolution.linear:
        raise ValueError(
            f"{evolution.pde} is not linear, so its map has to be built and O(T) is out of reach; use "
            "performer_dense for short sequences, or a linear PDE such as pdes.Diffusion()"
        )
    check_whole("chunk", chunk, 1)
    log_q, log_k, values = _log_features(query, key, value, features, scale, enable_gqa, key_padding)
    if evolution is not None:
        refuse_transforms("performer_attention with a PDE", "performer_dense")
        check_heads(evolution.pde, query.shape[:-2])
        evolution = evolution.with_pde(for_maps(evolution.pde, query.shape[:-2] or (1,)))
    if query.ndim == 2:  # one head
        log_q, log_k, values = log_q[None], log_k[None], values[None]
    real = None if key_padding is None else key_padding[:, None, None, :]
    open = None if real is None else masks.open_faces(real)
    far = values if evolution is None else step_values(evolution, values, open)
    if not is_causal:
        out = _full(log_q, log_k, far, real)
    else:
        out = _causal(log_q, log_k, far, values, real, chunk, evolution)
    return (out[0] if query.ndim == 2 else out).to(value.dtype)


class PerformerAttention(nn.Module):
    """`performer_attention` with its own features, for `PDEAttention` and models as ``attention=``.

    >>> from attractor.attention.models import LanguageModel
    >>> performer = PerformerAttention(dim=16, count=64)      # 64 / 4 heads
    >>> model = LanguageModel(100, dim=64, heads=4, layers=2, attention=performer, pde="diffusion")

    Args:
        dim: of a head's queries and keys.
        count, heads, orthogonal, generator: of `RandomFeatures`.
        chunk: as in `performer_attention`.

    There is no dropout on the map, which is never built: `PDEAttention` refuses ``dropout=`` with it.
    """

    def __init__(
        self,
        dim: int,
        count: int = 256,
        *,
        heads: int | None = None,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
        chunk: int = 128,
    ) -> None:
        super().__init__()
        check_whole("chunk", chunk, 1)
        self.features = RandomFeatures(
            dim, count, heads=heads, orthogonal=orthogonal, generator=generator
        )
        self.chunk = chunk

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """New directions."""
        self.features.redraw(generator)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_padding: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        pde: PDE | str | None = None,
        steps: int = 4,
        dt: float = 1.0,
    ) -> Tensor:
        """As `performer_attention`, with these features."""
        options: Any = {
            "is_causal": is_causal, "key_padding": key_padding, "scale": scale, "enable_gqa": enable_gqa,
            "pde": pde, "steps": steps, "dt": dt,
        }  # fmt: skip
        if is_symbolic(query):
            return as_node(self, query, key, value, **options)
        return performer_attention(
            query, key, value, features=self.features, chunk=self.chunk, **options
        )


def performer_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: RandomFeatures | Tensor,
    is_causal: bool = False,
    key_padding: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    pde: PDE | str | None = None,
    steps: int = 4,
    dt: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The truth beside `performer_attention`: its output, and the map ``[..., queries, keys]``.

    Arguments as there, and any PDE. Its scales are the largest over all keys: causal up to rounding.
    """
    check_flag("is_causal", is_causal)
    evolution = _evolution(pde, steps, dt)
    log_q, log_k, values = _log_features(query, key, value, features, scale, enable_gqa, key_padding)
    if evolution is not None:
        check_heads(evolution.pde, query.shape[:-2])
        evolution = evolution.with_pde(for_maps(evolution.pde, query.shape[:-2]))
    phi_q = (log_q - log_q.detach().amax(-1, keepdim=True)).exp()
    phi_k = (log_k - log_k.detach().amax((-2, -1), keepdim=True)).exp()
    A = phi_q @ phi_k.mT
    allowed = masks.allowed(
        query.shape[-2], key.shape[-2], query.device, is_causal=is_causal, key_padding=key_padding
    )
    if allowed is not None:
        A = A.masked_fill(~allowed, 0.0)
    total = A.sum(-1, keepdim=True)
    A = A / total.masked_fill(total == 0, 1.0)
    if evolution is not None:
        A = evolution.of_map(A, space(allowed, "key", "mask"))
    return (A @ values).to(value.dtype), A


def _evolution(pde: PDE | str | None, steps: int, dt: float) -> Evolution | None:
    if pde is None:
        check_whole("steps", steps, 0)
        return None
    evolution = Evolution.of(pde, steps, dt)
    return evolution if evolution.steps else None


def _log_features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: RandomFeatures | Tensor,
    scale: float | None,
    enable_gqa: bool,
    key_padding: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of the features of queries and keys, ``[..., tokens, count]``, and the values.

    All have query's heads and at least float32. What does not depend on the key is left out: it would
    cancel in a row.
    """
    projection = features.projection if isinstance(features, RandomFeatures) else features
    check_tensor("features", projection, "[dim, count] or [heads, dim, count]")
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, "[*batch, heads, tokens, dim]", floating=False)
        check_beside(name, x, "query", query)
    check_beside("features", projection, "query", query)
    check_beside("key_padding", key_padding, "query", query)
    if scale is not None:
        check_number("scale", scale)
    dim = query.shape[-1] if query.ndim else 0
    heads = query.shape[-3] if query.ndim > 2 else 1
    fits = projection.ndim == 2 or (projection.ndim == 3 and projection.shape[0] in (1, heads))
    if not fits or projection.shape[-2] != dim:
        raise ValueError(
            f"features {list(projection.shape)} must be [{dim}, count], or [heads, {dim}, count], for a "
            f"query {list(query.shape)}"
        )
    check_flag("enable_gqa", enable_gqa)
    check_tensors(query, key, value, enable_gqa)
    if not key.shape[-2]:
        raise ValueError(f"key {list(key.shape)} holds no tokens, so there is nothing to attend to")
    if key_padding is not None and (
        query.ndim != 4
        or key_padding.dtype != torch.bool
        or tuple(key_padding.shape) != (query.shape[0], key.shape[-2])
    ):
        raise ValueError(
            f"key_padding {list(key_padding.shape)} of {key_padding.dtype} must be bool [batch, keys] "
            f"for a query [batch, heads, tokens, dim]; here query is {list(query.shape)} and key "
            f"{list(key.shape)}"
        )
    if query.ndim == 2 and projection.ndim == 3:
        projection = projection[0]
    if query.ndim > 2 and key.shape[-3] != query.shape[-3]:
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, dim=-3), value.repeat_interleave(shared, dim=-3)
    scale = dim**-0.5 if scale is None else scale
    root = math.sqrt(abs(scale))
    dtype = wide(query.dtype)
    q, k, w = query.to(dtype) * math.copysign(root, scale), key.to(dtype) * root, projection.to(dtype)
    return q @ w, k @ w - 0.5 * k.square().sum(-1, keepdim=True), value.to(dtype)


def _full(log_q: Tensor, log_k: Tensor, value: Tensor, real: Tensor | None) -> Tensor:
    """Every query attends to every real key."""
    if real is not None:
        log_k = log_k.masked_fill(~real.mT, -torch.inf)
    top = _finite(log_k.detach().amax(-2, keepdim=True))  # of each feature, over its keys
    phi_k = (log_k - top).exp()
    log_q = log_q + top
    phi_q = (log_q - log_q.detach().amax(-1, keepdim=True)).exp()
    total = phi_q @ phi_k.sum(-2).unsqueeze(-1)
    return (phi_q @ (phi_k.mT @ value)) / total.masked_fill(total == 0, 1.0)


def _causal(
    log_q: Tensor,
    log_k: Tensor,
    far: Tensor,
    value: Tensor,
    real: Tensor | None,
    chunk: int,
    evolution: Evolution | None,
) -> Tensor:
    """Rows in blocks; the keys of a block are those in its slab, and those before, which are summed.

    A slab begins `reach` keys before its block's first row, so that no key near the wall of a row, and
    no stepped value that has seen beyond it, is in a sum.
    """
    rows, keys = log_q.shape[-2], log_k.shape[-2]
    reach = 0 if evolution is None else evolution.reach
    if not rows:
        return far[..., :0, :]
    chunk = max(chunk, reach, 1)
    blocks = -(-rows // chunk)
    length = blocks * chunk
    if real is not None:
        log_k = log_k.masked_fill(~real.mT, -torch.inf)
    anchor = _finite(_first(log_k.detach(), real))  # every row that has keys attends to it
    log_q = pad(log_q, (0, 0, 0, length - rows)).unflatten(-2, (blocks, chunk))
    sides = (0, 0, reach, length - keys)
    log_k = pad(log_k, sides, value=-torch.inf)
    slab = log_k.unfold(-2, chunk + reach, chunk).mT  # [..., blocks, chunk + reach, count]
    own = log_k[..., :length, :].unflatten(-2, (blocks, chunk))
    stepped = pad(far, sides)[..., :length, :].unflatten(-2, (blocks, chunk))

    # The largest of each feature over the keys before a block's slab: [..., blocks + 1, count].
    before = torch.maximum(anchor, own.detach().amax(-2).cummax(-2).values)
    top = torch.cat((anchor.expand_as(before[..., :1, :]), before), -2)
    phi = (own - top[..., 1:, None, :]).exp()
    terms = torch.cat((phi.mT @ stepped, phi.sum(-2).unsqueeze(-1)), -1)
    decay = (top[..., :-1, :] - top[..., 1:, :]).exp().unsqueeze(-1)
    sums = _running(terms, decay)  # [..., blocks, count, value dim + 1]

    log_q = log_q + top[..., :-1, None, :]
    phi_q = (log_q - log_q.detach().amax(-1, keepdim=True)).exp()
    slab = slab - top[..., :-1, None, :]
    excess = slab.detach().amax(-1, keepdim=True).clamp(min=0)  # of a key above all before the slab
    products = phi_q @ (slab - excess).exp().mT  # [..., blocks, chunk, chunk + reach]
    past = phi_q @ sums

    # Row i's own scale: the largest of its weights, or the sum of those before the slab. It is at least
    # that of the anchor, so products that are nothing beside their key's excess can be left out.
    most = 0.7 * math.log(torch.finfo(products.dtype).max)
    ahead = torch.ones(chunk, chunk + reach, dtype=torch.bool, device=log_q.device).triu(reach + 1)
    hidden = ahead | (products.detach() < math.exp(-most))
    logs = (products.detach().log() + excess.mT).masked_fill(hidden, -torch.inf)
    row = _finite(torch.maximum(logs.amax(-1, keepdim=True), past[..., -1:].detach().log()))
    gain = (excess.mT - row).clamp(max=most).exp()
    weights = (products * gain).masked_fill(hidden, 0.0)
    past = past * (-row).exp()
    total = past[..., -1:] + weights.sum(-1, keepdim=True)
    total = total.masked_fill(total == 0, 1.0)
    out = (past[..., :-1] + weights[..., :chunk].tril() @ stepped) / total
    out = out.flatten(-3, -2)[..., :rows, :]
    if evolution is None or not reach:
        return out

    # In a row one longer than a slab, entries 1 to reach after the diagonal stand upright.
    upright = pad((weights / total).flatten(-2), (-1, chunk + 1)).unflatten(
        -1, (chunk, chunk + reach + 1)
    )
    near = upright[..., :reach].flatten(-3, -2)[..., :rows, :]
    band = boundary.before_wall(0, reach)
    open = None if real is None else masks.open_faces(real)
    patch = boundary.spread(near, band, evolution, keys=keys, open=open)
    return out + band_values(patch, value, band.patch)


def _first(log_k: Tensor, real: Tensor | None) -> Tensor:
    """The first real key's logarithms, ``[..., 1, count]``."""
    if real is None:
        return log_k[..., :1, :]
    index = real.to(torch.uint8).argmax(-1, keepdim=True)
    return log_k.gather(-2, index.expand(*log_k.shape[:-2], 1, log_k.shape[-1]))


def _running(terms: Tensor, decay: Tensor) -> Tensor:
    """For each block ``[..., blocks, count, n]`` the sum of the terms before it, in its own scale."""
    total = torch.zeros_like(terms[..., 0, :, :])
    totals = [total]
    for term, factor in zip(terms.unbind(-3)[:-1], decay.unbind(-3)):
        total = factor * total + term
        totals.append(total)
    return torch.stack(totals, -3)


def _finite(scale: Tensor) -> Tensor:
    """Zero where there is nothing to take a scale from."""
    return scale.masked_fill(scale == -torch.inf, 0.0)
