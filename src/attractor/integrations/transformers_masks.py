"""The masks of Hugging Face models as arguments of `pde_attention` instead of T x T matrices.

transformers calls `make_mask` once per forward pass, and each attention module passes the result to the
attention function. `attractor.integrations.transformers` registers it.

A *description* of a mask is a dictionary of arguments of `pde_attention`, such as ``{"is_causal":
True}``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import masking_utils  # compiled code cannot import it later

from attractor.attention import kernels
from attractor.integrations.transformers_modules import caller


class BypassError(AttributeError):
    """A model reads the mask of PDE attention itself instead of passing it on."""


@dataclass(eq=False)
class Mask:
    """Which keys a query may attend to, as arguments of `pde_attention`.

    Models pass it on without reading it, as they do with flex_attention's BlockMask. A model that reads
    it computes attention by itself, which PDE attention would not reach, and without a mask that
    attention would see the future. Therefore reading raises an error.

    Attributes:
        shape: Shape of the matrix, ``[batch, 1, queries, keys]``.
        keys: Number of keys that attention uses; a static cache may have more.
        is_causal, key_padding, documents, window: As in `pde_attention`.
        ndim: Number of dimensions of the matrix.
    """

    shape: tuple[int, int, int, int]
    keys: int
    is_causal: bool = False
    key_padding: Tensor | None = None
    documents: Tensor | None = None
    window: tuple[int, int] | None = None
    ndim: int = 4

    def arguments(self) -> dict[str, Any]:
        """Return arguments of `pde_attention` for the first `keys` keys."""
        return {
            "is_causal": self.is_causal,
            "key_padding": self.key_padding,
            "documents": self.documents,
            "window": self.window,
        }

    def to(self, *args: Any, **kwargs: Any) -> "Mask":
        """Return the mask on another device."""
        move = lambda tensor: None if tensor is None else tensor.to(*args, **kwargs)
        return replace(self, key_padding=move(self.key_padding), documents=move(self.documents))

    def contiguous(self) -> "Mask":
        """Return the mask itself; `generate` calls this method."""
        return self

    def __getitem__(self, index: Any) -> NoReturn:
        raise _bypass_error()

    def __getattr__(self, name: str) -> NoReturn:  # of a tensor
        raise _bypass_error()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise _bypass_error()


def _bypass_error() -> BypassError:
    return BypassError(
        f"{caller(nn.Module)} computes its attention itself, outside of transformers' "
        "AttentionInterface, or belongs to a model with modules that did not get its "
        "attn_implementation, so PDE attention does not reach it: "
        "attractor.integrations.transformers.check(model) names them. Where add_pde does not help, use "
        "attn_implementation='eager' or 'sdpa'"
    )


def make_mask(**request: Any) -> Mask | Tensor:
    """Return a `Mask`, or a tensor; a function for transformers' `AttentionMaskInterface`.

    The result is a tensor ``[batch, 1, queries, keys]``, True = attend, for several queries against a
    longer cache, for mask functions of a model's own, and for models that declare that they read it.
    """
    attention_mask = request.get("attention_mask")
    if isinstance(attention_mask, Mask):  # generate() makes the masks of static caches in advance
        return attention_mask
    mask = _mask_or_none(**request)
    if mask is not None:
        return mask
    request.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return masking_utils.sdpa_mask(**request)


def _mask_or_none(
    batch_size: int,
    kv_length: int,
    mask_function: Any = None,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> Mask | None:
    """Return a `Mask` with the effect of transformers' arguments, or None if there is none."""
    mask = _description_of(mask_function)
    may_skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if mask is None or not (may_skip or "documents" in mask):
        return None
    if cache_position is not None:  # in transformers 5.0
        q_length, q_offset = len(cache_position), cache_position[0]
    if any(isinstance(offset, Tensor) for offset in (q_offset, kv_offset)):
        if torch.compiler.is_compiling():
            return None
        q_offset, kv_offset = int(q_offset), int(kv_offset)
    assert q_length is not None
    if all(side < 0 or side >= kv_length - 1 for side in mask.get("window", ())):
        mask.pop("window", None)  # wider than the text

    keys = kv_length
    if mask.get("is_causal") and q_offset == kv_offset and q_length <= kv_length:
        keys = q_length  # the others are the empty end of a static cache
    elif mask == {"is_causal": True} and q_length == 1 and q_offset + 1 == kv_offset + kv_length:
        mask = {}  # the last token attends to all of them
    elif mask and (q_offset != kv_offset or q_length != kv_length or "is_causal" in mask):
        return None

    if attention_mask is not None:
        valid = attention_mask[:, kv_offset : kv_offset + keys].bool().expand(batch_size, -1)
        valid = pad(valid, (0, keys - valid.shape[-1]))
        mask |= _padding(valid, mask, q_length)
    return Mask((batch_size, 1, q_length, kv_length), keys, **mask)


