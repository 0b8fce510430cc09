"""The connections between sentinels and the coordinator: real sockets on loopback, and unauthorized clients."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest
from helpers.coordinating import HEADER, LOCAL, Job, joined
from helpers.speed import WAIT, wait_until

from hvdkit.machine import interfaces
from hvdkit.machine.processes import allow_files
from hvdkit.watchdog import admission, channel, sentinel, watching
from hvdkit.watchdog.admission import Server, listen
from hvdkit.watchdog.channel import STDOUT, Closed, Connection, Offer, Output, connect, receive_now, send_now
from hvdkit.watchdog.events import (
    VERSION,
    Connect,
    End,
    Exited,
    Failed,
    GiveFlight,
    Joined,
    Leaving,
    Message,
    Refused,
    Status,
    Training,
    Unwound,
    WriteLine,
)
from hvdkit.watchdog.settings import RUN_VARIABLE


def is_closed(made: socket.socket) -> bool:
    """Wait until the other end closes the connection."""
    try:
        while made.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    made.close()
    return True


def close(connection: Connection) -> None:
    connection.close()
    connection._data.close()


# ---- the handshake ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"rank": 2}, "rank 2 is not one of its 2 ranks"),
        ({"rank": -1}, "rank -1 is not one of its 2 ranks"),
        ({"size": 3}, "this rank was started as one of 3 ranks, the job has 2"),
        ({"rank": 0}, "another sentinel, on host-0, watches rank 0"),
    ],
)
def test_a_rank_that_is_not_of_this_job_or_is_there_already_is_not_let_in_and_learns_why(wrong, why):
    with Job(2) as job:
        first = job.sentinel(0, 2)
        other = Joined(**{"rank": 1, "size": 2, "host": "h", "place": "p"} | wrong)
        with pytest.raises(ConnectionRefusedError, match=f"the job's coordinator rejects this rank: {why}"):
            connect(job.offer, other, selectors.DefaultSelector(), None)
        assert job.coordinator.members.keys() == {0} and job.coordinator.members[0].is_running
        close(first)


def test_a_sentinel_that_does_not_know_the_token_is_not_let_in():
    with Job(1) as job:
        with pytest.raises(OSError, match="does not know the job's token"):
            connect(Offer((LOCAL,), job.port, "guessed"), joined(0, 1), selectors.DefaultSelector(), None)
        close(job.sentinel())


def begin(job: Job, nonce: str = "mine", version: int = VERSION) -> tuple[socket.socket, channel.Challenge]:
    """Connect, and return the coordinator's challenge."""
    made = job.stranger()
    send_now(made, channel.Hello(nonce=nonce, version=version))  # without a proof, e.g. of an earlier version
    challenge = receive_now(made)
    assert isinstance(challenge, channel.Challenge)
    return made, challenge


def test_a_proof_serves_on_its_own_connection_in_its_own_direction_only():
    with Job(1) as job:
        token = job.offer.token
        one, challenge = begin(job)
        assert challenge.proof == channel.proof_of(token, "coordinator", "mine", challenge.nonce)
        assert token not in challenge.proof + challenge.nonce
        send_now(one, channel.Proof(proof=challenge.proof))  # the coordinator's own, sent back
        assert is_closed(one)
        two, other = begin(job)
        assert other.nonce != challenge.nonce
        send_now(two, channel.Proof(proof=channel.proof_of(token, "sentinel", "mine", challenge.nonce)))  # replayed
        assert is_closed(two)
        three = job.stranger()
        send_now(three, channel.Proof(proof=channel.proof_of(token, "sentinel", "", "")))  # without a challenge
        assert is_closed(three)
        four, _ = begin(job)
        send_now(four, joined(0, 1))  # without a proof
        assert is_closed(four)
        five, last = begin(job)
        send_now(five, channel.Proof(proof=channel.proof_of(token, "sentinel", "mine", last.nonce)))
        send_now(five, Status())  # neither Joined nor a proof
        assert is_closed(five)
        assert not job.coordinator.members
        six, last = begin(job)
        send_now(six, channel.Proof(proof=channel.proof_of(token, "sentinel", "mine", last.nonce)))
        send_now(six, joined(0, 1))
        assert type(receive_now(six)).__name__ == "Welcome"
        six.close()


