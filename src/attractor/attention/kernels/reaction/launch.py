"""Operators that launch the kernels, and their gradients. Torch twin: `engines.tiled`.

Tensors are ``[batch, heads, tokens, dim]``. alpha and beta ``[heads]`` are multiplied by the pseudo-time
for which they act. lse and k_mean are constants of `reaction` and `split_reaction`, whose gradients of
query and key include those through the softmax.
"""

from typing import Any

import torch
from torch import Tensor

from attractor.attention.kernels.launch import cdiv, contiguous_rows, power_of_two, strides
from attractor.attention.kernels.operators import custom_operator, wrap_triton
from attractor.attention.kernels.reaction.backward import backward_kernel
from attractor.attention.kernels.reaction.forward import forward_kernel
from attractor.attention.kernels.reaction.key_gradients import key_gradients_kernel
from attractor.attention.kernels.reaction.log_sum_exp import log_sum_exp_kernel
from attractor.attention.kernels.reaction.split import split_backward_kernel, split_forward_kernel

# BLOCK_M, BLOCK_N, warps and stages of each kernel. "forward" has BLOCK_N segments, "backward" four. The
# latter has one stage: with more, Triton 3.6 loses what the iterations before the first hand on.
TILES = {
    "log_sum_exp": (128, 64, 4, 3),
    "forward": (64, 32, 4, 2),
    "backward": (64, 32, 4, 1),
    "key_gradients": (64, 128, 8, 3),
    "split_forward": (128, 64, 8, 3),
    "split_backward": (128, 64, 8, 2),
    "split_key_gradients": (64, 128, 8, 2),
}
# The order of products in "backward" unless the equation is split, see `backward._transposed_product`.
DIM_BY_KEYS = True
PROGRAMS = 264  # programs of a deterministic launch, about what fills a GPU
BUFFERS = 8  # the most copies of key and value gradients that deterministic launches may use


