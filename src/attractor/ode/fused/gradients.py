# ruff: noqa: RET505, RUF005 (Triton needs the else, and unpacks nothing)
"""Gradients of a perceptron of one hidden layer, which is computed again for them.

In torch; or, if inputs and outputs are few and only weights have gradients, as in training, by a
kernel. A program of it has some hidden units and goes through a part of the rows: it computes its units
again, and adds up what each row contributes to their weights, in registers, a row of sums for each row
that threads hold. In the end these are added, and the parts by torch, always in the same order. Nothing
of the size of the hidden layer is ever written.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attractor.ode.fused import FEW, perceptron
from attractor.ode.fused.perceptron import (
    POWERS,
    PROCESSORS,
    Plan,
    _coefficients,
    _inverse,
    _operator,
    _sine,
    _weights,
    wrap_triton,
)

COEFFICIENTS = 6  # of a rational activation: four above, two below


def plan(n: int, width: int) -> Plan:
    """Rows and units of a tile, warps, and into how many parts rows are cut; n is only compared."""
    hidden = min(64, max(32, triton.next_power_of_2(width)))
    tiles = -(-width // hidden)
    powers = (*POWERS, 128, 256)
    most = max((p for p in powers if tiles * p <= 16 * PROCESSORS), default=1)
    parts = next(p for p in powers if p >= most or n <= 64 * p)
    return Plan(2, hidden, 1, parts)


@triton.jit
def _with_slope(z: tl.tensor, c: tl.tuple, ACTIVATION: tl.constexpr) -> tl.tuple:
    """The activation of z, its derivative, one over a rational one's denominator, and minus its value
    times that with the sign of what is below."""
    if ACTIVATION == "rational":
        inner = z * tl.fma(z, c[5], c[4])
        over = _inverse(1.0 + tl.abs(inner))
        a = tl.fma(z, tl.fma(z, tl.fma(z, c[3], c[2]), c[1]), c[0]) * over
        sign = tl.where(inner > 0.0, 1.0, tl.where(inner < 0.0, -1.0, 0.0))
        down = -a * sign * over
        rise = tl.fma(z, tl.fma(z, 3.0 * c[3], 2.0 * c[2]), c[1])
        return a, tl.fma(down, tl.fma(2.0 * z, c[5], c[4]), rise * over), over, down
    elif ACTIVATION == "sine":
        return _sine(z), _sine(z + 1.5707963267948966), z, z
    elif ACTIVATION == "cubic":
        return z * z * (1.0 + z), z * tl.fma(z, 3.0, 2.0), z, z
    elif ACTIVATION == "tanh":
        a = 1.0 - 2.0 * _inverse(1.0 + tl.exp(2.0 * z))
        return a, 1.0 - a * a, z, z
    elif ACTIVATION == "relu":
        return tl.where(z < 0.0, 0.0, z), tl.where(z > 0.0, 1.0, 0.0), z, z
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return z * share, tl.fma(z * 0.3989422804014327, tl.exp(-0.5 * z * z), share), z, z
    else:
        tl.static_assert(ACTIVATION == "silu")
        share = _inverse(1.0 + tl.exp(-z))
        return z * share, share * (1.0 + z * (1.0 - share)), z, z


@triton.jit
def _sums(
    x: tl.tensor, first: tl.tensor, first_bias: tl.tensor, head: tl.tensor, top: tl.tensor,
    bottom: tl.tensor, grad: tl.tensor, out: tl.tensor, loose: tl.tensor, n: tl.tensor, x_n: tl.tensor,
    x_i: tl.tensor, grad_n: tl.tensor, grad_o: tl.tensor,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """Some units and a part of the rows: sums for the weights of inputs, the bias, those to outputs."""
    tile, part = tl.program_id(0), tl.program_id(1)
    unit = tile * HIDDEN + tl.arange(0, HIDDEN)
    c = _coefficients(top, bottom, ACTIVATION)
    w = _weights(first, first_bias, head, unit, INPUTS, WIDTH, OUTPUTS, HIDDEN)
    LEARNT: tl.constexpr = 6 if ACTIVATION == "rational" else 0
    sums = ()
    for _ in tl.static_range(INPUTS + 1 + OUTPUTS + LEARNT):
        sums = sums + (tl.zeros([ROWS, HIDDEN], dtype=tl.float32),)  # type: ignore[assignment]
    share = tl.cdiv(tl.cdiv(n, PARTS), ROWS) * ROWS
    for start in range(part * share, tl.minimum((part + 1) * share, n), ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = row < n
        xs = ()
        z = w[0][None, :]
        for i in tl.static_range(INPUTS):
            here = tl.load(x + row * x_n + i * x_i, mask=inside, other=0.0).to(tl.float32)
            xs = xs + (here,)  # type: ignore[assignment]
            z = tl.fma(here[:, None], w[1 + i][None, :], z)
        a, slope, over, down = _with_slope(z, c, ACTIVATION)
        of_a = tl.zeros([ROWS, HIDDEN], dtype=tl.float32)
        gs = ()
        for o in tl.static_range(OUTPUTS):
            here = tl.load(grad + row * grad_n + o * grad_o, mask=inside, other=0.0).to(tl.float32)
            gs = gs + (here,)  # type: ignore[assignment]
            of_a = tl.fma(here[:, None], w[1 + INPUTS + o][None, :], of_a)
        of_z = of_a * slope
        more = ()
        for i in tl.static_range(INPUTS):
            more = more + (tl.fma(of_z, xs[i][:, None], sums[i]),)  # type: ignore[assignment]
        more = more + (sums[INPUTS] + of_z,)  # type: ignore[assignment]
        for o in tl.static_range(OUTPUTS):
            more = more + (tl.fma(a, gs[o][:, None], sums[INPUTS + 1 + o]),)  # type: ignore[assignment]
        if ACTIVATION == "rational":
            up, below = of_a * over, of_a * down * z
            for k in tl.static_range(4):
                more = more + (sums[INPUTS + 1 + OUTPUTS + k] + up,)  # type: ignore[assignment]
                up = up * z
            more = more + (sums[INPUTS + OUTPUTS + 5] + below,)  # type: ignore[assignment]
            more = more + (sums[INPUTS + OUTPUTS + 6] + below * z,)  # type: ignore[assignment]
        sums = more
    at = out + part.to(tl.int64) * (INPUTS + 1 + OUTPUTS) * WIDTH + unit
    for k in tl.static_range(INPUTS + 1 + OUTPUTS):
        tl.store(at + k * WIDTH, tl.sum(sums[k], 0), mask=unit < WIDTH)
    if ACTIVATION == "rational":
        here = loose + (part * tl.num_programs(0) + tile) * 6
        for k in tl.static_range(6):
            # What lies beyond the width has weights of 0, so nothing comes from there.
            tl.store(here + k, tl.sum(tl.sum(sums[INPUTS + 1 + OUTPUTS + k], 0), 0))


@_operator("perceptron_gradients")
def apply(
    x: Tensor, first: Tensor, first_bias: Tensor, head: Tensor, top: Tensor | None,
    bottom: Tensor | None, grad: Tensor, activation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the weights of `perceptron.apply`, given that of its result ``[n, outputs]``.

    Returns:
        ``[inputs + 1 + outputs, width]``: of ``first.mT``, of its bias, of the head; and ``[6]``, of top
        and bottom, zeros without them. Both in float32.
    """
    (n, inputs), (outputs, width) = x.shape, (int(head.shape[0]), int(head.shape[1]))
    inputs = int(inputs)
    cut = plan(n, width)
    tiles = -(-width // cut.hidden)
    out = x.new_empty(cut.splits, inputs + 1 + outputs, width, dtype=torch.float32)
    loose = x.new_zeros(cut.splits * tiles, COEFFICIENTS, dtype=torch.float32)
    weights = [head if w is None else w.contiguous() for w in (first, first_bias, head, top, bottom)]
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        wrap_triton(_sums)[(tiles, cut.splits)](
            x, *weights, grad, out, loose, n, *x.stride(), *grad.stride(), inputs, width, outputs,
            activation, cut.rows, cut.hidden, cut.splits, num_warps=cut.warps,
        )  # fmt: skip
    return out.sum(0), loose.sum(0)


def _like(
    x: Tensor, first: Tensor, first_bias: Tensor, head: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    rows = x.shape[1] + 1 + head.shape[0]
    return (
        x.new_empty(rows, head.shape[1], dtype=torch.float32),
        x.new_empty(COEFFICIENTS, dtype=torch.float32),
    )


apply.register_fake(_like)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, first, first_bias, head, _, around, top, bottom, ctx.activation, _ = inputs
    ctx.save_for_backward(x, first, first_bias, head, around, top, bottom)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of x and all weights, in float32, from the hidden layer computed again."""
    saved: list[Any] = [None if p is None else p.float() for p in ctx.saved_tensors]
    x, first, first_bias, head, around, top, bottom = saved
    kept, grad = grad.dtype, grad.float()
    few = x.shape[1] + head.shape[0] <= FEW
    if few and not ctx.needs_input_grad[0] and not torch.is_grad_enabled():
        return _of_weights(ctx, saved, grad, kept)
    total = grad.sum(0)  # first of all: a thread that begins with cuBLAS is warned of having no context
    z = x @ first.mT + first_bias
    a, change, of_top, of_bottom = derivatives(ctx.activation, z, top, bottom)
    of_a = grad @ head
    of_z = of_a * change
    needed = ctx.needs_input_grad[:8]
    found: list[Any] = [None] * 8
    if needed[0]:
        found[0] = of_z @ first if around is None else of_z @ first + grad @ around
    if any(needed[1:]):  # all weights, as a rule
        found[1:5] = of_z.mT @ x, of_z.sum(0), grad.mT @ a, total
        found[5] = None if around is None else grad.mT @ x
        if top is not None:
            found[6] = torch.stack([(of_a * p).sum() for p in of_top])
            found[7] = torch.stack([(of_a * p).sum() for p in of_bottom])
    return *(p.to(kept) if p is not None and n else None for p, n in zip(found, needed)), None, None


def _of_weights(ctx: Any, saved: list[Any], grad: Tensor, kept: torch.dtype) -> tuple[Any, ...]:
    """The same, of weights alone, by a kernel."""
    x, first, first_bias, head, around, top, bottom = saved
    sums, loose = apply(x, first, first_bias, head, top, bottom, grad, ctx.activation)
    inputs = x.shape[1]
    found = [
        None, sums[:inputs].mT, sums[inputs], sums[inputs + 1 :], grad.sum(0),
        None if around is None else grad.mT @ x,
        *((None, None) if top is None else (loose[:4], loose[4:])),
    ]  # fmt: skip
    needed = ctx.needs_input_grad[:8]
    return *(p.to(kept) if p is not None and n else None for p, n in zip(found, needed)), None, None


def derivatives(
    activation: str, z: Tensor, top: Tensor | None = None, bottom: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The activation of z, its derivative, and those by the coefficients of a rational one."""
    if activation == "rational":
        assert top is not None
        assert bottom is not None
        inner = z * (bottom[0] + z * bottom[1])
        under, sign = 1 + inner.abs(), inner.sign()
        a = (top[0] + z * (top[1] + z * (top[2] + z * top[3]))) / under
        slope = top[1] + z * (2 * top[2] + z * 3 * top[3])
        change = (slope - a * sign * (bottom[0] + 2 * z * bottom[1])) / under
        down, z2 = -a * sign / under, z * z
        return a, change, (1 / under, z / under, z2 / under, z2 * z / under), (down * z, down * z2)
    if activation == "sine":
        return z.sin(), z.cos(), (), ()
    if activation == "cubic":
        return z * z * (1 + z), z * (2 + 3 * z), (), ()
    if activation == "tanh":
        a = z.tanh()
        return a, 1 - a * a, (), ()
    if activation == "relu":
        return z.relu(), (z > 0).to(z.dtype), (), ()
    if activation == "gelu":
        share = 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))
        return z * share, share + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi), (), ()
    share = z.sigmoid()
    return z * share, share * (1 + z * (1 - share)), (), ()


perceptron.apply.register_autograd(_backward, setup_context=_context)
differentiable = perceptron.apply
