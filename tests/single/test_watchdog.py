"""The watchdog's channel between rank 0 and the others, without ranks around it."""

from __future__ import annotations

import time

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
        hub = Hub(server, place)
        hub.start()
        hello = {"host": "here", "identity": processes.own_identity()}
        links = [wire.connect(place, {"rank": rank, **hello}) for rank in range(4)]
        hub.close()
        assert [kinds(link) for link in links] == [["over", "closed"]] * 4


def test_strangers_are_not_let_in():
    server = wire.listen(one_host=True)
    place = wire.offer(server, True, 1.0, 0.0)
    hub = Hub(server, place)
    hub.start()
    hello = {"rank": 0, "host": "here", "identity": processes.own_identity()}
    assert wire.connect(place._replace(token="guessed"), hello) is None
    link = wire.connect(place, hello)
    assert link is not None
    hub.close()
    assert kinds(link) == ["over", "closed"]