def _padding(valid: Tensor, mask: dict[str, Any], queries: int) -> dict[str, Any]:
    """Return the description of padding beside another mask.

    Kernels compute causal attention within documents, and outputs at padded positions have no meaning
    for a model. Therefore padding becomes documents of its own, unless it lies between valid tokens. The
    values are read once per forward pass of the model; they are not read for a single query, whose
    kernel accepts any valid keys.

    Args:
        valid: bool ``[batch, keys]``, True for valid keys.
        mask: Description of the mask without padding.
        queries: Number of queries.
    """
    compiled = torch.compiler.is_compiling()
    if valid.device.type in kernels.DEVICES and queries == 1:
        return {"key_padding": valid}
    if valid.device.type in kernels.DEVICES and mask.keys() - {"documents"} == {"is_causal"}:
        ids = torch.where(valid, 1, 2 * valid.cumsum(-1).clamp(max=1))  # before, within and after a text
        if "documents" in mask:
            return {"documents": 3 * mask["documents"] + ids}
        if compiled:  # the operator that is called checks the ids
            return {"documents": ids}
        decreases = (ids[:, 1:] < ids[:, :-1]).any()
        all_valid, has_holes = torch.stack((valid.all(), decreases)).tolist()
        if all_valid:
            return {}
        return {"key_padding": valid} if has_holes else {"documents": ids}
    return {} if not compiled and bool(valid.all()) else {"key_padding": valid}


DESCRIPTION = "pde_attention"  # the attribute of a mask function that holds its description


def describe_masks() -> None:
    """Give a description to the mask functions that transformers makes from now on.

    Nothing else about them changes. Their closures hold the same values, but compiled code cannot read
    closures.
    """
    descriptions: dict[str, Callable[..., dict[str, Any] | None]] = {
        "and_masks": _conjunction,
        "packed_sequence_mask_function": lambda ids: {"documents": ids},
        "sliding_window_overlay": lambda size: {"window": (size - 1, -1)},
        "sliding_window_bidirectional_overlay": lambda size: {"window": (size, size)},
    }
    for name, description in descriptions.items():
        factory = getattr(masking_utils, name, None)
        if factory is not None and not hasattr(factory, DESCRIPTION):
            setattr(masking_utils, name, _with_description(factory, description))


def _with_description(factory: Callable[..., Any], description: Callable[..., Any]) -> Any:
    """Return a factory of mask functions that have the description of its arguments."""

    @wraps(factory)
    def make(*args: Any) -> Any:
        function = factory(*args)
        setattr(function, DESCRIPTION, description(*args))
        return function

    setattr(make, DESCRIPTION, None)
    return make


def _conjunction(*functions: Any) -> dict[str, Any] | None:
    """Return the description of several mask functions together, or None if one has none."""
    together: dict[str, Any] = {}
    for function in functions:
        mask = _description_of(function)
        if mask is None or together.keys() & mask.keys():
            return None
        together |= mask
    return together


def _description_of(mask_function: Any) -> dict[str, Any] | None:
    """Return the description of a mask function, or None if it has none."""
    if mask_function is None or mask_function is masking_utils.causal_mask_function:
        return {"is_causal": True}
    if mask_function is masking_utils.bidirectional_mask_function:
        return {}
    mask = getattr(mask_function, DESCRIPTION, None)
    return None if mask is None else dict(mask)
