"""Texts from files of every layout, tokens of every kind, streams and padding; on a tiny text."""

import csv
import io
import lzma
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attractor.data import text

WIKI = ' \n = Cats = \n \n The cat sat on the <unk> . \n A dog , too : " é " . \n'
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "##s", "dog", "a", "."]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("ATTRACTOR_DATA", raising=False)
    pack = lambda name, content: (tmp_path / name).write_bytes(lzma.compress(content.encode()))
    pack("wikitext2_train.txt.xz", WIKI)
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "wiki.valid.tokens").write_text(WIKI, encoding="utf8")
    table = io.StringIO(newline="")
    csv.writer(table).writerows(
        [["label", "rating", "id", "text"], [0, 1, "3", 'bad, "really"\nbad<br />'], [1, 9, "4", "good"]]
    )
    pack("imdb_train.csv.xz", table.getvalue())
    pack(
        "ag_news_train_subset.csv.xz",
        '"3","Wall St.","Stocks fell, again"\n"1","Talks","They ""met"""\n',
    )
    pack("sst2_dev.tsv.xz", 'a "fine film\t1\nnot so\t0\n')
    pack("sst2_glue_train.tsv.xz", "sentence\tlabel\nfine\t1\n")
    (tmp_path / text.VOCABULARY).write_text("\n".join(PIECES) + "\n")
    return tmp_path


def test_wikitext(folder, monkeypatch):
    lines = text.lines("wikitext2", "train", folder)
    assert lines == WIKI.split("\n")[:-1]
    assert text.lines("wikitext2", "valid", folder) == lines
    monkeypatch.setenv("ATTRACTOR_DATA", str(folder))
    assert text.lines("wikitext2", "train") == lines


def test_labelled_texts(folder):
    assert text.labelled("imdb", "train", folder) == (['bad, "really"\nbad<br />', "good"], [0, 1])
    assert text.labelled("ag_news", "train", folder) == (
        ["Wall St. Stocks fell, again", 'Talks They "met"'],
        [2, 0],
    )
    assert text.labelled("sst2", "valid", folder) == (['a "fine film', "not so"], [1, 0])
    assert text.labelled("sst2_glue", "train", folder) == (["fine"], [1])


def test_what_is_not_there_says_what_to_do(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        FileNotFoundError, match=r"imdb_test.csv.xz is not in .*; or pip install datasets"
    ):
        text.labelled("imdb", "test", folder)
    with pytest.raises(FileNotFoundError, match=r"with folder= or in ATTRACTOR_DATA; or pip install"):
        text.lines("wikitext2", "test")
    with pytest.raises(ValueError, match=r"imdb has no split 'valid'; it has train, test: hold out"):
        text.labelled("imdb", "valid", folder)
    with pytest.raises(ValueError, match="no data set is called 'wikitext3'; there are wikitext2"):
        text.lines("wikitext3", "train", folder)
    with pytest.raises(ValueError, match=r"'imdb' has labels: read it with labelled\('imdb', 'train'\)"):
        text.lines("imdb", "train", folder)
    with pytest.raises(
        ValueError, match="has no labels, or is unknown; the data sets with labels are imdb"
    ):
        text.labelled("wikitext2", "train", folder)


