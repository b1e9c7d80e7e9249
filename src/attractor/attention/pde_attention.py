"""The one entrance to PDE attention: checks what it is given, and picks an engine."""

import math
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attractor.attention import fused, masks
from attractor.attention.arguments import Call, check_causality, with_positive_scale
from attractor.attention.dense import dense
from attractor.attention.lengths import free, surely
from attractor.attention.masks import Scope
from attractor.attention.pdes import PDE, Line, take_steps
from attractor.attention.pdes.pde import for_heads
from attractor.attention.precision import autocast_as_sdpa, only_plain_torch, wide
from attractor.attention.stepped import softmax_attention, stepped
from attractor.attention.tiled import tiled

SMALL = 1 << 20  # entries of a map, over all heads, up to which tiles are more trouble than they save


@dataclass(frozen=True)
class Choice:
    """The engine that serves a call, and why it does."""

    method: str
    reason: str


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
        dropout_p: probability that an entry of the first map A(0) is dropped.
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
    call = Call.of(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, pde=pde, steps=steps,
        dt=dt, axis=axis, walls=walls, key_padding=key_padding, documents=documents, window=window,
        renormalise=renormalise, method=method,
    )  # fmt: skip
    check_causality(call)
    if call.empty:
        return query.new_zeros(*call.query.shape[:-1], value.shape[-1])
    if renormalise:
        call = replace(call, value=torch.cat((call.value, torch.ones_like(call.value[..., :1])), -1))
    output = _run(call, _plan(call))
    if renormalise:
        mass = output[..., -1:]
        output = output[..., :-1] / mass.masked_fill(mass == 0, 1.0)
    return output


def explain(
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
) -> Choice:
    """Which engine `pde_attention` takes for these arguments, and why; raises where it would."""
    call = Call.of(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, pde=pde, steps=steps,
        dt=dt, axis=axis, walls=walls, key_padding=key_padding, documents=documents, window=window,
        renormalise=renormalise, method=method,
    )  # fmt: skip
    check_causality(call)
    if renormalise:
        call = replace(call, value=torch.cat((call.value, call.value[..., :1]), -1))
    return _plan(call).choice


@dataclass(frozen=True, eq=False)
class _Plan:
    """An engine, and what was made to choose it.

    Attributes:
        choice: the engine.
        scope: the masks in their simplest form, or None if the choice did not depend on their values.
        within: documents as "fused" takes them, or None.
    """

    choice: Choice
    scope: Scope | None = None
    within: Any = None


def _plan(call: Call) -> _Plan:
    """The quickest engine that can, or the one asked for; raises if that one cannot."""
    method, pde = call.method, call.pde
    only_dense = only_plain_torch()
    if only_dense and method == "auto":
        return _Plan(Choice("dense", only_dense))
    if only_dense and method != "dense":
        raise ValueError(f"method {method!r} cannot do this: {only_dense}; use 'dense'")
    masked = any(x is not None for x in (call.attn_mask, call.key_padding, call.window))
    plain = call.axis == "key" and call.walls == "mask" and not masked and not call.dropout_p
    not_fused, within = _not_fused(call, plain), None
    if call.documents is not None and not not_fused and method in ("auto", "fused"):
        within, not_fused = fused.packed(
            call.query, call.key, call.value, call.documents, pde, call.steps
        )
    why_not = {
        "fused": not_fused,
        "stepped": _not_stepped(call),
        "tiled": _not_tiled(call),
        "dense": "",
    }
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    if method == "auto" and free(queries, keys) and (call.is_causal or call.window is not None):
        alone = call.is_causal and not masked and call.documents is None
        if not alone or not surely(queries == keys):
            reason = "a program exported for all lengths has no moving walls beside other masks"
            return _Plan(Choice("dense", reason))
    if method != "auto":
        scope = None
        if not why_not["stepped"] and (method == "stepped" or why_not[method]):
            why_not["stepped"], scope = _needs_weights(call)
        if why_not[method]:
            able = " or ".join(repr(name) for name, reason in why_not.items() if not reason)
            raise ValueError(f"method {method!r} cannot do this: {why_not[method]}; use {able}")
        return _Plan(Choice(method, "asked for"), scope, within)
    name = type(pde).__name__
    if not not_fused:
        known = name if call.documents is None else f"{name} within documents"
        return _Plan(Choice("fused", f"there are kernels for {known}"), None, within)
    return _without_kernels(call, why_not)


