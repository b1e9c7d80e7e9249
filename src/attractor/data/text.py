"""Texts and their tokens: WikiText for language models; IMDb, SST-2 and AG News for classifiers.

`lines` and `labelled` read them. `WordPiece` (BERT's vocabulary; needs ``pip install
'attractor[text]'``), `Words` and `Bytes` (which need nothing) turn them into ids: `stream` for language
models, `padded` for classifiers.
"""

import csv
import hashlib
import io
import lzma
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from attractor.core.checks import as_int, check_tensor, check_whole, nearest
from attractor.core.files import write_bytes
from attractor.core.fingerprint import fingerprint
from attractor.data.folders import Folder, folder_of

SPLITS = ("train", "valid", "test")

# name -> split -> names a file may have, without .xz; and the same data on the Hugging Face hub.
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
VOCABULARY = "bert_base_uncased_vocab.txt"
PORTION = 1000  # texts that are turned into ids at a time


def lines(name: str, split: str, folder: Folder = None) -> list[str]:
    """The lines of ``"wikitext2"`` or ``"wikitext103"``, empty ones included, without their ends.

    Args:
        name: of the data set.
        split: ``"train"``, ``"valid"`` or ``"test"``.
        folder: where its files are; None: the folder that ``ATTRACTOR_DATA`` names.
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
    """The texts of ``"imdb"``, ``"ag_news"``, ``"sst2"`` or ``"sst2_glue"``, and their labels from 0.

    In the order of their file, which may be sorted by label: shuffle. In sentiments 1 is positive; AG
    News has World, Sports, Business, Sci/Tech. ``"sst2"`` is whole sentences, ``"sst2_glue"`` phrases in
    training.
    """
    if name not in CLASSES:
        known = ", ".join(CLASSES)
        raise ValueError(f"{name!r} has no labels, or is unknown; with labels there are {known}")
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


class Tokenizer(Protocol):
    """What turns texts into ids from 0 to size - 1 and back."""

    size: int
    padding: int  # fills up what is too short
    end: int  # ends a line
    first: int | None  # begins a text to be classified

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special ones."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """A text that has these ids."""
        ...


class Bytes:
    """A text's bytes in UTF-8; 256 is padding, a line's end its own byte. Knows every text."""

    size, padding, end, first = 257, 256, 10, None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """A byte, an id."""
        _check_texts(texts)
        return [list(text.encode(errors="replace")) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text, padding left out."""
        return bytes(i for i in _checked_ids(ids, self.size) if i < 256).decode(errors="replace")


