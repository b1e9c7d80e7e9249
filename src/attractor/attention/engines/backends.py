"""The fused attention operators of torch, called so that they take and return the log-sum-exp.

FlashAttention, cuDNN and the operator for CPUs accept fewer heads of key and value than of query; the
other operators get copies of these heads. The functions of FlashAttention and cuDNN have one more
argument, a `Dropout`, which must be the same object in forward and backward.

A backward computes weights ``exp(score - log-sum-exp)`` and subtracts ``<grad, output>`` from their
gradients. Therefore it can also compute a part of a softmax, given the output and the log-sum-exp of the
entire softmax.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attractor.attention.engines.strips import Dropout, Operator, Strip

GRID = 65_535  # CUDA's limit for the second dimension of a grid: sequences, or heads times batch

_aten: Any = torch.ops.aten


def aligned_rows(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension, which torch's operators require without a check.

    On CUDA, where they read 16 bytes at once, rows are also aligned to 16 bytes; compiled code does this
    by itself.
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


def additive_mask(strip: Strip, dtype: torch.dtype) -> Tensor | None:
    """Return a strip's mask and bias as one bias; if it has a bias, in at least float32."""
    bias = strip.bias
    if bias is not None:
        bias = bias.to(torch.promote_types(dtype, torch.float32))
    if strip.allowed is None:
        return bias
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=strip.allowed.device)
    return torch.where(strip.allowed, bias, -torch.inf)


def probability(dropout: Dropout | None) -> float:
    """Return the probability of dropout."""
    return 0.0 if dropout is None else dropout.p


def padded_dim(query: Tensor, value: Tensor) -> int:
    """Return the larger head dimension rounded up to a multiple of 8, as operators on CUDA require."""
    return -(-max(query.shape[-1], value.shape[-1]) // 8) * 8


def _pad_dim(dim: int, *tensors: Tensor) -> list[Tensor]:
    """Pad the last dimension with zeros; `pad` may return the channels-last layout."""
    return [x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1])).contiguous() for x in tensors]


def _crop_dim(x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]]


def _crop_grads(grads: Iterable[Tensor], *inputs: Tensor) -> tuple[Any, ...]:
    return tuple(_crop_dim(grad, x) for grad, x in zip(grads, inputs))


Forward = Callable[[Tensor, Tensor, Tensor, Strip, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Any, ...]]


def _repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value with as many heads as query."""
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _for_equal_heads(forward: Forward) -> Forward:
    """Repeat heads of key and value for the forward of an operator that requires equal numbers."""

    @wraps(forward)
    def call(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
        if q.shape[1] != k.shape[1]:
            k, v = _repeat_heads(q, k, v)
        return forward(q, k, v, strip, scale)

    return call


def _for_equal_heads_backward(backward: Backward) -> Backward:
    """Sum gradients over repeated heads for the backward of such an operator."""

    @wraps(backward)
    def call(
        grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip,
        scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        if q.shape[1] == k.shape[1]:
            return backward(grad, out, q, k, v, lse, strip, scale)
        dq, *grads = backward(grad, out, q, *_repeat_heads(q, k, v), lse, strip, scale)
        return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in grads)

    return call


def cpu(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """Run the operator for CPUs, for strips without a band and packed documents."""
    tensors: Sequence[Tensor] = (q, k, v)
    if q.shape[-1] != v.shape[-1]:
        tensors = _pad_dim(max(q.shape[-1], v.shape[-1]), q, k, v)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *tensors, 0.0, strip.causal, attn_mask=additive_mask(strip, q.dtype), scale=scale
    )
    return _crop_dim(out, v), lse


def cpu_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Any, ...]:
    """Run the backward of `cpu`."""
    tensors = _pad_dim(max(q.shape[-1], v.shape[-1]), grad, q, k, v, out)
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, lse, 0.0, strip.causal, attn_mask=additive_mask(strip, q.dtype), scale=scale
    )
    return _crop_grads(grads, q, k, v)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """Run cuDNN's operator, for all keys or a square causal problem, and head dimensions up to 128."""
    out, lse, *rest = _aten._scaled_dot_product_cudnn_attention(
        *_pad_dim(padded_dim(q, v), q, k, v), None, True, probability(dropout), strip.causal, False,
        scale=scale,
    )  # fmt: skip
    if dropout is not None:
        dropout.state = torch.stack([x.reshape(()) for x in rest[4:6]])
    return _crop_dim(out, v), lse.reshape(q.shape[:-1])


