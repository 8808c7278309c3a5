"""Files that are written whole or not at all."""

import itertools
import os
import stat

import pytest

from scheduler.core.files import replace_text
from scheduler.store import text_files
from scheduler.store.store import shipped


def test_what_is_written_takes_the_place_of_what_was_there(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link"
    before = os.umask(0o027)
    replace_text(path, "one\n")
    os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    link.symlink_to(path.name)
    replace_text(link, "zwei é\n")
    assert path.read_bytes() == "zwei é\n".encode()
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "link"]


def test_a_terminal_or_a_pipe_is_written_as_it_is():
    reader, writer = os.pipe()
    replace_text(f"/dev/fd/{writer}", "piped\n")
    os.close(writer)
    with os.fdopen(reader) as piped:
        assert piped.read() == "piped\n"


def test_a_file_in_a_directory_that_is_missing_is_named_with_the_directory(tmp_path):
    file = tmp_path / "missing" / "a.txt"
    with pytest.raises(FileNotFoundError, match=r"the directory .*missing does not exist: create it") as told:
        replace_text(file, "one")
    assert told.value.filename == str(file)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as told:
        replace_text(tmp_path / "file" / "a.txt", "one")
    assert told.value.filename == str(tmp_path / "file" / "a.txt")


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path, monkeypatch):
    record, *others = itertools.islice(shipped().records(operation="softmax"), 3)
    (path,) = text_files.add_records(tmp_path, [record])
    before = path.read_bytes()

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(text_files.StoreError, match=r"cannot write .*: .*No space left on device"):
        text_files.add_records(tmp_path, others)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
