"""What ``hvdkit run`` holds open: a private file with its token, signals, and logs on a disk that may fill up."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from helpers.speed import WAIT, wait_until

from hvdkit.commands.run import secret
from hvdkit.commands.run.attempt import Signals
from hvdkit.commands.run.output import OutputWriter
from hvdkit.errors import ClusterError
from hvdkit.watchdog.lines import write_line
from hvdkit.watchdog.running import read_private


def here(host, command):
    """Run another host's command on this one."""
    return command


def test_the_token_is_read_from_a_private_file_only(tmp_path):
    file = secret.PrivateFile("1 token 127.0.0.1", here)
    folder = file.path.parent
    assert read_private(str(file.path)) == "1 token 127.0.0.1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(file.path.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(folder)
    folder.chmod(0o755)
    for path in (file.path, tmp_path / "link" / "offer"):
        with pytest.raises(OSError, match="is not private"):
            read_private(str(path))
    folder.chmod(0o700)
    (folder / "other").symlink_to(file.path)
    with pytest.raises(OSError):
        read_private(str(folder / "other"))
    if os.geteuid() == 0:
        os.chown(file.path, 12345, -1)
        with pytest.raises(OSError, match="is not private: user 12345"):
            read_private(str(file.path))
    file.remove()
    assert not folder.exists()


@pytest.mark.parametrize("made_by", ["no process", "other user", "other token", "link", "this job"])
def test_on_other_hosts_the_folder_has_to_be_new(monkeypatch, tmp_path, made_by):
    """Run here the script that ssh runs on other hosts: hosts that share their /tmp see the same file."""
    there = tmp_path / "there"
    text = "1 token 127.0.0.1"
    if made_by == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        there.symlink_to(tmp_path / "elsewhere")
    elif made_by != "no process":
        there.mkdir(mode=0o700)
        (there / "offer").write_text("1 guessed 10.0.0.9" if made_by == "other token" else text)
        if made_by == "other user":
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder to another user")
            os.chown(there, 12345, -1)
    monkeypatch.setattr(secret.tempfile, "mkdtemp", lambda **_: str(make(tmp_path / "here")))
    real = secret._WRITE.replace("{folder}", str(there)).replace("{path}", str(there / "offer"))
    monkeypatch.setattr(secret, "_WRITE", real)
    if made_by in ("no process", "this job"):
        file = secret.PrivateFile(text, here, ["other"])
        assert (there / "offer").read_text() == text and stat.S_IMODE(there.stat().st_mode) == 0o700
        file.remove()
    else:
        with pytest.raises(ClusterError, match=r"host other: .*already exists, and does not belong to this job"):
            secret.PrivateFile(text, here, ["other"])
        assert not (tmp_path / "elsewhere" / "offer").exists()
    assert not (tmp_path / "here").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ClusterError, match=r"missing.*set TMPDIR"):
        secret.PrivateFile("1 token 127.0.0.1", here)


def make(folder):
    folder.mkdir(mode=0o700)
    return folder


def test_a_full_disk_ends_logs_but_no_job(tmp_path):
    (tmp_path / "rank-1.log").symlink_to("/dev/full")
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as shown, os.fdopen(writer, "wb") as stream, Path("/dev/full").open("wb") as full:
        output = OutputWriter({1: full, 2: stream}, tmp_path)
        output.feed(0, 2, b"one\n")
        output.feed(1, 1, b"two\n")
        output.feed(0, 2, b"three\n")
        output.ended(0)
        assert output.finish(WAIT)
        stream.close()
        lines = shown.read().decode().splitlines()
    assert lines[0] == "[rank 0] one" and lines[-1] == "[rank 0] three"
    assert "cannot be written (No space left on device)" in lines[1] and len(lines) == 3
    assert (tmp_path / "rank-0.log").read_text() == "one\n"


def test_a_signal_that_has_come_is_seen_without_waiting():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.wait(0) == signal.SIGTERM
        assert signals.wait(0) is None


def test_a_line_for_a_full_pipe_that_does_not_block_is_written_to_its_end(monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    found = []

    def read() -> None:
        wait_until(lambda: not select.select([], [writer], [], 0)[1])  # the pipe is full
        with os.fdopen(reader, "rb") as file:
            found.append(file.read())

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        write_line("x" * 300_000)
        monkeypatch.undo()
    thread.join(WAIT)
    assert found == [b"x" * 300_000 + b"\n"]
