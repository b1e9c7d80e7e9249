"""Tokenizers: bytes, words between spaces, and WordPiece with the vocabulary of BERT."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from attractor.common.checks import check_whole
from attractor.data.folders import Folder, folder_of

VOCABULARY = "bert_base_uncased_vocab.txt"


class Tokenizer(Protocol):
    """An object that converts texts into ids from 0 to size - 1 and back."""

    size: int
    padding: int  # id of padding
    end: int  # id at the end of a line
    first: int | None  # id at the beginning of a text to classify

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special ones."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return a text that has these ids."""
        ...


class Bytes:
    """A tokenizer of UTF-8 bytes, for every text; 256 is padding, and a newline ends a line."""

    size, padding, end, first = 257, 256, 10, None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return one id per byte."""
        check_texts(texts)
        return [list(text.encode(errors="replace")) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text without padding."""
        return bytes(i for i in _check_ids(ids, self.size) if i < 256).decode(errors="replace")


class Words:
    """A tokenizer of words between spaces, as in WikiText; unknown words become ``<unk>``.

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
        """Return a tokenizer of the most frequent words in texts; `size` counts the special ones."""
        texts = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else texts
        check_texts(texts)
        if size is not None:
            check_whole("size", size, 3, "three words are special")
        counts = Counter(word for text in texts for word in text.split())
        special = ["<pad>", "<unk>", "<eos>"]
        common = [word for word, _ in counts.most_common() if word not in special]
        return cls((special + common)[:size])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return one id per word."""
        check_texts(texts)
        return [[self.ids.get(word, self.unknown) for word in text.split()] for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the words, separated by spaces, without padding."""
        return " ".join(self.words[i] for i in _check_ids(ids, self.size) if i != self.padding)


class WordPiece:
    """The lower-case WordPiece tokenizer of BERT, from the `tokenizers` library.

    Args:
        vocabulary: a file with one piece per line, such as ``bert_base_uncased_vocab.txt``, or its
            folder; None: the folder in ``ATTRACTOR_DATA``, or else the hub.
    """

    def __init__(self, vocabulary: Folder = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ImportError(
                "WordPiece needs the tokenizers library: pip install 'attractor[text]'; text.Words and "
                "text.Bytes need no library"
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
                f"no WordPiece vocabulary at {place}; give a file with one piece per line, or its folder"
            )
        else:
            try:
                self.tokenizer = tokenizers.Tokenizer.from_pretrained("bert-base-uncased")
            except Exception as error:
                raise FileNotFoundError(
                    f"no {VOCABULARY}: name its folder with ATTRACTOR_DATA, or its path as "
                    f"vocabulary=; it could not be downloaded either ({type(error).__name__})"
                ) from None
        special = {
            name: self.tokenizer.token_to_id(f"[{name}]") for name in ("PAD", "SEP", "CLS", "UNK")
        }
        if None in special.values():
            raise ValueError(f"{place} is no BERT vocabulary: it lacks one of {', '.join(special)}")
        self.padding, self.end, self.first, _ = special.values()
        self.size = self.tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ids of the pieces; ``<unk>`` of WikiText becomes ``[UNK]`` of BERT."""
        bert_texts = [text.replace("<unk>", "[UNK]") for text in texts]
        return [e.ids for e in self.tokenizer.encode_batch(bert_texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the pieces, joined to words."""
        return self.tokenizer.decode(list(ids))


def check_texts(texts: Any) -> None:
    """Raise unless `texts` is a list of texts."""
    if isinstance(texts, str) or not (hasattr(texts, "__getitem__") and hasattr(texts, "__len__")):
        raise TypeError(
            f"texts is a {type(texts).__name__}; give a list of texts, [text] for a single one"
        )
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"texts holds a {type(text).__name__}; all of them must be str")


def _check_ids(ids: Any, size: int) -> list[int]:
    """Return a list of ids; raise unless all of them are below `size`."""
    if not isinstance(ids, Iterable):
        raise TypeError(f"ids is a {type(ids).__name__}; give numbers from 0 to {size - 1}")
    values = list(ids)
    for i in values:
        if not hasattr(i, "__index__") or not 0 <= i < size:
            raise ValueError(f"{i!r} is no id of this tokenizer; they go from 0 to {size - 1}")
    return [int(i) for i in values]


def check_tokenizer(tokenizer: Any) -> None:
    """Raise unless `tokenizer` has the attributes of a `Tokenizer`."""
    if not (
        hasattr(tokenizer, "encode") and hasattr(tokenizer, "padding") and hasattr(tokenizer, "end")
    ):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; give one such as Bytes() or Words.of(texts)"
        )
