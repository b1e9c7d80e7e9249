"""The one entrance to PDE attention: checks what it is given, and picks an engine."""

import math
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from attractor.attention import fused, masks
from attractor.attention.arguments import (
    broadcast,
    check,
    for_every_text,
    whole_window,
    with_positive_scale,
    with_rows,
)
from attractor.attention.dense import dense
from attractor.attention.lengths import free, surely
from attractor.attention.masks import Scope
from attractor.attention.pdes import PDE, Line, take_steps
from attractor.attention.precision import autocast_as_sdpa, only_plain_torch, wide
from attractor.attention.stepped import softmax_attention, stepped
from attractor.attention.tiled import tiled
from attractor.core.checks import as_int, check_number

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
    function. A query that may attend to nothing has zero output. Dimensions before the tokens broadcast
    as they do there.

    Args:
        query: ``[*batch, heads, queries, dim]``.
        key: ``[*batch, heads, keys, dim]``.
        value: ``[*batch, heads, keys, value dim]``.
        attn_mask: broadcasts to ``[*batch, heads, queries, keys]``: bool, True = attend, or a float
            bias. False, -inf and a float type's lowest number are walls; any other bias is not.
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
    """
    steps, window = as_int(steps), whole_window(window)
    query, key, value = broadcast(query, key, value, enable_gqa)
    equation = check(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, pde, steps, dt, axis, walls,
        key_padding, documents, window, method,
    )  # fmt: skip
    if scale is not None and not torch.compiler.is_compiling():
        check_number("scale", scale)
    if 0 in (*query.shape[:-1], key.shape[-2]):
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    attn_mask = with_rows(attn_mask)
    key_padding, documents = for_every_text(key_padding, query), for_every_text(documents, query)
    if renormalise:
        value = torch.cat((value, torch.ones_like(value[..., :1])), -1)
    choice, within = _choose(
        query, key, value, attn_mask, dropout_p, is_causal, key_padding, documents, window, equation,
        steps, axis, walls, method,
    )  # fmt: skip
    if axis != "key" and key_padding is not None and query.shape[-2] == key.shape[-2]:
        # Padding is a row as well, and would flow into the rows of real tokens.
        documents = key_padding.long() if documents is None else 2 * documents.long() + key_padding
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(wide(query.dtype))
    if choice.method == "dense":
        output, _ = dense(
            query, key, value, attn_mask, dropout_p, is_causal, scale, pde=equation, steps=steps, dt=dt,
            axis=axis, walls=walls, key_padding=key_padding, documents=documents, window=window,
        )  # fmt: skip
    else:
        rows = query.shape[:-1]
        query, key, value, attn_mask = four_dimensions(query, key, value, attn_mask)
        scope = Scope.of(
            query.shape[-2], key.shape[-2], attn_mask=attn_mask, is_causal=is_causal,
            key_padding=key_padding, documents=documents, window=window,
        )  # fmt: skip
        query, scale = with_positive_scale(query, scale)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        options: Any = {"pde": equation, "steps": steps, "dt": dt}
        if choice.method == "fused":
            output = fused.attend(query, key, value, is_causal, scale, within=within, **options)
        elif axis == "key" and walls == "mask":
            if choice.method == "stepped" and not dropout_p and scope.mask is None:
                output = stepped(query, key, value, scope, scale, **options)
            else:
                output = tiled(query, key, value, scope, scale, dropout_p=dropout_p, **options)
        else:
            output = _unwalled(query, key, value, scope, scale, axis, walls, **options)
        if len(rows) != 3:
            output = output.reshape(*rows, output.shape[-1])
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
    steps, window = as_int(steps), whole_window(window)
    query, key, value = broadcast(query, key, value, enable_gqa)
    equation = check(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, pde, steps, dt, axis, walls,
        key_padding, documents, window, method,
    )  # fmt: skip
    attn_mask = with_rows(attn_mask)
    key_padding, documents = for_every_text(key_padding, query), for_every_text(documents, query)
    if renormalise:
        value = torch.cat((value, value[..., :1]), -1)
    choice, _ = _choose(
        query, key, value, attn_mask, dropout_p, is_causal, key_padding, documents, window, equation,
        steps, axis, walls, method,
    )  # fmt: skip
    nobody = 0 in (*query.shape[:-1], key.shape[-2])
    if nobody or choice.method != "stepped" or axis != "key" or walls != "mask":
        return choice
    if dropout_p:
        return Choice("tiled", f"{choice.reason}, but dropout needs the weights themselves")
    mask = four_dimensions(query, key, value, attn_mask)[3]
    if Scope.of(query.shape[-2], key.shape[-2], attn_mask=mask).mask is not None:
        return Choice("tiled", f"{choice.reason}, but attn_mask puts walls anywhere")
    return choice


def _choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    key_padding: Tensor | None,
    documents: Tensor | None,
    window: masks.Window | None,
    pde: PDE,
    steps: int,
    axis: str,
    walls: str,
    method: str,
) -> tuple[Choice, Any]:
    """The quickest engine that can, or the one asked for; raises if that one cannot.

    With it the documents as "fused" wants them, or None: to know whether it can it has to look at them.
    """
    only_dense = only_plain_torch()
    if only_dense and method == "auto":
        return Choice("dense", only_dense), None
    if only_dense and method != "dense":
        raise ValueError(f"method {method!r} cannot do this: {only_dense}; use 'dense'")
    masked = any(x is not None for x in (attn_mask, key_padding, window))
    plain = axis == "key" and walls == "mask" and not masked and not dropout_p
    not_fused = _not_fused(query, key, value, is_causal, plain, documents, pde, steps)
    within = None
    if documents is not None and not not_fused and method in ("auto", "fused"):
        within, not_fused = fused.packed(query, key, value, documents, pde, steps)
    why_not = {
        "fused": not_fused,
        "stepped": _not_stepped(attn_mask, dropout_p, window, pde, axis, walls),
        "tiled": _not_tiled(attn_mask, pde, axis, walls),
        "dense": "",
    }
    if method == "auto" and free(query.shape[-2], key.shape[-2]) and (is_causal or window is not None):
        alone = is_causal and not masked and documents is None
        if not alone or not surely(query.shape[-2] == key.shape[-2]):
            reason = "a program exported for all lengths has no moving walls beside other masks"
            return Choice("dense", reason), None
    if method != "auto":
        if why_not[method]:
            able = " or ".join(repr(name) for name, reason in why_not.items() if not reason)
            raise ValueError(f"method {method!r} cannot do this: {why_not[method]}; use {able}")
        return Choice(method, "asked for"), within
    name = type(pde).__name__
    if not not_fused:
        known = name if documents is None else f"{name} within documents"
        return Choice("fused", f"there are kernels for {known}"), within
    return _without_kernels(query, key, value, why_not, pde, steps), None


def _without_kernels(
    query: Tensor, key: Tensor, value: Tensor, why_not: dict[str, str], pde: PDE, steps: int
) -> Choice:
    """The quickest of the other engines that can."""
    name = type(pde).__name__
    queries, keys, dim = query.shape[-2], key.shape[-2], value.shape[-1]
    if surely(queries <= dim) and not (steps == 0 and not why_not["stepped"]):
        return Choice("dense", f"{queries} rows of a map are less than values of {dim} dimensions")
    if not why_not["stepped"]:
        return Choice("stepped", f"{name} is linear")
    if not surely(math.prod(query.shape[:-1]) * keys > SMALL):
        return Choice("dense", f"{why_not['stepped']}, and the map is small")
    if not why_not["tiled"]:
        return Choice("tiled", f"{why_not['stepped']}, and a map of {queries} rows is built in tiles")
    return Choice("dense", f"{why_not['tiled']}")


def _not_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    plain: bool,
    documents: Tensor | None,
    pde: PDE,
    steps: int,
) -> str:
    """Why kernels cannot do all of it; empty if they can, but for what is to be seen in documents."""
    if not plain:
        return (
            "kernels know no masks but is_causal and documents, no dropout, and only axis 'key' with "
            "walls 'mask'"
        )
    if is_causal and query.shape[-2] != key.shape[-2]:
        return "causal kernels need as many queries as keys"
    if documents is not None and not (is_causal and pde.linear):
        return "kernels know documents only with is_causal and a linear PDE"
    return fused.why_not(query, value, pde, steps)


def _not_stepped(
    attn_mask: Tensor | None,
    dropout_p: float,
    window: masks.Window | None,
    pde: PDE,
    axis: str,
    walls: str,
) -> str:
    """Why the values cannot be stepped; empty if they can."""
    if not pde.linear:
        return f"{type(pde).__name__} is not linear"
    if axis == "both":
        return "axis 'both' steps keys and queries at once"
    rows = attn_mask is not None and attn_mask.ndim > 1 and attn_mask.shape[-2] > 1
    if axis == "query" and walls == "mask" and (rows or window is not None):
        return "on the query axis these walls differ from key to key"
    if (axis == "query" or walls != "mask") and dropout_p:
        return f"dropout acts on the map, and axis {axis!r} with walls {walls!r} has no tiles"
    return _unknown(attn_mask, pde)


def _not_tiled(attn_mask: Tensor | None, pde: PDE, axis: str, walls: str) -> str:
    """Why the map cannot be made a tile at a time; empty if it can."""
    if axis != "key":
        return f"axis {axis!r} steps rows into each other"
    if walls != "mask":
        return f"walls {walls!r} are not those of a tile"
    return _unknown(attn_mask, pde)


def _unknown(attn_mask: Tensor | None, pde: PDE) -> str:
    if attn_mask is not None and attn_mask.requires_grad:
        return "attn_mask wants a gradient"
    if not hasattr(pde, "reach"):
        return f"{type(pde).__name__} does not say its reach, how many neighbours away a step looks"
    if not is_dataclass(pde):
        return f"{type(pde).__name__} is not a dataclass, whose tensors can be found"
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


def four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """All of them ``[batch, heads, tokens, dim]``, with as many heads of key and value as of query."""
    while query.ndim < 4:
        query, key, value = query[None], key[None], value[None]
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (query.ndim - attn_mask.ndim)]
        if query.ndim > 4:
            attn_mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
    query, key, value = (x.flatten(0, -4) for x in (query, key, value))
    shared = query.shape[1] // max(key.shape[1], 1)
    if shared > 1:
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    return query, key, value, attn_mask
