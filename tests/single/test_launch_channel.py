"""What ``hvdkit run`` holds open: a port for the ranks' wrappers, and logs on a disk that may fill up."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from hvdkit.cluster.report import FailureReport
from hvdkit.errors import ClusterError
from hvdkit.launch import rank, secret
from hvdkit.launch.attempt import Signals
from hvdkit.launch.channel import Channel
from hvdkit.launch.output import Output
from hvdkit.launch.rank import CHALLENGE, HEADER, HELLO, REPORT, Connection, read_private


def turn(channel):
    """Deal with what has come; return the kinds of the events."""
    found = []
    while ready := channel.selector.select(0.2):
        found += [event for key, _ in ready for event in channel.take(key)]
    return [event.kind for event in found]


def serve(channel, until):
    """Deal with what comes while ``until`` runs in a thread; return the kinds of the events."""
    found, thread = [], threading.Thread(target=until)
    thread.start()
    while thread.is_alive():
        found += [event.kind for key, _ in channel.selector.select(0.05) for event in channel.take(key)]
    return found


def frame(kind, **fields):
    payload = json.dumps(fields).encode()
    return HEADER.pack(kind, len(payload)) + payload


def test_strangers_end_nothing():
    channel = Channel(["127.0.0.1"], 1, lambda rank: {})
    port = channel.told.split()[0]
    silent = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(100)]
    for said in (b"[]", b'{"nonce": "\\u00e9!"}', b'{"nonce": "\\ud800"}', b"[" * 60_000, b"GET / HTTP/1.1"):
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(HEADER.pack(HELLO, len(said)) + said)
            assert turn(channel) == []
    for one in silent:
        one.close()
    assert turn(channel) == []
    connections = []
    assert serve(channel, lambda: connections.append(Connection(channel.told))) == []
    answers = []
    assert "began" in serve(channel, lambda: answers.append(connections[0].greet("here")))
    assert answers == [{}]
    report = FailureReport(rank=0, host="here", verb="failed", cause="ValueError: bad")
    connections[0].send(REPORT, b"no report")
    connections[0].send(REPORT, report.encode())
    assert turn(channel) == ["failed"]
    connections[0].socket.close()
    assert turn(channel) == ["lost"]
    channel.close()


def test_a_rank_must_prove_that_it_knows_the_token():
    """What was heard of another connection proves nothing, nor does the proof of this end."""
    channel = Channel(["127.0.0.1"], 1, lambda rank: {})
    port, token, *_ = channel.told.split()
    for guess in ("known", token, rank.proof("guess", "rank", "a", "b"), None):
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(frame(HELLO, nonce="a"))
            assert turn(channel) == []
            kind, length = HEADER.unpack(stranger.recv(HEADER.size))
            answer = json.loads(stranger.recv(length))
            assert kind == CHALLENGE and answer["proof"] == rank.proof(token, "run", "a", answer["nonce"])
            shown = answer["proof"] if guess is None else guess
            stranger.sendall(frame(HELLO, proof=shown, host="here", place={}))
            assert turn(channel) == [] and stranger.recv(1) == b""
    channel.close()


def test_a_listener_that_does_not_know_the_token_is_refused_and_learns_nothing():
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                heard.extend(connection.recv(4096))
                connection.sendall(frame(CHALLENGE, nonce="b", proof=rank.proof("guessed", "run", "a", "b")))
                while data := connection.recv(4096):
                    heard.extend(data)

        other = threading.Thread(target=answer)
        other.start()
        with pytest.raises(OSError, match="does not know the token of this job"):
            Connection(f"{listener.getsockname()[1]} s3cret 127.0.0.1")
        other.join(10)
    assert not other.is_alive() and b"nonce" in heard and b"s3cret" not in heard


def test_only_the_named_addresses_are_listened_at():
    channel = Channel(["127.0.0.1", "127.0.0.2"], 1, lambda rank: {})
    port = int(channel.told.split()[0])
    found = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert sorted(ip for ip, number in found if number == port) == ["127.0.0.1", "127.0.0.2"]
    channel.close()


def test_the_token_is_read_from_a_private_file_only(tmp_path):
    file = secret.PrivateFile("1 token 127.0.0.1")
    folder = file.path.parent
    assert read_private(str(file.path)) == "1 token 127.0.0.1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(file.path.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(folder)
    folder.chmod(0o755)
    for path in (file.path, tmp_path / "link" / "told"):
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


@pytest.mark.parametrize("made_by", ["nobody", "other user", "other token", "link", "this job"])
def test_on_other_hosts_the_folder_has_to_be_new(monkeypatch, tmp_path, made_by):
    """The script that ssh runs there, run here: hosts that share their /tmp see the same file."""
    there = tmp_path / "there"
    text = "1 token 127.0.0.1"
    if made_by == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        there.symlink_to(tmp_path / "elsewhere")
    elif made_by != "nobody":
        there.mkdir(mode=0o700)
        (there / "told").write_text("1 guessed 10.0.0.9" if made_by == "other token" else text)
        if made_by == "other user":
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder to another user")
            os.chown(there, 12345, -1)
    monkeypatch.setattr(secret, "ssh_command", lambda host, args, timeout, command: command)
    monkeypatch.setattr(secret.tempfile, "mkdtemp", lambda **_: str(make(tmp_path / "here")))
    real = secret._WRITE.replace("{folder}", str(there)).replace("{path}", str(there / "told"))
    monkeypatch.setattr(secret, "_WRITE", real)
    if made_by in ("nobody", "this job"):
        file = secret.PrivateFile(text, ["other"])
        assert (there / "told").read_text() == text and stat.S_IMODE(there.stat().st_mode) == 0o700
        file.remove()
    else:
        with pytest.raises(ClusterError, match=r"host other: .*exists already, and is not of this job"):
            secret.PrivateFile(text, ["other"])
        assert not (tmp_path / "elsewhere" / "told").exists()
    assert not (tmp_path / "here").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ClusterError, match=r"missing.*set TMPDIR"):
        secret.PrivateFile("1 token 127.0.0.1")


def make(folder):
    folder.mkdir(mode=0o700)
    return folder


def test_a_full_disk_ends_logs_but_no_job(tmp_path):
    (tmp_path / "rank-1.log").symlink_to("/dev/full")
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as shown, os.fdopen(writer, "wb") as stream, Path("/dev/full").open("wb") as full:
        output = Output({1: full, 2: stream}, tmp_path)
        output.feed(0, 2, b"one\n")
        output.feed(1, 1, b"two\n")
        output.feed(0, 2, b"three\n")
        output.ended(0)
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
