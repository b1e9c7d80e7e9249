"""The taps of a linear PDE: what all its steps make of one key, for every place between walls.

A stepped value is a sum over the keys within reach. Its weights depend only on how many keys there are
before and after its own up to the next wall: nothing passes a wall, so what is behind it does not
matter, and a wall out of reach is not felt. So one small table serves the ends of a sequence, of
documents, and padding:

    taps[head, before, after, reach + offset]      before, after = 0 .. reach, the last for "or more"

One launch makes it, with its derivatives by the coefficients where they are wanted, and one more turns
its gradient into theirs.
"""

# Arguments of kernels have no types that mypy could know.
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._library.triton import is_wrap_triton_enabled, set_wrap_triton_enabled
from torch.library import custom_op, triton_op
from torch.nn import Parameter

from attractor.attention.kernels import INTERPRETED
from attractor.attention.pdes import PDE, AdvectionDiffusion, Diffusion, Line, Wave, take_steps
from attractor.attention.precision import accumulate_dtype, first_derivatives_only

Function = TypeVar("Function", bound=Callable[..., Any])

# Older compilers take what these kernels read for written.
SEEN_THROUGH = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


def operator(name: str, through: bool = SEEN_THROUGH) -> Callable[..., Any]:
    """A decorator: an operator that compilers see `through`, or, in the interpreter, an opaque one."""
    if through and not INTERPRETED:
        return triton_op(f"attractor::{name}", mutates_args=())
    return lambda plain: custom_op(f"attractor::{name}", directly(plain), mutates_args=())


def traced(x: Tensor) -> bool:
    """Whether operators must be called; else what is behind them can be, which is quicker."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, Parameter)


def either(op: Any, plain: Function) -> Function:
    """A function that is `plain` where it can be called, else the operator."""
    direct = directly(plain)

    @wraps(plain)
    def call(x: Tensor, *rest: Any) -> Any:
        return (op if traced(x) else direct)(x, *rest)

    return cast(Function, call)


def directly(plain: Function) -> Function:
    """A function whose kernels are launched as they are: what a trace needs takes a millisecond each."""

    @wraps(plain)
    def call(*given: Any) -> Any:
        with set_wrap_triton_enabled(False):
            return plain(*given)

    return cast(Function, call)


def wrap_triton(kernel: Any) -> Any:
    """Torch's own takes its time to see that it is called `directly`; torch looks for this name."""
    return torch.library.wrap_triton(kernel) if is_wrap_triton_enabled() else kernel


def power_of_two(n: int) -> int:
    """The least that is not below n. Triton's own takes ten times as long, at every launch."""
    return 1 << max(n - 1, 0).bit_length()


