"""Only one run at a time may use a logdir; with real processes."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.cases import case
from helpers.locks import held

from hvdkit.errors import CheckpointError
from hvdkit.supervisor.lock import _FLOCK, NAME, LogdirLock

HOLD = """
import os, sys, time
from pathlib import Path
from hvdkit.supervisor.lock import LogdirLock
lock = LogdirLock(Path(sys.argv[1]))
lock.acquire()
print('holds', flush=True)
"""


@pytest.fixture
def start():
    """Start processes that hold a folder's lock and run some code; kill all of them at the end."""
    processes = []

    def hold(logdir, code="time.sleep(4000)"):
        process = subprocess.Popen([sys.executable, "-c", HOLD + code, str(logdir)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "holds\n"
        return process

    yield hold
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def in_a_child(action):
    """Run ``action`` in a forked child; return its result, or the text of its CheckpointError."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(action())
        except CheckpointError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


def test_a_second_run_is_refused_and_told_who_the_first_is(tmp_path, start):
    logdir = tmp_path / "new" / "run"
    first = start(logdir)
    with pytest.raises(CheckpointError) as caught:
        LogdirLock(logdir).acquire()
    message = str(caught.value)
    assert f"pid {first.pid} on {socket.gethostname()}" in message and str(logdir) in message
    assert f"kill {first.pid}" in message and "another logdir" in message
    assert Path(sys.executable).name in message  # the command line
    assert time.strftime("since %Y-") in message
    holder = json.loads((logdir / NAME).read_text())
    assert set(holder) == {"host", "pid", "user", "command", "since"}


def test_killing_the_first_frees_it(tmp_path, start):
    first = start(tmp_path)
    inode = (tmp_path / NAME).stat().st_ino
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start(tmp_path)
    with pytest.raises(CheckpointError, match=f"pid {second.pid} "):
        LogdirLock(tmp_path).acquire()
    assert (tmp_path / NAME).stat().st_ino == inode


def test_release_frees_it(tmp_path, start):
    start(tmp_path, "lock.release(); print('released', flush=True); time.sleep(4000)").stdout.readline()
    for _ in range(2):
        with held(LogdirLock(tmp_path)):
            assert f"(pid {os.getpid()} " in in_a_child(LogdirLock(tmp_path).acquire)


@pytest.mark.full
def test_a_child_that_outlives_the_holder_does_not_hold_it(tmp_path, start):
    code = "if os.fork() == 0: print(os.getpid(), flush=True)\ntime.sleep(4000)"  # its child has closed its copy then
    first = start(tmp_path, code)
    child = int(first.stdout.readline())
    try:
        first.kill()
        first.wait()
        os.kill(child, 0)
        with held(LogdirLock(tmp_path)):
            assert f"(pid {os.getpid()} " in in_a_child(LogdirLock(tmp_path).acquire)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_ends_or_releases_takes_nothing_from_its_parent(tmp_path):
    with held(LogdirLock(tmp_path)) as lock:
        before = (tmp_path / NAME).stat().st_size
        assert in_a_child(lock.release) == "None"
        assert in_a_child(lambda: None) == "None"
        assert (tmp_path / NAME).stat().st_size == before
        message = in_a_child(LogdirLock(tmp_path).acquire)
        assert f"another run writes to (pid {os.getpid()} " in message


def test_a_second_lock_in_one_process_is_refused(tmp_path, start):
    (tmp_path / "run").mkdir()
    (tmp_path / "alias").symlink_to("run")
    with held(LogdirLock(tmp_path / "run")):
        for path in ("run", "alias"):
            with pytest.raises(CheckpointError, match=f"this process \\(pid {os.getpid()}\\)"):
                LogdirLock(tmp_path / path).acquire()
        message = in_a_child(LogdirLock(tmp_path / "run").acquire)
        assert f"pid {os.getpid()} on" in message, "the first lock is still held"
    with held(LogdirLock(tmp_path / "alias")):
        pass


def test_it_is_kept_when_this_process_opens_and_closes_the_file(tmp_path):
    """A backup does this: a POSIX record lock would be lost."""
    with held(LogdirLock(tmp_path / "run")):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        (tmp_path / "run" / NAME).read_text()
        assert f"(pid {os.getpid()} " in in_a_child(LogdirLock(tmp_path / "run").acquire)


def test_it_describes_its_holder_without_the_arguments_of_the_command(tmp_path, start):
    start(tmp_path, "time.sleep(60)  # --password=secret")
    assert "secret" not in (tmp_path / NAME).read_text()
    with pytest.raises(CheckpointError, match=f"{Path(sys.executable).name} -c") as caught:
        LogdirLock(tmp_path).acquire()
    assert "secret" not in str(caught.value)


def test_verify_finds_it_held_or_takes_it_again(tmp_path):
    with held(LogdirLock(tmp_path)) as lock:
        lock.verify()
        (tmp_path / NAME).unlink()  # as a user might
        lock.verify()
        assert f"(pid {os.getpid()} " in in_a_child(LogdirLock(tmp_path).acquire)
        shutil.copy(tmp_path / NAME, tmp_path / "copy")
        (tmp_path / "copy").replace(tmp_path / NAME)  # another file with the same content
        lock.verify()
        assert f"(pid {os.getpid()} " in in_a_child(LogdirLock(tmp_path).acquire)
    with pytest.raises(CheckpointError, match="has released the lock"):
        lock.verify()


@pytest.mark.parametrize("lost", ["removed", "replaced", "freed"])
def test_verify_refuses_if_another_run_has_taken_the_logdir(tmp_path, start, lost):
    with held(LogdirLock(tmp_path)) as lock:
        if lost == "freed":  # as an NFS server does when it restarts
            fcntl.fcntl(lock._file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
        elif lost == "removed":
            (tmp_path / NAME).unlink()
        else:
            (tmp_path / "other").touch()
            (tmp_path / "other").replace(tmp_path / NAME)
        other = start(tmp_path)
        with pytest.raises(CheckpointError, match=f"another run .*pid {other.pid} "):
            lock.verify()
        other.kill()
        other.wait()
        with pytest.raises(CheckpointError, match=f"has taken .*pid {other.pid} "):  # it may have saved meanwhile
            lock.verify()


def test_a_system_without_such_locks_gets_a_record_lock(tmp_path, monkeypatch, start):
    control = fcntl.fcntl

    def old_kernel(file, command, *rest):
        if command == fcntl.F_OFD_SETLK:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(file, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", old_kernel)
    with held(LogdirLock(tmp_path)) as lock:
        assert f"(pid {os.getpid()} " in in_a_child(LogdirLock(tmp_path).acquire)
        (tmp_path / NAME).read_text()  # loses the lock
        lock.verify()
        assert f"(pid {os.getpid()} " in in_a_child(LogdirLock(tmp_path).acquire)


def test_two_logdirs_at_once(tmp_path):
    with held(LogdirLock(tmp_path / "a")), held(LogdirLock(tmp_path / "b")):
        for name in ("a", "b"):
            assert f"(pid {os.getpid()} " in in_a_child(LogdirLock(tmp_path / name).acquire)


def test_a_logdir_that_cannot_be_written():
    """Run as another user, because root may write everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        logdir = Path(folder)
        logdir.chmod(0o555)

        def attempt():
            if os.getuid() == 0:
                os.seteuid(65534)
            LogdirLock(logdir).acquire()

        message = in_a_child(attempt)
        assert message.startswith(f"{logdir}") and "cannot be written" in message
        assert not (logdir / NAME).exists()


def test_a_logdir_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=str(tmp_path / "run")):
        LogdirLock(tmp_path / "run").acquire()


@pytest.mark.full
def test_a_holder_that_has_not_said_who_it_is(tmp_path, start):
    start(tmp_path)
    os.truncate(tmp_path / NAME, 0)
    with pytest.raises(CheckpointError, match="has not identified itself"):
        LogdirLock(tmp_path).acquire()


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, caplog):
    # Every file system that a test can mount on Linux has locks, so simulate the error of one without.
    monkeypatch.setattr(logging.getLogger("hvdkit"), "propagate", True)
    for number in (errno.ENOLCK, errno.ENOTSUP):
        monkeypatch.setattr(fcntl, "fcntl", Mock(side_effect=OSError(number, os.strerror(number))))
        caplog.clear()
        with case(number=number), caplog.at_level(logging.WARNING, "hvdkit"), held(LogdirLock(tmp_path)):
            assert str(tmp_path) in caplog.text and "no locks" in caplog.text
            assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_another_error_of_the_file_system_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(CheckpointError, match=NAME):
        LogdirLock(tmp_path).acquire()


@pytest.mark.full
def test_a_holder_with_wrong_contents_is_shown_escaped(tmp_path, start):
    """The lock file of another run may contain anything; other users may be able to write it."""
    start(tmp_path)
    holder = {"host": "h\x1b]0;x\x07", "pid": [1], "user": 7, "command": "python\n" * 1000, "since": None}
    for text in (json.dumps(holder), "[" * 100_000, "{}", "7", "\xff"):
        (tmp_path / NAME).write_text(text)
        with pytest.raises(CheckpointError, match="another run") as caught:
            LogdirLock(tmp_path).acquire()
        assert str(caught.value).isprintable() and len(str(caught.value)) < 1200
