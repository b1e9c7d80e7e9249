"""The arguments of PDE attention, validated and normalised.

Only `Call` checks them; plans and engines rely on these checks.
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
    """Cast query, key and value under autocast as SDPA does, and disable autocast inside."""

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
    """Cast floating-point tensors; return anything else unchanged, so that `Call` rejects it."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


@dataclass(eq=False)
class Call:
    """The arguments of `pde_attention`, validated, in the form that plans and engines require.

    The constructor has the arguments of `pde_attention`. The attributes do not change afterwards.

    Attributes:
        query, key, value: Tensors with equal dimensions before the tokens, except that key and value may
            have fewer heads.
        attn_mask: ``[..., queries or 1, keys or 1]``, bool or a bias in at least float32; or None.
        evolution: The equation, the number of its steps and their size.
        key_padding: ``[batch, keys]`` bool, or None.
        documents: ``[batch, tokens]`` ids, or None. On axes other than "key", padding is a document of
            its own, so that its rows do not flow into rows of valid tokens.

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
        """Check all masks; masks get two dimensions, biases at least float32, ids one row per text."""
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
        """All masks, as arguments of `masks.allowed`."""
        return {
            "attn_mask": self.attn_mask,
            "is_causal": self.is_causal,
            "key_padding": self.key_padding,
            "documents": self.documents,
            "window": self.window,
        }

    @property
    def has_masks(self) -> bool:
        """Whether there are masks other than causality and documents."""
        return not (self.attn_mask is None and self.key_padding is None and self.window is None)

    @property
    def empty(self) -> bool:
        """Whether there is no query, no key, no head or no text."""
        return 0 in self.query.shape[:-1] or not self.key.shape[-2]

    def scope(self) -> Scope:
        """Return the scope of all masks, for tensors with four dimensions."""
        mask, lead = self.attn_mask, self.query.shape[:-2]
        if mask is not None:
            mask = mask[(None,) * (max(len(lead), 2) + 2 - mask.ndim)]
            if len(lead) > 2:
                mask = mask.expand(*lead[:-1], *mask.shape[-3:]).flatten(0, -4)
        lengths = self.query.shape[-2], self.key.shape[-2]
        return Scope.of(*lengths, **{**self.masks, "attn_mask": mask})

    def valid_keys(self) -> Tensor | None:
        """Return the keys that a single query may attend to, bool ``[batch or 1, keys]``; None for all.

        Requires: query has at most four dimensions, and the only masks are `key_padding` and a bool
        `attn_mask` that is the same for all heads.
        """
        valid, mask, keys = self.key_padding, self.attn_mask, self.key.shape[-2]
        if mask is None:
            return valid
        mask = mask.expand(*mask.shape[:-1], keys).reshape(-1, keys)
        return mask if valid is None else mask & valid

    def flatten_heads(
        self, share_heads: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, float, Evolution]:
        """Return query, key, value, scale and evolution for all engines except "dense".

        The tensors are ``[batch, heads, tokens, dim]``, and the scale is positive.

        Args:
            share_heads: Whether key and value keep their number of heads. Otherwise their heads are
                repeated to the number of heads of query.
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
    """Return whether the three tensors are valid and need no change, which is the usual case."""
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
    """Return whether each head of key serves several heads of query, in the same batch."""
    if not query.ndim == key.ndim >= 3 or query.shape[:-3] != key.shape[:-3]:
        return False
    heads, key_heads = query.shape[-3], key.shape[-3]
    return key_heads > 0 and heads % key_heads == 0


def four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, share_heads: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three as ``[batch, heads, tokens, dim]``, with equal heads unless `share_heads`."""
    while query.ndim < 4:
        query, key, value = query[None], key[None], value[None]
    # Compiled code always flattens. Dynamo (torch 2.13) assumes that an input of torch.func.grad needs
    # no gradient until an operation returns it, and would otherwise omit an engine's backward.
    if query.ndim > 4 or torch.compiler.is_compiling():
        query, key, value = query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4)
    heads, key_heads = query.shape[1], key.shape[1]
    if key_heads not in (0, heads) and not share_heads:
        key = key.repeat_interleave(heads // key_heads, dim=1)
        value = value.repeat_interleave(heads // key_heads, dim=1)
    return query, key, value


def check_causality(call: Call) -> None:
    """Raise or warn if flow through the mask lets a causal model see its future."""
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
            "ones, so a language model sees the tokens that it predicts. Use walls='mask' except for "
            "comparisons.",
            stacklevel=4,
        )