def cudnn_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float,
    dropout: Dropout | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the backward of `cudnn`."""
    dim = padded_dim(q, v)
    tensors = _pad_dim(dim, q, k, v)
    # Torch caches one plan per shape and layout of query, key and value. The plan also contains the
    # layout of grad, out and log-sum-exp, so these must always have the same one, that of query.
    grad, out = (_with_layout_of(x, tensors[0]) for x in _pad_dim(dim, grad, out))
    none = torch.empty((), dtype=torch.long, device=q.device)
    state = (none, none) if dropout is None else dropout.pair
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, *tensors, out, lse.contiguous()[..., None], *state, None, None, None,
        q.shape[-2], k.shape[-2], probability(dropout), strip.causal, scale=scale,
    )  # fmt: skip
    return _crop_grads(grads, q, k, v)


def _with_layout_of(x: Tensor, like: Tensor) -> Tensor:
    """Return x with the strides of another tensor of its shape."""
    steps = zip(x.shape, x.stride(), like.stride())
    if all(size == 1 or own == other for size, own, other in steps):
        return x
    return torch.empty_strided(x.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


@_for_equal_heads
def efficient(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """Run the memory-efficient operator, for all keys or a causal problem, also in float32."""
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        *_pad_dim(padded_dim(q, v), q, k, v), None, True, 0.0, strip.causal, scale=scale
    )
    return _crop_dim(out, v), lse[..., : q.shape[-2]]  # the operator rounds the number of rows up


@_for_equal_heads_backward
def efficient_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Any, ...]:
    """Run the backward of `efficient`."""
    *tensors, padded_out = _pad_dim(padded_dim(q, v), grad, q, k, v, out)
    none = torch.empty((), dtype=torch.long, device=q.device)
    lse = pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        *tensors, None, padded_out, lse, none, none, 0.0, (True, True, True, False), strip.causal,
        scale=scale,
    )  # fmt: skip
    return _crop_grads(grads, q, k, v)


def flash(
    q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """Run FlashAttention, for all keys, a band or packed documents, and head dimensions up to 256.

    The outputs of empty rows are finite but arbitrary.
    """
    layout = _FlashLayout.of(strip, *_pad_dim(padded_dim(q, v), q, k, v))
    out, lse, state, *_ = _aten._flash_attention_forward(
        *layout.tensors, *layout.sequences, probability(dropout), False, False, scale=scale,
        window_size_left=_side(strip.left), window_size_right=_side(strip.right),
    )  # fmt: skip
    if dropout is not None:
        dropout.state = state.view(torch.int64)
    if strip.packed is not None:
        lse = lse.unflatten(-1, (q.shape[0], -1)).transpose(0, 1)
    return _crop_dim(layout.restore(out), v), lse.reshape(q.shape[:-1])


def flash_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, strip: Strip, scale: float,
    dropout: Dropout | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the backward of `flash`."""
    layout = _FlashLayout.of(strip, *_pad_dim(padded_dim(q, v), grad, q, k, v, out))
    if strip.empty_rows is not None:
        lse = lse.masked_fill(strip.empty_rows, torch.inf)  # all weights are 0
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
    return _crop_grads((layout.restore(x) for x in grads), q, k, v)


def _side(width: int | None) -> int:
    return -1 if width is None else width


class _FlashLayout(NamedTuple):
    """Tensors ``[batch, heads, tokens, dim]`` in the layout of FlashAttention.

    The layout is ``[batch, tokens, heads, dim]``, or ``[all tokens, heads, dim]`` for packed documents.
    If heads are consecutive in memory, each becomes a batch of its own, because the operator's backward
    copies tensors in another order.

    Attributes:
        tensors: The tensors.
        sequences: First positions of the documents of rows and of keys, or None, and largest lengths.
        restore: A function that restores the original layout.
    """

    tensors: list[Tensor]
    sequences: tuple[Any, ...]
    restore: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, strip: Strip, *tensors: Tensor) -> "_FlashLayout":
        """Return the layout of tensors of a strip: query, key and value, possibly among others."""
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
    """Compute a strip in plain torch, with its map in memory, without bands and packed documents."""
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
    dscores = (weights * ((grad @ v.mT).to(lse.dtype) - inner)).to(q.dtype)
    return scale * (dscores @ k), scale * (dscores.mT @ q), weights.to(v.dtype).mT @ grad


def _scores(q: Tensor, k: Tensor, strip: Strip, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) * scale) @ k.mT.to(dtype)
    mask = additive_mask(strip, scores.dtype)
    return scores if mask is None else scores + mask


PLAIN = Operator("torch", plain, plain_backward)
CPU = Operator("cpu flash", cpu, cpu_backward)
CPU_CAUSAL = replace(CPU, strip=Strip(slice(0, 0), slice(0, 0), causal=True))
BY_NAME = {
    "cudnn": Operator("cudnn", cudnn, cudnn_backward, with_dropout=True),
    "flash": Operator("flash", flash, flash_backward, with_dropout=True),
    "efficient": Operator("efficient", efficient, efficient_backward),
    "packed flash": Operator("packed flash", flash, flash_backward, with_dropout=True),
}
