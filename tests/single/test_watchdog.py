"""The watchdog's channel between rank 0 and the others, without ranks around it."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from speed import WAIT, wait_until

import hvdkit as hk
from hvdkit.cluster import wire
from hvdkit.cluster.hub import Hub
from hvdkit.cluster.progress import PROGRESS, Progress
from hvdkit.machine import processes


def kinds(link):
    """The kinds of the messages that come until the connection ends, heartbeats left out."""
    found = []
    deadline = time.monotonic() + WAIT
    while "closed" not in found and time.monotonic() < deadline:
        found += [message["kind"] for message in link.receive() if message["kind"] != "beat"]
    return found


def wait_for(link, kind):
    """Read until a message of this kind has come."""
    deadline = time.monotonic() + WAIT
    while all(message["kind"] != kind for message in link.receive()):
        assert time.monotonic() < deadline, f"no message of kind {kind!r}"


def test_a_hub_that_closes_says_so_before_it_is_gone():
    """A connection that ends without a word is a death: the others would end, too."""
    for _ in range(5):
        server = wire.listen(one_host=True)
        place = wire.offer(server, 1.0, 0.0)
        hub = Hub(server, place, 4)
        hub.start()
        hello = {"host": "here", "identity": processes.own_identity()}
        links = [wire.connect(place, {"rank": rank, **hello}) for rank in range(4)]
        hub.close()
        assert [kinds(link) for link in links] == [["over", "closed"]] * 4


def test_ranks_have_their_time_to_unwind_though_another_one_has_left(monkeypatch):
    """Rank 1's script has ended before rank 2 fails; its process ends while the others run their handlers."""
    unwound = []
    monkeypatch.setattr(
        "hvdkit.cluster.hub.write_line", lambda line: unwound.append([hub._ranks[rank].unwound for rank in range(3)])
    )
    server = wire.listen(one_host=True)
    place = wire.offer(server, 10.0, 0.0)
    hub = Hub(server, place, 3, unwind=WAIT)
    hub.start()
    hello = {"host": "here", "identity": processes.own_identity()}
    links = [wire.connect(place, {"rank": rank, **hello}) for rank in range(3)]
    links[1].send("left")
    links[2].send("failed", cause="ValueError: the disk is full")
    wait_for(links[0], "end")
    links[1].close()
    deadline = time.monotonic() + WAIT
    while not hub._ranks[1].closed and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in (0, 2):
        links[rank].send("unwound")
    wait_for(links[0], "leave")
    assert unwound == [[True, False, True]]
    hub.close()


def test_strangers_are_not_let_in_and_end_nothing():
    server = wire.listen(one_host=True)
    place = wire.offer(server, 1.0, 0.0)
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
    gone = wire.Link(socket.create_connection(("127.0.0.1", place.port)))
    gone.send("hello", nonce="mine")
    gone.send("proof", proof=wire.proof(place.token, "rank", "mine", gone.next()["nonce"]), **hello)
    assert gone.next()["kind"] == "welcome"
    gone.close()
    link = wire.connect(place, hello)
    assert link is not None
    assert hub._complete.wait(60)
    with pytest.raises(ConnectionRefusedError):  # everybody is in
        socket.create_connection(("127.0.0.1", place.port))
    hub.close()
    assert kinds(link) == ["over", "closed"]


def test_a_rank_that_works_is_waited_for():
    """One rank downloads while the other waits at a barrier: no hang, until the first does not move either."""
    server = wire.listen(one_host=True)
    place = wire.offer(server, 10.0, 5.0)
    hub = Hub(server, place, 2)
    hub.start()
    hello = {"host": "here", "identity": processes.own_identity()}
    works, waits = (wire.connect(place, {"rank": rank, **hello}) for rank in (0, 1))
    told = {"count": 1, "waiting": True, "words": ""}
    for idle, asked in ((0.0, []), (6.0, ["stacks"])):
        heard = hub.messages
        works.send("beat", idle=idle)
        wait_until(lambda heard=heard: hub.messages > heard)
        waits.send("stuck", idle=6.0, **told)
        waits.socket.settimeout(WAIT if asked else 1.0)
        assert [message["kind"] for message in waits.receive()] == asked
    hub.close()
    assert kinds(works)[-2:] == ["over", "closed"]


def fresh_progress():
    """A Progress that ignores threads which other tests have left, such as Horovod's."""
    progress = Progress()
    progress._waiters |= processes.threads()
    return progress


def test_a_rank_whose_other_threads_compute_does_not_hang():
    """A graph that has the loop over all steps in it leaves the thread that called it asleep."""
    progress, busy = fresh_progress(), threading.Event()

    def compute():
        while not busy.is_set():
            hashlib.sha256(b"x" * 2**20)

    threads = []
    try:
        with progress.starting_waiters():  # as Horovod's own thread, which is never still
            ready = threading.Event()
            threads.append(threading.Thread(target=lambda: (ready.set(), compute())))
            threads[-1].start()
            ready.wait()
        assert watch(progress, 2.0) > 1.0
        threads.append(threading.Thread(target=compute))
        threads[-1].start()
        assert watch(progress, 2.0) < 1.0
    finally:
        busy.set()
        for thread in threads:
            thread.join()


