"""The arguments of PDE attention, validated and brought into one form.

`Call.of` is the only place that checks them: plans and engines rely on what it returns.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from attractor.attention.precision import wide
from attractor.core.checks import as_int, check_beside, check_number, check_tensor, is_number

WALLS = ("mask", "sequence", "periodic")
METHODS = ("auto", "dense", "stepped", "tiled", "fused")
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
                attn_mask = attn_mask.to(wide(query.dtype))
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
    if query.ndim > 4:
        query, key, value = query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4)
    heads, shared = query.shape[1], key.shape[1]
    if shared not in (0, heads):
        key = key.repeat_interleave(heads // shared, dim=1)
        value = value.repeat_interleave(heads // shared, dim=1)
    return query, key, value


def broadcast(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """All three with the same dimensions before their tokens, where they broadcast, as in SDPA.

    With enable_gqa key and value may keep fewer heads than query, both as many. What does not fit is
    handed back as it is, for `check_tensors` to refuse.
    """
    given = query, key, value
    if not all(isinstance(x, Tensor) and x.ndim >= 2 for x in given):
        return given
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return given
    if not enable_gqa:
        shape = _common(*(x.shape[:-2] for x in given))
        return given if shape is None else _expanded(shape, *given)
    ndim = max(3, *(x.ndim for x in given))
    q, k, v = (x[(None,) * (ndim - x.ndim)] for x in given)
    heads, few = q.shape[-3], (k.shape[-3], v.shape[-3])
    shape = _common(*(x.shape[:-3] for x in (q, k, v)))
    if shape is None or any(not n or heads % n for n in few):
        return given
    if few[0] != few[1]:
        k, v = (x.repeat_interleave(heads // n, dim=-3) for x, n in zip((k, v), few))
    (q,), (k, v) = _expanded((*shape, heads), q), _expanded((*shape, k.shape[-3]), k, v)
    return q, k, v


def _common(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """What they broadcast to, or None."""
    ndim, common = max(map(len, shapes)), []
    for sizes in zip(*((*(1,) * (ndim - len(shape)), *shape) for shape in shapes)):
        others = [n for n in sizes if n != 1]
        if any(n != others[0] for n in others):
            return None
        common.append(others[0] if others else 1)
    return tuple(common)


def _expanded(shape: Sequence[int], *given: Tensor) -> tuple[Any, ...]:
    """With these dimensions before the last two; not touched where they are so."""
    shape = tuple(shape)
    return tuple(x if x.shape[:-2] == shape else x.expand(*shape, *x.shape[-2:]) for x in given)


def for_every_text(ids: Tensor | None, query: Tensor) -> Tensor | None:
    """key_padding or documents ``[batch or 1, tokens]``, a row for each text of query."""
    return ids if ids is None or ids.shape[0] == query.shape[0] else ids.expand(query.shape[0], -1)


def with_rows(attn_mask: Tensor | None) -> Tensor | None:
    """A mask of keys alone, or of nothing, as one row ``[1, keys]`` for all queries."""
    return attn_mask if attn_mask is None or attn_mask.ndim > 1 else attn_mask.reshape(1, -1)


def with_positive_scale(query: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """The same scores by a scale above 0: operators multiply what they have masked by it, -inf too."""
    if scale is None or scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0.0, 1.0)


def check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise unless their shapes, types and devices fit together."""
    for name, given in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, given, "[*batch, heads, tokens, dim]", floating=False)
        check_beside(name, given, "query", query)
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.ndim == key.ndim == value.ndim >= 2:
        raise ValueError(f"{shapes}: all three must be [*batch, heads, tokens, dim], or [tokens, dim]")
    if query.shape[-1] != key.shape[-1] or not query.shape[-1]:
        raise ValueError(f"{shapes}: the last dimension of query and key must be the same")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"{shapes}: key and value must have the same number of tokens")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"{shapes}: the dimensions before the heads must be the same, or 1 where they broadcast"
        )
    if query.ndim > 2:
        heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
        if not enable_gqa and not heads == key_heads == value_heads:
            raise ValueError(
                f"{shapes}: the numbers of heads differ; pass enable_gqa=True to share heads, or give "
                "one head to broadcast"
            )
        if heads % max(key_heads, 1) or heads % max(value_heads, 1):
            raise ValueError(f"{shapes}: the numbers of heads of key and value must divide query's")
        if key_heads != value_heads:
            raise ValueError(f"{shapes}: key and value must have the same number of heads")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; "
            "they must be of one floating-point type"
        )