def test_the_hub_is_asked_last(folder, monkeypatch):
    asked = []

    def load_dataset(path, configuration, split):
        asked.append((path, configuration, split))
        if path == "stanfordnlp/imdb":
            raise ConnectionError("no network")
        return [{"text": "a line\n", "label": 1}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert text.lines("wikitext103", "valid", folder) == ["a line"]
    assert text.labelled("sst2", "valid") == (["a line\n"], [1])
    assert asked == [("Salesforce/wikitext", "wikitext-103-v1", "validation"),
                              ("SetFit/sst2", None, "validation")]  # fmt: skip
    with pytest.raises(FileNotFoundError, match=r"could not be fetched \(ConnectionError: no network\)"):
        text.labelled("imdb", "test", folder)


def test_bytes_know_every_text():
    tokens = text.Bytes()
    (ids,) = tokens.encode(["é a\n"])
    assert ids == [195, 169, 32, 97, 10]
    assert tokens.decode([*ids, 256]) == "é a\n"
    assert tokens.decode([195]) == "\ufffd"
    assert max(*ids, tokens.end, tokens.padding) < tokens.size


def test_words():
    tokens = text.Words.of(WIKI.split("\n"))
    assert tokens.words[:5] == [
        "<pad>",
        "<unk>",
        "<eos>",
        "=",
        ".",
    ]  # the most frequent, then their order
    assert tokens.encode(["The new cat <unk>"]) == [[tokens.ids["The"], 1, tokens.ids["cat"], 1]]
    assert tokens.decode([3, 1, 4, 0]) == "= <unk> ."
    assert text.Words.of(WIKI.split("\n"), size=5).words == tokens.words[:5]
    assert text.Words(tokens.words).encode(["cat"]) == tokens.encode(["cat"])
    with pytest.raises(ValueError, match=r"use Words.of\(texts\)"):
        text.Words(["a", "b"])


def test_word_pieces(folder, monkeypatch):
    pytest.importorskip("tokenizers")
    tokens = text.WordPiece(folder)
    assert tokens.encode(["The CATS sat.", "a <unk> bird"]) == [[4, 5, 7, 6, 10], [9, 1, 1]]
    assert (tokens.size, tokens.padding, tokens.end, tokens.first) == (11, 0, 3, 2)
    assert tokens.decode([4, 5, 7]) == "the cats"
    monkeypatch.setenv("ATTRACTOR_DATA", str(folder))
    assert text.WordPiece().size == text.WordPiece(folder / text.VOCABULARY).size == 11
    with pytest.raises(FileNotFoundError, match="no WordPiece vocabulary at"):
        text.WordPiece(folder / "none.txt")
    (folder / "wrong.txt").write_text("the\ncat\n[UNK]\n")
    with pytest.raises(ValueError, match="is no BERT vocabulary: sep_token not found"):
        text.WordPiece(folder / "wrong.txt")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'attractor\[text\]'"):
        text.WordPiece(folder)


def test_streams_and_windows(folder):
    lines = text.lines("wikitext2", "train", folder)
    tokens = text.Words.of(lines)
    ids = text.stream(lines, tokens)
    assert ids.dtype == torch.int64
    assert len(ids) == sum(len(line.split()) + 1 for line in lines)
    assert tokens.decode(ids.tolist()[:6]) == "<eos> = Cats = <eos> <eos>"
    pieces = text.windows(ids, 4)
    assert pieces.shape == ((len(ids) - 1) // 4, 5)
    assert torch.equal(pieces[:, 1:].flatten(), ids[1 : 1 + 4 * len(pieces)])
    assert torch.equal(pieces[:-1, -1], pieces[1:, 0])
    with pytest.raises(ValueError, match="a stream of 3 tokens has no piece of 4"):
        text.windows(ids[:3], 4)
    assert len(text.stream([], tokens)) == 0


def test_streams_are_kept(folder):
    lines = text.lines("wikitext2", "train", folder)
    kept = folder / "kept"
    for tokens in (text.Bytes(), text.Words.of(lines), text.Words.of(lines, size=6)):
        first = text.stream(lines, tokens, cache=kept)
        assert torch.equal(first, text.stream(lines, tokens))
        assert torch.equal(text.stream(lines, tokens, cache=kept), first)
    text.stream(lines[:-1], text.Bytes(), cache=kept)
    assert len(list(kept.iterdir())) == 4


def test_what_is_kept_is_of_this_tokenizer_and_these_texts(folder):
    kept, common = folder / "kept", ["one"] * 100
    special = ["<pad>", "<unk>", "<eos>", "one"]
    for words in (["red", "blue"], ["blue", "red"]):
        tokens, texts = text.Words([*special, *words]), [*common, "red"]
        assert text.stream(texts, tokens, cache=kept)[-2] == tokens.ids["red"]
    for texts in ([*common, "red\nblue"], [*common, "red", "blue"]):
        assert len(text.padded(texts, tokens, 4, cache=kept)[0]) == len(texts)


def test_padded(folder):
    ids, real = text.padded(["ab", "", "abcd"], text.Bytes(), max_tokens=3)
    assert ids.tolist() == [[97, 98, 256], [256] * 3, [97, 98, 99]]
    assert real.sum(1).tolist() == [2, 0, 3]
    assert text.padded([], text.Bytes(), 3)[0].shape == (0, 0)
    with pytest.raises(ValueError, match="max_tokens = 0 must be at least 1"):
        text.padded(["a"], text.Bytes(), 0)
    pytest.importorskip("tokenizers")
    ids, _ = text.padded(["the cat"], text.WordPiece(folder), 8)
    assert ids.tolist() == [[2, 4, 5]]


def test_padded_texts_are_kept(folder):
    kept, texts = folder / "kept", ["ab", "", "abcd"] * 700
    ids, real = text.padded(texts, text.Bytes(), 3)
    for _ in range(2):
        mapped, same = text.padded(texts, text.Bytes(), 3, cache=kept)
        assert mapped.dtype == torch.int16
        assert torch.equal(mapped.long(), ids)
        assert torch.equal(same, real)
    assert len(list(kept.iterdir())) == 2
    text.padded(texts, text.Bytes(), 4, cache=kept)
    assert len(list(kept.iterdir())) == 4
    large = text.Words([*("<pad>", "<unk>", "<eos>"), *map(str, range(40000))])
    assert text.padded(["39999 1"], large, 8, cache=kept)[0].tolist() == [[40002, 4]]
    assert text.padded([], text.Bytes(), 3, cache=kept)[0].shape == (0, 0)


@pytest.mark.parametrize("damage", ["shorter", "empty", "other ids", "another dtype", "removed"])
def test_damaged_ids_are_made_again(tmp_path, damage):
    texts = ["ab", "", "abcd"] * 20
    for call in (
        lambda: [text.stream(texts, text.Bytes(), cache=tmp_path / "stream")],
        lambda: text.padded(texts, text.Bytes(), 3, cache=tmp_path / "padded"),
    ):
        expected = [x.clone() for x in call()]
        for path in tmp_path.rglob("*.npy"):
            content = path.read_bytes()
            other = np.full(len(expected[0]), 99_999 if damage == "other ids" else 0.5)
            if damage in ("shorter", "empty"):
                path.write_bytes(content[:-3] if damage == "shorter" else b"")
            elif damage == "removed":
                path.unlink()
            else:
                np.save(path, other.astype(np.int64) if damage == "other ids" else other)
        assert all(map(torch.equal, call(), expected))


def test_ids_are_read_from_plain_files(tmp_path):
    """A pipe was waited for."""
    text.stream(["ab"], text.Bytes(), cache=tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="is not a plain file but a named pipe"):
        text.stream(["ab"], text.Bytes(), cache=tmp_path)


def test_compressed_texts_have_a_largest_size(tmp_path, monkeypatch):
    path = tmp_path / "wikitext2_train.txt.xz"
    path.write_bytes(lzma.compress(b"a\n" * 500))
    assert len(text.lines("wikitext2", "train", tmp_path)) == 500
    monkeypatch.setattr(text, "LARGEST_TEXT", 999)
    with pytest.raises(ValueError, match="has more than the 999 bytes of text that are read"):
        text.lines("wikitext2", "train", tmp_path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"cannot be decompressed .*; fetch it again"):
        text.lines("wikitext2", "train", tmp_path)


def test_tokenizers_that_share_a_name_do_not_share_what_is_kept(tmp_path):
    """A user's own class is called as ours is, and differs after the first texts only."""

    def named(shift):
        class Bytes(text.Bytes):
            def encode(self, texts):
                return [[i + shift * (word == "rare") for i in word.encode()] for word in texts]

        return Bytes()

    texts = ["common"] * 150 + ["rare"]
    for tokenizer in (text.Bytes(), named(1), named(2)):
        found = text.stream(texts, tokenizer, cache=tmp_path)
        assert torch.equal(found, text.stream(texts, tokenizer))
    assert len(list(tmp_path.iterdir())) == 3
    assert torch.equal(text.stream(texts, named(1), cache=tmp_path), text.stream(texts, named(1)))
    assert len(list(tmp_path.iterdir())) == 3
