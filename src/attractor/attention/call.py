"""The arguments of PDE attention, validated and brought into one form.

`Call.of` is the only place that checks them: plans and engines rely on what it returns.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from attractor.attention import masks
from attractor.attention.masks import Scope
from attractor.attention.pdes import AXES, PDE
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.pdes.pde import check_heads, for_heads
from attractor.attention.precision import accumulate_dtype
from attractor.attention.validation import (
    METHODS,
    WALLS,
    broadcast,
    check_choices,
    check_flag,
    check_masks,
    check_probability,
    check_tensors,
    for_every_text,
    whole_window,
    with_rows,
)
from attractor.core.checks import check_number

_warned: set[str] = set()

Attention = TypeVar("Attention", bound=Callable[..., Any])


def autocast_as_sdpa(attention: Attention) -> Attention:
    """Under autocast, cast query, key and value as SDPA does, and disable autocast inside."""

    @wraps(attention)
    def in_one_dtype(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        kind = query.device.type if isinstance(query, Tensor) else "meta"
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return attention(query, key, value, *args, **kwargs)
        dtype = torch.get_autocast_dtype(kind)
        if query.dtype != torch.float64:
            query, key, value = (_cast(x, dtype) for x in (query, key, value))
        with torch.autocast(kind, enabled=False):
            return attention(query, key, value, *args, **kwargs)

    return cast(Attention, in_one_dtype)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Return floats in another dtype, and anything else as it is, to be refused by `Call.of`."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of `pde_attention` in the form that plans and engines take; `Call.of` makes one.

    Attributes:
        query, key, value: Tensors with equal dimensions before their tokens, except that key and value
            may have fewer heads.
        attn_mask: ``[..., queries or 1, keys or 1]``, bool or a bias in at least float32; or None.
        evolution: The equation, the number of its steps and their size.
        key_padding: ``[batch, keys]`` bool, or None.
        documents: ``[batch, tokens]`` ids, or None. On other axes than the keys, padding is a document
            of its own, because its rows must not flow into those of valid tokens.

    All other attributes are as in `pde_attention`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    evolution: Evolution
    axis: str
    walls: str
    key_padding: Tensor | None
    documents: Tensor | None
    window: masks.Window | None
    renormalise: bool
    method: str

    @classmethod
    def of(
        cls,
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
    ) -> "Call":
        """Return the call with these arguments of `pde_attention`; raise unless they fit together."""
        if not _alike(query, key, value):
            query, key, value = broadcast(query, key, value, enable_gqa)
            check_tensors(query, key, value, enable_gqa)
        if not (attn_mask is None and key_padding is None and documents is None and window is None):
            window = whole_window(window)
            check_masks(query, key, attn_mask, key_padding, documents, window)
            attn_mask = with_rows(attn_mask)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(accumulate_dtype(query.dtype))
            key_padding = for_every_text(key_padding, query)
            documents = for_every_text(documents, query)
        if not (axis in AXES and walls in WALLS and method in METHODS):
            check_choices(axis, walls, method)
        if not (type(is_causal) is bool and type(enable_gqa) is bool and type(renormalise) is bool):
            for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa),
                               ("renormalise", renormalise)):  # fmt: skip
                check_flag(name, flag)
        if type(dropout_p) is not float or not 0 <= dropout_p <= 1:
            check_probability(dropout_p)
        if scale is not None and not torch.compiler.is_compiling():
            check_number("scale", scale)
        evolution = Evolution.of(pde, steps, dt, axis)
        if not evolution.constant:
            check_heads(evolution.pde, query.shape[:-2])
        if axis != "key" and key_padding is not None and query.shape[-2] == key.shape[-2]:
            documents = key_padding.long() if documents is None else 2 * documents.long() + key_padding
        return cls(
            query, key, value, attn_mask, dropout_p, is_causal, scale, evolution, axis, walls,
            key_padding, documents, window, renormalise, method,
        )  # fmt: skip

    @property
    def pde(self) -> PDE:
        """The equation."""
        return self.evolution.pde

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.evolution.steps

    @property
    def dt(self) -> float:
        """The size of a step."""
        return self.evolution.dt

    @property
    def masks(self) -> dict[str, Any]:
        """Everything that decides which keys a query may attend to, as arguments of `masks.allowed`."""
        return {
            "attn_mask": self.attn_mask,
            "is_causal": self.is_causal,
            "key_padding": self.key_padding,
            "documents": self.documents,
            "window": self.window,
        }

    @property
    def masked(self) -> bool:
        """Whether anything but causality and documents decides which keys a query may attend to."""
        return not (self.attn_mask is None and self.key_padding is None and self.window is None)

    @property
    def empty(self) -> bool:
        """Whether there is no query, no key, no head or no text."""
        return 0 in self.query.shape[:-1] or not self.key.shape[-2]

    def scope(self) -> Scope:
        """Return which keys a query may attend to, for tensors of four dimensions."""
        mask, lead = self.attn_mask, self.query.shape[:-2]
        if mask is not None:
            mask = mask[(None,) * (max(len(lead), 2) + 2 - mask.ndim)]
            if len(lead) > 2:
                mask = mask.expand(*lead[:-1], *mask.shape[-3:]).flatten(0, -4)
        lengths = self.query.shape[-2], self.key.shape[-2]
        return Scope.of(*lengths, **{**self.masks, "attn_mask": mask})

    def flattened(self) -> tuple[Tensor, Tensor, Tensor, float, Evolution]:
        """Return query, key, value, scale and evolution as engines other than "dense" take them.

        The tensors are ``[batch, heads, tokens, dim]`` with equal numbers of heads, and the scale is
        positive.
        """
        query, key, value = four_dimensions(self.query, self.key, self.value)
        query, scale = with_positive_scale(query, self.scale)
        evolution = self.evolution
        if not evolution.constant:
            evolution = evolution.with_pde(for_heads(evolution.pde, self.query.shape[:-2]))
        return query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, evolution


def _alike(query: Any, key: Any, value: Any) -> bool:
    """Whether nothing has to be checked or changed about the three tensors, as is usual."""
    return (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and query.ndim >= 2
        and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        and query.shape[-1] == key.shape[-1] != 0
        and key.shape[-2] == value.shape[-2]
        and query.dtype == key.dtype == value.dtype
        and query.is_floating_point()
        and query.device == key.device == value.device
    )


def four_dimensions(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three as ``[batch, heads, tokens, dim]``, with as many heads each as query."""
    while query.ndim < 4:
        query, key, value = query[None], key[None], value[None]
    # Compiled code always flattens. Dynamo (torch 2.13) takes an input of torch.func.grad for a tensor
    # that needs no gradient until an operation returns it, and would leave out an engine's backward.
    if query.ndim > 4 or torch.compiler.is_compiling():
        query, key, value = query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4)
    heads, shared = query.shape[1], key.shape[1]
    if shared not in (0, heads):
        key = key.repeat_interleave(heads // shared, dim=1)
        value = value.repeat_interleave(heads // shared, dim=1)
    return query, key, value


def with_positive_scale(query: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """Return query and scale with the same scores and a positive scale.

    Operators multiply masked scores of -inf by the scale.
    """
    if scale is None or scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0.0, 1.0)


def check_causality(call: Call) -> None:
    """Raise or warn if flow through the mask would bring the future into a causal map."""
    query, key, axis, walls = call.query, call.key, call.axis, call.walls
    if axis == "key" and walls == "mask":
        return
    causal = call.is_causal or masks.sides(call.window)[1] == 0
    if not causal and call.attn_mask is not None and not torch.compiler.is_compiling():
        causal = masks.sees_no_future(
            masks.allowed(query.shape[-2], key.shape[-2], query.device, attn_mask=call.attn_mask)
        )
    if not causal:
        return
    if axis != "key":
        raise ValueError(
            f"axis {axis!r} lets a query's row flow into earlier ones, so a causal model would see its "
            "future; use axis='key'"
        )
    if walls not in _warned and not torch.compiler.is_compiling():
        _warned.add(walls)
        warnings.warn(
            f"walls={walls!r} lets attention flow through the causal mask: every token sees the next "
            "ones, and a language model reads its answers. Use walls='mask' unless that is what you "
            "want to show.",
            stacklevel=4,
        )