def test_a_rank_that_is_busy_does_not_hang_and_neither_do_those_that_wait_for_it():
    server = wire.listen(one_host=True)
    place = wire.offer(server, 10.0, 5.0)
    hub = Hub(server, place, 2)
    hub.start()
    hello = {"host": "here", "identity": processes.own_identity()}
    works, waits = (wire.connect(place, {"rank": rank, **hello}) for rank in (0, 1))
    told = {"count": 1, "waiting": True, "words": ""}
    for reason, asked in (("uploading", []), (None, ["stacks"])):
        heard = hub.messages
        works.send("beat", idle=1000.0, busy=reason)
        wait_until(lambda heard=heard: hub.messages > heard)
        waits.send("stuck", idle=1000.0, **told)
        waits.socket.settimeout(WAIT if asked else 1.0)
        assert [message["kind"] for message in waits.receive()] == asked
    hub.close()
    assert kinds(works)[-2:] == ["over", "closed"]


def watch(progress, seconds):
    """Look as the watchdog does, from its own thread, while the thread that trains sleeps; return the idle seconds."""
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


CHILDREN = {
    "computes": "while True: pass",
    "copies": "import time\nwhile True: open('/dev/zero', 'rb', 0).read(10**6); time.sleep(0.05)",
    "its child computes": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])",
    "sleeps": "import time; time.sleep(1000)",
    "looks now and then": "import time\nwhile True: time.sleep(0.2)",
}


@pytest.mark.parametrize("what", CHILDREN)
def test_a_rank_whose_child_process_works_does_not_hang(what):
    """The chief waits for `tar`, or an upload: its own threads all sleep."""
    child = subprocess.Popen([sys.executable, "-c", CHILDREN[what]], start_new_session=True)
    try:
        time.sleep(1.0)  # it has started, which is work
        progress = fresh_progress()
        watch(progress, 0.3)
        idle = watch(progress, 2.0)
        works = what not in ("sleeps", "looks now and then")
        assert idle < 1.0 if works else idle > 1.0, idle
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_busy_holds_the_watchdog_off_without_a_world_nested_and_in_any_thread():
    def elsewhere():
        with hk.busy("packing\nfiles"):
            inside.set()
            leave.wait()

    inside, leave = threading.Event(), threading.Event()
    with hk.busy("uploading"):
        with hk.busy("waiting for the archive"):
            assert PROGRESS.idle() == 0.0 and PROGRESS.reason() == "waiting for the archive"
        thread = threading.Thread(target=elsewhere)
        thread.start()
        inside.wait()
        assert "busy: packing files" in PROGRESS.told()["words"] and "busy: packing files" in str(PROGRESS)
    assert PROGRESS.idle() == 0.0 and PROGRESS.reason() == "packing files"
    leave.set()
    thread.join()
    assert PROGRESS.reason() is None and "busy" not in PROGRESS.told()["words"]
    with pytest.raises(KeyError), hk.busy("failing"):
        raise KeyError
    assert PROGRESS.reason() is None


@pytest.mark.parametrize(("reason", "kind"), [(None, TypeError), (3, TypeError), ("", ValueError), (" \n", ValueError)])
def test_busy_wants_a_reason(reason, kind):
    with pytest.raises(kind, match=r"reason: got .*, expected a non-empty string; say what the rank does: hk\.busy"):
        hk.busy(reason)


def test_what_is_seen_of_a_process():
    """Its start is told by the kernel's clock; one that a debugger holds is not taken for stopped."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(4000)"])
    try:
        identity = processes.own_identity()._replace(pid=child.pid, started=processes._started(child.pid))
        time.sleep(0.3)
        assert processes.condition(identity) == "idle"
        os.kill(child.pid, signal.SIGSTOP)
        assert processes.condition(identity) == "stopped"
        assert processes.condition(identity._replace(started=identity.started + 1)) == "gone"
        processes.kill(identity)
        assert child.wait(WAIT) == -signal.SIGKILL and processes.condition(identity) == "gone"
    finally:
        child.kill()


def test_the_chief_waits_for_ranks_that_come_after_it():
    server = wire.listen(one_host=True)
    place = wire.offer(server, 1.0, 0.0)
    hub = Hub(server, place, 2)
    hub.start()
    hello = {"host": "here", "identity": processes.own_identity()}
    chief = wire.connect(place, {"rank": 0, **hello})
    assert chief is not None and hub.empty.wait(WAIT)
    other = wire.connect(place, {"rank": 1, **hello})
    time.sleep(0.3)
    assert other is not None and not hub.empty.is_set()
    other.send("left")
    assert hub.empty.wait(WAIT)
    hub.close()
