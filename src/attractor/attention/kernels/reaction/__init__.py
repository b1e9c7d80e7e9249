"""Reaction-diffusion attention in O(T) memory: the map flows through registers while it is stepped.

A row's keys are cut into strands, runs of neighbours that are walked at the same time, one key a turn;
every turn steps the weights of the keys before (`walks`). Rows may attend to an interval of keys: of the
sequence, up to their own (causal), or as given.

Split (the exact reaction first, then diffusion alone), values are stepped instead: one product over keys
far from a causal wall (`blocks`), and a walk for those near it.

A softmax's backward needs the inner product of weights and their gradients; as the map is not linear it
is not that of output and gradient, but near it: the latter is subtracted first, and the rest times the
mean key later. Backward is one walk, whose programs add to the gradients of the same keys and values in
any order (`backward_once`); where torch is asked for deterministic algorithms, two, whose programs own
what they sum (`backward_rows`, `backward_keys`), as split reaction-diffusion always has it.
"""

from typing import Any

import torch
from torch import Tensor

from attractor.attention.engines import softmax
from attractor.attention.kernels import stepped_values
from attractor.attention.kernels.launch import cdiv as parts_of
from attractor.attention.kernels.launch import contiguous_rows as by_rows
from attractor.attention.kernels.launch import power_of_two, strides
from attractor.attention.kernels.operators import operator, wrap_triton
from attractor.attention.kernels.reaction import blocks, once, walks
from attractor.attention.masks import Scope
from attractor.attention.pdes import Diffusion, ReactionDiffusion
from attractor.attention.pdes.evolution import Evolution

STEPS = 8  # the most that are taken: every one holds tiles in registers
DIM = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 64}  # the deepest head, for shared memory

# Rows, strands (or keys), warps and stages of a program; "once" has 4 strands, and as many keys a turn.
# It has one stage: of more, Triton 3.6 loses what the turns before the first hand on.
TILES = {
    "lse": (128, 64, 4, 3),
    "forward": (64, 32, 4, 2),
    "rows": (64, 16, 4, 2),
    "keys": (64, 16, 4, 2),
    "once": (64, 32, 4, 1),
    "rest": (64, 128, 8, 3),
    "far": (128, 64, 8, 3),
    "far_rows": (128, 64, 8, 2),
    "far_keys": (64, 128, 8, 2),
}
TURNS = 32  # of a strand of keys, without its halo, that a program of "keys" owns; fewer if keys are few
PROGRAMS = 264  # about what fills a GPU
ACROSS = True  # products of dim times keys in "once", see `once._returned`
BY_OPERATOR = True  # log-sum-exp and mean key from torch's fused operator, where it has them


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    pde: ReactionDiffusion,
    steps: int,
    dt: float,
    is_causal: bool = False,
    first: Tensor | None = None,
    last: Tensor | None = None,
    open: Tensor | None = None,
) -> Tensor:
    """The output ``[batch, heads, queries, value dim]`` of reaction-diffusion on the key axis.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``, as many heads each.
        pde: with numbers, or tensors of one for all heads or for each.
        is_causal: row i attends to keys up to i.
        first, last: integers ``[batch, queries]``, the interval of keys of every row; with both or none.
        open: for a split `pde` with intervals, where no wall is: bool ``[batch or 1, 1, 1, keys - 1]``.
    """
    heads, device = query.shape[1], query.device
    spread, growth = (_each(c, heads, device) for c in (pde.alpha, pde.beta))
    if first is not None and last is not None:
        first, last = (x.to(torch.int32).contiguous() for x in (first, last))
    wants = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, spread, growth))
    lse, mean = log_sum_exp(query, key, first, last, is_causal, scale, wants)
    rows = lse, mean, first, last, is_causal, scale
    if not pde.split:
        return react(query, key, value, spread * dt, growth * dt, *rows, steps)
    stepped = stepped_values(Evolution(Diffusion(pde.alpha), steps, dt), value, open)
    return react_split(query, key, value, stepped, spread * dt, growth * (dt * steps), *rows, steps)


def usable(query: Tensor, value: Tensor, steps: int) -> bool:
    """Whether the kernels take these, on a device for which `kernels.usable` holds."""
    dim = max(query.shape[-1], value.shape[-1])
    return 1 <= steps <= STEPS and dim <= DIM.get(query.dtype, 0)


def _each(coefficient: float | Tensor, heads: int, device: torch.device) -> Tensor:
    if isinstance(coefficient, Tensor):
        return coefficient.to(device, torch.float32).reshape(-1).expand(heads)
    return torch.full((heads,), coefficient, dtype=torch.float32, device=device)


