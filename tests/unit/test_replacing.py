"""Files and folders that are replaced at once: the old one or the new one, and no temporary files."""

from __future__ import annotations

import errno
import os

import pytest
from helpers.cases import case

from hvdkit.machine.replacing import replaced


def write_file(path, text):
    path.write_text(text)


def write_folder(path, text):
    path.mkdir()
    (path / "file").write_text(text)


def read(path):
    return (path / "file" if path.is_dir() else path).read_text()


def test_the_old_one_stays_until_the_new_one_is_complete(tmp_path):
    for number, write in enumerate((write_file, write_folder)):
        with case(write=write.__name__):
            path = tmp_path / f"target-{number}"
            temporary = tmp_path / f".writing-{number}"
            with replaced(path, temporary) as yielded:
                assert yielded == temporary
                write(temporary, "old")
                assert not path.exists()
            with pytest.raises(KeyboardInterrupt), replaced(path, temporary):
                write(temporary, "half")
                raise KeyboardInterrupt
            assert read(path) == "old"
    with replaced(tmp_path / "target-0", tmp_path / ".writing-0") as temporary:
        temporary.write_text("new")
    assert read(tmp_path / "target-0") == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target-0", "target-1"]


def test_a_durable_file_is_synced_before_its_name_changes(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(descriptor):
        assert os.path.samestat(os.fstat(descriptor), (tmp_path / ".writing").stat())
        assert path.read_text() == "old"
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="Input/output"), replaced(path, tmp_path / ".writing", durable=True) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with replaced(path, tmp_path / ".writing") as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
