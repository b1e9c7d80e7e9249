"""The entrance to PDE attention: arguments become a `Call`, the call gets a `Plan`, an engine runs."""

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from attractor.attention import kernels, masks
from attractor.attention.call import Call, autocast_as_sdpa, check_causality
from attractor.attention.engines import boundary
from attractor.attention.engines.dense import dense
from attractor.attention.engines.stepped import stepped, without_walls
from attractor.attention.engines.tiled import tiled
from attractor.attention.engines.values import Stencil, short_matrix
from attractor.attention.pdes import PDE
from attractor.attention.plan import Plan, plan

P = ParamSpec("P")
R = TypeVar("R")


@autocast_as_sdpa
def pde_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pde: PDE | str,
    steps: int = 4,
    dt: float = 1.0,
    axis: str = "key",
    walls: str = "mask",
    key_padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: masks.Window | None = None,
    renormalise: bool = False,
    method: str = "auto",
) -> Tensor:
    """Attention whose map moves under a PDE between its softmax and its values.

    The first eight arguments are those of `torch.nn.functional.scaled_dot_product_attention`, in its
    order and meaning, except that `is_causal` may be combined with masks; with ``steps=0`` it is that
    function. A query that may attend to nothing, however its mask is written, has zero output.
    Dimensions before the tokens broadcast as they do there.

    Args:
        query: ``[*batch, heads, queries, dim]``.
        key: ``[*batch, heads, keys, dim]``.
        value: ``[*batch, heads, keys, value dim]``.
        attn_mask: broadcasts to ``[*batch, heads, queries, keys]``: bool, True = attend, or a float
            bias. False is a wall, and so is a bias of -8192 or less (`masks.WALL`): softmax does not
            tell such a key from one of -inf, so a mask may be written with -inf, -1e9, -1e4 or the
            lowest number of any float type. All other biases, ALiBi's for one, are not walls.
        dropout_p: probability that an entry of the first map A(0) is dropped; the others are divided by
            ``1 - dropout_p``. Which entries are dropped differs from SDPA's under the same seed.
        is_causal: a query attends to keys up to its own position, both counted from 0.
        scale: of the scores, ``dim ** -0.5`` if None.
        enable_gqa: query may have a multiple of the heads of key and value.
        pde: an equation of `attractor.pdes`, one of your own, or a name such as ``"diffusion"``.
        steps: how many steps the map takes.
        dt: pseudo-time of a step.
        axis: along which neighbours are: ``"key"``, or, for attention that is not causal, ``"query"``
            or ``"both"``.
        walls: where flow ends: ``"mask"``, at the edges of what a query may attend to;
            ``"sequence"`` and ``"periodic"`` ignore the mask and exist for comparison: a causal
            model sees its future through them.
        key_padding: ``[batch or 1, keys]`` bool, True = a real token.
        documents: ``[batch or 1, tokens]`` integer ids of packed texts that do not see each other.
        window: (left, right), how far a query sees on either side, its own position always included,
            -1 for no limit; a single number stands for both.
        renormalise: divides every row of A(Nt) by its sum, which reaction and dropout change.
        method: ``"dense"`` builds the map, ``"stepped"`` steps the values of a linear PDE instead,
            ``"tiled"`` builds any map a tile at a time, ``"fused"`` does it in GPU kernels; ``"auto"``
            takes the quickest that can, and `explain` tells which.

    Returns:
        ``[*batch, heads, queries, value dim]``, in query's dtype.

    Raises:
        TypeError, ValueError: an argument is not what it must be, a step is unstable, or `method` names
            an engine that cannot do this; no other engine takes its place.
    """
    call = Call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, pde=pde, steps=steps,
        dt=dt, axis=axis, walls=walls, key_padding=key_padding, documents=documents, window=window,
        renormalise=renormalise, method=method,
    )  # fmt: skip
    if axis != "key" or walls != "mask":
        check_causality(call)
    if call.empty:
        return query.new_zeros(*call.query.shape[:-1], value.shape[-1])
    if not renormalise:
        return run(call, plan(call))
    call = replace(call, value=torch.cat((call.value, torch.ones_like(call.value[..., :1])), -1))
    output = run(call, plan(call))
    mass = output[..., -1:]
    return output[..., :-1] / mass.masked_fill(mass == 0, 1.0)


