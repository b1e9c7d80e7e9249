"""Torch's fused attention operators, called so that they take and return the log-sum-exp.

An operator is a pair of functions for the part of a map that a `Strip` describes:

    forward   (query, key, value, strip, scale) -> output, log-sum-exp [batch, heads, rows]
    backward  (grad, output, query, key, value, log-sum-exp, strip, scale) -> the three gradients

Those of FlashAttention and cuDNN also take a `Dropout`, the same in both.

Key and value may have fewer heads than query: each serves as many consecutive heads of it.
FlashAttention, cuDNN and the operator for CPUs share them; the others get copies.

A backward computes weights ``exp(score - log-sum-exp)`` and subtracts ``<grad, output>``, so it serves a
part of a softmax too, given the output and log-sum-exp of the whole. `selection` chooses an operator.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

GRID = 65_535  # of CUDA, in its second dimension: sequences, or heads times batch, at a time

_aten: Any = torch.ops.aten


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Packed documents, each of them consecutive tokens, as FlashAttention takes them.

    Attributes:
        cu_seqlens: Positions where documents begin, all batch rows joined, and last the number of
            tokens; int32 ``[documents + 1]``.
        max_seqlen: Number of tokens of the longest document.
        single: Whether every batch row is known to be a single document.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    single: bool = False


@dataclass(frozen=True, eq=False)
class Strip:
    """Some rows of a map, some of its keys, and which of these the rows may attend to.

    Attributes:
        rows, columns: The rows and the keys.
        causal: Whether row i may attend to keys up to i only, both counted within the strip.
        allowed: bool mask, or None if every key is allowed.
        bias: Added to the scores, or None.
        empty_rows: bool ``[batch or 1, heads or 1, rows]``, True for rows that may attend to no key, or
            None if there are none.
        left, right: Sides of a band. The last row sees so many keys on either side of the last key, the
            row before on either side of the key before, and so on. None: no limit.
        packed: The documents of the keys, and of the rows that are not empty. None: one document.
    """

    rows: slice
    columns: slice
    causal: bool = False
    allowed: Tensor | None = None
    bias: Tensor | None = None
    empty_rows: Tensor | None = None
    left: int | None = None
    right: int | None = None
    packed: PackedSequences | None = None

    def cut(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the strip's part of query, key and value."""
        return part(query, self.rows), part(key, self.columns), part(value, self.columns)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return `allowed` and `bias` as one additive mask, a bias in at least float32."""
        bias = self.bias
        if bias is not None:
            bias = bias.to(torch.promote_types(dtype, torch.float32))
        if self.allowed is None:
            return bias
        if bias is None:
            bias = torch.zeros((), dtype=dtype, device=self.allowed.device)
        return torch.where(self.allowed, bias, -torch.inf)


@dataclass(eq=False)
class Dropout:
    """Dropout of weights after the softmax.

    Attributes:
        p: Probability that a weight is dropped. Others are divided by ``1 - p``.
        state: What the operator's backward needs to drop the same weights: int64 ``[2]``, which its
            forward leaves here.
    """

    p: float
    state: Tensor | None = None

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Both entries of the state."""
        assert self.state is not None, "the forward of the operator has not run"
        return self.state[0], self.state[1]


@dataclass(frozen=True, eq=False)
class Operator:
    """An attention operator for one problem.

    Attributes:
        name: For `explain`.
        forward, backward: The pair of functions.
        strip: The one strip that it computes at once. None: any strip that is small.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Any, ...]]
    strip: Strip | None = None

    @property
    def drops(self) -> bool:
        """Whether both functions take a `Dropout`."""
        return self.strip is not None and self.forward in DROPPING


def part(x: Tensor, where: slice) -> Tensor:
    """Return some tokens of x ``[..., tokens, dim]``, x itself if these are all."""
    return x if where.start == 0 and where.stop == x.shape[-2] else x[..., where, :]


def in_rows(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension, which torch's operators assume without a check.

    On CUDA they read 16 bytes at once, so that rows are aligned to these. Compiled code sees to that
    itself.
    """
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return x.contiguous()
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return x
    unit = 16 // x.element_size()
    aligned = x.storage_offset() % unit == 0
    for size, step in zip(x.shape[:-1], x.stride()):
        aligned = aligned and (size == 1 or (step > 0 and step % unit == 0))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def probability(dropout: Dropout | None) -> float:
    """Return the probability that a weight is dropped."""
    return 0.0 if dropout is None else dropout.p


def padded_dim(query: Tensor, value: Tensor) -> int:
    """Return the larger head dimension, rounded up to a multiple of 8, as operators on CUDA need it."""
    return -(-max(query.shape[-1], value.shape[-1]) // 8) * 8


def _padded(dim: int, *tensors: Tensor) -> list[Tensor]:
    """Return tensors with zeros up to that dimension; `pad` may return the channels-last layout."""
    return [x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1])).contiguous() for x in tensors]