def test_another_version_is_not_let_in():
    with Job(1) as job:
        made, challenge = begin(job, version=VERSION + 1)
        send_now(made, channel.Proof(proof=channel.proof_of(job.offer.token, "sentinel", "mine", challenge.nonce)))
        send_now(made, joined(0, 1))
        why = f"its watchdog has version {VERSION}, this one {VERSION + 1}; use the same hvdkit on all hosts"
        assert receive_now(made) == Refused(why=why)
        assert is_closed(made) and not job.coordinator.members


def test_a_sentinel_that_joins_again_on_its_connection_counts_as_lost():
    with Job(2) as job:
        for rank, first in enumerate((Status(), Exited(code=0))):
            again = job.sentinel(rank, 2)
            again.send(first)
            again.send(joined(rank, 2))
            again.socket.setblocking(True)
            again.socket.settimeout(WAIT)
            with contextlib.suppress(ConnectionResetError):
                while again.socket.recv(1 << 16):
                    pass
            close(again)
        assert job.coordinator.members[0].lost_at is not None and job.coordinator.members[1].exited == Exited(code=0)


@pytest.mark.parametrize("proof", ["guessed", "", "\ud800", "é" * 100])
def test_a_sentinel_says_nothing_of_worth_to_a_process_that_is_not_the_coordinator(proof):
    heard = bytearray()
    with socket.create_server((LOCAL, 0)) as stranger:

        def serve() -> None:
            made, _ = stranger.accept()
            with made:
                send_now(made, channel.Challenge(nonce="1", proof=proof))
                made.settimeout(WAIT)
                with contextlib.suppress(OSError):
                    while data := made.recv(1 << 16):
                        heard.extend(data)

        server = threading.Thread(target=serve)
        server.start()
        offer = Offer((LOCAL,), stranger.getsockname()[1], "the token")
        with pytest.raises(OSError, match="does not know the job's token"):
            connect(offer, joined(1, 2), selectors.DefaultSelector(), None)
        server.join()
    assert b"_Hello" in heard and b"token" not in heard and b"host-" not in heard


def test_an_address_that_leads_elsewhere_is_passed_over():
    """For example a bridge's, which is the same on every host."""
    with Job(1) as job, socket.create_server(("127.0.0.9", job.port)) as other:
        thread = threading.Thread(target=lambda: other.accept()[0].close())
        thread.start()
        offer = Offer(("127.0.0.8", "127.0.0.9", LOCAL), job.port, job.offer.token)
        selector = selectors.DefaultSelector()
        close(connect(offer, joined(0, 1), selector, selector)[0])
        thread.join()


def test_an_offer_is_what_it_was_after_a_variable():
    offer = Offer(("10.0.0.1", "fd00::1"), 3, "abc")
    assert Offer.parse(str(offer)) == offer
    for wrong in ("", "3", "x token a"):
        with pytest.raises(ValueError, match=r"values|invalid"):
            Offer.parse(wrong)


# ---- strangers ----------------------------------------------------------------------------------------------------

GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": b"\0" * 100,
    "a frame that is too long": HEADER.pack(0, 4097) + b"x" * 4097,
    "a frame of 4 GB": HEADER.pack(0, 0xFFFFFFFF),
    "output before the proof": HEADER.pack(STDOUT, 3) + b"abc",
    "no JSON": HEADER.pack(0, 4) + b"\xff\xfe{}",
    "nested": HEADER.pack(0, 4000) + b"[" * 4000,
    "a list": HEADER.pack(0, 2) + b"[]",
    "an order": HEADER.pack(0, len(End(code=1).encode())) + End(code=1).encode(),
    "a lone surrogate": HEADER.pack(0, 48) + b'{"kind": "_Hello", "nonce": 3, "version": 1}    ',
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_stranger_that_sends_garbage_is_refused_and_ends_nothing(what):
    with Job(1) as job:
        with job.stranger() as stranger:
            stranger.sendall(GARBAGE[what])
            assert is_closed(stranger)
        sentinel = job.sentinel()
        assert job.coordinator.verdict is None
        close(sentinel)