def _arguments_of(function: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the parameters of another, for readers, `help` and type checkers."""

    def give(other: Callable[..., R]) -> Callable[P, R]:
        other.__signature__ = signature(function).replace(  # type: ignore[attr-defined]
            return_annotation=signature(other).return_annotation
        )
        return cast(Callable[P, R], other)

    return give


@_arguments_of(pde_attention)
def explain(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Plan:
    """Return how `pde_attention` computes a call with the same arguments, and why.

    Raises:
        TypeError, ValueError: Where `pde_attention` would raise.

    >>> import torch
    >>> query, key, value = torch.randn(3, 2, 8, 100, 64)
    >>> print(explain(query, key, value, is_causal=True, pde="wave"))
    stepped: Wave is linear
      softmax   cpu flash
      boundary  the last 4 keys of a row take the steps, as one function
      not fused: kernels are for cuda, not cpu
    """
    call = Call(query, key, value, *args, **kwargs)
    check_causality(call)
    if call.renormalise:
        call = replace(call, value=torch.cat((call.value, call.value[..., :1]), -1))
    return plan(call)


def run(call: Call, plan: Plan) -> Tensor:
    """Return the output ``[*batch, heads, queries, value dim]`` of a call, computed as planned."""
    if plan.method == "dense":
        return _dense(call)[0]
    if plan.one_query:
        query, key, value, scale, evolution = call.flatten_heads(share_heads=True)
        output = kernels.attend_row(query, key, value, call.valid_keys(), scale, evolution)
        return output.reshape(*call.query.shape[:-1], output.shape[-1])
    fused = plan.method == "fused"
    share_heads = fused and call.evolution.linear and call.evolution.same_for_all_heads
    query, key, value, scale, evolution = call.flatten_heads(share_heads)
    if fused:
        output = kernels.attend(
            query, key, value, call.is_causal, scale, evolution, call.documents, plan.documents,
            plan.operator, call.dropout_p,
        )  # fmt: skip
    elif plan.single and plan.operator is not None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        stencil = Stencil.of(evolution, dtype, query.device)
        matrix = short_matrix(evolution, query.shape[-2], dtype, query.device)
        output = boundary.causal(query, key, value, stencil, plan.operator, scale, matrix)
    else:
        scope = call.scope() if plan.scope is None else plan.scope
        where = query, key, value, scope, scale, evolution
        if call.axis != "key" or call.walls != "mask":
            output = without_walls(*where, call.axis, call.walls)
        elif plan.method == "stepped":
            step = kernels.value_step_function(query, value, evolution)
            dropout_p = call.dropout_p
            output = stepped(*where, step=step, operator=plan.operator, dropout_p=dropout_p)
        else:
            output = tiled(*where, dropout_p=call.dropout_p)
    if call.query.ndim == 4:
        return output
    return output.reshape(*call.query.shape[:-1], output.shape[-1])


@autocast_as_sdpa
def attention_and_map(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return what `pde_attention` returns by method "dense", and the map A(Nt).

    Args:
        query, key, value: As in `pde_attention`, as are all other arguments, except `renormalise` and
            `method`, which are not taken. There is at least one query and one key.
    """
    call = Call(query, key, value, *args, **kwargs, renormalise=False, method="dense")
    check_causality(call)
    return _dense(call)


def _dense(call: Call) -> tuple[Tensor, Tensor]:
    return dense(
        call.query, call.key, call.value, dropout_p=call.dropout_p, scale=call.scale,
        pde=call.evolution.pde,
        steps=call.steps, dt=call.dt, axis=call.axis, walls=call.walls, **call.masks,
    )  # fmt: skip