def _without_kernels(call: Call, why_not: dict[str, str]) -> _Plan:
    """The quickest of the other engines that can."""
    name = type(call.pde).__name__
    queries, keys, dim = call.query.shape[-2], call.key.shape[-2], call.value.shape[-1]
    if surely(queries <= dim) and not (call.steps == 0 and not why_not["stepped"]):
        return _Plan(
            Choice("dense", f"{queries} rows of a map are less than values of {dim} dimensions")
        )
    if not why_not["stepped"]:
        weights, scope = _needs_weights(call)
        if weights:
            return _Plan(Choice("tiled", f"{name} is linear, but {weights}"), scope)
        return _Plan(Choice("stepped", f"{name} is linear"), scope)
    if not surely(math.prod(call.query.shape[:-1]) * keys > SMALL):
        return _Plan(Choice("dense", f"{why_not['stepped']}, and the map is small"))
    if not why_not["tiled"]:
        return _Plan(
            Choice("tiled", f"{why_not['stepped']}, and a map of {queries} rows is built in tiles")
        )
    return _Plan(Choice("dense", f"{why_not['tiled']}"))


def _run(call: Call, plan: _Plan) -> Tensor:
    """What that engine gives, ``[*batch, heads, queries, value dim]``."""
    method, axis, walls = plan.choice.method, call.axis, call.walls
    if method == "dense":
        return _dense(call)[0]
    rows = call.query.shape[:-1]
    scope = _scope(call) if plan.scope is None else plan.scope
    query, key, value = four_dimensions(call.query, call.key, call.value)
    query, scale = with_positive_scale(query, call.scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options: Any = {"pde": for_heads(call.pde, rows[:-1]), "steps": call.steps, "dt": call.dt}
    if method == "fused":
        output = fused.attend(query, key, value, call.is_causal, scale, within=plan.within, **options)
    elif axis != "key" or walls != "mask":
        output = _unwalled(query, key, value, scope, scale, axis, walls, **options)
    elif method == "stepped":
        output = stepped(query, key, value, scope, scale, **options)
    else:
        output = tiled(query, key, value, scope, scale, dropout_p=call.dropout_p, **options)
    return output if len(rows) == 3 else output.reshape(*rows, output.shape[-1])


@autocast_as_sdpa
def attention_and_map(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """What `pde_attention` returns for these arguments by method "dense", and the map A(Nt).

    Args:
        query, key, value: as in `pde_attention`, and so are all other arguments, except `renormalise`
            and `method`, which are not taken. There is at least one query and one key.
    """
    call = Call.of(query, key, value, *arguments, **options, renormalise=False, method="dense")
    check_causality(call)
    return _dense(call)


def _dense(call: Call) -> tuple[Tensor, Tensor]:
    return dense(
        call.query, call.key, call.value, dropout_p=call.dropout_p, scale=call.scale, pde=call.pde,
        steps=call.steps, dt=call.dt, axis=call.axis, walls=call.walls, **call.masks,
    )  # fmt: skip


def _scope(call: Call) -> Scope:
    """Who may attend to whom, for tensors of four dimensions."""
    mask, lead = call.attn_mask, call.query.shape[:-2]
    if mask is not None:
        mask = mask[(None,) * (max(len(lead), 2) + 2 - mask.ndim)]
        if len(lead) > 2:
            mask = mask.expand(*lead[:-1], *mask.shape[-3:]).flatten(0, -4)
    return Scope.of(call.query.shape[-2], call.key.shape[-2], **{**call.masks, "attn_mask": mask})


def _not_fused(call: Call, plain: bool) -> str:
    """Why kernels cannot do all of it; empty if they can, but for what is to be seen in documents."""
    if not plain:
        return (
            "kernels know no masks but is_causal and documents, no dropout, and only axis 'key' with "
            "walls 'mask'"
        )
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        return "causal kernels need as many queries as keys"
    if call.documents is not None and not (call.is_causal and call.pde.linear):
        return "kernels know documents only with is_causal and a linear PDE"
    return fused.why_not(call.query, call.value, call.pde, call.steps)


def _not_stepped(call: Call) -> str:
    """Why the values cannot be stepped, but for `_needs_weights`; empty if they can."""
    mask, axis, walls = call.attn_mask, call.axis, call.walls
    if not call.pde.linear:
        return f"{type(call.pde).__name__} is not linear"
    if axis == "both":
        return "axis 'both' steps keys and queries at once"
    rows = mask is not None and mask.shape[-2] > 1
    if axis == "query" and walls == "mask" and (rows or call.window is not None):
        return "on the query axis these walls differ from key to key"
    if (axis == "query" or walls != "mask") and call.dropout_p:
        return f"dropout acts on the map, and axis {axis!r} with walls {walls!r} has no tiles"
    return _unknown(call)


def _needs_weights(call: Call) -> tuple[str, Scope | None]:
    """Why stepped values do not do without the weights of single keys, or "", and the scope if made.

    Looks at the values of a mask, so compiled code takes every mask with rows for a general one.
    """
    if call.axis != "key" or call.walls != "mask":
        return "", None
    if call.dropout_p:
        return "dropout needs the weights themselves", None
    if call.attn_mask is None or call.empty:
        return "", None
    scope = _scope(call)
    if scope.mask is None:
        return "", scope
    if torch.compiler.is_compiling():
        return "compiled code cannot see whether attn_mask puts walls anywhere", scope
    return "attn_mask puts walls anywhere", scope


def _not_tiled(call: Call) -> str:
    """Why the map cannot be made a tile at a time; empty if it can."""
    if call.axis != "key":
        return f"axis {call.axis!r} steps rows into each other"
    if call.walls != "mask":
        return f"walls {call.walls!r} are not those of a tile"
    return _unknown(call)


def _unknown(call: Call) -> str:
    if call.attn_mask is not None and call.attn_mask.requires_grad:
        return "attn_mask wants a gradient"
    if not hasattr(call.pde, "reach"):
        return f"{type(call.pde).__name__} does not say its reach, how many neighbours away a step looks"
    if not is_dataclass(call.pde):
        return f"{type(call.pde).__name__} is not a dataclass, whose tensors can be found"
    return ""


def _unwalled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scope: Scope,
    scale: float,
    axis: str,
    walls: str,
    *,
    pde: PDE,
    steps: int,
    dt: float,
) -> Tensor:
    """Linear PDEs on the query axis, or with walls that ignore the mask."""
    dtype = value.dtype
    periodic = walls == "periodic"
    if axis == "key":
        line = Line(-2, periodic=periodic).adjoint
        value = take_steps(pde, value.to(wide(dtype)), line, steps, dt).to(dtype)
        return softmax_attention(query, key, value, scope, scale)
    output = softmax_attention(query, key, value, scope, scale)
    faces = None
    if walls == "mask" and scope.documents is not None:
        faces = (scope.documents[:, 1:] == scope.documents[:, :-1])[:, None, :, None]
    return take_steps(pde, output.to(wide(dtype)), Line(-2, faces, periodic), steps, dt).to(dtype)


def four_dimensions(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All of them ``[batch, heads, tokens, dim]``, with as many heads of key and value as of query."""
    while query.ndim < 4:
        query, key, value = query[None], key[None], value[None]
    query, key, value = (x.flatten(0, -4) for x in (query, key, value))
    shared = query.shape[1] // max(key.shape[1], 1)
    if shared > 1:
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    return query, key, value
