"""The stencil table of a linear PDE: the weights of all steps, for all positions between walls.

A stepped value is a weighted sum over the keys within reach. The weights depend only on the numbers of
keys before and after it up to the next wall, because nothing passes a wall, and a wall out of reach has
no effect. One small table is therefore valid for the ends of sequences and documents, and for padding:

    table[head, before, after, reach + offset]      before, after = 0 .. reach, where reach is "or more"

If the coefficients are numbers, the table is computed once per evolution. If they are tensors, each call
computes it with its derivatives in one launch. The twin in torch, `table_by_steps`, would need dozens of
launches, in a call whose attention has six.
"""

# Kernel arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attractor.attention.kernels.device import from_two
from attractor.attention.kernels.launch import power_of_two, two_floats
from attractor.attention.kernels.operators import differentiable, is_traced, wrap_triton
from attractor.attention.pdes import AdvectionDiffusion, Diffusion, Line, Wave, take_steps
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.precision import accumulate_dtype


def stencil_table(evolution: Evolution, like: Tensor) -> Tensor:
    """Return the table ``[heads or 1, reach + 1, reach + 1, 2 reach + 1]`` for values such as `like`."""
    dtype, device, stream = accumulate_dtype(like.dtype), like.device, 0
    if not evolution.constant or is_traced(like):
        return _compute(evolution, dtype, device)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():  # the graph must own its table
            return _compute(evolution, dtype, device)
        stream = torch.cuda.current_stream(device).cuda_stream  # another stream would have to wait
    key = dtype, device, stream
    if key not in evolution.stencils:
        with torch.inference_mode(False), torch.no_grad():
            evolution.stencils[key] = _compute(evolution, dtype, device)
    return evolution.stencils[key]