def _cropped(x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]]


def _cropped_grads(grads: Iterable[Tensor], *inputs: Tensor) -> tuple[Any, ...]:
    return tuple(_cropped(grad, x) for grad, x in zip(grads, inputs))


Forward = Callable[[Tensor, Tensor, Tensor, Strip, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Any, ...]]


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value with as many heads as query."""
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _for_equal_heads(forward: Forward) -> Forward:
    """Decorate the forward of an operator that takes as many heads of key and value as of query."""

    @wraps(forward)
    def call(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
        if q.shape[1] != k.shape[1]:
            k, v = _repeated(q, k, v)
        return forward(q, k, v, strip, scale)

    return call


def _for_equal_heads_backward(backward: Backward) -> Backward:
    """Decorate the backward of such an operator."""

    @wraps(backward)
    def call(
        grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip,
        scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        if q.shape[1] == k.shape[1]:
            return backward(grad, out, q, k, v, lse, strip, scale)
        dq, *grads = backward(grad, out, q, *_repeated(q, k, v), lse, strip, scale)
        return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in grads)

    return call


def cpu(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """Run the operator for CPUs, which takes every strip without a band and packed documents."""
    tensors: Sequence[Tensor] = (q, k, v)
    if q.shape[-1] != v.shape[-1]:
        tensors = _padded(max(q.shape[-1], v.shape[-1]), q, k, v)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *tensors, 0.0, strip.causal, attn_mask=strip.mask(q.dtype), scale=scale
    )
    return _cropped(out, v), lse


def cpu_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Any, ...]:
    """Run the backward of `cpu`."""
    tensors = _padded(max(q.shape[-1], v.shape[-1]), grad, q, k, v, out)
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, lse, 0.0, strip.causal, attn_mask=strip.mask(q.dtype), scale=scale
    )
    return _cropped_grads(grads, q, k, v)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """Run cuDNN's operator: all keys, or a square causal problem; head dimensions up to 128."""
    out, lse, *rest = _aten._scaled_dot_product_cudnn_attention(
        *_padded(padded_dim(q, v), q, k, v), None, True, probability(dropout), strip.causal, False,
        scale=scale,
    )  # fmt: skip
    if dropout is not None:
        dropout.state = torch.stack([x.reshape(()) for x in rest[4:6]])
    return _cropped(out, v), lse.reshape(q.shape[:-1])


def cudnn_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float,
    dropout: Dropout | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the backward of `cudnn`."""
    dim = padded_dim(q, v)
    tensors = _padded(dim, q, k, v)
    # Torch keeps one plan for a shape and layout of query, key and value, and in it the layout that
    # grad, out and log-sum-exp had when it was made: these must always have the same one, query's.
    grad, out = (_laid_out_as(x, tensors[0]) for x in _padded(dim, grad, out))
    none = torch.empty((), dtype=torch.long, device=q.device)
    state = (none, none) if dropout is None else dropout.pair
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, *tensors, out, lse.contiguous()[..., None], *state, None, None, None,
        q.shape[-2], k.shape[-2], probability(dropout), strip.causal, scale=scale,
    )  # fmt: skip
    return _cropped_grads(grads, q, k, v)


def _laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    steps = zip(x.shape, x.stride(), like.stride())
    if all(size == 1 or own == other for size, own, other in steps):
        return x
    return torch.empty_strided(x.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


@_for_equal_heads
def efficient(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """Run the memory-efficient operator: all keys, or a causal problem, in float32 too."""
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        *_padded(padded_dim(q, v), q, k, v), None, True, 0.0, strip.causal, scale=scale
    )
    return _cropped(out, v), lse[..., : q.shape[-2]]  # the operator rounds their number up


@_for_equal_heads_backward
def efficient_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Any, ...]:
    """Run the backward of `efficient`."""
    *tensors, padded_out = _padded(padded_dim(q, v), grad, q, k, v, out)
    none = torch.empty((), dtype=torch.long, device=q.device)
    lse = pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        *tensors, None, padded_out, lse, none, none, 0.0, (True, True, True, False), strip.causal,
        scale=scale,
    )  # fmt: skip
    return _cropped_grads(grads, q, k, v)


def flash(
    q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """Run FlashAttention: all keys, or a band, within packed documents; head dimensions up to 256.

    Empty rows have finite outputs of no meaning.
    """
    layout = _FlashLayout.of(strip, *_padded(padded_dim(q, v), q, k, v))
    out, lse, state, *_ = _aten._flash_attention_forward(
        *layout.tensors, *layout.sequences, probability(dropout), False, False, scale=scale,
        window_size_left=_side(strip.left), window_size_right=_side(strip.right),
    )  # fmt: skip
    if dropout is not None:
        dropout.state = state.view(torch.int64)
    if strip.packed is not None:
        lse = lse.unflatten(-1, (q.shape[0], -1)).transpose(0, 1)
    return _cropped(layout.restore(out), v), lse.reshape(q.shape[:-1])


def flash_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float,
    dropout: Dropout | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the backward of `flash`."""
    layout = _FlashLayout.of(strip, *_padded(padded_dim(q, v), grad, q, k, v, out))
    if strip.empty_rows is not None:
        lse = lse.masked_fill(strip.empty_rows, torch.inf)  # no weight at all
    if strip.packed is not None:
        lse = lse.transpose(0, 1).flatten(1).contiguous()
    else:
        batches, _, heads, _ = layout.tensors[1].shape
        lse = lse.contiguous().view(batches, heads, -1)
    none = torch.empty((), dtype=torch.long, device=q.device)
    state = none
    if dropout is not None and dropout.state is not None:
        state = dropout.state.view(torch.uint64)
    grads = _aten._flash_attention_backward(
        *layout.tensors, lse, *layout.sequences, probability(dropout), False, state, none, scale=scale,
        window_size_left=_side(strip.left), window_size_right=_side(strip.right),
    )  # fmt: skip
    return _cropped_grads((layout.restore(x) for x in grads), q, k, v)