def test_a_nonce_that_is_not_text_for_other_programs_harms_nothing():
    with Job(1) as job:
        made, _ = begin(job, nonce="\ud800\n\0" + "x" * 1000)
        send_now(made, channel.Proof(proof="\ud800"))
        assert is_closed(made)
        close(job.sentinel())


def test_a_sentinel_that_sends_garbage_later_counts_as_lost():
    with Job(1) as job:
        sentinel = job.sentinel()
        sentinel.socket.setblocking(True)
        sentinel.socket.sendall(b"\0\xff\xff\xff\xff")
        wait_until(lambda: job.coordinator.members[0].lost_at is not None)
        close(sentinel)


def test_half_a_message_is_waited_for_and_whole_ones_are_read_in_any_pieces():
    with Job(1) as job:
        half = job.stranger()
        half.sendall(HEADER.pack(0, 100) + b'{"kind"')
        sentinel = job.sentinel()
        payload = Status(step=5).encode()
        sentinel.socket.setblocking(True)
        for byte in HEADER.pack(0, len(payload)) + payload:
            sentinel.socket.sendall(bytes([byte]))
            time.sleep(0.001)
        wait_until(lambda: job.coordinator.members[0].status.step == 5)
        half.close()
        close(sentinel)


def test_a_flood_of_silent_strangers_does_not_keep_a_sentinel_out():
    with Job(1) as job:
        silent = [job.stranger() for _ in range(300)]
        sentinel = job.sentinel()
        assert len(job.coordinator.server._unauthenticated) <= admission._MAX_UNAUTHENTICATED + 1
        more = [job.stranger() for _ in range(300)]
        sentinel.send(Status(step=1))
        wait_until(lambda: job.coordinator.members[0].status.step == 1)
        assert job.coordinator.verdict is None
        for one in (*silent, *more):
            one.close()
        close(sentinel)


ATTACK = """
import socket, sys
port, hello = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
open_ones = []
print("attacks", flush=True)
while True:
    try:
        made = socket.create_connection(("127.0.0.1", port), 1.0)
        made.sendall(hello)
        open_ones.append(made)
    except OSError:
        pass
    if len(open_ones) > 200:
        open_ones.pop(0).close()
"""


@pytest.mark.full
@pytest.mark.parametrize("hello", [b"", channel._frame(channel.Hello(nonce="mine", version=VERSION, proof="guessed"))])
def test_programs_without_the_token_that_keep_connecting_do_not_keep_sentinels_out(hello):
    """For example processes of another user of this host, before and while the job starts."""
    with Job(8) as job, contextlib.ExitStack() as stack:
        for _ in range(2):
            command = [sys.executable, "-IS", "-c", ATTACK, str(job.port), hello.hex()]
            attack = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(attack.kill)
            assert attack.stdout.readline() == b"attacks\n"
        for rank in range(8):
            sentinel = job.sentinel(rank, 8)
            sentinel.send(Status(step=rank))
            wait_until(lambda rank=rank: job.coordinator.members[rank].status.step == rank)
            stack.callback(close, sentinel)
        assert job.coordinator.verdict is None


