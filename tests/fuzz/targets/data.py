"""Images and texts."""

import tempfile
from typing import Any

import torch

from attractor.data import images, text
from tests.fuzz.judging import Call, calling, target
from tests.fuzz.strategies import Maker


def an_image_set(m: Maker) -> images.ImageSet:
    n, channels = m.whole_number(0, 5), m.pick((1, 3, 2))
    pictures = torch.randint(256, (n, channels, 2, 3), generator=m.generator(), dtype=torch.uint8)
    labels = torch.randint(3, (n,), generator=m.generator())
    return images.ImageSet(pictures, labels, ["a", "b", "c"], (0.5,) * channels, (0.2,) * channels)


@target("attractor.data.images.ImageSet")
def _image_set(m: Maker) -> Call:
    n = m.whole_number(0, 3)
    pictures = m.tensor((n, 3, 2, 2), [torch.uint8])
    labels = m.integers((n,), 0, 2)
    labels = (
        labels.long() if isinstance(labels, torch.Tensor) and not labels.is_floating_point() else labels
    )
    mean = m.choice([(0.5, 0.5, 0.5)], odd=((), (0.5,), (0.0, 0.0)))
    std = m.choice([(0.2, 0.2, 0.2)], odd=((), (0.0, 0.0, 0.0)))
    return calling(images.ImageSet, pictures, labels, ["a", "b", "c"], mean, std)


@target("attractor.data.images.ImageSet.take")
def _take(m: Maker) -> Call:
    data = an_image_set(m)
    index = (
        m.integers((m.whole_number(0, 3),), 0, max(0, len(data) - 1))
        if len(data)
        else torch.zeros(0, dtype=torch.long)
    )
    return calling(lambda index: data.take(index).images, index)


for _name in ("subset", "hold_out"):

    @target(f"attractor.data.images.ImageSet.{_name}")
    def _part(m: Maker, name: str = _name) -> Call:
        data = an_image_set(m)
        return calling(getattr(data, name), m.whole(0, 5), m.whole(0, 99))


@target("attractor.data.images.ImageSet.rgb")
def _rgb(m: Maker) -> Call:
    return calling(an_image_set(m).rgb)


@target("attractor.data.images.ImageSet.normalised")
def _normalised(m: Maker) -> Call:
    data = an_image_set(m)
    index: Any = slice(0, m.whole_number(0, 3))
    if len(data) and m.flag():
        index = m.integers((2,), 0, len(data) - 1)
    return calling(data.normalised, index)


@target("attractor.data.images.load", raises=(OSError, ImportError))
def _load(m: Maker) -> Call:
    m.seed()
    return calling(lambda name, split: images.load(name, split, tempfile.gettempdir()).images.shape,
                   m.choice(["digits"], odd=("digit", "imagefolder")), m.choice(["train", "test"]))  # fmt: skip


# Texts

TEXTS = ["", "a word", "two  words here", "Ünïcödé \U0001f600", "<unk> <pad>", "line\nbreak", "\0"]


def texts(m: Maker) -> Any:
    if m.strange():
        return m.pick((None, 3, [3], [None], "text", [b"bytes"], []))
    return [m.pick(TEXTS) for _ in range(m.whole_number(0, 4))]


def tokenizer(m: Maker) -> Any:
    return m.pick((text.Bytes(), text.Words.of(["a word here", "two words"])))


for _name in ("Bytes", "Words"):

    def _made(name: str) -> Any:
        return text.Bytes() if name == "Bytes" else text.Words.of(["a word here", "two words"])

    @target(f"attractor.data.text.{_name}.encode")
    def _encode(m: Maker, name: str = _name) -> Call:
        m.seed()
        return calling(_made(name).encode, texts(m))

    @target(f"attractor.data.text.{_name}.decode")
    def _decode(m: Maker, name: str = _name) -> Call:
        m.seed()
        size = _made(name).size
        ids = [m.whole_number(0, size - 1) for _ in range(m.whole_number(0, 4))]
        return calling(
            _made(name).decode, m.pick(([-1], [size + 5], None, ["a"], [2.5], 3)) if m.strange() else ids
        )


@target("attractor.data.text.Words")
def _words(m: Maker) -> Call:
    m.seed()
    return calling(
        text.Words,
        m.choice([["<pad>", "<unk>", "<eos>", "word"]], odd=([], ["word"], "<pad>", [1, 2, 3])),
        finite=False,
    )


@target("attractor.data.text.Words.of")
def _words_of(m: Maker) -> Call:
    m.seed()
    return calling(
        lambda t, n: text.Words.of(t, n).size, texts(m), m.choice([None, 3, 10], odd=(0, -1, 2.5))
    )


@target("attractor.data.text.stream")
def _stream(m: Maker) -> Call:
    m.seed()
    return calling(text.stream, texts(m), tokenizer(m) if not m.strange() else m.pick((None, "bytes")))


@target("attractor.data.text.padded")
def _padded(m: Maker) -> Call:
    m.seed()
    return calling(text.padded, texts(m), tokenizer(m), m.whole(1, 6))


@target("attractor.data.text.windows")
def _windows(m: Maker) -> Call:
    ids = m.integers((m.whole_number(0, 12),), 0, 9)
    return calling(text.windows, ids, m.whole(1, 5))


for _name, _names in (("lines", ["wikitext2", "wikitext103"]), ("labelled", ["imdb", "sst2"])):

    @target(f"attractor.data.text.{_name}", raises=(OSError, ImportError))
    def _read(m: Maker, name: str = _name, names: Any = _names) -> Call:
        m.seed()
        return calling(
            getattr(text, name),
            m.choice(names, odd=("wiki", "imdb ")),
            m.choice(["train", "test"]),
            "/nowhere/at/all",
        )
