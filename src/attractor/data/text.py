"""Texts and their tokens: WikiText for language models; IMDb, SST-2 and AG News for classifiers.

`lines` and `labelled` read texts. The tokenizers are `WordPiece` (BERT's vocabulary; needs ``pip install
'attractor[text]'``), `Words` and `Bytes`. `stream` returns ids for language models, `padded` for
classifiers.
"""

import csv
import hashlib
import io
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attractor.common.checks import as_int, check_tensor, check_whole, nearest
from attractor.data.folders import Folder, folder_of
from attractor.data.tokenization import (
    VOCABULARY,
    Bytes,
    Tokenizer,
    WordPiece,
    Words,
    check_texts,
    check_tokenizer,
)
from attractor.storage.files import open_plain, write_bytes
from attractor.storage.fingerprint import fingerprint
from attractor.storage.limits import read_bytes

__all__ = [
    "CLASSES", "FILES", "VOCABULARY", "Bytes", "Tokenizer", "WordPiece", "Words", "labelled", "lines",
    "padded", "stream", "windows",
]  # fmt: skip

SPLITS = ("train", "valid", "test")

# name -> split -> possible names of the file, without .xz. `HUB` has the same data on Hugging Face.
FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "wikitext2": {s: (f"wikitext2_{s}.txt", f"wikitext-2/wiki.{s}.tokens") for s in SPLITS},
    "wikitext103": {s: (f"wikitext103_{s}.txt", f"wikitext-103/wiki.{s}.tokens") for s in SPLITS},
    "imdb": {s: (f"imdb_{s}.csv",) for s in ("train", "test")},
    "ag_news": {
        "train": ("ag_news_train.csv", "ag_news_train_subset.csv"),
        "test": ("ag_news_test.csv",),
    },
    "sst2": {"train": ("sst2_train.tsv",), "valid": ("sst2_dev.tsv",), "test": ("sst2_test.tsv",)},
    "sst2_glue": {"train": ("sst2_glue_train.tsv",), "valid": ("sst2_glue_dev.tsv",)},
}
HUB = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-v1"),
    "wikitext103": ("Salesforce/wikitext", "wikitext-103-v1"),
    "imdb": ("stanfordnlp/imdb", None),
    "ag_news": ("fancyzhx/ag_news", None),
    "sst2": ("SetFit/sst2", None),
    "sst2_glue": ("nyu-mll/glue", "sst2"),
}
CLASSES = {"imdb": 2, "ag_news": 4, "sst2": 2, "sst2_glue": 2}
CHUNK = 1000  # texts that are tokenized at a time
DIGITS = 16  # of the hash in the name of a file of ids
LARGEST_TEXT = 2**30  # bytes after decompression; the largest known file has 541 million


def lines(name: str, split: str, folder: Folder = None) -> list[str]:
    """Return the lines of ``"wikitext2"`` or ``"wikitext103"``, with empty ones, without line ends.

    Args:
        name: name of the data set.
        split: ``"train"``, ``"valid"`` or ``"test"``.
        folder: the folder of its files; None: the folder in ``ATTRACTOR_DATA``.
    """
    if not isinstance(name, str) or name not in FILES:
        raise ValueError(
            f"no data set is called {name!r}; there are {', '.join(FILES)}{nearest(name, list(FILES))}"
        )
    if not name.startswith("wikitext"):
        raise ValueError(f"{name!r} has labels: read it with labelled({name!r}, {split!r})")
    path = _find(name, split, folder)
    if path is None:
        return [row["text"].rstrip("\n") for row in _from_hub(name, split, folder)]
    return _read(path).rstrip("\n").split("\n")


