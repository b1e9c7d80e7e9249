"""One query against a cache of keys, under a linear PDE: attention with stepped values, in one pass.

Its twin in torch is `engines.dense`. The walls of a single row do not move, so every key has a stepped
value. Stepped values are not stored: a program computes those of a block of keys from the values within
reach, which are in its cache, and multiplies them by their weights at once. Keys are divided among
programs, and a second kernel adds up their partial sums.
"""

# Kernel arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment

import torch
import triton
import triton.language as tl
from torch import Tensor

from attractor.attention.kernels.device import load_masked
from attractor.attention.kernels.launch import cdiv, contiguous_rows, power_of_two, table_stride
from attractor.attention.kernels.operators import custom_operator, operator_if_traced, wrap_triton

TYPES = (torch.bfloat16, torch.float16, torch.float32)
KEYS = 64  # keys per block
PROGRAMS = 512  # approximate number of programs, unless blocks are too few
MIN_BLOCKS = 4  # smallest number of blocks per program, if the replay of a graph launches them
MIN_ROWS = 16  # smallest number of rows of a product on tensor cores


@triton.jit
def _room(valid, stride, key, keys, here, REACH: tl.constexpr, MASKED: tl.constexpr):
    """Return the numbers of consecutive valid keys before and after each key, at most REACH."""
    before, after = tl.minimum(key, REACH), tl.minimum(keys - 1 - key, REACH)
    if MASKED:
        left, right = here.to(tl.int32), here.to(tl.int32)
        before, after = key * 0, key * 0
        for n in tl.static_range(1, REACH + 1):
            left *= tl.load(valid + (key - n) * stride, mask=key >= n, other=0).to(tl.int32)
            right *= tl.load(valid + (key + n) * stride, mask=key + n < keys, other=0).to(tl.int32)
            before, after = before + left, after + right
    return before, after


