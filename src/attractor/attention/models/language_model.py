"""A causal language model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attractor.attention.cache import PDECache
from attractor.attention.models.stack import Embedding, Stack, initialise
from attractor.attention.tracing import is_symbolic
from attractor.common.checks import check_beside, check_input, check_number, check_tensor, check_whole
from attractor.common.modes import evaluation_mode


class LanguageModel(nn.Module):
    """A causal transformer that predicts the next token.

    Input and output embeddings share their weights. The defaults of `dim`, `heads`, `layers` and
    `hidden` are those of the paper's Table 8.

    Args:
        vocabulary: Number of token ids.
        dim, heads, layers, hidden: As in `Stack`.
        max_tokens: Largest number of tokens per text.
        dropout: Dropout probability on the embeddings and the residual branches.
        **options: Options of `Stack` and `PDEAttention`, such as ``pde``, ``steps``, ``learn`` and
            ``norm``.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        dim: int = 256,
        heads: int = 8,
        layers: int = 4,
        hidden: int = 512,
        max_tokens: int = 1024,
        dropout: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.embed = Embedding(vocabulary, dim, max_tokens, dropout)
        self.stack = Stack(dim, heads, layers, hidden, dropout=dropout, causal=True, **options)
        initialise(self)

    def forward(
        self, ids: Tensor, key_padding: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return the logits ``[batch, tokens, vocabulary]`` of the token that follows each token.

        Args:
            ids: Integer token ids ``[batch, tokens]``.
            key_padding: Bool ``[batch, tokens]``, True for valid tokens and False for padding.
            documents: Integer ids ``[batch, tokens]`` of packed texts. A token attends only to tokens of
                its own text.
        """
        return self.logits(self.states(ids, key_padding, documents))

    def states(
        self,
        ids: Tensor,
        key_padding: Tensor | None = None,
        documents: Tensor | None = None,
        caches: Sequence[PDECache] | None = None,
    ) -> Tensor:
        """Return the states ``[batch, tokens, dim]`` from which `logits` predicts.

        Args:
            ids, key_padding, documents: As in `forward`. With caches, of the new tokens only.
            caches: One cache per attention of the stack, with the previous tokens.
        """
        start, prefix_lengths = (len(caches[0]), caches[0].real_tokens) if caches else (0, None)
        if caches and any(len(cache) != start for cache in caches):
            raise ValueError(
                f"caches hold {[len(cache) for cache in caches]} tokens; all must hold the same text"
            )
        x = self.embed(ids, key_padding, start, prefix_lengths)
        return self.stack(x, caches, key_padding=key_padding, documents=documents)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits ``[..., vocabulary]`` of states ``[..., dim]``."""
        weight = self.embed.tokens.weight
        if not is_symbolic(states):
            check_input("states", states, f"[..., {weight.shape[1]}]", "this model", weight)
            # No hook loads this weight if it is offloaded, because the embedding is not called here.
            check_beside("states", states, "the embedding", weight)
            if states.ndim == 0 or states.shape[-1] != weight.shape[1]:
                raise ValueError(f"states {list(states.shape)} must be [..., {weight.shape[1]}]")
        return linear(states, weight)

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        cache: bool = True,
    ) -> Tensor:
        """Return the texts continued by `tokens` tokens, ``[batch, prompt + tokens]``.

        The model runs in evaluation mode, and its modes are restored afterwards. Texts longer than
        `max_tokens` are continued from their last `max_tokens` tokens, without a cache.

        Args:
            ids: Token ids of the prompts, ``[batch, prompt]``, with at least one token each.
            tokens: Number of tokens to append.
            temperature: Divisor of the logits. 0 always selects the most likely token.
            top_k: Sample only from the `top_k` most likely tokens.
            generator: The random number generator to sample with.
            cache: Whether to cache keys and values if every attention supports it. This affects the
                cost and not the texts.
        """
        check_tensor("ids", ids, "of integers [batch, tokens]", floating=False)
        if ids.ndim != 2 or not ids.shape[1]:
            raise ValueError(f"ids {list(ids.shape)} must be [batch, tokens], with at least one token")
        check_whole("tokens", tokens, 0)
        check_number("temperature", temperature, 0.0)
        if top_k is not None:
            check_whole("top_k", top_k, 1)
        max_tokens = self.embed.positions.num_embeddings
        with evaluation_mode(self):
            caches = self._new_caches(min(ids.shape[1] + tokens, max_tokens)) if cache else None
            for _ in range(tokens):
                if ids.shape[1] > max_tokens:
                    caches = None  # All positions shift, so the cached keys are no longer valid.
                new_ids = ids[:, len(caches[0]) :] if caches else ids[:, -max_tokens:]
                logits = self.logits(self.states(new_ids, caches=caches)[:, -1])
                ids = torch.cat((ids, _sample_token(logits, temperature, top_k, generator)), 1)
        return ids

    def _new_caches(self, capacity: int) -> list[PDECache] | None:
        """Return one empty cache per attention, or None if an attention does not support a cache."""
        attentions = self.stack.attentions()
        if not all(attention.can_cache for attention in attentions):
            return None
        return [attention.new_cache(capacity) for attention in attentions]


def _sample_token(
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