def labelled(name: str, split: str, folder: Folder = None) -> tuple[list[str], list[int]]:
    """Return texts of ``"imdb"``, ``"ag_news"``, ``"sst2"`` or ``"sst2_glue"`` and labels from 0.

    The order is that of the file, which may be sorted by label, so shuffle before training. Label 1 of a
    sentiment is positive; the labels of AG News are World, Sports, Business and Sci/Tech. ``"sst2"``
    consists of whole sentences, the training split of ``"sst2_glue"`` of phrases.
    """
    if name not in CLASSES:
        names = ", ".join(CLASSES)
        raise ValueError(f"{name!r} has no labels, or is unknown; the data sets with labels are {names}")
    path = _find(name, split, folder)
    if path is None:
        rows = list(_from_hub(name, split, folder))
        key = "sentence" if name == "sst2_glue" else "text"
        return [row[key] for row in rows], [int(row["label"]) for row in rows]
    content = _read(path)
    if name == "imdb":
        table = list(csv.DictReader(io.StringIO(content, newline="")))
        return [row["text"] for row in table], [int(row["label"]) for row in table]
    if name == "ag_news":
        news = list(csv.reader(io.StringIO(content, newline="")))
        return [f"{title} {story}" for _, title, story in news], [int(c) - 1 for c, _, _ in news]
    pairs = [line.split("\t") for line in content.rstrip("\n").split("\n")]  # quotes mean nothing there
    pairs = pairs[1:] if pairs[0] == ["sentence", "label"] else pairs
    return [sentence for sentence, _ in pairs], [int(label) for _, label in pairs]


def stream(texts: Sequence[str], tokenizer: Tokenizer, cache: Folder = None) -> Tensor:
    """Return all texts as one row of ids ``[n]``, int64, each followed by the tokenizer's `end`.

    Args:
        texts: the texts, in order.
        tokenizer: the tokenizer.
        cache: a folder in which the ids are stored under a name that depends on texts and tokenizer;
            later calls map the file into memory.
    """
    check_texts(texts)
    check_tokenizer(tokenizer)
    if cache is None:
        return torch.from_numpy(_flat(texts, tokenizer))
    (ids,) = _cached(Path(cache), _key(texts, tokenizer), lambda: (_flat(texts, tokenizer),))
    return torch.from_numpy(ids)


def padded(
    texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int, cache: Folder = None
) -> tuple[Tensor, Tensor]:
    """Return padded ids ``[texts, tokens]``, int64, and a mask of real tokens ``[texts, tokens]``, bool.

    Each text begins with the tokenizer's `first`, if it has one, and is truncated to max_tokens; shorter
    texts are padded on the right.

    Args:
        texts: the texts, in order.
        tokenizer: the tokenizer.
        max_tokens: the largest number of tokens per text.
        cache: a folder in which the ids are stored, as in `stream`. Ids from a cache have the narrowest
            sufficient dtype, int16 or int32: call ``.long()`` before passing them to a model.
    """
    check_texts(texts)
    check_tokenizer(tokenizer)
    max_tokens = as_int(max_tokens)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens!r} must be at least 1")
    if cache is None:
        ids, lengths = _pad(texts, tokenizer, max_tokens, np.int64)
    else:
        key = _key(texts, tokenizer, f"{max_tokens} tokens")
        narrow = np.int16 if tokenizer.size <= np.iinfo(np.int16).max else np.int32
        make = lambda: _pad(texts, tokenizer, max_tokens, narrow)
        ids, lengths = _cached(Path(cache), key, make, ("", "-lengths"))
    real = torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]
    return torch.from_numpy(ids), real


def windows(ids: Tensor, tokens: int) -> Tensor:
    """Return pieces ``[n, tokens + 1]`` of a stream ``[m]`` that overlap by one token.

    All tokens of a piece but the last are inputs, and all but the first are targets, so that every token
    of the stream but the first is a target once. An incomplete last piece is left out.
    """
    check_tensor("ids", ids, "[m]", floating=False)
    check_whole("tokens", tokens, 1)
    if ids.dim() != 1:
        raise ValueError(f"ids have shape {list(ids.shape)}; give one stream [m]")
    if len(ids) < tokens + 1:
        raise ValueError(
            f"a stream of {len(ids)} tokens has no piece of {tokens} + 1; use fewer tokens per piece"
        )
    return ids.unfold(0, tokens + 1, tokens)


