"""Sampling of the next token of a text."""

from typing import Any

import torch
from torch import Tensor

from attractor.core.checks import check_number, check_tensor, check_whole


def sample_token(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Return one token ``[batch, 1]`` per row of logits ``[batch, vocabulary]``.

    The arguments are those of `LanguageModel.generate`.
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        threshold = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def check_sampling(ids: Any, tokens: Any, temperature: Any, top_k: Any) -> None:
    """Raise unless the arguments of `LanguageModel.generate` are valid."""
    check_tensor("ids", ids, "of integers [batch, tokens]", floating=False)
    check_whole("tokens", tokens, 0)
    check_number("temperature", temperature)
    if top_k is not None:
        check_whole("top_k", top_k, 1)
    if ids.ndim != 2 or not ids.shape[1]:
        raise ValueError(f"ids {list(ids.shape)} must be [batch, tokens], with at least one token")
    if temperature < 0:
        raise ValueError(f"temperature = {temperature} must be at least 0")