def test_a_sentinel_in_its_handshake_is_never_closed_in_favour_of_others():
    with Job(1) as job:
        made = job.stranger()
        token = job.offer.token
        send_now(made, channel.Hello(nonce="mine", version=VERSION, proof=channel.proof_of(token, "hello", "mine")))
        challenge = receive_now(made)
        strangers = [job.stranger() for _ in range(300)]
        wait_until(lambda: len(job.coordinator.server._unauthenticated) > admission._MAX_UNAUTHENTICATED)
        wait_until(lambda: is_closed(strangers[0]))
        send_now(made, channel.Proof(proof=channel.proof_of(token, "sentinel", "mine", challenge.nonce)))
        send_now(made, joined(0, 1))
        assert type(receive_now(made)).__name__ == "Welcome"
        for one in (made, *strangers):
            one.close()


def test_a_sentinel_whose_connection_is_reset_connects_again():
    with Job(1) as job:
        admit, admitted = job.coordinator.server.admit, []

        def admit_later(listener):
            before = set(job.coordinator.server._unauthenticated)
            admit(listener)
            for peer in {*job.coordinator.server._unauthenticated, *job.coordinator.server._joining} - before:
                admitted.append(peer)
                if len(admitted) < 4:
                    job.coordinator.server.drop(peer)

        job.coordinator.server.admit = admit_later
        close(job.sentinel())
        assert len(admitted) == 4


def test_strangers_that_stay_silent_are_closed_after_a_while_but_not_for_our_own_stop():
    selector = selectors.DefaultSelector()
    (listener,) = listen([LOCAL])
    server = Server(selector, [listener], "the token", 2)
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    wait_until(lambda: (server.admit(listener), len(server._unauthenticated) == 3)[1])
    now = time.monotonic()
    server.close_unauthenticated(now + 9)
    assert len(server._unauthenticated) == 3
    server.extend_deadlines(60.0)
    server.close_unauthenticated(now + 60)
    assert len(server._unauthenticated) == 3
    server.close_unauthenticated(now + 71)
    assert not server._unauthenticated and all(is_closed(one) for one in strangers)
    server.close()
    selector.close()


FLOOD = """
import socket, sys, time
made = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(60)]
print("connected", flush=True)
time.sleep(1000)
"""


