"""A text encoder with a classification head."""

from typing import Any

from torch import Tensor, nn

from attractor.attention.models.stack import Embedding, Stack, initialise
from attractor.attention.tracing import is_symbolic
from attractor.common.checks import check_tensor, check_whole


class Classifier(nn.Module):
    """A text encoder with a classification head.

    The defaults of `dim`, `heads`, `layers` and `hidden` are those of the paper's Table 7.

    Args:
        vocabulary: Number of token ids.
        classes: Number of classes.
        dim, heads, layers, hidden: As in `Stack`.
        max_tokens: Largest number of tokens per text.
        dropout: Dropout probability on the embeddings, the residual branches and the pooled state.
        pooling: "mean" averages the states of the valid tokens. "first" takes the state of the first
            valid token, for texts that begin with a special token such as BERT's ``[CLS]``.
        padding: The id of padding tokens. If it is set, `key_padding` may be omitted.
        **options: Options of `Stack` and `PDEAttention`, such as ``pde``, ``steps``, ``learn`` and
            ``norm``.

    >>> import torch
    >>> model = Classifier(vocabulary=100, classes=4, layers=2, pde="diffusion", padding=0)
    >>> model(torch.tensor([[5, 17, 32], [8, 9, 0]])).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        *,
        dim: int = 128,
        heads: int = 4,
        layers: int = 4,
        hidden: int = 256,
        max_tokens: int = 512,
        dropout: float = 0.1,
        pooling: str = "mean",
        padding: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if pooling not in ("mean", "first"):
            raise ValueError(f"pooling {pooling!r} is not one of mean, first")
        check_whole("classes", classes, 1)
        self.pooling, self.padding = pooling, padding
        self.embed = Embedding(vocabulary, dim, max_tokens, dropout)
        self.stack = Stack(dim, heads, layers, hidden, dropout=dropout, **options)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(dim, classes)
        initialise(self)

    def forward(self, ids: Tensor, key_padding: Tensor | None = None) -> Tensor:
        """Return the logits ``[batch, classes]`` of texts.

        Args:
            ids: Integer token ids ``[batch, tokens]``.
            key_padding: Bool ``[batch, tokens]``, True for valid tokens. If it is None, all tokens are
                valid except those with the id `padding`.
        """
        if not is_symbolic(ids):
            check_tensor("ids", ids, "of integers [batch, tokens]", floating=False)
            if ids.ndim == 2 and not ids.shape[1]:
                raise ValueError(
                    f"ids {list(ids.shape)} hold no tokens; pass at least one token per text"
                )
        if key_padding is None and self.padding is not None:
            key_padding = ids != self.padding
        x = self.stack(self.embed(ids, key_padding), key_padding=key_padding)
        return self.head(self.dropout(self._pool(x, key_padding)))

    def _pool(self, x: Tensor, key_padding: Tensor | None) -> Tensor:
        """Return one state per text, ``[batch, dim]``, of the states ``[batch, tokens, dim]``."""
        if key_padding is None:
            return x[:, 0] if self.pooling == "first" else x.mean(1)
        if self.pooling == "first":
            first = key_padding.int().argmax(1)[:, None, None]
            return x.gather(1, first.expand(-1, 1, x.shape[-1]))[:, 0]
        total = x.masked_fill(~key_padding[:, :, None], 0.0).sum(1)
        return total / key_padding.sum(1, keepdim=True).clamp(min=1)
