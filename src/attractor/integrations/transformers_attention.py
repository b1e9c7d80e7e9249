"""The attention function that `register` adds to transformers' `AttentionInterface`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attractor.attention import kernels, masks, pde_attention
from attractor.attention.pde_attention import attention_and_map
from attractor.attention.precision import accumulate_dtype, for_scores
from attractor.integrations.transformers_masks import Mask
from attractor.integrations.transformers_modules import UNSUPPORTED, describe_arguments
from attractor.integrations.transformers_refinement import SETTING, Refinement, Setting, refinement_of


class AttentionFunction:
    """A function for transformers' `AttentionInterface`.

    Args:
        name: The value of ``attn_implementation`` that selects it.
        setting: The PDE for modules that `add_pde` has not changed.
    """

    is_pde_attention = True

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.setting = name, setting
        try:  # missing in transformers 5.0, whose GPT-2 cannot return maps
            from transformers.utils.output_capturing import _active_collector
        except ImportError:
            _active_collector = None
        self.collector: Any = _active_collector

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Mask | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output ``[batch, queries, heads, dim]``, and the map A(Nt) if it is requested.

        Query is ``[batch, heads, queries, dim]``; key and value may have fewer heads. With `softcap` the
        scores of all heads are in memory at once, whatever the method.
        """
        self._check_arguments(kwargs, attention_mask)
        refinement = self._refinement(module)
        setting = self.setting if refinement is None else refinement.setting
        keys = key.shape[-2]
        if isinstance(attention_mask, Mask):
            options: dict[str, Any] = attention_mask.arguments()
            key, value = key[..., : attention_mask.keys, :], value[..., : attention_mask.keys, :]
        elif attention_mask is not None:
            options = {"attn_mask": _check_mask(attention_mask)}
        else:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            key, value, options = _without_mask(query, key, value, bool(causal), sliding_window)
        wants_map = self._wants_map(kwargs)
        if query.shape[-2] == 1 and not (dropout or softcap or wants_map or position_bias is not None):
            source = setting if refinement is None else refinement
            output = _attend_one_query(source, query, key, value, scaling, **options)
            if output is not None:
                return output.transpose(1, 2), None
        if position_bias is not None:
            bias = position_bias[..., : key.shape[-2]]
            options["attn_mask"] = _add_mask(bias, options.get("attn_mask"))
        if softcap:
            scores = _capped_scores(query, key, scaling, softcap)
            options["attn_mask"] = _add_mask(scores, options.get("attn_mask"))
            query, scaling = torch.zeros_like(query), 1.0  # the bias contains all of the scores

        options |= {"dropout_p": dropout, "scale": scaling, "enable_gqa": True, **setting.options()}
        if refinement is not None:
            options["pde"] = refinement()
        if not wants_map:
            output = pde_attention(query, key, value, **options)
            return output.transpose(1, 2).contiguous(), None
        del options["method"]
        output, A = attention_and_map(query, key, value, **options)
        A = pad(A.to(query.dtype), (0, keys - A.shape[-1]))  # the empty end of a static cache
        return output.transpose(1, 2).contiguous(), A

    def _refinement(self, module: nn.Module) -> Any:
        """Return the `Refinement` that `add_pde` put into a module, or None."""
        refinement = refinement_of(module)
        if refinement is None:
            if hasattr(getattr(module, "config", None), SETTING):
                raise ValueError(
                    "this model's config says that add_pde changed it, but its modules have no PDE: "
                    "call attractor.integrations.transformers.register() before the model is made"
                )
            return None
        if type(refinement.setting.equation) is not type(self.setting.equation):
            raise ValueError(
                f"add_pde gave this model {type(refinement.setting.equation).__name__}, but its "
                f"attn_implementation is {self.name!r}; call add_pde again, or set the name that fits"
            )
        return refinement

    def _wants_map(self, kwargs: dict[str, Any]) -> bool:
        """Return whether the caller requests the attention map."""
        if kwargs.get("output_attentions"):
            return True
        # Models such as GPT-2 do not pass the argument on, and collect maps with hooks.
        if self.collector is None or (torch.compiler.is_compiling() and not self.collector.compiling):
            return False
        collected = self.collector.get()
        return collected is not None and any("attentions" in name for name in collected)

    def _check_arguments(self, kwargs: dict[str, Any], attention_mask: Tensor | Mask | None) -> None:
        """Raise if a model passes an argument that PDE attention does not support."""
        unsupported = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
        if unsupported:
            raise ValueError(
                f"{self.name!r} does not know {describe_arguments(unsupported)}, which this model's "
                "attention needs; use another attn_implementation for it"
            )
        bounds = kwargs.get("cu_seq_lens_q")
        if attention_mask is None and bounds is not None and len(bounds) > 2:
            raise ValueError(
                f"{self.name!r} does not read cu_seq_lens: for packed texts give position_ids that "
                "start again at 0 with every text, and no attention_mask"
            )


