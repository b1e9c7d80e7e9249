"""Bodies of Q that read its input component by component (AttNS, Table 2): LSTM and Transformer."""

from typing import Any

import torch
from torch import Tensor, nn


class Components(nn.Module):
    """Each component of x ``[*batch, inputs]`` as a token ``[*batch, inputs, width]``.

    A line of its own for every component: its weight takes up the component's unit, its bias tells
    the components apart.
    """

    def __init__(self, inputs: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, width, **factory))
        self.bias = nn.Parameter(torch.randn(inputs, width, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """The tokens."""
        return x[..., None] * self.weight + self.bias


class LSTM(nn.Module):
    """The last hidden state of an LSTM over the components."""

    def __init__(self, inputs: int, width: int, layers: int, **factory: Any) -> None:
        super().__init__()
        self.tokens = Components(inputs, width, **factory)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """The last hidden layer ``[*batch, width]``."""
        tokens = self.tokens(x)
        read, _ = self.lstm(tokens.reshape(-1, *tokens.shape[-2:]))
        return read[:, -1].reshape(*tokens.shape[:-2], -1)

    def spread(self, scale: float, generator: torch.Generator) -> None:
        """Random weights for standardised inputs."""
        _spread(self, scale, generator)

    def standardise(self, mean: Tensor, deviation: Tensor) -> None:
        """Take x from here on for what was ``(x - mean) / deviation``."""
        _standardise(self.tokens, mean, deviation)


class Transformer(nn.Module):
    """The mean token of transformer layers over the components."""

    def __init__(self, inputs: int, width: int, layers: int, **factory: Any) -> None:
        super().__init__()
        heads = next(h for h in (8, 4, 2, 1) if width % h == 0)
        self.tokens = Components(inputs, width, **factory)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, **factory
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The last hidden layer ``[*batch, width]``."""
        tokens = self.tokens(x)
        read = tokens.reshape(-1, *tokens.shape[-2:])
        for block in self.blocks:
            read = block(read)
        return read.mean(-2).reshape(*tokens.shape[:-2], -1)

    def spread(self, scale: float, generator: torch.Generator) -> None:
        """Random weights for standardised inputs."""
        _spread(self, scale, generator)

    def standardise(self, mean: Tensor, deviation: Tensor) -> None:
        """Take x from here on for what was ``(x - mean) / deviation``."""
        _standardise(self.tokens, mean, deviation)


BODIES = {"lstm": LSTM, "transformer": Transformer}


def _spread(body: nn.Module, scale: float, generator: torch.Generator) -> None:
    """Normal weights; tokens of that scale, matrices such that a layer keeps a vector's size."""
    for name, p in body.named_parameters():
        if "norm" in name:
            continue
        size = scale if name.startswith("tokens") else p.shape[-1] ** -0.5
        p.copy_(size * torch.randn(p.shape, generator=generator, dtype=torch.float64))


def _standardise(tokens: Components, mean: Tensor, deviation: Tensor) -> None:
    tokens.weight.div_(deviation[:, None])
    tokens.bias.sub_(tokens.weight * mean[:, None])
