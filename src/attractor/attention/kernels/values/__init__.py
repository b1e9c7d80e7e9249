"""Launches for values ``[batch, heads, keys, dim]`` after all steps of a linear PDE.

Its twin in torch is `engines.values.step_values`.
"""

from typing import Any

import torch
from torch import Tensor

from attractor.attention.kernels.launch import (
    FEW_TOKENS,
    TILES,
    Shape,
    cdiv,
    contiguous_rows,
    faces_of,
    power_of_two,
    shape_of,
    strides,
    table_stride,
)
from attractor.attention.kernels.operators import (
    custom_operator,
    differentiable,
    operator_if_traced,
    wrap_triton,
)
from attractor.attention.kernels.values.backward import _step_backward
from attractor.attention.kernels.values.forward import _step
from attractor.attention.kernels.values.stencil_gradient import stencil_gradient


def _shape(name: str, value: Tensor, reach: int) -> Shape:
    dim, tokens = int(value.shape[-1]), value.shape[-2]
    return shape_of(TILES["few_tokens" if tokens <= FEW_TOKENS else name], dim, dim, value.dtype, reach)


def _launch(value: Tensor, stencil: Tensor, open: Tensor | None) -> Tensor:
    """Return the stepped values.

    Args:
        value: ``[batch, heads, keys, dim]``.
        stencil: The table of `stencils`, in at least float32.
        open: bool ``[batch or 1, heads or 1, 1, keys - 1]``, False at walls; None if only the ends are
            walls.
    """
    value, stencil = contiguous_rows(value), stencil.contiguous()
    out = torch.empty_like(value)
    (batch, heads, tokens, dim), reach = value.shape, int(stencil.shape[-1]) // 2
    shape = _shape("step", value, reach)
    faces, face_strides = faces_of(open, value)
    wrap_triton(_step)[batch * heads * cdiv(tokens, shape.rows),](
        value, faces, stencil, out, tokens, heads, *strides(value), *strides(out), *face_strides,
        table_stride(stencil), reach, int(dim), shape.columns, shape.strands, shape.run,
        power_of_two(shape.rows + 2 * reach), open is not None, num_warps=shape.warps,
    )  # fmt: skip
    return out


def _fake(value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(contiguous_rows(value))


def _launch_backward(
    do: Tensor, value: Tensor, stencil: Tensor, open: Tensor | None, of_stencil: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of value and of the table; the latter has no entries unless `of_stencil`."""
    do, value, stencil = contiguous_rows(do), contiguous_rows(value), stencil.contiguous()
    dv = torch.empty_like(value)
    (batch, heads, tokens, dim), reach = value.shape, int(stencil.shape[-1]) // 2
    shape = _shape("step_backward", value, reach)
    programs = batch * heads * cdiv(tokens, shape.rows)
    free_sums = stencil.new_empty(programs if of_stencil else 0, 2 * reach + 1)
    faces, face_strides = faces_of(open, value)
    wrap_triton(_step_backward)[programs,](
        do, value, faces, stencil, dv, free_sums, tokens, heads, *strides(do), *strides(value),
        *strides(dv), *face_strides, table_stride(stencil), reach, int(dim), shape.columns,
        shape.strands, shape.run, power_of_two(shape.rows + 4 * reach), power_of_two(2 * reach + 1),
        open is not None, of_stencil, num_warps=shape.warps,
    )  # fmt: skip
    if not of_stencil:
        return dv, free_sums.view(0)
    return dv, stencil_gradient(do, value, open, stencil, free_sums)


def _fake_backward(
    do: Tensor, value: Tensor, stencil: Tensor, open: Tensor | None, of_stencil: bool
) -> tuple[Tensor, Tensor]:
    return _fake(value), stencil.new_empty(stencil.shape if of_stencil else 0)


step_backward_operator = custom_operator("step_values_backward")(_launch_backward)
step_backward_operator.register_fake(_fake_backward)
step_backward = operator_if_traced(step_backward_operator, _launch_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    (value, stencil, open), of_stencil = ctx.saved_tensors, ctx.needs_input_grad[1]
    dv, d_stencil = step_backward(do, value, stencil, open, of_stencil)
    return dv, d_stencil if of_stencil else None, None


step_operator, step = differentiable("step_values", _launch, _fake, _save, _gradients)