def test_without_a_file_left_the_coordinator_goes_on_and_lets_sentinels_in_later():
    """With a limit of 256 files, almost all in use."""
    with Job(1) as job:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = []
        flood = subprocess.Popen([sys.executable, "-c", FLOOD, str(job.port)], stdout=subprocess.PIPE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
            with contextlib.suppress(OSError):
                while True:
                    files.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(20):
                os.close(files.pop())
            assert flood.stdout.readline() == b"connected\n"
            wait_until(lambda: len(job.coordinator.server._unauthenticated) >= 19)
            turned = threading.Event()
            job.calls.put(lambda: job.calls.put(turned.set))  # set at the end of two whole turns
            assert turned.wait(WAIT) and job._thread.is_alive() and job.coordinator.verdict is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for file in files:
                os.close(file)
            flood.kill()
            flood.wait()
            flood.stdout.close()
        close(job.sentinel())


def test_files_are_allowed_for_each_rank():
    here = psutil.Process()
    before = here.rlimit(psutil.RLIMIT_NOFILE)
    try:
        here.rlimit(psutil.RLIMIT_NOFILE, (256, before[1]))
        allow_files(1000)
        assert here.rlimit(psutil.RLIMIT_NOFILE)[0] >= 1000 + 512
    finally:
        here.rlimit(psutil.RLIMIT_NOFILE, before)


# ---- sending ------------------------------------------------------------------------------------------------------


def test_what_a_slow_reader_does_not_take_is_kept_and_sent_later():
    ours, theirs = socket.socketpair()
    selector = selectors.DefaultSelector()
    sender = Connection(ours, selector, "sender")
    data, count = b"x" * 100_000, 50
    for number in range(count):
        sender.send(Output(STDOUT, data + bytes([number])))
        sender.send(Status(step=number))
    assert 0 < sender.unsent <= count * (len(data) + 200)
    found: list[Message | Output] = []
    reads = selectors.DefaultSelector()
    receiver = Connection(theirs, reads)
    while len(found) < 2 * count:
        for _, events in selector.select(0):
            if events & selectors.EVENT_WRITE:
                sender.flush()
        found += receiver.receive()
    assert sender.unsent == 0 and [events for _, events in selector.select(0)] == []
    assert found == [each for n in range(count) for each in (Output(STDOUT, data + bytes([n])), Status(step=n))]
    ours.close()
    assert list(selector.get_map())
    with pytest.raises(Closed):
        list(receiver.receive())
    receiver.close()
    receiver.close()  # a second close is harmless
    reads.close()
    selector.close()


def test_what_is_sent_to_an_end_that_is_gone_is_dropped():
    ours, theirs = socket.socketpair()
    selector = selectors.DefaultSelector()
    sender = Connection(ours, selector)
    theirs.close()
    for _ in range(3):
        sender.send(Output(STDOUT, b"x" * 1_000_000))
    assert sender.unsent == 0
    with pytest.raises(Closed):
        list(sender.receive())
    sender.close()
    sender.send(Status())
    assert sender.unsent == 0
    selector.close()


def test_what_came_before_the_end_of_a_connection_is_read():
    ours, theirs = socket.socketpair()
    selector = selectors.DefaultSelector()
    receiver = Connection(ours, selector)
    for number in range(3):
        send_now(theirs, Status(step=number))
    theirs.sendall(b"\0\0")
    theirs.close()
    found = []
    with pytest.raises(Closed):
        for _ in range(2):
            for message in receiver.receive():
                found.append(message)
    assert found == [Status(step=number) for number in range(3)]
    receiver.close()
    selector.close()


def test_a_connection_on_this_host_is_not_cut_off():
    with Job(1) as job:
        sentinel = job.sentinel()
        assert not sentinel.is_cut_off(0.0)
        close(sentinel)
    ours, theirs = socket.socketpair()
    selector = selectors.DefaultSelector()
    assert not Connection(ours, selector).is_cut_off(0.0)
    for one in (ours, theirs, selector):
        one.close()


def test_what_was_sent_a_moment_ago_after_a_pause_does_not_look_cut_off():
    """A sentinel that was stopped, or got no core, for longer than the limit goes on: nothing has failed."""
    with socket.create_server((LOCAL, 0)) as listener, selectors.DefaultSelector() as selector:
        sentinel = Connection(socket.create_connection(listener.getsockname()), selector)
        with listener.accept()[0] as coordinator:
            for _ in range(2):  # a conversation; after it, the kernel acknowledges with the next answer, or 40 ms later
                sentinel.send(Status())
                coordinator.recv(1 << 16)
                coordinator.sendall(b"x")
                sentinel.socket.setblocking(True)
                sentinel.socket.recv(1)
            coordinator.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            sentinel.socket.setblocking(False)
            time.sleep(1.0)
            sentinel.send(Status())
            assert not sentinel.is_cut_off(0.5)
        sentinel.close()


# ---- many sentinels -----------------------------------------------------------------------------------------------


def test_hundreds_of_sentinels_connect_and_report():
    size = 300
    allow_files(3 * size)
    with Job(size) as job:
        ends = [job.sentinel(rank, size) for rank in range(size)]
        for rank, end in enumerate(ends):
            end.send(Training(pid=1, waiters=[]))
            end.send(Output(STDOUT, b"hello\n"))
            end.send(Status(step=rank))
        members = job.coordinator.members
        wait_until(lambda: len(job.output) == size and all(one.status.step is not None for one in [*members.values()]))
        assert all(one.is_training for one in members.values())
        assert all(one.joined == joined(rank, size) for rank, one in members.items())
        assert job.output == {(rank, b"hello\n"): 1 for rank in range(size)}
        assert [members[rank].status.step for rank in range(size)] == list(range(size))
        ends[7].send(Failed(cause="ValueError: the disk is full", step=3, text="its traceback"))
        for rank in range(8, 108):
            ends[rank].send(Failed(cause="HorovodInternalError: x", follows=True))
        orders = []
        for end in ends:
            end.socket.setblocking(True)
            end.socket.settimeout(WAIT)
            assert receive_now(end.socket) == GiveFlight(most=50_000 // size)
            orders.append(receive_now(end.socket))
            send_now(end.socket, Unwound())
        line = "rank 7 on host-0 failed at step 3: ValueError: the disk is full"
        assert orders == [End(code=1, unwind=3.0, line=line)] * size
        wait_until(lambda: len(job.lines) == 2)
        assert job.lines[-1] == f"hvdkit: {line}"
        for end in ends:
            send_now(end.socket, Exited(code=1))
        wait_until(lambda: job.coordinator.over)
        for end in ends:
            close(end)


def test_a_sentinel_that_was_killed_is_replaced():
    with Job(2) as job:
        ends = [job.sentinel(rank, 2) for rank in range(2)]
        for _ in range(3):
            close(ends[1])
            wait_until(lambda: job.coordinator.members[1].lost_at is not None)
            ends[1] = job.sentinel(1, 2)
            ends[1].send(Training(pid=1, waiters=[]))
        assert job.coordinator.members[1].is_running and job.coordinator.verdict is None
        for end in ends:
            end.send(Leaving())
            end.send(Exited(code=0))
        wait_until(lambda: job.coordinator.over)
        assert job.coordinator.judge().code == 0
        for end in ends:
            close(end)


@pytest.mark.full
def test_a_sentinel_waits_for_that_of_rank_0_to_be_replaced_while_its_port_is_open(monkeypatch):
    """On a busy host, the new sentinel of rank 0 starts late. Before, the others ended a healthy job after 5 s."""
    monkeypatch.setattr(watching, "_RECONNECT_SECONDS", 1.0)
    with subprocess.Popen(["sleep", "1000"]) as rank, socket.socketpair()[0] as ours:
        try:
            made = watching.WatchingSentinel(rank.pid, 0, ours)
            with Job(2) as job:
                made.join(connect_of(job), joined(1, 2))
                made.rank.training = Training(pid=rank.pid)
            made.uplink.close()
            made.uplink = None
            again = Job(2)
            offer = connect_of(again)
            made._connect = offer
            made._connect_again = partial(connect, Offer.parse(offer.offer), joined(1, 2), made.selector, "uplink")
            later = threading.Timer(3.0, again.__enter__)  # there is no answer until then
            later.start()
            made.handle_disconnect(is_cut_off=False)
            assert made.uplink is not None and rank.poll() is None
            wait_until(lambda: 1 in again.coordinator.members and again.coordinator.members[1].is_training)
            began = time.monotonic()
            made._connect_again = partial(connect, replace(again.offer, port=1), joined(1, 2), made.selector, "uplink")
            made.handle_disconnect(is_cut_off=False)  # rank 0 is gone, so no process listens
            assert rank.wait(WAIT) == -signal.SIGTERM and time.monotonic() - began < WAIT
        finally:
            rank.kill()
            later.join()
            again.__exit__()
            made.selector.close()


@pytest.mark.full
def test_a_rank_that_could_not_join_is_watched_once_it_can(monkeypatch, capfd):
    """Programs without the token may use up the connections of rank 0 for a while."""
    for module, name in ((watching, "_JOIN_AGAIN_SECONDS"), (watching, "_WARN_SECONDS"), (channel, "_WELCOME_SECONDS")):
        monkeypatch.setattr(module, name, 0.5)
    with subprocess.Popen(["sleep", "1000"]) as rank, socket.socketpair()[0] as ours:
        made = watching.WatchingSentinel(rank.pid, 0, ours)
        try:
            with Job(2) as job:
                offer = str(replace(job.offer, port=1))
                made.join(replace(connect_of(job), offer=offer), joined(1, 2))
                made.rank.training = Training(pid=rank.pid)
                wait_until(lambda: made.turn(0.1) or "cannot reach rank 0" in capfd.readouterr().err)
                assert made.uplink is None
                made._connect_again = partial(connect, job.offer, joined(1, 2), made.selector, "uplink")
                wait_until(lambda: made.turn(0.1) or made.uplink is not None)
                wait_until(lambda: 1 in job.coordinator.members and job.coordinator.members[1].is_training)
        finally:
            rank.kill()
            made.selector.close()


def test_a_sentinel_writes_lines_of_the_coordinator_to_the_standard_error_of_its_rank(capfd):
    with subprocess.Popen(["sleep", "1000"]) as rank, socket.socketpair()[0] as ours:
        made = watching.WatchingSentinel(rank.pid, 0, ours)
        try:
            with Job(2) as job:
                made.join(connect_of(job), joined(1, 2))
                wait_until(lambda: 1 in job.coordinator.members)
                job.calls.put(lambda: job.coordinator.members[1].send(WriteLine(text="[rank 1] waits")))
                wait_until(lambda: made.turn(0.1) or "[rank 1] waits\n" in capfd.readouterr().err)
        finally:
            rank.kill()
            made.selector.close()


def connect_of(job: Job) -> Connect:
    return Connect(rank=1, size=2, host="host-0", offer=str(job.offer), chief_host="host-0", speaks=False)


# ---- sentinels of hvdkit run --------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(program: str, **limits: float):
    """Run the shell code ``program`` as the only rank of an ``hvdkit run`` sentinel; yield the job and its member."""
    with Job(1, program=program, **limits) as job:
        variables = {**os.environ, RUN_VARIABLE: str(job.offer)}
        process = subprocess.Popen([sys.executable, "-IS", sentinel.PATH, "run"], env=variables)
        try:
            wait_until(lambda: 0 in job.coordinator.members)
            yield job, job.coordinator.members[0]
            job.calls.put(job.coordinator.release)
            process.wait(WAIT)
        finally:
            process.kill()
            process.wait()


def test_the_end_of_a_rank_is_reported_though_a_child_process_keeps_writing():
    with running("while :; do echo loading; sleep 0.02; done & echo begun; kill -SEGV $$") as (job, member):
        wait_until(lambda: member.exited is not None)
        assert member.exited.code == -signal.SIGSEGV
        assert any(b"begun" in data for _, data in job.output)


def test_a_line_of_the_coordinator_is_output_of_the_rank_and_begins_at_the_start_of_a_line():
    """So hvdkit run writes it once, and to the rank's log."""
    with running("printf half >&2; exec sleep 1000") as (job, member):
        wait_until(lambda: job.output[0, b"half"])
        for _ in range(2):
            job.calls.put(lambda: member.send(WriteLine(text="[rank 0] waits")))
        wait_until(lambda: sum(job.output.values()) == 3)
        assert job.output == {(0, b"half"): 1, (0, b"\n[rank 0] waits\n"): 1, (0, b"[rank 0] waits\n"): 1}
        job.calls.put(lambda: member.send(End(code=1)))
        wait_until(lambda: member.exited is not None)


def test_what_child_processes_write_after_the_end_of_the_rank_is_read():
    """As with ``exec > >(tee log)`` in a script: tee ends after the shell."""
    # The second one computes for longer than the sentinel waits for silent ones, as if it waited for a core.
    now = "$(($(date +%s%N) / 1000000))"
    computes = f"end=$(({now} + 600)); while [ {now} -lt $end ]; do :; done"
    for before in ("sleep 0.1", computes):
        with running(f"({before}; echo last) & exit 0") as (job, member):
            wait_until(lambda: member.exited is not None)
            assert job.output == {(0, b"last\n"): 1}, before


@pytest.mark.nightly
def test_nothing_is_reported_of_a_process_that_has_ended():
    with running("exit 3", heartbeat=1.0) as (job, _):
        wait_until(lambda: job.coordinator.over)
        before = job.coordinator.messages
        time.sleep(2.0)
        assert job.coordinator.messages == before


# ---- addresses of the coordinator ---------------------------------------------------------------------------------

NAMES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include", "HOROVOD_IFACE", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def no_names(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@contextlib.contextmanager
def listening(addresses):
    sockets = listen(addresses)
    yield sockets
    for one in sockets:
        one.close()


def accepts(sockets: list[socket.socket], address: str) -> bool:
    """Return whether the listeners get a connection to ``address``; another process may listen at their port, too."""
    try:
        with socket.create_connection((address, sockets[0].getsockname()[1]), timeout=2) as mine:
            for server in select.select(sockets, [], [], 2)[0]:
                with server.accept()[0] as theirs:
                    return theirs.getpeername()[1] == mine.getsockname()[1]
    except OSError:
        pass
    return False


def test_several_addresses_share_one_port_and_no_other_is_listened_at():
    addresses = ["127.0.0.2", "127.0.0.3", *(one.address for one in interfaces.own_addresses())]
    with listening(addresses) as sockets:
        assert len({one.getsockname()[1] for one in sockets}) == 1 and len(sockets) == len(addresses)
        assert all(accepts(sockets, address) for address in addresses)
        assert not accepts(sockets, "127.0.0.4")


def test_an_address_that_is_not_of_this_host_is_an_error():
    with pytest.raises(OSError):
        listen([LOCAL, "192.0.2.1"])


@pytest.mark.parametrize("variable", NAMES)
def test_rank_0_listens_on_the_named_interface_only(no_names, variable):
    """Each interface that is up on this host, by its name; connections stay on the host."""
    every = interfaces.own_addresses()
    for name in {one.interface for one in every}:
        no_names.setenv(variable, name)
        own = {one.address for one in every if one.interface == name}
        addresses, warning = interfaces.chosen_addresses()
        assert set(addresses) == own and warning is None
        with listening(addresses) as sockets:
            assert {one.address for one in every if accepts(sockets, one.address)} == own


def test_rank_0_listens_in_the_named_subnet_only(no_names):
    no_names.setenv("HOROVOD_IFACE", "127.0.0.0/8")
    addresses, _ = interfaces.chosen_addresses()
    assert addresses == [LOCAL]
    with listening(addresses) as sockets:
        others = [one.address for one in interfaces.own_addresses() if one.address != LOCAL]
        assert accepts(sockets, LOCAL) and not any(accepts(sockets, address) for address in others)


def test_without_names_rank_0_listens_everywhere_and_offers_what_others_can_reach(no_names):
    addresses, warning = interfaces.chosen_addresses()
    assert addresses == [] and warning is None
    assert set(interfaces.reachable_addresses()) == {o.address for o in interfaces.own_addresses() if o.is_routable}
    with listening(addresses) as sockets:
        assert accepts(sockets, LOCAL)


def test_a_name_that_this_host_does_not_have_is_warned_about(no_names):
    no_names.setenv("HOROVOD_GLOO_IFACE", "nowhere9")
    addresses, warning = interfaces.chosen_addresses()
    assert addresses == [] and "HOROVOD_GLOO_IFACE=nowhere9" in warning and "listens on all" in warning


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
    found = interfaces.network_choice(environment)
    assert [name for name, address in here.items() if found.allows(interfaces.Address(name, address))] == allowed


@pytest.mark.nightly
def test_a_reader_that_pauses_is_not_cut_off():
    """The kernel probes at growing intervals whether it reads again; no packets are acknowledged in between."""
    listener = listen(["127.0.0.1"])[0]
    ours, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
    selector = selectors.DefaultSelector()
    sender = Connection(ours, selector)
    for _ in range(200):
        sender.send(Output(STDOUT, b"x" * (1 << 16)))
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        assert sender.unsent and not sender.is_cut_off(0.3)
        time.sleep(0.02)
    for one in (ours, theirs, listener, selector):
        one.close()