def log_sum_exp(
    query: Tensor,
    key: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    is_causal: bool,
    scale: float,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    """Of every row's scores ``[batch, heads, queries]``, and if wanted the mean key, as queries."""
    square, fits = query.shape[-2] == key.shape[-2], query.shape[-1] % 8 == 0
    half = query.is_cuda and query.dtype != torch.float32
    if BY_OPERATOR and mean and first is None and half and square and fits:
        with torch.no_grad():
            scope = Scope(query.shape[-2], key.shape[-2], right=0 if is_causal else None)
            found, lse = softmax.attend(query, key, key, scope, scale)
        return lse.float().contiguous(), found
    return row_sums(query.detach(), key.detach(), first, last, is_causal, scale, mean)


# Operators. Tensors are ``[batch, heads, tokens, dim]``; lse, mean, first, last as `attend` makes them.


@operator("reaction_row_sums", transparent=True)
def row_sums(
    query: Tensor, key: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool,
    scale: float, mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-sum-exp of every row's scores, and the mean key; the latter without entries if not wanted."""
    query, key = by_rows(query), by_rows(key)
    lse, found = _row_sums_like(query, key, first, last, is_causal, scale, mean)
    rows, keys, warps, stages = TILES["lse"]
    pairs, (queries, dim) = query.shape[0] * query.shape[1], query.shape[2:]
    like = found if mean else query
    wrap_triton(blocks.sums_kernel)[(pairs * parts_of(queries, rows),)](
        query, key, *_given(first, last, lse), lse, like, scale, queries, key.shape[2], query.shape[1],
        *strides(query), *strides(key), *strides(like), int(dim), rows, keys, _columns(dim), is_causal,
        first is not None, mean, _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return lse, found


def _row_sums_like(
    query: Tensor, key: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool,
    scale: float, mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return lse, query.new_empty(query.shape if mean else (0, 0, 0, 0))


row_sums.register_fake(_row_sums_like)


@operator("reaction", transparent=True)
def react(
    query: Tensor, key: Tensor, value: Tensor, spread: Tensor, growth: Tensor, lse: Tensor,
    mean: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool, scale: float, steps: int,
) -> Tensor:  # fmt: skip
    """The output.

    Args:
        spread, growth: alpha and beta times dt ``[heads]``.
        lse, mean: constants here; gradients of query and key are those through the softmax too.
    """
    query, key, value = by_rows(query), by_rows(key), by_rows(value)
    out = _out_like(query, value)
    _launch_forward(
        lse, query, key, value, lse, spread, growth, first, last, out, is_causal, scale, steps, 0
    )
    return out


def _out_like(query: Tensor, value: Tensor) -> Tensor:
    return value.new_empty(*query.shape[:-1], value.shape[-1])


def _launch_forward(
    onto: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, spread: Tensor,
    growth: Tensor, first: Tensor | None, last: Tensor | None, out: Tensor, is_causal: bool,
    scale: float, steps: int, near: int,
) -> None:  # fmt: skip
    rows, strands, warps, stages = TILES["forward"]
    queries, keys, heads, grid = _grid(query, key, rows)
    wrap_triton(walks.forward_kernel)[grid](
        query, key, value, lse, spread.contiguous(), growth.contiguous(), *_given(first, last, lse),
        onto, out, scale, queries, keys, heads, *strides(query), *strides(key), *strides(value),
        *strides(out), *_sizes(query, value, rows, strands), steps, is_causal, first is not None, near,
        _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip


@operator("reaction_backward_rows", transparent=True)
def backward_rows(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, spread: Tensor,
    growth: Tensor, lse: Tensor, mean: Tensor, first: Tensor | None, last: Tensor | None,
    onto: Tensor | None, onto_rest: Tensor | None, is_causal: bool, scale: float, steps: int,
    slopes: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query; the inner products of weights and gradients; those of spread and growth.

    Args:
        onto, onto_rest: what `far_backward_rows` found: then only keys near a causal wall are left.
    """
    grad, query, key, value, out, mean = map(by_rows, (grad, query, key, value, out, mean))
    of_query, total, parts = (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        torch.empty_like(lse),
        lse.new_empty(0),
    )
    near = 0 if onto is None else steps
    rows, strands, warps, stages = TILES["rows"]
    queries, keys, heads, grid = _grid(query, key, rows)
    if slopes:
        parts = lse.new_empty(grid[0], 2)
    wrap_triton(walks.rows_kernel)[grid](
        grad, query, key, value, out, mean, lse, spread.contiguous(), growth.contiguous(),
        *_given(first, last, lse), *_given(onto, onto_rest, lse), of_query, total, parts, scale,
        queries, keys, heads, *strides(grad), *strides(query), *strides(key), *strides(value),
        *strides(out), *strides(mean), *strides(of_query), *_sizes(query, value, rows, strands), steps,
        max(steps - 2, 0), is_causal, first is not None, near, slopes, _precision(query),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_query, total, _per_head(parts, query, slopes)


def _rows_like(grad: Tensor, query: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    return of_query, lse, lse.new_empty(query.shape[1] if rest[-1] else 0, 2)


@operator("reaction_backward_keys", transparent=True)
def backward_keys(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, spread: Tensor, growth: Tensor,
    lse: Tensor, total: Tensor, first: Tensor | None, last: Tensor | None, onto: Tensor | None,
    is_causal: bool, scale: float, steps: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of key and value, in single precision.

    Args:
        total: the inner products.
        onto: what `far_backward_keys` found for key, to which those near a causal wall are added.
    """
    grad, query, key, value = map(by_rows, (grad, query, key, value))
    of_value = torch.zeros(value.shape, dtype=torch.float32, device=value.device)
    of_key = torch.zeros_like(key, dtype=torch.float32, memory_format=torch.contiguous_format)
    if onto is not None:
        of_key = onto.clone()
    rows, strands, warps, stages = TILES["keys"]
    queries, keys, heads, _ = _grid(query, key, rows)
    pairs = query.shape[0] * heads
    turns = max(steps, min(TURNS, parts_of(keys * pairs, PROGRAMS * strands)))
    turns = min(turns, parts_of(keys, strands))
    wrap_triton(walks.keys_kernel)[(pairs * parts_of(keys, turns * strands),)](
        grad, query, key, value, lse, total, spread.contiguous(), growth.contiguous(),
        *_given(first, last, lse), of_key, of_value, scale, queries, keys, heads, turns, *strides(grad),
        *strides(query), *strides(key), *strides(value), *_sizes(query, value, rows, strands), steps,
        max(steps - 2, 0), is_causal, first is not None, 0 if onto is None else steps, _precision(query),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_key, of_value


def _keys_like(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (key, value))  # type: ignore[return-value]


@operator("reaction_backward_once", transparent=True)
def backward_once(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, spread: Tensor,
    growth: Tensor, lse: Tensor, mean: Tensor, first: Tensor | None, last: Tensor | None,
    is_causal: bool, scale: float, steps: int, slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What `backward_rows` and `backward_keys` find, in one walk; sums over rows come in any order.

    Returns:
        Gradients of query; what is left of rows' inner products, for `backward_rest`; its share of the
        gradients of key, and gradients of value, in single precision; those of spread and growth.
    """
    grad, query, key, value, out, mean = map(by_rows, (grad, query, key, value, out, mean))
    of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    of_key, of_value = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
    rest, parts = torch.empty_like(lse), lse.new_empty(0)
    rows, strands, warps, stages = TILES["once"]
    queries, keys, heads, grid = _grid(query, key, rows)
    if slopes:
        parts = lse.new_empty(grid[0], 2)
    if query.dtype == torch.float32 or max(query.shape[-1], value.shape[-1]) > 64 or steps > 4:
        strands = 16  # half as many keys a turn: these take more registers and shared memory
    wrap_triton(once.once_kernel)[grid](
        grad, query, key, value, out, mean, lse, spread.contiguous(), growth.contiguous(),
        *_given(first, last, lse), of_query, rest, of_key, of_value, parts, scale, queries, keys, heads,
        *strides(grad), *strides(query), *strides(key), *strides(value), *strides(out), *strides(mean),
        *strides(of_query), *_sizes(query, value, rows, strands), steps, max(steps - 2, 0), is_causal,
        first is not None, slopes, ACROSS, _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_query, rest, of_key, of_value, _per_head(parts, query, slopes)


def _once_like(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_query, lse, slopes = _rows_like(grad, query, *rest)
    return of_query, lse, *_keys_like(grad, query, key, value), slopes


@operator("reaction_backward_rest", transparent=True)
def backward_rest(
    query: Tensor, key: Tensor, lse: Tensor, rest: Tensor, found: Tensor, first: Tensor | None,
    last: Tensor | None, is_causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Gradients of key, from what `backward_once` found."""
    query, key = by_rows(query), by_rows(key)
    of_key = key.new_empty(key.shape)
    rows, width, warps, stages = TILES["rest"]
    queries, keys, heads, _ = _grid(query, key, rows)
    dim = int(query.shape[-1])
    wrap_triton(blocks.rest_kernel)[(query.shape[0] * heads * parts_of(keys, width),)](
        query, key, lse, rest, *_given(first, last, lse), found, of_key, scale, queries, keys, heads,
        *strides(query), *strides(key), dim, rows, width, _columns(dim), is_causal, first is not None,
        _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_key


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.is_causal, ctx.scale, ctx.steps = inputs
    ctx.save_for_backward(*tensors, output)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, key, value, spread, growth, lse, mean, first, last, out = ctx.saved_tensors
    options, wanted = (ctx.is_causal, ctx.scale, ctx.steps), any(ctx.needs_input_grad[3:5])
    if torch.are_deterministic_algorithms_enabled():
        of_query, total, slopes = backward_rows(
            grad, query, key, value, out, spread, growth, lse, mean, first, last, None, None, *options,
            wanted,
        )  # fmt: skip
        of_key, of_value = backward_keys(
            grad, query, key, value, spread, growth, lse, total, first, last, None, *options
        )
    else:
        of_query, rest, of_key, of_value, slopes = backward_once(
            grad, query, key, value, out, spread, growth, lse, mean, first, last, *options, wanted
        )
        of_key = backward_rest(query, key, lse, rest, of_key, first, last, *options[:2])
    found = of_query, of_key.to(key.dtype), of_value.to(value.dtype)
    return *found, *_two(ctx.needs_input_grad[3:5], slopes), *(None,) * 7


def _two(needed: tuple[bool, ...], slopes: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return slopes[:, 0] if needed[0] else None, slopes[:, 1] if needed[1] else None


react.register_fake(lambda query, key, value, *_: _out_like(query, value))
react.register_autograd(_gradients, setup_context=_context)
backward_rows.register_fake(_rows_like)
backward_keys.register_fake(_keys_like)
backward_once.register_fake(_once_like)
backward_rest.register_fake(lambda query, key, *_: key.new_empty(key.shape))


@operator("reaction_split", transparent=True)
def react_split(
    query: Tensor, key: Tensor, value: Tensor, stepped: Tensor, spread: Tensor, growth: Tensor,
    lse: Tensor, mean: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool,
    scale: float, steps: int,
) -> Tensor:  # fmt: skip
    """The output where the reaction comes first, all of it.

    Args:
        value: needed near a causal wall only.
        stepped: values after all steps of diffusion.
        spread: alpha times dt ``[heads]``.
        growth: beta times the whole pseudo-time ``[heads]``.
    """
    query, key, value, stepped = map(by_rows, (query, key, value, stepped))
    near = steps if is_causal else 0
    out = _out_like(query, value)
    far = torch.empty_like(out, dtype=torch.float32) if near else out
    rows, width, warps, stages = TILES["far"]
    queries, keys, heads, grid = _grid(query, key, rows)
    wrap_triton(blocks.far_kernel)[grid](
        query, key, stepped, lse, growth.contiguous(), *_given(first, last, lse), far, scale, queries,
        keys, heads, *strides(query), *strides(key), *strides(stepped), *strides(far),
        *_sizes(query, value, rows, width), is_causal, first is not None, near, _precision(query),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if near:
        _launch_forward(
            far, query, key, value, lse, spread, growth, first, last, out, is_causal, scale, steps, near
        )
    return out


@operator("reaction_far_backward_rows", transparent=True)
def far_backward_rows(
    grad: Tensor, query: Tensor, key: Tensor, stepped: Tensor, out: Tensor, growth: Tensor, lse: Tensor,
    mean: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool, scale: float, near: int,
    slopes: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `backward_rows`, for all but the last `near` keys of rows; unfinished if there are some."""
    grad, query, key, stepped, out, mean = map(by_rows, (grad, query, key, stepped, out, mean))
    of_query = torch.empty_like(
        query, dtype=torch.float32 if near else query.dtype, memory_format=torch.contiguous_format
    )
    total, parts = torch.empty_like(lse), lse.new_empty(0)
    rows, width, warps, stages = TILES["far_rows"]
    queries, keys, heads, grid = _grid(query, key, rows)
    if slopes:
        parts = lse.new_empty(grid[0], 1)
    wrap_triton(blocks.far_rows_kernel)[grid](
        grad, query, key, stepped, out, mean, lse, growth.contiguous(), *_given(first, last, lse),
        of_query, total, parts, scale, queries, keys, heads, *strides(grad), *strides(query),
        *strides(key), *strides(stepped), *strides(out), *strides(mean), *strides(of_query),
        *_sizes(query, stepped, rows, width), is_causal, first is not None, near, slopes,
        _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_query, total, _per_head(parts, query, slopes)


def _far_rows_like(grad: Tensor, query: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    near, slopes = rest[-2:]
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    dtype = torch.float32 if near else query.dtype
    of_query = torch.empty_like(query, dtype=dtype, memory_format=torch.contiguous_format)
    return of_query, lse, lse.new_empty(query.shape[1] if slopes else 0, 1)


@operator("reaction_far_backward_keys", transparent=True)
def far_backward_keys(
    grad: Tensor, query: Tensor, key: Tensor, stepped: Tensor, growth: Tensor, lse: Tensor,
    total: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool, scale: float, near: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of key and stepped values; that of key in single precision if some are still to come."""
    grad, query, key, stepped = map(by_rows, (grad, query, key, stepped))
    of_key, of_stepped = _far_keys_like(
        grad, query, key, stepped, growth, lse, total, first, last, is_causal, scale, near
    )
    rows, width, warps, stages = TILES["far_keys"]
    queries, keys, heads, _ = _grid(query, key, rows)
    wrap_triton(blocks.far_keys_kernel)[(query.shape[0] * heads * parts_of(keys, width),)](
        grad, query, key, stepped, lse, total, growth.contiguous(), *_given(first, last, lse), of_key,
        of_stepped, scale, queries, keys, heads, *strides(grad), *strides(query), *strides(key),
        *strides(stepped), *_sizes(query, stepped, rows, width), is_causal, first is not None, near,
        _precision(query), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_key, of_stepped


def _far_keys_like(
    grad: Tensor, query: Tensor, key: Tensor, stepped: Tensor, growth: Tensor, lse: Tensor,
    total: Tensor, first: Tensor | None, last: Tensor | None, is_causal: bool, scale: float, near: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_key = key.new_empty(key.shape, dtype=torch.float32 if near else key.dtype)
    return of_key, stepped.new_empty(stepped.shape)


def _split_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, key, value, stepped, spread, growth, lse, mean, first, last, out = ctx.saved_tensors
    near, wanted = ctx.steps if ctx.is_causal else 0, any(ctx.needs_input_grad[4:6])
    options = ctx.is_causal, ctx.scale
    of_query, total, slopes = far_backward_rows(
        grad, query, key, stepped, out, growth, lse, mean, first, last, *options, near, wanted
    )
    of_spread, of_growth, of_value = None, slopes[:, 0] if wanted else None, None
    if near:
        of_query, total, slopes = backward_rows(
            grad, query, key, value, out, spread, growth, lse, mean, first, last, of_query, total,
            *options, near, wanted,
        )  # fmt: skip
        if of_growth is not None:
            of_spread, of_growth = slopes[:, 0].clone(), of_growth + slopes[:, 1]
    of_key, of_stepped = far_backward_keys(
        grad, query, key, stepped, growth, lse, total, first, last, *options, near
    )
    if near:
        of_key, of_value = backward_keys(
            grad, query, key, value, spread, growth, lse, total, first, last, of_key, *options, near
        )
        of_value = of_value.to(value.dtype)
    found = of_query, of_key.to(key.dtype), of_value, of_stepped
    return *found, of_spread, of_growth, *(None,) * 7


react_split.register_fake(lambda query, key, value, *_: _out_like(query, value))
react_split.register_autograd(_split_gradients, setup_context=_context)
far_backward_rows.register_fake(_far_rows_like)
far_backward_keys.register_fake(_far_keys_like)


def _given(first: Tensor | None, last: Tensor | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors, or something to point to."""
    return other if first is None else first, other if last is None else last


def _grid(query: Tensor, key: Tensor, rows: int) -> tuple[int, int, int, tuple[int]]:
    batch, heads, queries = query.shape[:3]
    return queries, key.shape[2], heads, (batch * heads * parts_of(queries, rows),)


def _columns(dim: int) -> int:
    return max(16, power_of_two(int(dim)))


def _sizes(query: Tensor, value: Tensor, rows: int, width: int) -> tuple[int, ...]:
    dim, depth = int(query.shape[-1]), int(value.shape[-1])
    return dim, depth, rows, width, _columns(dim), _columns(depth)


def _precision(query: Tensor) -> str:
    """How products of single precision are made; halves have only one way."""
    return "tf32x3" if query.dtype == torch.float32 else "ieee"


def _per_head(parts: Tensor, query: Tensor, slopes: bool) -> Tensor:
    """Programs' parts ``[batch * heads * n, m]``, summed up ``[heads, m]``."""
    if not slopes:
        return parts.view(0, 2)
    return parts.view(query.shape[0], query.shape[1], -1, parts.shape[-1]).sum((0, 2))
