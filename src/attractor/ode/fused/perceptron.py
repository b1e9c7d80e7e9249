# ruff: noqa: RET505, RUF005 (Triton needs the else, and unpacks nothing)
"""A perceptron of one hidden layer, ``W_2 a(W_1 x + b_1) + b_2 (+ W x)``, in one kernel.

A program holds some rows of x and goes through the hidden layer in tiles: first product, activation, and
the second product added to sums in registers. There are two kernels. `_by_lanes` is for few inputs and
outputs: a thread has a column of the tile and several rows, so that a weight is loaded once for all of
them, every product is a multiply-add, and the sums stay apart until the end. `_by_products` is for more
of them, and for the matrix units. Neither mixes rows: a state that is not finite stays alone. Sums are
always taken in the same order.

Gradients are in `gradients`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op

from attractor.ode.fused import FEW, INTERPRETED

PROCESSORS = 132  # of the GPU that plans are made for
POWERS = (1, 2, 4, 8, 16, 32, 64)


class Plan(NamedTuple):
    """How the work is cut: rows of x a program, columns of a hidden tile, warps, programs a row."""

    rows: int
    hidden: int
    warps: int
    splits: int = 1


def plan(n: int, width: int, inputs: int, outputs: int, precision: str) -> Plan:
    """A good plan for n rows; n is only compared, for it may be a symbol."""
    all_units = max(16, triton.next_power_of_2(width))
    if inputs + outputs <= FEW:
        held = 8 if inputs + outputs <= 8 else 4  # rows a thread: more would leave room for few warps
        if n <= 8 * PROCESSORS:  # up to two programs a processor, with many threads side by side
            rows = next(r for r in POWERS if n <= 2 * r * PROCESSORS)
            hidden = max(32, min(1024 if n <= PROCESSORS else 512 if rows == 1 else 256, all_units))
            return Plan(rows, hidden, hidden // 32)
        return lanes(n, held, 128 if n <= 4 * held * PROCESSORS else 32, all_units)
    rows = 16 if n <= 16 * PROCESSORS else 32 if n <= 64 * PROCESSORS else 64
    hidden = min(32 if precision == "ieee" or inputs > 64 else 64, all_units)
    most = min(8, all_units // hidden)  # up to eight sums, a compiler adds them where they are used
    splits = next((s for s in POWERS if n * s >= 8 * PROCESSORS * rows and s <= most), most)
    return Plan(rows, hidden, 4, splits)


def lanes(n: int, held: int, hidden: int, all_units: int) -> Plan:
    """Threads with `held` rows each. The fewer lanes share a row, the less is added up in the end."""
    few = (
        k for k in (8, 16) if n >= 32 // k * held * 24 * PROCESSORS
    )  # six warps for each of four units
    hidden = min(next(few, hidden), max(32, all_units))
    return Plan(held * max(1, 32 // hidden), hidden, max(1, hidden // 32))


ASSEMBLER = tl.constexpr(not INTERPRETED)


@triton.jit
def _inverse(x: tl.tensor) -> tl.tensor:
    """1 / x to one unit in the last place, without the scaling of sizes that an exact division has."""
    if ASSEMBLER:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _coefficients(top: tl.tensor, bottom: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tuple:
    """Of a rational activation; zeros for others."""
    if ACTIVATION == "rational":
        a0, a1 = tl.load(top).to(tl.float32), tl.load(top + 1).to(tl.float32)
        a2, a3 = tl.load(top + 2).to(tl.float32), tl.load(top + 3).to(tl.float32)
        return a0, a1, a2, a3, tl.load(bottom).to(tl.float32), tl.load(bottom + 1).to(tl.float32)
    else:
        return 0.0, 0.0, 0.0, 0.0, 0.0, 0.0


@triton.jit
def _sine(z: tl.tensor) -> tl.tensor:
    """sin z to 2e-7 for angles up to 1e5, and bounded beyond, in a sixth of a library's instructions."""
    turns = tl.fma(z, 0.3183098861837907, 12582912.0)  # 1.5 * 2^23: rounds to whole numbers
    odd = turns.to(tl.int32, bitcast=True) << 31
    turns = turns - 12582912.0
    r = tl.fma(turns, -3.140625, z)
    r = tl.fma(turns, -0.0009675025939941406, r)
    r = tl.fma(turns, -1.5099580252808664e-07, r)
    r = tl.clamp(r, -2.0, 2.0, propagate_nan=tl.PropagateNan.ALL)  # far beyond, bounded all the same
    s = r * r
    p = tl.fma(s, 2.608789442247852e-06, -0.00019811053371238387)
    p = tl.fma(s, tl.fma(s, p, 0.008333087439707043), -0.16666660437744668)
    p = tl.fma(s * r, p, r)
    return (p.to(tl.int32, bitcast=True) ^ odd).to(tl.float32, bitcast=True)


