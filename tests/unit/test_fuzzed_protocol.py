"""Random bytes and messages for the coordinator: from programs without the token, and from sentinels that have joined.

No process without the token gets in, no message raises an error in the coordinator, and sentinels can still join.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest
from helpers.coordinating import HEADER, Job, joined
from helpers.forged import bounded_memory
from helpers.fuzzing import CHANGES, JSON, changed, examples
from hypothesis import example, given
from hypothesis import strategies as st

from hvdkit.watchdog import channel
from hvdkit.watchdog.admission import Peer
from hvdkit.watchdog.channel import MESSAGE, Connection
from hvdkit.watchdog.events import VERSION, Message, Status, Training, Welcome, decode

KINDS = sorted(Message.kinds)
FIELDS = sorted({field for kind in Message.kinds.values() for field in getattr(kind, "__dataclass_fields__", ())})
TEXT = st.text(max_size=8) | st.just("\ud800") | st.just("x" * 5000)


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """Draw a message with random fields, or one that is valid with a few that are not."""
    kind = draw(st.sampled_from(KINDS))
    own = sorted(getattr(Message.kinds[kind], "__dataclass_fields__", {}))
    names = draw(st.sets(st.sampled_from(own or FIELDS)) | st.just({*own}))
    values = JSON | TEXT | st.integers(-1, 3) | st.floats(allow_nan=True)
    fields = {name: draw(values) for name in sorted(names)}
    return json.dumps({"kind": kind, **fields}).encode()


FRAMES = st.builds(
    lambda kind, data, claimed: HEADER.pack(kind, len(data) if claimed is None else claimed) + data,
    st.just(MESSAGE) | st.integers(0, 255),
    payloads() | st.binary(max_size=40),
    st.none() | st.integers(0, 2**32 - 1),
)
HELLO = channel._frame(channel.Hello(nonce="mine", version=VERSION, proof="guessed"))


@pytest.fixture
def flights(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HVDKIT_FLIGHT_DIR", str(tmp_path))


def served(job: Job, data: bytes) -> bool:
    """Send ``data`` to the coordinator as a program without the token does; return whether it was closed."""
    ours, theirs = socket.socketpair()
    peer = Peer(time.monotonic())
    peer.connection = Connection(theirs, job.selector, peer)
    peer.connection.longest = channel.LONGEST_BEFORE_PROOF
    job.coordinator.server._unauthenticated[peer] = None
    with ours, contextlib.suppress(BlockingIOError):
        ours.setblocking(False)
        ours.send(data)
    for _ in range(3):
        job.turn(0)
    is_closed = not peer.connection.is_open
    job.coordinator.server.drop(peer)
    return is_closed


@examples(60)
@given(st.lists(FRAMES, max_size=4), CHANGES, st.booleans())
@example([HELLO, HELLO], [(10**6, 0, b"")], False)
@example([HEADER.pack(0, 60) + b'{"kind": "_Hello", "nonce": "\\ud800", "version": 1e999}     '], [(0, 0, b"")], False)
def test_no_bytes_of_a_program_without_the_token_get_in(flights, frames, changes, begins):
    data = changed(b"".join([HELLO] * begins + frames), changes)
    job = Job(2)
    try:
        with bounded_memory():
            assert served(job, data)
            assert not job.coordinator.members and job.coordinator.verdict is None
        assert not job.coordinator.server._unauthenticated and not job.coordinator.server._joining
    finally:
        job.coordinator.close()
        job.selector.close()


@examples(60)
@given(st.lists(payloads(), max_size=5))
@example([b'{"kind": "Exited", "code": 1000000000000000000000000000000}'])
def test_no_message_of_a_rank_raises_an_error_in_the_coordinator(flights, messages):
    """A rank's child processes can write to its sentinel, which passes on what it reads."""
    job = Job(2, heartbeat=1.0, patience=1.0, unwind=0.0)
    try:
        now = time.monotonic()
        members = [job.coordinator.join(joined(rank, 2), lambda order: None) for rank in (0, 1)]
        job.coordinator.handle(members[1], Training(pid=1), now)
        with bounded_memory():
            for payload in messages:
                try:
                    message = decode(payload)
                except ValueError:
                    continue
                job.coordinator.handle(members[0], message, now)
            job.coordinator.handle(members[1], Status(step=1), now)
            for later in (0.1, 0.5, 1.0, 2.0, 20.0):
                job.coordinator.pause(now + later)
                job.coordinator.tick(now + later)
            job.coordinator.judge()
    finally:
        job.coordinator.close()
        job.selector.close()


@examples(60)
@given(st.lists(FRAMES, max_size=3))
@example([channel._frame(Welcome(heartbeat=1.0, interval=1.0))])
def test_no_server_without_the_token_is_taken_for_the_coordinator(frames):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(frames))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError), bounded_memory():
            channel._authenticate(ours, "the-token", joined(0, 1))
