"""The parts of a transformer around its attention: residual branches, layers, embeddings, weights."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attractor.attention.cache import PDECache, unchanged_on_error
from attractor.attention.models.layer import PDEAttention
from attractor.attention.tracing import as_node, is_symbolic
from attractor.common.checks import (
    MOST_PARTS,
    check_beside,
    check_home,
    check_input,
    check_number,
    check_tensor,
    check_whole,
)


class Residual(nn.Module):
    """``x + branch(norm(x))`` (norm="pre"), or ``norm(x + branch(x))`` (norm="post")."""

    def __init__(self, dim: int, branch: nn.Module, norm: str, dropout: float) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm {norm!r} is not one of pre, post")
        check_number("dropout", dropout, 0.0, 1.0)
        self.pre, self.branch, self.dim = norm == "pre", branch, dim
        self.norm, self.dropout = nn.LayerNorm(dim), nn.Dropout(dropout)

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        """Return the states ``[batch, tokens, dim]`` after the branch, which receives `masks`."""
        if not is_symbolic(x):
            check_input("x", x, "[batch, tokens, dim]", "this layer", getattr(self.norm, "weight", None))
            if x.ndim != 3 or x.shape[-1] != self.dim:
                raise ValueError(f"x {list(x.shape)} must be [batch, tokens, {self.dim}]")
        if self.pre:
            return x + self.dropout(self.branch(self.norm(x), **masks))
        return self.norm(x + self.dropout(self.branch(x, **masks)))


class Layer(nn.Module):
    """Attention, followed by a feed-forward network on every token."""

    def __init__(self, attention: Residual, network: Residual) -> None:
        super().__init__()
        self.attention, self.network = attention, network

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        """Return the states ``[batch, tokens, dim]`` after this layer."""
        return self.network(self.attention(x, **masks))


class Stack(nn.Module):
    """The layers of a transformer.

    Args:
        dim: Number of features per token.
        heads: Number of heads, a divisor of `dim`.
        layers: Number of layers.
        hidden: Width of the feed-forward networks.
        dropout: Dropout probability on the output of each residual branch.
        map_dropout: Dropout probability on the attention maps.
        norm: "pre" normalises the input of each branch, "post" normalises the sum after it.
        place: Which attentions have the PDE. "each" gives it to every layer. "after" uses standard
            attention in all layers and adds one more attention, with the PDE, after the last layer.
            With ``pde=None`` that attention exists too, so that models differ in the PDE alone.
        **attention: All other arguments of `PDEAttention`. Each layer gets its own copy of an argument
            that is a module, except for `pde`, which is shared.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        layers: int,
        hidden: int,
        *,
        dropout: float = 0.1,
        map_dropout: float = 0.0,
        norm: str = "pre",
        place: str = "each",
        **attention: Any,
    ) -> None:
        super().__init__()
        if place not in ("each", "after"):
            raise ValueError(f"place {place!r} is not one of each, after")
        check_whole("layers", layers, 0, most=MOST_PARTS)
        check_whole("hidden", hidden, 1)

        def attention_branch(**overrides: Any) -> Residual:
            options = {**attention, **overrides}
            own: dict[str, Any] = {
                name: copy.deepcopy(option)
                if name != "pde" and isinstance(option, nn.Module)
                else option
                for name, option in options.items()
            }
            return Residual(dim, PDEAttention(dim, heads, dropout=map_dropout, **own), norm, dropout)

        def network_branch() -> Residual:
            network = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            return Residual(dim, network, norm, dropout)

        if not layers and place == "each":
            attention_branch()  # Without a layer, this checks the arguments.
        overrides = {} if place == "each" else {"pde": None}
        self.layers = nn.ModuleList(
            Layer(attention_branch(**overrides), network_branch()) for _ in range(layers)
        )
        self.after = attention_branch() if place == "after" else None
        self.norm = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()

    def attentions(self) -> list[PDEAttention]:
        """Return the attentions of all layers, from the first to the last."""
        return [module for module in self.modules() if isinstance(module, PDEAttention)]

    def forward(
        self,
        x: Tensor,
        caches: Sequence[PDECache | None] | None = None,
        key_padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the normalised states ``[batch, tokens, dim]`` after the last layer.

        Args:
            x: The input states ``[batch, tokens, dim]``.
            caches: One cache per attention, in the order of `attentions`, or None. If an exception is
                raised, the caches remain unchanged.
            key_padding, documents: As in `PDEAttention.forward`.
        """
        if not is_symbolic(x):
            check_tensor("x", x, "[batch, tokens, dim]")
        attentions = len(self.layers) + (self.after is not None)
        masks = {"key_padding": key_padding, "documents": documents}
        if caches and len(caches) != attentions:
            raise ValueError(
                f"caches has {len(caches)} entries; pass one for each of {attentions} attentions"
            )
        with unchanged_on_error(*caches) if caches else nullcontext():
            caches = caches or [None] * attentions
            for layer, cache in zip(self.layers, caches):
                x = layer(x, cache=cache, **masks)
            if self.after is not None:
                x = self.after(x, cache=caches[-1], **masks)
            return self.norm(x)


class Embedding(nn.Module):
    """Learned embeddings of tokens plus learned embeddings of their positions."""

    def __init__(self, vocabulary: int, dim: int, max_tokens: int, dropout: float) -> None:
        super().__init__()
        check_whole("vocabulary", vocabulary, 1)
        check_whole("dim", dim, 1)
        check_whole("max_tokens", max_tokens, 1)
        check_number("dropout", dropout, 0.0, 1.0)
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(max_tokens, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        ids: Tensor,
        key_padding: Tensor | None = None,
        start: int = 0,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor:
        """Return the embeddings ``[batch, tokens, dim]`` of token ids.

        Only valid tokens advance the position, so padding on the left and padding on the right are
        equivalent.

        Args:
            ids: Integer token ids ``[batch, tokens]``.
            key_padding: As in `PDEAttention.forward`.
            start: Number of tokens per text before `ids`, padding included.
            prefix_lengths: Number of valid tokens per text before `ids`, ``[batch, 1]``; None if all
                `start` tokens are valid.
        """
        if is_symbolic(ids):
            return as_node(self, ids, key_padding, start, prefix_lengths)
        max_tokens = self.positions.num_embeddings
        check_tensor("ids", ids, "of integers [batch, tokens]", floating=False)
        check_home("ids", ids, "this model", self.tokens.weight)
        if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"ids {list(ids.shape)} of {ids.dtype} must be integers [batch, tokens]")
        if start + ids.shape[1] > max_tokens:
            raise ValueError(
                f"{start + ids.shape[1]} tokens are more than the {max_tokens} positions of this model; "
                "make it with a larger max_tokens, or pass fewer tokens"
            )
        if key_padding is not None:
            check_tensor("key_padding", key_padding, "of bools [batch, tokens]", floating=False)
            check_beside("key_padding", key_padding, "ids", ids)
            if key_padding.dtype != torch.bool or key_padding.shape != ids.shape:
                raise ValueError(
                    f"key_padding {list(key_padding.shape)} of {key_padding.dtype} must be bool "
                    f"{list(ids.shape)}, True for valid tokens"
                )
        ids = ids if ids.dtype in (torch.int64, torch.int32) else ids.long()
        first = start if prefix_lengths is None else prefix_lengths
        if key_padding is None:
            positions = first + torch.arange(ids.shape[1], device=ids.device)
        else:
            positions = (first + key_padding.cumsum(1) - 1).clamp(min=0)
        try:
            tokens = self.tokens(ids)
        except IndexError:  # Only a CPU raises; checking the ids on a GPU would synchronise with it.
            raise ValueError(
                f"ids go from {int(ids.min())} to {int(ids.max())}, but this model has tokens 0 to "
                f"{self.tokens.num_embeddings - 1}"
            ) from None
        return self.dropout(tokens + self.positions(positions))


def initialise(model: nn.Module) -> None:
    """Initialise the weights of a model as in GPT-2.

    Weights are normal with standard deviation 0.02, divided by the square root of the number of residual
    branches in the last linear map of each branch.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    branches = [module.branch for module in model.modules() if isinstance(module, Residual)]
    for branch in branches:
        last: Any = branch.out if isinstance(branch, PDEAttention) else branch[-1]  # type: ignore[index]
        nn.init.normal_(last.weight, std=0.02 / len(branches) ** 0.5)
