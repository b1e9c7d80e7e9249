"""The masks of Hugging Face models in words, as `pde_attention` takes them, instead of T x T matrices.

transformers calls `make_mask` once for a forward pass, and each of its attention modules hands what it
returns to the attention function. Of use there only: `attractor.integrations.transformers` registers it.
"""

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

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
    from transformers.masking_utils import sdpa_mask

    given = request.get("attention_mask")
    if isinstance(given, Mask):  # generate() makes the masks of static caches in advance
        return given
    mask = _in_words(**request)
    if mask is not None:
        return mask
    request.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(**request)


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

    padding = attention_mask
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + keys].bool().expand(batch_size, -1)
        padding = pad(padding, (0, keys - padding.shape[-1]))
        if not torch.compiler.is_compiling() and bool(padding.all()):
            padding = None
    return Mask((batch_size, 1, q_length, kv_length), keys, key_padding=padding, **said)


def _said(mask_function: Any) -> dict[str, Any] | None:
    """What a mask function of transformers says, in `pde_attention`'s words; None for any other."""
    from transformers import masking_utils

    if mask_function is None or mask_function is masking_utils.causal_mask_function:
        return {"is_causal": True}
    if mask_function is masking_utils.bidirectional_mask_function:
        return {}
    if torch.compiler.is_compiling():  # which does not look into closures
        return None
    closure = getattr(mask_function, "__closure__", None)
    if not closure or mask_function.__module__ != masking_utils.__name__:
        return None
    inside = dict(zip(mask_function.__code__.co_freevars, (cell.cell_contents for cell in closure)))
    match mask_function.__qualname__.split(".")[0], *inside.items():
        case "and_masks", ("mask_functions", functions):
            said: dict[str, Any] = {}
            for part in map(_said, functions):
                if part is None or said.keys() & part.keys():
                    return None
                said |= part
            return said
        case "sliding_window_overlay", ("sliding_window", size):
            return {"window": (size - 1, -1)}
        case "sliding_window_bidirectional_overlay", ("sliding_window", size):
            return {"window": (size, size)}
        case "packed_sequence_mask_function", ("packed_sequence_mask", documents):
            return {"documents": documents}
    return None
