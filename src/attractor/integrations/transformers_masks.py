"""The masks of Hugging Face models in words, as `pde_attention` takes them, instead of T x T matrices.

transformers calls `make_mask` once for a forward pass, and each of its attention modules hands what it
returns to the attention function. Of use there only: `attractor.integrations.transformers` registers it.
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
    """A model reads the mask that was made for PDE attention, instead of handing it on."""


@dataclass(eq=False)
class Mask:
    """Who may attend to whom, in words instead of a T x T matrix, on its way through a model.

    Models hand it on unread, as they do with flex_attention's BlockMask. One that reads it does its own
    attention, which PDE attention would not reach, and where a missing mask means seeing the future:
    so reading raises.
    """

    shape: tuple[int, int, int, int]
    keys: int
    is_causal: bool = False
    key_padding: Tensor | None = None
    documents: Tensor | None = None
    window: tuple[int, int] | None = None
    ndim: int = 4

    def where(self) -> dict[str, Any]:
        """As arguments of `pde_attention`, for the first `keys` keys."""
        return {
            "is_causal": self.is_causal,
            "key_padding": self.key_padding,
            "documents": self.documents,
            "window": self.window,
        }

    def to(self, *args: Any, **kwargs: Any) -> "Mask":
        """On another device."""
        move = lambda tensor: None if tensor is None else tensor.to(*args, **kwargs)
        return replace(self, key_padding=move(self.key_padding), documents=move(self.documents))

    def contiguous(self) -> "Mask":
        """Itself; `generate` asks for it."""
        return self

    def __getitem__(self, index: Any) -> NoReturn:
        raise _bypassed()

    def __getattr__(self, name: str) -> NoReturn:  # of a tensor
        raise _bypassed()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise _bypassed()


def _bypassed() -> BypassError:
    return BypassError(
        f"{caller(nn.Module)} computes its attention itself, outside of transformers' "
        "AttentionInterface, or belongs to a model with modules that did not get its "
        "attn_implementation, so PDE attention does not reach it: "
        "attractor.integrations.transformers.check(model) names them. Where add_pde does not help, use "
        "attn_implementation='eager' or 'sdpa'"
    )


def make_mask(**request: Any) -> Mask | Tensor:
    """A function for transformers' AttentionMaskInterface: a `Mask`, or a tensor where that must be.

    A tensor ``[batch, 1, queries, keys]``, True = attend, is made for several queries against a longer
    cache, for masks of a model's own making, and where a model says that it reads the mask.
    """
    given = request.get("attention_mask")
    if isinstance(given, Mask):  # generate() makes the masks of static caches in advance
        return given
    mask = _in_words(**request)
    if mask is not None:
        return mask
    request.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return masking_utils.sdpa_mask(**request)


def _in_words(
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
    """The mask as a `Mask`, if that is possible."""
    said = _said(mask_function)
    if said is None or not (allow_is_causal_skip or allow_is_bidirectional_skip or "documents" in said):
        return None
    if cache_position is not None:  # in transformers 5.0
        q_length, q_offset = len(cache_position), cache_position[0]
    if any(isinstance(offset, Tensor) for offset in (q_offset, kv_offset)):
        if torch.compiler.is_compiling():
            return None
        q_offset, kv_offset = int(q_offset), int(kv_offset)
    assert q_length is not None
    if all(side < 0 or side >= kv_length - 1 for side in said.get("window", ())):
        said.pop("window", None)  # wider than the text

    keys = kv_length
    if said.get("is_causal") and q_offset == kv_offset and q_length <= kv_length:
        keys = q_length  # the others are the empty end of a static cache
    elif said == {"is_causal": True} and q_length == 1 and q_offset + 1 == kv_offset + kv_length:
        said = {}  # the last token sees them all
    elif said and (q_offset != kv_offset or q_length != kv_length or "is_causal" in said):
        return None

    if attention_mask is not None:
        valid = attention_mask[:, kv_offset : kv_offset + keys].bool().expand(batch_size, -1)
        valid = pad(valid, (0, keys - valid.shape[-1]))
        said |= _padding(valid, said, q_length)
    return Mask((batch_size, 1, q_length, kv_length), keys, **said)


def _padding(valid: Tensor, said: dict[str, Any], queries: int) -> dict[str, Any]:
    """Return valid keys ``[batch, keys]`` in `pde_attention`'s words, beside those that are `said`.

    Kernels compute causal attention within documents, and outputs at padded positions mean nothing to a
    model, so padding that does not tear a text becomes documents of its own. Values are read once per
    forward pass of the model, and not for a single query, whose kernel takes any valid keys.
    """
    compiled = torch.compiler.is_compiling()
    if valid.device.type in kernels.DEVICES and queries == 1:
        return {"key_padding": valid}
    if valid.device.type in kernels.DEVICES and said.keys() - {"documents"} == {"is_causal"}:
        ids = torch.where(valid, 1, 2 * valid.cumsum(-1).clamp(max=1))  # before, within and after a text
        if "documents" in said:
            return {"documents": 3 * said["documents"] + ids}
        if compiled:  # the operator that is called looks at the ids
            return {"documents": ids}
        back = (ids[:, 1:] < ids[:, :-1]).any()
        whole, torn = torch.stack((valid.all(), back)).tolist()
        return {} if whole else {"key_padding": valid} if torn else {"documents": ids}
    return {} if not compiled and bool(valid.all()) else {"key_padding": valid}


DESCRIPTION = "pde_attention"  # the attribute of a mask function that holds `pde_attention`'s words


def describe_masks() -> None:
    """Let the mask functions that transformers makes from now on say what they mask.

    Nothing else about them changes. Their closures hold the same, but compiled code cannot look into
    closures.
    """
    descriptions: dict[str, Callable[..., dict[str, Any] | None]] = {
        "and_masks": _all_of,
        "packed_sequence_mask_function": lambda ids: {"documents": ids},
        "sliding_window_overlay": lambda size: {"window": (size - 1, -1)},
        "sliding_window_bidirectional_overlay": lambda size: {"window": (size, size)},
    }
    for name, description in descriptions.items():
        factory = getattr(masking_utils, name, None)
        if factory is not None and not hasattr(factory, DESCRIPTION):
            setattr(masking_utils, name, _described(factory, description))


def _described(factory: Callable[..., Any], description: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory whose functions have a description of what they were made of."""

    @wraps(factory)
    def make(*args: Any) -> Any:
        function = factory(*args)
        setattr(function, DESCRIPTION, description(*args))
        return function

    setattr(make, DESCRIPTION, None)
    return make


def _all_of(*functions: Any) -> dict[str, Any] | None:
    """Return what several mask functions say together, or None if one says nothing."""
    together: dict[str, Any] = {}
    for function in functions:
        said = _said(function)
        if said is None or together.keys() & said.keys():
            return None
        together |= said
    return together


def _said(mask_function: Any) -> dict[str, Any] | None:
    """Return what a mask function says, in `pde_attention`'s words; None if it says nothing."""
    if mask_function is None or mask_function is masking_utils.causal_mask_function:
        return {"is_causal": True}
    if mask_function is masking_utils.bidirectional_mask_function:
        return {}
    said = getattr(mask_function, DESCRIPTION, None)
    return None if said is None else dict(said)
