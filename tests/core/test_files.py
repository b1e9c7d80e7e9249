import json
import os

import pytest

from attractor.core import files


def test_content_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "x.txt"
    files.write_text(path, "old")
    assert files.write_text(path, "newer") == path
    assert path.read_text() == "newer"
    assert [p.name for p in path.parent.iterdir()] == ["x.txt"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = files.write_text(tmp_path / "x.txt", "old")

    def interrupted(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


def test_json_holds_no_nan(tmp_path):
    path = files.write_json(tmp_path / "x.json", {"a": [1.5, float("nan")], "b": float("inf"), 3: "x"})
    assert json.loads(path.read_text()) == {"a": [1.5, None], "b": None, "3": "x"}


def test_files_can_be_read_by_others(tmp_path):
    path = files.write_text(tmp_path / "x.txt", "x")
    plain = tmp_path / "plain"
    plain.write_text("x")
    assert path.stat().st_mode == plain.stat().st_mode