def check_masks(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_padding: Tensor | None,
    documents: Tensor | None,
    window: Any,
) -> None:
    """Raise unless every mask is of the map's shape."""
    shape = (*query.shape[:-1], key.shape[-2])
    for name, given in (
        ("attn_mask", attn_mask),
        ("key_padding", key_padding),
        ("documents", documents),
    ):
        if given is not None:
            check_tensor(name, given, "", floating=False)
            check_beside(name, given, "query", query)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise ValueError(
                f"attn_mask is {attn_mask.dtype}; give bools, True = attend, or floats to add"
            )
        sizes = zip(reversed(attn_mask.shape), reversed(shape))
        if attn_mask.ndim > len(shape) or any(m not in (1, s) for m, s in sizes):
            raise ValueError(f"attn_mask {list(attn_mask.shape)} does not broadcast to {list(shape)}")
    for name, given in (("key_padding", key_padding), ("documents", documents)):
        if given is None:
            continue
        if query.ndim != 4:
            raise ValueError(
                f"{name} needs a query of [batch, heads, tokens, dim], not {list(query.shape)}; "
                "use unsqueeze for the dimensions that are missing"
            )
        texts, keys = query.shape[0], key.shape[-2]
        if given.ndim != 2 or given.shape[0] not in (1, texts) or given.shape[1] != keys:
            raise ValueError(
                f"{name} {list(given.shape)} must be {[texts, keys]}, or {[1, keys]} for all texts"
            )
    if key_padding is not None and key_padding.dtype != torch.bool:
        raise ValueError(f"key_padding is {key_padding.dtype}; give bools, True = a real token")
    if documents is not None:
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"documents needs as many queries as keys, not {query.shape[-2]} and {key.shape[-2]}"
            )
        no_ids = documents.is_floating_point() or documents.is_complex()
        if no_ids or documents.dtype == torch.bool:
            raise ValueError(f"documents is {documents.dtype}; give integer ids")
    if window is not None:
        pair = (window, window) if isinstance(window, int) else window
        sides = isinstance(pair, tuple | list) and len(pair) == 2
        if not sides or any(not isinstance(side, int) or side < -1 for side in pair):
            raise ValueError(
                f"window {window!r} must be a number of tokens or (left, right), each at least 0, "
                "or -1 for no limit"
            )


def check_flag(name: str, value: Any) -> None:
    """Raise unless value is True or False; a number here is an argument in the wrong place."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} = {value!r} must be True or False")


def whole_window(window: Any) -> Any:
    """A window with Python's numbers for numpy's."""
    if isinstance(window, tuple | list):
        return tuple(map(as_int, window))
    return as_int(window)


def check_probability(dropout_p: Any) -> None:
    """Raise unless dropout_p is a number from 0 to 1."""
    if not is_number(dropout_p) or not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p = {dropout_p} is not a probability")


def check_choices(axis: Any, walls: Any, method: Any) -> None:
    """Raise unless each of the three is one of the names that are allowed for it."""
    for name, given, known in (
        ("axis", axis, AXES),
        ("walls", walls, WALLS),
        ("method", method, METHODS),
    ):
        if given not in known:
            raise ValueError(f"{name} {given!r} is not one of {', '.join(known)}")


def check_causality(call: Call) -> None:
    """Raise, or warn, where a flow through the mask would bring the future into a causal map."""
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
