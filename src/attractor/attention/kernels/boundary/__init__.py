"""Launches of three kernels for boundary keys of causal rows and of windows, and for global keys.

The twin in torch is `engines.boundary`. The caller computes the far keys, which are out of reach of both
walls, with a fused operator and stepped values, for the rows and keys of a `Band`. It passes the output
of the operator to these launches. In backward, the operator gets the combined output and log-sum-exp.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attractor.attention.kernels import launch
from attractor.attention.kernels.boundary import forward as forward_kernel
from attractor.attention.kernels.boundary import keys as keys_kernel
from attractor.attention.kernels.boundary import rows as rows_kernel
from attractor.attention.kernels.launch import (
    Shape,
    cdiv,
    contiguous_rows,
    faces_of,
    power_of_two,
    strides,
    table_stride,
    two_floats,
)
from attractor.attention.kernels.operators import custom_operator, operator_if_traced, wrap_triton
from attractor.attention.kernels.values.stencil_gradient import BoundarySums, stencil_gradient
from attractor.attention.precision import accumulate_dtype

CAUSAL = -1  # left side of causal rows, which have no limit


class Band(NamedTuple):
    """The rows and far keys of a fused operator, and their shift.

    Attributes:
        rows: The first row that has a far key.
        keys: The first key that is far from a wall of some row.
        size: The number of rows, and of keys, with which the far keys are computed.
    """

    rows: int
    keys: int
    size: int


def band_of(tokens: int, reach: int, left: int, right: int) -> Band:
    """Return the band of a window, or of causal rows."""
    rows = max(reach - right, 0)
    keys = 0 if left == CAUSAL else max(reach - left, 0)
    return Band(rows, keys, tokens - rows - keys)


def reach_of(stencil: Tensor | None) -> int:
    """Return the reach of a stencil table; 0 without a PDE."""
    return 0 if stencil is None else int(stencil.shape[-1]) // 2


def _shape(name: str, q: Tensor, v: Tensor, left: int, reach: int) -> tuple[Shape, int]:
    """Return the shape of programs of a kernel, and their number."""
    tile = launch.TILES[f"{'causal' if left == CAUSAL else 'window'}_{name}"]
    shape = launch.shape_of(tile, int(q.shape[-1]), int(v.shape[-1]), q.dtype, reach)
    return shape, q.shape[0] * q.shape[1] * cdiv(q.shape[2], shape.rows)


def _strides_like(x: Tensor, q: Tensor) -> tuple[int, int, int]:
    """Return the strides of x, which may hold all heads as one sequence ``[1, 1, tokens, dim]``."""
    if x.shape[:2] == q.shape[:2]:
        return strides(x)
    heads, tokens = q.shape[1:3]
    return heads * tokens * x.stride(2), tokens * x.stride(2), x.stride(2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, far: Tensor, far_lse: Tensor, stencil: Tensor | None,
    open: Tensor | None, global_k: Tensor | None, global_v: Tensor | None, first_rows: Tensor | None,
    last_rows: Tensor | None, left: int, right: int, scale: float, seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs ``[batch, heads, tokens, value dim]`` and their log-sum-exp.

    Args:
        q, k, v: ``[batch, heads, tokens, dim]``. Without a window, k and v may have fewer heads, each of
            which serves as many consecutive heads of q.
        far: Output for the far keys and the rows of the band, ``[batch, heads, size, value dim]``, or
            ``[1, 1, size, value dim]`` with all heads as one sequence.
        far_lse: Its log-sum-exp. Both are arbitrary for rows without far keys in their document.
        stencil: The table of `stencils`; None for windows without a PDE.
        open: bool ``[batch, 1, 1, tokens - 1]``, False between two documents; for causal rows only.
        global_k, global_v: Keys and stepped values of the global tokens; for windows only.
        first_rows, last_rows: Outputs of the rows that are not computed here, for windows only. Their
            log-sum-exp is infinite, so that their weights are 0.
        left, right: Sides of the window; (CAUSAL, 0) for causal rows.
        scale: Scale of the scores.
        seed: Seed of the dropout of boundary weights, int64 ``[1]``, or None; for causal rows only.
        dropout_p: Probability of this dropout.
    """
    q, k, v, far = map(contiguous_rows, (q, k, v, far))
    out, lse = like_output(q, v)
    (_, heads, tokens, dim), reach, window = q.shape, reach_of(stencil), left != CAUSAL
    shape, programs = _shape("forward", q, v, left, reach)
    band, begin, end = band_of(tokens, reach, left, right), 0, tokens
    if first_rows is not None and last_rows is not None:
        begin, end = first_rows.shape[2], tokens - last_rows.shape[2]
    table = lse if stencil is None else stencil.contiguous()
    global_k, global_v, count = _globals(global_k, global_v, k, v)
    faces, face_strides = faces_of(open, v)
    wrap_triton(forward_kernel.forward)[(programs,)](
        q, k, v, far, far_lse.contiguous(), global_k, global_v, table, faces, out, lse,
        lse if seed is None else seed, dropout_p,
        *two_floats(scale), tokens, heads, heads // k.shape[1], begin, end, left, right, band.rows,
        band.size, band.size if far.shape[:2] == q.shape[:2] else tokens, *strides(q), *strides(k),
        *strides(v), *_strides_like(far, q), *strides(global_k), *strides(global_v), *strides(out),
        *face_strides,
        0 if stencil is None else table_stride(table), reach, count, int(dim), int(v.shape[-1]),
        shape.columns, shape.value_columns, shape.strands, shape.run, shape.pieces,
        power_of_two(shape.rows + 2 * reach), window, open is not None, seed is not None,
        num_warps=shape.warps,
    )  # fmt: skip
    if first_rows is not None and last_rows is not None:
        out[:, :, :begin] = first_rows
        if end < tokens:
            out[:, :, end:] = last_rows
    return out, lse