def _flat(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    rows = [np.array([*ids, tokenizer.end], dtype=np.int64) for ids in tokenizer.encode(texts)]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def _pad(
    texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int, kind: type
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids ``[texts, tokens]``, padded on the right, and the lengths ``[texts]``."""
    begin = [] if tokenizer.first is None else [tokenizer.first]
    rows: list[np.ndarray] = []
    for start in range(0, len(texts), CHUNK):  # lists of Python integers are large
        chunk = tokenizer.encode(texts[start : start + CHUNK])
        rows += [np.array((begin + ids)[:max_tokens], dtype=kind) for ids in chunk]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    ids = np.full((len(rows), lengths.max(initial=0)), tokenizer.padding, dtype=kind)
    for own, row in zip(ids, rows):
        own[: len(row)] = row
    return ids, lengths


def _key(texts: Sequence[str], tokenizer: Tokenizer, *more: str) -> str:
    """Return a file name for the ids of texts, which differs between tokenizers."""
    special = [getattr(tokenizer, name, None) for name in ("first", "end", "padding")]
    settings = (fingerprint(tokenizer), tokenizer.size, *special, *more)
    digest = hashlib.sha256(repr(settings).encode())
    digest.update(repr(_vocabulary(tokenizer)).encode())
    digest.update(repr(tokenizer.encode(texts[:100])).encode())
    for text in texts:
        own = text.encode()
        digest.update(f"{len(own)} ".encode() + own)
    return digest.hexdigest()[:32]


def _vocabulary(tokenizer: Tokenizer) -> Any:
    """Return the vocabulary of a tokenizer if it has one of the usual attributes, else None."""
    own = getattr(tokenizer, "tokenizer", None)
    if own is not None and hasattr(own, "to_str"):
        return own.to_str()
    return getattr(tokenizer, "words", None)


def _cached(
    folder: Path, key: str, make: Callable[[], Sequence[np.ndarray]], ends: Sequence[str] = ("",)
) -> list[np.ndarray]:
    """Return arrays from files in a folder, which are made if any is missing or damaged.

    The name of a file contains the beginning of the SHA-256 of its content, as those of jobs do.
    """
    paths = []
    for end in ends:
        for path in sorted(folder.glob(f"{key}{end}.*.npy")):
            with open_plain(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
            if path.name == f"{key}{end}.{digest}.npy":
                paths.append(path)
                break
    if len(paths) < len(ends):
        paths = []
        for end, array in zip(ends, make()):
            buffer = io.BytesIO()
            np.save(buffer, array)
            digest = hashlib.sha256(buffer.getvalue()).hexdigest()[:DIGITS]
            paths.append(write_bytes(folder / f"{key}{end}.{digest}.npy", buffer.getvalue()))
    return [np.load(path, mmap_mode="c") for path in paths]


def _find(name: str, split: str, folder: Folder) -> Path | None:
    """Return the file of a split, compressed or not; None if there is none."""
    if name not in FILES:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join(FILES)}")
    if split not in FILES[name]:
        raise ValueError(
            f"{name} has no split {split!r}; it has {', '.join(FILES[name])}: hold out a part of one of "
            "them"
        )
    place = folder_of(folder)
    if place is None:
        return None
    paths = (place / f"{file}{end}" for file in FILES[name][split] for end in ("", ".xz"))
    return next((path for path in paths if path.is_file()), None)


def _read(path: Path) -> str:
    if path.suffix != ".xz":
        return read_bytes(path, LARGEST_TEXT, link=True).decode("utf8")
    with open_plain(path, link=True) as file, lzma.open(file) as content:
        try:
            raw = content.read(LARGEST_TEXT + 1)
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{path} cannot be decompressed ({error}); fetch it again") from None
    if len(raw) > LARGEST_TEXT:
        raise ValueError(f"{path} has more than the {LARGEST_TEXT:,} bytes of text that are read")
    return raw.decode("utf8")


def _from_hub(name: str, split: str, folder: Folder) -> Any:
    """Return the rows of a split from the `datasets` library."""
    file = f"{FILES[name][split][0]}.xz"
    place = folder_of(folder)
    reason = (
        f"{file} is not in {place}" if place is not None
        else f"give the folder of {file} with folder= or in ATTRACTOR_DATA"
    )  # fmt: skip
    try:
        from datasets import load_dataset
    except ImportError:
        raise FileNotFoundError(f"{reason}; or pip install datasets, to fetch it") from None
    path, configuration = HUB[name]
    try:
        return load_dataset(path, configuration, split="validation" if split == "valid" else split)
    except Exception as error:
        raise FileNotFoundError(
            f"{reason}; and {path} could not be fetched ({type(error).__name__}: {error})"
        ) from error
