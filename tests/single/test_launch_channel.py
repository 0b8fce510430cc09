"""What ``hvdkit run`` holds open: a port for the ranks' wrappers, and logs on a disk that may fill up."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

from hvdkit.launch.attempt import Signals
from hvdkit.launch.channel import Channel
from hvdkit.launch.output import Output
from hvdkit.launch.rank import HEADER, HELLO


def turn(channel):
    """Deal with what has come; return the kinds of the events."""
    found = []
    while ready := channel.selector.select(0.2):
        found += [event.kind for key, _ in ready for event in channel.take(key)]
    return found


def test_strangers_end_nothing():
    channel = Channel(["127.0.0.1"], 1, lambda rank: {})
    port, token, *_ = channel.told.split()
    silent = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(100)]
    for said in (b"[]", b'{"token": "\\u00e9"}', b'{"token": "\\ud800"}', b"[" * 60_000, b"GET / HTTP/1.1"):
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(HEADER.pack(HELLO, len(said)) + said)
            assert turn(channel) == []
    for one in silent:
        one.close()
    assert turn(channel) == []
    hello = json.dumps({"token": token, "host": "here", "place": {}}).encode()
    with socket.create_connection(("127.0.0.1", int(port))) as wrapper:
        wrapper.sendall(HEADER.pack(HELLO, len(hello)) + hello)
        assert turn(channel) == ["began"]
    assert turn(channel) == ["lost"]
    channel.close()


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