def _options(name: str, q: Tensor, v: Tensor | None, is_causal: bool) -> dict[str, Any]:
    """Return the keyword arguments that all kernels have in common; DV and BLOCK_DV unless v is None."""
    BLOCK_M, BLOCK_N, warps, stages = TILES[name]
    options: dict[str, Any] = {} if v is None else {"DV": int(v.shape[-1]), "BLOCK_DV": _columns(v)}
    precision = "tf32x3" if q.dtype == torch.float32 else "ieee"  # half precision has only one
    return options | {
        "D": int(q.shape[-1]), "BLOCK_D": _columns(q), "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N,
        "CAUSAL": is_causal, "PRECISION": precision, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _columns(x: Tensor) -> int:
    return max(16, power_of_two(int(x.shape[-1])))


def _row_grid(q: Tensor, options: dict[str, Any]) -> tuple[int]:
    return (q.shape[0] * q.shape[1] * cdiv(q.shape[2], options["BLOCK_M"]),)


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """Return the numbers of queries, keys and heads."""
    return q.shape[2], k.shape[2], q.shape[1]


def _pointers(lse: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Return tensors, with `lse` in place of those that are None, which kernels do not read."""
    return [lse if x is None else x for x in tensors]


def _per_head(parts: Tensor, q: Tensor) -> Tensor:
    """Return the sums ``[heads, n]`` of the parts ``[batch * heads * blocks, n]`` of programs."""
    return parts.view(q.shape[0], q.shape[1], -1, parts.shape[-1]).sum((0, 2))


def _empty(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _row_numbers(q: Tensor) -> Tensor:
    """Return an empty float32 tensor ``[batch, heads, queries]``."""
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def _output(q: Tensor, v: Tensor) -> Tensor:
    return v.new_empty(*q.shape[:-1], v.shape[-1])


@custom_operator("reaction_log_sum_exp", transparent=True)
def log_sum_exp(
    q: Tensor, k: Tensor, is_causal: bool, scale: float, mean: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of the scores of each row, and mean keys, which are empty unless `mean`."""
    q, k = contiguous_rows(q), contiguous_rows(k)
    lse, k_mean = _log_sum_exp_like(q, k, is_causal, scale, mean)
    options, means = _options("log_sum_exp", q, None, is_causal), k_mean if mean else q
    wrap_triton(log_sum_exp_kernel)[_row_grid(q, options)](
        q, k, lse, means, scale, *_sizes(q, k), *strides(q), *strides(k), *strides(means), MEAN=mean,
        **options,
    )  # fmt: skip
    return lse, k_mean


def _log_sum_exp_like(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _row_numbers(q), q.new_empty(q.shape if rest[-1] else (0, 0, 0, 0))


log_sum_exp.register_fake(_log_sum_exp_like)


@custom_operator("reaction", transparent=True)
def reaction(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, lse: Tensor, k_mean: Tensor,
    is_causal: bool, scale: float, steps: int,
) -> Tensor:  # fmt: skip
    """Return the output of reaction-diffusion; alpha and beta are multiplied by dt."""
    o = _output(q, v)
    _forward(q, k, v, lse, alpha, beta, lse, o, is_causal, scale, steps, 0)
    return o


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, alpha: Tensor, beta: Tensor, o_interior: Tensor,
    o: Tensor, is_causal: bool, scale: float, steps: int, boundary: int,
) -> None:  # fmt: skip
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    options = _options("forward", q, v, is_causal)
    wrap_triton(forward_kernel)[_row_grid(q, options)](
        q, k, v, lse, alpha.contiguous(), beta.contiguous(), o_interior, o, scale, *_sizes(q, k),
        *strides(q), *strides(k), *strides(v), *strides(o), STEPS=steps, BOUNDARY=boundary, **options,
    )  # fmt: skip


@custom_operator("reaction_backward", transparent=True)
def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, alpha: Tensor, beta: Tensor, lse: Tensor,
    k_mean: Tensor, dq_interior: Tensor | None, excess_interior: Tensor | None, is_causal: bool,
    scale: float, steps: int, coefficients: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, the excess of each row, dk for `key_gradients` to complete, dv and dalpha with dbeta.

    Args:
        dq_interior, excess_interior: Results of `split_backward`. If given, the equation is split, and
            only keys that a causal wall reaches are visited.
        coefficients: Whether to compute dalpha and dbeta ``[heads, 2]``.
        deterministic: Whether to add to dk and dv, which are float32, in the same order every time.
    """
    do, q, k, v, o, k_mean = map(contiguous_rows, (do, q, k, v, o, k_mean))
    options = _options("backward", q, v, is_causal)
    if q.dtype == torch.float32 or max(q.shape[-1], v.shape[-1]) > 64 or steps > 4:
        options["BLOCK_N"] = 16  # these need more registers and shared memory
    pairs, blocks = q.shape[0] * q.shape[1], cdiv(q.shape[2], options["BLOCK_M"])
    launches, launch_blocks = 1, blocks
    buffers: tuple[int, ...] = ()
    if deterministic:
        launch_blocks = max(1, min(BUFFERS, PROGRAMS // pairs))
        launches, buffers = cdiv(blocks, launch_blocks), (launch_blocks,)
    dk, dv = (
        torch.zeros((*x.shape[:2], *buffers, *x.shape[2:]), dtype=torch.float32, device=x.device)
        for x in (k, v)
    )
    dq, excess = _empty(q), _row_numbers(q)
    dcoefficients = lse.new_empty(pairs * launches * launch_blocks if coefficients else 0, 2)
    for n in range(launches):
        wrap_triton(backward_kernel)[(pairs * launch_blocks,)](
            do, q, k, v, o, k_mean, lse, alpha.contiguous(), beta.contiguous(),
            *_pointers(lse, dq_interior, excess_interior), dq, excess, dk, dv,
            dcoefficients, scale, *_sizes(q, k), n * launch_blocks, launch_blocks,
            launches * launch_blocks, *strides(do), *strides(q), *strides(k), *strides(v), *strides(o),
            *strides(k_mean), *strides(dq), STEPS=steps, LAG=max(steps - 2, 0), ORDERED=deterministic,
            BOUNDARY=0 if dq_interior is None else steps, COEFFICIENTS=coefficients,
            DIM_BY_KEYS=DIM_BY_KEYS and dq_interior is None, **options,
        )  # fmt: skip
    if deterministic:
        dk, dv = dk.sum(2), dv.sum(2)
    return dq, excess, dk, dv, _per_head(dcoefficients, q) if coefficients else dcoefficients


def _backward_like(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dk, dv = (_empty(x, torch.float32) for x in (k, v))
    dcoefficients = dk.new_empty(q.shape[1] if rest[-2] else 0, 2)
    return _empty(q), _row_numbers(q), dk, dv, dcoefficients


@custom_operator("reaction_key_gradients", transparent=True)
def key_gradients(
    do: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, beta: Tensor, lse: Tensor,
    delta: Tensor | None, excess: Tensor, dk_visits: Tensor | None, is_causal: bool, scale: float,
    boundary: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dk and, if the equation is split, dv of stepped values.

    Args:
        do, v, delta: None unless the equation is split; v are stepped values.
        dk_visits: Result of `backward`, if it was called.
        boundary: Number of keys before a causal wall that were visited, if the equation is split.
    """
    split = do is not None and v is not None
    dk, dv = _key_gradients_like(do, q, k, v)
    do, q, k, v = map(
        contiguous_rows, (do, q, k, v) if do is not None and v is not None else (q, q, k, k)
    )
    name = "split_key_gradients" if split else "key_gradients"
    options = _options(name, q, v, is_causal)
    grid = (q.shape[0] * q.shape[1] * cdiv(k.shape[2], options["BLOCK_N"]),)
    wrap_triton(key_gradients_kernel)[grid](
        do, q, k, v, lse, *_pointers(lse, delta), excess, beta.contiguous(), *_pointers(lse, dk_visits),
        dk, dv, scale, *_sizes(q, k), *strides(do), *strides(q), *strides(k), *strides(v), SPLIT=split,
        BOUNDARY=boundary, VISITS=dk_visits is not None, **options,
    )  # fmt: skip
    return dk, dv


def _key_gradients_like(
    do: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    return _empty(k), k.new_empty(0) if v is None else _empty(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.is_causal, ctx.scale, ctx.steps = inputs
    ctx.save_for_backward(*tensors, output)


def _gradients(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    q, k, v, alpha, beta, lse, k_mean, o = ctx.saved_tensors
    needed, ordered = ctx.needs_input_grad[3:5], torch.are_deterministic_algorithms_enabled()
    dq, excess, dk, dv, dcoefficients = backward(
        do, q, k, v, o, alpha, beta, lse, k_mean, None, None, ctx.is_causal, ctx.scale, ctx.steps,
        any(needed), ordered,
    )  # fmt: skip
    dk, _ = key_gradients(None, q, k, None, beta, lse, None, excess, dk, ctx.is_causal, ctx.scale, 0)
    dalpha, dbeta = (dcoefficients[:, n] if needed[n] else None for n in range(2))
    return dq, dk, dv.to(v.dtype), dalpha, dbeta, *(None,) * 5


reaction.register_fake(lambda q, k, v, *_: _output(q, v))
reaction.register_autograd(_gradients, setup_context=_save)
backward.register_fake(_backward_like)
key_gradients.register_fake(_key_gradients_like)


@custom_operator("split_reaction", transparent=True)
def split_reaction(
    q: Tensor, k: Tensor, v: Tensor, v_stepped: Tensor, alpha: Tensor, beta: Tensor, lse: Tensor,
    k_mean: Tensor, is_causal: bool, scale: float, steps: int,
) -> Tensor:  # fmt: skip
    """Return the output of split reaction-diffusion.

    Args:
        v: Needed for keys that a causal wall reaches.
        v_stepped: Values after all steps of diffusion.
        alpha: Multiplied by dt.
        beta: Multiplied by dt and the number of steps.
    """
    q, k, v_stepped = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v_stepped)
    boundary, o = steps if is_causal else 0, _output(q, v)
    o_interior = torch.empty_like(o, dtype=torch.float32) if boundary else o
    options = _options("split_forward", q, v, is_causal)
    wrap_triton(split_forward_kernel)[_row_grid(q, options)](
        q, k, v_stepped, lse, beta.contiguous(), o_interior, scale, *_sizes(q, k), *strides(q),
        *strides(k), *strides(v_stepped), *strides(o), BOUNDARY=boundary, **options,
    )  # fmt: skip
    if boundary:
        _forward(q, k, v, lse, alpha, beta, o_interior, o, is_causal, scale, steps, boundary)
    return o


@custom_operator("split_reaction_backward", transparent=True)
def split_backward(
    do: Tensor, q: Tensor, k: Tensor, v_stepped: Tensor, o: Tensor, beta: Tensor, lse: Tensor,
    k_mean: Tensor, is_causal: bool, scale: float, boundary: int, coefficients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, delta, excess and dbeta ``[heads, 1]``, over all keys but the `boundary` last per row.

    If `boundary` is not 0, `backward` must complete dq, which is then float32, and excess.
    """
    do, q, k, v_stepped, o, k_mean = map(contiguous_rows, (do, q, k, v_stepped, o, k_mean))
    dq, delta, excess, _ = _split_backward_like(do, q, boundary, coefficients)
    options = _options("split_backward", q, v_stepped, is_causal)
    grid = _row_grid(q, options)
    dbeta = lse.new_empty(grid[0] if coefficients else 0, 1)
    wrap_triton(split_backward_kernel)[grid](
        do, q, k, v_stepped, o, k_mean, lse, beta.contiguous(), dq, delta, excess, dbeta, scale,
        *_sizes(q, k), *strides(do), *strides(q), *strides(k), *strides(v_stepped), *strides(o),
        *strides(k_mean), *strides(dq), BOUNDARY=boundary, COEFFICIENTS=coefficients, **options,
    )  # fmt: skip
    return dq, delta, excess, _per_head(dbeta, q) if coefficients else dbeta


def _split_backward_like(do: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    boundary, coefficients = rest[-2:]
    delta, excess = _row_numbers(q), _row_numbers(q)
    dq = _empty(q, torch.float32 if boundary else q.dtype)
    return dq, delta, excess, delta.new_empty(q.shape[1] if coefficients else 0, 1)


def _split_gradients(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    q, k, v, v_stepped, alpha, beta, lse, k_mean, o = ctx.saved_tensors
    boundary, needed = ctx.steps if ctx.is_causal else 0, any(ctx.needs_input_grad[4:6])
    options = ctx.is_causal, ctx.scale, boundary
    dq, delta, excess, dbeta = split_backward(
        do, q, k, v_stepped, o, beta, lse, k_mean, *options, needed
    )
    dalpha, dbeta, dk, dv = None, dbeta[:, 0] if needed else None, None, None
    if boundary:
        # This is deterministic: at most two blocks of rows add to a key, and the order of two terms does
        # not affect their sum.
        dq, excess, dk, dv, dcoefficients = backward(
            do, q, k, v, o, alpha, beta, lse, k_mean, dq, excess, *options, needed, False
        )
        dv = dv.to(v.dtype)
        if needed:
            dalpha, dbeta = dcoefficients[:, 0].clone(), dbeta + dcoefficients[:, 1]
    dk, dv_stepped = key_gradients(do, q, k, v_stepped, beta, lse, delta, excess, dk, *options)
    return dq, dk, dv, dv_stepped, dalpha, dbeta, *(None,) * 5


split_reaction.register_fake(lambda q, k, v, *_: _output(q, v))
split_reaction.register_autograd(_split_gradients, setup_context=_save)
split_backward.register_fake(_split_backward_like)
