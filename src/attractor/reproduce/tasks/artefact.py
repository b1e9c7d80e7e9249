"""The language models of the PDE paper's first public code, evaluated in several ways.

This is a reimplementation of XueqingZhou/Continuous-Time-Attention at commit 7e71ad3. That code pads
single lines to one length, counts padding in the loss, and masks no later token. Its baseline is a
`torch.nn.TransformerEncoder`; its PDE model calls the same layers one by one and diffuses the *states*
after each of them along the positions.

In evaluation mode `TransformerEncoder` has a fast path, which drops padding before its first layer and
returns zeros in its place. A zero state makes the logits the bias of the last layer, so that a padding
token, which the same weights predict almost surely without the fast path, costs about the logarithm of
the vocabulary. The PDE model does not call `TransformerEncoder` and has no such path. `encoder_model`
trains one of the two models and evaluates the same weights with the path and without it, with padding
counted and not, and from left to right.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attractor.data import text
from attractor.reproduce.tasks import Context, Outcome
from attractor.reproduce.tasks.text_data import (
    hash_of,
    perplexity_of,
    six_digits,
    tokenizer_of,
    toy_lines,
)
from attractor.reproduce.tasks.texts import (
    CHECKED,
    CHUNK,
    is_causal_model,
    train_epochs,
)
from attractor.train import Recipe

Config = dict[str, Any]

ALPHA = 0.10  # initial value of each coefficient of diffusion
CURVES = ("perplexity", "fast_off", "real_off", "left_to_right", "train_loss")


def encoder_model(config: Config, context: Context) -> Outcome:
    """Train an encoder as a language model of padded lines, and evaluate it in several ways.

    Configuration:
        data: "wikitext2", "wikitext103", or "toy" for a generated text.
        tokenizer: "wordpiece", "bytes", or "words" with the `vocabulary` most frequent words of the
            training text.
        size: dim, heads, layers, hidden and dropout of the model.
        pde_steps: steps of diffusion after each layer; null for the baseline.
        length: tokens per line, divided by `shorten`; longer lines are cut, shorter ones padded.
        recipe: batch (lines per update), epochs, learning_rate, warmup (part of the training),
            weight_decay and clip.
        limit: [training lines, validation lines] to use; null for all. Empty lines are never used.
        sample: number of validation tokens to predict from left to right as well.

    Metrics:
        perplexity: padding counted, fast path enabled, as the code evaluates.
        fast_off: padding counted, fast path disabled.
        real_on, real_off: padding not counted, with the fast path enabled and disabled.
        left_to_right: the sample, with each token predicted from the previous tokens only.
        sample_forced: the same sample by teacher forcing on whole lines; fast path disabled.
        pad_on, pad_off: nats per padding token, with the fast path enabled and disabled.
        zeros: share of padded positions at which the fast path returns a state of zeros.
        share: share of the targets that are not padding.
        causal: 1 if `assert_causal` passes.
        train_loss, updates, parameters, finite.

    Curves, one number per epoch: perplexity, fast_off, real_off, left_to_right, train_loss.
    """
    tokens, device = config["length"] // config["shorten"], context.device
    tokenizer, parts, hashes = _lines_of(config, context)
    recipe = config["recipe"]
    train_limit, valid_limit = config["limit"] or (None, None)
    ids, lengths = (x[:train_limit].to(device) for x in parts["train"])
    batches = Lines(ids, lengths, recipe["batch"], shuffled=True)
    ids, lengths = (x[:valid_limit].to(device) for x in parts["valid"])
    valid = Lines(ids, lengths, max(1, CHUNK // tokens))
    torch.manual_seed(context.seed)
    model = LineModel(tokenizer.size, tokens, config["pde_steps"], **config["size"]).to(device)
    sample = sample_targets(lengths.cpu(), tokens, config["sample"]).to(device)
    rows, finite = train_epochs(
        model, batches, None, _recipe(recipe, context.seed), all_positions, context,
        look=lambda model: evaluations(model, valid, sample),
    )  # fmt: skip
    last = rows[-1] if finite else {}
    names = (
        "perplexity", "fast_off", "real_on", "real_off", "left_to_right", "sample_forced", "pad_on",
        "pad_off", "zeros", "train_loss",
    )  # fmt: skip
    with fast_path(False):
        causal = is_causal_model(model, ids[:1, :CHECKED].long()) if finite else math.nan
    return {
        "metrics": {
            **{name: last.get(name, math.nan) for name in names},
            "share": real_targets(lengths, tokens).double().mean().item(),
            "causal": float(causal),
            "updates": float(len(batches) * len(rows)),
            "parameters": float(sum(p.numel() for p in model.parameters())),
            "finite": float(finite),
        },
        "curves": {name: [six_digits(row.get(name)) for row in rows] for name in CURVES},
        "data": hashes,
    }


def encoder_model_data(config: Config, context: Context) -> dict[str, str]:
    """Return the hashes of the data that `encoder_model` reads."""
    return _lines_of(config, context)[2]


class LineModel(nn.Module):
    """An encoder without a causal mask that is trained to predict the next token.

    Args:
        vocabulary: number of different tokens.
        max_tokens: maximum number of tokens per line.
        pde_steps: steps of diffusion after each layer; None for a plain `nn.TransformerEncoder`.
        dim, heads, hidden, dropout: options of each layer.
        layers: number of layers.
    """

    def __init__(
        self, vocabulary: int, max_tokens: int, pde_steps: int | None, *, dim: int, heads: int,
        layers: int, hidden: int, dropout: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.randn(1, max_tokens, dim))
        self.dropout = nn.Dropout(dropout)
        layer = lambda: nn.TransformerEncoderLayer(dim, heads, hidden, dropout, batch_first=True)
        self.encoder: nn.Module
        if pde_steps is None:
            self.encoder = nn.TransformerEncoder(layer(), layers)
        else:
            self.encoder = DiffusedEncoder([layer() for _ in range(layers)], pde_steps)
        self.head = nn.Linear(dim, vocabulary)

    def states(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """Return states ``[batch, tokens, dim]`` of ids ``[batch, tokens]``.

        Args:
            real: ``[batch, tokens]`` bool, False for padding; None if there is no padding.
        """
        if real is None:
            real = torch.ones_like(ids, dtype=torch.bool)
        x = self.embedding(ids) + self.positions[:, : ids.shape[1]]
        return self.encoder(self.dropout(x), src_key_padding_mask=~real)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits ``[..., vocabulary]`` of the token after each state ``[..., dim]``."""
        return self.head(states)

    def forward(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """Return logits ``[batch, tokens, vocabulary]`` of ids ``[batch, tokens]``."""
        return self.logits(self.states(ids, real))


class DiffusedEncoder(nn.Module):
    """Encoder layers, each followed by steps of diffusion along the positions.

    Each step has a learnt coefficient without bounds, as in the paper's code.
    """

    def __init__(self, layers: list[nn.TransformerEncoderLayer], steps: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.alpha = nn.Parameter(torch.full((len(layers), steps), ALPHA))

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        """Return states of the shape of x ``[batch, tokens, dim]``."""
        for layer, alphas in zip(self.layers, self.alpha):
            x = layer(x, src_key_padding_mask=src_key_padding_mask)
            for alpha in alphas:
                x = diffuse(x, alpha)
        return x


def diffuse(x: Tensor, alpha: Tensor) -> Tensor:
    """Return x ``[batch, tokens, dim]`` after an explicit step of diffusion with both ends fixed."""
    if x.shape[1] < 3:
        return x
    inner = x[:, 1:-1] + alpha * (x[:, 2:] - 2 * x[:, 1:-1] + x[:, :-2])
    return torch.cat((x[:, :1], inner, x[:, -1:]), 1)


class Lines:
    """Batches (ids ``[batch, tokens]``, lengths ``[batch]``) of padded lines.

    The last batch may be smaller. If `shuffled`, each iteration has a new random order.
    """

    def __init__(self, ids: Tensor, lengths: Tensor, batch: int, shuffled: bool = False) -> None:
        self.ids, self.lengths, self.batch, self.shuffled = ids, lengths, batch, shuffled

    def __len__(self) -> int:
        return math.ceil(len(self.ids) / self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.ids)
        order = torch.randperm(count) if self.shuffled else torch.arange(count)
        for rows in order.to(self.ids.device).split(self.batch):
            yield self.ids[rows], self.lengths[rows]


def all_positions(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the losses of all positions except the last, including padding, as in the paper's code."""
    ids, lengths = batch
    net: Any = model
    ids = ids.long()
    states = net.states(ids, real_tokens(lengths, ids.shape[1]))
    return token_losses(net, states[:, :-1], ids[:, 1:])


def token_losses(model: Any, states: Tensor, targets: Tensor) -> Tensor:
    """Return the loss ``[n]`` of targets ``[batch, tokens]``, given states ``[batch, tokens, dim]``."""
    logits = model.logits(states.flatten(0, 1))
    return cross_entropy(logits, targets.flatten(), reduction="none")


def real_tokens(lengths: Tensor, tokens: int) -> Tensor:
    """Return which of the positions ``[lines, tokens]`` are not padding."""
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]


def real_targets(lengths: Tensor, tokens: int) -> Tensor:
    """Return which of the targets ``[lines, tokens - 1]`` are not padding."""
    return real_tokens(lengths, tokens)[:, 1:]


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    """Enable or disable the fast path of torch's encoder layers, and restore the setting afterwards."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@torch.no_grad()
def evaluations(model: LineModel, lines: Lines, sample: Tensor) -> dict[str, float]:
    """Return the perplexities of one set of weights under every evaluation; see `encoder_model`.

    Args:
        lines: validation lines.
        sample: (line, target) pairs of `sample_targets`.
    """
    model.eval()
    real = real_targets(lines.lengths, lines.ids.shape[1])
    metrics = {}
    for name, enabled in (("on", True), ("off", False)):
        losses, zeros = line_losses(model, lines, fast=enabled)
        if enabled:
            metrics["zeros"] = zeros
        metrics[f"fast_{name}"] = perplexity_of(losses.mean().item())
        metrics[f"real_{name}"] = perplexity_of(losses[real].mean().item())
        metrics[f"pad_{name}"] = losses[~real].mean().item()
    whole_line = losses[sample[:, 0], sample[:, 1]]  # of the last iteration: fast path disabled
    metrics["sample_forced"] = perplexity_of(whole_line.mean().item())
    prefix = prefix_losses(model, lines.ids, sample)
    metrics["left_to_right"] = perplexity_of(prefix.mean().item())
    return {"perplexity": metrics.pop("fast_on"), **metrics}


def line_losses(model: LineModel, lines: Lines, fast: bool) -> tuple[Tensor, float]:
    """Return the losses ``[lines, tokens - 1]`` of all targets by teacher forcing, in float64.

    The second return value is the share of padded positions whose state is zero. It is 1 if
    `nn.TransformerEncoder` takes its fast path, and 0 otherwise.
    """
    losses, zeros, padding = [], 0.0, 0.0
    with fast_path(fast), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        for ids, lengths in lines:
            targets, real = ids.long(), real_tokens(lengths, ids.shape[1])
            states = model.states(targets, real)
            zeros += (states[~real] == 0).all(-1).sum().item()
            padding += (~real).sum().item()
            rows = token_losses(model, states[:, :-1], targets[:, 1:])
            losses.append(rows.double().view(len(ids), -1))
    return torch.cat(losses), zeros / padding if padding else math.nan


def sample_targets(lengths: Tensor, tokens: int, count: int) -> Tensor:
    """Return (line, target) pairs ``[count, 2]``, a uniform sample of the targets without padding.

    Target i of a line is its token i + 1. The sample depends on the lengths only, not on a seed.
    """
    pairs = real_targets(lengths, tokens).nonzero()
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
    return pairs[order[:count]]


def prefix_losses(model: LineModel, ids: Tensor, sample: Tensor) -> Tensor:
    """Return the losses ``[count]`` of a sample of targets, predicted from the previous tokens only.

    Args:
        ids: all lines ``[lines, tokens]``.
        sample: (line, target) pairs of `sample_targets`.
    """
    losses = torch.empty(len(sample), dtype=torch.float64, device=ids.device)
    lines, places = sample.unbind(1)
    with fast_path(False):
        for place in places.unique().tolist():
            rows = (places == place).nonzero()[:, 0]
            tokens = ids[lines[rows], : place + 2].long()
            states = model.states(tokens[:, :-1])  # without padding, which the PDE model would read
            losses[rows] = token_losses(model, states[:, -1:], tokens[:, -1:]).double()
    return losses


def _recipe(config: Config, seed: int) -> Recipe:
    """Return the AdamW of the paper's code: decay of all parameters, constant rate after the warm-up."""
    return Recipe(
        epochs=config["epochs"], learning_rate=config["learning_rate"],
        warmup=config["warmup"] * config["epochs"], schedule="constant", optimiser="adamw",
        weight_decay=config["weight_decay"], decay_vectors=True, clip=config["clip"], precision="fp32",
        seed=seed,
    )  # fmt: skip


def _lines_of(
    config: Config, context: Context
) -> tuple[Any, dict[str, tuple[Tensor, Tensor]], dict[str, str]]:
    source = config["data"], config["tokenizer"], config.get("vocabulary"), context.folder
    return _padded_lines(*source, config["length"] // config["shorten"])


@lru_cache(maxsize=2)
def _token_ids(
    name: str, kind: str, vocabulary: int | None, folder: Path | None
) -> tuple[Any, dict[str, list[list[int]]]]:
    """Return the tokenizer, and the ids of all non-empty lines of both splits."""
    lines = {}
    for split in ("train", "valid"):
        everything = toy_lines(split) if name == "toy" else text.lines(name, split, folder)
        lines[split] = [line for line in everything if line.strip()]
    tokenizer: Any
    if kind == "words":
        tokenizer = text.Words.of(lines["train"], vocabulary)
    else:
        tokenizer = tokenizer_of(kind, folder)
    return tokenizer, {split: tokenizer.encode(rows) for split, rows in lines.items()}


@lru_cache(maxsize=2)
def _padded_lines(
    name: str, kind: str, vocabulary: int | None, folder: Path | None, tokens: int
) -> tuple[Any, dict[str, tuple[Tensor, Tensor]], dict[str, str]]:
    """Return the tokenizer, (ids ``[lines, tokens]``, lengths ``[lines]``) of both splits, and hashes.

    A row has the format of BERT's tokenizer: the first token if the tokenizer has one, the line, cut if
    it is too long, the end token, and padding.
    """
    tokenizer, token_ids = _token_ids(name, kind, vocabulary, folder)
    first = [] if tokenizer.first is None else [tokenizer.first]
    parts = {}
    for split, rows in token_ids.items():
        ids = torch.full((len(rows), tokens), tokenizer.padding, dtype=torch.int32)
        lengths = torch.empty(len(rows), dtype=torch.int64)
        for i, row in enumerate(rows):
            sequence = [*first, *row[: tokens - len(first) - 1], tokenizer.end]
            ids[i, : len(sequence)] = torch.tensor(sequence, dtype=torch.int32)
            lengths[i] = len(sequence)
        parts[split] = ids, lengths
    return tokenizer, parts, {f"{name} {split}": hash_of(*tensors) for split, tensors in parts.items()}
