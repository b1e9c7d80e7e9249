"""The arguments of PDE attention, validated and brought into one form.

`Call` is the only place that checks them: plans and engines rely on it.
"""

import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
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
    check_masks,
    check_tensors,
    for_every_text,
)
from attractor.common.checks import as_int, check_choice, check_number, is_number

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
    """Return floats in another dtype, and anything else as it is, to be refused by `Call`."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


@dataclass(eq=False)
class Call:
    """The arguments of `pde_attention`, validated, in the form that plans and engines take.

    They are passed as to `pde_attention`, and nothing changes them after `__post_init__`.

    Attributes:
        query, key, value: Tensors with equal dimensions before their tokens, except that key and value
            may have fewer heads.
        attn_mask: ``[..., queries or 1, keys or 1]``, bool or a bias in at least float32; or None.
        evolution: The equation, the number of its steps and their size.
        key_padding: ``[batch, keys]`` bool, or None.
        documents: ``[batch, tokens]`` ids, or None. On other axes than the keys, padding is a document
            of its own, because its rows must not flow into those of valid tokens.

    Raises:
        TypeError, ValueError: The arguments do not fit together.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    _: KW_ONLY
    pde: PDE | str
    steps: int = 4
    dt: float = 1.0
    axis: str = "key"
    walls: str = "mask"
    key_padding: Tensor | None = None
    documents: Tensor | None = None
    window: masks.Window | None = None
    renormalise: bool = False
    method: str = "auto"
    evolution: Evolution = field(init=False)

    def __post_init__(self) -> None:
        if not _is_usual(self.query, self.key, self.value, self.enable_gqa):
            tensors = broadcast(self.query, self.key, self.value, self.enable_gqa)
            check_tensors(*tensors, self.enable_gqa)
            self.query, self.key, self.value = tensors
        lead, keys = self.query.shape[:-2], self.key.shape[-2]
        if self.has_masks or self.documents is not None:
            self._normalise_masks()
        for name, choices in (("axis", AXES), ("walls", WALLS), ("method", METHODS)):
            if getattr(self, name) not in choices:
                check_choice(name, getattr(self, name), choices)
        for name in ("is_causal", "enable_gqa", "renormalise"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise TypeError(f"{name} = {getattr(self, name)!r} must be True or False")
        p = self.dropout_p
        if (type(p) is not float and not is_number(p)) or not 0 <= p <= 1:
            raise ValueError(f"dropout_p = {p} is not a probability")
        if self.scale is not None and not torch.compiler.is_compiling():
            check_number("scale", self.scale)
        self.evolution = Evolution.of(self.pde, self.steps, self.dt, self.axis)
        self.pde, self.steps, self.dt = self.evolution.pde, self.evolution.steps, self.evolution.dt
        if not self.evolution.constant:
            check_heads(self.pde, lead)
        padding = self.key_padding
        if self.axis != "key" and padding is not None and self.query.shape[-2] == keys:
            ids = self.documents
            self.documents = padding.long() if ids is None else 2 * ids.long() + padding

    def _normalise_masks(self) -> None:
        """Check all masks; a mask has rows, a bias is precise, ids have one row per text."""
        window = self.window
        self.window = tuple(map(as_int, window)) if isinstance(window, tuple | list) else as_int(window)
        mask, query = self.attn_mask, self.query
        check_masks(query, self.key, mask, self.key_padding, self.documents, self.window)
        if mask is not None and mask.ndim < 2:
            mask = mask.reshape(1, -1)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(accumulate_dtype(query.dtype))
        self.attn_mask = mask
        self.key_padding = for_every_text(self.key_padding, query)
        self.documents = for_every_text(self.documents, query)

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
    def has_masks(self) -> bool:
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

    def valid_keys(self) -> Tensor | None:
        """Return the keys that a single query may attend to, bool ``[batch or 1, keys]``; None: all.

        Requires: Query has four dimensions or less, and nothing but `key_padding` and a bool `attn_mask`
        that is the same for all heads decides on its keys.
        """
        valid, mask, keys = self.key_padding, self.attn_mask, self.key.shape[-2]
        if mask is None:
            return valid
        mask = mask.expand(*mask.shape[:-1], keys).reshape(-1, keys)
        return mask if valid is None else mask & valid

    def flatten_heads(
        self, share_heads: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, float, Evolution]:
        """Return query, key, value, scale and evolution as engines other than "dense" take them.

        The tensors are ``[batch, heads, tokens, dim]``, and the scale is positive.

        Args:
            share_heads: Leave key and value with their own number of heads. Without it, their heads are
                repeated until there are as many as those of query.
        """
        query, key, value = four_dimensions(self.query, self.key, self.value, share_heads)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        if scale <= 0:  # operators multiply masked scores of -inf by the scale
            query, scale = (-query, -scale) if scale < 0 else (query * 0.0, 1.0)
        evolution = self.evolution
        if not evolution.constant:
            evolution = evolution.with_pde(for_heads(evolution.pde, self.query.shape[:-2]))
        return query, key, value, scale, evolution


def _is_usual(query: Any, key: Any, value: Any, enable_gqa: Any) -> bool:
    """Whether nothing has to be checked or changed about the three tensors, as is usual."""
    return (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and query.ndim >= 2
        and key.shape[:-2] == value.shape[:-2]
        and (query.shape[:-2] == key.shape[:-2] or (enable_gqa is True and _share(query, key)))
        and query.shape[-1] == key.shape[-1] != 0
        and key.shape[-2] == value.shape[-2]
        and query.dtype == key.dtype == value.dtype
        and query.is_floating_point()
        and query.device == key.device == value.device
    )


def _share(query: Tensor, key: Tensor) -> bool:
    """Whether heads of key serve several heads of query each, in the same batch."""
    if not query.ndim == key.ndim >= 3 or query.shape[:-3] != key.shape[:-3]:
        return False
    heads, shared = query.shape[-3], key.shape[-3]
    return shared > 0 and heads % shared == 0


def four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, share_heads: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three as ``[batch, heads, tokens, dim]``; with equal heads, unless `share_heads`."""
    while query.ndim < 4:
        query, key, value = query[None], key[None], value[None]
    # Compiled code always flattens. Dynamo (torch 2.13) takes an input of torch.func.grad for a tensor
    # that needs no gradient until an operation returns it, and would leave out an engine's backward.
    if query.ndim > 4 or torch.compiler.is_compiling():
        query, key, value = query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4)
    heads, shared = query.shape[1], key.shape[1]
    if shared not in (0, heads) and not share_heads:
        key = key.repeat_interleave(heads // shared, dim=1)
        value = value.repeat_interleave(heads // shared, dim=1)
    return query, key, value


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
