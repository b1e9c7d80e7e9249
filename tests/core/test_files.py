import json
import os
from pathlib import Path

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


def test_names_of_new_folders_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino) or sync(handle)
    )
    path = files.write_text(tmp_path / "a" / "b" / "x.txt", "x")
    inodes = [p.stat().st_ino for p in (tmp_path, tmp_path / "a", path, path.parent)]
    assert synced == inodes  # a folder after what was made in it, the file before it has its name


def test_content_in_parts_is_written_whole_or_not_at_all(tmp_path):
    path = files.write_parts(tmp_path / "x", (b"ab", memoryview(b"cd")))
    assert path.read_bytes() == b"abcd"

    def breaks():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_parts(path, breaks())
    assert path.read_bytes() == b"abcd"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_sweeping_takes_only_what_was_left_of_one_file(tmp_path):
    mine, other = f".x.txt.{'a1' * 16}", f".y.txt.{'a1' * 16}"
    for name in (mine, other, ".x.txt.note", "x.txt"):
        (tmp_path / name).write_text("")
    files.sweep(tmp_path / "x.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([other, ".x.txt.note", "x.txt"])
    files.sweep(tmp_path / "nowhere" / "x.txt")


def test_sweeping_keeps_what_another_writer_has_not_finished(tmp_path):
    path = tmp_path / "x.txt"

    def swept():
        yield b"ab"
        files.sweep(path)
        yield b"cd"

    assert files.write_parts(path, swept()).read_bytes() == b"abcd"
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


def test_a_file_that_was_swept_before_its_lock_is_created_again(tmp_path, monkeypatch):
    lock = files.fcntl.flock
    swept = []

    def late(file, flags):
        if not swept:
            swept.append(file.name)
            Path(file.name).unlink()
        return lock(file, flags)

    monkeypatch.setattr(files.fcntl, "flock", late)
    assert files.write_text(tmp_path / "x.txt", "ab").read_text() == "ab"
    assert swept
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_is_written_once(tmp_path, monkeypatch, links):
    def refused(*_):
        raise OSError(95, "Operation not supported")

    if not links:
        monkeypatch.setattr(files.os, "link", refused)
    path = tmp_path / "folder" / "run.json"
    assert files.write_new(path, b"first")
    assert not files.write_new(path, b"second")
    assert path.read_bytes() == b"first"
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]
