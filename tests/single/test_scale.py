"""What rank 0 and ``hvdkit run`` do for many ranks: simulated ones, on real sockets. Work is counted, not timed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import selectors
import socket
import sys
import threading
import time
from collections import Counter

import psutil
import pytest

from hvdkit.cluster import wire
from hvdkit.cluster.checks import SETTLED, Waits
from hvdkit.cluster.hub import _MANY, _TOGETHER_SECONDS, Hub, _Stranger
from hvdkit.launch.channel import Channel
from hvdkit.launch.rank import END, STDOUT, Connection
from hvdkit.launch.verdict import PREEMPTED, Course
from hvdkit.machine import interfaces, processes

FEW, MANY = 64, 512


def work(call) -> int:
    """Return how many instructions Python runs for ``call``."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def identity(rank: int) -> processes.Identity:
    return processes.Identity(f"host-{rank // 8}", 10_000_000 + rank, 1.0)


class Ranks:
    """A hub that the test drives itself, and the other ends of the connections of ``size`` ranks that have joined."""

    def __init__(self, size: int) -> None:
        processes.allow_files(3 * size)
        self.hub = Hub(listener := wire.listen(one_host=True), wire.offer(listener, 10.0, 600.0), size)
        self.ends = []
        server = socket.create_server(("127.0.0.1", 0))
        for number in range(size):
            theirs = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
            stranger = _Stranger(wire.Link(ours, waits=False), 0.0, ("", ""))
            self.hub._strangers[stranger] = None
            self.hub._selector.register(ours, selectors.EVENT_READ, stranger)
            hello = {"rank": number, "host": f"host-{number // 8}", "identity": identity(number)}
            self.hub._take(self.hub._let_in(stranger, hello), {"kind": "joined"})
            self.ends.append(theirs)
        server.close()
        self.hub._tick(time.monotonic())

    def take(self, number: int, **message) -> int:
        """Return the work for one message of a rank."""
        return work(lambda: self.hub._take(self.hub._ranks[number], message))

    def close(self) -> None:
        self.hub.forget()
        for end in self.ends:
            end.close()