def table_by_steps(evolution: Evolution, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the table of any linear PDE by steps of torch, from a unit per position between walls."""
    reach = evolution.reach
    side = torch.arange(reach + 1, device=device)
    face = torch.arange(2 * reach, device=device)
    open = (face >= reach - side[:, None, None]) & (face < reach + side[:, None])
    unit = (torch.arange(2 * reach + 1, device=device) == reach).to(dtype)
    units, line = unit.expand((reach + 1) ** 2, -1), Line(-1, open.flatten(0, 1))
    table = take_steps(evolution.pde, units, line, evolution.steps, evolution.dt)
    return table.reshape(-1, reach + 1, reach + 1, 2 * reach + 1)


def _compute(evolution: Evolution, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the table, by the kernel for equations of this library."""
    pde, second = evolution.pde, None
    if type(pde) is Wave:
        first = _as_tensor(pde.c, dtype, device)
    elif type(pde) is Diffusion:
        first = _as_tensor(pde.alpha, dtype, device)
    elif type(pde) is AdvectionDiffusion:
        first, second = _as_tensor(pde.alpha, dtype, device), _as_tensor(pde.beta, dtype, device)
    else:
        return table_by_steps(evolution, dtype, device)
    shape = first.new_empty(0, dtype=dtype)
    return make_table(first, second, evolution.dt, evolution.steps, type(pde) is Wave, shape)[0]


def _as_tensor(coefficient: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(coefficient, Tensor):
        return coefficient.to(device)
    return torch.full((1,), float(coefficient), dtype=dtype, device=device)


@triton.jit
def _changes(u, left, right, PLACES: tl.constexpr):
    """Return the Laplacian and the gradient of u ``[PLACES]``, through open faces."""
    place = tl.arange(0, PLACES)
    higher = tl.gather(u, tl.minimum(place + 1, PLACES - 1), 0)
    lower = tl.gather(u, tl.maximum(place - 1, 0), 0)
    laplacian = right * (higher - u) + left * (lower - u)
    return laplacian, 0.5 * (right * (higher + u) - left * (lower + u))


@triton.jit(do_not_specialize=["first_h", "second_h"])
def _make_table(
    first, second, table, derivatives, first_h, second_h, dt, dt_rest,
    STEPS: tl.constexpr, WAVE: tl.constexpr, SECOND: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Store the table entries of one position between walls of one head, and their derivatives.

    A unit takes all steps. A step adds ``a laplacian + b gradient`` to the map, or for a wave, to the
    velocity, which it adds to the map.
    """
    TYPE: tl.constexpr = table.dtype.element_ty
    head, kind = tl.program_id(0), tl.program_id(1)
    before, after = kind // (STEPS + 1), kind % (STEPS + 1)
    dt = from_two(dt, dt_rest, TYPE)
    c, b = tl.load(first + head * first_h).to(TYPE), dt * 0
    if SECOND:
        b = dt * tl.load(second + head * second_h).to(TYPE)
    a, a_by_c = dt * c, dt
    if WAVE:
        a, a_by_c = dt * c * (dt * c), 2 * dt * (dt * c)
    place = tl.arange(0, PLACES)
    right = ((place >= STEPS - before) & (place < STEPS + after)).to(TYPE)  # the face after a position
    left = ((place > STEPS - before) & (place <= STEPS + after)).to(TYPE)
    u = (place == STEPS).to(TYPE)
    velocity, by_first, by_second = u * 0, u * 0, u * 0  # velocity, and derivatives of u
    velocity_by_first = u * 0
    for _ in tl.static_range(STEPS):
        laplacian, gradient = _changes(u, left, right, PLACES)
        d_laplacian, d_gradient = _changes(by_first, left, right, PLACES)
        change = a * laplacian + b * gradient
        change_by_first = a * d_laplacian + b * d_gradient + a_by_c * laplacian
        if WAVE:
            change, change_by_first = velocity + change, velocity_by_first + change_by_first
        if SECOND:
            d_laplacian, d_gradient = _changes(by_second, left, right, PLACES)
            by_second += a * d_laplacian + b * d_gradient + dt * gradient
        velocity, velocity_by_first = change, change_by_first
        u, by_first = u + change, by_first + change_by_first
    size = tl.num_programs(0) * tl.num_programs(1) * (2 * STEPS + 1)
    where = (head * tl.num_programs(1) + kind) * (2 * STEPS + 1) + place
    inside = place < 2 * STEPS + 1
    tl.store(table + where, u, mask=inside)
    tl.store(derivatives + where, by_first, mask=inside)
    if SECOND:
        tl.store(derivatives + size + where, by_second, mask=inside)


def _launch(
    first: Tensor, second: Tensor | None, dt: float, steps: int, wave: bool, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the table, and its derivatives ``[1 or 2, *table.shape]`` by the coefficients.

    Args:
        first: Coefficient of the Laplacian, or the speed of a wave, with one entry or one per head.
        second: Coefficient of the gradient, with one entry or one per head; None for 0.
        dt: Size of a step.
        steps: Number of steps.
        wave: Whether the equation is a wave.
        like: A tensor with the dtype and device of the table.
    """
    table, derivatives = _fake(first, second, dt, steps, wave, like)
    first = first.contiguous()
    other = first if second is None else second.contiguous()
    wrap_triton(_make_table)[table.shape[0], (steps + 1) ** 2](
        first, other, table, derivatives, int(first.numel() > 1), int(other.numel() > 1),
        *two_floats(dt), steps, wave, second is not None, power_of_two(2 * steps + 1), num_warps=1,
    )  # fmt: skip
    return table, derivatives


def _fake(
    first: Tensor, second: Tensor | None, dt: float, steps: int, wave: bool, like: Tensor
) -> tuple[Tensor, Tensor]:
    count = first.numel() if second is None else max(first.numel(), second.numel())
    table = like.new_empty(count, steps + 1, steps + 1, 2 * steps + 1)
    return table, table.new_empty(1 if second is None else 2, *table.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:2])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    derivatives, *coefficients = ctx.saved_tensors
    sums = (derivatives * grad).flatten(2).sum(-1)  # [coefficients, heads]
    grads = [
        None if x is None else (row if x.numel() > 1 else row.sum()).view(x.shape).to(x.dtype)
        for x, row in zip(coefficients, (*sums, None))
    ]
    return *grads, *(None,) * 4


make_table_operator, make_table = differentiable("make_table", _launch, _fake, _save, _backward)