def like_output(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty outputs, laid out like v or q, and empty log-sum-exp."""
    lse = q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))
    if q.shape[:3] == v.shape[:3]:
        return torch.empty_like(v), lse
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q), lse
    return q.new_empty(*q.shape[:3], v.shape[-1]), lse


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return like_output(contiguous_rows(q), contiguous_rows(v))


def _globals(
    global_k: Tensor | None, global_v: Tensor | None, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Return keys and values of the global tokens, or k and v if there are none, and their number."""
    if global_k is None or global_v is None:
        return k, v, 0
    return contiguous_rows(global_k), contiguous_rows(global_v), int(global_k.shape[2])


def _backward_rows(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, stencil: Tensor | None,
    open: Tensor | None, global_k: Tensor | None, global_v: Tensor | None, far: Tensor, begin: int,
    end: int, left: int, right: int, scale: float, of_stencil: bool, seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q and of the global keys and values, and tensors for `backward_keys`.

    Arguments that are not listed are those of `_forward`.

    Args:
        far: Share of the far keys in the gradient of q, for the rows of the band.
        begin, end: The rows that are computed; for windows only.
        of_stencil: Whether the gradient of the table is needed.

    Returns:
        The gradient of q; the gradients of the boundary scores and the patch weights ``[batch * heads,
        3 reach per side, tokens]``, laid out as `boundary.sides.place_of` says; the gradients of global
        keys and values; and the fields of `BoundarySums`, without entries unless `of_stencil`.
    """
    do, q, k, v, out, far = map(contiguous_rows, (do, q, k, v, out, far))
    batch, heads, tokens, dim = q.shape
    reach, window, pairs = reach_of(stencil), left != CAUSAL, batch * heads
    shape, programs = _shape("backward_rows", q, v, left, reach)
    dq, row_weights, dk, dv, sums, edge_sums = _fake_backward_rows(
        do, q, k, v, out, lse, stencil, open, global_k, global_v, far, begin, end, left, right, scale,
        of_stencil,
    )  # fmt: skip
    keys, values, count = _globals(global_k, global_v, k, v)
    if open is not None:
        edge_sums.zero_()  # programs with free rows do not write them
    program_dk = lse.new_empty(programs if count else 0, count, dim)
    program_dv = lse.new_empty(programs if count else 0, count, v.shape[-1])
    table, band = lse if stencil is None else stencil.contiguous(), band_of(tokens, reach, left, right)
    columns = min(shape.columns, shape.value_columns) // shape.pieces
    dots = window and lse.dtype == torch.float32 and shape.strands >= 16 and columns >= 16
    faces, face_strides = faces_of(open, v)
    wrap_triton(rows_kernel.backward_rows)[(programs,)](
        do, q, k, v, out, lse.contiguous(), keys, values, table, faces, far, dq, row_weights, program_dk,
        program_dv, sums, edge_sums, lse if seed is None else seed, dropout_p, *two_floats(scale),
        tokens, heads, heads // k.shape[1], begin, end, left, right, band.rows, band.size, *strides(do),
        *strides(q), *strides(k), *strides(v), *strides(out), *strides(keys), *strides(values),
        *_strides_like(far, q), *strides(dq), *face_strides,
        0 if stencil is None else table_stride(table), reach, count, int(dim), int(v.shape[-1]),
        shape.columns, shape.value_columns, shape.strands, shape.run, shape.pieces,
        power_of_two(shape.rows + 2 * reach), power_of_two(3 * reach * shape.run),
        power_of_two(3 * reach), power_of_two(2 * reach**2), power_of_two(reach), dots, of_stencil,
        window, open is not None, seed is not None, num_warps=shape.warps,
    )  # fmt: skip
    if count:
        dk, dv = (
            x.view(pairs, programs // pairs, *x.shape[1:]).sum(1).view(like.shape).to(like.dtype)
            for x, like in ((program_dk, keys), (program_dv, values))
        )
    return dq, row_weights, dk, dv, sums, edge_sums


def _fake_backward_rows(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, stencil: Tensor | None,
    open: Tensor | None, global_k: Tensor | None, global_v: Tensor | None, far: Tensor, begin: int,
    end: int, left: int, right: int, scale: float, of_stencil: bool, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    reach, window, pairs = reach_of(stencil), left != CAUSAL, q.shape[0] * q.shape[1]
    shape, programs = _shape("backward_rows", q, v, left, reach)
    like, sides = (q, 2) if window else (lse, 1)
    edges = 0 if window or not of_stencil else pairs if open is None else programs
    return (
        torch.empty_like(contiguous_rows(q)),
        like.new_empty(pairs, sides * 3 * reach, cdiv(q.shape[2], shape.rows) * shape.rows),
        q.new_empty(0) if global_k is None else global_k.new_empty(global_k.shape),
        q.new_empty(0) if global_v is None else global_v.new_empty(global_v.shape),
        lse.new_empty(programs if of_stencil else 0, sides, reach, 2 * reach),
        lse.new_empty(edges, reach, reach, 2 * reach),
    )


def _backward_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, row_weights: Tensor, stencil: Tensor,
    open: Tensor | None, far_dk: Tensor, far_dv: Tensor, sums: Tensor, edge_sums: Tensor, left: int,
    right: int, of_stencil: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of k, v and the table; the last has no entries unless `of_stencil`.

    Args:
        row_weights, sums, edge_sums: Results of `backward_rows`.
        far_dk, far_dv: Shares of the far keys in the gradients of keys and stepped values, for the keys
            of the band.
    """
    do, q, k, v, far_dk, far_dv = map(contiguous_rows, (do, q, k, v, far_dk, far_dv))
    stencil, (_, heads, tokens, dim), reach = stencil.contiguous(), k.shape, reach_of(stencil)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    shape, programs = _shape("backward_keys", k, v, left, reach)
    rows, _ = _shape("backward_rows", q, v, left, reach)
    free_sums = stencil.new_empty(programs if of_stencil else 0, stencil.shape[-1])
    faces, face_strides = faces_of(open, v)
    band = band_of(tokens, reach, left, right)
    wrap_triton(keys_kernel.backward_keys)[(programs,)](
        do, q, v, row_weights, stencil, faces, far_dk, far_dv, dk, dv, free_sums, tokens, heads, left,
        right, band.keys, band.size, *strides(do), *strides(q), *strides(v), *_strides_like(far_dk, k),
        *_strides_like(far_dv, k), *strides(dk), *strides(dv), *face_strides, table_stride(stencil),
        reach, int(dim), int(v.shape[-1]), shape.columns, shape.value_columns, shape.strands, shape.run,
        shape.pieces, rows.strands, rows.run, power_of_two(2 * reach + 1),
        power_of_two(shape.rows + 4 * reach), of_stencil, left != CAUSAL, open is not None,
        q.shape[1] // heads, num_warps=shape.warps,
    )  # fmt: skip
    if not of_stencil:
        return dk, dv, free_sums.view(0)
    boundary = BoundarySums(sums, edge_sums)
    return dk, dv, stencil_gradient(far_dv, v, open, stencil, free_sums, boundary)


def _fake_backward_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, row_weights: Tensor, stencil: Tensor, *args: object
) -> tuple[Tensor, Tensor, Tensor]:
    dk, dv = torch.empty_like(contiguous_rows(k)), torch.empty_like(contiguous_rows(v))
    return dk, dv, stencil.new_empty(stencil.shape if args[-1] else 0)


forward_operator = custom_operator("boundary_forward")(_forward)
forward_operator.register_fake(_fake_forward)
backward_rows_operator = custom_operator("boundary_backward_rows")(_backward_rows)
backward_rows_operator.register_fake(_fake_backward_rows)
backward_keys_operator = custom_operator("boundary_backward_keys")(_backward_keys)
backward_keys_operator.register_fake(_fake_backward_keys)

boundary_forward = operator_if_traced(forward_operator, _forward)
boundary_backward_rows = operator_if_traced(backward_rows_operator, _backward_rows)
boundary_backward_keys = operator_if_traced(backward_keys_operator, _backward_keys)
