"""The watchdog's channel between rank 0 and the others, without ranks around it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from hvdkit.cluster import processes, wire
from hvdkit.cluster.hub import Hub
from hvdkit.cluster.progress import Progress


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


def test_a_rank_that_works_is_waited_for():
    """One rank downloads while the other waits at a barrier: no hang, until the first does not move either."""
    server = wire.listen(one_host=True)
    place = wire.offer(server, True, 10.0, 5.0)
    hub = Hub(server, place, 2)
    hub.start()
    hello = {"host": "here", "identity": processes.own_identity()}
    works, waits = (wire.connect(place, {"rank": rank, **hello}) for rank in (0, 1))
    told = {"count": 1, "waiting": True, "words": ""}
    for idle, asked in ((0.0, []), (6.0, ["stacks"])):
        works.send("beat", idle=idle)
        time.sleep(0.3)
        waits.send("stuck", idle=6.0, **told)
        waits.socket.settimeout(1.0)
        assert [message["kind"] for message in waits.receive()] == asked
    hub.close()
    assert kinds(works)[-2:] == ["over", "closed"]


def test_a_rank_whose_other_threads_compute_does_not_hang():
    """A graph that has the loop over all steps in it leaves the thread that called it asleep."""
    progress, busy = Progress(), threading.Event()

    def compute():
        while not busy.is_set():
            hashlib.sha256(b"x" * 2**20)

    def idle_for(seconds):
        """Look as the watchdog does, from a thread of its own, while the thread that trains sleeps."""
        found = []

        def look():
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                found.append(progress.idle())
                time.sleep(0.1)

        watcher = threading.Thread(target=look, name="hvdkit-watchdog")
        watcher.start()
        watcher.join()
        return found[-1]

    with progress.starting_waiters():  # as Horovod's own thread, which is never still
        ready = threading.Event()
        waiter = threading.Thread(target=lambda: (ready.set(), compute()))
        waiter.start()
        ready.wait()
    assert idle_for(1.0) > 0.5
    worker = threading.Thread(target=compute)
    worker.start()
    assert idle_for(1.0) < 0.5
    busy.set()
    waiter.join()
    worker.join()


def test_what_is_seen_of_a_process():
    """Its start is told by the kernel's clock; one that a debugger holds is not taken for stopped."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        identity = processes.own_identity()._replace(pid=child.pid, started=processes._started(child.pid))
        time.sleep(0.3)
        assert processes.condition(identity) == "idle"
        os.kill(child.pid, signal.SIGSTOP)
        assert processes.condition(identity) == "stopped"
        assert processes.condition(identity._replace(started=identity.started + 1)) == "gone"
        processes.kill(identity)
        assert child.wait(5) == -signal.SIGKILL and processes.condition(identity) == "gone"
    finally:
        child.kill()


def test_the_chief_waits_for_ranks_that_come_after_it():
    server = wire.listen(one_host=True)
    place = wire.offer(server, True, 1.0, 0.0)
    hub = Hub(server, place, 2)
    hub.start()
    hello = {"host": "here", "identity": processes.own_identity()}
    chief = wire.connect(place, {"rank": 0, **hello})
    assert chief is not None and hub.empty.wait(5)
    other = wire.connect(place, {"rank": 1, **hello})
    time.sleep(0.3)
    assert other is not None and not hub.empty.is_set()
    other.send("left")
    assert hub.empty.wait(5)
    hub.close()
