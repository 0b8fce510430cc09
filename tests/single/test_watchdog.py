"""The watchdog's channel between rank 0 and the others, without ranks around it."""

from __future__ import annotations

import json
import socket
import time

import pytest

from hvdkit.cluster import processes, wire
from hvdkit.cluster.hub import Hub


def kinds(link):
    """The kinds of the messages that come until the connection ends."""
    found = []
    deadline = time.monotonic() + 5
    while "closed" not in found and time.monotonic() < deadline:
        found += [message["kind"] for message in link.receive()]
    return found


def test_a_hub_that_closes_says_so_before_it_is_gone():
    """A connection that ends without a word is a death: the others would end, too."""
    for _ in range(5):
        server = wire.listen(one_host=True)
        place = wire.offer(server, True, 1.0, 0.0)
        hub = Hub(server, place, 4)
        hub.start()
        hello = {"host": "here", "identity": processes.own_identity()}
        links = [wire.connect(place, {"rank": rank, **hello}) for rank in range(4)]
        hub.close()
        assert [kinds(link) for link in links] == [["over", "closed"]] * 4


def test_strangers_are_not_let_in_and_end_nothing():
    server = wire.listen(one_host=True)
    place = wire.offer(server, True, 1.0, 0.0)
    hub = Hub(server, place, 1)
    hub.start()
    hello = {"rank": 0, "host": "here", "identity": processes.own_identity()}
    assert wire.connect(place._replace(token="guessed"), hello) is None
    silent = [socket.create_connection(("127.0.0.1", place.port)) for _ in range(200)]
    for said in (b'{"kind": "hello", "token": "\\ud800"}\n', b"[" * 60_000 + b"\n", b'["kind"]\n', b"\xff\n"):
        with socket.create_connection(("127.0.0.1", place.port)) as stranger:
            stranger.sendall(said)
    for one in silent:
        one.close()
    # A rank that waited too long for its welcome has not died.
    with socket.create_connection(("127.0.0.1", place.port)) as gone:
        gone.sendall(json.dumps({"kind": "hello", "token": place.token, **hello}).encode() + b"\n")
    link = wire.connect(place, hello)
    assert link is not None
    time.sleep(0.3)
    with pytest.raises(ConnectionRefusedError):  # everybody is in
        socket.create_connection(("127.0.0.1", place.port))
    hub.close()
    assert kinds(link)[-2:] == ["over", "closed"]
