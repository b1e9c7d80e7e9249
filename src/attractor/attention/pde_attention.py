"""PDE attention: arguments become a `Call`, `plan` returns a `Plan` for it, and an engine runs."""

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
    """Compute attention whose map evolves under a PDE between the softmax and the values.

    The first eight arguments are those of `torch.nn.functional.scaled_dot_product_attention` (SDPA),
    with the same order and meaning, except that `is_causal` may be combined with masks. With ``steps=0``
    the result is that of SDPA. The output of a query that may attend to no key is zero, whatever the
    form of the mask. Dimensions before the tokens broadcast as in SDPA.

    Args:
        query: ``[*batch, heads, queries, dim]``.
        key: ``[*batch, heads, keys, dim]``.
        value: ``[*batch, heads, keys, value dim]``.
        attn_mask: A mask that broadcasts to ``[*batch, heads, queries, keys]``: bool, True = attend, or
            a float bias. False is a wall, and so is a bias of -8192 or less (`masks.WALL`), for which
            softmax weights are 0. A mask may therefore contain -inf, -1e9, -1e4 or the lowest number of
            any float type. All other biases, such as ALiBi, are not walls.
        dropout_p: Probability that an entry of the first map A(0) is dropped; the others are divided by
            ``1 - dropout_p``. With the same seed, SDPA drops other entries.
        is_causal: Whether a query attends only to keys up to its own position, both counted from 0.
        scale: Scale of the scores, ``dim ** -0.5`` if None.
        enable_gqa: Whether query may have a multiple of the heads of key and value.
        pde: An equation of `attractor.pdes`, an equation of your own, or a name such as ``"diffusion"``.
        steps: Number of steps that the map takes.
        dt: Size of a step in pseudo-time.
        axis: Axis of the derivatives: ``"key"``, or, unless attention is causal, ``"query"`` or
            ``"both"``.
        walls: Where flow ends. ``"mask"`` means at the edges of the masks. ``"sequence"`` and
            ``"periodic"`` ignore the masks and are for comparisons only, because they let a causal model
            see its future.
        key_padding: ``[batch or 1, keys]`` bool, True for valid tokens.
        documents: ``[batch or 1, tokens]`` integer ids of packed texts. A token attends only to tokens
            of its own text.
        window: (left, right), the numbers of keys before and after its own position that a query
            attends to, -1 for no limit. A single number stands for both.
        renormalise: Whether to divide every row of A(Nt) by its sum, which reaction and dropout change.
        method: ``"dense"`` builds the map, ``"stepped"`` steps the values of a linear PDE instead,
            ``"tiled"`` builds the map tile by tile, and ``"fused"`` uses GPU kernels. ``"auto"`` selects
            the fastest possible method; `explain` returns its choice.

    Returns:
        ``[*batch, heads, queries, value dim]``, in the dtype of query.

    Raises:
        TypeError, ValueError: An argument is invalid, a step is unstable, or the engine that `method`
            names cannot compute the call.
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
    """Return a decorator that gives a function the signature of another one."""

    def decorate(other: Callable[..., R]) -> Callable[P, R]:
        other.__signature__ = signature(function).replace(  # type: ignore[attr-defined]
            return_annotation=signature(other).return_annotation
        )
        return cast(Callable[P, R], other)

    return decorate


@_arguments_of(pde_attention)
def explain(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Plan:
    """Return how and why `pde_attention` computes a call with the same arguments.

    Raises:
        TypeError, ValueError: As in `pde_attention`.

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
    """Return the output ``[*batch, heads, queries, value dim]`` of a call according to its plan."""
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
        arguments = query, key, value, scope, scale, evolution
        if call.axis != "key" or call.walls != "mask":
            output = without_walls(*arguments, call.axis, call.walls)
        elif plan.method == "stepped":
            step = kernels.value_step_function(query, value, evolution)
            dropout_p = call.dropout_p
            output = stepped(*arguments, step=step, operator=plan.operator, dropout_p=dropout_p)
        else:
            output = tiled(*arguments, dropout_p=call.dropout_p)
    if call.query.ndim == 4:
        return output
    return output.reshape(*call.query.shape[:-1], output.shape[-1])


@autocast_as_sdpa
def attention_and_map(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return the result of `pde_attention` with method "dense", and the map A(Nt).

    The arguments are those of `pde_attention` without `renormalise` and `method`. Requires: there is at
    least one query and one key.
    """
    call = Call(query, key, value, *args, **kwargs, renormalise=False, method="dense")
    check_causality(call)
    return _dense(call)


def _dense(call: Call) -> tuple[Tensor, Tensor]:
    return dense(
        call.query, call.key, call.value, dropout_p=call.dropout_p, scale=call.scale,
        pde=call.evolution.pde, steps=call.steps, dt=call.dt, axis=call.axis, walls=call.walls,
        **call.masks,
    )  # fmt: skip