def _attend_one_query(
    source: Setting | Refinement,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    key_padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: tuple[int, int] | None = None,
) -> Tensor | None:
    """Return the output of `pde_attention` by the kernel for one query; None if it cannot compute it.

    Generation calls this for every layer and token, so checks whose result cannot change between calls
    are cached. The masks are arguments of `pde_attention`.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if is_causal or documents is not None or window is not None or (scaling or 1.0) <= 0:
        return None
    if torch.is_autocast_enabled(query.device.type):
        return None
    setting = source if isinstance(source, Setting) else source.setting
    valid, evolution = key_padding, source.evolution()
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool or attn_mask.shape[1:3] != (1, 1):
            return None
        valid = attn_mask[:, 0, 0]
    if valid is not None and valid.shape[-1] != key.shape[-2]:
        return None
    if not setting.takes_one_query(query, key, value, evolution):
        return None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kernels.attend_row(query, key, value, valid, scale, evolution)


def _without_mask(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, sliding_window: int | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return keys, values and options of `pde_attention` for a call without a mask.

    Args:
        query, key, value: ``[batch, heads, tokens, dim]``.
        causal: Whether the module is causal.
        sliding_window: Number of keys in a window, including the query's own position, as in
            FlashAttention.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if queries == 1:  # the last token against a cache
        first = max(keys - sliding_window, 0) if causal and sliding_window else 0
        return key[..., first:, :], value[..., first:, :], {}
    if causal and queries != keys:
        raise ValueError(
            f"{queries} queries, {keys} keys and no mask: a causal module does not know where its "
            "queries are among the keys. Register a mask function under the name of the attention "
            "function, as register() does, or pass a mask [batch, 1, queries, keys]"
        )
    options: dict[str, Any] = {"is_causal": causal}
    if sliding_window:
        options["window"] = (sliding_window - 1, -1 if causal else sliding_window - 1)
    return key, value, options


def _check_mask(mask: Tensor) -> Tensor:
    """Return the mask; raise unless it has four dimensions."""
    if mask.ndim != 4:
        raise ValueError(
            f"attention_mask {list(mask.shape)} has reached the attention function; it must be "
            "[batch, heads or 1, queries, keys] there"
        )
    return mask


def _add_mask(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return a bias and a mask as one bias with -inf for walls, which sums of large numbers may lose."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -torch.inf)
    walls = masks.walls_of_bias(mask)
    return (bias + mask.masked_fill(walls, 0.0)).masked_fill(walls, -torch.inf)


def _capped_scores(query: Tensor, key: Tensor, scale: float | None, softcap: float) -> Tensor:
    """Return scores ``[batch, heads, queries, keys]`` limited to +-softcap by tanh, as in Gemma 2."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    with torch.autocast(query.device.type, enabled=False):
        query, key = for_scores(query, key)
        scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    return softcap * torch.tanh(scores.to(accumulate_dtype(scores.dtype)) / softcap)