def parts_of(n: int, size: int) -> int:
    """How many parts of that size cover n, which may be a symbol."""
    return -(-n // size)


def in_two(number: float) -> tuple[float, float]:
    """A number as a sum of two, for kernels take them in single precision."""
    far = (2.0**29 + 1.0) * number  # rounds away all but the leading 24 bits
    high = far - (far - number)
    return high, number - high


def taps(pde: PDE, steps: int, dt: float, like: Tensor) -> Tensor:
    """The table ``[heads or 1, reach + 1, reach + 1, 2 reach + 1]`` for values like these."""
    given: tuple[float | Tensor, float | Tensor]
    if type(pde) is Diffusion:
        given = pde.alpha, 0.0
    elif type(pde) is AdvectionDiffusion:
        given = pde.alpha, pde.beta
    elif type(pde) is Wave:
        given = pde.c, 0.0
    else:
        return taps_of_any(
            pde, steps, dt, torch.empty((), dtype=accumulate_dtype(like.dtype), device=like.device)
        )
    first, second = (x.to(like.device) if isinstance(x, Tensor) else None for x in given)
    numbers = [0.0 if isinstance(x, Tensor) else float(x) for x in given]
    wanted = [isinstance(x, Tensor) and torch.is_grad_enabled() and x.requires_grad for x in given]
    plain = like.detach() if like.requires_grad else like
    options: tuple[Any, ...] = *numbers, dt, steps, type(pde) is Wave, plain, *wanted
    if traced(like):
        return make_taps(first, second, *options)[0]
    return (
        _Taps.apply(first, second, *options)
        if any(wanted)
        else _directly_made(first, second, *options)[0]
    )


def taps_of_any(pde: PDE, steps: int, dt: float, like: Tensor) -> Tensor:
    """The same for any linear PDE, by steps of torch: a unit for every place between walls."""
    reach = steps * pde.reach
    side = torch.arange(reach + 1, device=like.device)
    face = torch.arange(2 * reach, device=like.device)
    open = (face >= reach - side[:, None, None]) & (face < reach + side[:, None])
    unit = (torch.arange(2 * reach + 1, device=like.device) == reach).to(like.dtype)
    units = unit.expand((reach + 1) ** 2, -1)
    moved = take_steps(pde, units, Line(-1, open.flatten(0, 1)), steps, dt)
    return moved.reshape(-1, reach + 1, reach + 1, 2 * reach + 1)


@triton.jit
def joined(number, rest, TYPE: tl.constexpr):
    """A number that came in two."""
    return tl.full((), 0.0, TYPE) + number + rest


@triton.jit
def _coefficient(x, head, stride, number, rest, GIVEN: tl.constexpr, TYPE: tl.constexpr):
    """That of a head: from memory if GIVEN there, else a number in two."""
    if GIVEN:
        found = tl.load(x + head * stride).to(TYPE)
    else:
        found = joined(number, rest, TYPE)
    return found


@triton.jit
def _changes(u, left, right, PLACES: tl.constexpr):
    """The laplacian and the gradient of ``[PLACES]``, through open faces."""
    place = tl.arange(0, PLACES)
    higher = tl.gather(u, tl.minimum(place + 1, PLACES - 1), 0)
    lower = tl.gather(u, tl.maximum(place - 1, 0), 0)
    laplacian = right * (higher - u) + left * (lower - u)
    return laplacian, 0.5 * (right * (higher + u) - left * (lower + u))


@triton.jit(do_not_specialize=["first_h", "second_h"])
def _make_taps(
    first, second, taps, slopes,
    first_h, second_h, first_number, first_rest, second_number, second_rest,
    dt, dt_rest,
    STEPS: tl.constexpr, WAVE: tl.constexpr, PLACES: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, OF_FIRST: tl.constexpr, OF_SECOND: tl.constexpr,
):  # fmt: skip
    """One place between walls, of one head: a unit takes all steps, and so do its derivatives.

    A step adds ``a laplacian + b gradient`` to the map, or, for a wave, to what is added to it.
    """
    TYPE: tl.constexpr = taps.dtype.element_ty
    head, kind = tl.program_id(0), tl.program_id(1)
    before, after = kind // (STEPS + 1), kind % (STEPS + 1)
    dt = joined(dt, dt_rest, TYPE)
    c = _coefficient(first, head, first_h, first_number, first_rest, FIRST, TYPE)
    b = dt * _coefficient(second, head, second_h, second_number, second_rest, SECOND, TYPE)
    a, by_c = dt * c, dt
    if WAVE:
        a, by_c = dt * c * (dt * c), 2 * dt * (dt * c)
    place = tl.arange(0, PLACES)
    right = ((place >= STEPS - before) & (place < STEPS + after)).to(TYPE)  # of the face after a place
    left = ((place > STEPS - before) & (place <= STEPS + after)).to(TYPE)
    u = (place == STEPS).to(TYPE)
    du, dv, w, dw, dx = u * 0, u * 0, u * 0, u * 0, u * 0
    for _ in tl.static_range(STEPS):
        laplacian, gradient = _changes(u, left, right, PLACES)
        more, by_first, by_second = a * laplacian + b * gradient, u * 0, u * 0
        if OF_FIRST:
            of_laplacian, of_gradient = _changes(du, left, right, PLACES)
            by_first = a * of_laplacian + b * of_gradient + by_c * laplacian
        if OF_SECOND:
            of_laplacian, of_gradient = _changes(dv, left, right, PLACES)
            by_second = a * of_laplacian + b * of_gradient + dt * gradient
        if WAVE:
            more, by_first, by_second = w + more, dw + by_first, dx + by_second
        w, dw, dx = more, by_first, by_second
        u, du, dv = u + w, du + dw, dv + dx
    size = tl.num_programs(0) * tl.num_programs(1) * (2 * STEPS + 1)
    at = (head * tl.num_programs(1) + kind) * (2 * STEPS + 1) + place
    inside = place < 2 * STEPS + 1
    tl.store(taps + at, u, mask=inside)
    if OF_FIRST:
        tl.store(slopes + at, du, mask=inside)
        slopes += size
    if OF_SECOND:
        tl.store(slopes + at, dv, mask=inside)


@triton.jit(do_not_specialize=["heads", "firsts", "seconds"])
def _taps_backward(
    grad, slopes, found, heads, firsts, seconds,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One entry of a coefficient: the gradient times its derivatives, summed over its heads."""
    n = tl.program_id(0)
    found += n
    count = firsts
    if n >= firsts:
        n -= firsts
        count = seconds
        if firsts > 0:
            slopes += heads * SIZE
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    sums = tl.zeros([WIDTH], dtype=grad.dtype.element_ty)
    for head in range(n, heads, count):
        slope = tl.load(slopes + head * SIZE + at, mask=inside, other=0.0)
        sums += tl.load(grad + head * SIZE + at, mask=inside, other=0.0) * slope
    tl.store(found, tl.sum(sums, 0))


def _made(
    first: Tensor | None, second: Tensor | None, first_number: float, second_number: float, dt: float,
    steps: int, wave: bool, like: Tensor, of_first: bool, of_second: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Taps of a PDE, and their derivatives ``[0 .. 2, *shape of taps]`` by the coefficients as wanted.

    Args:
        first: of the laplacian, or the speed of a wave, for every head or for all; None: the number.
        second: likewise of the gradient.
        wave: steps add to a velocity, which starts at 0 and is added to the map.
        like: has the device, and the type of values.
    """
    table, slopes = _made_like(
        first, second, first_number, second_number, dt, steps, wave, like, of_first, of_second
    )
    wrap_triton(_make_taps)[table.shape[0], (steps + 1) ** 2](
        table if first is None else first.contiguous(), table if second is None else second.contiguous(),
        table, slopes, int(_count(first) > 1), int(_count(second) > 1), *in_two(first_number),
        *in_two(second_number), *in_two(dt), steps, wave, power_of_two(2 * steps + 1),
        first is not None, second is not None, of_first, of_second, num_warps=1,
    )  # fmt: skip
    return table, slopes


def _made_like(
    first: Tensor | None, second: Tensor | None, first_number: float, second_number: float, dt: float,
    steps: int, wave: bool, like: Tensor, of_first: bool, of_second: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = max(_count(first), _count(second)), steps + 1, steps + 1, 2 * steps + 1
    table = like.new_empty(shape, dtype=accumulate_dtype(like.dtype))
    return table, table.new_empty(int(of_first) + int(of_second), *shape)


def _count(coefficient: Tensor | None) -> int:
    return 1 if coefficient is None else coefficient.numel()


def _slopes_met(grad: Tensor, slopes: Tensor, firsts: int, seconds: int) -> Tensor:
    """The gradients of so many entries of the first coefficient, and of the second, in one row."""
    found = grad.new_empty(firsts + seconds)
    size = int(slopes[0, 0].numel())
    wrap_triton(_taps_backward)[firsts + seconds,](
        grad.contiguous(), slopes, found, grad.shape[0], firsts, seconds, size,
        power_of_two(size), num_warps=4,
    )  # fmt: skip
    return found


_directly_made, _slopes_directly_met = directly(_made), directly(_slopes_met)
make_taps = operator("make_taps")(_made)
make_taps.register_fake(_made_like)
taps_backward = operator("taps_backward")(_slopes_met)
taps_backward.register_fake(lambda grad, slopes, firsts, seconds: grad.new_empty(firsts + seconds))


def _gradients(
    met: Callable[..., Tensor], grad: Tensor, slopes: Tensor, coefficients: list[Tensor | None]
) -> list[Tensor | None]:
    """Those of both coefficients; None for one that is given as None."""
    counts = [0 if x is None else x.numel() for x in coefficients]
    found = met(grad, slopes, *counts).split(counts)
    return [
        None if x is None else part.view(x.shape).to(x.dtype) for x, part in zip(coefficients, found)
    ]


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    coefficients = [x if wanted else None for x, wanted in zip(inputs[:2], inputs[-2:])]
    ctx.save_for_backward(output[1], *coefficients)
    ctx.mark_non_differentiable(output[1])


def _operator_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    slopes, *coefficients = ctx.saved_tensors
    return *_gradients(taps_backward, grad, slopes, coefficients), *(None,) * 8


make_taps.register_autograd(_operator_backward, setup_context=_context)


class _Taps(torch.autograd.Function):
    """What the operator does, without it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        table, slopes = _directly_made(*inputs)
        ctx.save_for_backward(
            slopes, *(x if wanted else None for x, wanted in zip(inputs[:2], inputs[-2:]))
        )
        return table

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        slopes, *coefficients = ctx.saved_tensors
        return *_gradients(_slopes_directly_met, grad, slopes, coefficients), *(None,) * 8
