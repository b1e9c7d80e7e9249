"""Texts of the tasks on language models and classifiers: token ids, batches and hashes."""

import hashlib
import math
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.data import text
from attractor.reproduce.tasks import Context
from attractor.storage.files import write_text


class Windows:
    """Random batches ``[batch, tokens + 1]`` of texts in a stream of ids.

    Args:
        ids: The stream ``[n]``, on the device of the model.
        tokens: Number of tokens per text.
        batch: Number of texts per batch.
        steps: Number of batches per epoch, with texts that start anywhere in the stream. None to divide
            the stream into texts, each of which is in an epoch once; an incomplete batch is left out.

    Raises:
        ValueError: The stream is too short for one text.
    """

    def __init__(self, ids: Tensor, tokens: int, batch: int, steps: int | None = None) -> None:
        self.count = (len(ids) - 1) // tokens
        if self.count < 1:
            raise ValueError(
                f"ids has {len(ids)} tokens, and a text needs {tokens} + 1; use more of the data"
            )
        self.ids, self.tokens, self.anywhere = ids, tokens, steps is not None
        self.batch = batch if steps else min(batch, self.count)
        self.steps = steps or self.count // self.batch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        count = self.steps * self.batch
        if self.anywhere:
            starts = torch.randint(len(self.ids) - self.tokens, (count,))
        else:
            starts = torch.randperm(self.count)[:count] * self.tokens
        offsets = torch.arange(self.tokens + 1, device=self.ids.device)
        for rows in starts.to(self.ids.device).split(self.batch):
            yield self.ids[rows[:, None] + offsets]


class Texts:
    """Batches (ids ``[batch, tokens]``, labels ``[batch]``) of texts.

    Shuffled batches have equal sizes of at most `batch`. Texts that do not fill a batch are left out;
    they differ between epochs. Batches in order include all texts, so the last one may be smaller.

    Args:
        ids: Ids ``[texts, tokens]``.
        labels: Labels ``[texts]``.
        batch: Maximum number of texts per batch.
        shuffled: Whether to shuffle the texts in each epoch.
    """

    def __init__(self, ids: Tensor, labels: Tensor, batch: int, shuffled: bool = False) -> None:
        self.ids, self.labels, self.shuffled = ids, labels, shuffled
        self.steps = math.ceil(len(ids) / batch)
        self.batch = len(ids) // self.steps if shuffled else batch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.ids)
        order = torch.randperm(count) if self.shuffled else torch.arange(count)
        for rows in order.to(self.ids.device).split(self.batch)[: self.steps]:
            yield self.ids[rows], self.labels[rows]


def toy_lines(split: str, count: int = 400) -> list[str]:
    """Return lines of a generated text: a name, a verb, the same name again and a full stop."""
    rng = random.Random(f"toy {split}")
    names, verbs = ("anna", "ben", "carl", "dora"), ("sees", "hears", "likes")
    lines = []
    for _ in range(count):
        name = rng.choice(names)
        lines.append(f"{name} {rng.choice(verbs)} {name} .")
    return lines


def toy_labelled(split: str, count: int = 240) -> tuple[list[str], list[int]]:
    """Return generated texts with labels, in which one word determines the label."""
    rng = random.Random(f"toy {split}")
    labels = [i % 2 for i in range(count)]
    words = lambda: [rng.choice(("the", "a", "it", "was", "so")) for _ in range(rng.randint(1, 3))]
    texts = [" ".join([*words(), ("bad", "good")[label], *words()]) for label in labels]
    return texts, labels


def folders_of(context: Context) -> tuple[Path | None, Path | None]:
    """Return the folder of the data and that of the token ids."""
    cache = context.cache
    if cache is not None and not (cache / ".gitignore").exists():
        write_text(cache / ".gitignore", "*\n")  # token ids are large, and can be computed again
    return context.folder, cache


def tokenizer_of(name: str, folder: Path | None) -> Any:
    """Return the tokenizer "bytes" or "wordpiece"; the latter reads its vocabulary from the folder."""
    if name not in ("bytes", "wordpiece"):
        raise ValueError(f"tokenizer {name!r} is not one of bytes, wordpiece")
    return text.Bytes() if name == "bytes" else text.WordPiece(folder)


@lru_cache(maxsize=2)
def token_streams(
    name: str, kind: str, folder: Path | None, cache: Path | None
) -> tuple[dict[str, Tensor], int, dict[str, str]]:
    """Return the ids of the training and validation text, the size of the vocabulary, and hashes."""
    tokenizer = tokenizer_of(kind, folder)
    ids = {}
    for split in ("train", "valid"):
        lines = toy_lines(split) if name == "toy" else text.lines(name, split, folder)
        ids[split] = text.stream(lines, tokenizer, None if name == "toy" else cache)
    return ids, tokenizer.size, {f"{name} {split}": hash_of(x) for split, x in ids.items()}


@lru_cache(maxsize=4)
def classification_data(
    name: str, kind: str, tokens: int, folder: Path | None, cache: Path | None
) -> tuple[dict[str, tuple[Tensor, Tensor]], Any, dict[str, str]]:
    """Return (ids, labels) of each split, the tokenizer, and hashes."""
    tokenizer, parts = tokenizer_of(kind, folder), {}
    for split in ("train", "test") if name == "toy" else text.FILES[name]:
        if name == "toy":
            (texts, labels), cache_folder = toy_labelled(split), None
        else:
            (texts, labels), cache_folder = text.labelled(name, split, folder), cache
        parts[split] = text.padded(texts, tokenizer, tokens, cache_folder)[0], torch.tensor(labels)
    hashes = {f"{name} {split}": hash_of(*tensors) for split, tensors in parts.items()}
    return parts, tokenizer, hashes


def hash_of(*tensors: Tensor) -> str:
    """Return the SHA-256 digest of integer tensors."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.to(torch.int32).numpy().tobytes())
    return digest.hexdigest()


def perplexity_of(loss: float | None) -> float:
    """Return the perplexity of a loss in nats: NaN without a loss, infinity where exp overflows."""
    return math.nan if loss is None else math.exp(loss) if loss < 700 else math.inf


def six_digits(x: float | None) -> float | None:
    """Return a number to six digits, for curves; None if it is not finite."""
    return None if x is None or not math.isfinite(x) else float(f"{x:.6g}")