MESSAGES = {
    "a heartbeat": {"kind": "beat", "step": 7, "idle": 0.1},
    "a word on a silent rank": {"kind": "saw", "rank": 3, "condition": "busy"},
    "an error": {"kind": "failed", "cause": "ValueError: x", "text": "x" * 100},
    "an error that another rank caused": {"kind": "failed", "cause": "HorovodInternalError", "victim": True},
    "sys.exit": {"kind": "failed", "cause": "sys.exit(3)", "code": 3, "leaving": True},
    "a hang": {"kind": "stuck", "idle": 700.0},
    "the end of a script": {"kind": "left", "step": 9},
    "a death": {"kind": "closed"},
    "a collective": {"kind": "waits", "key": "sum", "what": "allreduce", "line": "a.py:1", "alike": True},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_costs_the_hub_the_same_whatever_the_number_of_ranks(name):
    costs = []
    for size in (FEW, MANY):
        ranks = Ranks(size)
        for number in range(size // 2):  # every second rank has sent the same already
            ranks.take(2 * number, **MESSAGES[name])
        costs.append(ranks.take(5, **MESSAGES[name]))
        ranks.close()
    assert 0 < costs[1] <= 1.05 * costs[0], costs


def test_a_look_at_the_time_costs_the_same_whatever_the_number_of_ranks():
    costs = []
    for size in (FEW, MANY):
        ranks = Ranks(size)
        now = time.monotonic()
        for number in (1, 3):
            ranks.take(number, kind="stuck", idle=1.0)
        # It is time to look for silent ranks; heartbeats, which are as many as ranks, are not due.
        ranks.hub._looked, ranks.hub._ticked, ranks.hub._owed = now - 1.0, now, 0.0
        costs.append(work(lambda: ranks.hub._tick(now)))  # noqa: B023
        ranks.close()
    assert 0 < costs[1] <= 1.05 * costs[0], costs


def test_silent_ranks_are_looked_at_without_comparing_each_with_all():
    """All ranks of a job fall silent: each is looked at by another one of its host, if it has one."""
    costs = []
    for size in (FEW, MANY):
        ranks = Ranks(size)
        now = time.monotonic()
        for rank in ranks.hub._ranks.values():
            rank.heard = now - 11.0
        costs.append(work(lambda: ranks.hub._seek_silent(now)) / size)  # noqa: B023
        seen = Counter()
        for end in ranks.ends:
            end.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                lines = [json.loads(line) for line in end.recv(1 << 20).splitlines() if b"look" in line]
                seen.update(line["rank"] for line in lines)
        assert seen == Counter(range(1, size))
        ranks.close()
    assert costs[1] <= 1.1 * costs[0], costs


def test_heartbeats_are_sent_once_in_an_interval_and_a_few_at_a_time():
    ranks = Ranks(MANY)
    hub, most, turns = ranks.hub, 0, 40
    hub.beats, hub._owed = 0, 0.0
    for _ in range(turns):
        before = hub.beats
        hub._beat(hub._interval / turns)
        most = max(most, hub.beats - before)
    assert MANY - 1 <= hub.beats <= MANY and most <= MANY / turns + 1
    hub.beats = 0
    for number in range(0, MANY, 2):
        ranks.take(number, kind="left")
    hub._beat(hub._interval)
    assert hub.beats == MANY / 2
    ranks.close()


def test_heartbeats_come_well_within_the_limit():
    spans = [wire.interval(10.0, size) for size in (2, 64, 128, 256, 512, 1024, 4096, 100_000)]
    assert spans == [2.0, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0, 4.0]


def test_a_heartbeat_says_what_the_last_one_said_no_more():
    ours, theirs = socket.socketpair()
    sender, receiver = wire.Link(ours), wire.Link(theirs)
    for said in ({}, {"step": 3, "idle": 0.25, "busy": "uploading"}, {"step": None, "idle": 0.25, "busy": None}):
        sender.beat(**said)
        assert receiver.next() == {"kind": "beat", **said}
    sender.close()
    receiver.close()


def test_a_rank_that_reads_nothing_does_not_hold_up_rank_0():
    """It is stopped: what it does not take is kept, heartbeats are not, and others are served."""
    ours, theirs = socket.socketpair()
    link = wire.Link(ours, waits=False)
    while link.send("look", rank=1, identity=identity(1)):
        pass
    waiting = len(link._unsent)
    assert waiting and not link.beat() and len(link._unsent) == waiting
    theirs.setblocking(False)
    got = b""
    while link._unsent:
        got += theirs.recv(1 << 20)
        link.beat()
    got += theirs.recv(1 << 20)
    assert {json.loads(line)["kind"] for line in got.splitlines()} == {"look"}
    assert link.beat() and theirs.recv(100) == b"beat\n"
    ours.close()
    theirs.close()


class Clients(threading.Thread):
    """``size`` ranks that have joined a running hub, served by one thread; each notes what it hears."""

    def __init__(self, place: wire.Offer, size: int) -> None:
        super().__init__(daemon=True)
        self.heard: list[list[str]] = [[] for _ in range(size)]
        self.links = [
            wire.connect(place, {"rank": rank, "host": f"host-{rank // 8}", "identity": identity(rank)})
            for rank in range(size)
        ]
        self.over = threading.Event()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, link in enumerate(self.links):
                selector.register(link.socket, selectors.EVENT_READ, rank)
            while not self.over.is_set() and selector.get_map():
                for key, _ in selector.select(0.1):
                    for message in self.links[key.data].receive():
                        self.heard[key.data].append(message["kind"])
                        if message["kind"] == "closed":
                            selector.unregister(key.fileobj)


def wait_for(condition) -> None:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def test_one_failure_among_many_is_heard_by_every_rank_once(monkeypatch):
    size = 200
    processes.allow_files(3 * size)
    written = []
    monkeypatch.setattr("hvdkit.cluster.hub.write_line", written.append)
    listener = wire.listen(one_host=True)
    hub = Hub(listener, place := wire.offer(listener, 10.0, 0.0), size)
    hub.start()
    clients = Clients(place, size)
    clients.start()
    clients.links[7].send("failed", step=3, cause="ValueError: the disk is full", text="[rank 7] its traceback")
    for rank in range(8, 108):
        cause = "HorovodInternalError: another rank left"
        clients.links[rank].send("failed", step=3, cause=cause, text=f"[rank {rank}] what follows", victim=True)
    line = "hvdkit: rank 7 on host-0 failed at step 3: ValueError: the disk is full"
    wait_for(lambda: any(line in text for text in written) and all("end" in heard for heard in clients.heard))
    clients.over.set()
    clients.join()
    assert [heard.count("end") for heard in clients.heard] == [1] * size
    assert "\n".join(written) == f"[rank 7] its traceback\n{line}"
    hub.close()


def test_many_ranks_are_heard_at_few_wakeups():
    size, seconds = 256, 2.0
    processes.allow_files(3 * size)
    listener = wire.listen(one_host=True)
    hub = Hub(listener, place := wire.offer(listener, 10.0, 0.0), size)
    hub.start()
    clients = Clients(place, size)
    clients.start()
    wait_for(hub._complete.is_set)
    wakeups, messages, began = hub.wakeups, hub.messages, time.monotonic()
    sent = 0
    while (elapsed := time.monotonic() - began) < seconds:
        for _ in range(4):
            clients.links[sent % size].beat(step=1, idle=0.0)
            sent += 1
        time.sleep(0.004)
    wait_for(lambda: hub.messages - messages == sent)
    elapsed = time.monotonic() - began
    # Those at the end of each nap, and those that found nothing to read.
    nap = _TOGETHER_SECONDS * size / _MANY
    assert hub.wakeups - wakeups <= elapsed / nap + elapsed / 0.5 + 2
    hub.close()
    wait_for(lambda: all("over" in heard for heard in clients.heard))
    clients.over.set()
    clients.join()


def test_only_the_first_tracebacks_of_many_are_written(monkeypatch):
    written = []
    monkeypatch.setattr("hvdkit.cluster.hub.write_line", written.append)
    monkeypatch.setattr("hvdkit.cluster.hub._END_SECONDS", 0.0)
    ranks = Ranks(FEW)
    for number in range(40):
        ranks.take(number, kind="failed", cause="ValueError: the same everywhere", text=f"[rank {number}] traceback")
    ender = threading.Thread(target=lambda: ranks.hub._settle(time.monotonic() + 60), daemon=True)
    ender.start()
    last = "hvdkit: rank 0 on host-0 failed: ValueError: the same everywhere"
    wait_for(lambda: any(last in text for text in written))
    ranks.hub._over.set()
    ender.join()
    lines = "\n".join(written).splitlines()
    assert sum(line.endswith("] traceback") for line in lines) == 17  # 16, and that of the rank at fault
    assert "[rank 0] traceback" in lines and sum("23 more ranks failed" in line for line in lines) == 1
    assert lines[-1] == last
    ranks.close()


def test_comparing_collectives_costs_the_same_whatever_the_number_of_ranks():
    """``HVDKIT_CHECK=1`` on ranks that run one graph; one that runs another is still found."""
    costs = []
    for size in (FEW, MANY):
        waits = Waits()
        message = {"key": "sum", "what": "allreduce of float32[3]", "line": "train.py:7", "alike": True}
        for rank in range(size - 1):
            waits.begin(rank, message)
        costs.append(work(lambda: waits.begin(size - 1, message)))  # noqa: B023
    assert 0 < costs[1] == costs[0], costs
    now = time.monotonic() + 2 * SETTLED
    assert waits.difference(set(range(MANY)), now) is None
    waits.begin(5, {**message, "key": "other", "line": "train.py:7"})
    waits.begin(5, {**message, "line": "train.py:8"})
    found = waits.difference(set(range(MANY)), now)
    assert found is not None and found.rank == 5 and "train.py:8" in found.cause


# ---- the handshake ------------------------------------------------------------------------------------------------


def receive_all(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            found += data
    return found


def test_a_rank_says_nothing_of_worth_to_a_process_that_is_not_rank_0():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        place = wire.Offer(("127.0.0.1",), stranger.getsockname()[1], "the token", 10.0, 0.0)
        heard: list[bytes] = []

        def serve() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(b'{"kind": "challenge", "nonce": "1", "proof": "guessed"}\n')
                connection.settimeout(5)
                heard.append(receive_all(connection))

        server = threading.Thread(target=serve)
        server.start()
        assert wire.connect(place, {"rank": 1, "host": "my-host", "identity": identity(1)}) is None
        server.join()
    assert json.loads(heard[0]).keys() == {"kind", "nonce"}
    assert b"token" not in heard[0] and b"my-host" not in heard[0]


def test_a_proof_serves_on_its_own_connection_in_its_own_direction_only():
    listener = wire.listen(one_host=True)
    hub = Hub(listener, place := wire.offer(listener, 10.0, 0.0), 2)
    hub.start()
    hello = {"rank": 1, "host": "here", "identity": identity(1)}

    def begin() -> tuple[wire.Link, dict]:
        link = wire.Link(socket.create_connection(("127.0.0.1", place.port)))
        link.send("hello", nonce="mine")
        return link, link.next()

    one, challenge = begin()
    assert wire.proves(challenge, place.token, "rank 0", "mine", challenge["nonce"])
    assert place.token not in str(challenge)
    one.send("proof", proof=challenge["proof"], **hello)  # rank 0's own, sent back
    assert one.next()["kind"] == "closed"
    two, other = begin()
    two.send("proof", proof=wire.proof(place.token, "rank", "mine", challenge["nonce"]), **hello)  # of another one
    assert other["nonce"] != challenge["nonce"] and two.next()["kind"] == "closed"
    three, last = begin()
    three.send("proof", proof=wire.proof(place.token, "rank", "mine", last["nonce"]), **hello)
    assert three.next()["kind"] == "welcome"
    four = wire.Link(socket.create_connection(("127.0.0.1", place.port)))
    four.send("proof", proof=wire.proof(place.token, "rank", "", ""), **hello)  # without a challenge
    assert four.next()["kind"] == "closed"
    hub._complete.set()
    hub.close()
    for link in (one, two, three, four):
        link.close()


# ---- where rank 0 listens -----------------------------------------------------------------------------------------

NAMES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include", "HOROVOD_IFACE", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def no_names(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def accepts(listener: wire.Listener, address: str) -> bool:
    """Whether ``listener`` gets a connection to its port of ``address``, where another process may listen, too."""
    try:
        with socket.create_connection((address, listener.port), timeout=2) as mine:
            for server in select.select(listener.sockets, [], [], 2)[0]:
                with server.accept()[0] as theirs:
                    return theirs.getpeername()[1] == mine.getsockname()[1]
    except OSError:
        pass
    return False


def test_another_process_at_the_same_port_is_not_taken_for_the_listener():
    listener = wire.listen(one_host=True)
    with socket.create_server(("127.0.0.5", listener.port)):
        assert accepts(listener, "127.0.0.1") and not accepts(listener, "127.0.0.5")
    listener.close()


@pytest.mark.parametrize("variable", NAMES)
def test_rank_0_listens_on_the_named_interface_only(no_names, variable):
    """Each interface that is up on this host, by its name; connections stay on the host."""
    every = interfaces.own_addresses()
    for name in {one.interface for one in every}:
        no_names.setenv(variable, name)
        own = {one.address for one in every if one.interface == name}
        listener = wire.listen(one_host=False)
        place = wire.offer(listener, 10.0, 0.0)
        assert set(place.addresses) == own
        assert {one.address for one in every if accepts(listener, one.address)} == own
        listener.close()


def test_rank_0_listens_in_the_named_subnet_only(no_names):
    every = interfaces.own_addresses()
    no_names.setenv("HOROVOD_IFACE", "127.0.0.0/8")
    listener = wire.listen(one_host=False)
    assert listener.addresses == ("127.0.0.1",)
    others = [one.address for one in every if one.address != "127.0.0.1"]
    assert not any(accepts(listener, address) for address in others)
    hub = Hub(listener, place := wire.offer(listener, 10.0, 0.0), 1)
    hub.start()
    link = wire.connect(place, {"rank": 0, "host": "here", "identity": processes.own_identity()})
    assert link is not None
    hub.close()
    link.close()


def test_without_names_rank_0_listens_everywhere_and_offers_what_others_can_reach(no_names):
    listener = wire.listen(one_host=False)
    assert set(listener.addresses) == {one.address for one in interfaces.own_addresses() if one.is_routable}
    assert accepts(listener, "127.0.0.1")
    listener.close()


def test_a_name_that_this_host_does_not_have_is_warned_about(no_names, caplog):
    no_names.setenv("HOROVOD_GLOO_IFACE", "nowhere9")
    no_names.setattr(logging.getLogger("hvdkit"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="hvdkit"):
        listener = wire.listen(one_host=False)
    assert "HOROVOD_GLOO_IFACE=nowhere9" in caplog.text and "listens on all" in caplog.text
    assert accepts(listener, "127.0.0.1")
    listener.close()


@pytest.mark.parametrize(
    ("environment", "allowed"),
    [
        ({"HOROVOD_GLOO_IFACE": "eth1"}, ["eth1"]),
        ({"OMPI_MCA_btl_tcp_if_include": "eth0, ib0"}, ["eth0", "ib0"]),
        ({"OMPI_MCA_btl_tcp_if_include": "10.1.0.0/16"}, ["eth1"]),
        ({"HOROVOD_IFACE": "fd00:5::/64"}, ["ib0"]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ["eth0", "eth1"]),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, []),
        ({"NCCL_SOCKET_IFNAME": "^docker,=lo"}, ["eth0", "eth1", "ib0"]),
        ({"NCCL_SOCKET_IFNAME": "^docker", "HOROVOD_GLOO_IFACE": "ib0"}, ["ib0"]),
        ({}, ["eth0", "eth1", "docker0", "ib0"]),
        ({"HOROVOD_IFACE": "lo"}, ["lo"]),
    ],
)
def test_what_the_variables_say(environment, allowed):
    here = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth1": "10.1.2.3", "docker0": "172.17.0.1", "ib0": "fd00:5::1"}
    found = interfaces.choice(environment)
    assert [name for name, address in here.items() if found.allows(interfaces.Address(name, address))] == allowed


def test_several_addresses_share_one_port():
    addresses = [one.address for one in interfaces.own_addresses()]
    listener = wire._listen_at(["127.0.0.2", "127.0.0.3", *addresses])
    assert len({one.getsockname()[1] for one in listener.sockets}) == 1
    assert all(accepts(listener, address) for address in listener.addresses)
    assert not accepts(listener, "127.0.0.4")
    listener.close()


# ---- hvdkit run ---------------------------------------------------------------------------------------------------


def test_the_end_of_a_rank_costs_hvdkit_run_the_same_whatever_their_number():
    costs = []
    for size in (FEW, MANY):
        course = Course(size, "mpirun")
        for rank in range(size):
            course.began(rank, "here")
        for rank in range(1, size - 1):
            course.ended(rank, PREEMPTED if rank % 2 else 0, [])

        def last(course=course):
            course.ended(0, 0, [])
            return course.failing, course.saving, course.over

        costs.append(work(last))
        assert course.failing and course.saving and not course.over
        course.lost(size - 1)
        assert course.over and course.failing and not course.saving
    assert 0 < costs[1] == costs[0], costs


def test_hundreds_of_wrappers_are_heard(monkeypatch):
    """Each connects by the wrapper's own code, writes a line and ends."""
    size = 300
    processes.allow_files(3 * size)
    channel = Channel(["127.0.0.1"], size, lambda rank: {"environment": {"RANK": str(rank)}})
    monkeypatch.setenv("HOROVOD_SIZE", str(size))
    end = json.dumps({"code": 0, "signals": [], "stopped": False}).encode()
    wrappers = []

    def speak() -> None:
        for rank in range(size):
            monkeypatch.setenv("HOROVOD_RANK", str(rank))
            wrapper = Connection(channel.told)
            assert wrapper.greet(f"host-{rank}")["environment"] == {"RANK": str(rank)}
            wrapper.send(STDOUT, b"hello\n")
            wrapper.send(END, end)
            wrappers.append(wrapper)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    kinds: Counter = Counter()
    until = time.monotonic() + 60
    while kinds.total() < 3 * size and time.monotonic() < until:
        for key, _ in channel.selector.select(0.2):
            kinds.update(event.kind for event in channel.take(key))
    assert kinds == {"began": size, "output": size, "ended": size}
    speaker.join()
    channel.close()
    for wrapper in wrappers:
        wrapper.socket.close()


def test_files_are_allowed_for_each_rank():
    here = psutil.Process()
    before = here.rlimit(psutil.RLIMIT_NOFILE)
    try:
        here.rlimit(psutil.RLIMIT_NOFILE, (256, before[1]))
        processes.allow_files(1000)
        assert here.rlimit(psutil.RLIMIT_NOFILE)[0] >= 1000 + 512
    finally:
        here.rlimit(psutil.RLIMIT_NOFILE, before)
    assert os.getpid() == here.pid
