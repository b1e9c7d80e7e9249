import errno
import json
import os
from pathlib import Path

import pytest

from attractor.storage import files


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


def test_the_next_writer_removes_what_killed_writers_left(tmp_path):
    left, others = f".attractor-{'a1' * 16}", [f".x.txt.{'a1' * 16}", ".attractor-note", "y"]
    for name in (left, *others):
        (tmp_path / name).write_text("")
    files.write_text(tmp_path / "x.txt", "ab")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, "x.txt"])


def test_sweeping_keeps_what_another_writer_has_not_finished(tmp_path):
    path = tmp_path / "x.txt"

    def swept():
        yield b"ab"
        files._sweep.cache_clear()  # as in another process
        files.write_text(tmp_path / "y", "")
        yield b"cd"

    assert files.write_parts(path, swept()).read_bytes() == b"abcd"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.txt", "y"]


def test_a_file_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    """Names of temporary files do not depend on it."""
    assert files.write_text(tmp_path / ("x" * 250), "ab").read_text() == "ab"


def test_an_error_of_the_disk_names_the_file(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*x\.txt'"):
        files.write_text(tmp_path / "x.txt", "ab")
    assert not list(tmp_path.iterdir())


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


def test_a_folder_has_one_lock(tmp_path):
    with files.lock_folder(tmp_path / "deep" / "x") as locked:
        assert locked
        told = r"deep/x is in use: another process or thread .* Pass another folder, or wait"
        with (
            pytest.raises(files.FolderLockedError, match=told),
            files.lock_folder(tmp_path / "deep" / "x", wait=0.01),
        ):
            pass
    with files.lock_folder(tmp_path / "deep" / "x", wait=0):
        pass
    assert not list((tmp_path / "deep" / "x").iterdir())


def test_a_lock_is_of_the_folder_that_has_the_name_now(tmp_path):
    """An owner may remove the folder: whoever waited must not lock what has no name anymore."""
    with files.lock_folder(tmp_path / "x"):
        (tmp_path / "x").rmdir()
        with files.lock_folder(tmp_path / "x", wait=0):
            assert (tmp_path / "x").is_dir()


def test_a_lock_ends_with_its_owner_and_not_with_a_forked_child(tmp_path):
    import multiprocessing
    import signal

    fork = multiprocessing.get_context("fork")
    ready, held = fork.Event(), fork.Event()

    def own():
        with files.lock_folder(tmp_path):
            child = fork.Process(target=ready.wait)  # as the workers of a loader
            child.start()
            held.set()
            signal.pause()

    owner = fork.Process(target=own)
    owner.start()
    held.wait()
    owner.kill()
    owner.join()
    with files.lock_folder(tmp_path, wait=0):  # while the child lives
        ready.set()


def test_where_folders_cannot_be_locked_a_file_is(tmp_path, monkeypatch):
    """NFS locks files that are open for writing only."""
    lock = files.fcntl.flock

    def refused(handle, flags):
        if Path(f"/proc/self/fd/{handle}").resolve().is_dir():
            raise OSError(9, "Bad file descriptor")
        lock(handle, flags)

    monkeypatch.setattr(files.fcntl, "flock", refused)
    with files.lock_folder(tmp_path) as locked:
        assert locked
        assert [p.name for p in tmp_path.iterdir()] == [".lock"]
        with pytest.raises(files.FolderLockedError), files.lock_folder(tmp_path, wait=0.01):
            pass
    assert not list(tmp_path.iterdir())


def test_without_any_locks_work_goes_on(tmp_path, monkeypatch):
    def refused(handle, flags):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", refused)
    with files.lock_folder(tmp_path) as locked:
        assert not locked
    assert not list(tmp_path.iterdir())


@pytest.fixture(params=["link", "dangling link", "folder", "pipe", "device"])
def no_plain_file(request, tmp_path):
    path, target = tmp_path / "x.json", tmp_path / "target"
    if request.param == "folder":
        path.mkdir()
    elif request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        return Path(os.devnull), "a device"
    else:
        if request.param == "link":
            target.write_text("{}")
        path.symlink_to(target)
    return path, {"pipe": "a named pipe", "folder": "a folder"}.get(request.param, "a symbolic link")


def test_only_plain_files_are_written(no_plain_file):
    path, kind = no_plain_file
    before = path.lstat()
    for write in (files.write_text, files.write_json, lambda p, x: files.write_new(p, x.encode())):
        with pytest.raises(files.FileTypeError, match=rf"{path} is {kind}, .* Pass another path"):
            write(path, "new")
    assert path.lstat().st_ino == before.st_ino
    assert path.lstat().st_mode == before.st_mode


def test_only_plain_files_are_read(no_plain_file):
    path, kind = no_plain_file
    for read in (files.read_text, files.read_bytes, files.open_plain, files.check_source):
        with pytest.raises(files.FileTypeError, match=rf"{path} is not a plain file but {kind}"):
            read(path)


def test_links_to_folders_above_and_links_of_the_user_are_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    files.write_text(tmp_path / "data" / "x", "ä\r\nb")
    assert files.read_text(tmp_path / "data" / "x") == "ä\nb"
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "x")
    assert files.read_bytes(tmp_path / "link", link=True) == "ä\r\nb".encode()
    (tmp_path / "null").symlink_to(os.devnull)
    with pytest.raises(files.FileTypeError, match="is not a plain file but a device"):
        files.read_bytes(tmp_path / "null", link=True)


def test_a_folder_is_discarded_with_what_earlier_interruptions_left(tmp_path, monkeypatch):
    """An interrupted removal must not leave a part of a folder under its name."""
    folder = tmp_path / "run"
    (folder / "inside").mkdir(parents=True)
    (folder / "inside" / "file").write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", lambda *args, **options: None)  # killed before that
        files.discard_folder(folder)
    assert not folder.exists()
    assert len(list(tmp_path.iterdir())) == 1
    folder.mkdir()
    files.discard_folder(folder)
    files.discard_folder(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_writes_to_is_not_discarded(tmp_path):
    folder = tmp_path / "run"
    with files.lock_folder(folder), pytest.raises(files.FolderLockedError):
        files.discard_folder(folder, wait=0.0)
    assert folder.is_dir()