def _side(width: int | None) -> int:
    return -1 if width is None else width


class _FlashLayout(NamedTuple):
    """Tensors ``[batch, heads, tokens, dim]`` as FlashAttention takes them.

    They are ``[batch, tokens, heads, dim]``, and packed ones ``[all tokens, heads, dim]``. Where heads
    follow one another in memory they are taken as batches of one head, without a copy: the operator's
    backward would copy what is not in its own order.
    """

    tensors: list[Tensor]
    sequences: tuple[Any, ...]  # positions where documents begin, or None, and lengths; of rows and keys
    restore: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, strip: Strip, *tensors: Tensor) -> "_FlashLayout":
        """Return the layout of tensors of a strip; the last are key and value, or more."""
        batch, heads = tensors[0].shape[:2]
        if strip.packed is not None:
            cu_seqlens, longest = strip.packed.cu_seqlens, strip.packed.max_seqlen
            joined = [x.transpose(1, 2).flatten(0, 1) for x in tensors]
            bounds = cu_seqlens, cu_seqlens, longest, longest
            return cls(joined, bounds, lambda x: x.unflatten(0, (batch, -1)).transpose(1, 2))
        sequences = None, None, tensors[0].shape[-2], tensors[-2].shape[-2]
        in_order = (
            x.shape[1] == heads and (x.shape[0] == 1 or x.stride(0) == heads * x.stride(1))
            for x in tensors
        )  # fmt: skip
        if batch * heads > GRID or not all(in_order):
            transposed = [x.transpose(1, 2) for x in tensors]
            return cls(transposed, sequences, lambda x: x.transpose(1, 2))
        single = [x.reshape(-1, x.shape[-2], 1, x.shape[-1]) for x in tensors]
        return cls(single, sequences, lambda x: x.reshape(batch, heads, x.shape[1], x.shape[3]))


@_for_equal_heads
def plain(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """Compute a strip in plain torch, with its map in memory; no bands, no packed documents."""
    scores = _scores(q, k, strip, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return weights.to(v.dtype) @ v, lse


@_for_equal_heads_backward
def plain_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward of `plain`."""
    weights = (_scores(q, k, strip, scale) - lse[..., None]).exp()
    inner = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    of_scores = (weights * ((grad @ v.mT).to(lse.dtype) - inner)).to(q.dtype)
    return scale * (of_scores @ k), scale * (of_scores.mT @ q), weights.to(v.dtype).mT @ grad


def _scores(q: Tensor, k: Tensor, strip: Strip, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) * scale) @ k.mT.to(dtype)
    mask = strip.mask(scores.dtype)
    return scores if mask is None else scores + mask


DROPPING: set[Any] = {cudnn, flash}  # the forward functions that take a `Dropout`
PLAIN = Operator("torch", plain, plain_backward)
CPU = Operator("cpu flash", cpu, cpu_backward)
CPU_CAUSAL = Operator("cpu flash", cpu, cpu_backward, Strip(slice(0, 0), slice(0, 0), causal=True))
BY_NAME = {
    "cudnn": (cudnn, cudnn_backward),
    "flash": (flash, flash_backward),
    "efficient": (efficient, efficient_backward),
    "packed flash": (flash, flash_backward),
}
