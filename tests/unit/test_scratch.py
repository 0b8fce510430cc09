"""Temporary folders of processes that end, and of those that are killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.machine.scratch import ScratchFolder

HOLDER = """
import sys
from hvdkit.machine.scratch import ScratchFolder

scratch = ScratchFolder("hvdkit-test-")
(scratch.path / "data").write_bytes(b"0" * 1000)
print(scratch.path, flush=True)
sys.stdin.read()
"""


def holder(folder):
    """Return a process that holds a scratch folder in ``folder``, and that scratch folder."""
    command = [sys.executable, "-c", HOLDER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}, **pipes)
    return process, Path(process.stdout.readline().strip())


def age(*folders):
    for folder in folders:
        os.utime(folder, (0, 0))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_leaves_is_removed_by_the_next(temporary):
    killed, left = holder(temporary)
    alive, kept = holder(temporary)
    host = socket.gethostname()
    names = (f"hvdkit-test-{host}-file", f"hvdkit-other-{host}-1", "hvdkit-test-elsewhere-1")
    others = [temporary / name for name in names]
    others[0].write_text("not a folder")
    for other in others[1:]:
        other.mkdir()
    with killed, alive:
        age(left, kept, *others)
        killed.kill()
        killed.wait()
        first = ScratchFolder("hvdkit-test-")
        assert not left.exists()
        assert (kept / "data").stat().st_size == 1000
        assert all(other.exists() for other in others)
        age(first.path)
        second = ScratchFolder("hvdkit-test-")  # of the same process
        assert first.path.exists()
        alive.kill()
    first.close()
    second.close()
    assert not first.path.exists()
    assert not second.path.exists()


def test_a_folder_that_may_not_have_been_locked_yet_stays(temporary):
    new = temporary / f"hvdkit-test-{socket.gethostname()}-1"
    new.mkdir()
    ScratchFolder("hvdkit-test-").close()
    assert new.exists()
    age(new)
    ScratchFolder("hvdkit-test-").close()
    assert not new.exists()