class Words:
    """Words between spaces, as WikiText has them; those not in the vocabulary are ``<unk>``.

    Args:
        vocabulary: the words, of which the first three are ``<pad>``, ``<unk>`` and ``<eos>``.
    """

    padding, unknown, end, first = 0, 1, 2, None

    def __init__(self, vocabulary: Sequence[str]) -> None:
        if list(vocabulary[:3]) != ["<pad>", "<unk>", "<eos>"]:
            raise ValueError("the first three words must be <pad>, <unk> and <eos>; use Words.of(texts)")
        if not all(isinstance(word, str) for word in vocabulary):
            raise TypeError("a vocabulary is a list of words, all of them str")
        self.words = list(vocabulary)
        self.ids = {word: i for i, word in enumerate(self.words)}
        self.size = len(self.words)

    @classmethod
    def of(cls, texts: Iterable[str], size: int | None = None) -> "Words":
        """The most frequent words of these texts, all or `size` of them with the special ones."""
        texts = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else texts
        _check_texts(texts)
        if size is not None:
            check_whole("size", size, 3, "three words are special")
        counts = Counter(word for text in texts for word in text.split())
        special = ["<pad>", "<unk>", "<eos>"]
        common = [word for word, _ in counts.most_common() if word not in special]
        return cls((special + common)[:size])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """A word, an id."""
        _check_texts(texts)
        return [[self.ids.get(word, self.unknown) for word in text.split()] for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The words with spaces between them, padding left out."""
        return " ".join(self.words[i] for i in _checked_ids(ids, self.size) if i != self.padding)


class WordPiece:
    """BERT's pieces of words, in lower case, by the `tokenizers` library.

    Args:
        vocabulary: a file with one piece a line, such as ``bert_base_uncased_vocab.txt``; or the folder
            it is in; None: the folder that ``ATTRACTOR_DATA`` names, else the hub.
    """

    def __init__(self, vocabulary: Folder = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ImportError(
                "WordPiece needs the tokenizers library: pip install 'attractor[text]'; text.Words and "
                "text.Bytes need nothing"
            ) from None
        place = folder_of(vocabulary)
        if place is not None and place.is_dir():
            place = place / VOCABULARY
        if place is not None and place.is_file():
            try:
                self.tokenizer: Any = tokenizers.BertWordPieceTokenizer(str(place), lowercase=True)
            except TypeError as error:
                raise ValueError(f"{place} is no BERT vocabulary: {error}") from None
        elif vocabulary is not None:
            raise FileNotFoundError(
                f"no WordPiece vocabulary at {place}; it is a file with a piece a line"
            )
        else:
            try:
                self.tokenizer = tokenizers.Tokenizer.from_pretrained("bert-base-uncased")
            except Exception as error:
                raise FileNotFoundError(
                    f"no {VOCABULARY}: name its folder with ATTRACTOR_DATA, or its path as "
                    f"vocabulary=; the hub gave none either ({type(error).__name__})"
                ) from None
        special = {
            name: self.tokenizer.token_to_id(f"[{name}]") for name in ("PAD", "SEP", "CLS", "UNK")
        }
        if None in special.values():
            raise ValueError(f"{place} is no BERT vocabulary: it lacks one of {', '.join(special)}")
        self.padding, self.end, self.first, _ = special.values()
        self.size = self.tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the pieces; WikiText's ``<unk>`` is BERT's ``[UNK]``."""
        known = [text.replace("<unk>", "[UNK]") for text in texts]
        return [e.ids for e in self.tokenizer.encode_batch(known, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The pieces put together, as far as possible."""
        return self.tokenizer.decode(list(ids))


def _check_texts(texts: Any) -> None:
    """Raise unless it is a list of texts."""
    if isinstance(texts, str) or not (hasattr(texts, "__getitem__") and hasattr(texts, "__len__")):
        raise TypeError(
            f"texts is a {type(texts).__name__}; give a list of texts, [text] for a single one"
        )
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"texts holds a {type(text).__name__}; all of them must be str")


def _checked_ids(ids: Any, size: int) -> list[int]:
    """A list of ids below size."""
    if not isinstance(ids, Iterable):
        raise TypeError(f"ids is a {type(ids).__name__}; give numbers from 0 to {size - 1}")
    given = list(ids)
    for i in given:
        if not hasattr(i, "__index__") or not 0 <= i < size:
            raise ValueError(f"{i!r} is no id of this tokenizer; they go from 0 to {size - 1}")
    return [int(i) for i in given]


def _check_tokenizer(tokenizer: Any) -> None:
    """Raise unless it is something like a `Tokenizer`."""
    if not (
        hasattr(tokenizer, "encode") and hasattr(tokenizer, "padding") and hasattr(tokenizer, "end")
    ):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; give one such as Bytes() or Words.of(texts)"
        )


def stream(texts: Sequence[str], tokenizer: Tokenizer, cache: Folder = None) -> Tensor:
    """All texts as one row of ids ``[n]``, int64, each followed by the tokenizer's `end`.

    Args:
        texts: in their order.
        tokenizer: of them.
        cache: a folder in which the ids are kept under a name made from texts and tokenizer; the next
            time they are mapped from there into memory.
    """
    _check_texts(texts)
    _check_tokenizer(tokenizer)
    if cache is None:
        return torch.from_numpy(_flat(texts, tokenizer))
    path = Path(cache) / f"{_key(texts, tokenizer)}.npy"
    if not path.exists():
        _keep(path, _flat(texts, tokenizer))
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def padded(
    texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int, cache: Folder = None
) -> tuple[Tensor, Tensor]:
    """Texts side by side: ids ``[texts, tokens]``, int64, and which are real tokens, bool.

    Each begins with the tokenizer's `first`, if it has one, and is cut after max_tokens; shorter ones
    are filled up on the right.

    Args:
        texts: in their order.
        tokenizer: of them.
        max_tokens: the longest that stays whole.
        cache: a folder in which the ids are kept, as `stream` does; the next time they are mapped from
            there into memory. They then have the narrowest type that holds them, int16 or int32: call
            ``.long()`` on what goes into a model.
    """
    _check_texts(texts)
    _check_tokenizer(tokenizer)
    max_tokens = as_int(max_tokens)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens!r} must be at least 1")
    if cache is None:
        ids, lengths = _side_by_side(texts, tokenizer, max_tokens, np.int64)
    else:
        key = _key(texts, tokenizer, f"{max_tokens} tokens")
        paths = [Path(cache) / f"{key}{end}.npy" for end in ("", ".lengths")]
        if not all(path.exists() for path in paths):
            narrow = np.int16 if tokenizer.size <= np.iinfo(np.int16).max else np.int32
            for path, made in zip(paths, _side_by_side(texts, tokenizer, max_tokens, narrow)):
                _keep(path, made)
        ids, lengths = (np.load(path, mmap_mode="c") for path in paths)
    real = torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]
    return torch.from_numpy(ids), real


def windows(ids: Tensor, tokens: int) -> Tensor:
    """Pieces ``[n, tokens + 1]`` of a stream ``[m]``, one token shared with the next piece.

    So that each piece's tokens but the last are inputs, all but the first are targets, and every token
    of the stream but the first is a target once. What does not fill a piece is left out.
    """
    check_tensor("ids", ids, "[m]", floating=False)
    check_whole("tokens", tokens, 1)
    if ids.dim() != 1:
        raise ValueError(f"ids have shape {list(ids.shape)}; give one stream [m]")
    if len(ids) < tokens + 1:
        raise ValueError(f"a stream of {len(ids)} tokens has no piece of {tokens} + 1")
    return ids.unfold(0, tokens + 1, tokens)


def _flat(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    rows = [np.array([*ids, tokenizer.end], dtype=np.int64) for ids in tokenizer.encode(texts)]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def _side_by_side(
    texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int, kind: type
) -> tuple[np.ndarray, np.ndarray]:
    """Ids ``[texts, tokens]``, padded on the right, and how many of each are real ``[texts]``."""
    begin = [] if tokenizer.first is None else [tokenizer.first]
    rows: list[np.ndarray] = []
    for start in range(0, len(texts), PORTION):  # lists of Python's numbers are large
        encoded = tokenizer.encode(texts[start : start + PORTION])
        rows += [np.array((begin + ids)[:max_tokens], dtype=kind) for ids in encoded]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    ids = np.full((len(rows), lengths.max(initial=0)), tokenizer.padding, dtype=kind)
    for own, row in zip(ids, rows):
        own[: len(row)] = row
    return ids, lengths


def _key(texts: Sequence[str], tokenizer: Tokenizer, *more: str) -> str:
    """A name for what a tokenizer makes of texts; another tokenizer of the same name has another."""
    special = [getattr(tokenizer, name, None) for name in ("first", "end", "padding")]
    given = (fingerprint(tokenizer), tokenizer.size, *special, *more)
    digest = hashlib.sha256(repr(given).encode())
    digest.update(repr(_vocabulary(tokenizer)).encode())
    digest.update(repr(tokenizer.encode(texts[:100])).encode())
    for text in texts:
        own = text.encode()
        digest.update(f"{len(own)} ".encode() + own)
    return digest.hexdigest()[:32]


def _vocabulary(tokenizer: Tokenizer) -> Any:
    """All that an id may stand for, where a tokenizer has it in a known place."""
    own = getattr(tokenizer, "tokenizer", None)
    if own is not None and hasattr(own, "to_str"):
        return own.to_str()
    return getattr(tokenizer, "words", None)


def _keep(path: Path, array: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_bytes(path, buffer.getvalue())


def _find(name: str, split: str, folder: Folder) -> Path | None:
    """The file of a split, compressed or not; None if it is not there."""
    if name not in FILES:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join(FILES)}")
    if split not in FILES[name]:
        raise ValueError(
            f"{name} has no split {split!r}, but {', '.join(FILES[name])}; hold out a part of another"
        )
    place = folder_of(folder)
    if place is None:
        return None
    found = (place / f"{file}{end}" for file in FILES[name][split] for end in ("", ".xz"))
    return next((path for path in found if path.is_file()), None)


def _read(path: Path) -> str:
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf8", newline="") as file:
            return file.read()
    return path.read_bytes().decode("utf8")


def _from_hub(name: str, split: str, folder: Folder) -> Any:
    """The rows of a split, by the `datasets` library."""
    file = f"{FILES[name][split][0]}.xz"
    place = folder_of(folder)
    missing = (
        f"{file} is not in {place}" if place is not None
        else f"give the folder of {file} with folder= or in ATTRACTOR_DATA"
    )  # fmt: skip
    try:
        from datasets import load_dataset
    except ImportError:
        raise FileNotFoundError(f"{missing}; or pip install datasets, to fetch it") from None
    path, configuration = HUB[name]
    try:
        return load_dataset(path, configuration, split="validation" if split == "valid" else split)
    except Exception as error:
        raise FileNotFoundError(
            f"{missing}; and {path} could not be fetched ({type(error).__name__}: {error})"
        ) from error