@triton.jit(do_not_specialize=["keys", "chunk"])
def _decode(
    q, k, v, valid, stencil, out, parts, largest_of_parts, total_of_parts, scale, keys, heads, chunk,
    q_b, q_h, k_b, k_h, k_t, v_b, v_h, v_t, valid_b, valid_t, stencil_h,
    REACH: tl.constexpr, DIM: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Compute a chunk of keys for the GROUP queries that share a head of keys.

    If SINGLE, the chunk contains all keys, and the program stores the output. Otherwise it stores its
    sums, its largest score and its total weight.
    """
    pair, split = tl.program_id(0), tl.program_id(1)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    valid += batch * valid_b
    stencil += head * stencil_h
    row, column, deep = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEEP)
    inside, deep_inside = (column < DIM)[None, :], (deep < DEPTH)[None, :]
    member = head * GROUP + row
    queries = tl.load(
        q + batch * q_b + member[:, None] * q_h + column[None, :],
        mask=(row < GROUP)[:, None] & inside, other=0.0,
    )  # fmt: skip
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, DEEP], dtype=tl.float32)
    for start in range(split * chunk, tl.minimum((split + 1) * chunk, keys), BLOCK):
        key = start + tl.arange(0, BLOCK)
        here = key < keys
        if MASKED:
            here = tl.load(valid + key * valid_t, mask=here, other=0) != 0
        before, after = _room(valid, valid_t, key, keys, here, REACH, MASKED)
        own = load_masked(k, k_t, key, column, here[:, None] & inside, k.dtype.element_ty)
        scores = tl.dot(queries, tl.trans(own), input_precision="ieee") * scale
        scores = tl.where(here[None, :], scores, -float("inf"))
        most = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(most == -float("inf"), 0.0, most)
        weights, decay = tl.exp(scores - finite[:, None]), tl.exp(largest - finite)
        place = (before * (REACH + 1) + after) * (2 * REACH + 1)
        values = tl.zeros([BLOCK, DEEP], dtype=tl.float32)
        for n in tl.static_range(2 * REACH + 1):
            ok = here & (n - REACH >= -before) & (n - REACH <= after)
            weight = tl.load(stencil + place + n, mask=ok, other=0.0).to(tl.float32)
            value = load_masked(v, v_t, key + (n - REACH), deep, ok[:, None] & deep_inside, tl.float32)
            values += weight[:, None] * value
        kind = v.dtype.element_ty
        share = tl.dot(weights.to(kind), values.to(kind), input_precision="ieee")
        sums = sums * decay[:, None] + share
        total, largest = total * decay + tl.sum(weights, 1), most
    member = pair.to(tl.int64) * GROUP + row
    ok = (row < GROUP)[:, None] & deep_inside
    if SINGLE:
        sums = sums / tl.where(total > 0, total, 1.0)[:, None]
        where = out + member[:, None] * DEPTH + deep[None, :]
        tl.store(where, sums.to(out.dtype.element_ty), mask=ok)
    else:
        member = member * tl.num_programs(1) + split
        tl.store(parts + member[:, None] * DEPTH + deep[None, :], sums, mask=ok)
        tl.store(largest_of_parts + member, largest, mask=row < GROUP)
        tl.store(total_of_parts + member, total, mask=row < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    parts, largest_of_parts, total_of_parts, out, splits,
    DEPTH: tl.constexpr, DEEP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the output of one query from the sums of all chunks, zeros if it has no keys."""
    pair = tl.program_id(0).to(tl.int64)
    split, deep = tl.arange(0, SPLITS), tl.arange(0, DEEP)
    some = split < splits
    largest = tl.load(largest_of_parts + pair * splits + split, mask=some, other=-float("inf"))
    total = tl.load(total_of_parts + pair * splits + split, mask=some, other=0.0)
    most = tl.max(largest, 0)
    share = tl.exp(largest - tl.where(most == -float("inf"), 0.0, most))
    total = tl.sum(total * share, 0)
    where = parts + (pair * splits + split)[:, None] * DEPTH + deep[None, :]
    sums = tl.load(where, mask=some[:, None] & (deep < DEPTH)[None, :], other=0.0)
    sums = tl.sum(sums * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + pair * DEPTH + deep, sums.to(out.dtype.element_ty), mask=deep < DEPTH)


def _launch(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, stencil: Tensor, scale: float
) -> Tensor:
    """Return the output ``[batch, heads, 1, value dim]``.

    Args:
        query: ``[batch, heads, 1, dim]``.
        key, value: ``[batch, key heads, keys, dim]``; each of their heads serves as many consecutive
            heads of query.
        valid: bool ``[batch or 1, keys]``, False for keys that no query may attend to, which are walls.
        stencil: The table of `stencils.stencil_table`, the same for all heads that share keys.
        scale: Scale of the scores.
    """
    query, key, value = map(contiguous_rows, (query, key, value))
    (batch, heads, _, dim), (_, key_heads, keys, depth) = query.shape, value.shape
    out = query.new_empty(batch, heads, 1, depth)
    group, reach, pairs = heads // key_heads, int(stencil.shape[-1]) // 2, batch * key_heads
    blocks = cdiv(keys, KEYS)
    # A second launch takes longer than a few more blocks, unless a graph replays it.
    replayed = query.is_cuda and torch.cuda.is_current_stream_capturing()
    min_blocks = MIN_BLOCKS if replayed else 4 * MIN_BLOCKS
    splits = max(1, min(blocks // min_blocks, PROGRAMS // pairs))
    chunk = cdiv(blocks, splits) * KEYS
    splits = cdiv(keys, chunk)
    parts = largest = total = stencil
    if splits > 1:
        parts = torch.empty(batch * heads, splits, depth, dtype=torch.float32, device=query.device)
        largest, total = torch.empty(
            2, batch * heads, splits, dtype=torch.float32, device=query.device
        ).unbind()  # fmt: skip
    mask = query if valid is None else valid.view(torch.uint8)
    deep = max(16, power_of_two(int(depth)))
    wrap_triton(_decode)[(pairs, splits)](
        query, key, value, mask, stencil, out, parts, largest, total, scale, keys, key_heads, chunk,
        query.stride(0), query.stride(1), *key.stride()[:3], *value.stride()[:3],
        0 if valid is None or len(valid) == 1 else mask.stride(0), mask.stride(-1),
        table_stride(stencil), reach, int(dim), int(depth), max(16, power_of_two(int(dim))), deep, group,
        max(MIN_ROWS, power_of_two(group)), KEYS, valid is not None, splits == 1, num_warps=4,
        num_stages=1,  # several stages of loads would exceed the shared memory
    )  # fmt: skip
    if splits > 1:
        wrap_triton(_combine)[(batch * heads,)](
            parts, largest, total, out, splits, int(depth), deep, power_of_two(splits), num_warps=1
        )
    return out


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


decode_operator = custom_operator("decode", transparent=False)(_launch)
decode_operator.register_fake(_fake)
decode = operator_if_traced(decode_operator, _launch)


def usable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `decode` supports tensors that other kernels support."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return query.dtype in TYPES and not needs_grad