@triton.jit
def _activated(z: tl.tensor, c: tl.tuple, ACTIVATION: tl.constexpr) -> tl.tensor:
    """The activation of z. Whatever is not a number stays so."""
    if ACTIVATION == "rational":
        top = tl.fma(z, tl.fma(z, tl.fma(z, c[3], c[2]), c[1]), c[0])
        return top * _inverse(1.0 + tl.abs(z * tl.fma(z, c[5], c[4])))
    elif ACTIVATION == "sine":
        return _sine(z)
    elif ACTIVATION == "cubic":
        return z * z * (1.0 + z)
    elif ACTIVATION == "tanh":
        return 1.0 - 2.0 * _inverse(1.0 + tl.exp(2.0 * z))
    elif ACTIVATION == "relu":
        return tl.where(z < 0.0, 0.0, z)
    elif ACTIVATION == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "silu")
        return z * _inverse(1.0 + tl.exp(-z))


@triton.jit
def _weights(
    first: tl.tensor, first_bias: tl.tensor, head: tl.tensor, unit: tl.tensor,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, HIDDEN: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Of some hidden units, ``[HIDDEN]`` each: the bias, those of the inputs, those to the outputs."""
    there = unit < WIDTH
    found = (tl.load(first_bias + unit, mask=there, other=0.0).to(tl.float32),)
    if INPUTS == 4 and HIDDEN >= 32:  # four numbers side by side: one load
        w_at = first + unit[:, None] * 4 + tl.arange(0, 4)[None, :]
        w = tl.load(w_at, mask=there[:, None], other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(w, [HIDDEN, 2, 2]))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        found = found + (w0, w1, w2, w3)  # type: ignore[assignment]
    else:
        for i in tl.static_range(INPUTS):
            w = tl.load(first + unit * INPUTS + i, mask=there, other=0.0).to(tl.float32)
            found = found + (w,)  # type: ignore[assignment]
    for o in tl.static_range(OUTPUTS):
        w = tl.load(head + o * WIDTH + unit, mask=there, other=0.0).to(tl.float32)
        found = found + (w,)  # type: ignore[assignment]
    return found


@triton.jit
def _add_four(
    a0: tl.tensor, a1: tl.tensor, a2: tl.tensor, a3: tl.tensor,
    b0: tl.tensor, b1: tl.tensor, b2: tl.tensor, b3: tl.tensor,
) -> tl.tuple:  # fmt: skip
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _through(
    xs: tl.tuple, first: tl.tensor, first_bias: tl.tensor, head: tl.tensor, c: tl.tuple,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Inputs ``[ROWS]`` each through the hidden layer and the head, without its bias."""
    sums = ()
    for _ in tl.static_range(OUTPUTS):
        sums = sums + (tl.zeros([ROWS, HIDDEN], dtype=tl.float32),)  # type: ignore[assignment]
    for start in tl.range(0, WIDTH, HIDDEN, loop_unroll_factor=2):
        unit = start + tl.arange(0, HIDDEN)
        w = _weights(first, first_bias, head, unit, INPUTS, WIDTH, OUTPUTS, HIDDEN)
        z = w[0][None, :]
        for i in tl.static_range(INPUTS):
            z = tl.fma(xs[i][:, None], w[1 + i][None, :], z)
        a = _activated(z, c, ACTIVATION)
        more = ()
        for o in tl.static_range(OUTPUTS):
            more = more + (tl.fma(a, w[1 + INPUTS + o][None, :], sums[o]),)  # type: ignore[assignment]
        sums = more
    if OUTPUTS == 4 and ASSEMBLER:  # one passage through shared memory instead of four
        return tl.reduce(sums, 1, _add_four)
    else:
        totals = ()
        for o in tl.static_range(OUTPUTS):
            totals = totals + (tl.sum(sums[o], 1),)  # type: ignore[assignment]
        return totals


@triton.jit
def _by_lanes(
    x: tl.tensor, first: tl.tensor, first_bias: tl.tensor, head: tl.tensor, head_bias: tl.tensor,
    around: tl.tensor, top: tl.tensor, bottom: tl.tensor, out: tl.tensor, n: tl.tensor, x_n: tl.tensor,
    x_i: tl.tensor, out_n: tl.tensor, out_o: tl.tensor,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr,
    SKIP: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Some rows. Tiles are ``[ROWS, HIDDEN]``, one of sums for each output."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    c = _coefficients(top, bottom, ACTIVATION)
    xs = ()
    for i in tl.static_range(INPUTS):
        here = tl.load(x + row * x_n + i * x_i, mask=inside, other=0.0).to(tl.float32)
        xs = xs + (here,)  # type: ignore[assignment]
    totals = _through(
        xs, first, first_bias, head, c, INPUTS, WIDTH, OUTPUTS, ACTIVATION, ROWS, HIDDEN
    )  # fmt: skip
    for o in tl.static_range(OUTPUTS):
        total = totals[o] + tl.load(head_bias + o).to(tl.float32)
        if SKIP:
            for i in tl.static_range(INPUTS):
                total += xs[i] * tl.load(around + o * INPUTS + i).to(tl.float32)
        tl.store(out + row * out_n + o * out_o, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _by_products(
    x: tl.tensor, first: tl.tensor, first_bias: tl.tensor, head: tl.tensor, head_bias: tl.tensor,
    around: tl.tensor, top: tl.tensor, bottom: tl.tensor, out: tl.tensor, n: tl.tensor, x_n: tl.tensor,
    x_i: tl.tensor, out_n: tl.tensor, out_o: tl.tensor,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr,
    SKIP: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr, SPLITS: tl.constexpr,
    INPUTS_PADDED: tl.constexpr, OUTPUTS_PADDED: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
) -> None:  # fmt: skip
    """Some rows, and a part of the hidden layer. FIRST and SECOND: precisions of the two products."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    i, o = tl.arange(0, INPUTS_PADDED), tl.arange(0, OUTPUTS_PADDED)
    inside, i_ok, o_ok = row < n, i < INPUTS, o < OUTPUTS
    c = _coefficients(top, bottom, ACTIVATION)
    x_at = x + row[:, None] * x_n + i[None, :] * x_i
    xs = tl.load(x_at, mask=inside[:, None] & i_ok[None, :], other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, OUTPUTS_PADDED], dtype=tl.float32)
    PART: tl.constexpr = (WIDTH + SPLITS * HIDDEN - 1) // (SPLITS * HIDDEN) * HIDDEN
    for start in range(0, PART, HIDDEN):
        unit = part * PART + start + tl.arange(0, HIDDEN)
        there = unit < WIDTH
        into = first + unit[None, :] * INPUTS + i[:, None]
        into = tl.load(into, mask=there[None, :] & i_ok[:, None], other=0.0).to(tl.float32)
        z = tl.dot(xs, into, input_precision=FIRST)
        z += tl.load(first_bias + unit, mask=there, other=0.0).to(tl.float32)[None, :]
        a = _activated(z, c, ACTIVATION)
        out_of = head + o[None, :] * WIDTH + unit[:, None]
        out_of = tl.load(out_of, mask=there[:, None] & o_ok[None, :], other=0.0).to(tl.float32)
        sums = tl.dot(a, out_of, sums, input_precision=SECOND)
    if part == 0:
        if SKIP:
            way = around + o[None, :] * INPUTS + i[:, None]
            way = tl.load(way, mask=i_ok[:, None] & o_ok[None, :], other=0.0).to(tl.float32)
            sums = tl.dot(xs, way, sums, input_precision=FIRST)
        sums += tl.load(head_bias + o, mask=o_ok, other=0.0).to(tl.float32)[None, :]
    out_at = out + (part.to(tl.int64) * n + row)[:, None] * out_n + o[None, :] * out_o
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=inside[:, None] & o_ok[None, :])


def _operator(name: str) -> Callable[..., Any]:
    """A decorator: an operator that compilers see through, or, in the interpreter, an opaque one."""
    return (custom_op if INTERPRETED else triton_op)(f"attractor::{name}", mutates_args=())


def wrap_triton(kernel: Any) -> Any:
    """Torch's own, which in torch 2.10 refuses interpreted kernels; torch looks for this name."""
    return kernel if INTERPRETED else torch.library.wrap_triton(kernel)


@_operator("perceptron")
def apply(
    x: Tensor, first: Tensor, first_bias: Tensor, head: Tensor, head_bias: Tensor,
    around: Tensor | None, top: Tensor | None, bottom: Tensor | None, activation: str, precision: str,
) -> Tensor:  # fmt: skip
    """The perceptron of x ``[n, inputs]``, computed in float32; ``[n, outputs]`` in the type of x.

    Args:
        first, first_bias: ``[width, inputs]`` and ``[width]``.
        head, head_bias: ``[outputs, width]`` and ``[outputs]``.
        around: ``[outputs, inputs]``, or None.
        top, bottom: ``[4]`` and ``[2]``, coefficients of a rational activation.
        activation: a name of `ACTIVATIONS`.
        precision: "ieee", "tf32x3" or "tf32"; see `network`.
    """
    out = _like(x, first, first_bias, head)
    (n, inputs), (outputs, width) = x.shape, (int(head.shape[0]), int(head.shape[1]))
    inputs = int(inputs)
    cut = plan(n, width, inputs, outputs, precision)
    if cut.splits > 1:
        out = x.new_empty(cut.splits * n, outputs, dtype=torch.float32)
    given = (first, first_bias, head, head_bias, around, top, bottom)
    tensors = (x, *(head if w is None else w.contiguous() for w in given), out)
    sizes = (inputs, width, outputs, activation, around is not None, cut.rows, cut.hidden)
    blocks = (n + cut.rows - 1) // cut.rows
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():  # Triton takes the current one
        if inputs + outputs <= FEW:
            wrap_triton(_by_lanes)[(blocks,)](
                *tensors, n, *x.stride(), *out.stride(), *sizes, num_warps=cut.warps
            )
            return out
        padded = tuple(max(16, triton.next_power_of_2(k)) for k in (inputs, outputs))
        precisions = ("ieee" if precision == "ieee" else "tf32x3", precision)
        # One stage: weights that wait in shared memory for their turn lie there so that reading them
        # takes up to 32 times as long.
        wrap_triton(_by_products)[(blocks, cut.splits)](
            *tensors, n, *x.stride(), *out.stride(), *sizes, cut.splits, *padded, *precisions,
            num_warps=cut.warps, num_stages=1,
        )  # fmt: skip
    return out if cut.splits == 1 else out.view(cut.splits, n, outputs).sum(0).to(x.dtype)


def _like(x: Tensor, first: Tensor, first_bias: Tensor, head: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], head.shape[0])


apply.register_fake(_like)
